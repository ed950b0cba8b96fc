// AVX2 path: 8 lanes.
#include "hostupdate.h"

#if defined(__x86_64__) && defined(__GNUC__)
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2"))), apply_to = function)
#else
#pragma GCC target("avx2")
#endif
#include <immintrin.h>

#include "kernel.h"

namespace hostupdate {
namespace {

struct Avx2 {
  using F = __m256;
  using I = __m256i;
  static constexpr int kLanes = 8;
  static inline F set(float x) { return _mm256_set1_ps(x); }
  static inline I set_int(int32_t x) { return _mm256_set1_epi32(x); }
  static inline F load(const float* p) { return _mm256_load_ps(p); }
  static inline void store(float* p, F x) { _mm256_store_ps(p, x); }
  static inline I load_u8(const uint8_t* p) {
    return _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
  }
  static inline I load_s8(const int8_t* p) {
    return _mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
  }
  // Unpacking works inside 128-bit halves: with the middle quarters exchanged first, the lower parts
  // of both halves are words 0-7.
  static inline I load_words(const void* p) {
    return _mm256_permute4x64_epi64(_mm256_load_si256(static_cast<const I*>(p)), 0xD8);
  }
  static inline void store_words(void* p, I x) {
    _mm256_store_si256(static_cast<I*>(p), _mm256_permute4x64_epi64(x, 0xD8));
  }
  static inline void load_high16(const uint16_t* p, F out[2]) {
    const I values = load_words(p);
    out[0] = as_float(_mm256_unpacklo_epi16(_mm256_setzero_si256(), values));
    out[1] = as_float(_mm256_unpackhi_epi16(_mm256_setzero_si256(), values));
  }
  static inline void load_master(const uint16_t* hi, const int16_t* lo, F out[2]) {
    // With its sign flipped, lo + 0x8000 fills the lower half without touching the upper one.
    const I low = _mm256_xor_si256(load_words(lo), _mm256_set1_epi16(static_cast<int16_t>(0x8000)));
    const I high = load_words(hi);
    out[0] = as_float(sub(_mm256_unpacklo_epi16(low, high), set_int(0x8000)));
    out[1] = as_float(sub(_mm256_unpackhi_epi16(low, high), set_int(0x8000)));
  }
  static inline void store_high16(uint16_t* p, const I x[2]) {
    store_words(p, _mm256_packus_epi32(shift_right<16>(x[0]), shift_right<16>(x[1])));
  }
  static inline void store_low16(int16_t* p, const I x[2]) {
    const I zero = _mm256_setzero_si256();
    store_words(p, _mm256_packus_epi32(_mm256_blend_epi16(x[0], zero, 0xAA), _mm256_blend_epi16(x[1], zero, 0xAA)));
  }
  // Packing leaves half H of vector k at 32-bit place 4 H + k.
  static inline I in_order(I packed) {
    return _mm256_permutevar8x32_epi32(packed, _mm256_set_epi32(7, 3, 6, 2, 5, 1, 4, 0));
  }
  static inline void store_s8(int8_t* p, const I x[4]) {
    const I packed = _mm256_packs_epi16(_mm256_packs_epi32(x[0], x[1]), _mm256_packs_epi32(x[2], x[3]));
    _mm256_store_si256(reinterpret_cast<I*>(p), in_order(packed));
  }
  static inline void store_u8(uint8_t* p, const I x[4]) {
    const I packed = _mm256_packus_epi16(_mm256_packs_epi32(x[0], x[1]), _mm256_packs_epi32(x[2], x[3]));
    _mm256_store_si256(reinterpret_cast<I*>(p), in_order(packed));
  }
  static inline F with_sign_of(F magnitude, F sign) {
    return _mm256_or_ps(magnitude, _mm256_and_ps(sign, _mm256_set1_ps(-0.0f)));
  }
  static inline F add(F a, F b) { return _mm256_add_ps(a, b); }
  static inline F sub(F a, F b) { return _mm256_sub_ps(a, b); }
  static inline F mul(F a, F b) { return _mm256_mul_ps(a, b); }
  static inline F div(F a, F b) { return _mm256_div_ps(a, b); }
  static inline F min(F a, F b) { return _mm256_min_ps(a, b); }
  static inline F sqrt(F a) { return _mm256_sqrt_ps(a); }
  static inline I add(I a, I b) { return _mm256_add_epi32(a, b); }
  static inline I sub(I a, I b) { return _mm256_sub_epi32(a, b); }
  static inline I max(I a, I b) { return _mm256_max_epi32(a, b); }
  static inline I bit_and(I a, I b) { return _mm256_and_si256(a, b); }
  static inline I bit_or(I a, I b) { return _mm256_or_si256(a, b); }
  template <int kBy>
  static inline I shift_left(I a) { return _mm256_slli_epi32(a, kBy); }
  template <int kBy>
  static inline I shift_right(I a) { return _mm256_srli_epi32(a, kBy); }
  template <int kBy>
  static inline I shift_right_signed(I a) { return _mm256_srai_epi32(a, kBy); }
  static inline F as_float(I a) { return _mm256_castsi256_ps(a); }
  static inline I as_int(F a) { return _mm256_castps_si256(a); }
  static inline F to_float(I a) { return _mm256_cvtepi32_ps(a); }
  static inline I truncate(F a) { return _mm256_cvttps_epi32(a); }
  static inline I zero_where_zero(I x, I test) {
    return _mm256_andnot_si256(_mm256_cmpeq_epi32(test, _mm256_setzero_si256()), x);
  }
  static inline int32_t reduce_max(I a) {
    __m128i x = _mm_max_epi32(_mm256_castsi256_si128(a), _mm256_extracti128_si256(a, 1));
    x = _mm_max_epi32(x, _mm_shuffle_epi32(x, 0x4E));
    x = _mm_max_epi32(x, _mm_shuffle_epi32(x, 0xB1));
    return _mm_cvtsi128_si32(x);
  }
};

}  // namespace

ChunkKernel avx2_kernel() { return &Kernel<Avx2>::run; }

}  // namespace hostupdate
#if defined(__clang__)
#pragma clang attribute pop
#endif
#else
namespace hostupdate {
ChunkKernel avx2_kernel() { return nullptr; }
}  // namespace hostupdate
#endif

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
  static inline I load_u16(const uint16_t* p) {
    return _mm256_cvtepu16_epi32(_mm_load_si128(reinterpret_cast<const __m128i*>(p)));
  }
  static inline I load_s16(const int16_t* p) {
    return _mm256_cvtepi16_epi32(_mm_load_si128(reinterpret_cast<const __m128i*>(p)));
  }
  static inline void store_8(uint8_t* p, I x) {
    // Byte 0 of every lane, gathered inside each half, then the halves side by side.
    const I pick = _mm256_set_epi8(-1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, 12, 8, 4, 0,
                                   -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, 12, 8, 4, 0);
    const I halves = _mm256_shuffle_epi8(x, pick);
    const __m128i packed = _mm_unpacklo_epi32(_mm256_castsi256_si128(halves), _mm256_extracti128_si256(halves, 1));
    _mm_storel_epi64(reinterpret_cast<__m128i*>(p), packed);
  }
  template <class T>
  static inline void store_16(T* p, I x) {
    const I pick = _mm256_set_epi8(-1, -1, -1, -1, -1, -1, -1, -1, 13, 12, 9, 8, 5, 4, 1, 0,
                                   -1, -1, -1, -1, -1, -1, -1, -1, 13, 12, 9, 8, 5, 4, 1, 0);
    const I halves = _mm256_permute4x64_epi64(_mm256_shuffle_epi8(x, pick), 0x08);
    _mm_store_si128(reinterpret_cast<__m128i*>(p), _mm256_castsi256_si128(halves));
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

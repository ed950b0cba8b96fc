// AVX-512 path: 16 lanes.
#include "hostupdate.h"

#if defined(__x86_64__) && defined(__GNUC__)
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512dq,avx512vl"))), apply_to = function)
#else
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl")
#endif
#include <immintrin.h>

#include "kernel.h"

namespace hostupdate {
namespace {

struct Avx512 {
  using F = __m512;
  using I = __m512i;
  static constexpr int kLanes = 16;
  static inline F set(float x) { return _mm512_set1_ps(x); }
  static inline I set_int(int32_t x) { return _mm512_set1_epi32(x); }
  static inline F load(const float* p) { return _mm512_load_ps(p); }
  static inline void store(float* p, F x) { _mm512_store_ps(p, x); }
  static inline I load_u8(const uint8_t* p) {
    return _mm512_cvtepu8_epi32(_mm_load_si128(reinterpret_cast<const __m128i*>(p)));
  }
  static inline I load_s8(const int8_t* p) {
    return _mm512_cvtepi8_epi32(_mm_load_si128(reinterpret_cast<const __m128i*>(p)));
  }
  // 16-bit values move between memory and halves of 32-bit lanes by one permutation of words each;
  // `begin` + step * k names word k.
  static inline I words(int begin, int step) {
    alignas(64) static constexpr auto kCount = [] {
      struct { uint16_t at[32]; } count{};
      for (int k = 0; k < 32; ++k) count.at[k] = static_cast<uint16_t>(k);
      return count;
    }();
    const I count = _mm512_load_si512(kCount.at);
    return _mm512_add_epi16(_mm512_set1_epi16(static_cast<int16_t>(begin)),
                            _mm512_mullo_epi16(count, _mm512_set1_epi16(static_cast<int16_t>(step))));
  }
  // Words 2k = word k of a, 2k + 1 = word k of b, from the first or second half of both.
  static inline I interleave(I a, I b, int half) {
    const I pairs = _mm512_srli_epi16(words(0, 1), 1);
    const I of_b = _mm512_slli_epi16(_mm512_and_si512(words(0, 1), _mm512_set1_epi16(1)), 5);
    const I index = _mm512_add_epi16(_mm512_add_epi16(pairs, of_b), _mm512_set1_epi16(static_cast<int16_t>(16 * half)));
    return _mm512_permutex2var_epi16(a, index, b);
  }
  static inline void load_high16(const uint16_t* p, F out[2]) {
    const I values = _mm512_load_si512(p);
    out[0] = as_float(interleave(_mm512_setzero_si512(), values, 0));
    out[1] = as_float(interleave(_mm512_setzero_si512(), values, 1));
  }
  static inline void load_master(const uint16_t* hi, const int16_t* lo, F out[2]) {
    // With its sign flipped, lo + 0x8000 fills the lower half without touching the upper one.
    const I low = _mm512_xor_si512(_mm512_load_si512(lo), _mm512_set1_epi16(static_cast<int16_t>(0x8000)));
    const I high = _mm512_load_si512(hi);
    out[0] = as_float(sub(interleave(low, high, 0), set_int(0x8000)));
    out[1] = as_float(sub(interleave(low, high, 1), set_int(0x8000)));
  }
  static inline void store_high16(uint16_t* p, const I x[2]) {
    _mm512_store_si512(p, _mm512_permutex2var_epi16(x[0], words(1, 2), x[1]));
  }
  static inline void store_low16(int16_t* p, const I x[2]) {
    _mm512_store_si512(p, _mm512_permutex2var_epi16(x[0], words(0, 2), x[1]));
  }
  // Packing leaves 128-bit lane L of vector k at 32-bit place 4 L + k.
  static inline I in_order(I packed) {
    const I places = _mm512_set_epi32(15, 11, 7, 3, 14, 10, 6, 2, 13, 9, 5, 1, 12, 8, 4, 0);
    return _mm512_permutexvar_epi32(places, packed);
  }
  static inline void store_s8(int8_t* p, const I x[4]) {
    const I packed = _mm512_packs_epi16(_mm512_packs_epi32(x[0], x[1]), _mm512_packs_epi32(x[2], x[3]));
    _mm512_store_si512(p, in_order(packed));
  }
  static inline void store_u8(uint8_t* p, const I x[4]) {
    const I packed = _mm512_packus_epi16(_mm512_packs_epi32(x[0], x[1]), _mm512_packs_epi32(x[2], x[3]));
    _mm512_store_si512(p, in_order(packed));
  }
  static inline F with_sign_of(F magnitude, F sign) {
    const I bit = set_int(static_cast<int32_t>(0x80000000u));
    return as_float(_mm512_ternarylogic_epi32(bit, as_int(sign), as_int(magnitude), 0xCA));
  }
  static inline F add(F a, F b) { return _mm512_add_ps(a, b); }
  static inline F sub(F a, F b) { return _mm512_sub_ps(a, b); }
  static inline F mul(F a, F b) { return _mm512_mul_ps(a, b); }
  static inline F div(F a, F b) { return _mm512_div_ps(a, b); }
  static inline F min(F a, F b) { return _mm512_min_ps(a, b); }
  static inline F sqrt(F a) { return _mm512_sqrt_ps(a); }
  static inline I add(I a, I b) { return _mm512_add_epi32(a, b); }
  static inline I sub(I a, I b) { return _mm512_sub_epi32(a, b); }
  static inline I max(I a, I b) { return _mm512_max_epi32(a, b); }
  static inline I bit_and(I a, I b) { return _mm512_and_si512(a, b); }
  static inline I bit_or(I a, I b) { return _mm512_or_si512(a, b); }
  template <int kBy>
  static inline I shift_left(I a) { return _mm512_slli_epi32(a, kBy); }
  template <int kBy>
  static inline I shift_right(I a) { return _mm512_srli_epi32(a, kBy); }
  template <int kBy>
  static inline I shift_right_signed(I a) { return _mm512_srai_epi32(a, kBy); }
  static inline F as_float(I a) { return _mm512_castsi512_ps(a); }
  static inline I as_int(F a) { return _mm512_castps_si512(a); }
  static inline F to_float(I a) { return _mm512_cvtepi32_ps(a); }
  static inline I truncate(F a) { return _mm512_cvttps_epi32(a); }
  static inline I zero_where_zero(I x, I test) {
    return _mm512_maskz_mov_epi32(_mm512_test_epi32_mask(test, test), x);
  }
  static inline int32_t reduce_max(I a) { return _mm512_reduce_max_epi32(a); }
};

}  // namespace

ChunkKernel avx512_kernel() { return &Kernel<Avx512>::run; }

}  // namespace hostupdate
#if defined(__clang__)
#pragma clang attribute pop
#endif
#else
namespace hostupdate {
ChunkKernel avx512_kernel() { return nullptr; }
}  // namespace hostupdate
#endif

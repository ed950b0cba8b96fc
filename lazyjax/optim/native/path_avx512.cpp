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
  static inline I load_u16(const uint16_t* p) {
    return _mm512_cvtepu16_epi32(_mm256_load_si256(reinterpret_cast<const __m256i*>(p)));
  }
  static inline I load_s16(const int16_t* p) {
    return _mm512_cvtepi16_epi32(_mm256_load_si256(reinterpret_cast<const __m256i*>(p)));
  }
  static inline void store_8(uint8_t* p, I x) {
    _mm_store_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtepi32_epi8(x));
  }
  template <class T>
  static inline void store_16(T* p, I x) {
    _mm256_store_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtepi32_epi16(x));
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

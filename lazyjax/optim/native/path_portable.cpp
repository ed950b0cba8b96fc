// Portable path: the compiler's generic vectors of 4 lanes (SSE2, NEON, or scalars).
#include <cmath>

#include "hostupdate.h"
#include "kernel.h"

namespace hostupdate {
namespace {

struct Portable {
  typedef float F __attribute__((vector_size(16)));
  typedef int32_t I __attribute__((vector_size(16)));
  typedef uint32_t U __attribute__((vector_size(16)));
  static constexpr int kLanes = 4;

  template <class T>
  static inline I widen(const T* p) { return I{p[0], p[1], p[2], p[3]}; }
  template <class T>
  static inline void narrow(T* p, const I* x, int vectors, int shift) {
    for (int j = 0; j < vectors; ++j)
      for (int k = 0; k < kLanes; ++k) p[j * kLanes + k] = static_cast<T>(static_cast<uint32_t>(x[j][k]) >> shift);
  }
  static inline I select(I mask, I a, I b) { return (a & mask) | (b & ~mask); }

  static inline F set(float x) { return F{x, x, x, x}; }
  static inline I set_int(int32_t x) { return I{x, x, x, x}; }
  static inline F load(const float* p) { return *reinterpret_cast<const F*>(p); }
  static inline void store(float* p, F x) { *reinterpret_cast<F*>(p) = x; }
  static inline I load_u8(const uint8_t* p) { return widen(p); }
  static inline I load_s8(const int8_t* p) { return widen(p); }
  static inline void load_high16(const uint16_t* p, F out[2]) {
    for (int j = 0; j < 2; ++j) out[j] = as_float(shift_left<16>(widen(p + j * kLanes)));
  }
  static inline void load_master(const uint16_t* hi, const int16_t* lo, F out[2]) {
    for (int j = 0; j < 2; ++j) {
      out[j] = as_float(add(shift_left<16>(widen(hi + j * kLanes)), widen(lo + j * kLanes)));
    }
  }
  static inline void store_high16(uint16_t* p, const I x[2]) { narrow(p, x, 2, 16); }
  static inline void store_low16(int16_t* p, const I x[2]) { narrow(p, x, 2, 0); }
  static inline void store_s8(int8_t* p, const I x[4]) { narrow(p, x, 4, 0); }
  static inline void store_u8(uint8_t* p, const I x[4]) { narrow(p, x, 4, 0); }
  static inline F with_sign_of(F magnitude, F sign) {
    return (F)((I)magnitude | ((I)sign & set_int(static_cast<int32_t>(0x80000000u))));
  }
  static inline F add(F a, F b) { return a + b; }
  static inline F sub(F a, F b) { return a - b; }
  static inline F mul(F a, F b) { return a * b; }
  static inline F div(F a, F b) { return a / b; }
  static inline F min(F a, F b) { return (F)select(a < b, (I)a, (I)b); }
  static inline F sqrt(F a) {
    F root;
    for (int k = 0; k < kLanes; ++k) root[k] = std::sqrt(a[k]);
    return root;
  }
  // Integer arithmetic wraps; the detour over unsigned keeps that defined.
  static inline I add(I a, I b) { return (I)((U)a + (U)b); }
  static inline I sub(I a, I b) { return (I)((U)a - (U)b); }
  static inline I max(I a, I b) { return select(a > b, a, b); }
  static inline I bit_and(I a, I b) { return a & b; }
  static inline I bit_or(I a, I b) { return a | b; }
  template <int kBy>
  static inline I shift_left(I a) { return (I)((U)a << kBy); }
  template <int kBy>
  static inline I shift_right(I a) { return (I)((U)a >> kBy); }
  template <int kBy>
  static inline I shift_right_signed(I a) { return a >> kBy; }
  static inline F as_float(I a) { return (F)a; }
  static inline I as_int(F a) { return (I)a; }
  static inline F to_float(I a) { return __builtin_convertvector(a, F); }
  static inline I truncate(F a) { return __builtin_convertvector(a, I); }
  static inline I zero_where_zero(I x, I test) { return x & (test != 0); }
  static inline int32_t reduce_max(I a) {
    int32_t largest = a[0];
    for (int k = 1; k < kLanes; ++k) largest = a[k] > largest ? a[k] : largest;
    return largest;
  }
};

}  // namespace

ChunkKernel portable_kernel() { return &Kernel<Portable>::run; }

}  // namespace hostupdate

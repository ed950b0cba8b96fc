// The update of one chunk, written once over a vector type V (see path_*.cpp).
//
// Every path performs the same fp32 operations in the same order, without fused multiply-add, with
// correctly rounded roots and quotients, so that all paths give the same bits. Codes are integer
// arithmetic on the bit patterns of floats; lazyjax/optim/codes.py defines and explains them.
#pragma once
#include "hostupdate.h"

namespace hostupdate {

constexpr int32_t kBits127 = 0x42FE0000;  // bits of 127.0f, the largest code of m
constexpr int32_t kBits255 = 0x437F0000;  // bits of 255.0f, the largest code of v
constexpr int32_t kMinNormal = 0x00800000;
constexpr int kRootM = 2;  // m is stored as the 2^2-th root of its size relative to the block's largest
constexpr int kRootV = 3;  // v likewise with the 2^3-th root

template <class V>
struct Kernel {
  using F = typename V::F;
  using I = typename V::I;

  struct Constants {
    F b1, one_minus_b1, b2, one_minus_b2, step, root_scale, eps, decay_step, gradient_scale;

    explicit Constants(const Scalars& s, bool decay)
        : b1(V::set(s.b1)), one_minus_b1(V::set(s.one_minus_b1)), b2(V::set(s.b2)),
          one_minus_b2(V::set(s.one_minus_b2)), step(V::set(s.step)), root_scale(V::set(s.root_scale)),
          eps(V::set(s.eps)), decay_step(V::set(decay ? s.decay_step : 0.0f)),
          gradient_scale(V::set(s.gradient_scale)) {}
  };

  template <bool kF32>
  static inline F load_gradient(const Slabs& slabs, int64_t i, const Constants& c) {
    F gradient;
    if constexpr (kF32) {
      gradient = V::load(static_cast<const float*>(slabs.gradient) + i);
    } else {
      const I bits = V::load_u16(static_cast<const uint16_t*>(slabs.gradient) + i);
      gradient = V::as_float(V::template shift_left<16>(bits));
    }
    return V::mul(gradient, c.gradient_scale);
  }

  static inline void moments(F gradient, F& m, F& v, const Constants& c) {
    m = V::add(V::mul(c.b1, m), V::mul(c.one_minus_b1, gradient));
    v = V::add(V::mul(c.b2, v), V::mul(V::mul(gradient, gradient), c.one_minus_b2));
  }

  static inline F step_from(F parameter, F m, F v, const Constants& c) {
    const F root = V::add(V::mul(V::sqrt(v), c.root_scale), c.eps);
    const F adam = V::div(V::mul(m, c.step), root);
    return V::sub(parameter, V::add(adam, V::mul(c.decay_step, parameter)));
  }

  static inline void update_split_master(uint16_t* hi, int16_t* lo, F m, F v, const Constants& c) {
    const I high = V::template shift_left<16>(V::load_u16(hi));
    const F master = V::as_float(V::add(high, V::load_s16(lo)));
    const I bits = V::as_int(step_from(master, m, v, c));
    const I rounded = V::template shift_right<16>(V::add(bits, V::set_int(0x8000)));
    V::store_16(hi, rounded);
    V::store_16(lo, V::sub(bits, V::template shift_left<16>(rounded)));
  }

  static inline void update_bf16(uint16_t* hi, F m, F v, const Constants& c) {
    const F parameter = V::as_float(V::template shift_left<16>(V::load_u16(hi)));
    const I bits = V::as_int(step_from(parameter, m, v, c));
    const I odd = V::bit_and(V::template shift_right<16>(bits), V::set_int(1));
    V::store_16(hi, V::template shift_right<16>(V::add(V::add(bits, V::set_int(0x7FFF)), odd)));
  }

  // Magnitude of a code: bits(scale) + 2^kRoot (bits(code) - bits(largest code)); code 0 is zero.
  template <int kRoot>
  static inline I decode_bits(I code, I offset) {
    const I bits = V::add(V::template shift_left<kRoot>(V::as_int(V::to_float(code))), offset);
    return V::zero_where_zero(V::max(bits, V::set_int(kMinNormal)), code);
  }

  template <int kRoot>
  static inline I decode_offset(float scale, int32_t largest_bits) {
    int32_t bits;
    __builtin_memcpy(&bits, &scale, 4);
    return V::set_int(static_cast<int32_t>(static_cast<uint32_t>(bits) -
                                           (static_cast<uint32_t>(largest_bits) << kRoot)));
  }

  template <int kRoot>
  static inline F position(I magnitude, I scale_bits, int32_t largest_bits) {
    const I relative = V::template shift_right_signed<kRoot>(V::sub(magnitude, scale_bits));
    return V::as_float(V::add(relative, V::set_int(largest_bits)));
  }

  static inline I round(F position, F offset, I magnitude) {
    return V::zero_where_zero(V::truncate(V::add(position, offset)), magnitude);
  }

  static inline float as_scale(int32_t bits) {
    float scale;
    __builtin_memcpy(&scale, &bits, 4);
    return scale;
  }

  // First touch of the cache lines that a block `kAhead` blocks on will need: the hardware
  // prefetchers stop at page borders, and a block's five streams are short.
  template <bool kF32>
  static inline void prefetch_block(const Slabs& slabs, int64_t i, int64_t state) {
    constexpr int64_t kAhead = 4 * kBlock;
    const int64_t j = i + kAhead;
    for (int64_t k = 0; k < kBlock; k += 32) {
      __builtin_prefetch(slabs.hi + j + k, 1, 2);
      __builtin_prefetch(slabs.lo + j + k, 1, 2);
      if constexpr (!kF32) __builtin_prefetch(static_cast<const uint16_t*>(slabs.gradient) + j + k, 0, 2);
    }
    if constexpr (kF32) {
      for (int64_t k = 0; k < kBlock; k += 16)
        __builtin_prefetch(static_cast<const float*>(slabs.gradient) + j + k, 0, 2);
    }
    for (int64_t k = 0; k < kBlock; k += 64) {
      __builtin_prefetch(slabs.m_codes + state + kAhead + k, 1, 2);
      __builtin_prefetch(slabs.v_codes + state + kAhead + k, 1, 2);
    }
  }

  template <bool kF32>
  static void eight_bit(const Slabs& slabs, const Chunk& chunk, const Scalars& s, const float* dither) {
    const Constants c(s, chunk.decay != 0);
    const I magnitude_mask = V::set_int(0x7FFFFFFF);
    const I code_mask = V::set_int(0x7F);
    const I sign_bit = V::set_int(static_cast<int32_t>(0x80000000u));
    const F half = V::set(0.5f);
    const F quarter = V::set(0.25f);
    const F slope = V::set(0.015625f);
    alignas(64) float m_new[kBlock];
    alignas(64) float v_new[kBlock];
    for (int64_t i = chunk.begin; i < chunk.begin + chunk.length; i += kBlock) {
      const int64_t state = chunk.state_offset + (i - chunk.begin);
      const int64_t block = state / kBlock;
      uint8_t* m_codes = slabs.m_codes + state;
      uint8_t* v_codes = slabs.v_codes + state;
      prefetch_block<kF32>(slabs, i, state);
      const I m_offset = decode_offset<kRootM>(slabs.m_scales[block], kBits127);
      const I v_offset = decode_offset<kRootV>(slabs.v_scales[block], kBits255);
      I m_largest = V::set_int(0);
      I v_largest = V::set_int(0);
      for (int k = 0; k < kBlock; k += V::kLanes) {
        const I m_code = V::load_u8(m_codes + k);
        const I m_sign = V::bit_and(V::template shift_left<24>(m_code), sign_bit);
        F m = V::as_float(V::bit_or(decode_bits<kRootM>(V::bit_and(m_code, code_mask), m_offset), m_sign));
        F v = V::as_float(decode_bits<kRootV>(V::load_u8(v_codes + k), v_offset));
        moments(load_gradient<kF32>(slabs, i + k, c), m, v, c);
        V::store(m_new + k, m);
        V::store(v_new + k, v);
        m_largest = V::max(m_largest, V::bit_and(V::as_int(m), magnitude_mask));
        v_largest = V::max(v_largest, V::as_int(v));
        update_split_master(slabs.hi + i + k, slabs.lo + i + k, m, v, c);
      }
      const int32_t m_bits = V::reduce_max(m_largest);
      const int32_t v_bits = V::reduce_max(v_largest);
      slabs.m_scales[block] = as_scale(m_bits);
      slabs.v_scales[block] = as_scale(v_bits);
      const I m_scale_bits = V::set_int(m_bits);
      const I v_scale_bits = V::set_int(v_bits);
      for (int k = 0; k < kBlock; k += V::kLanes) {
        const I m = V::as_int(V::load(m_new + k));
        const I magnitude = V::bit_and(m, magnitude_mask);
        const F at = position<kRootM>(magnitude, m_scale_bits, kBits127);
        const I m_code = round(at, V::min(half, V::add(V::mul(at, slope), quarter)), magnitude);
        const I m_sign = V::template shift_right<24>(V::bit_and(m, sign_bit));
        V::store_8(m_codes + k, V::bit_or(m_code, m_sign));
        const I v = V::as_int(V::load(v_new + k));
        const I v_code = round(position<kRootV>(v, v_scale_bits, kBits255), V::load(dither + k), v);
        V::store_8(v_codes + k, V::zero_where_zero(V::max(v_code, V::set_int(1)), v));
      }
    }
  }

  template <bool kF32, bool kSplit>
  static void fp32_state(const Slabs& slabs, const Chunk& chunk, const Scalars& s) {
    const Constants c(s, chunk.decay != 0);
    for (int64_t k = 0; k < chunk.length; k += V::kLanes) {
      const int64_t i = chunk.begin + k;
      float* m_at = slabs.m32 + chunk.state_offset + k;
      float* v_at = slabs.v32 + chunk.state_offset + k;
      F m = V::load(m_at);
      F v = V::load(v_at);
      moments(load_gradient<kF32>(slabs, i, c), m, v, c);
      V::store(m_at, m);
      V::store(v_at, v);
      if constexpr (kSplit) {
        update_split_master(slabs.hi + i, slabs.lo + i, m, v, c);
      } else {
        update_bf16(slabs.hi + i, m, v, c);
      }
    }
  }

  template <bool kF32>
  static void dispatch(Method method, const Slabs& slabs, const Chunk& chunk, const Scalars& s,
                       const float* dither) {
    if (method == kHybrid8bit && chunk.eight_bit) {
      eight_bit<kF32>(slabs, chunk, s, dither);
    } else if (method == kBf16) {
      fp32_state<kF32, false>(slabs, chunk, s);
    } else {
      fp32_state<kF32, true>(slabs, chunk, s);
    }
  }

  static void run(Method method, const Slabs& slabs, const Chunk& chunk, const Scalars& s,
                  const float* dither) {
    if (slabs.gradient_is_f32) {
      dispatch<true>(method, slabs, chunk, s, dither);
    } else {
      dispatch<false>(method, slabs, chunk, s, dither);
    }
  }
};

}  // namespace hostupdate

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
constexpr int32_t kLargestBits = 0x7F7FFFFF;
// Blocks whose largest m is below 2^-96 store zeros: all codes of the others are then normal numbers,
// and zero rounds to code 0 by itself.
constexpr int32_t kSmallestScaleM = 0x0F800000;
constexpr int kRootM = 2;  // m is stored as the 2^2-th root of its size relative to the block's largest
constexpr int kRootV = 3;  // v likewise with the 2^3-th root

template <class V>
struct Kernel {
  using F = typename V::F;
  using I = typename V::I;
  static constexpr int kPair = 2 * V::kLanes;

  struct Constants {
    F b1, b2, m_share, step, root_scale, eps, decay_step, gradient_scale;

    explicit Constants(const Scalars& s, bool decay)
        : b1(V::set(s.b1)), b2(V::set(s.b2)), m_share(V::set(s.m_share)), step(V::set(s.step)),
          root_scale(V::set(s.root_scale)), eps(V::set(s.eps)),
          decay_step(V::set(decay ? s.decay_step : 0.0f)), gradient_scale(V::set(s.gradient_scale)) {}
  };

  // The scaled gradient is sqrt(1 - b2) times the clipped one, so that its square enters v as it is.
  template <bool kF32>
  static inline void load_gradient(const Slabs& slabs, int64_t i, const Constants& c, F gradient[2]) {
    if constexpr (kF32) {
      gradient[0] = V::load(static_cast<const float*>(slabs.gradient) + i);
      gradient[1] = V::load(static_cast<const float*>(slabs.gradient) + i + V::kLanes);
    } else {
      V::load_high16(static_cast<const uint16_t*>(slabs.gradient) + i, gradient);
    }
    gradient[0] = V::mul(gradient[0], c.gradient_scale);
    gradient[1] = V::mul(gradient[1], c.gradient_scale);
  }

  static inline void moments(F gradient, F& m, F& v, const Constants& c) {
    m = V::add(V::mul(c.b1, m), V::mul(c.m_share, gradient));
    v = V::add(V::mul(c.b2, v), V::mul(gradient, gradient));
  }

  static inline I stepped(F parameter, F m, F v, const Constants& c) {
    const F root = V::add(V::mul(V::sqrt(v), c.root_scale), c.eps);
    const F adam = V::div(V::mul(m, c.step), root);
    return V::as_int(V::sub(parameter, V::add(adam, V::mul(c.decay_step, parameter))));
  }

  // hi becomes the upper half of the rounded bits; lo = bits - (hi << 16) is their lower half as it is.
  static inline void update_split_master(uint16_t* hi, int16_t* lo, const F m[2], const F v[2],
                                         const Constants& c) {
    F master[2];
    V::load_master(hi, lo, master);
    const I half = V::set_int(0x8000);
    const I bits[2] = {stepped(master[0], m[0], v[0], c), stepped(master[1], m[1], v[1], c)};
    const I rounded[2] = {V::add(bits[0], half), V::add(bits[1], half)};
    V::store_high16(hi, rounded);
    V::store_low16(lo, bits);
  }

  static inline I round_to_even(I bits) {
    const I odd = V::bit_and(V::template shift_right<16>(bits), V::set_int(1));
    return V::add(V::add(bits, V::set_int(0x7FFF)), odd);
  }

  static inline void update_bf16(uint16_t* hi, const F m[2], const F v[2], const Constants& c) {
    F parameter[2];
    V::load_high16(hi, parameter);
    const I bits[2] = {round_to_even(stepped(parameter[0], m[0], v[0], c)),
                       round_to_even(stepped(parameter[1], m[1], v[1], c))};
    V::store_high16(hi, bits);
  }

  // Bits of a code's magnitude: bits(scale) + 2^kRoot (bits(code) - bits(largest code)), where the
  // shift drops the code's sign; code 0 is zero.
  template <int kRoot>
  static inline I decode_bits(F code, I offset) {
    return V::add(V::template shift_left<kRoot>(V::as_int(code)), offset);
  }

  static inline F decode_m(const int8_t* codes, I offset) {
    const I code = V::load_s8(codes);
    const F value = V::to_float(code);
    const I bits = V::zero_where_zero(decode_bits<kRootM>(value, offset), code);
    return V::with_sign_of(V::as_float(bits), value);
  }

  static inline F decode_v(const uint8_t* codes, I offset) {
    const I code = V::load_u8(codes);
    const I bits = decode_bits<kRootV>(V::to_float(code), offset);
    return V::as_float(V::zero_where_zero(V::max(bits, V::set_int(kMinNormal)), code));
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

  static inline I encode_m(F m, I scale_bits) {
    const I magnitude = V::bit_and(V::as_int(m), V::set_int(0x7FFFFFFF));
    const F at = position<kRootM>(magnitude, scale_bits, kBits127);
    const F offset = V::min(V::set(0.5f), V::add(V::mul(at, V::set(0.015625f)), V::set(0.25f)));
    return V::truncate(V::with_sign_of(V::add(at, offset), m));
  }

  static inline I encode_v(F v, I scale_bits, F offset) {
    const I bits = V::as_int(v);
    const I code = V::truncate(V::add(position<kRootV>(bits, scale_bits, kBits255), offset));
    return V::zero_where_zero(V::max(code, V::set_int(1)), bits);
  }

  static inline float as_scale(int32_t bits) {
    float scale;
    __builtin_memcpy(&scale, &bits, 4);
    return scale;
  }

  // First touch of the cache lines of a block further on: the hardware prefetchers stop at page
  // borders, and a block's five streams are short. Inlined by force, for compilers take a function
  // that only prefetches for one that does nothing.
  template <bool kF32>
  __attribute__((always_inline)) static inline void prefetch_block(const Slabs& slabs, int64_t i,
                                                                   int64_t state) {
    constexpr int64_t kAhead = 2 * kBlock;
    const char* gradient = static_cast<const char*>(slabs.gradient) + (i + kAhead) * (kF32 ? 4 : 2);
    for (int64_t k = 0; k < kBlock * (kF32 ? 4 : 2); k += 64) __builtin_prefetch(gradient + k);
    for (int64_t k = 0; k < kBlock; k += 32) {
      __builtin_prefetch(slabs.hi + i + kAhead + k);
      __builtin_prefetch(slabs.lo + i + kAhead + k);
    }
    for (int64_t k = 0; k < kBlock; k += 64) {
      __builtin_prefetch(slabs.m_codes + state + kAhead + k);
      __builtin_prefetch(slabs.v_codes + state + kAhead + k);
    }
  }

  template <bool kF32>
  static void eight_bit(const Slabs& caller_slabs, const Chunk& chunk, const Scalars& s,
                        const float* dither) {
    const Slabs slabs = caller_slabs;  // a copy that stores through its pointers cannot change
    const int64_t begin = chunk.begin, end = chunk.begin + chunk.length;
    const int64_t state_shift = chunk.state_offset - chunk.begin;
    const Constants c(s, chunk.decay != 0);
    alignas(64) float m_new[kBlock];
    alignas(64) float v_new[kBlock];
    for (int64_t i = begin; i < end; i += kBlock) {
      const int64_t state = i + state_shift;
      const int64_t block = state / kBlock;
      int8_t* m_codes = slabs.m_codes + state;
      uint8_t* v_codes = slabs.v_codes + state;
      prefetch_block<kF32>(slabs, i, state);
      const I m_offset = decode_offset<kRootM>(slabs.m_scales[block], kBits127);
      const I v_offset = decode_offset<kRootV>(slabs.v_scales[block], kBits255);
      I m_largest = V::set_int(0);
      I v_largest = V::set_int(0);
      for (int k = 0; k < kBlock; k += kPair) {
        F gradient[2], m[2], v[2];
        load_gradient<kF32>(slabs, i + k, c, gradient);
        for (int half = 0; half < 2; ++half) {
          const int at = k + half * V::kLanes;
          m[half] = decode_m(m_codes + at, m_offset);
          v[half] = decode_v(v_codes + at, v_offset);
          moments(gradient[half], m[half], v[half], c);
          V::store(m_new + at, m[half]);
          V::store(v_new + at, v[half]);
          m_largest = V::max(m_largest, V::bit_and(V::as_int(m[half]), V::set_int(0x7FFFFFFF)));
          v_largest = V::max(v_largest, V::as_int(v[half]));
        }
      }
      const int32_t m_bits = V::reduce_max(m_largest);
      const int32_t v_bits = V::reduce_max(v_largest);
      const bool m_counts = m_bits >= kSmallestScaleM;
      slabs.m_scales[block] = as_scale(m_counts ? m_bits : 0);
      slabs.v_scales[block] = as_scale(v_bits);
      const I m_scale_bits = V::set_int(m_counts ? m_bits : kLargestBits);  // no m reaches code 1 then
      const I v_scale_bits = V::set_int(v_bits);
      for (int k = 0; k < kBlock; k += 2 * kPair) {
        I m_code[4], v_code[4];
        for (int pair = 0; pair < 2; ++pair) {
          const int at = k + pair * kPair;
          const F m[2] = {V::load(m_new + at), V::load(m_new + at + V::kLanes)};
          const F v[2] = {V::load(v_new + at), V::load(v_new + at + V::kLanes)};
          update_split_master(slabs.hi + i + at, slabs.lo + i + at, m, v, c);
          for (int half = 0; half < 2; ++half) {
            const F offset = V::load(dither + at + half * V::kLanes);
            m_code[2 * pair + half] = encode_m(m[half], m_scale_bits);
            v_code[2 * pair + half] = encode_v(v[half], v_scale_bits, offset);
          }
        }
        V::store_s8(m_codes + k, m_code);
        V::store_u8(v_codes + k, v_code);
      }
    }
  }

  template <bool kF32, bool kSplit>
  static void fp32_state(const Slabs& caller_slabs, const Chunk& chunk, const Scalars& s) {
    const Slabs slabs = caller_slabs;
    const int64_t begin = chunk.begin, length = chunk.length;
    float* m_at = slabs.m32 + chunk.state_offset;
    float* v_at = slabs.v32 + chunk.state_offset;
    const Constants c(s, chunk.decay != 0);
    for (int64_t k = 0; k < length; k += kPair) {
      F gradient[2], m[2], v[2];
      load_gradient<kF32>(slabs, begin + k, c, gradient);
      for (int half = 0; half < 2; ++half) {
        const int64_t at = k + half * V::kLanes;
        m[half] = V::load(m_at + at);
        v[half] = V::load(v_at + at);
        moments(gradient[half], m[half], v[half], c);
        V::store(m_at + at, m[half]);
        V::store(v_at + at, v[half]);
      }
      if constexpr (kSplit) {
        update_split_master(slabs.hi + begin + k, slabs.lo + begin + k, m, v, c);
      } else {
        update_bf16(slabs.hi + begin + k, m, v, c);
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

// C interface of the host update kernels; mirrored by lazyjax/optim/native/library.py.
//
// Everything is validated by the caller (lazyjax/optim/base.py): pointers are aligned to 64 bytes,
// chunks cover whole blocks of 256 elements, scalars are finite.
#pragma once
#include <cstdint>

namespace hostupdate {

constexpr int kBlock = 256;  // elements that share one scale of m and one of v

enum Method : int32_t {
  kHybrid8bit = 0,  // split fp32 master, 8-bit m and v (fp32 in chunks of small tensors)
  kFp32State = 1,   // split fp32 master, fp32 m and v
  kBf16 = 2,        // bf16 parameters (hi alone), fp32 m and v
};

// A run of whole blocks that one thread updates.
struct Chunk {
  int64_t begin;         // first element in the slab
  int64_t length;        // elements, a multiple of kBlock
  int64_t state_offset;  // first element in m_codes and v_codes, or in m32 and v32
  int32_t decay;         // whether weight decay applies
  int32_t eight_bit;     // whether m and v are codes (method kHybrid8bit)
};

struct Slabs {
  uint16_t* hi;
  int16_t* lo;
  const void* gradient;
  int8_t* m_codes;
  uint8_t* v_codes;
  float* m_scales;  // one per block of codes
  float* v_scales;
  float* m32;
  float* v32;
  int32_t gradient_is_f32;
};

struct Scalars {
  float b1, b2;
  float m_share;     // (1 - b1) / sqrt(1 - b2)
  float step;        // learning rate / (1 - b1^count)
  float root_scale;  // 1 / sqrt(1 - b2^count)
  float eps;
  float decay_step;  // learning rate * weight decay
  float gradient_scale;  // clip factor * sqrt(1 - b2)
  uint32_t count;
};

// Updates one chunk; `dither` holds the kBlock rounding offsets of v of this step.
using ChunkKernel = void (*)(Method, const Slabs&, const Chunk&, const Scalars&, const float* dither);

// nullptr when the path was not compiled for this architecture.
ChunkKernel portable_kernel();
ChunkKernel avx2_kernel();
ChunkKernel avx512_kernel();

}  // namespace hostupdate

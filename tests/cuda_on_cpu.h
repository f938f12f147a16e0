// Copyright 2026 The jax_deconv authors
// SPDX-License-Identifier: Apache-2.0
//
// Enough of CUDA to run a kernel's source on a CPU, in place of common.cuh: the threads of a block are contexts that
// take turns at its barriers, in another order each time, so that one which relies on an order shows.  Slow, for values
// only.

#include <ucontext.h>

#include <algorithm>
#include <cstring>
#include <numeric>
#include <random>
#include <vector>

#define __device__
#define __global__
#define __forceinline__ inline
#define __shared__ static
#define __launch_bounds__(...)

struct Index3 { unsigned x, y, z; };
struct uint2 { unsigned x, y; };
struct uint4 { unsigned x, y, z, w; };
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
template <typename To, typename From> To bits(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  std::memcpy(&to, &from, sizeof to);
  return to;
}
inline float __uint_as_float(unsigned v) { return bits<float>(v); }
inline unsigned __float_as_uint(float v) { return bits<unsigned>(v); }
// What every thread of a warp may as well decide for itself.
inline unsigned __activemask() { return ~0u; }
inline bool __all_sync(unsigned, bool own) { return own; }
template <typename T> T __ldg(const T* from) {
  if (reinterpret_cast<size_t>(from) % sizeof(T)) __builtin_trap();  // as a GPU would
  return *from;
}

namespace jd {

typedef float f32;
struct bf16 { unsigned short bits; };
struct f16 { unsigned short bits; };
inline float to_float(f32 v) { return v; }
inline float to_float(bf16 v) { return __uint_as_float(unsigned(v.bits) << 16); }
inline float to_float(f16 v) { return bits<_Float16>(v.bits); }
template <typename T> T from_float(float v);
template <> inline f32 from_float<f32>(float v) { return v; }
template <> inline bf16 from_float<bf16>(float v) {
  const unsigned word = __float_as_uint(v);
  return {(unsigned short)((word + 0x7fff + (word >> 16 & 1)) >> 16)};
}
template <> inline f16 from_float<f16>(float v) { return {bits<unsigned short>(_Float16(v))}; }
template <typename T> unsigned pack(float low, float high) {
  return from_float<T>(low).bits | unsigned(from_float<T>(high).bits) << 16;
}

}  // namespace jd

static Index3 threadIdx, blockIdx;
static ucontext_t scheduler;
static ucontext_t* running;

inline void __syncthreads() { swapcontext(running, &scheduler); }

typedef void (*KernelEntry)(const void*, const void*, const void*, void*, char*);
static KernelEntry entry;
static const void *operand_a, *operand_b, *bias_operand;
static void* result;
static char* scratch;
static std::vector<bool> done;
static std::minstd_rand random_order;

static void thread_main() {
  entry(operand_a, operand_b, bias_operand, result, scratch);
  done[threadIdx.x] = true;
}

// One launch, block by block; only the first axes of grid and block are used.
extern "C" void launch(KernelEntry kernel, unsigned grid, unsigned block, const void* a, const void* b,
                       const void* bias, void* out, char* workspace) {
  constexpr size_t STACK = 1 << 16;
  entry = kernel, operand_a = a, operand_b = b, bias_operand = bias, result = out, scratch = workspace;
  std::vector<char> stacks(block * STACK);
  std::vector<ucontext_t> threads(block);
  for (blockIdx.x = 0; blockIdx.x < grid; ++blockIdx.x) {
    done.assign(block, false);
    for (unsigned k = 0; k < block; ++k) {
      getcontext(&threads[k]);
      threads[k].uc_stack.ss_sp = &stacks[k * STACK];
      threads[k].uc_stack.ss_size = STACK;
      threads[k].uc_link = &scheduler;
      makecontext(&threads[k], thread_main, 0);
    }
    std::vector<unsigned> order(block);
    std::iota(order.begin(), order.end(), 0);
    for (bool busy = true; busy;) {
      busy = false;
      std::shuffle(order.begin(), order.end(), random_order);
      for (unsigned k : order)
        if (!done[k]) {
          threadIdx.x = k, running = &threads[k];
          swapcontext(&scheduler, running);
          busy = true;
        }
    }
  }
}

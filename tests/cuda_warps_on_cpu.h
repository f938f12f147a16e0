// Copyright 2026 The jax_deconv authors
// SPDX-License-Identifier: Apache-2.0
//
// What cuda_on_cpu.h lacks for kernels that multiply on tensor cores.  Copies are done when they are waited for and
// leave NaN until then, and all lanes of a warp meet at what they do together: each leaves its part, and after a turn of
// all threads takes what the others left.

#pragma once
#include "cuda_on_cpu.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>

#define __host__
struct int2 { int x, y; };
struct float2 { float x, y; };
struct float4 { float x, y, z, w; };
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
using std::max;
using std::min;

inline unsigned __byte_perm(unsigned low, unsigned high, unsigned selector) {
  const unsigned long long both = (unsigned long long)high << 32 | low;
  unsigned result = 0;
  for (int i = 0; i < 4; ++i) result |= unsigned(both >> (selector >> 4 * i & 7) * 8 & 255) << 8 * i;
  return result;
}

static Index3 gridDim;
alignas(128) static char shared_memory[163 * 1024];
static unsigned shared_bytes;

extern "C" void launch_warps(KernelEntry kernel, unsigned grid, unsigned block, unsigned shared, const void* a,
                             const void* b, const void* bias, void* out, char* workspace) {
  gridDim.x = grid, shared_bytes = shared;
  std::memset(shared_memory, 0xff, sizeof shared_memory);  // not a number in any type
  launch(kernel, grid, block, a, b, bias, out, workspace);
}

inline void require(bool condition, const char* what) {
  if (!condition) std::fprintf(stderr, "%s\n", what), std::abort();
}

namespace jd {

inline unsigned shared_address(const void* p) { return unsigned(static_cast<const char*>(p) - shared_memory); }

struct Copy {
  unsigned to;
  const void* from;  // null: zeros
  int bytes;
};
static std::vector<std::vector<Copy>> copies[1024];  // the groups of each thread, oldest first, the last one open

template <int BYTES> void copy_async(unsigned to, const void* from, bool there) {
  require(to % BYTES == 0 && to + BYTES <= shared_bytes, "a copy to a wrong place in shared memory");
  require(!there || reinterpret_cast<size_t>(from) % BYTES == 0, "a copy from a wrong address");
  std::memset(shared_memory + to, 0xff, BYTES);
  auto& groups = copies[threadIdx.x];
  if (groups.empty()) groups.emplace_back();
  groups.back().push_back({to, there ? from : nullptr, BYTES});
}
inline void copy_async_commit() {
  auto& groups = copies[threadIdx.x];
  if (groups.empty()) groups.emplace_back();
  groups.emplace_back();
}
template <int PENDING> void copy_async_wait() {
  auto& groups = copies[threadIdx.x];
  for (; groups.size() > PENDING + 1; groups.erase(groups.begin())) {
    for (const Copy& copy : groups.front()) {
      if (copy.from) std::memcpy(shared_memory + copy.to, copy.from, copy.bytes);
      else std::memset(shared_memory + copy.to, 0, copy.bytes);
    }
  }
}
template <int BYTES> void store_words(void* to, const unsigned* v) {
  require(reinterpret_cast<size_t>(to) % BYTES == 0, "a store to a wrong address");
  std::memcpy(to, v, BYTES);
}

struct Part { unsigned address, a[4], b[2]; };
static Part parts[1024];

inline Part* warp() { return parts + threadIdx.x / 32 * 32; }
inline void meet() {
  const unsigned own = threadIdx.x;
  __syncthreads();
  threadIdx.x = own;
}

inline void load_rows(unsigned (&r)[4], unsigned address, bool transposed) {
  require(address % 16 == 0 && address + 16 <= shared_bytes, "a matrix at a wrong place in shared memory");
  parts[threadIdx.x].address = address;
  meet();
  const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
  for (int i = 0; i < 4; ++i) {
    unsigned short two[2];
    for (int h = 0; h < 2; ++h) {
      const int row = transposed ? 2 * t + h : g, column = transposed ? g : 2 * t + h;
      std::memcpy(two + h, shared_memory + warp()[8 * i + row].address + 2 * column, 2);
    }
    r[i] = two[0] | unsigned(two[1]) << 16;
  }
  meet();
}
inline void load_matrices(unsigned (&r)[4], unsigned address) { load_rows(r, address, false); }

template <typename T> float value(const unsigned* registers, int index) {
  T v;
  std::memcpy(&v, reinterpret_cast<const char*>(registers) + index * sizeof(T), sizeof(T));
  return to_float(v);
}

// d += a * b: 16 rows, 8 columns, and a sum over 32 bytes.
template <typename T> void mma(T, float* d, const unsigned (&a)[4], unsigned b0, unsigned b1) {
  Part& own = parts[threadIdx.x];
  std::copy(a, a + 4, own.a);
  own.b[0] = b0, own.b[1] = b1;
  meet();
  constexpr int EACH = 4 / sizeof(T);  // values in a register
  const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
  for (int i = 0; i < 4; ++i)
    for (int half = 0; half < 2; ++half)
      for (int k = 0; k < 4 * EACH; ++k)
        d[i] += value<T>(&warp()[4 * g + k / EACH].a[2 * half + i / 2], k % EACH) *
                value<T>(&warp()[4 * (2 * t + i % 2) + k / EACH].b[half], k % EACH);
  meet();
}

template <typename T> unsigned operand(unsigned v) { return sizeof(T) == 4 ? (v + 0x1000) & ~0x1fffu : v; }

}  // namespace jd

namespace thin {
inline void load_matrices_transposed(unsigned (&r)[4], unsigned address) { jd::load_rows(r, address, true); }
}  // namespace thin

// Copyright 2026 The jax_deconv authors
// SPDX-License-Identifier: Apache-2.0
//
// What the families of kernels share. It stands before every source and includes nothing: run-time
// compilation has no headers, so narrow types are bits and their conversions PTX.

namespace jd {

typedef float f32;
struct bf16 { unsigned short bits; };
struct f16 { unsigned short bits; };

// -- Conversion, rounding to nearest even ---------------------------------------------------------

__device__ __forceinline__ float to_float(f32 v) { return v; }
__device__ __forceinline__ float to_float(bf16 v) { return __uint_as_float((unsigned)v.bits << 16); }
__device__ __forceinline__ float to_float(f16 v) {
  float f;
  asm("cvt.f32.f16 %0, %1;" : "=f"(f) : "h"(v.bits));
  return f;
}

template <typename T> __device__ __forceinline__ T from_float(float v);
template <> __device__ __forceinline__ f32 from_float<f32>(float v) { return v; }
template <> __device__ __forceinline__ bf16 from_float<bf16>(float v) {
  bf16 r;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(r.bits) : "f"(v));
  return r;
}
template <> __device__ __forceinline__ f16 from_float<f16>(float v) {
  f16 r;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(r.bits) : "f"(v));
  return r;
}

// Two neighbours in one register, the first in the low half.
template <typename T> __device__ __forceinline__ unsigned pack(float low, float high);
template <> __device__ __forceinline__ unsigned pack<bf16>(float low, float high) {
  unsigned r;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
  return r;
}
template <> __device__ __forceinline__ unsigned pack<f16>(float low, float high) {
  unsigned r;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
  return r;
}

template <typename T> __device__ __forceinline__ void unpack(unsigned v, float& low, float& high) {
  T l, h;
  l.bits = v, h.bits = v >> 16;
  low = to_float(l), high = to_float(h);
}

// One store of 4, 8 or 16 bytes: the compiler may split that of a vector type.
template <int BYTES> __device__ __forceinline__ void store_words(void* to, const unsigned* v) {
  if constexpr (BYTES == 16)
    asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(v[0]), "r"(v[1]), "r"(v[2]), "r"(v[3])
                 : "memory");
  else if constexpr (BYTES == 8)
    asm volatile("st.global.v2.b32 [%0], {%1, %2};" ::"l"(to), "r"(v[0]), "r"(v[1]) : "memory");
  else
    asm volatile("st.global.b32 [%0], %1;" ::"l"(to), "r"(v[0]) : "memory");
}

// One load of 16 bytes that nothing writes while the kernel runs.
__device__ __forceinline__ void load_16_bytes(unsigned (&v)[4], const void* from) {
  asm volatile("ld.global.nc.v4.b32 {%0, %1, %2, %3}, [%4];" : "=r"(v[0]), "=r"(v[1]), "=r"(v[2]), "=r"(v[3])
               : "l"(from));
}

// -- Asynchronous copies to shared memory ---------------------------------------------------------

__device__ __forceinline__ unsigned shared_address(const void* p) { return (unsigned)__cvta_generic_to_shared(p); }

// Copies 4, 8 or 16 bytes, or writes as many zeros where there is nothing to read.
template <int BYTES> __device__ __forceinline__ void copy_async(unsigned to, const void* from, bool there) {
  if constexpr (BYTES == 16)  // streams past L1
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(there ? 16 : 0) : "memory");
  else
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(to), "l"(from), "n"(BYTES),
                 "r"(there ? BYTES : 0) : "memory");
}
__device__ __forceinline__ void copy_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int PENDING> __device__ __forceinline__ void copy_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}

// -- Tensor cores ---------------------------------------------------------------------------------
// Fragments are described in bytes, so that one way of loading serves every type: a row of A and a
// column of B are 32 bytes, 16 narrow values or 8 of float32.

__device__ __forceinline__ void load_matrices(unsigned (&r)[4], unsigned address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(address) : "memory");
}

#define JD_MMA(T, SHAPE, NAME)                                                                         \
  __device__ __forceinline__ void mma(T, float* d, const unsigned (&a)[4], unsigned b0, unsigned b1) { \
    asm volatile("mma.sync.aligned." SHAPE ".row.col.f32." NAME "." NAME                               \
                 ".f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"                \
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])                                      \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));                      \
  }
JD_MMA(bf16, "m16n8k16", "bf16")
JD_MMA(f16, "m16n8k16", "f16")
JD_MMA(f32, "m16n8k8", "tf32")
#undef JD_MMA

// float32 bits as TF32 to nearest; narrow types stay as they are.
template <typename T> __device__ __forceinline__ unsigned operand(unsigned v) {
  if constexpr (sizeof(T) == 4) asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(v) : "f"(__uint_as_float(v)));
  return v;
}

}  // namespace jd

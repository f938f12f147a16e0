// Copyright 2026 The jax_deconv authors
// SPDX-License-Identifier: Apache-2.0
//
// Hand-written CUDA kernels: compiled for a problem and a device by NVRTC, kept, launched.

#ifndef JAX_DECONV_FFI_KERNEL_H_
#define JAX_DECONV_FFI_KERNEL_H_

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "cudnn_util.h"

namespace jax_deconv {

// The source text behind a name.  Names carry a digest of the text, so that a program finds the
// source that it was compiled for or none.
void AddSource(const std::string& name, const std::string& text);

// Where machine code is kept from process to process; not at all if empty, as at first.
void SetKernelCache(const std::string& directory);

// A specification is text: the name of the source, the compiler's options in one line, then for
// each launch in order a line of
//
//     entry grid_x grid_y grid_z block_x block_y block_z shared_bytes
//
// (jax_deconv/lowering/kernels.py writes it).

// The machine code for an architecture such as "sm_90".  Needs no GPU.
ffi::Error Compile(std::string_view spec, const std::string& architecture, std::string* cubin);

// Compiles and loads what a specification names and keeps it; in the steady state a look-up.
ffi::Error PrepareKernel(std::string_view spec, int device);

// Launches a prepared specification on the stream, nothing else.  `bias` may be null where the
// options do not ask for one.
ffi::Error RunKernel(std::string_view spec, int device, CUstream stream,
                     const Buffers& buffers, const void* bias);

}  // namespace jax_deconv

#endif  // JAX_DECONV_FFI_KERNEL_H_

// Copyright 2026 The jax_deconv authors
// SPDX-License-Identifier: Apache-2.0

#ifndef JAX_DECONV_FFI_HANDLERS_H_
#define JAX_DECONV_FFI_HANDLERS_H_

#include "xla/ffi/api/ffi.h"

namespace jax_deconv {

// A custom call target.  `initialize` may be null.
struct Target {
  const char* name;
  XLA_FFI_Handler* initialize;
  XLA_FFI_Handler* execute;
};

// All targets, for registration under the platform "CUDA".  None has an instantiate handler: they
// compile where there is no GPU and no cuDNN.
inline constexpr int kTargetCount = 5;
extern const Target kTargets[kTargetCount];

}  // namespace jax_deconv

#endif  // JAX_DECONV_FFI_HANDLERS_H_

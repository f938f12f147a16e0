// Copyright 2026 The jax_deconv authors
// SPDX-License-Identifier: Apache-2.0
//
// The attributes of the custom calls, decoded whole.

#ifndef JAX_DECONV_FFI_ATTRS_H_
#define JAX_DECONV_FFI_ATTRS_H_

#include <cstdint>
#include <string_view>

#include "xla/ffi/api/ffi.h"

namespace jax_deconv {

using Ints = xla::ffi::Span<const int64_t>;

// Raised whenever the meaning of an attribute changes: executables live on in JAX's persistent
// cache, whose key does not know this library.
inline constexpr int64_t kPlanVersion = 2;

// One convolution and the plan that was chosen for it when it was lowered.
struct ConvAttrs {
  Ints stride;
  Ints dilation;
  Ints pad_lo;
  Ints pad_hi;
  int64_t groups;
  int64_t layout;  // 0: N, C, spatial; 1: N, spatial, C.  Physical; dimensions stay logical.
  int64_t engine;  // -1: the best that fits
  Ints knobs;      // type, value, type, value, ...
  bool tf32;
  bool deterministic;
  int64_t plan_version;
};

// A convolution by hand-written kernels.
struct KernelAttrs {
  std::string_view spec;  // see kernel.h
};

// A convolution whose candidates are to be timed: cuDNN's plans, then kernels.
struct TimeAttrs {
  int64_t role;
  Ints stride;
  Ints dilation;
  Ints pad_lo;
  Ints pad_hi;
  int64_t groups;
  int64_t layout;
  Ints engines;  // one per candidate
  Ints knobs;    // of all candidates, one after the other
  Ints knob_counts;
  Ints workspaces;          // of the plans, then of the kernels
  std::string_view kernels;  // specifications, a blank line between two
  Ints w_order;
  bool tf32;
  bool deterministic;
  double budget_us;  // no candidate is started after that
  double patience;   // how many times as long as the best a candidate may take
  int64_t seed;
  int64_t plan_version;
};

}  // namespace jax_deconv

XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(
    jax_deconv::ConvAttrs, StructMember<jax_deconv::Ints>("stride"),
    StructMember<jax_deconv::Ints>("dilation"), StructMember<jax_deconv::Ints>("pad_lo"),
    StructMember<jax_deconv::Ints>("pad_hi"), StructMember<int64_t>("groups"),
    StructMember<int64_t>("layout"), StructMember<int64_t>("engine"),
    StructMember<jax_deconv::Ints>("knobs"), StructMember<bool>("tf32"),
    StructMember<bool>("deterministic"), StructMember<int64_t>("plan_version"));

XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(jax_deconv::KernelAttrs,
                                      StructMember<std::string_view>("spec"));

XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(
    jax_deconv::TimeAttrs, StructMember<int64_t>("role"),
    StructMember<jax_deconv::Ints>("stride"), StructMember<jax_deconv::Ints>("dilation"),
    StructMember<jax_deconv::Ints>("pad_lo"), StructMember<jax_deconv::Ints>("pad_hi"),
    StructMember<int64_t>("groups"), StructMember<int64_t>("layout"),
    StructMember<jax_deconv::Ints>("engines"), StructMember<jax_deconv::Ints>("knobs"),
    StructMember<jax_deconv::Ints>("knob_counts"), StructMember<jax_deconv::Ints>("workspaces"),
    StructMember<std::string_view>("kernels"), StructMember<jax_deconv::Ints>("w_order"),
    StructMember<bool>("tf32"), StructMember<bool>("deterministic"),
    StructMember<double>("budget_us"), StructMember<double>("patience"),
    StructMember<int64_t>("seed"), StructMember<int64_t>("plan_version"));

#endif  // JAX_DECONV_FFI_ATTRS_H_

// Copyright 2026 The jax_deconv authors
// SPDX-License-Identifier: Apache-2.0
//
// Convolutions as cuDNN execution plans: which there are, which are built, how fast and how right
// they are.  Knows nothing of XLA but its error type.

#ifndef JAX_DECONV_FFI_PLAN_H_
#define JAX_DECONV_FFI_PLAN_H_

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "cudnn_util.h"

namespace jax_deconv {

// The tensor that is made.  jax_deconv/problem.py has the algebra.
enum class Role : int64_t { kX = 0, kY = 1, kW = 2 };

enum class Layout : int64_t { kChannelsFirst = 0, kChannelsLast = 1 };

struct Problem {
  Role role;
  cudnnDataType_t dtype;      // of both operands
  cudnnDataType_t out_dtype;  // of the tensor that is made
  std::vector<int64_t> x;     // N, G*C, spatial
  std::vector<int64_t> w;     // G*K, C, spatial
  std::vector<int64_t> y;     // N, G*K, spatial
  std::vector<int64_t> stride;
  std::vector<int64_t> dilation;
  std::vector<int64_t> pad_lo;
  std::vector<int64_t> pad_hi;
  Layout layout = Layout::kChannelsLast;
  bool tf32 = true;
  bool deterministic = false;

  Role a() const { return role == Role::kX ? Role::kY : Role::kX; }
  Role b() const { return role == Role::kW ? Role::kY : Role::kW; }
  const std::vector<int64_t>& dims(Role tensor) const {
    return tensor == Role::kX ? x : tensor == Role::kY ? y : w;
  }
  cudnnDataType_t type(Role tensor) const { return tensor == role ? out_dtype : dtype; }
};

// Which plan to use.
struct Choice {
  int64_t engine = -1;         // -1: the best that fits the workspace
  std::vector<int64_t> knobs;  // type, value, type, value, ...
  int64_t workspace = 0;       // bytes that there are
};

struct Candidate {
  Choice choice;  // with the workspace that it needs
  bool compiles;  // its kernel is compiled when the plan is built, which takes up to seconds
};

// A candidate as the timer sees it.
struct Trial {
  int64_t workspace;  // bytes that it needs
  std::function<ffi::Error()> prepare;
  std::function<ffi::Error()> run;
};

// How one candidate did; NaN where it was not tried or failed, the error also where it was too slow
// to be looked at.
struct Timing {
  float microseconds;
  float error;  // relative to a float64 reference, at sampled outputs
};

// The number of elements.
int64_t Count(const std::vector<int64_t>& dims);

// The distance in elements between neighbours along each logical axis.
std::vector<int64_t> Strides(const std::vector<int64_t>& dims, Layout layout);

// The plans that cuDNN's heuristics propose and the problem's flags permit, most promising first.  Builds nothing.
ffi::Error Candidates(const Problem& problem, int device, std::vector<Candidate>* candidates);

// Builds the plan and keeps it; when it is kept already, as in the steady state, a look-up.  A
// choice that cannot be built here (another GPU, another cuDNN) becomes the best that fits.
ffi::Error Prepare(const Problem& problem, const Choice& choice, int device);

// Runs a prepared plan: launches kernels on the stream, nothing else.
ffi::Error Run(const Problem& problem, const Choice& choice, int device, CUstream stream,
               const Buffers& buffers);

// The bytes of workspace that there must be for timing: twice the L2 cache of the largest GPUs.
inline constexpr int64_t kTimingWorkspace = 128 << 20;

// Fills the operands with noise, then runs the trials one after the other: twice, and if that takes
// no more than `patience` times as long as the best so far, as often as tells a fast one's time; the
// values of these are compared with sums computed here in float64.  Starts none after the budget is
// spent.  `w_order` is the physical order of the axes of w,
// outermost first.  (timing.cc)
ffi::Error Time(const Problem& problem, const std::vector<int64_t>& w_order,
                const std::vector<Trial>& trials, double budget_us, double patience, int64_t seed,
                CUstream stream, const Buffers& buffers, std::vector<Timing>* timings);

// The problem and the choice as the lines of Python that run it alone.
std::string Reproducer(const Problem& problem, const Choice& choice);

}  // namespace jax_deconv

#endif  // JAX_DECONV_FFI_PLAN_H_

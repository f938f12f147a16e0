// Copyright 2026 The jax_deconv authors
// SPDX-License-Identifier: Apache-2.0
//
// The custom calls: decode, and hand over to the plan library.

#include "handlers.h"

#include <algorithm>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "attrs.h"
#include "kernel.h"
#include "plan.h"

namespace jax_deconv {
namespace {

std::vector<int64_t> Vector(Ints values) { return {values.begin(), values.end()}; }

ffi::Error CheckVersion(int64_t version) {
  if (version == kPlanVersion) return ffi::Error::Success();
  return ffi::Error(ffi::ErrorCode::kFailedPrecondition,
                    "this program was compiled by another version of jax_deconv (its custom calls "
                    "have version " + std::to_string(version) + ", this library's " +
                    std::to_string(kPlanVersion) + "): compile it again");
}

ffi::Error DecodeType(ffi::DataType type, cudnnDataType_t* decoded) {
  switch (type) {
    case ffi::F16:
      *decoded = CUDNN_DATA_HALF;
      return ffi::Error::Success();
    case ffi::BF16:
      *decoded = CUDNN_DATA_BFLOAT16;
      return ffi::Error::Success();
    case ffi::F32:
      *decoded = CUDNN_DATA_FLOAT;
      return ffi::Error::Success();
    case ffi::F64:
      *decoded = CUDNN_DATA_DOUBLE;
      return ffi::Error::Success();
    default:
      return ffi::Error::InvalidArgument(
          "cuDNN convolves float16, bfloat16, float32 and float64, not XLA's type " +
          std::to_string(static_cast<int>(type)));
  }
}

// What both stages of a convolution need.
struct Call {
  Problem problem;
  Choice choice;
  Buffers buffers;
};

ffi::Error DecodeCall(Role role, ffi::AnyBuffer a, ffi::AnyBuffer b, ffi::AnyBuffer out,
                      ffi::AnyBuffer workspace, const ConvAttrs& attrs, Call* call) {
  JAX_DECONV_RETURN_IF_ERROR(CheckVersion(attrs.plan_version));
  Problem& problem = call->problem;
  problem.role = role;
  JAX_DECONV_RETURN_IF_ERROR(DecodeType(a.element_type(), &problem.dtype));
  JAX_DECONV_RETURN_IF_ERROR(DecodeType(out.element_type(), &problem.out_dtype));
  const auto dims = [&](Role tensor) {
    const ffi::AnyBuffer& buffer = tensor == role ? out : tensor == problem.a() ? a : b;
    return Vector(buffer.dimensions());
  };
  problem.x = dims(Role::kX);
  problem.w = dims(Role::kW);
  problem.y = dims(Role::kY);
  problem.stride = Vector(attrs.stride);
  problem.dilation = Vector(attrs.dilation);
  problem.pad_lo = Vector(attrs.pad_lo);
  problem.pad_hi = Vector(attrs.pad_hi);
  problem.layout = static_cast<Layout>(attrs.layout);
  problem.tf32 = attrs.tf32;
  problem.deterministic = attrs.deterministic;
  // cuDNN reads the number of groups off the channels; so that it is never read differently:
  if (problem.x.size() != attrs.stride.size() + 2 ||
      problem.x[1] != attrs.groups * problem.w[1]) {
    return ffi::Error::InvalidArgument("shapes and attributes do not agree\n" +
                                       Reproducer(problem, call->choice));
  }
  call->choice = {attrs.engine, Vector(attrs.knobs),
                  static_cast<int64_t>(workspace.size_bytes())};
  call->buffers = {a.untyped_data(), b.untyped_data(), out.untyped_data(),
                   workspace.untyped_data()};
  return ffi::Error::Success();
}

// An error of the plan library with what it was about.
ffi::Error Explain(ffi::Error error, const Call& call) {
  if (error.success()) return error;
  return ffi::Error(*error.errc(), "jax_deconv: " + error.message() + "\nIt is reproduced by:\n" +
                                       Reproducer(call.problem, call.choice));
}

template <Role role>
ffi::Error InitializeConv(int32_t device, ffi::AnyBuffer a, ffi::AnyBuffer b,
                          ffi::Result<ffi::AnyBuffer> out,
                          ffi::Result<ffi::AnyBuffer> workspace, const ConvAttrs& attrs) {
  Call call;
  JAX_DECONV_RETURN_IF_ERROR(DecodeCall(role, a, b, *out, *workspace, attrs, &call));
  return Explain(Prepare(call.problem, call.choice, device), call);
}

template <Role role>
ffi::Error ExecuteConv(CUstream stream, int32_t device, ffi::AnyBuffer a, ffi::AnyBuffer b,
                       ffi::Result<ffi::AnyBuffer> out, ffi::Result<ffi::AnyBuffer> workspace,
                       const ConvAttrs& attrs) {
  Call call;
  JAX_DECONV_RETURN_IF_ERROR(DecodeCall(role, a, b, *out, *workspace, attrs, &call));
  return Explain(Run(call.problem, call.choice, device, stream, call.buffers), call);
}

ffi::Error Reproduced(ffi::Error error, std::string_view spec) {
  if (error.success()) return error;
  return ffi::Error(*error.errc(), "jax_deconv: " + error.message() + "\nin the kernels\n" +
                                       std::string(spec));
}

ffi::Error InitializeKernel(int32_t device, ffi::RemainingArgs, ffi::RemainingRets,
                            const KernelAttrs& attrs) {
  return Reproduced(PrepareKernel(attrs.spec, device), attrs.spec);
}

ffi::Error ExecuteKernel(CUstream stream, int32_t device, ffi::AnyBuffer a, ffi::AnyBuffer b,
                         ffi::RemainingArgs rest, ffi::Result<ffi::AnyBuffer> out,
                         ffi::Result<ffi::AnyBuffer> workspace, const KernelAttrs& attrs) {
  const void* bias = nullptr;
  if (rest.size() > 0) {
    const auto buffer = rest.get<ffi::AnyBuffer>(0);
    if (!buffer.has_value()) return buffer.error();
    bias = buffer->untyped_data();
  }
  const Buffers buffers = {a.untyped_data(), b.untyped_data(), out->untyped_data(),
                           workspace->untyped_data()};
  return Reproduced(RunKernel(attrs.spec, device, stream, buffers, bias), attrs.spec);
}

// Its operands are results, too: XLA allocates them and nothing else has to make them.
ffi::Error ExecuteTime(CUstream stream, int32_t device, ffi::Result<ffi::AnyBuffer> a,
                       ffi::Result<ffi::AnyBuffer> b, ffi::Result<ffi::AnyBuffer> out,
                       ffi::Result<ffi::AnyBuffer> workspace,
                       ffi::Result<ffi::BufferR2<ffi::F32>> result, const TimeAttrs& attrs) {
  const ConvAttrs conv = {attrs.stride, attrs.dilation, attrs.pad_lo, attrs.pad_hi,
                          attrs.groups, attrs.layout,   -1,           {},
                          attrs.tf32,   attrs.deterministic, attrs.plan_version};
  Call call;
  JAX_DECONV_RETURN_IF_ERROR(DecodeCall(static_cast<Role>(attrs.role), *a, *b, *out, *workspace,
                                        conv, &call));
  if (static_cast<int64_t>(workspace->size_bytes()) < kTimingWorkspace) {
    return ffi::Error(ffi::ErrorCode::kInvalidArgument, "too little workspace to time with");
  }
  std::vector<Trial> trials;
  const int64_t* knobs = attrs.knobs.begin();
  for (size_t i = 0; i < attrs.engines.size(); ++i) {
    const int64_t* end = knobs + attrs.knob_counts[i];
    const Choice choice = {attrs.engines[i], {knobs, end}, attrs.workspaces[i]};
    trials.push_back({choice.workspace, [=, &call] { return Prepare(call.problem, choice, device); },
                      [=, &call] { return Run(call.problem, choice, device, stream, call.buffers); }});
    knobs = end;
  }
  for (std::string_view rest = attrs.kernels; !rest.empty();) {
    const size_t end = std::min(rest.find("\n\n"), rest.size());
    const std::string_view spec = rest.substr(0, end);
    rest.remove_prefix(std::min(end + 2, rest.size()));
    trials.push_back({attrs.workspaces[trials.size()], [=] { return PrepareKernel(spec, device); },
                      [=, &call] { return RunKernel(spec, device, stream, call.buffers, nullptr); }});
  }
  std::vector<Timing> timings;
  JAX_DECONV_RETURN_IF_ERROR(Explain(
      Time(call.problem, Vector(attrs.w_order), trials, attrs.budget_us, attrs.patience,
           attrs.seed, stream, call.buffers, &timings),
      call));
  const Driver* driver;
  JAX_DECONV_RETURN_IF_ERROR(GetDriver(&driver));
  static_assert(sizeof(Timing) == 2 * sizeof(float));
  JAX_DECONV_DRIVER(driver->copy_to_device(reinterpret_cast<CUdeviceptr>(result->typed_data()),
                                           timings.data(), timings.size() * sizeof(Timing),
                                           stream));
  JAX_DECONV_DRIVER(driver->stream_synchronize(stream));
  return ffi::Error::Success();
}

auto BindInitialize() {
  return ffi::Ffi::BindInitialize()
      .Ctx<ffi::DeviceOrdinal>()
      .Arg<ffi::AnyBuffer>()
      .Arg<ffi::AnyBuffer>()
      .Ret<ffi::AnyBuffer>()
      .Ret<ffi::AnyBuffer>()
      .Attrs<ConvAttrs>();
}

auto BindExecute() {
  return ffi::Ffi::BindExecute()
      .Ctx<ffi::PlatformStream<CUstream>>()
      .Ctx<ffi::DeviceOrdinal>()
      .Arg<ffi::AnyBuffer>()
      .Arg<ffi::AnyBuffer>()
      .Ret<ffi::AnyBuffer>()
      .Ret<ffi::AnyBuffer>()
      .Attrs<ConvAttrs>();
}

auto BindTime() {
  return ffi::Ffi::BindExecute()
      .Ctx<ffi::PlatformStream<CUstream>>()
      .Ctx<ffi::DeviceOrdinal>()
      .Ret<ffi::AnyBuffer>()
      .Ret<ffi::AnyBuffer>()
      .Ret<ffi::AnyBuffer>()
      .Ret<ffi::AnyBuffer>()
      .Ret<ffi::BufferR2<ffi::F32>>()
      .Attrs<TimeAttrs>();
}

template <Role role>
XLA_FFI_Error* Initialize(XLA_FFI_CallFrame* frame) {
  static auto* handler = BindInitialize().To(InitializeConv<role>).release();
  return handler->Call(frame);
}

// Kernel launches on memory that is passed in are all that it does, so XLA may record it in CUDA
// graphs.
template <Role role>
XLA_FFI_Error* Execute(XLA_FFI_CallFrame* frame) {
  static auto* handler = BindExecute()
                             .To(ExecuteConv<role>, {ffi::Traits::kCmdBufferCompatible})
                             .release();
  return handler->Call(frame);
}

XLA_FFI_Error* InitializeKernels(XLA_FFI_CallFrame* frame) {
  static auto* handler = ffi::Ffi::BindInitialize()
                             .Ctx<ffi::DeviceOrdinal>()
                             .RemainingArgs()
                             .RemainingRets()
                             .Attrs<KernelAttrs>()
                             .To(InitializeKernel)
                             .release();
  return handler->Call(frame);
}

XLA_FFI_Error* ExecuteKernels(XLA_FFI_CallFrame* frame) {
  static auto* handler = ffi::Ffi::BindExecute()
                             .Ctx<ffi::PlatformStream<CUstream>>()
                             .Ctx<ffi::DeviceOrdinal>()
                             .Arg<ffi::AnyBuffer>()
                             .Arg<ffi::AnyBuffer>()
                             .RemainingArgs()
                             .Ret<ffi::AnyBuffer>()
                             .Ret<ffi::AnyBuffer>()
                             .Attrs<KernelAttrs>()
                             .To(ExecuteKernel, {ffi::Traits::kCmdBufferCompatible})
                             .release();
  return handler->Call(frame);
}

XLA_FFI_Error* ExecuteTimer(XLA_FFI_CallFrame* frame) {
  static auto* handler = BindTime().To(ExecuteTime).release();
  return handler->Call(frame);
}

}  // namespace

const Target kTargets[kTargetCount] = {
    {"jax_deconv_x", Initialize<Role::kX>, Execute<Role::kX>},
    {"jax_deconv_y", Initialize<Role::kY>, Execute<Role::kY>},
    {"jax_deconv_w", Initialize<Role::kW>, Execute<Role::kW>},
    {"jax_deconv_kernel", InitializeKernels, ExecuteKernels},
    {"jax_deconv_time", nullptr, ExecuteTimer},
};

}  // namespace jax_deconv

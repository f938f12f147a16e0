// Copyright 2026 The jax_deconv authors
// SPDX-License-Identifier: Apache-2.0
//
// The Python module: it binds, nothing else.

#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <stdexcept>
#include <tuple>

#include "attrs.h"
#include "handlers.h"
#include "kernel.h"
#include "plan.h"

namespace nb = nanobind;

namespace jax_deconv {
namespace {

using Dims = std::vector<int64_t>;

void Raise(const ffi::Error& error) {
  if (error.failure()) throw std::runtime_error(error.message());
}

nb::dict Registrations() {
  nb::dict targets;
  for (const Target& target : kTargets) {
    nb::dict stages;
    if (target.initialize != nullptr) {
      stages["initialize"] = nb::capsule(reinterpret_cast<void*>(target.initialize));
    }
    stages["execute"] = nb::capsule(reinterpret_cast<void*>(target.execute));
    targets[target.name] = stages;
  }
  return targets;
}

cudnnDataType_t TypeOf(const std::string& name) {
  if (name == "float16") return CUDNN_DATA_HALF;
  if (name == "bfloat16") return CUDNN_DATA_BFLOAT16;
  if (name == "float32") return CUDNN_DATA_FLOAT;
  if (name == "float64") return CUDNN_DATA_DOUBLE;
  throw std::invalid_argument("cuDNN does not convolve " + name);
}

// (engine, knobs, workspace, compiles) of every plan that is permitted.
std::vector<std::tuple<int64_t, Dims, int64_t, bool>> ListCandidates(
    int64_t role, const std::string& dtype, const std::string& out_dtype, Dims x, Dims w, Dims y,
    Dims stride, Dims dilation, Dims pad_lo, Dims pad_hi, int64_t layout, bool tf32,
    bool deterministic, int device) {
  const Problem problem{static_cast<Role>(role),
                        TypeOf(dtype),
                        TypeOf(out_dtype),
                        std::move(x),
                        std::move(w),
                        std::move(y),
                        std::move(stride),
                        std::move(dilation),
                        std::move(pad_lo),
                        std::move(pad_hi),
                        static_cast<Layout>(layout),
                        tf32,
                        deterministic};
  std::vector<Candidate> candidates;
  {
    nb::gil_scoped_release release;
    Raise(Candidates(problem, device, &candidates));
  }
  std::vector<std::tuple<int64_t, Dims, int64_t, bool>> found;
  for (const Candidate& candidate : candidates) {
    const Choice& choice = candidate.choice;
    found.emplace_back(choice.engine, choice.knobs, choice.workspace, candidate.compiles);
  }
  return found;
}

// (name, path, error) of every library.
std::vector<std::tuple<std::string, std::string, std::string>> Status() {
  std::vector<std::tuple<std::string, std::string, std::string>> found;
  for (const Library& library : LibraryStatus()) {
    found.emplace_back(library.name, library.path, library.error);
  }
  return found;
}

// The size of the machine code; what is asked of it is that there is one.
int64_t CompileKernel(const std::string& spec, const std::string& architecture) {
  std::string cubin;
  nb::gil_scoped_release release;
  Raise(Compile(spec, architecture, &cubin));
  return cubin.size();
}

void LoadKernel(const std::string& spec, int device) {
  nb::gil_scoped_release release;
  Raise(PrepareKernel(spec, device));
}

int64_t CudnnVersion() {
  const Cudnn* cudnn;
  Raise(GetCudnn(&cudnn));
  return cudnn->cudnnGetVersion();
}

}  // namespace
}  // namespace jax_deconv

NB_MODULE(_ffi_native, m) {
  using namespace jax_deconv;
  m.attr("PLAN_VERSION") = kPlanVersion;
  m.attr("TIMING_WORKSPACE") = kTimingWorkspace;
  m.attr("FFI_API_VERSION") = nb::make_tuple(XLA_FFI_API_MAJOR, XLA_FFI_API_MINOR);
  m.def("registrations", Registrations);
  m.def("set_library_directories", SetLibraryDirectories);
  m.def("status", Status);
  m.def("cudnn_version", CudnnVersion);
  m.def("add_source", AddSource);
  m.def("set_kernel_cache", SetKernelCache);
  m.def("compile_kernel", CompileKernel, nb::arg("spec"), nb::arg("architecture"));
  m.def("load_kernel", LoadKernel, nb::arg("spec"), nb::arg("device") = 0);
  m.def("candidates", ListCandidates, nb::arg("role"), nb::kw_only(), nb::arg("dtype"),
        nb::arg("out_dtype"), nb::arg("x"), nb::arg("w"), nb::arg("y"), nb::arg("stride"),
        nb::arg("dilation"), nb::arg("pad_lo"), nb::arg("pad_hi"), nb::arg("layout"),
        nb::arg("tf32"), nb::arg("deterministic"), nb::arg("device") = 0);
}

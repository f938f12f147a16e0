// Copyright 2026 The jax_deconv authors
// SPDX-License-Identifier: Apache-2.0
//
// cuDNN, NVRTC and the CUDA driver, loaded at run time, and the macros that turn their status codes into
// ffi::Error.  The module links against none: one wheel serves every CUDA version and machines
// without a GPU.

#ifndef JAX_DECONV_FFI_CUDNN_UTIL_H_
#define JAX_DECONV_FFI_CUDNN_UTIL_H_

#include <cuda.h>
#include <cudnn_graph.h>

#include <cstdint>
#include <string>
#include <vector>

#include "xla/ffi/api/ffi.h"

namespace jax_deconv {

namespace ffi = ::xla::ffi;

// The oldest cuDNN whose graph API does what plan.cc asks of it.
inline constexpr size_t kLeastCudnn = 90800;

#define JAX_DECONV_CUDNN_FUNCTIONS(X) \
  X(cudnnGetVersion)                  \
  X(cudnnGetCudartVersion)            \
  X(cudnnGetErrorString)              \
  X(cudnnGetLastErrorString)          \
  X(cudnnCreate)                      \
  X(cudnnSetStream)                   \
  X(cudnnBackendCreateDescriptor)     \
  X(cudnnBackendDestroyDescriptor)    \
  X(cudnnBackendFinalize)             \
  X(cudnnBackendSetAttribute)         \
  X(cudnnBackendGetAttribute)         \
  X(cudnnBackendExecute)

struct Cudnn {
#define JAX_DECONV_DECLARE(name) decltype(&::name) name = nullptr;
  JAX_DECONV_CUDNN_FUNCTIONS(JAX_DECONV_DECLARE)
#undef JAX_DECONV_DECLARE
};

// Members, the symbols behind them and their types.  Spelled out because cuda.h renames functions
// to their newest variant, which an older driver lacks.
#define JAX_DECONV_DRIVER_FUNCTIONS(X)                                                \
  X(init, "cuInit", (unsigned))                                                       \
  X(get_error_name, "cuGetErrorName", (CUresult, const char**))                       \
  X(device_get, "cuDeviceGet", (CUdevice*, int))                                      \
  X(device_count, "cuDeviceGetCount", (int*))                                         \
  X(device_name, "cuDeviceGetName", (char*, int, CUdevice))                           \
  X(device_attribute, "cuDeviceGetAttribute", (int*, CUdevice_attribute, CUdevice))   \
  X(driver_version, "cuDriverGetVersion", (int*))                                     \
  X(primary_retain, "cuDevicePrimaryCtxRetain", (CUcontext*, CUdevice))               \
  X(push_current, "cuCtxPushCurrent_v2", (CUcontext))                                 \
  X(pop_current, "cuCtxPopCurrent_v2", (CUcontext*))                                  \
  X(event_create, "cuEventCreate", (CUevent*, unsigned))                              \
  X(event_destroy, "cuEventDestroy_v2", (CUevent))                                    \
  X(event_record, "cuEventRecord", (CUevent, CUstream))                               \
  X(event_synchronize, "cuEventSynchronize", (CUevent))                               \
  X(event_elapsed, "cuEventElapsedTime", (float*, CUevent, CUevent))                  \
  X(stream_synchronize, "cuStreamSynchronize", (CUstream))                            \
  X(copy_to_device, "cuMemcpyHtoDAsync_v2", (CUdeviceptr, const void*, size_t, CUstream)) \
  X(copy_to_host, "cuMemcpyDtoHAsync_v2", (void*, CUdeviceptr, size_t, CUstream))     \
  X(copy_on_device, "cuMemcpyDtoDAsync_v2", (CUdeviceptr, CUdeviceptr, size_t, CUstream)) \
  X(fill, "cuMemsetD8Async", (CUdeviceptr, unsigned char, size_t, CUstream))              \
  X(begin_capture, "cuStreamBeginCapture_v2", (CUstream, CUstreamCaptureMode))        \
  X(exchange_capture_mode, "cuThreadExchangeStreamCaptureMode", (CUstreamCaptureMode*)) \
  X(end_capture, "cuStreamEndCapture", (CUstream, CUgraph*))                          \
  X(graph_instantiate, "cuGraphInstantiateWithFlags", (CUgraphExec*, CUgraph, unsigned long long)) \
  X(graph_launch, "cuGraphLaunch", (CUgraphExec, CUstream))                           \
  X(graph_exec_destroy, "cuGraphExecDestroy", (CUgraphExec))                          \
  X(graph_destroy, "cuGraphDestroy", (CUgraph))                                       \
  X(module_load, "cuModuleLoadData", (CUmodule*, const void*))                        \
  X(module_function, "cuModuleGetFunction", (CUfunction*, CUmodule, const char*))     \
  X(function_set, "cuFuncSetAttribute", (CUfunction, CUfunction_attribute, int))      \
  X(launch, "cuLaunchKernel",                                                         \
    (CUfunction, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, CUstream, void**, void**))

struct Driver {
#define JAX_DECONV_DECLARE(name, symbol, signature) CUresult(*name) signature = nullptr;
  JAX_DECONV_DRIVER_FUNCTIONS(JAX_DECONV_DECLARE)
#undef JAX_DECONV_DECLARE
};

// NVRTC's interface, as much of it as is used.  Its header is not among the build's requirements.
enum nvrtcResult : int { NVRTC_SUCCESS = 0 };
using nvrtcProgram = struct _nvrtcProgram*;

#define JAX_DECONV_NVRTC_FUNCTIONS(X)                                                       \
  X(nvrtcGetErrorString, const char*, (nvrtcResult))                                        \
  X(nvrtcVersion, nvrtcResult, (int*, int*))                                                \
  X(nvrtcCreateProgram, nvrtcResult,                                                        \
    (nvrtcProgram*, const char*, const char*, int, const char* const*, const char* const*)) \
  X(nvrtcCompileProgram, nvrtcResult, (nvrtcProgram, int, const char* const*))              \
  X(nvrtcGetCUBINSize, nvrtcResult, (nvrtcProgram, size_t*))                                \
  X(nvrtcGetCUBIN, nvrtcResult, (nvrtcProgram, char*))                                      \
  X(nvrtcGetProgramLogSize, nvrtcResult, (nvrtcProgram, size_t*))                           \
  X(nvrtcGetProgramLog, nvrtcResult, (nvrtcProgram, char*))                                 \
  X(nvrtcDestroyProgram, nvrtcResult, (nvrtcProgram*))

struct Nvrtc {
#define JAX_DECONV_DECLARE(name, result, signature) result(*name) signature = nullptr;
  JAX_DECONV_NVRTC_FUNCTIONS(JAX_DECONV_DECLARE)
#undef JAX_DECONV_DECLARE
};

// The buffers of one call on one device.  The operands a and b are (y, w) for role x, (x, w) for
// role y and (x, y) for role w.
struct Buffers {
  void* a;
  void* b;
  void* out;
  void* workspace;
};

// A library that was looked for.
struct Library {
  std::string name;   // what was asked for
  std::string path;   // what was found; empty if nothing was
  std::string error;  // why not
};

// Directories to look in, after what the process has loaded already and before the system's.
// Called once, before anything is loaded.
void SetLibraryDirectories(std::vector<std::string> directories);

// The libraries.  The first call loads them; the error says what is missing and how to get it.
ffi::Error GetCudnn(const Cudnn** cudnn);
ffi::Error GetDriver(const Driver** driver);
ffi::Error GetNvrtc(const Nvrtc** nvrtc);

// What they found: the driver, cuDNN, cublasLt and NVRTC.
std::vector<Library> LibraryStatus();

ffi::Error CudnnError(cudnnStatus_t status, const char* call);
ffi::Error DriverError(CUresult result, const char* call);

}  // namespace jax_deconv

// Returns the ffi::Error that `expr` makes, if it makes one.
#define JAX_DECONV_RETURN_IF_ERROR(expr)                        \
  do {                                                          \
    if (::xla::ffi::Error error_ = (expr); error_.failure()) {  \
      return error_;                                            \
    }                                                           \
  } while (false)

// The same for a call that returns a cudnnStatus_t or a CUresult.
#define JAX_DECONV_CUDNN(call)                                                        \
  do {                                                                                \
    if (cudnnStatus_t status_ = (call); status_ != CUDNN_STATUS_SUCCESS) {            \
      return ::jax_deconv::CudnnError(status_, #call);                                \
    }                                                                                 \
  } while (false)

#define JAX_DECONV_DRIVER(call)                               \
  do {                                                        \
    if (CUresult result_ = (call); result_ != CUDA_SUCCESS) { \
      return ::jax_deconv::DriverError(result_, #call);       \
    }                                                         \
  } while (false)

#endif  // JAX_DECONV_FFI_CUDNN_UTIL_H_

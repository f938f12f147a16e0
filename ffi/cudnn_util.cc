// Copyright 2026 The jax_deconv authors
// SPDX-License-Identifier: Apache-2.0

#include "cudnn_util.h"

#include <dlfcn.h>

#include <mutex>
#include <utility>

namespace jax_deconv {
namespace {

std::vector<std::string>& Directories() {
  static auto* directories = new std::vector<std::string>;
  return *directories;
}

// Opens a library: the one that the process holds already (JAX's CUDA plugin loads the same), then
// one of pip's, then the system's.
void* Open(Library* library) {
  const char* name = library->name.c_str();
  void* handle = dlopen(name, RTLD_NOW | RTLD_NOLOAD);
  for (const std::string& directory : Directories()) {
    if (handle != nullptr) break;
    handle = dlopen((directory + "/" + name).c_str(), RTLD_NOW);
  }
  if (handle == nullptr) handle = dlopen(name, RTLD_NOW);
  if (handle == nullptr) library->error = dlerror();
  return handle;
}

// The file that a symbol came from.
std::string PathOf(void* symbol) {
  Dl_info info;
  return dladdr(symbol, &info) != 0 ? info.dli_fname : "(unknown)";
}

// Everything that is loaded, once and for the life of the process.
struct Libraries {
  Driver driver_functions;
  Cudnn cudnn_functions;
  Library driver{"libcuda.so.1", "", ""};
  Library cudnn{"libcudnn.so.9", "", ""};
  Nvrtc nvrtc_functions;
  Library cublas{"libcublasLt", "", "only looked for beside cuDNN"};
  Library nvrtc{"libnvrtc", "", ""};

  Libraries() {
    LoadDriver();
    LoadCudnn();
    LoadNvrtc();
  }

  void LoadDriver() {
    void* handle = Open(&driver);
    if (handle == nullptr) return;
#define JAX_DECONV_LOAD(name, symbol, signature)                                  \
  driver_functions.name =                                                         \
      reinterpret_cast<decltype(driver_functions.name)>(dlsym(handle, symbol));   \
  if (driver_functions.name == nullptr) driver.error = "it has no function " symbol;
    JAX_DECONV_DRIVER_FUNCTIONS(JAX_DECONV_LOAD)
#undef JAX_DECONV_LOAD
    driver.path = PathOf(dlsym(handle, "cuInit"));
    if (driver.error.empty() && driver_functions.init(0) != CUDA_SUCCESS) {
      driver.error = "cuInit failed: is there a GPU, and does the driver run?";
    }
  }

  void LoadCudnn() {
    void* handle = Open(&cudnn);
    if (handle == nullptr) return;
#define JAX_DECONV_LOAD(name)                                              \
  cudnn_functions.name =                                                   \
      reinterpret_cast<decltype(cudnn_functions.name)>(dlsym(handle, #name)); \
  if (cudnn_functions.name == nullptr) cudnn.error = "it has no function " #name;
    JAX_DECONV_CUDNN_FUNCTIONS(JAX_DECONV_LOAD)
#undef JAX_DECONV_LOAD
    cudnn.path = PathOf(dlsym(handle, "cudnnGetVersion"));
    if (cudnn.error.empty() && cudnn_functions.cudnnGetVersion() < kLeastCudnn) {
      cudnn.error = "it is version " + std::to_string(cudnn_functions.cudnnGetVersion()) +
                    ", older than " + std::to_string(kLeastCudnn);
    }
    if (!cudnn.error.empty()) return;
    // cuDNN looks for cublasLt at the first query of its heuristics and aborts the process if
    // there is none.  Once it is loaded here, cuDNN finds it by its name.
    cublas.name +=
        ".so." + std::to_string(cudnn_functions.cudnnGetCudartVersion() / 1000);
    cublas.error.clear();
    if (void* lt = Open(&cublas)) cublas.path = PathOf(dlsym(lt, "cublasLtCreate"));
  }

  void LoadNvrtc() {
    void* handle = nullptr;
    for (const char* version : {".so.13", ".so.12"}) {
      nvrtc = {std::string("libnvrtc") + version, "", ""};
      handle = Open(&nvrtc);
      if (handle != nullptr) break;
    }
    if (handle == nullptr) return;
#define JAX_DECONV_LOAD(name, result, signature)                                          \
  nvrtc_functions.name =                                                                  \
      reinterpret_cast<decltype(nvrtc_functions.name)>(dlsym(handle, #name));             \
  if (nvrtc_functions.name == nullptr) nvrtc.error = "it has no function " #name;
    JAX_DECONV_NVRTC_FUNCTIONS(JAX_DECONV_LOAD)
#undef JAX_DECONV_LOAD
    nvrtc.path = PathOf(dlsym(handle, "nvrtcCompileProgram"));
  }
};

Libraries& Get() {
  static auto* libraries = new Libraries;
  return *libraries;
}

ffi::Error Missing(const Library& library, const std::string& cure) {
  return ffi::Error(ffi::ErrorCode::kFailedPrecondition,
                    "jax_deconv cannot use " + library.name +
                        (library.path.empty() ? "" : " (" + library.path + ")") + ": " +
                        library.error + ". " + cure);
}

}  // namespace

void SetLibraryDirectories(std::vector<std::string> directories) {
  Directories() = std::move(directories);
}

ffi::Error GetDriver(const Driver** driver) {
  const Libraries& libraries = Get();
  if (!libraries.driver.error.empty()) {
    return Missing(libraries.driver, "It belongs to NVIDIA's driver.");
  }
  *driver = &libraries.driver_functions;
  return ffi::Error::Success();
}

ffi::Error GetCudnn(const Cudnn** cudnn) {
  const Libraries& libraries = Get();
  for (const Library* library : {&libraries.cudnn, &libraries.cublas}) {
    if (!library->error.empty()) {
      return Missing(*library, "Install it with: pip install -U \"jax[cuda13]\"");
    }
  }
  *cudnn = &libraries.cudnn_functions;
  return ffi::Error::Success();
}

ffi::Error GetNvrtc(const Nvrtc** nvrtc) {
  const Libraries& libraries = Get();
  if (!libraries.nvrtc.error.empty()) {
    return Missing(libraries.nvrtc, "Install it with: pip install -U \"jax[cuda13]\"");
  }
  *nvrtc = &libraries.nvrtc_functions;
  return ffi::Error::Success();
}

std::vector<Library> LibraryStatus() {
  const Libraries& libraries = Get();
  return {libraries.driver, libraries.cudnn, libraries.cublas, libraries.nvrtc};
}

ffi::Error CudnnError(cudnnStatus_t status, const char* call) {
  const Cudnn& cudnn = Get().cudnn_functions;
  char detail[512] = "";
  cudnn.cudnnGetLastErrorString(detail, sizeof(detail));
  return ffi::Error::Internal(std::string(cudnn.cudnnGetErrorString(status)) + " from " + call +
                              (detail[0] ? std::string(": ") + detail : ""));
}

ffi::Error DriverError(CUresult result, const char* call) {
  const char* name = nullptr;  // also of codes that the driver does not know
  Get().driver_functions.get_error_name(result, &name);
  return ffi::Error::Internal(std::string(name == nullptr ? "unknown error" : name) + " from " + call);
}

}  // namespace jax_deconv

// Copyright 2026 The jax_deconv authors
// SPDX-License-Identifier: Apache-2.0

#include "kernel.h"

#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <fstream>
#include <map>
#include <memory>
#include <mutex>
#include <sstream>
#include <utility>

namespace jax_deconv {
namespace {

struct Launch {
  std::string entry;
  unsigned grid[3];
  unsigned block[3];
  unsigned shared;
};

struct Spec {
  std::string source;
  std::vector<std::string> options;
  std::vector<Launch> launches;
};

ffi::Error Parse(std::string_view text, Spec* spec) {
  std::istringstream lines{std::string(text)};
  std::string line, word;
  std::getline(lines, spec->source);
  std::getline(lines, line);
  for (std::istringstream words(line); words >> word;) spec->options.push_back(word);
  while (std::getline(lines, line)) {
    std::istringstream words(line);
    Launch launch;
    words >> launch.entry;
    for (unsigned& value : launch.grid) words >> value;
    for (unsigned& value : launch.block) words >> value;
    if (!(words >> launch.shared)) {
      return ffi::Error::InvalidArgument("not a launch of a kernel: '" + line + "'");
    }
    spec->launches.push_back(launch);
  }
  return ffi::Error::Success();
}

std::mutex sources_mutex;

std::map<std::string, std::string>& Sources() {
  static auto* sources = new std::map<std::string, std::string>;
  return *sources;
}

ffi::Error FindSource(const std::string& name, std::string* text) {
  std::lock_guard<std::mutex> lock(sources_mutex);
  const auto found = Sources().find(name);
  if (found == Sources().end()) {
    return ffi::Error(ffi::ErrorCode::kFailedPrecondition,
                      "this program was compiled by another version of jax_deconv (it asks for the "
                      "kernels '" + name + "'): compile it again");
  }
  *text = found->second;
  return ffi::Error::Success();
}

std::mutex directory_mutex;

std::string& Directory() {
  static auto* directory = new std::string;
  return *directory;
}

std::string CacheDirectory() {
  std::lock_guard<std::mutex> lock(directory_mutex);
  return Directory();
}

// One file of the cache: the key, a null byte, the machine code.  Its name is a hash of the key.
class CacheFile {
 public:
  explicit CacheFile(std::string key) : key_(std::move(key)) {
    const std::string directory = CacheDirectory();
    if (directory.empty()) return;
    uint64_t hash = 14695981039346656037u;  // FNV-1a
    for (unsigned char c : key_) hash = (hash ^ c) * 1099511628211u;
    std::ostringstream name;
    name << directory << "/" << std::hex << hash << ".cubin";
    path_ = name.str();
  }

  bool Read(std::string* cubin) const {
    if (path_.empty()) return false;
    std::ifstream file(path_, std::ios::binary);
    std::ostringstream content;
    content << file.rdbuf();
    *cubin = content.str();
    if (cubin->size() <= key_.size() || cubin->compare(0, key_.size() + 1, key_.c_str(), key_.size() + 1) != 0) {
      return false;
    }
    cubin->erase(0, key_.size() + 1);
    return true;
  }

  // Where it cannot be written it is compiled again.
  void Write(const std::string& cubin) const {
    if (path_.empty()) return;
    const std::string part = path_ + "." + std::to_string(getpid()) + "." +
                             std::to_string(reinterpret_cast<uintptr_t>(this));
    std::ofstream file(part, std::ios::binary);
    file << key_ << '\0' << cubin;
    file.close();
    if (!file || std::rename(part.c_str(), path_.c_str()) != 0) std::remove(part.c_str());
  }

 private:
  std::string key_;
  std::string path_;  // empty where nothing is kept
};

// What is loaded on one device.
struct Loaded {
  std::mutex mutex;
  std::atomic<bool> ready = false;
  std::vector<Launch> launches;
  std::vector<CUfunction> functions;
};

std::shared_ptr<Loaded> Find(std::string_view spec, int device) {
  using Key = std::pair<int, std::string>;
  static std::mutex mutex;
  static auto* all = new std::map<Key, std::shared_ptr<Loaded>>;
  std::lock_guard<std::mutex> lock(mutex);
  std::shared_ptr<Loaded>& entry = (*all)[Key(device, std::string(spec))];
  if (entry == nullptr) entry = std::make_shared<Loaded>();
  return entry;
}

ffi::Error Architecture(const Driver& driver, int device, std::string* name) {
  CUdevice handle;
  int major, minor;
  JAX_DECONV_DRIVER(driver.device_get(&handle, device));
  JAX_DECONV_DRIVER(driver.device_attribute(
      &major, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, handle));
  JAX_DECONV_DRIVER(driver.device_attribute(
      &minor, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR, handle));
  *name = "sm_" + std::to_string(major * 10 + minor);
  return ffi::Error::Success();
}

ffi::Error NvrtcError(const Nvrtc& nvrtc, nvrtcResult result, const std::string& call,
                      const std::string& log = "") {
  return ffi::Error::Internal(std::string(nvrtc.nvrtcGetErrorString(result)) + " from " + call +
                              (log.empty() ? "" : ":\n" + log));
}

// Loads in the device's primary context, which is XLA's, whatever this thread's context is.
ffi::Error Load(const Driver& driver, int device, const std::string& cubin, const Spec& spec,
                Loaded* loaded) {
  CUdevice handle;
  CUcontext context;
  JAX_DECONV_DRIVER(driver.device_get(&handle, device));
  JAX_DECONV_DRIVER(driver.primary_retain(&context, handle));
  JAX_DECONV_DRIVER(driver.push_current(context));
  const auto load = [&]() -> ffi::Error {
    CUmodule module;
    JAX_DECONV_DRIVER(driver.module_load(&module, cubin.data()));
    for (const Launch& launch : spec.launches) {
      CUfunction function;
      JAX_DECONV_DRIVER(driver.module_function(&function, module, launch.entry.c_str()));
      if (launch.shared > 48 << 10) {
        JAX_DECONV_DRIVER(driver.function_set(
            function, CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, launch.shared));
      }
      loaded->functions.push_back(function);
    }
    return ffi::Error::Success();
  };
  ffi::Error error = load();
  driver.pop_current(&context);
  return error;
}

}  // namespace

void SetKernelCache(const std::string& directory) {
  std::lock_guard<std::mutex> lock(directory_mutex);
  Directory() = directory;
}

void AddSource(const std::string& name, const std::string& text) {
  std::lock_guard<std::mutex> lock(sources_mutex);
  Sources()[name] = text;
}

ffi::Error Compile(std::string_view text, const std::string& architecture, std::string* cubin) {
  Spec spec;
  std::string source;
  const Nvrtc* nvrtc;
  JAX_DECONV_RETURN_IF_ERROR(Parse(text, &spec));
  JAX_DECONV_RETURN_IF_ERROR(FindSource(spec.source, &source));
  JAX_DECONV_RETURN_IF_ERROR(GetNvrtc(&nvrtc));
  // What Hopper's own instructions need exists for that one architecture only.
  const bool feature = architecture == "sm_90";
  std::vector<std::string> options = {"--gpu-architecture=" + architecture + (feature ? "a" : ""),
                                      "--std=c++17", "-default-device"};
  options.insert(options.end(), spec.options.begin(), spec.options.end());
  int major, minor;
  nvrtc->nvrtcVersion(&major, &minor);
  const CacheFile kept(architecture + " " + std::to_string(major) + "." + std::to_string(minor) +
                       "\n" + std::string(text));
  if (kept.Read(cubin)) return ffi::Error::Success();
  std::vector<const char*> pointers;
  for (const std::string& option : options) pointers.push_back(option.c_str());

  nvrtcProgram program;
  nvrtcResult result = nvrtc->nvrtcCreateProgram(&program, source.c_str(), spec.source.c_str(), 0,
                                                 nullptr, nullptr);
  if (result != NVRTC_SUCCESS) return NvrtcError(*nvrtc, result, "nvrtcCreateProgram");
  result = nvrtc->nvrtcCompileProgram(program, pointers.size(), pointers.data());
  ffi::Error error = ffi::Error::Success();
  if (result != NVRTC_SUCCESS) {
    size_t size = 0;
    nvrtc->nvrtcGetProgramLogSize(program, &size);
    std::string log(size, '\0');
    nvrtc->nvrtcGetProgramLog(program, log.data());
    error = NvrtcError(*nvrtc, result, "the compilation of " + std::string(text), log);
  } else {
    size_t size = 0;
    nvrtc->nvrtcGetCUBINSize(program, &size);
    cubin->resize(size);
    result = nvrtc->nvrtcGetCUBIN(program, cubin->data());
    if (result != NVRTC_SUCCESS) error = NvrtcError(*nvrtc, result, "nvrtcGetCUBIN");
    if (error.success()) kept.Write(*cubin);
  }
  nvrtc->nvrtcDestroyProgram(&program);
  return error;
}

ffi::Error PrepareKernel(std::string_view text, int device) {
  const std::shared_ptr<Loaded> loaded = Find(text, device);
  std::lock_guard<std::mutex> lock(loaded->mutex);
  if (loaded->ready) return ffi::Error::Success();
  const Driver* driver;
  Spec spec;
  std::string architecture, cubin;
  JAX_DECONV_RETURN_IF_ERROR(GetDriver(&driver));
  JAX_DECONV_RETURN_IF_ERROR(Parse(text, &spec));
  JAX_DECONV_RETURN_IF_ERROR(Architecture(*driver, device, &architecture));
  JAX_DECONV_RETURN_IF_ERROR(Compile(text, architecture, &cubin));
  loaded->functions.clear();
  JAX_DECONV_RETURN_IF_ERROR(Load(*driver, device, cubin, spec, loaded.get()));
  loaded->launches = std::move(spec.launches);
  loaded->ready = true;
  return ffi::Error::Success();
}

ffi::Error RunKernel(std::string_view text, int device, CUstream stream,
                     const Buffers& buffers, const void* bias) {
  const std::shared_ptr<Loaded> loaded = Find(text, device);
  const Driver* driver;
  JAX_DECONV_RETURN_IF_ERROR(GetDriver(&driver));
  if (!loaded->ready) return ffi::Error::Internal("a kernel runs before it is compiled");
  Buffers b = buffers;
  void* arguments[] = {&b.a, &b.b, &bias, &b.out, &b.workspace};
  for (size_t i = 0; i < loaded->launches.size(); ++i) {
    const Launch& launch = loaded->launches[i];
    JAX_DECONV_DRIVER(driver->launch(loaded->functions[i], launch.grid[0], launch.grid[1],
                                     launch.grid[2], launch.block[0], launch.block[1],
                                     launch.block[2], launch.shared, stream, arguments, nullptr));
  }
  return ffi::Error::Success();
}

}  // namespace jax_deconv

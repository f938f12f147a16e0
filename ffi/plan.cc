// Copyright 2026 The jax_deconv authors
// SPDX-License-Identifier: Apache-2.0

#include "plan.h"

#include <algorithm>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <sstream>
#include <string_view>
#include <unordered_map>
#include <utility>

namespace jax_deconv {
namespace {

// A descriptor of cuDNN's backend API, with typed attributes.
class Descriptor {
 public:
  Descriptor() = default;
  Descriptor(Descriptor&& other) noexcept
      : cudnn_(other.cudnn_), raw_(std::exchange(other.raw_, nullptr)) {}
  Descriptor& operator=(Descriptor&& other) noexcept {
    std::swap(cudnn_, other.cudnn_);
    std::swap(raw_, other.raw_);
    return *this;
  }
  ~Descriptor() {
    if (raw_ != nullptr) cudnn_->cudnnBackendDestroyDescriptor(raw_);
  }

  ffi::Error Create(const Cudnn* cudnn, cudnnBackendDescriptorType_t type) {
    cudnn_ = cudnn;
    JAX_DECONV_CUDNN(cudnn_->cudnnBackendCreateDescriptor(type, &raw_));
    return ffi::Error::Success();
  }

  // Attributes are noted one by one; the first failure is reported by Finalize.
  template <typename T>
  Descriptor& Set(cudnnBackendAttributeName_t name, cudnnBackendAttributeType_t type,
                  const T* values, size_t count = 1) {
    if (status_ == CUDNN_STATUS_SUCCESS) {
      status_ = cudnn_->cudnnBackendSetAttribute(raw_, name, type, count, values);
      if (status_ != CUDNN_STATUS_SUCCESS) failed_ = name;
    }
    return *this;
  }
  Descriptor& Set(cudnnBackendAttributeName_t name, const std::vector<int64_t>& values) {
    return Set(name, CUDNN_TYPE_INT64, values.data(), values.size());
  }
  Descriptor& Set(cudnnBackendAttributeName_t name, int64_t value) {
    return Set(name, CUDNN_TYPE_INT64, &value);
  }
  Descriptor& Set(cudnnBackendAttributeName_t name, const Descriptor& value) {
    return Set(name, CUDNN_TYPE_BACKEND_DESCRIPTOR, &value.raw_);
  }

  ffi::Error Finalize() {
    if (status_ != CUDNN_STATUS_SUCCESS) {
      const std::string what = "setting attribute " + std::to_string(failed_);
      return CudnnError(status_, what.c_str());
    }
    JAX_DECONV_CUDNN(cudnn_->cudnnBackendFinalize(raw_));
    return ffi::Error::Success();
  }

  // Reads up to `count` values; how many there were, or none where cuDNN refuses.
  template <typename T>
  int64_t Get(cudnnBackendAttributeName_t name, cudnnBackendAttributeType_t type, T* values,
              int64_t count = 1) const {
    int64_t found = 0;
    if (cudnn_->cudnnBackendGetAttribute(raw_, name, type, count, &found, values) !=
        CUDNN_STATUS_SUCCESS) {
      return 0;
    }
    return std::min(found, count);
  }

  cudnnBackendDescriptor_t raw() const { return raw_; }

 private:
  const Cudnn* cudnn_ = nullptr;
  cudnnBackendDescriptor_t raw_ = nullptr;
  cudnnStatus_t status_ = CUDNN_STATUS_SUCCESS;
  int failed_ = 0;
};

// cuDNN's handles of one device.  Plans are built under one of them and run under others, so that a
// slow build (some kernels are compiled) does not hold up launches; no two threads ever run plans of
// a device at once, which cuDNN does not stand.
//
// Every stream has a runner of its own, for good: a handle that changes streams makes the new one
// wait for the old one, and where another thread is recording a graph on the old one, that would
// join the two recordings.
struct Device {
  std::mutex build;
  std::mutex run;
  cudnnHandle_t builder = nullptr;
  std::map<CUstream, cudnnHandle_t> runners;  // guarded by run
};

// The device's primary context, current while this lives.  XLA has it current already; Python
// threads do not.
class CurrentDevice {
 public:
  ffi::Error Enter(int device) {
    JAX_DECONV_RETURN_IF_ERROR(GetDriver(&driver_));
    CUdevice id;
    CUcontext context;
    JAX_DECONV_DRIVER(driver_->device_get(&id, device));
    JAX_DECONV_DRIVER(driver_->primary_retain(&context, id));  // for the life of the process
    JAX_DECONV_DRIVER(driver_->push_current(context));
    entered_ = true;
    return ffi::Error::Success();
  }
  ~CurrentDevice() {
    CUcontext context;
    if (entered_) driver_->pop_current(&context);
  }

 private:
  const Driver* driver_ = nullptr;
  bool entered_ = false;
};

ffi::Error GetDevice(const Cudnn* cudnn, int ordinal, Device** device) {
  static std::mutex mutex;
  static auto* devices = new std::map<int, Device>;  // never moves what it holds
  std::lock_guard<std::mutex> lock(mutex);
  Device& found = (*devices)[ordinal];
  if (found.builder == nullptr) {
    CurrentDevice current;
    JAX_DECONV_RETURN_IF_ERROR(current.Enter(ordinal));
    JAX_DECONV_CUDNN(cudnn->cudnnCreate(&found.builder));
  }
  *device = &found;
  return ffi::Error::Success();
}

// While this lives, the thread may make calls that would spoil a recording if they were part of it.
class BesideCapture {
 public:
  explicit BesideCapture(const Driver& driver) : driver_(driver) {
    driver_.exchange_capture_mode(&mode_);
  }
  ~BesideCapture() { driver_.exchange_capture_mode(&mode_); }

 private:
  const Driver& driver_;
  CUstreamCaptureMode mode_ = CU_STREAM_CAPTURE_MODE_RELAXED;
};

// The stream's handle, made when the stream is first seen.  The caller holds device->run.
ffi::Error GetRunner(const Cudnn* cudnn, int ordinal, Device* device, CUstream stream,
                     cudnnHandle_t* runner) {
  cudnnHandle_t& found = device->runners[stream];
  if (found == nullptr) {
    const Driver* driver;
    JAX_DECONV_RETURN_IF_ERROR(GetDriver(&driver));
    CurrentDevice current;
    JAX_DECONV_RETURN_IF_ERROR(current.Enter(ordinal));
    BesideCapture beside(*driver);
    cudnnHandle_t made;
    JAX_DECONV_CUDNN(cudnn->cudnnCreate(&made));
    JAX_DECONV_CUDNN(cudnn->cudnnSetStream(made, reinterpret_cast<cudaStream_t>(stream)));
    found = made;
  }
  *runner = found;
  return ffi::Error::Success();
}

// cuDNN wants at least two spatial axes: a single one becomes W, with H = 1.
std::vector<int64_t> AtLeast2d(std::vector<int64_t> values, size_t lead, int64_t fill) {
  if (values.size() == lead + 1) values.insert(values.begin() + lead, fill);
  return values;
}

// The unique identifier of a tensor in the graph.
int64_t Id(Role tensor) { return 'a' + static_cast<int64_t>(tensor); }

ffi::Error MakeTensor(const Cudnn* cudnn, const Problem& problem, Role tensor, Descriptor* made) {
  const auto dims = AtLeast2d(problem.dims(tensor), 2, 1);
  const cudnnDataType_t type = problem.type(tensor);
  JAX_DECONV_RETURN_IF_ERROR(made->Create(cudnn, CUDNN_BACKEND_TENSOR_DESCRIPTOR));
  made->Set(CUDNN_ATTR_TENSOR_DATA_TYPE, CUDNN_TYPE_DATA_TYPE, &type)
      .Set(CUDNN_ATTR_TENSOR_DIMENSIONS, dims)
      .Set(CUDNN_ATTR_TENSOR_STRIDES, Strides(dims, problem.layout))
      .Set(CUDNN_ATTR_TENSOR_UNIQUE_ID, Id(tensor))
      .Set(CUDNN_ATTR_TENSOR_BYTE_ALIGNMENT, 16);
  return made->Finalize();
}

// The names that cuDNN gives to the parts of a role's operation.
struct Operation {
  cudnnBackendDescriptorType_t type;
  cudnnBackendAttributeName_t alpha, beta, convolution, x, w, y;
};

Operation OperationOf(Role role) {
  switch (role) {
    case Role::kX:
      return {CUDNN_BACKEND_OPERATION_CONVOLUTION_BACKWARD_DATA_DESCRIPTOR,
              CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_DATA_ALPHA,
              CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_DATA_BETA,
              CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_DATA_CONV_DESC,
              CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_DATA_DX,
              CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_DATA_W,
              CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_DATA_DY};
    case Role::kY:
      return {CUDNN_BACKEND_OPERATION_CONVOLUTION_FORWARD_DESCRIPTOR,
              CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_ALPHA,
              CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_BETA,
              CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_CONV_DESC,
              CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_X,
              CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_W,
              CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_Y};
    case Role::kW:
      break;
  }
  return {CUDNN_BACKEND_OPERATION_CONVOLUTION_BACKWARD_FILTER_DESCRIPTOR,
          CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_FILTER_ALPHA,
          CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_FILTER_BETA,
          CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_FILTER_CONV_DESC,
          CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_FILTER_X,
          CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_FILTER_DW,
          CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_FILTER_DY};
}

// A problem as a finalized operation graph.
struct Graph {
  Descriptor x, w, y, convolution, operation, graph;

  ffi::Error Make(const Cudnn* cudnn, cudnnHandle_t handle, const Problem& problem) {
    JAX_DECONV_RETURN_IF_ERROR(MakeTensor(cudnn, problem, Role::kX, &x));
    JAX_DECONV_RETURN_IF_ERROR(MakeTensor(cudnn, problem, Role::kW, &w));
    JAX_DECONV_RETURN_IF_ERROR(MakeTensor(cudnn, problem, Role::kY, &y));

    // Half precision accumulates in float32.
    const bool wide = problem.dtype == CUDNN_DATA_DOUBLE;
    const cudnnDataType_t compute = wide ? CUDNN_DATA_DOUBLE : CUDNN_DATA_FLOAT;
    const cudnnConvolutionMode_t mode = CUDNN_CROSS_CORRELATION;
    const auto stride = AtLeast2d(problem.stride, 0, 1);
    JAX_DECONV_RETURN_IF_ERROR(
        convolution.Create(cudnn, CUDNN_BACKEND_CONVOLUTION_DESCRIPTOR));
    convolution.Set(CUDNN_ATTR_CONVOLUTION_COMP_TYPE, CUDNN_TYPE_DATA_TYPE, &compute)
        .Set(CUDNN_ATTR_CONVOLUTION_CONV_MODE, CUDNN_TYPE_CONVOLUTION_MODE, &mode)
        .Set(CUDNN_ATTR_CONVOLUTION_SPATIAL_DIMS, static_cast<int64_t>(stride.size()))
        .Set(CUDNN_ATTR_CONVOLUTION_FILTER_STRIDES, stride)
        .Set(CUDNN_ATTR_CONVOLUTION_DILATIONS, AtLeast2d(problem.dilation, 0, 1))
        .Set(CUDNN_ATTR_CONVOLUTION_PRE_PADDINGS, AtLeast2d(problem.pad_lo, 0, 0))
        .Set(CUDNN_ATTR_CONVOLUTION_POST_PADDINGS, AtLeast2d(problem.pad_hi, 0, 0));
    JAX_DECONV_RETURN_IF_ERROR(convolution.Finalize());

    const Operation names = OperationOf(problem.role);
    JAX_DECONV_RETURN_IF_ERROR(operation.Create(cudnn, names.type));
    operation.Set(names.convolution, convolution)
        .Set(names.x, x)
        .Set(names.w, w)
        .Set(names.y, y);
    const double scale64[] = {1.0, 0.0};
    const float scale32[] = {1.0f, 0.0f};
    if (wide) {
      operation.Set(names.alpha, CUDNN_TYPE_DOUBLE, &scale64[0])
          .Set(names.beta, CUDNN_TYPE_DOUBLE, &scale64[1]);
    } else {
      operation.Set(names.alpha, CUDNN_TYPE_FLOAT, &scale32[0])
          .Set(names.beta, CUDNN_TYPE_FLOAT, &scale32[1]);
    }
    JAX_DECONV_RETURN_IF_ERROR(operation.Finalize());

    JAX_DECONV_RETURN_IF_ERROR(graph.Create(cudnn, CUDNN_BACKEND_OPERATIONGRAPH_DESCRIPTOR));
    graph.Set(CUDNN_ATTR_OPERATIONGRAPH_HANDLE, CUDNN_TYPE_HANDLE, &handle)
        .Set(CUDNN_ATTR_OPERATIONGRAPH_OPS, operation);
    return graph.Finalize();
  }
};

// Engines whose values are wrong, as seen with cuDNN 9.19.0 on an H200 over 402 problems and 6506
// plans.  Barred with every version: nothing says which one repairs them.
bool KnownWrong(const Problem& problem, int64_t engine) {
  const bool asymmetric = problem.pad_lo != problem.pad_hi;
  const bool huge = Count(problem.dims(problem.role)) > INT32_MAX;
  switch (problem.role) {
    case Role::kX:
      return (asymmetric && engine == 50) || (huge && (engine == 40 || engine == 57));
    case Role::kW:
      return asymmetric && (engine == 1 || engine == 18 || engine == 20);
    case Role::kY:
      break;
  }
  return false;
}

// The engine behind a configuration, and what is to be known about it.
struct EngineInfo {
  int64_t index = -1;
  std::set<cudnnBackendNumericalNote_t> numerics;
  bool compiles = false;

  ffi::Error Read(const Cudnn* cudnn, const Descriptor& config) {
    Descriptor engine;
    JAX_DECONV_RETURN_IF_ERROR(engine.Create(cudnn, CUDNN_BACKEND_ENGINE_DESCRIPTOR));
    cudnnBackendDescriptor_t raw = engine.raw();
    config.Get(CUDNN_ATTR_ENGINECFG_ENGINE, CUDNN_TYPE_BACKEND_DESCRIPTOR, &raw);
    engine.Get(CUDNN_ATTR_ENGINE_GLOBAL_INDEX, CUDNN_TYPE_INT64, &index);
    // More room than there are notes today, for those of later versions.
    cudnnBackendNumericalNote_t notes[32];
    const int64_t count = engine.Get(CUDNN_ATTR_ENGINE_NUMERICAL_NOTE,
                                     CUDNN_TYPE_NUMERICAL_NOTE, notes, 32);
    numerics = {notes, notes + count};
    cudnnBackendBehaviorNote_t behaviors[32];
    const int64_t behavior_count = engine.Get(CUDNN_ATTR_ENGINE_BEHAVIOR_NOTE,
                                              CUDNN_TYPE_BEHAVIOR_NOTE, behaviors, 32);
    compiles = std::count(behaviors, behaviors + behavior_count,
                          CUDNN_BEHAVIOR_NOTE_RUNTIME_COMPILATION) > 0;
    return ffi::Error::Success();
  }

  bool Permitted(const Problem& problem) const {
    if (KnownWrong(problem, index)) return false;
    if (numerics.count(CUDNN_NUMERICAL_NOTE_DOWN_CONVERT_INPUTS) ||
        numerics.count(CUDNN_NUMERICAL_NOTE_REDUCED_PRECISION_REDUCTION)) {
      return false;
    }
    if (problem.deterministic && numerics.count(CUDNN_NUMERICAL_NOTE_NONDETERMINISTIC)) {
      return false;
    }
    // On float32 a tensor core means TF32.
    return problem.tf32 || problem.dtype != CUDNN_DATA_FLOAT ||
           !numerics.count(CUDNN_NUMERICAL_NOTE_TENSOR_CORE);
  }
};

std::vector<int64_t> KnobsOf(const Cudnn* cudnn, const Descriptor& config) {
  std::vector<Descriptor> choices(CUDNN_KNOB_TYPE_COUNTS + 16);
  std::vector<cudnnBackendDescriptor_t> raw;
  for (Descriptor& choice : choices) {
    if (choice.Create(cudnn, CUDNN_BACKEND_KNOB_CHOICE_DESCRIPTOR).failure()) return {};
    raw.push_back(choice.raw());
  }
  const int64_t count = config.Get(CUDNN_ATTR_ENGINECFG_KNOB_CHOICES,
                                   CUDNN_TYPE_BACKEND_DESCRIPTOR, raw.data(), raw.size());
  std::vector<int64_t> knobs;
  for (int64_t i = 0; i < count; ++i) {
    cudnnBackendKnobType_t type{};
    int64_t value = 0;
    choices[i].Get(CUDNN_ATTR_KNOB_CHOICE_KNOB_TYPE, CUDNN_TYPE_KNOB_TYPE, &type);
    choices[i].Get(CUDNN_ATTR_KNOB_CHOICE_KNOB_VALUE, CUDNN_TYPE_INT64, &value);
    knobs.push_back(type);
    knobs.push_back(value);
  }
  return knobs;
}

// A configuration of an engine: its index and its knobs.
ffi::Error MakeConfig(const Cudnn* cudnn, const Graph& graph, const Choice& choice,
                      Descriptor* config) {
  Descriptor engine;
  JAX_DECONV_RETURN_IF_ERROR(engine.Create(cudnn, CUDNN_BACKEND_ENGINE_DESCRIPTOR));
  engine.Set(CUDNN_ATTR_ENGINE_OPERATION_GRAPH, graph.graph)
      .Set(CUDNN_ATTR_ENGINE_GLOBAL_INDEX, choice.engine);
  JAX_DECONV_RETURN_IF_ERROR(engine.Finalize());
  std::vector<Descriptor> knobs(choice.knobs.size() / 2);
  std::vector<cudnnBackendDescriptor_t> raw;
  for (size_t i = 0; i < knobs.size(); ++i) {
    const auto type = static_cast<cudnnBackendKnobType_t>(choice.knobs[2 * i]);
    JAX_DECONV_RETURN_IF_ERROR(
        knobs[i].Create(cudnn, CUDNN_BACKEND_KNOB_CHOICE_DESCRIPTOR));
    knobs[i]
        .Set(CUDNN_ATTR_KNOB_CHOICE_KNOB_TYPE, CUDNN_TYPE_KNOB_TYPE, &type)
        .Set(CUDNN_ATTR_KNOB_CHOICE_KNOB_VALUE, choice.knobs[2 * i + 1]);
    JAX_DECONV_RETURN_IF_ERROR(knobs[i].Finalize());
    raw.push_back(knobs[i].raw());
  }
  JAX_DECONV_RETURN_IF_ERROR(config->Create(cudnn, CUDNN_BACKEND_ENGINECFG_DESCRIPTOR));
  config->Set(CUDNN_ATTR_ENGINECFG_ENGINE, engine);
  if (!raw.empty()) {
    config->Set(CUDNN_ATTR_ENGINECFG_KNOB_CHOICES, CUDNN_TYPE_BACKEND_DESCRIPTOR, raw.data(),
                raw.size());
  }
  return config->Finalize();
}

// What the heuristics propose, best first; nothing where they fail.
std::vector<Descriptor> Heuristics(const Cudnn* cudnn, const Graph& graph,
                                   cudnnBackendHeurMode_t mode) {
  Descriptor heuristics;
  if (heuristics.Create(cudnn, CUDNN_BACKEND_ENGINEHEUR_DESCRIPTOR).failure()) return {};
  heuristics.Set(CUDNN_ATTR_ENGINEHEUR_OPERATION_GRAPH, graph.graph)
      .Set(CUDNN_ATTR_ENGINEHEUR_MODE, CUDNN_TYPE_HEUR_MODE, &mode);
  if (heuristics.Finalize().failure()) return {};
  std::vector<Descriptor> configs(128);
  std::vector<cudnnBackendDescriptor_t> raw;
  for (Descriptor& config : configs) {
    if (config.Create(cudnn, CUDNN_BACKEND_ENGINECFG_DESCRIPTOR).failure()) return {};
    raw.push_back(config.raw());
  }
  configs.resize(heuristics.Get(CUDNN_ATTR_ENGINEHEUR_RESULTS, CUDNN_TYPE_BACKEND_DESCRIPTOR,
                                raw.data(), raw.size()));
  return configs;
}

// Whether the first window along an axis ends beyond x.  Of filter gradients of groups in 16 bits
// where it does, CUDNN_HEUR_MODE_B dies of a null pointer (cuDNN 9.19).
bool WindowExceedsX(const Problem& problem) {
  for (size_t i = 0; i < problem.stride.size(); ++i) {
    const int64_t window = (problem.w[i + 2] - 1) * problem.dilation[i] + 1;
    if (problem.x[i + 2] + problem.pad_lo[i] < window) return true;
  }
  return false;
}

// What the heuristics propose: two of them in turn, so that the best of each come first (either misses
// plans that are up to 2.7 times as fast as any of the other's), or the one for where these have nothing
// that will do.  Among what that one proposes are engines that take seconds.
std::vector<Descriptor> Proposals(const Cudnn* cudnn, const Graph& graph, const Problem& problem,
                                  bool fallback) {
  if (fallback) return Heuristics(cudnn, graph, CUDNN_HEUR_MODE_FALLBACK);
  std::vector<Descriptor> a = Heuristics(cudnn, graph, CUDNN_HEUR_MODE_A), b;
  if (!WindowExceedsX(problem)) b = Heuristics(cudnn, graph, CUDNN_HEUR_MODE_B);
  std::vector<Descriptor> proposals;
  for (size_t i = 0; i < std::max(a.size(), b.size()); ++i) {
    if (i < a.size()) proposals.push_back(std::move(a[i]));
    if (i < b.size()) proposals.push_back(std::move(b[i]));
  }
  return proposals;
}

// An execution plan, ready to run.
struct Plan {
  Descriptor plan;
  int64_t workspace = 0;

  ffi::Error Make(const Cudnn* cudnn, cudnnHandle_t handle, const Descriptor& config) {
    JAX_DECONV_RETURN_IF_ERROR(
        plan.Create(cudnn, CUDNN_BACKEND_EXECUTION_PLAN_DESCRIPTOR));
    plan.Set(CUDNN_ATTR_EXECUTION_PLAN_HANDLE, CUDNN_TYPE_HANDLE, &handle)
        .Set(CUDNN_ATTR_EXECUTION_PLAN_ENGINE_CONFIG, config);
    JAX_DECONV_RETURN_IF_ERROR(plan.Finalize());
    plan.Get(CUDNN_ATTR_EXECUTION_PLAN_WORKSPACE_SIZE, CUDNN_TYPE_INT64, &workspace);
    return ffi::Error::Success();
  }

  ffi::Error Execute(const Cudnn* cudnn, cudnnHandle_t handle, const Problem& problem,
                     const Buffers& buffers) const {
    const int64_t ids[] = {Id(problem.a()), Id(problem.b()), Id(problem.role)};
    void* const pointers[] = {buffers.a, buffers.b, buffers.out};
    Descriptor pack;
    JAX_DECONV_RETURN_IF_ERROR(pack.Create(cudnn, CUDNN_BACKEND_VARIANT_PACK_DESCRIPTOR));
    pack.Set(CUDNN_ATTR_VARIANT_PACK_UNIQUE_IDS, CUDNN_TYPE_INT64, ids, 3)
        .Set(CUDNN_ATTR_VARIANT_PACK_DATA_POINTERS, CUDNN_TYPE_VOID_PTR, pointers, 3)
        .Set(CUDNN_ATTR_VARIANT_PACK_WORKSPACE, CUDNN_TYPE_VOID_PTR, &buffers.workspace);
    JAX_DECONV_RETURN_IF_ERROR(pack.Finalize());
    JAX_DECONV_CUDNN(cudnn->cudnnBackendExecute(handle, plan.raw(), pack.raw()));
    return ffi::Error::Success();
  }
};

// Builds the plan if the configuration is permitted and fits.
std::optional<Plan> TryConfig(const Cudnn* cudnn, cudnnHandle_t handle, const Problem& problem,
                              int64_t workspace, const Descriptor& config) {
  EngineInfo info;
  if (info.Read(cudnn, config).failure() || !info.Permitted(problem)) return std::nullopt;
  // Asked before the plan is built, since building may mean compiling.
  int64_t needed = 0;
  config.Get(CUDNN_ATTR_ENGINECFG_WORKSPACE_SIZE, CUDNN_TYPE_INT64, &needed);
  if (needed > workspace) return std::nullopt;
  Plan plan;
  if (plan.Make(cudnn, handle, config).failure() || plan.workspace > workspace) {
    return std::nullopt;
  }
  return plan;
}

ffi::Error BuildPlan(const Cudnn* cudnn, cudnnHandle_t handle, const Problem& problem,
                     const Choice& choice, std::optional<Plan>* plan) {
  Graph graph;
  JAX_DECONV_RETURN_IF_ERROR(graph.Make(cudnn, handle, problem));
  const auto attempt = [&](const Descriptor& config) {
    *plan = TryConfig(cudnn, handle, problem, choice.workspace, config);
    return plan->has_value();
  };
  if (choice.engine >= 0) {
    Descriptor config;
    if (MakeConfig(cudnn, graph, choice, &config).success() && attempt(config)) {
      return ffi::Error::Success();
    }
  }
  for (const bool fallback : {false, true}) {
    for (const Descriptor& config : Proposals(cudnn, graph, problem, fallback)) {
      if (attempt(config)) return ffi::Error::Success();
    }
  }
  // The last resort: any engine that fits, as it comes.
  int64_t engines = 0;
  graph.graph.Get(CUDNN_ATTR_OPERATIONGRAPH_ENGINE_GLOBAL_COUNT, CUDNN_TYPE_INT64, &engines);
  for (int64_t engine = 0; engine < engines; ++engine) {
    Descriptor config;
    if (MakeConfig(cudnn, graph, {engine, {}, 0}, &config).success() && attempt(config)) {
      return ffi::Error::Success();
    }
  }
  return ffi::Error(ffi::ErrorCode::kUnimplemented,
                    "no engine of cuDNN " + std::to_string(cudnn->cudnnGetVersion()) +
                        " takes this convolution within " + std::to_string(choice.workspace) +
                        " bytes of workspace");
}

// A plan in the cache, with the lock under which it is built.
struct Entry {
  std::mutex mutex;
  std::optional<Plan> plan;
};

// The plans in use, by the value of everything that determines them, least recently used first to
// go.  Entries are shared: one that is evicted lives on in the hands that hold it.
class Cache {
 public:
  std::shared_ptr<Entry> Get(std::string key) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (auto found = index_.find(key); found != index_.end()) {
      order_.splice(order_.begin(), order_, found->second);
      return found->second->second;
    }
    order_.emplace_front(std::move(key), std::make_shared<Entry>());
    index_[order_.front().first] = order_.begin();
    if (order_.size() > kCapacity) {
      index_.erase(order_.back().first);
      order_.pop_back();
    }
    return order_.front().second;
  }

 private:
  static constexpr size_t kCapacity = 10000;
  using Order = std::list<std::pair<std::string, std::shared_ptr<Entry>>>;
  std::mutex mutex_;
  Order order_;
  std::unordered_map<std::string_view, Order::iterator> index_;  // views of the keys in order_
};

std::string Key(const Problem& problem, const Choice& choice, int device) {
  std::vector<int64_t> words = {static_cast<int64_t>(problem.role),
                                problem.dtype,
                                problem.out_dtype,
                                static_cast<int64_t>(problem.layout),
                                problem.tf32,
                                problem.deterministic,
                                device,
                                choice.engine,
                                choice.workspace,
                                static_cast<int64_t>(problem.stride.size())};
  for (const auto* values : {&problem.x, &problem.w, &problem.y, &problem.stride,
                             &problem.dilation, &problem.pad_lo, &problem.pad_hi, &choice.knobs}) {
    words.insert(words.end(), values->begin(), values->end());
  }
  return std::string(reinterpret_cast<const char*>(words.data()), words.size() * sizeof(int64_t));
}

// The plan, from the cache or built.
ffi::Error GetPlan(const Cudnn* cudnn, const Problem& problem, const Choice& choice, int ordinal,
                   Device* device, std::shared_ptr<Entry>* entry) {
  static auto* cache = new Cache;
  *entry = cache->Get(Key(problem, choice, ordinal));
  std::lock_guard<std::mutex> lock((*entry)->mutex);
  if ((*entry)->plan.has_value()) return ffi::Error::Success();
  std::lock_guard<std::mutex> build(device->build);
  CurrentDevice current;
  JAX_DECONV_RETURN_IF_ERROR(current.Enter(ordinal));
  return BuildPlan(cudnn, device->builder, problem, choice, &(*entry)->plan);
}

}  // namespace

int64_t Count(const std::vector<int64_t>& dims) {
  int64_t count = 1;
  for (int64_t dim : dims) count *= dim;
  return count;
}

std::vector<int64_t> Strides(const std::vector<int64_t>& dims, Layout layout) {
  std::vector<size_t> order;  // innermost first
  if (layout == Layout::kChannelsLast) order.push_back(1);
  for (size_t i = dims.size(); i-- > 2;) order.push_back(i);
  if (layout == Layout::kChannelsFirst) order.push_back(1);
  order.push_back(0);
  std::vector<int64_t> strides(dims.size());
  int64_t stride = 1;
  for (size_t i : order) {
    strides[i] = stride;
    stride *= dims[i];
  }
  return strides;
}

ffi::Error Candidates(const Problem& problem, int ordinal, std::vector<Candidate>* candidates) {
  const Cudnn* cudnn;
  Device* device;
  JAX_DECONV_RETURN_IF_ERROR(GetCudnn(&cudnn));
  JAX_DECONV_RETURN_IF_ERROR(GetDevice(cudnn, ordinal, &device));
  std::lock_guard<std::mutex> build(device->build);
  CurrentDevice current;
  JAX_DECONV_RETURN_IF_ERROR(current.Enter(ordinal));
  Graph graph;
  JAX_DECONV_RETURN_IF_ERROR(graph.Make(cudnn, device->builder, problem));
  std::set<std::pair<int64_t, std::vector<int64_t>>> seen;
  for (const bool fallback : {false, true}) {
    const bool enough = fallback && !candidates->empty();
    for (const Descriptor& config : Proposals(cudnn, graph, problem, fallback)) {
      EngineInfo info;
      JAX_DECONV_RETURN_IF_ERROR(info.Read(cudnn, config));
      // Nothing but the fallback proposes the engines that are compiled; its others are slow.
      if (!info.Permitted(problem) || (enough && !info.compiles)) continue;
      Candidate candidate{{info.index, KnobsOf(cudnn, config), 0}, info.compiles};
      if (!seen.emplace(candidate.choice.engine, candidate.choice.knobs).second) continue;
      config.Get(CUDNN_ATTR_ENGINECFG_WORKSPACE_SIZE, CUDNN_TYPE_INT64,
                 &candidate.choice.workspace);
      candidates->push_back(std::move(candidate));
    }
  }
  return ffi::Error::Success();
}

ffi::Error Prepare(const Problem& problem, const Choice& choice, int ordinal) {
  const Cudnn* cudnn;
  Device* device;
  std::shared_ptr<Entry> entry;
  JAX_DECONV_RETURN_IF_ERROR(GetCudnn(&cudnn));
  JAX_DECONV_RETURN_IF_ERROR(GetDevice(cudnn, ordinal, &device));
  return GetPlan(cudnn, problem, choice, ordinal, device, &entry);
}

ffi::Error Run(const Problem& problem, const Choice& choice, int ordinal, CUstream stream,
               const Buffers& buffers) {
  const Cudnn* cudnn;
  Device* device;
  std::shared_ptr<Entry> entry;
  JAX_DECONV_RETURN_IF_ERROR(GetCudnn(&cudnn));
  JAX_DECONV_RETURN_IF_ERROR(GetDevice(cudnn, ordinal, &device));
  JAX_DECONV_RETURN_IF_ERROR(GetPlan(cudnn, problem, choice, ordinal, device, &entry));
  std::lock_guard<std::mutex> run(device->run);
  cudnnHandle_t runner;
  JAX_DECONV_RETURN_IF_ERROR(GetRunner(cudnn, ordinal, device, stream, &runner));
  return entry->plan->Execute(cudnn, runner, problem, buffers);
}

std::string Reproducer(const Problem& problem, const Choice& choice) {
  const auto type = [](cudnnDataType_t type) {
    return type == CUDNN_DATA_HALF       ? "float16"
           : type == CUDNN_DATA_BFLOAT16 ? "bfloat16"
           : type == CUDNN_DATA_DOUBLE   ? "float64"
                                         : "float32";
  };
  const auto list = [](const std::vector<int64_t>& values) {
    std::ostringstream out;
    for (int64_t value : values) out << (out.tellp() > 0 ? ", " : "") << value;
    return "[" + out.str() + "]";
  };
  std::ostringstream out;
  out << "from jax_deconv.lowering import cudnn\n"
      << "cudnn.reproduce(role=\"" << "xyw"[static_cast<int>(problem.role)] << "\", dtype=\""
      << type(problem.dtype) << "\", out_dtype=\"" << type(problem.out_dtype) << "\",\n"
      << "    x=" << list(problem.x) << ", w=" << list(problem.w) << ", y=" << list(problem.y)
      << ",\n    stride=" << list(problem.stride) << ", dilation=" << list(problem.dilation)
      << ", pad_lo=" << list(problem.pad_lo) << ", pad_hi=" << list(problem.pad_hi)
      << ",\n    layout=" << static_cast<int64_t>(problem.layout) << ", engine=" << choice.engine
      << ", knobs=" << list(choice.knobs) << ", workspace=" << choice.workspace
      << ",\n    tf32=" << (problem.tf32 ? "True" : "False")
      << ", deterministic=" << (problem.deterministic ? "True" : "False") << ")";
  return out.str();
}

}  // namespace jax_deconv

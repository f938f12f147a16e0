// Copyright 2026 The jax_deconv authors
// SPDX-License-Identifier: Apache-2.0
//
// How fast plans are, and whether they are right: cuDNN has plans whose values are wrong.

#include <algorithm>
#include <array>
#include <chrono>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>

#include "plan.h"

namespace jax_deconv {
namespace {

constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();

// The operands repeat a pattern of noise, so that the host knows every value of theirs without
// holding them.  The period is a prime: no axis lines up with it.
constexpr int64_t kPeriod = 65521;

// Products that the host may sum up for its reference, over all samples.
constexpr int64_t kReferenceTerms = 1'000'000;

// A candidate beyond the caller's patience is timed no more closely and its values are not looked
// at; nor is the very first when it takes this long.  On top come what a first run and any launch may
// add, in microseconds.
constexpr float kSlowest = 3e5f;
constexpr float kLoading = 50'000.0f;
constexpr float kLaunching = 20.0f;

// A close timing takes about so many microseconds, but never more runs; and one that comes this close
// to the best is repeated.
constexpr float kSpent = 500.0f;
constexpr int kMostRuns = 10;
constexpr float kClose = 1.1f;
constexpr float kLong = 20'000.0f;  // what takes longer is not repeated: noise is little of it

// No rounding explains an error of this size.
constexpr float kWrong = 0.05f;

// No kernel takes less; a difference of two times could be negative.
constexpr float kShortest = 0.5f;

size_t SizeOf(cudnnDataType_t type) {
  return type == CUDNN_DATA_DOUBLE ? 8 : type == CUDNN_DATA_FLOAT ? 4 : 2;
}

float HalfToFloat(uint16_t bits) {
  const int exponent = bits >> 10 & 31;
  const int mantissa = bits & 1023;
  const float magnitude = exponent == 31  ? (mantissa ? kNaN : HUGE_VALF)
                          : exponent == 0 ? std::ldexp(mantissa, -24)
                                          : std::ldexp(mantissa + 1024, exponent - 25);
  return bits >> 15 ? -magnitude : magnitude;
}

double Decode(const void* bytes, cudnnDataType_t type) {
  if (type == CUDNN_DATA_DOUBLE) return *static_cast<const double*>(bytes);
  if (type == CUDNN_DATA_FLOAT) return *static_cast<const float*>(bytes);
  const uint16_t bits = *static_cast<const uint16_t*>(bytes);
  if (type == CUDNN_DATA_HALF) return HalfToFloat(bits);
  const uint32_t wide = static_cast<uint32_t>(bits) << 16;
  float value;
  std::memcpy(&value, &wide, sizeof(value));
  return value;
}

// Noise: multiples of 1/64 in [-1, 1), which every type holds exactly.  So that TF32 and bfloat16
// round results only, and a tight bound on the error tells a wrong plan from a coarse one.
class Noise {
 public:
  Noise(cudnnDataType_t type, int64_t seed) : type_(type), values_(kPeriod) {
    std::mt19937 random(seed);
    for (int8_t& value : values_) value = static_cast<int8_t>(random() % 128) - 64;
  }

  double at(int64_t index) const { return values_[index % kPeriod] / 64.0; }

  // One period (or less, if the buffer is shorter) as the device reads it.
  std::vector<char> Encode(int64_t count) const {
    count = std::min(count, kPeriod);
    const size_t size = SizeOf(type_);
    std::vector<char> bytes(count * size);
    for (int64_t i = 0; i < count; ++i) {
      const double wide = at(i);
      const float value = static_cast<float>(wide);
      uint32_t word;
      std::memcpy(&word, &value, 4);
      char* out = &bytes[i * size];
      if (type_ == CUDNN_DATA_DOUBLE) {
        std::memcpy(out, &wide, 8);
      } else if (type_ == CUDNN_DATA_FLOAT) {
        std::memcpy(out, &value, 4);
      } else {
        // Exact in both: seven bits of mantissa at most, and no exponent below -6.
        const uint16_t bits =
            type_ == CUDNN_DATA_BFLOAT16 ? word >> 16
            : value == 0                 ? 0
                         : (word >> 16 & 0x8000) | (((word >> 23 & 255) - 112) << 10) |
                               (word >> 13 & 1023);
        std::memcpy(out, &bits, 2);
      }
    }
    return bytes;
  }

 private:
  cudnnDataType_t type_;
  std::vector<int8_t> values_;
};

using Index = std::array<int64_t, 5>;  // N, channel, three spatial axes

// The trilinear form of problem.py, summed up for single elements of the result.
class Reference {
 public:
  Reference(const Problem& problem, const std::vector<int64_t>& w_order, const Noise& a,
            const Noise& b)
      : problem_(problem), a_(a), b_(b) {
    for (Role tensor : {Role::kX, Role::kY, Role::kW}) {
      const std::vector<int64_t>& dims = problem.dims(tensor);
      dims_[int(tensor)] = Spread(dims, 2, 1);
      strides_[int(tensor)] = Spread(
          tensor == Role::kW ? Packed(dims, w_order) : Strides(dims, problem.layout), 2, 0);
    }
    stride_ = Spread(problem.stride, 0, 1);
    dilation_ = Spread(problem.dilation, 0, 1);
    pad_lo_ = Spread(problem.pad_lo, 0, 0);
    groups_ = dims(Role::kX)[1] / dims(Role::kW)[1];
  }

  const Index& dims(Role tensor) const { return dims_[int(tensor)]; }

  int64_t Offset(Role tensor, const Index& index) const {
    int64_t offset = 0;
    for (int i = 0; i < 5; ++i) offset += index[i] * strides_[int(tensor)][i];
    return offset;
  }

  // How many products one element takes, at most.
  int64_t Terms() const {
    const Index& free = dims(problem_.role == Role::kW ? Role::kY : Role::kW);
    const int64_t lead = problem_.role == Role::kW   ? free[0]
                         : problem_.role == Role::kY ? free[1]
                                                     : free[0] / groups_;
    return lead * free[2] * free[3] * free[4];
  }

  double At(const Index& made) const {
    const int64_t C = dims(Role::kW)[1];
    const int64_t K = dims(Role::kY)[1] / groups_;
    double sum = 0;
    Index x{}, w{}, y{};
    switch (problem_.role) {
      case Role::kY:
        y = made, x[0] = made[0], w[0] = made[1], x[1] = made[1] / K * C;
        ForEach(dims(Role::kW), 2, &w, [&] {
          if (XFrom(y, w, &x)) sum += Dot(x, 1, w, 1, C);
        });
        return sum;
      case Role::kX:
        x = made, y[0] = made[0], w[1] = made[1] % C, y[1] = w[0] = made[1] / C * K;
        ForEach(dims(Role::kW), 2, &w, [&] {
          if (YFrom(x, w, &y)) sum += Dot(y, 1, w, 0, K);
        });
        return sum;
      case Role::kW:
        w = made, y[1] = made[0], x[1] = made[0] / K * C + made[1];
        ForEach(dims(Role::kY), 2, &y, [&] {
          if (XFrom(y, w, &x)) sum += Dot(x, 0, y, 0, dims(Role::kX)[0]);
        });
    }
    return sum;
  }

 private:
  // The distance between neighbours where the axes lie in that order, outermost first.
  static std::vector<int64_t> Packed(const std::vector<int64_t>& dims,
                                     const std::vector<int64_t>& order) {
    std::vector<int64_t> strides(dims.size());
    int64_t stride = 1;
    for (auto axis = order.rbegin(); axis != order.rend(); stride *= dims[*axis++]) {
      strides[*axis] = stride;
    }
    return strides;
  }

  // Up to three spatial axes as three, the missing ones first.
  static Index Spread(const std::vector<int64_t>& values, size_t lead, int64_t fill) {
    Index spread{1, 1, fill, fill, fill};
    std::copy_n(values.begin(), lead, spread.begin());
    std::copy(values.begin() + lead, values.end(), spread.end() - (values.size() - lead));
    return spread;
  }

  template <typename Body>
  static void ForEach(const Index& dims, int from, Index* index, Body body) {
    if (from == 5) return body();
    for ((*index)[from] = 0; (*index)[from] < dims[from]; ++(*index)[from]) {
      ForEach(dims, from + 1, index, body);
    }
  }

  bool XFrom(const Index& y, const Index& w, Index* x) const {
    for (int i = 2; i < 5; ++i) {
      (*x)[i] = y[i] * stride_[i] + w[i] * dilation_[i] - pad_lo_[i];
      if ((*x)[i] < 0 || (*x)[i] >= dims(Role::kX)[i]) return false;
    }
    return true;
  }

  bool YFrom(const Index& x, const Index& w, Index* y) const {
    for (int i = 2; i < 5; ++i) {
      const int64_t scaled = x[i] + pad_lo_[i] - w[i] * dilation_[i];
      (*y)[i] = scaled / stride_[i];
      if (scaled < 0 || scaled % stride_[i] != 0 || (*y)[i] >= dims(Role::kY)[i]) return false;
    }
    return true;
  }

  // Sums up the operands' products along an axis of each.
  double Dot(const Index& a, int a_axis, const Index& b, int b_axis, int64_t count) const {
    const int64_t a_step = strides_[int(problem_.a())][a_axis];
    const int64_t b_step = strides_[int(problem_.b())][b_axis];
    int64_t i = Offset(problem_.a(), a), j = Offset(problem_.b(), b);
    double sum = 0;
    for (; count > 0; --count, i += a_step, j += b_step) sum += a_.at(i) * b_.at(j);
    return sum;
  }

  const Problem& problem_;
  const Noise& a_;
  const Noise& b_;
  std::array<Index, 3> dims_, strides_;
  Index stride_, dilation_, pad_lo_;
  int64_t groups_;
};

// An element of the result and its true value.
struct Sample {
  int64_t offset;
  double value;
};

// Samples favour the ends of every axis, where kernels go wrong.
std::vector<Sample> DrawSamples(const Problem& problem, const Reference& reference, int64_t seed) {
  const Index& dims = reference.dims(problem.role);
  const int64_t count =
      std::clamp<int64_t>(kReferenceTerms / std::max<int64_t>(reference.Terms(), 1), 4, 96);
  std::mt19937_64 random(seed);
  std::vector<Sample> samples;
  for (int64_t i = 0; i < count; ++i) {
    Index index;
    for (int axis = 0; axis < 5; ++axis) {
      const uint64_t side = random() % 4;
      index[axis] = side == 0   ? 0
                    : side == 1 ? dims[axis] - 1
                                : static_cast<int64_t>(random() % dims[axis]);
    }
    samples.push_back({reference.Offset(problem.role, index), reference.At(index)});
  }
  return samples;
}

CUdeviceptr Address(void* pointer) { return reinterpret_cast<CUdeviceptr>(pointer); }

// One problem's candidates, timed on one stream.
class Timer {
 public:
  Timer(const Driver& driver, const Problem& problem, float patience, CUstream stream,
        const Buffers& buffers)
      : driver_(driver), problem_(problem), patience_(patience), stream_(stream),
        buffers_(buffers) {}

  ~Timer() {
    for (CUevent event : {start_, stop_}) {
      if (event != nullptr) driver_.event_destroy(event);
    }
  }

  ffi::Error Init() {
    JAX_DECONV_DRIVER(driver_.event_create(&start_, CU_EVENT_DEFAULT));
    JAX_DECONV_DRIVER(driver_.event_create(&stop_, CU_EVENT_DEFAULT));
    return Repeat([] { return ffi::Error::Success(); }, kMostRuns, &flushing_);
  }

  // Fills an operand with its noise: one period from the host, then ever longer copies.
  ffi::Error Fill(void* buffer, Role tensor, const Noise& noise) {
    const int64_t count = Count(problem_.dims(tensor));
    const std::vector<char> period = noise.Encode(count);
    const size_t bytes = count * SizeOf(problem_.dtype);
    size_t done = period.size();
    JAX_DECONV_DRIVER(
        driver_.copy_to_device(Address(buffer), period.data(), done, stream_));
    while (done < bytes) {
      const size_t more = std::min(done, bytes - done);
      JAX_DECONV_DRIVER(
          driver_.copy_on_device(Address(buffer) + done, Address(buffer), more, stream_));
      done += more;
    }
    JAX_DECONV_DRIVER(driver_.stream_synchronize(stream_));  // before the period is freed
    return ffi::Error::Success();
  }

  ffi::Error Measure(const Trial& trial, const std::vector<Sample>& samples, Timing* timing) {
    JAX_DECONV_RETURN_IF_ERROR(trial.prepare());
    // All ones is NaN in every type: what a trial leaves unwritten, or reads of a workspace that it
    // has not written, shows.
    const int64_t bytes = Count(problem_.dims(problem_.role)) * SizeOf(problem_.out_dtype);
    JAX_DECONV_DRIVER(driver_.fill(Address(buffers_.out), 0xff, bytes, stream_));
    if (trial.workspace > 0) {
      JAX_DECONV_DRIVER(driver_.fill(Address(buffers_.workspace), 0xff, trial.workspace, stream_));
    }
    float& once = timing->microseconds;
    JAX_DECONV_RETURN_IF_ERROR(RunOnce(trial, &once));
    // The first run may have loaded code, which takes up to some milliseconds.
    if (once > patience_ * best_ + kLoading) return ffi::Error::Success();
    JAX_DECONV_RETURN_IF_ERROR(RunOnce(trial, &once));
    if (once > patience_ * best_ + kLaunching) return ffi::Error::Success();
    JAX_DECONV_RETURN_IF_ERROR(Compare(samples, &timing->error));
    const int runs = static_cast<int>(kSpent / std::max(once, kShortest));
    JAX_DECONV_RETURN_IF_ERROR(Repeat(trial.run, std::clamp(runs, 1, kMostRuns), &once));
    once = std::max(once - flushing_, kShortest);
    // A wrong one is no measure for others.
    if (timing->error < kWrong) best_ = std::min(best_, once);
    return ffi::Error::Success();
  }

 private:
  ffi::Error RunOnce(const Trial& trial, float* microseconds) {
    JAX_DECONV_DRIVER(driver_.event_record(start_, stream_));
    JAX_DECONV_RETURN_IF_ERROR(trial.run());
    return Elapsed(microseconds);
  }

  ffi::Error Elapsed(float* microseconds) {
    JAX_DECONV_DRIVER(driver_.event_record(stop_, stream_));
    JAX_DECONV_DRIVER(driver_.event_synchronize(stop_));
    JAX_DECONV_DRIVER(driver_.event_elapsed(microseconds, start_, stop_));
    *microseconds *= 1000;
    return ffi::Error::Success();
  }

  // The time of one run out of several in a CUDA graph, without the host's part, as most of them will
  // run.  A trial that cannot be captured fails here.
  //
  // Before each run the workspace is overwritten, which leaves nothing of the operands in the L2 cache,
  // just as the rest of a model would.  That is part of the time.
  ffi::Error Repeat(const std::function<ffi::Error()>& run, int times, float* microseconds) {
    JAX_DECONV_DRIVER(driver_.begin_capture(stream_, CU_STREAM_CAPTURE_MODE_RELAXED));
    ffi::Error error = ffi::Error::Success();
    for (int i = 0; i < times && error.success(); ++i) {
      error = Flush();
      if (error.success()) error = run();
    }
    CUgraph graph = nullptr;
    const CUresult captured = driver_.end_capture(stream_, &graph);
    CUgraphExec exec = nullptr;
    if (error.success()) error = Replay(captured, graph, times, &exec, microseconds);
    if (exec != nullptr) driver_.graph_exec_destroy(exec);
    if (graph != nullptr) driver_.graph_destroy(graph);
    *microseconds /= times;
    return error;
  }

  ffi::Error Flush() {
    JAX_DECONV_DRIVER(driver_.fill(Address(buffers_.workspace), 0xff, kTimingWorkspace, stream_));
    return ffi::Error::Success();
  }

  ffi::Error Replay(CUresult captured, CUgraph graph, int times, CUgraphExec* exec,
                    float* microseconds) {
    JAX_DECONV_DRIVER(captured);
    JAX_DECONV_DRIVER(driver_.graph_instantiate(exec, graph, 0));
    *microseconds = HUGE_VALF;
    const float close = kClose * times * (best_ + flushing_);
    for (int i = 0; i < 3 && (i == 0 || *microseconds < std::min(close, kLong)); ++i) {
      float elapsed;
      JAX_DECONV_DRIVER(driver_.event_record(start_, stream_));
      JAX_DECONV_DRIVER(driver_.graph_launch(*exec, stream_));
      JAX_DECONV_RETURN_IF_ERROR(Elapsed(&elapsed));
      *microseconds = std::min(*microseconds, elapsed);
    }
    return ffi::Error::Success();
  }

  ffi::Error Compare(const std::vector<Sample>& samples, float* error) {
    const size_t size = SizeOf(problem_.out_dtype);
    std::vector<double> raw(samples.size());  // room and alignment for any type
    for (size_t i = 0; i < samples.size(); ++i) {
      JAX_DECONV_DRIVER(driver_.copy_to_host(
          &raw[i], Address(buffers_.out) + samples[i].offset * size, size, stream_));
    }
    JAX_DECONV_DRIVER(driver_.stream_synchronize(stream_));
    double difference = 0, norm = 0;
    for (size_t i = 0; i < samples.size(); ++i) {
      const double delta = Decode(&raw[i], problem_.out_dtype) - samples[i].value;
      difference += delta * delta;
      norm += samples[i].value * samples[i].value;
    }
    *error = difference == 0 ? 0 : std::sqrt(difference / norm);
    return ffi::Error::Success();
  }

  const Driver& driver_;
  const Problem& problem_;
  const float patience_;
  const CUstream stream_;
  const Buffers buffers_;
  CUevent start_ = nullptr, stop_ = nullptr;
  float best_ = kSlowest;
  float flushing_ = 0;  // what overwriting the workspace takes
};

}  // namespace

ffi::Error Time(const Problem& problem, const std::vector<int64_t>& w_order,
                const std::vector<Trial>& trials, double budget_us, double patience, int64_t seed,
                CUstream stream, const Buffers& buffers, std::vector<Timing>* timings) {
  using Clock = std::chrono::steady_clock;
  const Clock::time_point start = Clock::now();
  const Driver* driver;
  JAX_DECONV_RETURN_IF_ERROR(GetDriver(&driver));
  const Noise a(problem.dtype, seed), b(problem.dtype, seed + 1);
  const std::vector<Sample> samples =
      DrawSamples(problem, Reference(problem, w_order, a, b), seed + 2);
  Timer timer(*driver, problem, static_cast<float>(patience), stream, buffers);
  JAX_DECONV_RETURN_IF_ERROR(timer.Init());
  JAX_DECONV_RETURN_IF_ERROR(timer.Fill(buffers.a, problem.a(), a));
  JAX_DECONV_RETURN_IF_ERROR(timer.Fill(buffers.b, problem.b(), b));
  for (const Trial& trial : trials) {
    timings->push_back({kNaN, kNaN});
    const std::chrono::duration<double, std::micro> spent = Clock::now() - start;
    if (spent.count() > budget_us) continue;
    // A candidate that fails is one that does not win.
    Timing timing{kNaN, kNaN};
    if (timer.Measure(trial, samples, &timing).success()) timings->back() = timing;
  }
  return ffi::Error::Success();
}

}  // namespace jax_deconv

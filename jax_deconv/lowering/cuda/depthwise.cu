// Copyright 2026 The jax_deconv authors
// SPDX-License-Identifier: Apache-2.0
//
// Depthwise convolutions, and groups of few channels: all three roles.  Memory bounds them.
//
// On each axis a tap r = rho + q * PHASES joins y[i] and x[i * S + rho * D - P + q * STEP * S], where
// S / PHASES = D / STEP is the greatest common divisor of stride and dilation: for one rho this is a convolution
// without stride.  A thread takes a vector of groups and TILE positions along the last axis, STEP apart in y and
// STEP * S apart in x.  In that measure there is no dilation either: TILE + TAPS - 1 inputs, a window kept in
// registers, serve TILE positions and TAPS taps.
//
// A block takes LANES vectors, SEGMENT_TILE segments (of TILE positions) and ROW_TILE rows (all axes but the last,
// and the batch), so that neighbours find in L1 what they share.
//
// Macros: ROLE_x, ROLE_y or ROLE_w; IN and OUT, types of common.cuh; INDEX_BITS, of offsets; G, C, K;
// X0, Y0, R0, S0, D0, P0 and so on for three axes: sizes of x, y and w, stride, dilation, padding before x;
// GROUPS in a vector; TILE; TAPS; SEGMENTS, ROWS; LANES, CHUNKS, SEGMENT_TILE, ROW_TILE.
// Role w: RESIDENT blocks on a multiprocessor; BATCH, PART_ROWS, PARTS, SLAB (its tiles), SLABS, ROUND.

#ifndef BIAS
#define BIAS 0
#endif
#ifndef ACTIVATION
#define ACTIVATION(v) (v)
#endif

namespace depthwise {

using namespace jd;

#if INDEX_BITS == 64
typedef long long Index;
#else
typedef int Index;
#endif

__device__ constexpr int gcd(int a, int b) { return b ? gcd(b, a % b) : a; }

template <int X_, int Y_, int R_, int S_, int D_, int P_> struct Axis {
  static constexpr int X = X_, Y = Y_, R = R_, S = S_, D = D_, P = P_;
  static constexpr int PHASES = S / gcd(S, D), STEP = D / gcd(S, D), Q = (R + PHASES - 1) / PHASES;

  // The number whose product with STEP is 1 modulo PHASES, which is small.
  static __device__ constexpr int inverse() {
    int k = 0;
    while (k * (STEP % PHASES) % PHASES != 1 % PHASES) ++k;
    return k;
  }

  // The taps that reach x[j] start with tap rho, at y[i]; tap rho + q * PHASES joins it to y[i - q * STEP].
  static __device__ __forceinline__ bool phase(int j, int& rho, int& i) {
    constexpr int GCD = S / PHASES, SHIFT = (P % S + S) % S, INVERSE = inverse();
    const int rest = S == 1 ? 0 : (j + SHIFT) % S;
    rho = PHASES == 1 ? 0 : rest / GCD * INVERSE % PHASES;
    i = (j + SHIFT - rho * D) / S + (P - SHIFT) / S;
    return rest % GCD == 0;
  }
};
typedef Axis<X0, Y0, R0, S0, D0, P0> A0;
typedef Axis<X1, Y1, R1, S1, D1, P1> A1;
typedef Axis<X2, Y2, R2, S2, D2, P2> A2;

// Elements of x, y and w in a vector of groups, and between positions or taps.
constexpr int VX = GROUPS * C, VY = GROUPS * K, VW = GROUPS * K * C;
constexpr Index PX = G * C, PY = G * K, PW = G * K * C;
constexpr int VECTORS = G / GROUPS;
constexpr int WINDOW = TILE + TAPS - 1;
constexpr int SLOTS = SEGMENT_TILE * ROW_TILE;

template <typename T> __device__ constexpr int words(int elements) { return (elements * sizeof(T) + 3) / 4; }

template <int ELEMENTS> struct Raw { unsigned word[words<IN>(ELEMENTS)]; };

template <int ELEMENTS> __device__ __forceinline__ void zero(Raw<ELEMENTS>& raw) {
#pragma unroll
  for (int k = 0; k < words<IN>(ELEMENTS); ++k) raw.word[k] = 0;
}

// Vectors lie at multiples of their own size.
template <int ELEMENTS> __device__ __forceinline__ void fetch(Raw<ELEMENTS>& raw, const IN* from) {
  constexpr int BYTES = ELEMENTS * sizeof(IN);
  if constexpr (BYTES % 16 == 0) {
#pragma unroll
    for (int k = 0; k < BYTES / 16; ++k) {
      const uint4 v = __ldg(reinterpret_cast<const uint4*>(from) + k);
      raw.word[4 * k] = v.x, raw.word[4 * k + 1] = v.y, raw.word[4 * k + 2] = v.z, raw.word[4 * k + 3] = v.w;
    }
  } else if constexpr (BYTES % 8 == 0) {
#pragma unroll
    for (int k = 0; k < BYTES / 8; ++k) {
      const uint2 v = __ldg(reinterpret_cast<const uint2*>(from) + k);
      raw.word[2 * k] = v.x, raw.word[2 * k + 1] = v.y;
    }
  } else if constexpr (BYTES % 4 == 0) {
#pragma unroll
    for (int k = 0; k < BYTES / 4; ++k) raw.word[k] = __ldg(reinterpret_cast<const unsigned*>(from) + k);
  } else {
    const unsigned short* bits = reinterpret_cast<const unsigned short*>(from);
#pragma unroll
    for (int k = 0; k < ELEMENTS; k += 2)
      raw.word[k / 2] = __ldg(bits + k) | (k + 1 < ELEMENTS ? unsigned(__ldg(bits + k + 1)) << 16 : 0u);
  }
}

template <int ELEMENTS> __device__ __forceinline__ void widen(float (&to)[ELEMENTS], const Raw<ELEMENTS>& raw) {
#pragma unroll
  for (int k = 0; k < ELEMENTS; ++k)
    if constexpr (sizeof(IN) == 4)
      to[k] = __uint_as_float(raw.word[k]);
    else
      to[k] = to_float(IN{(unsigned short)(raw.word[k / 2] >> k % 2 * 16)});
}

template <int ELEMENTS> __device__ __forceinline__ void store(OUT* to, const float (&from)[ELEMENTS]) {
  constexpr int BYTES = ELEMENTS * sizeof(OUT), WORDS = words<OUT>(ELEMENTS);
  unsigned word[WORDS];
#pragma unroll
  for (int k = 0; k < WORDS; ++k)
    if constexpr (sizeof(OUT) == 4)
      word[k] = __float_as_uint(from[k]);
    else
      word[k] = pack<OUT>(from[2 * k], 2 * k + 1 < ELEMENTS ? from[(2 * k + 1) % ELEMENTS] : 0.f);
  if constexpr (BYTES % 16 == 0) {
#pragma unroll
    for (int k = 0; k < BYTES / 16; ++k)
      reinterpret_cast<uint4*>(to)[k] = make_uint4(word[4 * k], word[4 * k + 1], word[4 * k + 2], word[4 * k + 3]);
  } else if constexpr (BYTES % 8 == 0) {
#pragma unroll
    for (int k = 0; k < BYTES / 8; ++k) reinterpret_cast<uint2*>(to)[k] = make_uint2(word[2 * k], word[2 * k + 1]);
  } else if constexpr (BYTES % 4 == 0) {
#pragma unroll
    for (int k = 0; k < BYTES / 4; ++k) reinterpret_cast<unsigned*>(to)[k] = word[k];
  } else {
#pragma unroll
    for (int k = 0; k < ELEMENTS; ++k) reinterpret_cast<unsigned short*>(to)[k] = word[k / 2] >> k % 2 * 16;
  }
}

// COUNT vectors, STEP positions apart from position `first` on; zero outside [0, size), and all if not `there`.
template <int COUNT, int ELEMENTS, int STEP>
__device__ __forceinline__ void gather(Raw<ELEMENTS> (&to)[COUNT], const IN* from, bool there, int first, int size,
                                       Index pitch) {
  from += first * pitch;
  // One way for all threads of a warp: the two would wait for each other's loads.
  if (__all_sync(__activemask(), there && first >= 0 && first + (COUNT - 1) * STEP < size)) {
#pragma unroll
    for (int u = 0; u < COUNT; ++u) fetch(to[u], from + u * STEP * pitch);
  } else {
#pragma unroll
    for (int u = 0; u < COUNT; ++u) {
      zero(to[u]);
      if (there && unsigned(first + u * STEP) < unsigned(size)) fetch(to[u], from + u * STEP * pitch);
    }
  }
}

constexpr Index SEGMENT_TILES = (SEGMENTS + SEGMENT_TILE - 1) / SEGMENT_TILE;
constexpr Index ROW_TILES = (ROWS + ROW_TILE - 1) / ROW_TILE;

// Where a thread works: its vector, its segment's first position, its row.
struct Place {
  int vector, position, axis1, axis0;
  Index n;
};

// STEP lies between the positions of a segment.  False where there is nothing to do.
template <int SIZE0, int SIZE1, int SIZE2, int STEP>
__device__ __forceinline__ bool place(Place& at, int chunk, Index tile, int lane, int slot) {
#ifdef ROLE_w  // a block takes one tile after the other down the rows, and finds inputs of the last one in L1
  const int segment = int(tile / ROW_TILES) * SEGMENT_TILE + slot % SEGMENT_TILE;
  const Index row = tile % ROW_TILES * ROW_TILE + slot / SEGMENT_TILE;
#else
  const int segment = int(tile % SEGMENT_TILES) * SEGMENT_TILE + slot % SEGMENT_TILE;
  const Index row = tile / SEGMENT_TILES * ROW_TILE + slot / SEGMENT_TILE;
#endif
  at.vector = chunk * LANES + lane;
  at.position = segment / STEP * (STEP * TILE) + segment % STEP;
  at.axis1 = row % SIZE1;
  at.axis0 = row / SIZE1 % SIZE0;
  at.n = row / SIZE1 / SIZE0;
  return at.vector < VECTORS && segment < SEGMENTS && at.position < SIZE2 && row < ROWS;
}

// The positions of a segment, of a row of `to` that has `size` of them.
template <int ELEMENTS, int STEP>
__device__ __forceinline__ void finish(OUT* to, const float (&sum)[TILE][ELEMENTS], const OUT* bias, int first,
                                       int size, Index pitch) {
  float offset[ELEMENTS] = {};
#if BIAS
#pragma unroll
  for (int k = 0; k < ELEMENTS; ++k) offset[k] = to_float(bias[k]);
#endif
  to += first * pitch;
#pragma unroll
  for (int t = 0; t < TILE; ++t)
    if (first + t * STEP < size) {
      float result[ELEMENTS];
#pragma unroll
      for (int k = 0; k < ELEMENTS; ++k) {
        const float v = sum[t][k] + offset[k];
        result[k] = ACTIVATION(v);
      }
      store(to + t * STEP * pitch, result);
    }
}

// What a thread sums over comes in tap rows: TAPS taps along the last axis for one tap of the other axes.
constexpr int CHAIN = (A2::Q + TAPS - 1) / TAPS;

#if !defined(ROLE_x)
constexpr int TAP_ROWS = A0::R * A1::R * A2::PHASES * CHAIN;

struct TapRow {
  int r0, r1, rho, q;
  __device__ __forceinline__ TapRow(int row)
      : r0(row / (CHAIN * A2::PHASES * A1::R)), r1(row / (CHAIN * A2::PHASES) % A1::R), rho(row / CHAIN % A2::PHASES),
        q(row % CHAIN * TAPS) {}
};

// The window of x that a tap row joins to the place's segment of y; false where it lies outside.
__device__ __forceinline__ bool join(Raw<VX> (&window)[WINDOW], const IN* image, const Place& at, int row) {
  const TapRow tap(row);
  const int x0 = at.axis0 * A0::S + tap.r0 * A0::D - A0::P, x1 = at.axis1 * A1::S + tap.r1 * A1::D - A1::P;
  const bool there = row < TAP_ROWS && unsigned(x0) < unsigned(A0::X) && unsigned(x1) < unsigned(A1::X);
  const int first = at.position * A2::S + tap.rho * A2::D - A2::P + tap.q * (A2::STEP * A2::S);
  gather<WINDOW, VX, A2::STEP * A2::S>(window, image + (Index(x0) * A1::X + x1) * A2::X * PX, there, first, A2::X, PX);
  return there;
}
#endif

#if !defined(ROLE_w)
// The weights of TAPS taps, the first of them rho + q * PHASES; not live where there is no such tap.
__device__ __forceinline__ void taps(float (&to)[TAPS][VW], bool (&live)[TAPS], const IN* w, int rho, int q) {
#pragma unroll
  for (int k = 0; k < TAPS; ++k) {
    const int r = rho + (q + k) * A2::PHASES;
    live[k] = A2::R % (A2::PHASES * TAPS) == 0 || r < A2::R;
    Raw<VW> raw;
    zero(raw);
    if (live[k]) fetch(raw, w + r * PW);
    widen(to[k], raw);
  }
}
#endif

#if defined(ROLE_y)
extern "C" __global__ void __launch_bounds__(LANES* SLOTS)
    depthwise_y(const IN* __restrict__ x, const IN* __restrict__ w, const OUT* __restrict__ bias, OUT* __restrict__ y,
                char*) {
  Place at;
  if (!place<A0::Y, A1::Y, A2::Y, A2::STEP>(at, blockIdx.x % CHUNKS, blockIdx.x / CHUNKS, threadIdx.x % LANES,
                                            threadIdx.x / LANES))
    return;
  w += at.vector * VW;
  x += at.n * (Index(A0::X) * A1::X * A2::X * PX) + at.vector * VX;
  float sum[TILE][VY] = {};
#pragma unroll 4
  for (int row = 0; row < TAP_ROWS; ++row) {
    Raw<VX> window[WINDOW];
    if (!join(window, x, at, row)) continue;
    const TapRow tap(row);
    float weight[TAPS][VW];
    bool live[TAPS];
    taps(weight, live, w + (tap.r0 * A1::R + tap.r1) * A2::R * PW, tap.rho, tap.q);
#pragma unroll
    for (int u = 0; u < WINDOW; ++u) {
      float input[VX];
      widen(input, window[u]);
#pragma unroll
      for (int k = 0; k < TAPS; ++k)
        if (u >= k && u - k < TILE && live[k])
#pragma unroll
          for (int v = 0; v < VW; ++v) sum[u - k][v / C] += input[v / (K * C) * C + v % C] * weight[k][v];
    }
  }
  y += ((at.n * A0::Y + at.axis0) * A1::Y + at.axis1) * (A2::Y * PY) + at.vector * VY;
  finish<VY, A2::STEP>(y, sum, bias + at.vector * VY, at.position, A2::Y, PY);
}
#endif

#if defined(ROLE_x)
extern "C" __global__ void __launch_bounds__(LANES* SLOTS)
    depthwise_x(const IN* __restrict__ y, const IN* __restrict__ w, const OUT* __restrict__ bias, OUT* __restrict__ x,
                char*) {
  Place at;
  if (!place<A0::X, A1::X, A2::X, A2::STEP * A2::S>(at, blockIdx.x % CHUNKS, blockIdx.x / CHUNKS, threadIdx.x % LANES,
                                                    threadIdx.x / LANES))
    return;
  w += at.vector * VW;
  y += at.n * (Index(A0::Y) * A1::Y * A2::Y * PY) + at.vector * VY;
  float sum[TILE][VX] = {};
  int rho0, rho1, rho, first0, first1, first;
  const bool reached0 = A0::phase(at.axis0, rho0, first0), reached1 = A1::phase(at.axis1, rho1, first1);
  if (A2::phase(at.position, rho, first) && reached0 && reached1) {
#pragma unroll 4
    for (int row = 0; row < A0::Q * A1::Q * CHAIN; ++row) {
      const int q0 = row / (CHAIN * A1::Q), q1 = row / CHAIN % A1::Q, q = row % CHAIN * TAPS;
      const int r0 = rho0 + q0 * A0::PHASES, y0 = first0 - q0 * A0::STEP;
      const int r1 = rho1 + q1 * A1::PHASES, y1 = first1 - q1 * A1::STEP;
      const bool there =
          r0 < A0::R && r1 < A1::R && unsigned(y0) < unsigned(A0::Y) && unsigned(y1) < unsigned(A1::Y);
      Raw<VY> window[WINDOW];
      gather<WINDOW, VY, A2::STEP>(window, y + (Index(y0) * A1::Y + y1) * A2::Y * PY, there,
                                   first - (q + TAPS - 1) * A2::STEP, A2::Y, PY);
      if (!there) continue;
      float weight[TAPS][VW];
      bool live[TAPS];
      taps(weight, live, w + (r0 * A1::R + r1) * A2::R * PW, rho, q);
#pragma unroll
      for (int u = 0; u < WINDOW; ++u) {
        float input[VY];
        widen(input, window[u]);
#pragma unroll
        for (int k = 0; k < TAPS; ++k) {
          const int t = u + k - (TAPS - 1);
          if (t >= 0 && t < TILE && live[k])
#pragma unroll
            for (int v = 0; v < VW; ++v) sum[t][v / (K * C) * C + v % C] += input[v / C] * weight[k][v];
        }
      }
    }
  }
  x += ((at.n * A0::X + at.axis0) * A1::X + at.axis1) * (A2::X * PX) + at.vector * VX;
  finish<VX, A2::STEP * A2::S>(x, sum, bias + at.vector * VX, at.position, A2::X, PX);
}
#endif

#if defined(ROLE_w)
// A thread sums PART_ROWS tap rows over its positions, a block over its slab of tiles.  The blocks' sums lie in the
// workspace as [SLABS, *R, G*K, C].
constexpr int SUMS = PART_ROWS * TAPS * VW;
constexpr int THREADS = LANES * SLOTS * PARTS;
constexpr int PART_BLOCKS = (TAP_ROWS + PART_ROWS * PARTS - 1) / (PART_ROWS * PARTS);
constexpr Index ALL_TAPS = Index(A0::R) * A1::R * A2::R;

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT)
    depthwise_w(const IN* __restrict__ x, const IN* __restrict__ y, const OUT*, OUT*, char* workspace) {
  __shared__ float shared[ROUND * (THREADS + LANES)];
  const int lane = threadIdx.x % LANES, slot = threadIdx.x / LANES % SLOTS, part = threadIdx.x / (LANES * SLOTS);
  const int chunk = blockIdx.x % CHUNKS, part_block = blockIdx.x / CHUNKS % PART_BLOCKS;
  const int slab = blockIdx.x / (CHUNKS * PART_BLOCKS);
  const int first_row = PART_BLOCKS * PARTS == 1 ? 0 : (part_block * PARTS + part) * PART_ROWS;
  float sum[PART_ROWS][TAPS][VW] = {};
  for (Index tile = Index(slab) * SLAB; tile < Index(slab + 1) * SLAB && tile < SEGMENT_TILES * ROW_TILES; ++tile) {
    Place at;
    if (!place<A0::Y, A1::Y, A2::Y, A2::STEP>(at, chunk, tile, lane, slot)) continue;
    Raw<VY> raw[TILE];
    gather<TILE, VY, A2::STEP>(raw, y + ((at.n * A0::Y + at.axis0) * A1::Y + at.axis1) * (A2::Y * PY) + at.vector * VY,
                               true, at.position, A2::Y, PY);
    const IN* image = x + at.n * (Index(A0::X) * A1::X * A2::X * PX) + at.vector * VX;
    float cotangent[TILE][VY];
#pragma unroll
    for (int row = 0; row < PART_ROWS; row += BATCH) {
      Raw<VX> window[BATCH][WINDOW];
      bool there[BATCH];
#pragma unroll
      for (int b = 0; b < BATCH; ++b) there[b] = row + b < PART_ROWS && join(window[b], image, at, first_row + row + b);
      if (row == 0)
#pragma unroll
        for (int t = 0; t < TILE; ++t) widen(cotangent[t], raw[t]);
#pragma unroll
      for (int b = 0; b < BATCH; ++b) {
        if (!there[b]) continue;
#pragma unroll
        for (int u = 0; u < WINDOW; ++u) {
          float input[VX];
          widen(input, window[b][u]);
#pragma unroll
          for (int k = 0; k < TAPS; ++k)
            if (u >= k && u - k < TILE && row + b < PART_ROWS)
#pragma unroll
              for (int v = 0; v < VW; ++v)
                sum[(row + b) % PART_ROWS][k][v] += input[v / (K * C) * C + v % C] * cotangent[u - k][v / C];
        }
      }
    }
  }
  float* partial = reinterpret_cast<float*>(workspace) + slab * (ALL_TAPS * PW);
#pragma unroll
  for (int start = 0; start < SUMS; start += ROUND) {
    if (start) __syncthreads();
#pragma unroll
    for (int k = 0; k < ROUND; ++k)
      if (start + k < SUMS)
        shared[k * (THREADS + LANES) + threadIdx.x] =
            sum[(start + k) / VW / TAPS % PART_ROWS][(start + k) / VW % TAPS][(start + k) % VW];
    __syncthreads();
    for (int k = threadIdx.x; k < ROUND * PARTS * LANES; k += THREADS) {
      const int index = start + k / (PARTS * LANES), of = k / LANES % PARTS, vector = chunk * LANES + k % LANES;
      const TapRow tap((part_block * PARTS + of) * PART_ROWS + index / VW / TAPS);
      const int r = tap.rho + (tap.q + index / VW % TAPS) * A2::PHASES;
      if (index >= SUMS || vector >= VECTORS || tap.r0 >= A0::R || r >= A2::R) continue;
      const float* from = shared + k / (PARTS * LANES) * (THREADS + LANES) + of * (SLOTS * LANES) + k % LANES;
      float total = 0;
#pragma unroll 8
      for (int s = 0; s < SLOTS; ++s) total += from[s * LANES];
      partial[(Index(tap.r0 * A1::R + tap.r1) * A2::R + r) * PW + vector * VW + index % VW] = total;
    }
  }
}

// Adds the slabs: 8 elements a block, so that the loads of a warp fill sectors and many blocks share the work.
extern "C" __global__ void __launch_bounds__(256)
    depthwise_w_sum(const IN*, const IN*, const OUT*, OUT* __restrict__ w, char* workspace) {
  __shared__ float shared[32][8];
  const float* partial = reinterpret_cast<const float*>(workspace);
  const Index element = Index(blockIdx.x) * 8 + threadIdx.x % 8;
  float total = 0;
  if (element < ALL_TAPS * PW)
#pragma unroll 8
    for (int slab = threadIdx.x / 8; slab < SLABS; slab += 32) total += partial[slab * (ALL_TAPS * PW) + element];
  shared[threadIdx.x / 8][threadIdx.x % 8] = total;
  __syncthreads();
  if (threadIdx.x < 8 && element < ALL_TAPS * PW) {
    float sum[1] = {0};
#pragma unroll
    for (int k = 0; k < 32; ++k) sum[0] += shared[k][threadIdx.x];
    store(w + element, sum);
  }
}
#endif

}  // namespace depthwise

// Copyright 2026 The jax_deconv authors
// SPDX-License-Identifier: Apache-2.0
//
// One group, few channels C in x and any number K in y.  All roles are matrix products over P, the windows of x:
//
//     role y:  y [i, k]       = sum over (r, c) of P [i, (r, c)] * w [(r, c), k]
//     role w:  w [(r, c), k]  = sum over i      of P [i, (r, c)] * y [i, k]
//     role x:  x [q, (p, c)]  = sum over (v, k) of y [q * M + v, k] * w [r(p, v), c, k]
//
// P is never written: fragments of it are gathered from a tile of x in shared memory, where i's window begins at
// base(i) and its elements lie at offset(r, c) from there.  Role x has no sum over windows that overlap: PERIOD = M * S
// neighbours of x are one row of the product, and its columns are the phases p in it.  Phase p takes from y at
// distance v the tap r with r * D = p + L - v * S, or nothing: columns of w are picked by a table.
//
// Memory bounds all three, so y is read or written once: a block takes a tile of positions and, if it can, all K.
// Accumulators are those of mma.m16n8: lane 4 * g + t has the rows g and g + 8 and the columns 2 * t and 2 * t + 1.
//
// Macros:
//   IN, OUT             bf16, f16 or f32: the type of the operands and of the result
//   STRICT              1: float32 products without tensor cores
//   ROLE_X, ROLE_Y, ROLE_W   one of them is 1
//   BATCH, XC, YC       N, C, K
//   X0.. Y0.. R0.. S0.. D0.. L0..   for each of three axes: size of x, y and kernel, stride, dilation, padding before x
//   TN, T0, T1, T2      the tile: batch, and rows of the product along each axis
//   WM, WN, WK          warps along the rows, the columns and the sum (role w)
//   MF, NF              fragments of 16 rows and of 8 columns in a warp
//   GROUP               fragments in which a lane's columns follow one another in memory
//   RESIDENT            blocks that share a multiprocessor
//   SLICES              parts of the columns that are blocks of their own
//   CHUNK, STAGES       role x: channels of y, role y: rows of w in one stage of the pipeline; its depth
//   M2, V0.. NV0..      role x: positions of y that a row advances on the last axis; smallest v and number of them
//   COLUMNS             role x: columns of one (p0, p1), or more to begin the next at a fragment
//   SLICED              role x: 1: the tile of w is the columns of the slice for each v, 0: all of w
//   WIDE                one store may write all of a lane's columns
//   RUN, RUN_PADDED, RUNS   roles y, w: elements of a window that are neighbours in x, and the number of such runs
//   PAIRS               roles y, w: 1: elements 2 * j and 2 * j + 1 of a window are one word of the tile of x
//   MATRICES            roles y, w: 1: 16 bytes of a window are one row for ldmatrix (role w: narrow types only)
//   UNIT, SKEW          roles y, w: elements of x that one copy may read; elements left out after each S2 * XC
//   LEAD                roles y, w: elements of the tile of x before its first window, and of w's rows before a run
//   X_PITCH             roles y, w: elements from one row of the tile of x to the next
//   X_TILES             role y: tiles of x in flight
//   ROW_SLICES, SPLITS  role w: parts of the rows; parts of the positions, added by a second kernel
//   SUM_LANES           role w: runs in which it adds them
//   BIAS, ACTIVATION    whether there is a bias; an expression in float v

using namespace jd;

#ifndef BIAS
#define BIAS 0
#endif
#ifndef ACTIVATION
#define ACTIVATION(v) (v)
#endif

namespace thin {

constexpr bool NARROW = sizeof(IN) == 2;
constexpr int STEP = 32 / sizeof(IN);  // of the sum in one product of fragments
constexpr int THREADS = 32 * WM * WN * WK;
constexpr int BM = WM * MF * 16, BN = WN * NF * 8;
constexpr int NONE = -1;

__host__ __device__ constexpr int divide_up(int a, int b) { return (a + b - 1) / b; }
__host__ __device__ constexpr int gcd(int a, int b) { return b ? gcd(b, a % b) : a; }

struct Lane {
  int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
};

// -- Tiles ----------------------------------------------------------------------------------------

struct Place {
  int n, at0, at1, at2;
};

template <int E0, int E1, int E2> __device__ __forceinline__ Place place_of(unsigned index) {
  const unsigned a = index / E2, b = a / E1;
  return {int(b / E0), int(b % E0), int(a % E1), int(index % E2)};
}

// The first row of a block's tile, of the rows that the axes have.
template <int E0, int E1, int E2> __device__ __forceinline__ Place tile_at(unsigned tile) {
  const Place p = place_of<divide_up(E0, T0), divide_up(E1, T1), divide_up(E2, T2)>(tile);
  return {p.n * TN, p.at0 * T0, p.at1 * T1, p.at2 * T2};
}

// The row of y at a place, or NONE.
__device__ __forceinline__ int row_of_y(Place p) {
  const bool inside = p.n < BATCH && unsigned(p.at0) < Y0 && unsigned(p.at1) < Y1 && unsigned(p.at2) < Y2;
  return inside ? ((p.n * Y0 + p.at0) * Y1 + p.at1) * Y2 + p.at2 : NONE;
}

// Columns as the accumulators hold them, as they are in memory.
__host__ __device__ constexpr int column_in_memory(int column) {
  constexpr int G = GROUP;
  const int rest = column % (8 * G);
  return column - rest + rest % 8 / 2 * (2 * G) + rest / 8 * 2 + rest % 2;
}
__device__ __forceinline__ int column_in_fragments(int column) {
  constexpr int G = GROUP;
  const int rest = column % (8 * G);
  return column - rest + rest % (2 * G) / 2 * 8 + rest / (2 * G) * 2 + rest % 2;
}

// Copies COUNT columns from `first` on of rows of a matrix [*, WIDTH]; zeros beyond it and for the row NONE.
template <int COUNT, int WIDTH, int PITCH, bool IN_FRAGMENTS, typename Row>
__device__ __forceinline__ void copy_rows(IN* tile, const IN* matrix, int rows, int first, Row row_of) {
  constexpr int ALIGNED = gcd(gcd(WIDTH, 16 / int(sizeof(IN))), COUNT);
  constexpr int VECTOR = IN_FRAGMENTS && GROUP > 1 && ALIGNED > 2 ? 2 : ALIGNED;
  constexpr int PER_ROW = COUNT / VECTOR;
  for (int u = threadIdx.x; u < rows * PER_ROW; u += THREADS) {
    const int i = u / PER_ROW, j = u % PER_ROW * VECTOR, row = row_of(i);
    const bool there = row >= 0 && first + j < WIDTH;
    const IN* from = there ? matrix + (long long)row * WIDTH + (first + j) : matrix;
    IN* to = tile + i * PITCH + (IN_FRAGMENTS ? column_in_fragments(j) : j);
    if constexpr (VECTOR * sizeof(IN) >= 4)
      copy_async<VECTOR * sizeof(IN)>(shared_address(to), from, there);
    else
      *to = there ? *from : from_float<IN>(0.f);
  }
}

// Values in a row, rounded, with one store.
template <int COUNT> __device__ __forceinline__ void store(OUT* to, const float (&v)[COUNT]) {
  constexpr int WORDS = COUNT * sizeof(OUT) / 4;
  unsigned r[WORDS];
#pragma unroll
  for (int i = 0; i < WORDS; i++) {
    if constexpr (sizeof(OUT) == 4) r[i] = __float_as_uint(v[i]);
    else r[i] = pack<OUT>(v[2 * i], v[2 * i + 1]);
  }
  store_words<4 * WORDS>(to, r);
}

__device__ __forceinline__ float finish(float v, const OUT* bias, int channel) {
  if constexpr (BIAS) v += to_float(bias[channel]);
  return ACTIVATION(v);
}

// -- Products -------------------------------------------------------------------------------------

#ifdef __CUDA_ARCH__  // a test that runs this on a CPU has its own
__device__ __forceinline__ void load_matrices_transposed(unsigned (&r)[4], unsigned address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(address) : "memory");
}
#endif

__device__ __forceinline__ unsigned word_at(const IN* p) { return *reinterpret_cast<const unsigned*>(p); }
__device__ __forceinline__ unsigned bits_at(const IN* p) { return *reinterpret_cast<const unsigned short*>(p); }

__device__ __forceinline__ void add_products(float (&acc)[MF][NF][4], const unsigned (&a)[MF][4], int j,
                                             unsigned b0, unsigned b1) {
#pragma unroll
  for (int m = 0; m < MF; m++) mma(IN(), acc[m][j], a[m], b0, b1);
}

// Adds the product of a[m][half] (one value for each row) and a row of B in shared memory.
template <typename A>
__device__ __forceinline__ void add_outer(float (&acc)[MF][NF][4], const A (&a)[MF][2], const IN* b, int t) {
#pragma unroll
  for (int j = 0; j < NF; j++) {
    const float2 two = *reinterpret_cast<const float2*>(b + 8 * j + 2 * t);
#pragma unroll
    for (int m = 0; m < MF; m++) {
#pragma unroll
      for (int h = 0; h < 2; h++) {
        acc[m][j][2 * h] += a[m][h] * two.x;
        acc[m][j][2 * h + 1] += a[m][h] * two.y;
      }
    }
  }
}

// The products of a step with rows of B in shared memory, PITCH apart, the columns from `b` on.
template <int PITCH>
__device__ __forceinline__ void add_step(float (&acc)[MF][NF][4], const unsigned (&a)[MF][4], const IN* b, Lane at) {
  if constexpr (NARROW) {
    const unsigned address = shared_address(b + at.lane % 16 * PITCH + (NF == 1 ? 0 : at.lane / 16 * 8));
#pragma unroll
    for (int j = 0; j < NF; j += 2) {
      unsigned r[4];
      const bool last = NF % 2 && j == NF - 1;
      load_matrices_transposed(r, address + (j - (last && NF > 1 ? 1 : 0)) * 16);
      if (last) {
        add_products(acc, a, j, r[NF > 1 ? 2 : 0], r[NF > 1 ? 3 : 1]);
      } else {
        add_products(acc, a, j, r[0], r[1]);
        if (j + 1 < NF) add_products(acc, a, j + 1 < NF ? j + 1 : j, r[2], r[3]);
      }
    }
  } else {
#pragma unroll
    for (int j = 0; j < NF; j++)
      add_products(acc, a, j, operand<IN>(word_at(b + at.t * PITCH + j * 8 + at.g)),
                   operand<IN>(word_at(b + (at.t + 4) * PITCH + j * 8 + at.g)));
  }
}

#if ROLE_X
// -- Role x ---------------------------------------------------------------------------------------

constexpr int PERIOD0 = S0, PERIOD1 = S1, PERIOD2 = M2 * S2;
constexpr int Q0 = divide_up(X0, PERIOD0), Q1 = divide_up(X1, PERIOD1), Q2 = divide_up(X2, PERIOD2);
constexpr int TILES = divide_up(BATCH, TN) * divide_up(Q0, T0) * divide_up(Q1, T1) * divide_up(Q2, T2);
constexpr int H0 = T0 - 1 + NV0, H1 = T1 - 1 + NV1;
// Positions M2 apart are neighbours in the tile, so that the rows of a fragment are.
constexpr int H2 = divide_up((T2 - 1) * M2 + NV2, M2);
constexpr int POSITIONS = TN * H0 * H1 * M2 * H2;
constexpr int DISTANCES = NV0 * NV1 * NV2;
constexpr int PITCH = CHUNK + 16 / sizeof(IN);
constexpr int ZERO = R0 * R1 * R2 * XC;  // the row of the tile of w that is none of w's
constexpr int W_ROWS = SLICED ? DISTANCES * BN : ZERO + 1;
constexpr int CHUNKS = divide_up(YC, CHUNK), STEPS = CHUNK / STEP;

struct Column {
  int p0, p1, element;  // of the period's row in x
  bool real;
};

// `column` in the order of memory.
__host__ __device__ constexpr Column column_of(unsigned column) {
  const unsigned row = column / COLUMNS;
  return {int(row / PERIOD1), int(row % PERIOD1), int(column % COLUMNS),
          column % COLUMNS < PERIOD2 * XC && row < PERIOD0 * PERIOD1};
}

// Which rows of w the columns, in the order of the fragments, take at each distance; NONE for zeros.
struct RowsOfW {
  int at[DISTANCES][SLICES * BN];

  __host__ __device__ static constexpr int tap(int kernel, int dilation, int distance) {
    return distance >= 0 && distance % dilation == 0 && distance / dilation < kernel ? distance / dilation : NONE;
  }
  __host__ __device__ constexpr RowsOfW() : at() {
    for (int v = 0; v < DISTANCES; v++) {
      for (int i = 0; i < SLICES * BN; i++) {
        const Column c = column_of(column_in_memory(i));
        const int r0 = tap(R0, D0, c.p0 + L0 - (v / (NV1 * NV2) + V0) * S0);
        const int r1 = tap(R1, D1, c.p1 + L1 - (v / NV2 % NV1 + V1) * S1);
        const int r2 = tap(R2, D2, c.element / XC + L2 - (v % NV2 + V2) * S2);
        at[v][i] = c.real && r0 >= 0 && r1 >= 0 && r2 >= 0 ? ((r0 * R1 + r1) * R2 + r2) * XC + c.element % XC : NONE;
      }
    }
  }
  // The fragments of a warp's columns that are not zero, for any warp.
  __host__ __device__ constexpr unsigned live(int v) const {
    unsigned fragments = 0;
    for (int i = 0; i < SLICES * BN; i++)
      if (at[v][i] != NONE) fragments |= 1u << (i / 8 % NF);
    return fragments;
  }
};
__device__ constexpr RowsOfW rows_of_w;

// How far in the tile of y a distance leads.
__host__ __device__ constexpr int shift_of(int v) {
  return ((v / (NV1 * NV2) * H1 + v / NV2 % NV1) * (M2 * H2) + v % NV2 % M2 * H2 + v % NV2 / M2) * PITCH;
}

__device__ __forceinline__ float4 four_at(const IN* p) { return *reinterpret_cast<const float4*>(p); }

constexpr int ROWS_OF_LANE = STRICT ? 2 : 1;

// Adds a chunk's products at one distance. `a_at`: where the lane's rows begin; `slots`: where the columns do.
template <unsigned LIVE, bool UNROLL>
__device__ __forceinline__ void add_distance(float (&acc)[MF][NF][4], const IN* y_tile,
                                             const int (&a_at)[MF][ROWS_OF_LANE], const IN* w_tile, const int* slots,
                                             Lane at) {
  if constexpr (STRICT) {
    for (int k = 0; k < CHUNK; k += 4) {
      float4 a[MF][2];
#pragma unroll
      for (int m = 0; m < MF; m++) {
        a[m][0] = four_at(y_tile + a_at[m][0] + k);
        a[m][1] = four_at(y_tile + a_at[m][ROWS_OF_LANE - 1] + k);
      }
#pragma unroll
      for (int j = 0; j < NF; j++) {
        if (!(LIVE >> j & 1)) continue;
#pragma unroll
        for (int e = 0; e < 2; e++) {
          const float4 b = four_at(w_tile + slots[j * 8 + at.t * 2 + e] + k);
#pragma unroll
          for (int m = 0; m < MF; m++) {
#pragma unroll
            for (int h = 0; h < 2; h++) {
              float& sum = acc[m][j][2 * h + e];
              sum += a[m][h].x * b.x;
              sum += a[m][h].y * b.y;
              sum += a[m][h].z * b.z;
              sum += a[m][h].w * b.w;
            }
          }
        }
      }
    }
  } else {
    // One load brings a step of two fragments; of the last where their number is odd, two steps.
    constexpr int PAIRS_OF_FRAGMENTS = divide_up(NF, 2), TWO = STEPS % 2 == 0 ? 2 : 1;
    const int half = at.lane / 8 % 2 * (STEP / 2), second = at.lane / 16;
    unsigned b_at[PAIRS_OF_FRAGMENTS], a_from[MF];
#pragma unroll
    for (int j = 0; j < PAIRS_OF_FRAGMENTS; j++) {
      const bool two = 2 * j + 1 < NF;
      if (!(LIVE >> (2 * j) & 3)) continue;
      b_at[j] = shared_address(w_tile + slots[16 * j + at.lane % 8 + (two ? second * 8 : 0)] + half +
                               (two ? 0 : second * (TWO - 1) * STEP));
    }
#pragma unroll
    for (int m = 0; m < MF; m++) a_from[m] = shared_address(y_tile + a_at[m][0]);
#pragma unroll(UNROLL ? STEPS : 1)
    for (int k = 0; k < STEPS; k += TWO) {
      unsigned odd[4];
      if constexpr (NF % 2) {
        load_matrices(odd, b_at[PAIRS_OF_FRAGMENTS - 1] + k * 32);
#pragma unroll
        for (int e = 0; e < 4; e++) odd[e] = operand<IN>(odd[e]);
      }
#pragma unroll
      for (int s = 0; s < TWO; s++) {
        unsigned a[MF][4];
#pragma unroll
        for (int m = 0; m < MF; m++) {
          load_matrices(a[m], a_from[m] + (k + s) * 32);
#pragma unroll
          for (int e = 0; e < 4; e++) a[m][e] = operand<IN>(a[m][e]);
        }
#pragma unroll
        for (int j = 0; j + 1 < NF; j += 2) {
          if (!(LIVE >> j & 3)) continue;
          unsigned b[4];
          load_matrices(b, b_at[j / 2] + (k + s) * 32);
#pragma unroll
          for (int e = 0; e < 4; e++) b[e] = operand<IN>(b[e]);
          if (LIVE >> j & 1) add_products(acc, a, j, b[0], b[1]);
          if (LIVE >> j & 2) add_products(acc, a, j + 1, b[2], b[3]);
        }
        if (NF % 2 && LIVE >> (NF - 1) & 1) add_products(acc, a, NF - 1, odd[2 * s], odd[2 * s + 1]);
      }
    }
  }
}

// Few distances are unrolled, so that columns of zeros cost nothing.
constexpr bool UNROLLED = DISTANCES <= 64;
constexpr int INNER = UNROLLED ? DISTANCES : NV2;

template <int V = 0>
__device__ __forceinline__ void add_distances(float (&acc)[MF][NF][4], const IN* y_tile,
                                              const int (&a_at)[MF][ROWS_OF_LANE], const IN* w_tile, const int* slots,
                                              Lane at) {
  if constexpr (V < INNER) {
    constexpr unsigned LIVE = UNROLLED ? rows_of_w.live(V) : (1ull << NF) - 1;
    if constexpr (LIVE != 0)
      add_distance<LIVE, (INNER * STEPS * MF * NF <= 1024)>(acc, y_tile + shift_of(V), a_at, w_tile, slots + V * BN, at);
    add_distances<V + 1>(acc, y_tile, a_at, w_tile, slots, at);
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT)
thin_x(const IN* y, const IN* w, const OUT* bias, OUT* out, char*) {
  extern __shared__ __align__(16) char memory[];
  constexpr int W_STAGES = CHUNKS > 1 ? STAGES : 1;
  IN* const y_tiles = reinterpret_cast<IN*>(memory);
  IN* const w_tiles = y_tiles + STAGES * POSITIONS * PITCH;
  int* const y_rows = reinterpret_cast<int*>(w_tiles + W_STAGES * W_ROWS * PITCH);  // [2, POSITIONS]
  int* const slots = y_rows + 2 * POSITIONS;                                        // [DISTANCES, BN]

  static_assert(STAGES - 1 <= CHUNKS, "what is loaded first is one tile, whose rows are tabulated");
  const Lane at;
  const int wm = at.warp % WM, wn = at.warp / WM;
  const int slice = blockIdx.x % SLICES, stride = gridDim.x / SLICES;

  auto tabulate = [&](int tile, int buffer) {
    const Place first = tile_at<Q0, Q1, Q2>(tile);
    for (int i = threadIdx.x; i < POSITIONS; i += THREADS) {
      const Place p = place_of<H0, H1, M2 * H2>(i);
      y_rows[buffer * POSITIONS + i] = row_of_y({first.n + p.n, first.at0 + V0 + p.at0, first.at1 + V1 + p.at1,
                                                 first.at2 * M2 + V2 + p.at2 % H2 * M2 + p.at2 / H2});
    }
  };
  auto load_w = [&](int chunk, int stage) {
    copy_rows<CHUNK, YC, PITCH, false>(w_tiles + stage * W_ROWS * PITCH, w, W_ROWS, chunk * CHUNK, [&](int i) {
      if constexpr (SLICED) return rows_of_w.at[i / BN][slice * BN + i % BN];
      else return i == ZERO ? NONE : i;
    });
  };
  // What is loaded next; the rows of a tile are tabulated while the tile before it is loaded.
  int next_tile = blockIdx.x / SLICES, next_chunk = 0, next_stage = 0, buffer = 0;
  auto load = [&]() {
    if (next_tile < TILES) {
      copy_rows<CHUNK, YC, PITCH, false>(y_tiles + next_stage * POSITIONS * PITCH, y, POSITIONS, next_chunk * CHUNK,
                                         [&](int i) { return y_rows[buffer * POSITIONS + i]; });
      if (CHUNKS > 1) load_w(next_chunk, next_stage);
      if (next_chunk == 0 && next_tile + stride < TILES) tabulate(next_tile + stride, buffer ^ 1);
      if (++next_chunk == CHUNKS) {
        next_chunk = 0;
        next_tile += stride;
        buffer ^= 1;
      }
      next_stage = next_stage + 1 == STAGES ? 0 : next_stage + 1;
    }
    copy_async_commit();
  };

  tabulate(next_tile, 0);
  for (int i = threadIdx.x; i < DISTANCES * BN; i += THREADS) {
    const int row = rows_of_w.at[i / BN][slice * BN + i % BN];
    slots[i] = (SLICED ? i : row == NONE ? ZERO : row) * PITCH;
  }
  if (CHUNKS == 1) load_w(0, 0);
  __syncthreads();
#pragma unroll
  for (int s = 0; s < STAGES - 1; s++) load();

  // Where the tile of y has the lane's rows, at distance 0. Rows beyond the tile repeat its first.
  auto position_of = [&](int row) {
    const Place p = place_of<T0, T1, T2>(row < TN * T0 * T1 * T2 ? row : 0);
    return ((p.n * H0 + p.at0) * H1 + p.at1) * (M2 * H2) + p.at2;
  };
  int a_at[MF][ROWS_OF_LANE];
#pragma unroll
  for (int m = 0; m < MF; m++) {
    const int row = (wm * MF + m) * 16;
    if constexpr (STRICT) {
      a_at[m][0] = position_of(row + at.g) * PITCH;
      a_at[m][ROWS_OF_LANE - 1] = position_of(row + at.g + 8) * PITCH;
    } else {
      a_at[m][0] = position_of(row + at.lane % 16) * PITCH + at.lane / 16 * (STEP / 2);
    }
  }

  int stage = 0;
  for (int tile = blockIdx.x / SLICES; tile < TILES; tile += stride) {
    float acc[MF][NF][4] = {};
    for (int chunk = 0; chunk < CHUNKS; chunk++) {
      copy_async_wait<STAGES - 2>();
      __syncthreads();
      load();
      const IN* const y_tile = y_tiles + stage * POSITIONS * PITCH;
      const IN* const w_tile = w_tiles + (CHUNKS > 1 ? stage : 0) * W_ROWS * PITCH;
      for (int v = 0; v < DISTANCES; v += INNER)
        add_distances(acc, y_tile + shift_of(v), a_at, w_tile, slots + v * BN + wn * NF * 8, at);
      stage = stage + 1 == STAGES ? 0 : stage + 1;
    }

    const Place first = tile_at<Q0, Q1, Q2>(tile);
    Place rows[MF][2];
    long long begins[MF][2];
#pragma unroll
    for (int m = 0; m < MF; m++) {
#pragma unroll
      for (int h = 0; h < 2; h++) {
        const int row = (wm * MF + m) * 16 + h * 8 + at.g;
        const Place p = place_of<T0, T1, T2>(row);
        const Place x = {first.n + p.n, (first.at0 + p.at0) * PERIOD0, (first.at1 + p.at1) * PERIOD1,
                         (first.at2 + p.at2) * (PERIOD2 * XC)};
        rows[m][h] = row < TN * T0 * T1 * T2 ? x : Place{BATCH, 0, 0, 0};
        begins[m][h] = (((long long)x.n * X0 + x.at0) * X1 + x.at1) * (X2 * XC) + x.at2;
      }
    }
#pragma unroll
    for (int j = 0; j < NF; j += GROUP) {
      constexpr int COUNT = 2 * GROUP;
#pragma unroll
      for (int i = 0; i < (WIDE ? 1 : COUNT); i++) {
        const Column c = column_of(slice * BN + (wn * NF + j) * 8 + at.t * COUNT + i);
        const long long offset = (long long)(c.p0 * X1 + c.p1) * (X2 * XC) + c.element;
        const int channel = c.element % XC;
        if (!c.real) continue;
#pragma unroll
        for (int m = 0; m < MF; m++) {
#pragma unroll
          for (int h = 0; h < 2; h++) {
            const Place& x = rows[m][h];
            if (x.n >= BATCH || x.at0 + c.p0 >= X0 || x.at1 + c.p1 >= X1 || x.at2 + c.element >= X2 * XC) continue;
            OUT* const to = out + begins[m][h] + offset;
            if constexpr (WIDE) {
              float v[COUNT];
#pragma unroll
              for (int e = 0; e < COUNT; e++)
                v[e] = finish(acc[m][j + e / 2][2 * h + e % 2], bias, (channel + e) % XC);
              store(to, v);
            } else {
              *to = from_float<OUT>(finish(acc[m][j + i / 2][2 * h + i % 2], bias, channel));
            }
          }
        }
      }
    }
  }
}

#else
// -- Windows of x ---------------------------------------------------------------------------------

constexpr int WINDOW0 = (T0 - 1) * S0 + (R0 - 1) * D0 + 1, WINDOW1 = (T1 - 1) * S1 + (R1 - 1) * D1 + 1;
constexpr int ELEMENTS = divide_up(((T2 - 1) * S2 + (R2 - 1) * D2 + 1) * XC + LEAD, UNIT) * UNIT;
// The tile of x leaves a gap after each step of the stride, so that windows begin in different banks.
constexpr int ADVANCE = S2 * XC + SKEW;
__host__ __device__ constexpr int skewed(int element) {
  return SKEW ? element / (S2 * XC) * ADVANCE + element % (S2 * XC) : element;
}
constexpr int X_ROWS = TN * WINDOW0 * WINDOW1, X_TILE = X_ROWS * X_PITCH;
constexpr int INNER = RUNS / (R0 * R1);  // runs along the last axis
constexpr int TILE_ROWS = TN * T0 * T1 * T2;
constexpr int TILES = divide_up(BATCH, TN) * divide_up(Y0, T0) * divide_up(Y1, T1) * divide_up(Y2, T2);

// The rows of x that a tile needs; NONE outside.
__device__ __forceinline__ void tabulate_x(int* rows, Place first) {
  for (int i = threadIdx.x; i < X_ROWS; i += THREADS) {
    const Place p = place_of<1, WINDOW0, WINDOW1>(i);  // n, 0 and the two axes
    const int n = first.n + p.n, x0 = first.at0 * S0 - L0 + p.at1, x1 = first.at1 * S1 - L1 + p.at2;
    rows[i] = n < BATCH && unsigned(x0) < X0 && unsigned(x1) < X1 ? (n * X0 + x0) * X1 + x1 : NONE;
  }
}

__device__ __forceinline__ void copy_x(IN* tile, const IN* x, const int* rows, Place first) {
  constexpr int PER_ROW = ELEMENTS / UNIT;
  const int begin = (first.at2 * S2 - L2) * XC - LEAD;
#pragma unroll 4
  for (int u = threadIdx.x; u < X_ROWS * PER_ROW; u += THREADS) {
    const int i = u / PER_ROW, j = u % PER_ROW * UNIT, row = rows[i];
    const bool there = row >= 0 && unsigned(begin + j) < X2 * XC;
    const IN* from = there ? x + (long long)row * (X2 * XC) + (begin + j) : x;
    IN* to = tile + i * X_PITCH + skewed(j);
    if constexpr (UNIT * sizeof(IN) >= 4)
      copy_async<UNIT * sizeof(IN)>(shared_address(to), from, there);
    else
      *to = there ? *from : from_float<IN>(0.f);
  }
}

// Where a window's element is, from the window's begin; NONE for those that fill up a run or the last step.
__device__ __forceinline__ int offset_of(unsigned element, int& row_of_w) {
  const unsigned run = element / RUN_PADDED, row = run / INNER;
  const int e = int(element % RUN_PADDED) - LEAD;
  const bool real = run < RUNS && e >= 0 && e < RUN;
  row_of_w = real ? int(run * RUN) + e : NONE;
  return real ? int(row / R1 * D0 * WINDOW1 + row % R1 * D1) * X_PITCH + skewed(run % INNER * D2 * XC + e + LEAD) : NONE;
}

// Where the window of a row of the tile begins.
__device__ __forceinline__ int base_of(int row) {
  const Place p = place_of<T0, T1, T2>(row < TILE_ROWS ? row : 0);
  return ((p.n * WINDOW0 + p.at0 * S0) * WINDOW1 + p.at1 * S1) * X_PITCH + p.at2 * ADVANCE;
}

__device__ __forceinline__ int row_in_y(Place first, int row) {
  const Place p = place_of<T0, T1, T2>(row);
  return row < TILE_ROWS ? row_of_y({first.n + p.n, first.at0 + p.at0, first.at1 + p.at1, first.at2 + p.at2}) : NONE;
}

constexpr int WINDOW = divide_up(RUNS * RUN_PADDED, STEP) * STEP;  // elements, filled up
constexpr bool FILLED = WINDOW != RUNS * RUN;  // never with MATRICES
constexpr int W_ROWS = RUNS * RUN;
constexpr int B_PITCH = BN + (BN % 16 ? 16 : 8);  // rows that are read together begin in different banks

#if ROLE_Y
// -- Role y ---------------------------------------------------------------------------------------

constexpr int CHUNKS = divide_up(WINDOW, CHUNK);

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT)
thin_y(const IN* x, const IN* w, const OUT* bias, OUT* out, char*) {
  extern __shared__ __align__(16) char memory[];
  constexpr int W_STAGES = CHUNKS > 1 ? STAGES : 1;
  IN* const x_tiles = reinterpret_cast<IN*>(memory);
  IN* const w_tiles = x_tiles + X_TILES * X_TILE;
  int* const offsets = reinterpret_cast<int*>(w_tiles + W_STAGES * CHUNK * B_PITCH);  // [WINDOW]
  int* const x_rows = offsets + WINDOW;                                               // [2, X_ROWS]

  static_assert(STAGES - 1 <= CHUNKS, "what is loaded first is one tile, whose rows are tabulated");
  const Lane at;
  const int wm = at.warp % WM, wn = at.warp / WM;
  const int first_column = blockIdx.x % SLICES * BN, stride = gridDim.x / SLICES;

  auto load_w = [&](int chunk, int stage) {
    copy_rows<BN, YC, B_PITCH, true>(w_tiles + stage * CHUNK * B_PITCH, w, CHUNK, first_column, [&](int i) {
      int row;
      offset_of(chunk * CHUNK + i, row);
      return row;
    });
  };
  // What is loaded next; the rows of a tile are tabulated while the tile before it is loaded.
  int next_tile = blockIdx.x / SLICES, next_chunk = 0, next_stage = 0, next_buffer = 0, table = 0;
  auto load = [&]() {
    if (next_tile < TILES) {
      if (next_chunk == 0) {
        copy_x(x_tiles + next_buffer * X_TILE, x, x_rows + table * X_ROWS, tile_at<Y0, Y1, Y2>(next_tile));
        table ^= 1;
        if (next_tile + stride < TILES) tabulate_x(x_rows + table * X_ROWS, tile_at<Y0, Y1, Y2>(next_tile + stride));
      }
      if (CHUNKS > 1) load_w(next_chunk, next_stage);
      if (++next_chunk == CHUNKS) {
        next_chunk = 0;
        next_tile += stride;
        next_buffer = next_buffer + 1 == X_TILES ? 0 : next_buffer + 1;
      }
      next_stage = next_stage + 1 == STAGES ? 0 : next_stage + 1;
    }
    copy_async_commit();
  };
  tabulate_x(x_rows, tile_at<Y0, Y1, Y2>(next_tile));
  if (CHUNKS == 1) load_w(0, 0);
  __syncthreads();
#pragma unroll
  for (int s = 0; s < STAGES - 1; s++) load();
  for (int i = threadIdx.x; i < WINDOW; i += THREADS) {
    int row;
    offsets[i] = offset_of(i, row);
  }
  // Where the windows of the lane's rows begin: of one row for ldmatrix, of g and g + 8 else.
  constexpr int ROWS_OF_LANE = MATRICES ? 1 : 2;
  int base[MF][ROWS_OF_LANE];
#pragma unroll
  for (int m = 0; m < MF; m++) {
#pragma unroll
    for (int h = 0; h < ROWS_OF_LANE; h++)
      base[m][h] = base_of((wm * MF + m) * 16 + (MATRICES ? at.lane % 16 : h * 8 + at.g));
  }

  int stage = 0, buffer = 0;
  for (int tile = blockIdx.x / SLICES; tile < TILES; tile += stride) {
    const IN* const x_tile = x_tiles + buffer * X_TILE;
    float acc[MF][NF][4] = {};
    for (int chunk = 0; chunk < CHUNKS; chunk++) {
      copy_async_wait<STAGES - 2>();
      __syncthreads();
      load();
      const IN* const w_tile = w_tiles + (CHUNKS > 1 ? stage : 0) * CHUNK * B_PITCH + wn * NF * 8;
      const int steps = min(CHUNK, WINDOW - chunk * CHUNK);
#pragma unroll 2
      for (int k = 0; k < steps; k += STEP) {
        const int* const offset = offsets + chunk * CHUNK + k;
        if constexpr (STRICT) {
#pragma unroll
          for (int s = 0; s < STEP; s++) {
            const int o = offset[s];
            float a[MF][2];
#pragma unroll
            for (int m = 0; m < MF; m++) {
#pragma unroll
              for (int h = 0; h < 2; h++)
                a[m][h] = FILLED && o < 0 ? 0.f : to_float(x_tile[base[m][h % ROWS_OF_LANE] + o]);
            }
            add_outer(acc, a, w_tile + (k + s) * B_PITCH, at.t);
          }
        } else {
          unsigned a[MF][4];
          if constexpr (MATRICES) {
            const unsigned from = shared_address(x_tile + offset[at.lane / 16 * (STEP / 2)]);
#pragma unroll
            for (int m = 0; m < MF; m++) {
              load_matrices(a[m], from + base[m][0] * int(sizeof(IN)));
#pragma unroll
              for (int e = 0; e < 4; e++) a[m][e] = operand<IN>(a[m][e]);
            }
          } else if constexpr (NARROW) {
#pragma unroll
            for (int half = 0; half < 2; half++) {
              const int2 o = *reinterpret_cast<const int2*>(offset + half * 8 + at.t * 2);
              const unsigned mask = (o.x < 0 ? 0u : 0xffffu) | (o.y < 0 ? 0u : 0xffff0000u);
              // Of two elements that are one word at least one may be real.
              const IN* const low = x_tile + (!FILLED ? o.x : o.x >= 0 ? o.x : PAIRS ? max(o.y - 1, 0) : 0);
              const IN* const high = x_tile + (FILLED ? max(o.y, 0) : o.y);
#pragma unroll
              for (int m = 0; m < MF; m++) {
#pragma unroll
                for (int h = 0; h < 2; h++) {
                  const int at_row = base[m][h % ROWS_OF_LANE];
                  unsigned v = PAIRS ? word_at(low + at_row) : bits_at(low + at_row) | bits_at(high + at_row) << 16;
                  if (FILLED) v &= mask;
                  a[m][half * 2 + h] = v;
                }
              }
            }
          } else {
#pragma unroll
            for (int half = 0; half < 2; half++) {
              const int o = offset[half * 4 + at.t];
#pragma unroll
              for (int m = 0; m < MF; m++) {
#pragma unroll
                for (int h = 0; h < 2; h++)
                  a[m][half * 2 + h] =
                      FILLED && o < 0 ? 0u : operand<IN>(word_at(x_tile + base[m][h % ROWS_OF_LANE] + o));
              }
            }
          }
          add_step<B_PITCH>(acc, a, w_tile + k * B_PITCH, at);
        }
      }
      stage = stage + 1 == STAGES ? 0 : stage + 1;
    }
    buffer = buffer + 1 == X_TILES ? 0 : buffer + 1;

    const Place first = tile_at<Y0, Y1, Y2>(tile);
#pragma unroll
    for (int m = 0; m < MF; m++) {
#pragma unroll
      for (int h = 0; h < 2; h++) {
        const int row = row_in_y(first, (wm * MF + m) * 16 + h * 8 + at.g);
        if (row == NONE) continue;
        OUT* const to = out + (long long)row * YC;
#pragma unroll
        for (int j = 0; j < NF; j += GROUP) {
          const int channel = first_column + (wn * NF + j) * 8 + at.t * 2 * GROUP;
          float v[2 * GROUP];
#pragma unroll
          for (int e = 0; e < 2 * GROUP; e++)
            if (channel + e < YC) v[e] = finish(acc[m][j + e / 2][2 * h + e % 2], bias, channel + e);
          if constexpr (WIDE) {
            if (channel < YC) store(to + channel, v);
          } else {
#pragma unroll
            for (int e = 0; e < 2 * GROUP; e++)
              if (channel + e < YC) to[channel + e] = from_float<OUT>(v[e]);
          }
        }
      }
    }
  }
}

#else
// -- Role w ---------------------------------------------------------------------------------------

constexpr int STAGES = 2;
constexpr int POSITIONS = divide_up(TILE_ROWS, STEP * WK) * STEP * WK;  // in a tile
constexpr bool PARTIAL = POSITIONS != TILE_ROWS || BATCH % TN || Y0 % T0 || Y1 % T1 || Y2 % T2;

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT)
thin_w(const IN* x, const IN* y, const OUT*, OUT* out, char* workspace) {
  extern __shared__ __align__(16) char memory[];
  IN* const x_tiles = reinterpret_cast<IN*>(memory);
  IN* const y_tiles = x_tiles + STAGES * X_TILE;
  // A tile's rows are read while it is loaded and while it is multiplied, and written before.
  constexpr int TABLES = 3;
  int* const y_rows = reinterpret_cast<int*>(y_tiles + STAGES * POSITIONS * B_PITCH);  // [TABLES, POSITIONS]
  int* const bases = y_rows + TABLES * POSITIONS;                                      // [POSITIONS]
  int* const x_rows = bases + POSITIONS;                                               // [TABLES, X_ROWS]

  const Lane at;
  const int wm = at.warp % WM, wn = at.warp / WM % WN, wk = at.warp / (WM * WN);
  const int first_column = blockIdx.x % SLICES * BN;
  const int first_row = blockIdx.x / SLICES % ROW_SLICES * BM + wm * MF * 16;
  const int split = blockIdx.x / (SLICES * ROW_SLICES);

  for (int i = threadIdx.x; i < POSITIONS; i += THREADS) bases[i] = base_of(i);
  // The elements of the window that are a lane's rows g and g + 8: neighbours, where one word has both.
  auto element_of = [&](int m, int h) { return first_row + m * 16 + (MATRICES ? at.g + 8 * h : at.g * 2 + h); };
  int offset[MF][2];
#pragma unroll
  for (int m = 0; m < MF; m++) {
#pragma unroll
    for (int h = 0; h < 2; h++) {
      int row;
      offset[m][h] = offset_of(MATRICES ? first_row + m * 16 + at.lane / 8 % 2 * 8 : element_of(m, h), row);
    }
    if (PAIRS && offset[m][0] < 0) offset[m][0] = offset[m][1] - 1;  // the second of the word may be real
#pragma unroll
    for (int h = 0; h < 2; h++) offset[m][h] = max(offset[m][h], 0);
  }

  auto tabulate = [&](int tile, int table) {
    const Place first = tile_at<Y0, Y1, Y2>(tile);
    tabulate_x(x_rows + table * X_ROWS, first);
    for (int i = threadIdx.x; i < POSITIONS; i += THREADS) y_rows[table * POSITIONS + i] = row_in_y(first, i);
  };
  auto after = [&](int table) { return table + 1 == TABLES ? 0 : table + 1; };
  auto load = [&](int tile, int stage, int table) {
    if (tile < TILES) {
      copy_x(x_tiles + stage * X_TILE, x, x_rows + table * X_ROWS, tile_at<Y0, Y1, Y2>(tile));
      copy_rows<BN, YC, B_PITCH, false>(y_tiles + stage * POSITIONS * B_PITCH, y, POSITIONS, first_column,
                                        [&](int i) { return y_rows[table * POSITIONS + i]; });
      if (tile + SPLITS < TILES) tabulate(tile + SPLITS, after(table));
    }
    copy_async_commit();
  };

  float acc[MF][NF][4] = {};
  tabulate(split, 0);
  __syncthreads();
  load(split, 0, 0);
  int stage = 0, table = 0;
  for (int tile = split; tile < TILES; tile += SPLITS) {
    copy_async_wait<0>();
    __syncthreads();
    load(tile + SPLITS, stage ^ 1, after(table));
    const IN* const x_tile = x_tiles + stage * X_TILE;
    const IN* const y_tile = y_tiles + stage * POSITIONS * B_PITCH + wn * NF * 8;
    const int* const rows = y_rows + table * POSITIONS;
    for (int k = wk * STEP; k < POSITIONS; k += WK * STEP) {
      if constexpr (STRICT) {
#pragma unroll
        for (int s = 0; s < STEP; s++) {
          const IN* const window = x_tile + bases[k + s];
          const bool real = !PARTIAL || rows[k + s] >= 0;
          float a[MF][2];
#pragma unroll
          for (int m = 0; m < MF; m++) {
#pragma unroll
            for (int h = 0; h < 2; h++) a[m][h] = real ? to_float(window[offset[m][h]]) : 0.f;
          }
          add_outer(acc, a, y_tile + (k + s) * B_PITCH, at.t);
        }
      } else {
        unsigned a[MF][4];
        if constexpr (MATRICES) {
          const int i = k + at.lane / 16 * 8 + at.lane % 8;
          const unsigned from = shared_address(x_tile + bases[i]);
#pragma unroll
          for (int m = 0; m < MF; m++) load_matrices_transposed(a[m], from + offset[m][0] * int(sizeof(IN)));
          if (PARTIAL) {
#pragma unroll
            for (int half = 0; half < 2; half++) {
              const int2 row = *reinterpret_cast<const int2*>(rows + k + half * 8 + at.t * 2);
              const unsigned mask = (row.x < 0 ? 0u : 0xffffu) | (row.y < 0 ? 0u : 0xffff0000u);
#pragma unroll
              for (int m = 0; m < MF; m++) {
                a[m][half * 2] &= mask;
                a[m][half * 2 + 1] &= mask;
              }
            }
          }
        } else if constexpr (NARROW) {
#pragma unroll
          for (int half = 0; half < 2; half++) {
            const int i = k + half * 8 + at.t * 2;
            const int2 base = *reinterpret_cast<const int2*>(bases + i);
            const IN *const one = x_tile + base.x, *const two = x_tile + base.y;
            unsigned mask = ~0u;
            if (PARTIAL) {
              const int2 row = *reinterpret_cast<const int2*>(rows + i);
              mask = (row.x < 0 ? 0u : 0xffffu) | (row.y < 0 ? 0u : 0xffff0000u);
            }
#pragma unroll
            for (int m = 0; m < MF; m++) {
              unsigned first, second;
              if (PAIRS) {
                const unsigned u = word_at(one + offset[m][0]), v = word_at(two + offset[m][0]);
                first = __byte_perm(u, v, 0x5410);
                second = __byte_perm(u, v, 0x7632);
              } else {
                first = bits_at(one + offset[m][0]) | bits_at(two + offset[m][0]) << 16;
                second = bits_at(one + offset[m][1]) | bits_at(two + offset[m][1]) << 16;
              }
              a[m][half * 2] = first & mask;
              a[m][half * 2 + 1] = second & mask;
            }
          }
        } else {
#pragma unroll
          for (int half = 0; half < 2; half++) {
            const int i = k + half * 4 + at.t;
            const IN* const window = x_tile + bases[i];
            const bool real = !PARTIAL || rows[i] >= 0;
#pragma unroll
            for (int m = 0; m < MF; m++) {
#pragma unroll
              for (int h = 0; h < 2; h++)
                a[m][half * 2 + h] = real ? operand<IN>(word_at(window + offset[m][h])) : 0u;
            }
          }
        }
        add_step<B_PITCH>(acc, a, y_tile + k * B_PITCH, at);
      }
    }
    stage ^= 1;
    table = after(table);
  }

  // The sums of the warps that share an output, as a tree.
  if constexpr (WK > 1) {
    copy_async_wait<0>();
    float4* const sums = reinterpret_cast<float4*>(memory) + ((wn * WM + wm) * MF * NF * 32 + at.lane);
    constexpr int SUMS = WM * WN * MF * NF * 32;  // of the warps with one wk
#pragma unroll
    for (int half = WK / 2; half >= 1; half /= 2) {
      __syncthreads();
#pragma unroll
      for (int m = 0; m < MF; m++) {
#pragma unroll
        for (int j = 0; j < NF; j++)
          if (wk >= half && wk < 2 * half)
            sums[(wk - half) * SUMS + (m * NF + j) * 32] =
                make_float4(acc[m][j][0], acc[m][j][1], acc[m][j][2], acc[m][j][3]);
      }
      __syncthreads();
#pragma unroll
      for (int m = 0; m < MF; m++) {
#pragma unroll
        for (int j = 0; j < NF; j++)
          if (wk < half) {
            const float4 v = sums[wk * SUMS + (m * NF + j) * 32];
            acc[m][j][0] += v.x;
            acc[m][j][1] += v.y;
            acc[m][j][2] += v.z;
            acc[m][j][3] += v.w;
          }
      }
    }
    if (wk > 0) return;
  }

  float* const part = reinterpret_cast<float*>(workspace) + (long long)split * W_ROWS * YC;
#pragma unroll
  for (int m = 0; m < MF; m++) {
#pragma unroll
    for (int h = 0; h < 2; h++) {
      int row;
      offset_of(element_of(m, h), row);
      if (row == NONE) continue;
#pragma unroll
      for (int j = 0; j < NF; j++) {
        const int channel = first_column + (wn * NF + j) * 8 + at.t * 2;
        const long long to = (long long)row * YC + channel;
        const float u = acc[m][j][2 * h], v = acc[m][j][2 * h + 1];
        if constexpr (SPLITS > 1) {
          if (YC % 2 == 0) {
            if (channel < YC) *reinterpret_cast<float2*>(part + to) = make_float2(u, v);
          } else {
            if (channel < YC) part[to] = u;
            if (channel + 1 < YC) part[to + 1] = v;
          }
        } else {
          if (channel < YC) out[to] = from_float<OUT>(u);
          if (channel + 1 < YC) out[to + 1] = from_float<OUT>(v);
        }
      }
    }
  }
}

// Adds the parts, always in the same order: SUM_LANES runs of parts for each element.
extern "C" __global__ void thin_w_sum(const IN*, const IN*, const OUT*, OUT* out, char* workspace) {
  constexpr long long SIZE = (long long)W_ROWS * YC;
  constexpr int WIDTH = 256 / SUM_LANES;
  __shared__ float sums[SUM_LANES][WIDTH];
  const int lane = threadIdx.x / WIDTH, column = threadIdx.x % WIDTH;
  const long long element = (long long)blockIdx.x * WIDTH + column;
  const float* const parts = reinterpret_cast<const float*>(workspace) + element;
  float sum = 0;
  if (element < SIZE) {
#pragma unroll 8
    for (int i = lane; i < SPLITS; i += SUM_LANES) sum += parts[i * SIZE];
  }
  sums[lane][column] = sum;
  __syncthreads();
  if (lane == 0 && element < SIZE) {
#pragma unroll
    for (int i = 1; i < SUM_LANES; i++) sum += sums[i][column];
    out[element] = from_float<OUT>(sum);
  }
}
#endif
#endif

}  // namespace thin

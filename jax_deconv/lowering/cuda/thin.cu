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
//   SLICES              parts of the columns that are blocks of their own
//   CHUNK, STAGES       role x: channels of y, role y: rows of w in one stage of the pipeline, and its depth
//   M2, V0.. NV0..      role x: positions of y that a row advances on the last axis; smallest v and number of them
//   COLUMNS             role x: columns of one (p0, p1), padded to a multiple of 8
//   SLICED              role x: 1: the tile of w is the columns of the slice for each v, 0: all of w
//   WIDE                one store may write all of a lane's columns
//   RUN, RUN_PADDED, RUNS   roles y, w: elements of a window that are neighbours in x, and the number of such runs
//   PAIRS               roles y, w: 1: elements 2 * j and 2 * j + 1 of a window are one word of the tile of x
//   UNIT, SKEW          roles y, w: elements of x that one copy may read; elements left out after each S2 * XC
//   ROW_SLICES, SPLITS  role w: parts of the rows; parts of the positions, added by a second kernel
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
__device__ __forceinline__ int column_in_memory(int column) {
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
    const int i = u / PER_ROW, j = u % PER_ROW * VECTOR, row = row_of(i, j == 0);
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
  if constexpr (sizeof(OUT) == 4) {
    static_assert(COUNT == 2 || COUNT == 4, "");
    if constexpr (COUNT == 2) *reinterpret_cast<float2*>(to) = make_float2(v[0], v[1]);
    else *reinterpret_cast<float4*>(to) = make_float4(v[0], v[1], v[2], v[3]);
  } else {
    unsigned r[COUNT / 2];
#pragma unroll
    for (int i = 0; i < COUNT / 2; i++) r[i] = pack<OUT>(v[2 * i], v[2 * i + 1]);
    if constexpr (COUNT == 2) *reinterpret_cast<unsigned*>(to) = r[0];
    else if constexpr (COUNT == 4) *reinterpret_cast<uint2*>(to) = make_uint2(r[0], r[1]);
    else *reinterpret_cast<uint4*>(to) = make_uint4(r[0], r[1], r[2], r[3]);
  }
}

__device__ __forceinline__ float finish(float v, const OUT* bias, int channel) {
  if constexpr (BIAS) v += to_float(bias[channel]);
  return ACTIVATION(v);
}

// -- Products -------------------------------------------------------------------------------------

__device__ __forceinline__ void load_matrices_transposed(unsigned (&r)[4], unsigned address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(address) : "memory");
}

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
constexpr int H0 = T0 - 1 + NV0, H1 = T1 - 1 + NV1;
// Positions M2 apart are neighbours in the tile, so that the rows of a fragment are.
constexpr int H2 = divide_up((T2 - 1) * M2 + NV2, M2);
constexpr int POSITIONS = TN * H0 * H1 * M2 * H2;
constexpr int DISTANCES = NV0 * NV1 * NV2;
constexpr int PITCH = CHUNK + 16 / sizeof(IN);
constexpr int ZERO = R0 * R1 * R2 * XC;  // the row of the tile of w that is none of w's
constexpr int W_ROWS = SLICED ? DISTANCES * BN : ZERO + 1;
constexpr int CHUNKS = divide_up(YC, CHUNK);

struct Column {
  int p0, p1, element;  // of the period's row in x
  bool real;
};

// `column` in the order of memory.
__device__ __forceinline__ Column column_of(unsigned column) {
  const unsigned row = column / COLUMNS;
  return {int(row / PERIOD1), int(row % PERIOD1), int(column % COLUMNS),
          column % COLUMNS < PERIOD2 * XC && row < PERIOD0 * PERIOD1};
}

template <int R, int D> __device__ __forceinline__ int tap_at(int distance, bool& real) {
  real = real && distance >= 0 && distance % D == 0 && distance / D < R;
  return distance / D;
}

// The row of w that a column takes at a distance, or NONE.
__device__ __forceinline__ int row_of_w(int distance, int column) {
  const Place v = place_of<NV0, NV1, NV2>(distance);
  const Column c = column_of(column);
  bool real = c.real;
  const int r0 = tap_at<R0, D0>(c.p0 + L0 - (v.at0 + V0) * S0, real);
  const int r1 = tap_at<R1, D1>(c.p1 + L1 - (v.at1 + V1) * S1, real);
  const int r2 = tap_at<R2, D2>(c.element / XC + L2 - (v.at2 + V2) * S2, real);
  return real ? ((r0 * R1 + r1) * R2 + r2) * XC + c.element % XC : NONE;
}

__device__ __forceinline__ float4 four_at(const IN* p) { return *reinterpret_cast<const float4*>(p); }

extern "C" __global__ void __launch_bounds__(THREADS)
thin_x(const IN* y, const IN* w, const OUT* bias, OUT* out, char*) {
  extern __shared__ __align__(16) char memory[];
  IN* const y_tiles = reinterpret_cast<IN*>(memory);
  IN* const w_tiles = y_tiles + STAGES * POSITIONS * PITCH;
  int* const y_rows = reinterpret_cast<int*>(w_tiles + STAGES * W_ROWS * PITCH);
  int* const w_rows = y_rows + POSITIONS;
  int* const slots = w_rows + W_ROWS;            // [DISTANCES, BN]
  unsigned* const live = reinterpret_cast<unsigned*>(slots + DISTANCES * BN);  // fragments of columns that are not zero

  const Lane at;
  const int wm = at.warp % WM, wn = at.warp / WM;
  const int first_column = blockIdx.x % SLICES * BN;
  const Place first = tile_at<Q0, Q1, Q2>(blockIdx.x / SLICES);

  for (int i = threadIdx.x; i < DISTANCES; i += THREADS) live[i] = 0;
  for (int i = threadIdx.x; i < POSITIONS; i += THREADS) {
    const Place p = place_of<H0, H1, M2 * H2>(i);
    y_rows[i] = row_of_y({first.n + p.n, first.at0 + V0 + p.at0, first.at1 + V1 + p.at1,
                          first.at2 * M2 + V2 + p.at2 % H2 * M2 + p.at2 / H2});
  }
  if constexpr (!SLICED)
    for (int i = threadIdx.x; i < W_ROWS; i += THREADS) w_rows[i] = i == ZERO ? NONE : i;
  __syncthreads();
  for (int i = threadIdx.x; i < DISTANCES * BN; i += THREADS) {
    const int column = i % BN, row = row_of_w(i / BN, first_column + column_in_memory(column));
    if constexpr (SLICED) w_rows[i] = row;
    slots[i] = (SLICED ? i : row == NONE ? ZERO : row) * PITCH;
    if (row != NONE) atomicOr(&live[i / BN], 1u << (column / 8));
  }
  __syncthreads();

  auto load = [&](int chunk) {
    IN* const y_tile = y_tiles + chunk % STAGES * POSITIONS * PITCH;
    IN* const w_tile = w_tiles + chunk % STAGES * W_ROWS * PITCH;
    copy_rows<CHUNK, YC, PITCH, false>(y_tile, y, POSITIONS, chunk * CHUNK, [&](int i, bool) { return y_rows[i]; });
    copy_rows<CHUNK, YC, PITCH, false>(w_tile, w, W_ROWS, chunk * CHUNK, [&](int i, bool) { return w_rows[i]; });
  };

  // Where the tile of y has the row of the product, at distance 0. Rows beyond the tile repeat its first.
  auto position_of = [&](int row) {
    const Place p = place_of<T0, T1, T2>(row < TN * T0 * T1 * T2 ? row : 0);
    return ((p.n * H0 + p.at0) * H1 + p.at1) * (M2 * H2) + p.at2;
  };
  int a_at[MF][STRICT ? 2 : 1];
#pragma unroll
  for (int m = 0; m < MF; m++) {
    const int row = (wm * MF + m) * 16;
    if constexpr (STRICT) {
      a_at[m][0] = position_of(row + at.g) * PITCH;
      a_at[m][STRICT] = position_of(row + at.g + 8) * PITCH;
    } else {
      a_at[m][0] = position_of(row + at.lane % 16) * PITCH + at.lane / 16 * (STEP / 2);
    }
  }

  float acc[MF][NF][4] = {};
#pragma unroll
  for (int s = 0; s < STAGES - 1; s++) {
    if (s < CHUNKS) load(s);
    copy_async_commit();
  }
  for (int chunk = 0; chunk < CHUNKS; chunk++) {
    if constexpr (STAGES > 1) {
      copy_async_wait<(STAGES > 1 ? STAGES - 2 : 0)>();
      __syncthreads();
      if (chunk + STAGES - 1 < CHUNKS) load(chunk + STAGES - 1);
      copy_async_commit();
    } else {
      if (chunk > 0) __syncthreads();
      load(chunk);
      copy_async_commit();
      copy_async_wait<0>();
      __syncthreads();
    }
    const IN* const y_tile = y_tiles + chunk % STAGES * POSITIONS * PITCH;
    const IN* const w_tile = w_tiles + chunk % STAGES * W_ROWS * PITCH;
    const int steps = min(CHUNK / STEP, divide_up(YC - chunk * CHUNK, STEP));
    for (int v = 0; v < DISTANCES; v++) {
      const unsigned here = live[v] >> (wn * NF);
      if (!(here & ((1ull << NF) - 1))) continue;
      const Place d = place_of<NV0, NV1, NV2>(v);
      const int shift = ((d.at0 * H1 + d.at1) * (M2 * H2) + d.at2 % M2 * H2 + d.at2 / M2) * PITCH;
      const int* const slot = slots + v * BN + wn * NF * 8;
      if constexpr (STRICT) {
        for (int k = 0; k < steps * STEP; k += 4) {
          float4 a[MF][2];
#pragma unroll
          for (int m = 0; m < MF; m++) {
            a[m][0] = four_at(y_tile + a_at[m][0] + shift + k);
            a[m][1] = four_at(y_tile + a_at[m][STRICT] + shift + k);
          }
#pragma unroll
          for (int j = 0; j < NF; j++) {
            if (!(here >> j & 1)) continue;
#pragma unroll
            for (int e = 0; e < 2; e++) {
              const float4 b = four_at(w_tile + slot[j * 8 + at.t * 2 + e] + k);
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
        constexpr int PAIRS_OF_FRAGMENTS = divide_up(NF, 2);
        unsigned b_at[PAIRS_OF_FRAGMENTS];
#pragma unroll
        for (int j = 0; j < PAIRS_OF_FRAGMENTS; j++) {
          const int column = 16 * j + at.lane % 8 + (2 * j + 1 < NF ? at.lane / 16 * 8 : 0);
          b_at[j] = shared_address(w_tile + slot[column] + at.lane / 8 % 2 * (STEP / 2));
        }
        for (int k = 0; k < steps; k++) {
          unsigned a[MF][4];
#pragma unroll
          for (int m = 0; m < MF; m++) {
            load_matrices(a[m], shared_address(y_tile + a_at[m][0] + shift) + k * 32);
#pragma unroll
            for (int e = 0; e < 4; e++) a[m][e] = operand<IN>(a[m][e]);
          }
#pragma unroll
          for (int j = 0; j < PAIRS_OF_FRAGMENTS; j++) {
            if (!(here >> (2 * j) & 3)) continue;
            unsigned b[4];
            load_matrices(b, b_at[j] + k * 32);
#pragma unroll
            for (int e = 0; e < 4; e++) b[e] = operand<IN>(b[e]);
            add_products(acc, a, 2 * j, b[0], b[1]);
            if (2 * j + 1 < NF) add_products(acc, a, 2 * j + 1 < NF ? 2 * j + 1 : 0, b[2], b[3]);
          }
        }
      }
    }
  }

#pragma unroll
  for (int m = 0; m < MF; m++) {
#pragma unroll
    for (int h = 0; h < 2; h++) {
      const int row = (wm * MF + m) * 16 + h * 8 + at.g;
      const Place p = place_of<T0, T1, T2>(row);
      const Place q = {first.n + p.n, first.at0 + p.at0, first.at1 + p.at1, first.at2 + p.at2};
      if (row >= TN * T0 * T1 * T2 || q.n >= BATCH) continue;
#pragma unroll
      for (int j = 0; j < NF; j += GROUP) {
        const int column = first_column + (wn * NF + j) * 8 + at.t * 2 * GROUP;
        float v[2 * GROUP];
#pragma unroll
        for (int e = 0; e < 2 * GROUP; e++) v[e] = acc[m][j + e / 2][2 * h + e % 2];
        auto place = [&](int e, long long& to, int& channel) {
          const Column c = column_of(column + e);
          const int x0 = q.at0 * PERIOD0 + c.p0, x1 = q.at1 * PERIOD1 + c.p1;
          const long long element = (long long)q.at2 * (PERIOD2 * XC) + c.element;
          to = (((long long)q.n * X0 + x0) * X1 + x1) * (long long)(X2 * XC) + element;
          channel = c.element % XC;
          return c.real && x0 < X0 && x1 < X1 && element < X2 * XC;
        };
        long long to;
        int channel;
        if constexpr (WIDE) {
          if (!place(0, to, channel)) continue;
#pragma unroll
          for (int e = 0; e < 2 * GROUP; e++) v[e] = finish(v[e], bias, (channel + e) % XC);
          store(out + to, v);
        } else {
#pragma unroll
          for (int e = 0; e < 2 * GROUP; e++)
            if (place(e, to, channel)) out[to] = from_float<OUT>(finish(v[e], bias, channel));
        }
      }
    }
  }
}

#else
// -- Windows of x ---------------------------------------------------------------------------------

constexpr int WINDOW0 = (T0 - 1) * S0 + (R0 - 1) * D0 + 1, WINDOW1 = (T1 - 1) * S1 + (R1 - 1) * D1 + 1;
constexpr int ELEMENTS = divide_up(((T2 - 1) * S2 + (R2 - 1) * D2 + 1) * XC, UNIT) * UNIT;
// The tile of x leaves a gap after each step of the stride, so that windows begin in different banks.
constexpr int ADVANCE = S2 * XC + SKEW;
__host__ __device__ constexpr int skewed(int element) { return element / (S2 * XC) * ADVANCE + element % (S2 * XC); }
constexpr int X_PITCH = divide_up(skewed(ELEMENTS - 1) + 2, 16 / int(sizeof(IN))) * (16 / int(sizeof(IN)));
constexpr int X_TILE = TN * WINDOW0 * WINDOW1 * X_PITCH;
constexpr int INNER = RUNS / (R0 * R1);  // runs along the last axis
constexpr int TILE_ROWS = TN * T0 * T1 * T2;

__device__ __forceinline__ void copy_x(IN* tile, const IN* x, Place first) {
  constexpr int PER_ROW = ELEMENTS / UNIT;
  for (int u = threadIdx.x; u < TN * WINDOW0 * WINDOW1 * PER_ROW; u += THREADS) {
    const int row = u / PER_ROW, j = u % PER_ROW * UNIT;
    const Place p = place_of<1, WINDOW0, WINDOW1>(row);  // n, 0, at0, at1
    const int n = first.n + p.n, x0 = first.at0 * S0 - L0 + p.at1, x1 = first.at1 * S1 - L1 + p.at2;
    const long long e = (long long)(first.at2 * S2 - L2) * XC + j;
    const bool there = n < BATCH && unsigned(x0) < X0 && unsigned(x1) < X1 && e >= 0 && e < (long long)X2 * XC;
    const IN* from = there ? x + (((long long)n * X0 + x0) * X1 + x1) * ((long long)X2 * XC) + e : x;
    IN* to = tile + row * X_PITCH + skewed(j);
    if constexpr (UNIT * sizeof(IN) >= 4)
      copy_async<UNIT * sizeof(IN)>(shared_address(to), from, there);
    else
      *to = there ? *from : from_float<IN>(0.f);
  }
}

// Where a window's element is, from the window's begin; NONE for those that fill up a run or the last step.
__device__ __forceinline__ int offset_of(unsigned element, int& row_of_w) {
  const unsigned run = element / RUN_PADDED, e = element % RUN_PADDED, row = run / INNER;
  const bool real = run < RUNS && e < RUN;
  row_of_w = real ? int(run * RUN + e) : NONE;
  return real ? int(row / R1 * D0 * WINDOW1 + row % R1 * D1) * X_PITCH + skewed(run % INNER * D2 * XC + e) : NONE;
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
constexpr bool FILLED = WINDOW != RUNS * RUN;
constexpr int W_ROWS = RUNS * RUN;
constexpr int B_PITCH = BN + (BN % 16 ? 16 : 8);  // rows that are read together begin in different banks

#if ROLE_Y
// -- Role y ---------------------------------------------------------------------------------------

constexpr int CHUNKS = divide_up(WINDOW, CHUNK);

extern "C" __global__ void __launch_bounds__(THREADS)
thin_y(const IN* x, const IN* w, const OUT* bias, OUT* out, char*) {
  extern __shared__ __align__(16) char memory[];
  IN* const x_tile = reinterpret_cast<IN*>(memory);
  IN* const w_tiles = x_tile + X_TILE;
  int* const offsets = reinterpret_cast<int*>(w_tiles + STAGES * CHUNK * B_PITCH);  // [WINDOW]

  const Lane at;
  const int wm = at.warp % WM, wn = at.warp / WM;
  const int first_column = blockIdx.x % SLICES * BN;
  const Place first = tile_at<Y0, Y1, Y2>(blockIdx.x / SLICES);

  auto load = [&](int chunk) {
    copy_rows<BN, YC, B_PITCH, true>(w_tiles + chunk % STAGES * CHUNK * B_PITCH, w, CHUNK, first_column,
                                     [&](int i, bool) {
                                       int row;
                                       offset_of(chunk * CHUNK + i, row);
                                       return row;
                                     });
  };
  copy_x(x_tile, x, first);
#pragma unroll
  for (int s = 0; s < (STAGES > 1 ? STAGES - 1 : 1); s++) {
    if (s < CHUNKS) load(s);
    copy_async_commit();
  }
  for (int i = threadIdx.x; i < WINDOW; i += THREADS) {
    int row;
    offsets[i] = offset_of(i, row);
  }
  const IN* base[MF][2];
#pragma unroll
  for (int m = 0; m < MF; m++) {
#pragma unroll
    for (int h = 0; h < 2; h++) base[m][h] = x_tile + base_of((wm * MF + m) * 16 + h * 8 + at.g);
  }

  float acc[MF][NF][4] = {};
  for (int chunk = 0; chunk < CHUNKS; chunk++) {
    if constexpr (STAGES > 1) {
      copy_async_wait<(STAGES > 1 ? STAGES - 2 : 0)>();
      __syncthreads();
      if (chunk + STAGES - 1 < CHUNKS) load(chunk + STAGES - 1);
      copy_async_commit();
    } else {
      copy_async_wait<0>();
      __syncthreads();
    }
    const IN* const w_tile = w_tiles + chunk % STAGES * CHUNK * B_PITCH + wn * NF * 8;
    const int steps = min(CHUNK, WINDOW - chunk * CHUNK);
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
            for (int h = 0; h < 2; h++) a[m][h] = FILLED && o < 0 ? 0.f : to_float(base[m][h][o]);
          }
          add_outer(acc, a, w_tile + (k + s) * B_PITCH, at.t);
        }
      } else {
        unsigned a[MF][4];
        if constexpr (NARROW) {
#pragma unroll
          for (int half = 0; half < 2; half++) {
            const int2 o = *reinterpret_cast<const int2*>(offset + half * 8 + at.t * 2);
            const unsigned mask = (o.x < 0 ? 0u : 0xffffu) | (o.y < 0 ? 0u : 0xffff0000u);
            const int low = FILLED ? max(o.x, 0) : o.x, high = FILLED ? max(o.y, 0) : o.y;
#pragma unroll
            for (int m = 0; m < MF; m++) {
#pragma unroll
              for (int h = 0; h < 2; h++) {
                unsigned v = PAIRS ? word_at(base[m][h] + low)
                                   : bits_at(base[m][h] + low) | bits_at(base[m][h] + high) << 16;
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
                a[m][half * 2 + h] = FILLED && o < 0 ? 0u : operand<IN>(word_at(base[m][h] + o));
            }
          }
        }
        add_step<B_PITCH>(acc, a, w_tile + k * B_PITCH, at);
      }
    }
  }

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

#else
// -- Role w ---------------------------------------------------------------------------------------

constexpr int POSITIONS = divide_up(TILE_ROWS, STEP * WK) * STEP * WK;  // in a tile
constexpr int TILES = divide_up(BATCH, TN) * divide_up(Y0, T0) * divide_up(Y1, T1) * divide_up(Y2, T2);
constexpr bool PARTIAL = POSITIONS != TILE_ROWS || BATCH % TN || Y0 % T0 || Y1 % T1 || Y2 % T2;

extern "C" __global__ void __launch_bounds__(THREADS)
thin_w(const IN* x, const IN* y, const OUT*, OUT* out, char* workspace) {
  extern __shared__ __align__(16) char memory[];
  IN* const x_tiles = reinterpret_cast<IN*>(memory);
  IN* const y_tiles = x_tiles + STAGES * X_TILE;
  int* const y_rows = reinterpret_cast<int*>(y_tiles + STAGES * POSITIONS * B_PITCH);  // [STAGES, POSITIONS]
  int* const bases = y_rows + STAGES * POSITIONS;

  const Lane at;
  const int wm = at.warp % WM, wn = at.warp / WM % WN, wk = at.warp / (WM * WN);
  const int first_column = blockIdx.x % SLICES * BN;
  const int first_row = blockIdx.x / SLICES % ROW_SLICES * BM + wm * MF * 16;
  const int split = blockIdx.x / (SLICES * ROW_SLICES);

  for (int i = threadIdx.x; i < POSITIONS; i += THREADS) bases[i] = base_of(i);
  // Rows 2 * g and 2 * g + 1 of a fragment are the lane's, neighbours in x.
  int offset[MF][2];
#pragma unroll
  for (int m = 0; m < MF; m++) {
#pragma unroll
    for (int h = 0; h < 2; h++) {
      int row;
      offset[m][h] = max(offset_of(first_row + m * 16 + at.g * 2 + h, row), 0);
    }
    if (PAIRS) offset[m][1] = 0;
  }

  auto load = [&](int tile) {
    const int stage = (tile - split) / SPLITS % STAGES;
    const Place first = tile_at<Y0, Y1, Y2>(tile);
    copy_x(x_tiles + stage * X_TILE, x, first);
    copy_rows<BN, YC, B_PITCH, false>(y_tiles + stage * POSITIONS * B_PITCH, y, POSITIONS, first_column,
                                      [&](int i, bool one) {
                                        const int row = row_in_y(first, i);
                                        if (PARTIAL && one) y_rows[stage * POSITIONS + i] = row;
                                        return row;
                                      });
  };

  float acc[MF][NF][4] = {};
#pragma unroll
  for (int s = 0; s < STAGES - 1; s++) {
    if (split + s * SPLITS < TILES) load(split + s * SPLITS);
    copy_async_commit();
  }
  int stage = 0;
  for (int tile = split; tile < TILES; tile += SPLITS) {
    copy_async_wait<STAGES - 2>();
    __syncthreads();
    if (tile + (STAGES - 1) * SPLITS < TILES) load(tile + (STAGES - 1) * SPLITS);
    copy_async_commit();
    const IN* const x_tile = x_tiles + stage * X_TILE;
    const IN* const y_tile = y_tiles + stage * POSITIONS * B_PITCH + wn * NF * 8;
    const int* const rows = y_rows + stage * POSITIONS;
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
        if constexpr (NARROW) {
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
    stage = stage + 1 == STAGES ? 0 : stage + 1;
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
      offset_of(first_row + m * 16 + at.g * 2 + h, row);
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

// Adds the parts, always in the same order: 32 elements for each block, LANES runs of parts for each element.
extern "C" __global__ void thin_w_sum(const IN*, const IN*, const OUT*, OUT* out, char* workspace) {
  constexpr int LANES = 16;
  constexpr long long SIZE = (long long)W_ROWS * YC;
  __shared__ float sums[LANES][32];
  const long long element = (long long)blockIdx.x * 32 + threadIdx.x;
  const float* const parts = reinterpret_cast<const float*>(workspace) + element;
  float sum = 0;
  if (element < SIZE) {
#pragma unroll 8
    for (int i = threadIdx.y; i < SPLITS; i += LANES) sum += parts[i * SIZE];
  }
  sums[threadIdx.y][threadIdx.x] = sum;
  __syncthreads();
  if (threadIdx.y == 0 && element < SIZE) {
#pragma unroll
    for (int i = 1; i < LANES; i++) sum += sums[i][threadIdx.x];
    out[element] = from_float<OUT>(sum);
  }
}
#endif
#endif

}  // namespace thin

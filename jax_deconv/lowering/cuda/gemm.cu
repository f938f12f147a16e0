// Copyright 2026 The jax_deconv authors
// SPDX-License-Identifier: Apache-2.0
//
// Windows that do not overlap: x[n, i * S + r - L, c] and y[n, i, k] meet in one product,
//
//     role x:  x [pixels, taps * C] = y [pixels, K] * w [taps * C, K]^T
//     role y:  y [pixels, K]        = x [pixels, taps * C] * w [K, taps * C]^T
//
// so both are matrix products whose operands have the summed index innermost; x is read or written in place,
// at the addresses that interleave the taps. Bias and activation are applied before the only write.
//
// Macros:
//   IN, OUT             bf16, f16 or f32: the type of the operands and of the result
//   ROLE_X              1: x is made; 0: y is made
//   M, NN, KK           pixels, columns of the result, length of the sums
//   CHANNELS            length of bias; column q has the bias q % CHANNELS
//   P0.., Y0.., X0..    for each of three axes: pixels, size of y, size of x,
//   S0.., L0..          stride (= kernel) and padding before x
//   RUN                 elements of x at one position; the caller folds the last axis into it where it may
//   TAIL                1: there are pixels beyond y, whose y reads as zero
//   CROP                1: some taps lie outside x
//   A_BYTES, B_BYTES    what one copy from a and b may read at once
//   VEC                 elements of the result that one store may write
//   BM, BN, STAGES      tile of the result, depth of the pipeline over slices of 128 bytes of the sums
//   WM, WN              warps along M and N (portable)
//   HOPPER              1: for sm_90a, a warpgroup that copies and two that multiply
//   TURNS               1: these two share each tile; 2: they take turns, so that one multiplies while the other stores
//   PANELS              0, or 2: all slices of A stay for the tiles of a row of tiles, which a block takes one by one
//   BIAS, ACTIVATION    whether there is a bias; an expression in float v

using namespace jd;

#ifndef BIAS
#define BIAS 0
#endif
#ifndef ACTIVATION
#define ACTIVATION(v) v
#endif
#ifndef HOPPER
#define HOPPER 0
#endif
#ifndef PANELS
#define PANELS 0
#endif

// -- Where things are -----------------------------------------------------------------------------

constexpr int ROW = 128;                           // bytes of a row of a tile in shared memory
constexpr int CHUNK = 16 / sizeof(IN);             // elements in 16 bytes
constexpr int SLICE = ROW / sizeof(IN);            // elements of the sums in one stage
constexpr int SLICES = (KK + SLICE - 1) / SLICE;
constexpr int B_OFFSET = PANELS ? 0 : BM * ROW;    // in a stage: A, then B
constexpr int STAGE = B_OFFSET + BN * ROW;         // bytes
constexpr int TILES_M = (M + BM - 1) / BM, TILES_N = (NN + BN - 1) / BN;

struct Tile { int m, n; };

// Neighbours in time share operands in L2: bands of 8 tiles along M, and in each one row of N after another.
__device__ __forceinline__ Tile tile_at(int index) {
  if (PANELS) return {index / TILES_N * BM, index % TILES_N * BN};
  constexpr int BAND = 8;
  const int first = index / (BAND * TILES_N) * BAND, within = index % (BAND * TILES_N);
  const int height = min(BAND, TILES_M - first);
  return {(first + within % height) * BM, within / height * BN};
}

// The position in x of a pixel's first tap, which may lie outside.
struct Corner {
  int at0, at1, at2;
  long long offset;
};

struct Pixel { int n, p0, p1, p2; };

__device__ __forceinline__ Pixel pixel_of(int m) {
  const unsigned u = m, v = u / P2, w = v / P1;
  return {int(w / P0), int(w % P0), int(v % P1), int(u % P2)};
}

__device__ __forceinline__ Corner corner_of(int m) {
  const Pixel p = pixel_of(m);
  const int at0 = p.p0 * S0 - L0, at1 = p.p1 * S1 - L1, at2 = p.p2 * S2 - L2;
  return {at0, at1, at2, ((((long long)p.n * X0 + at0) * X1 + at1) * X2 + at2) * RUN};
}

// A column of the product as a tap and a channel of x, relative to the corner.
struct Tap {
  int r0, r1, r2;
  long long offset;
};

__device__ __forceinline__ Tap tap_of(int column) {
  const unsigned q = column, run = q / RUN, row = run / S2;
  const int r0 = row / S1, r1 = row % S1, r2 = run % S2;
  return {r0, r1, r2, (((long long)r0 * X1 + r1) * X2 + r2) * RUN + q % RUN};
}

__device__ __forceinline__ bool inside(const Corner& c, const Tap& t) {
  return !CROP || ((unsigned)(c.at0 + t.r0) < X0 && (unsigned)(c.at1 + t.r1) < X1 && (unsigned)(c.at2 + t.r2) < X2);
}

// Row m of the operand a, as an offset; negative where it reads as zero. In role y it has a part for each tap.
__device__ __forceinline__ long long a_row(int m) {
  if (m >= M) return -1;
  if (!ROLE_X) return corner_of(m).offset;
  if (!TAIL) return (long long)m * KK;
  const Pixel p = pixel_of(m);
  if (p.p0 >= Y0 || p.p1 >= Y1 || p.p2 >= Y2) return -1;
  return ((((long long)p.n * Y0 + p.p0) * Y1 + p.p1) * Y2 + p.p2) * KK;
}

// -- Columns and the epilogue ---------------------------------------------------------------------
// Tensor cores leave in each thread two neighbours of each 8 columns. The columns of a tile are dealt out to them
// so that what a thread gets from WIDTH / 2 such blocks are WIDTH neighbours in memory, 16 bytes, and what the four
// threads of a row get 64.

constexpr int WIDTH = 16 / sizeof(OUT);

// The column of a tile that stands at place p of tensor cores' operand.
__device__ __forceinline__ int dealt(int p) {
  return p / (4 * WIDTH) * (4 * WIDTH) + p % 8 / 2 * WIDTH + p / 8 % (WIDTH / 2) * 2 + p % 2;
}

__device__ __forceinline__ float finish(float v) { return ACTIVATION(v); }

// The elements in a word.
template <typename T> __device__ __forceinline__ unsigned word(const float* v) {
  if constexpr (sizeof(T) == 4) return __float_as_uint(v[0]);
  else return pack<T>(v[0], v[1]);
}
template <typename T> __device__ __forceinline__ void elements(float* v, unsigned word) {
  if constexpr (sizeof(T) == 4) v[0] = __uint_as_float(word);
  else unpack<T>(word, v[0], v[1]);
}

// A row of the result, and its columns from q on.
struct Line {
  Corner corner;
  bool there;
};
struct Columns {
  Tap tap;
  bool there;
};

__device__ __forceinline__ Line line_of(int m) {
  Corner corner = {0, 0, 0, (long long)m * NN};
  if (ROLE_X) corner = corner_of(m);
  return {corner, M % BM == 0 || m < M};
}
__device__ __forceinline__ Columns columns_of(int q) {
  Tap tap = {0, 0, 0, q};
  if (ROLE_X) tap = tap_of(q);
  return {tap, NN % BN == 0 || q < NN};
}
// Where a value goes, or null.
__device__ __forceinline__ OUT* address(OUT* out, const Line& line, const Columns& columns) {
  const bool there = line.there && columns.there && (!ROLE_X || inside(line.corner, columns.tap));
  return there ? out + line.corner.offset + columns.tap.offset : nullptr;
}

// The biases of a thread's columns in a tile.
template <int BLOCKS> struct Biases {
  unsigned words[BLOCKS * 2 / WIDTH][4];

  __device__ __forceinline__ void load(const OUT* bias, int column) {
#pragma unroll
    for (int j = 0; BIAS && j < BLOCKS * 2 / WIDTH; ++j) {
      const int first = column + j * 4 * WIDTH + threadIdx.x % 4 * WIDTH;
      if constexpr (CHANNELS % WIDTH == 0) {
        load_16_bytes(words[j], bias + first % CHANNELS);
      } else {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          float v[WIDTH / 4];
#pragma unroll
          for (int e = 0; e < WIDTH / 4; ++e) v[e] = to_float(bias[(first + i * (WIDTH / 4) + e) % CHANNELS]);
          words[j][i] = word<OUT>(v);
        }
      }
    }
  }
};

template <int BLOCKS>  // of 8 columns, from `column` on
__device__ __forceinline__ void store(const float (&acc)[BLOCKS * 4], int row, int column,
                                      const Biases<BLOCKS>& biases, OUT* out) {
  const Line lines[2] = {line_of(row), line_of(row + 8)};
#pragma unroll
  for (int j = 0; j < BLOCKS; j += WIDTH / 2) {
    const int first = j * 8 + threadIdx.x % 4 * WIDTH;
    unsigned words[2][4];
#pragma unroll
    for (int half = 0; half < 2; ++half)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        constexpr int EACH = WIDTH / 4;  // elements in a word
        float v[EACH] = {};
        if (BIAS) elements<OUT>(v, biases.words[j * 2 / WIDTH][i]);
#pragma unroll
        for (int e = 0; e < EACH; ++e) {
          const int at = i * EACH + e;
          v[e] = finish(acc[(j + at / 2) * 4 + half * 2 + at % 2] + v[e]);
        }
        words[half][i] = word<OUT>(v);
      }
#pragma unroll
    for (int i = 0; i < WIDTH; i += VEC) {
      const Columns columns = columns_of(column + first + i);
#pragma unroll
      for (int half = 0; half < 2; ++half)
        if (OUT* to = address(out, lines[half], columns)) {
          constexpr int BYTES = VEC * sizeof(OUT);
          if constexpr (BYTES >= 4) store_words<BYTES>(to, words[half] + i * BYTES / VEC / 4);
          else *(unsigned short*)to = words[half][i / 2] >> i % 2 * 16;
        }
    }
  }
}

// -- Shared memory --------------------------------------------------------------------------------
// Rows of 128 bytes in the order that tensor cores read without conflicts: chunk c of row r lies in place c ^ (r % 8).

__device__ __forceinline__ unsigned place(int row, int chunk) { return row * ROW + ((chunk ^ (row & 7)) << 4); }

#if HOPPER

#ifndef __CUDA_ARCH_FEAT_SM90_ALL
#error "this variant is for GPUs of compute capability 9.0"
#endif

constexpr int TILES = TILES_M * TILES_N, PANEL = SLICES * BM * ROW;
constexpr int WARPGROUP = 128, CONSUMERS = 2;
constexpr int SHARERS = CONSUMERS / TURNS;  // of a tile
constexpr int HEIGHT = BM / (64 * SHARERS);  // instructions of 64 rows that cover a warpgroup's part of the tile

__device__ __forceinline__ void barrier_init(unsigned barrier, int count) {
  asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(barrier), "r"(count) : "memory");
}
__device__ __forceinline__ void barrier_arrive(unsigned barrier) {
  asm volatile("{.reg .b64 s; mbarrier.arrive.shared.b64 s, [%0];}" ::"r"(barrier) : "memory");
}
// Arrives when the copies that this thread has issued are done.
__device__ __forceinline__ void barrier_arrive_after_copies(unsigned barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(barrier) : "memory");
}
__device__ __forceinline__ void barrier_wait(unsigned barrier, unsigned parity) {
  unsigned done;
  do {
    asm volatile("{.reg .pred p; mbarrier.try_wait.parity.shared.b64 p, [%1], %2; selp.u32 %0, 1, 0, p;}"
                 : "=r"(done) : "r"(barrier), "r"(parity) : "memory");
  } while (!done);
}

#define R8(a, b, c, d, e, f, g, h) "%" #a ",%" #b ",%" #c ",%" #d ",%" #e ",%" #f ",%" #g ",%" #h
#define REGISTERS_0                                                                                 \
  R8(0, 1, 2, 3, 4, 5, 6, 7) "," R8(8, 9, 10, 11, 12, 13, 14, 15) "," R8(16, 17, 18, 19, 20, 21, 22, 23) "," \
  R8(24, 25, 26, 27, 28, 29, 30, 31)
#define REGISTERS_1                                                                                 \
  R8(32, 33, 34, 35, 36, 37, 38, 39) "," R8(40, 41, 42, 43, 44, 45, 46, 47) "," R8(48, 49, 50, 51, 52, 53, 54, 55) "," \
  R8(56, 57, 58, 59, 60, 61, 62, 63)
#define REGISTERS_2                                                                                 \
  R8(64, 65, 66, 67, 68, 69, 70, 71) "," R8(72, 73, 74, 75, 76, 77, 78, 79) "," R8(80, 81, 82, 83, 84, 85, 86, 87) "," \
  R8(88, 89, 90, 91, 92, 93, 94, 95)
#define REGISTERS_3                                                                                 \
  R8(96, 97, 98, 99, 100, 101, 102, 103) "," R8(104, 105, 106, 107, 108, 109, 110, 111) ","         \
  R8(112, 113, 114, 115, 116, 117, 118, 119) "," R8(120, 121, 122, 123, 124, 125, 126, 127)
#define D8(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), \
  "+f"(d[i + 6]), "+f"(d[i + 7])
#define D32(i) D8(i), D8(i + 8), D8(i + 16), D8(i + 24)
#if BN == 64
#define SHAPE "m64n64"
#define REGISTERS REGISTERS_0
#define ACCUMULATORS D32(0)
#define OPERANDS "%32, %33"
#define CONTINUE "%34"
#elif BN == 128
#define SHAPE "m64n128"
#define REGISTERS REGISTERS_0 "," REGISTERS_1
#define ACCUMULATORS D32(0), D32(32)
#define OPERANDS "%64, %65"
#define CONTINUE "%66"
#else
#define SHAPE "m64n256"
#define REGISTERS REGISTERS_0 "," REGISTERS_1 "," REGISTERS_2 "," REGISTERS_3
#define ACCUMULATORS D32(0), D32(32), D32(64), D32(96)
#define OPERANDS "%128, %129"
#define CONTINUE "%130"
#endif

// d = a * b, or d + a * b to continue a sum; a and b describe 32 bytes of the rows in shared memory.
#define WGMMA(T, DEPTH, NAME, MAJOR)                                                                        \
  __device__ __forceinline__ void wgmma(T, float (&d)[BN / 2], unsigned long long a, unsigned long long b,  \
                                        int go_on) {                                                        \
    asm volatile("{.reg .pred p; setp.ne.b32 p, " CONTINUE ", 0; wgmma.mma_async.sync.aligned." SHAPE DEPTH \
                 ".f32." NAME "." NAME " {" REGISTERS "}, " OPERANDS ", p, 1, 1" MAJOR ";}"                 \
                 : ACCUMULATORS : "l"(a), "l"(b), "r"(go_on));                                              \
  }
WGMMA(bf16, "k16", "bf16", ", 0, 0")
WGMMA(f16, "k16", "f16", ", 0, 0")
WGMMA(f32, "k8", "tf32", "")

template <int PENDING> __device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}

// Rows of 128 bytes in swizzled groups of 8.
__device__ __forceinline__ unsigned long long describe(unsigned address) {
  return (unsigned long long)(address >> 4) | 1ull << 16 | (unsigned long long)(8 * ROW >> 4) << 32 | 1ull << 62;
}

struct Ring {
  int stage = 0;
  unsigned parity = 0;
  __device__ __forceinline__ void next(int count = 1) {
    stage += count;
    parity ^= stage / STAGES & 1;
    stage %= STAGES;
  }
};

extern "C" __global__ void __launch_bounds__(WARPGROUP*(CONSUMERS + 1), 1)
    gemm(const IN* __restrict__ a, const IN* __restrict__ b, const OUT* __restrict__ bias, OUT* __restrict__ out,
         char*) {
  extern __shared__ char memory[];
  __shared__ unsigned long long barriers[2 * STAGES + PANELS];
  const unsigned tiles = (shared_address(memory) + 1023) & ~1023u, panels = tiles + STAGES * STAGE;
  const unsigned full = shared_address(barriers), empty = full + 8 * STAGES, empty_panel = empty + 8 * STAGES;
  if (threadIdx.x == 0) {
    for (int p = 0; p < PANELS; ++p) barrier_init(empty_panel + 8 * p, 4 * CONSUMERS);
    for (int s = 0; s < STAGES; ++s) {
      barrier_init(full + 8 * s, WARPGROUP);
      barrier_init(empty + 8 * s, 4 * SHARERS);
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  __syncthreads();
  Ring ring;
  // The tiles of this block: with panels the neighbours in a row of tiles, else those that all blocks take at a time.
  const int begin = PANELS ? (long long)blockIdx.x * TILES / gridDim.x : blockIdx.x;
  const int end = PANELS ? (long long)(blockIdx.x + 1) * TILES / gridDim.x : TILES;
  const int step = PANELS ? 1 : gridDim.x;
  auto panel_of = [&](int index) { return index / TILES_N - begin / TILES_N; };
  // Shuffled, for the compiler to see that all threads of a warp agree.
  const int group = __shfl_sync(0xffffffff, threadIdx.x / WARPGROUP, 0);

  if (group == CONSUMERS) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 56;");
    const int thread = threadIdx.x % WARPGROUP, chunk = thread % 8, row = thread / 8;
    const unsigned slot = place(row, chunk);
    for (int index = begin; index < end; index += step) {
      const Tile tile = tile_at(index);
      const int panel = panel_of(index);
      const bool fresh = !PANELS || index == begin || index % TILES_N == 0;  // A is not there yet
      if (PANELS && fresh) barrier_wait(empty_panel + panel % 2 * 8, (panel / 2 & 1) ^ 1);
      const IN* a_from = a + (long long)(tile.m + row) * KK;
      const IN* b_from = b + (long long)(tile.n + dealt(row)) * KK;
      // Other rows of a than equally spaced ones: in units of 16 bytes.
      constexpr bool SPACED = ROLE_X && !TAIL;
      int rows[SPACED ? 1 : BM / 16];
      if constexpr (!SPACED) {
#pragma unroll
        for (int i = 0; i < BM / 16; ++i) {
          const long long offset = a_row(tile.m + row + i * 16);
          rows[i] = offset < 0 ? -1 : int(offset / CHUNK);
        }
      }
      for (int slice = 0; slice < SLICES; ++slice, ring.next()) {
        const int k = slice * SLICE + chunk * CHUNK;
        const bool there = KK % SLICE == 0 || k < KK;
        const unsigned to = tiles + ring.stage * STAGE + slot;
        const unsigned a_to = PANELS ? panels + panel % 2 * PANEL + slice * BM * ROW + slot : to;
        const IN* a_slice = a + (ROLE_X ? k : tap_of(k).offset);
        barrier_wait(empty + 8 * ring.stage, ring.parity ^ 1);
        if (fresh) {
#pragma unroll
          for (int i = 0; i < BM / 16; ++i) {
            if constexpr (SPACED)
              copy_async<16>(a_to + i * 16 * ROW, a_from + k + (long long)i * 16 * KK,
                             there && (M % BM == 0 || tile.m + row + i * 16 < M));
            else
              copy_async<16>(a_to + i * 16 * ROW, a_slice + (long long)rows[i] * CHUNK, there && rows[i] >= 0);
          }
        }
#pragma unroll
        for (int i = 0; i < BN / 16; ++i)
          copy_async<16>(to + B_OFFSET + i * 16 * ROW, b_from + k + (long long)dealt(i * 16) * KK,
                         there && (NN % BN == 0 || tile.n + dealt(row) + dealt(i * 16) < NN));
        barrier_arrive_after_copies(full + 8 * ring.stage);  // those of a panel included
      }
    }
    copy_async_commit();
    copy_async_wait<0>();
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 224;");
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    float acc[HEIGHT][BN / 2];
    const int turn = group % TURNS, part = group % SHARERS;
    ring.next(turn * SLICES);
    int released = 0;
    for (int index = begin + turn * step; index < end; index += TURNS * step, ring.next((TURNS - 1) * SLICES)) {
      const Tile tile = tile_at(index);
      const int panel = panel_of(index);
      if (PANELS && lane == 0)
        for (; released < panel; ++released) barrier_arrive(empty_panel + released % 2 * 8);
      Biases<BN / 8> biases;
      // Ahead of time, where they do not take too many registers.
      constexpr bool AHEAD = BN * sizeof(OUT) <= 512;
      if (AHEAD) biases.load(bias, tile.n);
      // A turn begins when the other warpgroup's products are under way. Only then is no stage more than one round
      // ahead, and a parity tells whether it is full.
      if (TURNS == 2 && index != begin)
        asm volatile("bar.sync %0, %1;" ::"r"(1 + group), "n"(CONSUMERS * WARPGROUP) : "memory");
      unsigned used = 0;  // the barrier of the stage before
      for (int slice = 0; slice < SLICES; ++slice, ring.next()) {
        barrier_wait(full + 8 * ring.stage, ring.parity);
        // What ordinary copies wrote, tensor cores read through another proxy.
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
        asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
        const unsigned stage = tiles + ring.stage * STAGE;
        const unsigned a_stage = PANELS ? panels + panel % 2 * PANEL + slice * BM * ROW : stage;
        const unsigned long long a_tile = describe(a_stage + part * HEIGHT * 64 * ROW);
        const unsigned long long b_tile = describe(stage + B_OFFSET);
#pragma unroll
        for (int k = 0; k < ROW / 32; ++k)
#pragma unroll
          for (int i = 0; i < HEIGHT; ++i)
            wgmma(IN{}, acc[i], a_tile + (i * 64 * ROW + k * 32 >> 4), b_tile + (k * 32 >> 4), slice + k);
        asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
        wgmma_wait<1>();
        if (slice && lane == 0) barrier_arrive(used);
        used = empty + 8 * ring.stage;
      }
      if (TURNS == 2 && index + step < end)
        asm volatile("bar.arrive %0, %1;" ::"r"(1 + (group ^ 1)), "n"(CONSUMERS * WARPGROUP) : "memory");
      wgmma_wait<0>();
#pragma unroll
      for (int i = 0; i < HEIGHT; ++i)
#pragma unroll
        for (int j = 0; j < BN / 2; ++j) asm volatile("" : "+f"(acc[i][j])::"memory");  // not read before
      if (lane == 0) barrier_arrive(used);
      if (!AHEAD) biases.load(bias, tile.n);
#pragma unroll
      for (int i = 0; i < HEIGHT; ++i)
        store<BN / 8>(acc[i], tile.m + (part * HEIGHT + i) * 64 + warp % 4 * 16 + lane / 4, tile.n, biases, out);
    }
  }
}

#else

constexpr int THREADS = 32 * WM * WN;
constexpr int MI = BM / WM / 16, NI = BN / WN / 8;  // instructions that cover a warp's part of the tile

// 16 bytes of a row from as many pieces as alignment asks for; `from` says where each is, or null.
template <int BYTES, typename From> __device__ __forceinline__ void copy_chunk(unsigned to, const IN* any, From from) {
  constexpr int PIECE = BYTES / sizeof(IN);
#pragma unroll
  for (int i = 0; i < CHUNK; i += PIECE) {
    const IN* p = from(i);
    if constexpr (BYTES >= 4) {
      copy_async<BYTES>(to + i * sizeof(IN), p ? p : any, p);
    } else {
      const unsigned short v = p ? *(const unsigned short*)p : 0;
      asm volatile("st.shared.u16 [%0], %1;" ::"r"(to + i * 2), "h"(v) : "memory");
    }
  }
}

extern "C" __global__ void __launch_bounds__(THREADS)
    gemm(const IN* __restrict__ a, const IN* __restrict__ b, const OUT* __restrict__ bias, OUT* __restrict__ out,
         char*) {
  extern __shared__ __align__(128) char memory[];
  const unsigned tiles = shared_address(memory);
  const Tile tile = tile_at(blockIdx.x);
  const int chunk = threadIdx.x % 8, row = threadIdx.x / 8;
  constexpr int STEP = THREADS / 8;

  Corner corners[ROLE_X ? 1 : BM / STEP];
  long long rows[ROLE_X ? BM / STEP : 1];
#pragma unroll
  for (int i = 0; i < BM / STEP; ++i) {
    const int m = tile.m + row + i * STEP;
    if constexpr (ROLE_X) rows[i] = a_row(m);
    else corners[i] = corner_of(m);
  }
  auto load = [&](int slice) {
    if (slice < SLICES) {
      const int k = slice * SLICE + chunk * CHUNK;
      const unsigned to = tiles + slice % STAGES * STAGE;
#pragma unroll
      for (int i = 0; i < BM / STEP; ++i)
        copy_chunk<A_BYTES>(to + place(row + i * STEP, chunk), a, [&](int e) -> const IN* {
          if (KK % SLICE != 0 && k + e >= KK) return nullptr;
          if constexpr (ROLE_X) {
            return rows[i] < 0 ? nullptr : a + rows[i] + k + e;
          } else {
            const Tap tap = tap_of(k + e);
            const bool there = (M % BM == 0 || tile.m + row + i * STEP < M) && inside(corners[i], tap);
            return there ? a + corners[i].offset + tap.offset : nullptr;
          }
        });
#pragma unroll
      for (int i = 0; i < BN / STEP; ++i)
        copy_chunk<B_BYTES>(to + BM * ROW + place(row + i * STEP, chunk), b, [&](int e) -> const IN* {
          const int n = tile.n + dealt(row + i * STEP);
          if ((NN % BN != 0 && n >= NN) || (KK % SLICE != 0 && k + e >= KK)) return nullptr;
          return b + (long long)n * KK + k + e;
        });
    }
    copy_async_commit();
  };

  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int warp_m = warp / WN * (BM / WM), warp_n = warp % WN * (BN / WN);
  float acc[MI][NI * 4] = {};
#pragma unroll
  for (int s = 0; s < STAGES - 1; ++s) load(s);
  for (int slice = 0; slice < SLICES; ++slice) {
    copy_async_wait<STAGES - 2>();
    __syncthreads();
    load(slice + STAGES - 1);
    const unsigned a_tile = tiles + slice % STAGES * STAGE, b_tile = a_tile + BM * ROW;
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      unsigned fa[MI][4], fb[NI / 2][4];
#pragma unroll
      for (int i = 0; i < MI; ++i) {
        load_matrices(fa[i], a_tile + place(warp_m + i * 16 + lane % 16, 2 * k + lane / 16));
#pragma unroll
        for (int e = 0; e < 4; ++e) fa[i][e] = operand<IN>(fa[i][e]);
      }
#pragma unroll
      for (int j = 0; j < NI / 2; ++j) {
        load_matrices(fb[j], b_tile + place(warp_n + j * 16 + lane % 8 + lane / 16 * 8, 2 * k + lane / 8 % 2));
#pragma unroll
        for (int e = 0; e < 4; ++e) fb[j][e] = operand<IN>(fb[j][e]);
      }
#pragma unroll
      for (int i = 0; i < MI; ++i)
#pragma unroll
        for (int j = 0; j < NI; ++j) mma(IN{}, &acc[i][j * 4], fa[i], fb[j / 2][j % 2 * 2], fb[j / 2][j % 2 * 2 + 1]);
    }
  }
  Biases<NI> biases;
  biases.load(bias, tile.n + warp_n);
#pragma unroll
  for (int i = 0; i < MI; ++i)
    store<NI>(acc[i], tile.m + warp_m + i * 16 + lane / 4, tile.n + warp_n, biases, out);
}

#endif

/*
to_fp8_columns: wire rows -> FP8 columns, the operand of the weight gradient.

  payload      [num_rows, payload bytes]  u8    -DWIRE
  scales       [num_rows, num_blocks]     u8    E8M0
  row_source   [M]                        i32   wire row of each expert row; or null: the same row
  tile_starts  [num_tiles + 1]            i64   first expert row of each tile, then M
  tile_rows    [num_tiles]                i64   live rows of each tile, at most 128
  out          [hidden, M]                u8    written; E4M3 codes; 0 between a tile's live rows
                                                and the start of the next
  out_scales   [num_tiles, hidden]        f32   written; 2^(S - 127)

A tile's strip of columns under one block scale shares S (docs/formats.md 4); from BF16 each column
is quantized by itself (scale rule "ceil").  A thread block takes the rows of a tile and COLUMNS
columns, and turns the codes by way of shared memory, so that reads and writes are whole lines.
Needs hidden % 32 == 0.  Launcher: fp4comm/codec/cuda.py
MXFP4 reads 0.53 and writes 1 byte an element: bound by memory bandwidth.
*/
#include "arrival.cuh"
#include "encode.cuh"

constexpr int N = PIECE;  // columns of a thread (-D)
// LANES: threads beside each other along a row, 4 or 8 (-D)
constexpr int COLUMNS = LANES * N;  // of a thread block
// ROWS: rows of a thread, 4 or 8 (-D): one or two words of a turned column
constexpr int THREADS = LANES * TILE_ROWS / ROWS;
constexpr int WARPS = THREADS / 32;
constexpr int WORDS = N * element_bits(WIRE) / 32;
constexpr int STRIPS = WIRE == WIRE_BF16 ? N / 2 : 1;  // words of scales of a thread's columns

// 4 x 4 bytes: byte i of word j becomes byte j of word i.
DEVICE void turn(u32 (&words)[4]) {
    const u32 low01 = __byte_perm(words[0], words[1], 0x5140);
    const u32 high01 = __byte_perm(words[0], words[1], 0x7362);
    const u32 low23 = __byte_perm(words[2], words[3], 0x5140);
    const u32 high23 = __byte_perm(words[2], words[3], 0x7362);
    words[0] = __byte_perm(low01, low23, 0x5410);
    words[1] = __byte_perm(low01, low23, 0x7632);
    words[2] = __byte_perm(high01, high23, 0x5410);
    words[3] = __byte_perm(high01, high23, 0x7632);
}

// The larger values of two strips: scale bytes, or from BF16 magnitudes of two columns.
DEVICE u32 larger(u32 a, u32 b) { return WIRE == WIRE_BF16 ? max_u16x2(a, b) : max(a, b); }

// Largest values over the rows of the tile, by warp and then all: of the columns of each lane's
// strips.
struct Largest {
    alignas(16) u32 of_warp[WARPS][LANES][STRIPS];
    alignas(16) u32 of_tile[LANES][STRIPS];
};

DEVICE void max_of_tile(u32 (&largest)[STRIPS], Largest& shared) {
    const int lane = threadIdx.x % LANES, warp = threadIdx.x / 32;
#pragma unroll
    for (int s = 0; s < STRIPS; s++) {
#pragma unroll
        for (int step = LANES; step < 32; step *= 2) {
            largest[s] = larger(largest[s], __shfl_xor_sync(0xFFFFFFFFu, largest[s], step));
        }
        if (threadIdx.x % 32 < LANES) shared.of_warp[warp][lane][s] = largest[s];
    }
    __syncthreads();
#pragma unroll
    for (int w = 0; w < WARPS; w++) {
#pragma unroll
        for (int s = 0; s < STRIPS; s++)
            largest[s] = larger(largest[s], shared.of_warp[w][lane][s]);
    }
#pragma unroll
    for (int s = 0; s < STRIPS; s++) {
        if (threadIdx.x < LANES) shared.of_tile[lane][s] = largest[s];
    }
}

// --- BF16: two columns a word

constexpr u32 BF16_CEIL_ROUND = (E4M3_CEIL_ROUND >> 16) * 0x00010001u;
constexpr u32 LEAST_UNSHIFTED = (E4M3_EMAX + 1) << 7;  // BF16 from here on: a wire scale above 0

// What two columns with these largest magnitudes are multiplied by: 2^(127 - wire scale) as BF16.
DEVICE u32 inverse_of_columns(u32 largest) {
    const u32 exponents = (largest + BF16_CEIL_ROUND) & 0x7F807F80u;
    return min_u16x2(((254 + E4M3_EMAX) << 7) * 0x00010001u - exponents, 0x7F007F00u);
}

DEVICE u32 wire_scale_of_column(u32 largest) {
    return wire_scale<WIRE_FP8>(largest << 16, E4M3_CEIL_ROUND);
}

// FP16 factor of a column's codes on arrival: a column of scale byte 0 is shifted to 1, one with a
// NaN is NaN.
DEVICE u32 factor_of_column(u32 largest) {
    const u32 scale = wire_scale_of_column(largest);
    return scale == E8M0_NAN ? 0x7FFFu : scale == 0 ? 0x3800u : 0x3C00u;
}

// Do the codes of all these columns arrive as they are?
DEVICE bool are_unshifted(const u32 (&largest)[STRIPS]) {
    u32 least = 0xFFFFFFFFu, most = 0;
#pragma unroll
    for (int s = 0; s < STRIPS; s++) {
        least = min_u16x2(least, largest[s]);
        most = max_u16x2(most, largest[s]);
    }
    return min(least & 0xFFFFu, least >> 16) >= LEAST_UNSHIFTED &&
           max(most & 0xFFFFu, most >> 16) < F32_INF >> 16;
}

// Codes of the rows of this thread's columns.
template <int Format>
DEVICE void convert(const u32 (&words)[ROWS][WORDS],
                    const u32 (&scale)[ROWS],
                    const u32 (&largest)[STRIPS],
                    u32 (&codes)[ROWS][N / 4]) {
    if constexpr (Format == WIRE_BF16) {
        u32 inverse[STRIPS];
#pragma unroll
        for (int s = 0; s < STRIPS; s++) inverse[s] = inverse_of_columns(largest[s]);
#pragma unroll
        for (int r = 0; r < ROWS; r++) {
            float values[N];
#pragma unroll
            for (int s = 0; s < STRIPS; s++) {  // exact where a code other than 0 comes out
                const u32 scaled = fma_bf16x2(words[r][s], inverse[s], 0x80008000u);
                values[2 * s] = bf16_low(scaled);
                values[2 * s + 1] = bf16_high(scaled);
            }
#pragma unroll
            for (int i = 0; i < N / 4; i++) codes[r][i] = e4m3x4_from_f32(values + 4 * i);
        }
        if (are_unshifted(largest)) return;
#pragma unroll
        for (int s = 0; s < STRIPS; s++) {
            const u32 low = factor_of_column(largest[s] & 0xFFFFu);
            const u32 factor = low | factor_of_column(largest[s] >> 16) << 16;
            const u32 keep = s % 2 ? 0x0000FFFFu : 0xFFFF0000u;  // the other half of the word
#pragma unroll
            for (int r = 0; r < ROWS; r++) {
                u32& four = codes[r][s / 2];
                const u32 two = e4m3x2_from_f16(mul_f16x2(f16x2_from_e4m3(four, s % 2), factor));
                four = (four & keep) | two << 16 * (s % 2);
            }
        }
    } else {
#pragma unroll
        for (int r = 0; r < ROWS; r++) {
            to_e4m3<Format, N>(words[r], scale[r], shared_scale<Format>(largest[0]), codes[r]);
        }
    }
}

// Scale of a column: largest is that of its strip.
DEVICE float column_scale(const u32* largest, int column) {
    if constexpr (WIRE == WIRE_BF16) {
        const u32 byte = wire_scale_of_column(largest[column / 2] >> 16 * (column % 2) & 0xFFFFu);
        return e8m0_to_f32(shared_scale<WIRE_FP8>(scale_in_group(byte)));
    } else {
        return e8m0_to_f32(shared_scale<WIRE>(largest[0]));
    }
}

// The words of a turned column are permuted, so that neither those that a warp writes nor the 16
// bytes that it reads meet in a bank: word w of the columns of a lane stands at w ^ lane_key.
constexpr int COLUMN_WORDS = TILE_ROWS / 4;
DEVICE int lane_key(int lane) { return lane * (COLUMN_WORDS / LANES); }

// Write turned columns to whole lines: eight lanes a column.
DEVICE void write_columns(const u32* turned, u8* out, i64 M, int num_rows, int num_columns) {
    constexpr int PARTS = TILE_ROWS / 16, STEP = THREADS / PARTS;
    const int part = threadIdx.x % PARTS, first = threadIdx.x / PARTS;
    const bool is_whole = (M | reinterpret_cast<i64>(out)) % 16 == 0 && num_rows % 16 == 0;
    u8* to = out + first * M + 16 * part;
    const int rows = num_rows - 16 * part;
    if (rows <= 0) return;
#pragma unroll 4
    for (int c = first; c < num_columns; c += STEP, to += STEP * M) {
        const u32* words = turned + c * COLUMN_WORDS + (4 * part ^ lane_key(c / N));
        if (is_whole) {
            // The first to leave the L2: the payload is read twice from there.
            __stcs(reinterpret_cast<uint4*>(to), *reinterpret_cast<const uint4*>(words));
        } else {
#pragma unroll 1
            for (int j = 0; j < 16 && j < rows; j++)
                to[j] = static_cast<u8>(words[j / 4] >> 8 * (j % 4));
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS)
    to_fp8_columns(const u8* __restrict__ payload,
                   const u8* __restrict__ scales,
                   const int* __restrict__ row_source,
                   const i64* __restrict__ tile_starts,
                   const i64* __restrict__ tile_rows,
                   u8* __restrict__ out,
                   float* __restrict__ out_scales,
                   i64 M,
                   int hidden,
                   u32 num_tiles) {
    __shared__ __align__(16) u32 turned[COLUMNS * COLUMN_WORDS];
    __shared__ Largest shared;
    // All tiles of the same columns follow each other: when a second expert reads a wire row, these
    // columns of it are still in the L2.
    const u32 column_block = blockIdx.x / num_tiles, tile = blockIdx.x % num_tiles;
    const i64 start = tile_starts[tile];
    const int num_live = tile_rows[tile];
    const int first_column = column_block * COLUMNS;
    const int lane = threadIdx.x % LANES, row_word = threadIdx.x / LANES;
    const int column = first_column + lane * N;
    const int scale_columns = num_blocks(WIRE, hidden);
    const int payload_bytes = row_bytes(hidden, element_bits(WIRE));

    // Read the rows; one that is not live has codes and scale 0.
    int from[ROWS];
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
        const int row = row_word * ROWS + r;
        from[r] = row < num_live && column < hidden ? static_cast<int>(start) + row : -1;
        if (row_source && from[r] >= 0) from[r] = __ldg(row_source + from[r]);
    }
    u32 words[ROWS][WORDS] = {};
    u32 scale[ROWS] = {};
    const u8* payload_columns = payload + column * element_bits(WIRE) / 8;
    const u8* scale_column = scales + block_idx(WIRE, column);
    if constexpr (WIRE != WIRE_MXFP4) {  // which was faster without
        payload_columns = settled(payload_columns);
        scale_column = settled(scale_column);
    }
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
        if (from[r] < 0) continue;
        load_words(at_row(payload_columns, from[r], payload_bytes), words[r]);
        if constexpr (WIRE != WIRE_BF16) {
            scale[r] = __ldg(at_row(scale_column, from[r], scale_columns));
        }
    }

    // Largest scale of each strip (from BF16: largest magnitude of each column) over the tile.
    u32 largest[STRIPS] = {};
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
        if constexpr (WIRE == WIRE_BF16) {
#pragma unroll
            for (int i = 0; i < STRIPS; i++)
                largest[i] = max_u16x2(largest[i], words[r][i] & 0x7FFF7FFFu);
        } else {
            largest[0] = max(largest[0], scale_in_group(scale[r]));
        }
    }
    max_of_tile(largest, shared);

    // Convert, turn four rows of four columns at a time, and put them into shared memory.
    u32 codes[ROWS][N / 4];
    convert<WIRE>(words, scale, largest, codes);
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
        if (WIRE == WIRE_BF16 && from[r] < 0) {  // in a NaN column too
#pragma unroll
            for (int i = 0; i < N / 4; i++) codes[r][i] = 0;
        }
    }
    u32* own = turned + lane * N * COLUMN_WORDS + (row_word * (ROWS / 4) ^ lane_key(lane));
#pragma unroll
    for (int i = 0; i < N / 4; i++) {
        u32 part[ROWS / 4][4];
#pragma unroll
        for (int k = 0; k < ROWS / 4; k++) {
#pragma unroll
            for (int j = 0; j < 4; j++) part[k][j] = codes[4 * k + j][i];
            turn(part[k]);
        }
#pragma unroll
        for (int j = 0; j < 4; j++) {
            if constexpr (ROWS == 8) {
                *reinterpret_cast<uint2*>(own + (4 * i + j) * COLUMN_WORDS) =
                    make_uint2(part[0][j], part[1][j]);
            } else {
                own[(4 * i + j) * COLUMN_WORDS] = part[0][j];
            }
        }
    }
    __syncthreads();

    // Zeros reach from the live rows to the next tile; what lies beyond 128 rows has its own loop.
    const i64 num_rows = tile_starts[tile + 1] - start;
    const int num_columns = min(COLUMNS, hidden - first_column);
    u8* first_out = out + first_column * M + start;
    const i64 in_tile = min(num_rows, static_cast<i64>(TILE_ROWS));
    write_columns(turned, first_out, M, static_cast<int>(in_tile), num_columns);
    for (i64 row = TILE_ROWS + threadIdx.x; row < num_rows; row += THREADS) {
        for (int c = 0; c < num_columns; c++) first_out[c * M + row] = 0;
    }
    float* scale_row = out_scales + static_cast<i64>(tile) * hidden + first_column;
    for (int c = threadIdx.x; c < num_columns; c += THREADS) {
        scale_row[c] = column_scale(shared.of_tile[c / N], c % N);
    }
}

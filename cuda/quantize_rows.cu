/*
quantize_rows: rows of floats -> wire rows, each read and quantized once and written to all places.

  x              [num_tokens, hidden]               BF16, float32, or u8 E4M3 codes (-DINPUT)
  x_scales       [num_tokens, ceil(hidden / 128)]   f32, for E4M3 codes
  place_offsets  [num_tokens + 1]                   i32
  places         [num_rows]                         i32, wire rows of token t from place_offsets[t]
                                                    on; both unused, wire row t is token t, without
                                                    -DSCATTER=1
  payload        [num_rows, payload bytes]          u8, written; -DWIRE
  scales         [num_rows, num_blocks]             u8, written; E8M0
  scale_round    addend of the scale rule, formats.py

A block with a NaN or Inf gets scale 0xFF and codes 0.  An E4M3 input is code times scale, rounded
once to float32; a scale that is not positive and finite makes its group NaN.  On the fp8 wire a
group whose scale is a power of two passes unchanged.
Needs hidden % 32 == 0.  Launcher: fp4comm/codec/cuda.py
MXFP4 from BF16 reads 2 and writes 0.53 bytes an element: bound by memory bandwidth.
*/
#include "encode.cuh"
#include "fp8_input.cuh"
#include "rows.cuh"

enum Input { INPUT_BF16, INPUT_F32, INPUT_E4M3 };

constexpr int N = PIECE;  // elements of a row that a thread takes at a time (-D)

CONSTANT int input_bits(int input) {
    return input == INPUT_BF16 ? 16 : input == INPUT_F32 ? 32 : 8;
}
constexpr int INPUT_WORDS = N * input_bits(INPUT) / 32;
constexpr int WORDS = N * element_bits(WIRE) / 32;
constexpr int BLOCK_LANES = block_lanes(WIRE, N);

// Quantize N elements; returns the scale byte of their block.
template <int From, int To>
DEVICE u32 quantize(u32 (&in)[N * input_bits(From) / 32],
                    float x_scale,
                    u32 round,
                    u32 (&words)[N * element_bits(To) / 32]) {
    if constexpr (From == INPUT_BF16 && To == WIRE_BF16) {
#pragma unroll
        for (int i = 0; i < N * element_bits(To) / 32; i++) words[i] = in[i];
        return 0;
    } else if constexpr (From == INPUT_BF16 && To == WIRE_MXFP4) {
        const u32 amax_bits = max_of_lanes(amax_of_bf16<N>(in), BLOCK_LANES);
        const u32 scale = wire_scale<To>(amax_bits, round);
        encode_e2m1_from_bf16<N>(in, amax_bits, scale, words);
        return scale;
    } else if constexpr (From == INPUT_E4M3 && To == WIRE_MXFP4) {
        u32 halves[N / 2];
        e4m3_magnitudes<N>(in, halves);
        const float amax =
            bits_float(max_of_lanes(float_bits(amax_of_halves<N>(halves)), BLOCK_LANES));
        const u32 amax_bits = float_bits(__fmul_rn(amax, fit_scale(x_scale)));
        const u32 scale = wire_scale<To>(amax_bits, round);
        encode_e2m1_from_e4m3<N>(in, halves, amax, x_scale, scale, words);
        return scale;
    } else {
        float values[N];
        if constexpr (From == INPUT_BF16) {
            bf16_to_f32<N>(in, values);
        } else if constexpr (From == INPUT_F32) {
#pragma unroll
            for (int i = 0; i < N; i++) values[i] = bits_float(in[i]);
        } else {
            fp8_to_f32<N>(in, x_scale, values);
        }
        u32 amax_bits = 0, scale = 0;
        if constexpr (To != WIRE_BF16) {
            amax_bits = max_of_lanes(amax_of<To, N>(values), BLOCK_LANES);
            scale = wire_scale<To>(amax_bits, round);
        }
        encode<To, N>(values, amax_bits, scale, words);
        if constexpr (From == INPUT_E4M3 && To == WIRE_FP8) {
            if (is_e8m0(x_scale)) {
                scale = float_bits(x_scale) >> 23;
#pragma unroll
                for (int i = 0; i < N * element_bits(To) / 32; i++) words[i] = in[i];
            }
        }
        return scale;
    }
}

extern "C" __global__ void quantize_rows(const u8* __restrict__ x,
                                         const float* __restrict__ x_scales,
                                         const int* __restrict__ place_offsets,
                                         const int* __restrict__ places,
                                         u8* __restrict__ payload,
                                         u8* __restrict__ scales,
                                         i64 num_tokens,
                                         int hidden,
                                         int chunks,
                                         int scale_round) {
    const Part part = part_of_thread(0, chunks);
    const int piece = part.piece, num_pieces = hidden / N;
    const int groups = (hidden + FP8_BLOCK - 1) / FP8_BLOCK;
    const int x_bytes = row_bytes(hidden, input_bits(INPUT));
    const int payload_bytes = row_bytes(hidden, element_bits(WIRE));
    const int scale_columns = num_blocks(WIRE, hidden);

    if (INPUT == INPUT_E4M3 && WIRE == WIRE_MXFP4 && threadIdx.x < 32) fetch_ratios();
    const u8* x_piece = settled(x + static_cast<u32>(piece) * (4 * INPUT_WORDS));
    const float* scale_piece = settled(x_scales + static_cast<u32>(piece) / (FP8_BLOCK / N));
    // Have the loads of all rows in flight before the first is used.
    u32 in[UNROLL][INPUT_WORDS] = {};  // lanes behind the row hold zeros for the shuffles
    float x_scale[UNROLL];
    int first[UNROLL] = {}, last[UNROLL] = {};
#pragma unroll
    for (int u = 0; u < UNROLL; u++) {
        const int token = part.row + u * blockDim.y;
        x_scale[u] = 1.0f;
        if (token >= num_tokens || piece >= num_pieces) continue;
        load_words(at_row(x_piece, token, x_bytes), in[u]);
        if (SCATTER) {
            first[u] = __ldg(place_offsets + token);
            last[u] = __ldg(place_offsets + token + 1);
        }
    }
    if constexpr (INPUT == INPUT_E4M3) {
#pragma unroll
        for (int u = 0; u < UNROLL; u++) {
            const int token = part.row + u * blockDim.y;
            if (token >= num_tokens || piece >= num_pieces) continue;
            x_scale[u] = load_float(at_row(scale_piece, token, groups));
        }
    }
#pragma unroll
    for (int u = 0; u < UNROLL; u++) {
        const int token = part.row + u * blockDim.y;
        u32 words[WORDS];
        const u32 scale = quantize<INPUT, WIRE>(in[u], x_scale[u], scale_round, words);
        const bool paired = is_paired<WORDS>(piece, num_pieces);
        exchange(words, piece, paired);
        if (token >= num_tokens || piece >= num_pieces) continue;
        for (int p = first[u]; SCATTER ? p < last[u] : p == 0; p++) {
            const int row = SCATTER ? __ldg(places + p) : token;
            store_piece(at_row(payload, row, payload_bytes), piece, paired, words);
            if (WIRE != WIRE_BF16 && piece % BLOCK_LANES == 0) {
                at_row(scales, row, scale_columns)[piece / BLOCK_LANES] = static_cast<u8>(scale);
            }
        }
    }
}

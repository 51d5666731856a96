// GEMM with a packed weight matrix: y = x W^T + b, in float32 or int8.
//
// The matrix is packed in panels of two vectors, so that one pass over a panel serves many rows. The
// sums of a row are in the order of its inputs whatever the batch: results are bit-identical in every batch.
#pragma once

#include "simd.h"

constexpr int64_t PANEL = 2 * LANES;
#if defined(__AVX512F__) || defined(__aarch64__)
// Rows of 4,096 bytes that one set of the L1 cache holds; enough independent sums to hide latency.
constexpr int MAX_TILE_ROWS = 8;
#else
constexpr int MAX_TILE_ROWS = 6;  // sums fit into 16 registers
#endif

struct Linear {
    const void* weight;  // panels: (E / P, D, P) in float32, (E / P, D / 4, P, 4) in int8; P is PANEL
    const float* scale;  // (E,) scale of the integer sums; null in float32
    const float* bias;   // (E,)
    int64_t in_features, out_features;  // D, a multiple of 16, and E
    float inv_scale, zero_point;        // quantization of the inputs: round(x * inv_scale + zero_point)
};

#if defined(__AVX512VNNI__)
static const bool HAS_INT8 = true;
static inline IntVec dot(IntVec sum, const uint8_t* four, IntVec weight) {
    int32_t bits;
    std::memcpy(&bits, four, 4);
    return (IntVec)_mm512_dpbusd_epi32((__m512i)sum, _mm512_set1_epi32(bits), (__m512i)weight);
}
#else
static const bool HAS_INT8 = false;
static inline IntVec dot(IntVec sum, const uint8_t* four, IntVec weight) {
    for (int i = 0; i < LANES; ++i)
        for (int j = 0; j < 4; ++j) sum[i] += (int32_t)four[j] * (int8_t)(weight[i] >> 8 * j);
    return sum;
}
#endif

// Multiply ROWS rows by PANELS panels in float32, into (PANELS, ROWS, PANEL). `prefetch_from` is
// prefetched meanwhile, one vector for each input of a row.
template <int ROWS, int PANELS, bool PREFETCH = false>
static void tile(const Linear& p, const float* x, int64_t panel, float* tile_out, const float* prefetch_from = nullptr) {
    FloatVec sums[PANELS][ROWS][2] = {};
    const float* weight = (const float*)p.weight + panel * p.in_features * PANEL;
    for (int64_t k = 0; k < p.in_features; ++k) {
        if (PREFETCH) __builtin_prefetch(prefetch_from + k * LANES, 0, 2);
        for (int j = 0; j < PANELS; ++j) {
            const float* here = weight + (j * p.in_features + k) * PANEL;
            FloatVec left = load(here), right = load(here + LANES);
            keep_in_register(left), keep_in_register(right);
            for (int i = 0; i < ROWS; ++i) {
                sums[j][i][0] += left * x[i * p.in_features + k];
                sums[j][i][1] += right * x[i * p.in_features + k];
            }
        }
    }
    for (int j = 0; j < PANELS; ++j) {
        for (int half = 0; half < 2; ++half) {
            const FloatVec bias = load(p.bias + (panel + j) * PANEL + half * LANES);
            for (int i = 0; i < ROWS; ++i) store(tile_out + (j * ROWS + i) * PANEL + half * LANES, sums[j][i][half] + bias);
        }
    }
}

// The same in int8: the sums are integers.
template <int ROWS, int PANELS, bool PREFETCH = false>
static void tile(const Linear& p, const uint8_t* x, int64_t panel, float* tile_out, const float* = nullptr) {
    IntVec sums[PANELS][ROWS][2] = {};
    const int8_t* weight = (const int8_t*)p.weight + panel * p.in_features * PANEL;
    for (int64_t k = 0; k < p.in_features; k += 4) {
        for (int j = 0; j < PANELS; ++j) {
            const int8_t* here = weight + (j * p.in_features + k) * PANEL;
            // The next panel: these few rows are done before it would arrive.
            __builtin_prefetch(here + PANELS * p.in_features * PANEL, 0, 2);
            __builtin_prefetch(here + PANELS * p.in_features * PANEL + 4 * LANES, 0, 2);
            IntVec left = load_int(here), right = load_int(here + 4 * LANES);
            keep_in_register(left), keep_in_register(right);
            for (int i = 0; i < ROWS; ++i) {
                sums[j][i][0] = dot(sums[j][i][0], x + i * p.in_features + k, left);
                sums[j][i][1] = dot(sums[j][i][1], x + i * p.in_features + k, right);
            }
        }
    }
    for (int j = 0; j < PANELS; ++j) {
        for (int half = 0; half < 2; ++half) {
            const int64_t column = (panel + j) * PANEL + half * LANES;
            const FloatVec scale = load(p.scale + column), bias = load(p.bias + column);
            for (int i = 0; i < ROWS; ++i)
                store(tile_out + (j * ROWS + i) * PANEL + half * LANES, __builtin_convertvector(sums[j][i][half], FloatVec) * scale + bias);
        }
    }
}

// Multiply at most ROWS rows by one panel.
template <int ROWS, class Number>
static void tile_rows(const Linear& p, const Number* x, int64_t rows, int64_t panel, float* tile_out, const float* prefetch_from) {
    if constexpr (ROWS > 0) {
        if (rows == ROWS) return prefetch_from ? tile<ROWS, 1, true>(p, x, panel, tile_out, prefetch_from) : tile<ROWS, 1>(p, x, panel, tile_out);
        tile_rows<ROWS - 1>(p, x, rows, panel, tile_out, prefetch_from);
    }
}

// The start of a half of the next panel: two passes over a panel prefetch the next one. In int8 every
// pass prefetches by itself.
static inline const float* next_half_panel(const Linear& p, const float*, int64_t panel, int64_t half) {
    return (const float*)p.weight + (panel + 1) * p.in_features * PANEL + half * p.in_features * LANES;
}

static inline const float* next_half_panel(const Linear&, const uint8_t*, int64_t, int64_t) { return nullptr; }

// Multiply (rows, D) in float32 or uint8 by the packed matrix; `end(row, column, vector)` receives the
// results.
template <class Number, class End>
static void matmul(const Linear& p, const Number* x, int64_t rows, End end) {
    const int64_t panels = (p.out_features + PANEL - 1) / PANEL;
    alignas(64) float tile_out[MAX_TILE_ROWS * PANEL];
    int64_t panel = 0;
    if (rows == 1) {  // four panels at a time: the sums of one row and panel would wait for one another
        for (; panel + 4 <= panels; panel += 4) {
            tile<1, 4>(p, x, panel, tile_out);
            for (int64_t at = 0; at < 4 * PANEL && panel * PANEL + at < p.out_features; at += LANES) end(0, panel * PANEL + at, load(tile_out + at));
        }
    }
    const int64_t blocks = (rows + MAX_TILE_ROWS - 1) / MAX_TILE_ROWS, rows_per_tile = (rows + blocks - 1) / blocks;  // tiles of equal height
    for (; panel < panels; ++panel) {
        for (int64_t row = 0; row < rows; row += rows_per_tile) {
            const int64_t many = rows - row < rows_per_tile ? rows - row : rows_per_tile;
            tile_rows<MAX_TILE_ROWS>(p, x + row * p.in_features, many, panel, tile_out, row < 2 * rows_per_tile ? next_half_panel(p, x, panel, row > 0) : nullptr);
            for (int64_t column = panel * PANEL, half = 0; half < 2 && column < p.out_features; ++half, column += LANES)
                for (int64_t i = 0; i < many; ++i) end(row + i, column, load(tile_out + i * PANEL + half * LANES));
        }
    }
}

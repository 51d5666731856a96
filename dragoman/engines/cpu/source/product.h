// Products with a fixed matrix: y = x W^T + b, rows of x one after the other.
//
// The matrix lies in panels of two vectors, so that one pass over a panel serves many rows. A row's sums go through its numbers in order,
// whatever stands beside it: its result is the same to the last bit in every batch.
#pragma once

#include "lanes.h"

constexpr int64_t PANEL = 2 * LANES;
#if defined(__AVX512F__) || defined(__aarch64__)
constexpr int TALLEST = 8;  // rows at a time: as many of 4,096 bytes as one set of the nearest cache holds lines, and sums enough not to wait
#else
constexpr int TALLEST = 6;  // of 16 registers
#endif

struct Product {
    const void* weight;  // panels: (E / P, D, P) in float32, (E / P, D / 4, P, 4) in int8; P is PANEL
    const float* scale;  // (E,) what a whole number of the sums is worth; none in float32
    const float* bias;   // (E,)
    int64_t in, out;     // D, a multiple of 16, and E
    float inverse, zero;  // what makes whole numbers of the inputs: x * inverse + zero
};

#if defined(__AVX512VNNI__)
static const bool HAS_INT8 = true;
static inline Whole dot(Whole sum, const uint8_t* four, Whole weight) {
    int32_t bits;
    std::memcpy(&bits, four, 4);
    return (Whole)_mm512_dpbusd_epi32((__m512i)sum, _mm512_set1_epi32(bits), (__m512i)weight);
}
#else
static const bool HAS_INT8 = false;
static inline Whole dot(Whole sum, const uint8_t* four, Whole weight) {
    for (int i = 0; i < LANES; ++i)
        for (int j = 0; j < 4; ++j) sum[i] += (int32_t)four[j] * (int8_t)(weight[i] >> 8 * j);
    return sum;
}
#endif

// Some rows times some panels, in float32, into (PANELS, ROWS, PANEL). `ahead` is fetched meanwhile, a vector for each number of a row.
template <int ROWS, int PANELS, bool FETCHES = false>
static void tile(const Product& p, const float* x, int64_t panel, float* made, const float* ahead = nullptr) {
    Lanes sums[PANELS][ROWS][2] = {};
    const float* weight = (const float*)p.weight + panel * p.in * PANEL;
    for (int64_t k = 0; k < p.in; ++k) {
        if (FETCHES) __builtin_prefetch(ahead + k * LANES, 0, 2);
        for (int j = 0; j < PANELS; ++j) {
            const float* here = weight + (j * p.in + k) * PANEL;
            Lanes left = load(here), right = load(here + LANES);
            hold(left), hold(right);
            for (int i = 0; i < ROWS; ++i) {
                sums[j][i][0] += left * x[i * p.in + k];
                sums[j][i][1] += right * x[i * p.in + k];
            }
        }
    }
    for (int j = 0; j < PANELS; ++j) {
        for (int half = 0; half < 2; ++half) {
            const Lanes bias = load(p.bias + (panel + j) * PANEL + half * LANES);
            for (int i = 0; i < ROWS; ++i) store(made + (j * ROWS + i) * PANEL + half * LANES, sums[j][i][half] + bias);
        }
    }
}

// The same from eight bits: the sums are whole numbers.
template <int ROWS, int PANELS, bool FETCHES = false>
static void tile(const Product& p, const uint8_t* x, int64_t panel, float* made, const float* = nullptr) {
    Whole sums[PANELS][ROWS][2] = {};
    const int8_t* weight = (const int8_t*)p.weight + panel * p.in * PANEL;
    for (int64_t k = 0; k < p.in; k += 4) {
        for (int j = 0; j < PANELS; ++j) {
            const int8_t* here = weight + (j * p.in + k) * PANEL;
            __builtin_prefetch(here + PANELS * p.in * PANEL, 0, 2);  // the next panel, which these rows reach too late to wait for it
            __builtin_prefetch(here + PANELS * p.in * PANEL + 4 * LANES, 0, 2);
            Whole left = load_whole(here), right = load_whole(here + 4 * LANES);
            hold(left), hold(right);
            for (int i = 0; i < ROWS; ++i) {
                sums[j][i][0] = dot(sums[j][i][0], x + i * p.in + k, left);
                sums[j][i][1] = dot(sums[j][i][1], x + i * p.in + k, right);
            }
        }
    }
    for (int j = 0; j < PANELS; ++j) {
        for (int half = 0; half < 2; ++half) {
            const int64_t column = (panel + j) * PANEL + half * LANES;
            const Lanes scale = load(p.scale + column), bias = load(p.bias + column);
            for (int i = 0; i < ROWS; ++i)
                store(made + (j * ROWS + i) * PANEL + half * LANES, __builtin_convertvector(sums[j][i][half], Lanes) * scale + bias);
        }
    }
}

// At most ROWS rows times a panel.
template <int ROWS, class Number>
static void few(const Product& p, const Number* x, int64_t rows, int64_t panel, float* made, const float* ahead) {
    if constexpr (ROWS > 0) {
        if (rows == ROWS) return ahead ? tile<ROWS, 1, true>(p, x, panel, made, ahead) : tile<ROWS, 1>(p, x, panel, made);
        few<ROWS - 1>(p, x, rows, panel, made, ahead);
    }
}

// Where half of the next panel begins: two runs over a panel fetch the next one. In eight bits every run does so by itself.
static inline const float* half_of_next(const Product& p, const float*, int64_t panel, int64_t half) {
    return (const float*)p.weight + (panel + 1) * p.in * PANEL + half * p.in * LANES;
}

static inline const float* half_of_next(const Product&, const uint8_t*, int64_t, int64_t) { return nullptr; }

// Multiply (rows, D), as float32 or as whole numbers of eight bits; `end(row, column, lanes)` gets what comes of it.
template <class Number, class End>
static void multiply(const Product& p, const Number* x, int64_t rows, End end) {
    const int64_t panels = (p.out + PANEL - 1) / PANEL;
    alignas(64) float made[TALLEST * PANEL];
    int64_t panel = 0;
    if (rows == 1) {  // a single row's sums would wait for each other: four panels at once
        for (; panel + 4 <= panels; panel += 4) {
            tile<1, 4>(p, x, panel, made);
            for (int64_t at = 0; at < 4 * PANEL && panel * PANEL + at < p.out; at += LANES) end(0, panel * PANEL + at, load(made + at));
        }
    }
    const int64_t blocks = (rows + TALLEST - 1) / TALLEST, tall = (rows + blocks - 1) / blocks;  // of like heights
    for (; panel < panels; ++panel) {
        for (int64_t row = 0; row < rows; row += tall) {
            const int64_t many = rows - row < tall ? rows - row : tall;
            few<TALLEST>(p, x + row * p.in, many, panel, made, row < 2 * tall ? half_of_next(p, x, panel, row > 0) : nullptr);
            for (int64_t column = panel * PANEL, half = 0; half < 2 && column < p.out; ++half, column += LANES)
                for (int64_t i = 0; i < many; ++i) end(row + i, column, load(made + i * PANEL + half * LANES));
        }
    }
}

// The largest of each row's products, exactly, without multiplying by the whole matrix in float32. Included once, by transformer.cpp.
//
// A matrix and its inputs in eight bits give every product w.x roughly. With w = w' + e and x = x' + d, the primes what rounding kept,
//
//     |w.x - w'.x'|  =  |e.x + w'.d|  <=  |e| |x| + |w'| |d|
//
// by Cauchy and Schwarz, so that a product whose rough value is below the largest by more than both bounds cannot be the largest. Few are
// left, and those are multiplied in float32, in the order of `product.h`: to the last bit what it gives.
#pragma once

#include <vector>

#include "gemm.h"
#include "topk.h"

struct Int8Filter {
    Linear quantized_linear;       // whole numbers of eight bits; its scale is a row's own, its bias takes away what inputs above nought add
    const float* bias;   // (E,), and noughts on to a whole panel
    const float *error_norms, *weight_norms;  // (E,) the same; the lengths |e| and |w'|, and in `lost` what float32 itself may round away
    const float* float_weight;  // (E, D) the matrix, a row after the other
    float bias_slack;         // what adding the bias may round away
};

struct QuantizedRow {
    float scale, length, error_norms;  // what a whole number is worth, |x| and |d|, both a little enlarged
    FloatVec least;                // in each lane the largest of what products are at least
};

constexpr float ZERO_POINT = 128.0f;  // stands for nought
constexpr int RESCORE_BATCH = 8;          // sums that go through their numbers side by side: each waits for itself

static inline FloatVec load_bytes(const uint8_t* from) {
    typedef uint8_t Bytes __attribute__((vector_size(LANES)));
    Bytes x;
    std::memcpy(&x, from, sizeof x);
    return __builtin_convertvector(x, FloatVec);
}

static QuantizedRow quantize_row(const float* x, int64_t width, uint8_t* int_values) {
    FloatVec most = {}, squares = {}, error_norms = {};
    for (int64_t i = 0; i < width; i += LANES) {
        const FloatVec v = load(x + i);
        most = vec_max(vec_max(v, -v), most);
        squares += v * v;
    }
    const float scale = reduce_max(most) > 0.0f ? reduce_max(most) / 127.0f : 1.0f, inv_scale = 1.0f / scale;
    for (int64_t i = 0; i < width; i += LANES) {
        const FloatVec v = load(x + i);
        store_uint8(int_values + i, v * inv_scale + ZERO_POINT);
        const FloatVec apart = v - (load_bytes(int_values + i) - ZERO_POINT) * scale;
        error_norms += apart * apart;
    }
    const float enlarged = 1.0001f;  // float32 sums of squares are exact to less than that
    return {scale, std::sqrt(reduce_add(squares)) * enlarged, std::sqrt(reduce_add(error_norms)) * enlarged, broadcast(-std::numeric_limits<float>::infinity())};
}

// Multiply a row by some rows of the matrix in float32, and offer what comes of it.
static void rescore(const Int8Filter& s, const float* x, const int64_t* columns, int64_t count, Argmax& first) {
    float sums[RESCORE_BATCH] = {};
    const float* weights[RESCORE_BATCH];
    for (int j = 0; j < RESCORE_BATCH; ++j) weights[j] = s.float_weight + columns[j < count ? j : 0] * s.quantized_linear.in_features;
    for (int64_t k = 0; k < s.quantized_linear.in_features; ++k)
        for (int j = 0; j < RESCORE_BATCH; ++j) sums[j] = std::fma(weights[j][k], x[k], sums[j]);  // as the vectors of `tile` are fused
    for (int64_t j = 0; j < count; ++j) first.update(sums[j] + s.bias[columns[j]], columns[j]);
}

// Find the largest of each row's products among those that may be taken. What cannot be bounded, NaN say, is multiplied in float32 as well.
// Gives how many were. There is room for (rows, D) in `whole` and for (rows, E), up to whole panels, in `values`.
static int64_t filtered_argmax(const Int8Filter& s, const float* x, int64_t rows, const ArgmaxOutput& argmax, uint8_t* int_values, float* values) {
    const Linear& p = s.quantized_linear;
    const int64_t wide = (p.out_features + PANEL - 1) / PANEL * PANEL;
    thread_local std::vector<QuantizedRow> rounded;
    rounded.clear();
    for (int64_t row = 0; row < rows; ++row) rounded.push_back(quantize_row(x + row * p.in_features, p.in_features, int_values + row * p.in_features));
    auto apart = [&](const QuantizedRow& r, int64_t column) { return load(s.error_norms + column) * r.length + load(s.weight_norms + column) * r.error_norms + s.bias_slack; };

    matmul(p, (const uint8_t*)int_values, rows, [&](int64_t row, int64_t column, FloatVec v) {
        QuantizedRow& r = rounded[row];
        const FloatVec rough_scores = argmax.mask(v * r.scale + load(s.bias + column), column), least = rough_scores - apart(r, column);
        store(values + row * wide + column, rough_scores);
        r.least = least > r.least ? least : r.least;  // a NaN is not larger
    });

    int64_t rescored = 0;
    for (int64_t row = 0; row < rows; ++row) {
        const QuantizedRow& r = rounded[row];
        const float* rough_scores = values + row * wide;
        const FloatVec lower_bound = broadcast(reduce_max(r.least));
        int64_t columns[RESCORE_BATCH + LANES], held = 0;
        Argmax first;
        for (int64_t at = 0; at < p.out_features; at += LANES) {
            const IntVec below = load(rough_scores + at) + apart(r, at) < lower_bound;
            if (all_true(below)) continue;
            for (int64_t i = 0; i < LANES; ++i)
                if (!below[i] && argmax.is_allowed(at + i)) columns[held++] = at + i;
            int64_t done = 0;
            for (; held - done >= RESCORE_BATCH; done += RESCORE_BATCH) rescore(s, x + row * p.in_features, columns + done, RESCORE_BATCH, first);
            std::copy(columns + done, columns + held, columns);
            held -= done, rescored += done;
        }
        if (held) rescore(s, x + row * p.in_features, columns, held, first);
        rescored += held;
        argmax.write(row, first);
    }
    return rescored;
}

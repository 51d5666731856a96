// Exact argmax of the output projection by an int8 filter: few logits are computed in float32.
// Included once, by transformer.cpp.
//
// Quantized weights and inputs approximate every logit w.x. With w = w' + e and x = x' + d, where primes
// are the quantized values,
//
//     |w.x - w'.x'|  =  |e.x + w'.d|  <=  |e| |x| + |w'| |d|
//
// by Cauchy-Schwarz. A logit whose upper bound is below the largest lower bound cannot be the maximum. The
// others are computed in float32 in the order of gemm.h: bit-identical to its result.
#pragma once

#include <vector>

#include "gemm.h"
#include "topk.h"

struct Int8Filter {
    Linear quantized_linear;  // int8 weights with a scale for each row; its bias corrects the zero point
    const float* bias;        // (E,), padded with zeros to a whole panel
    // (E,), padded alike: |e| with the rounding error of float32 sums, and |w'|.
    const float *error_norms, *weight_norms;
    const float* float_weight;  // (E, D) row-major
    float bias_slack;           // rounding error of adding the bias
};

struct QuantizedRow {
    float scale, length, error_norms;  // of the quantization; |x| and |d|, both slightly enlarged
    FloatVec least;                    // per lane, the largest lower bound of a logit
};

constexpr float ZERO_POINT = 128.0f;  // the uint8 value of zero
constexpr int RESCORE_BATCH = 8;      // logits computed together: independent sums hide latency

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
    const float enlarged = 1.0001f;  // more than the rounding error of float32 sums of squares
    return {scale, std::sqrt(reduce_add(squares)) * enlarged, std::sqrt(reduce_add(error_norms)) * enlarged, broadcast(-std::numeric_limits<float>::infinity())};
}

// Compute some logits of a row in float32, and update the argmax with them.
static void rescore(const Int8Filter& s, const float* x, const int64_t* columns, int64_t count, Argmax& first) {
    float sums[RESCORE_BATCH] = {};
    const float* weights[RESCORE_BATCH];
    for (int j = 0; j < RESCORE_BATCH; ++j) weights[j] = s.float_weight + columns[j < count ? j : 0] * s.quantized_linear.in_features;
    for (int64_t k = 0; k < s.quantized_linear.in_features; ++k)
        for (int j = 0; j < RESCORE_BATCH; ++j) sums[j] = std::fma(weights[j][k], x[k], sums[j]);  // fused multiply-add, as in `tile`
    for (int64_t j = 0; j < count; ++j) first.update(sums[j] + s.bias[columns[j]], columns[j]);
}

// Write the argmax of each row over the allowed tokens. Logits without a bound, such as NaN, are computed
// in float32 as well. Return how many were. `int_values` is scratch for (rows, D), `values` for (rows, E)
// padded to whole panels.
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
        r.least = least > r.least ? least : r.least;  // false for NaN
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

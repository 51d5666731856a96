// Argmax, top-k and log-sum-exp of rows of logits. Included once, by transformer.cpp.
#pragma once

#include <limits>

#include "simd.h"

constexpr int64_t TOPK_BLOCK = 4 * LANES;  // skipped unless its maximum is among the largest so far

// The maximum of the values so far, the first of equal ones; NaN after a NaN.
struct Argmax {
    float value = -std::numeric_limits<float>::infinity();
    int64_t id = 0;

    void update(float x, int64_t at) {
        if (x > value || x != x) value = x, id = at;  // nothing compares larger than NaN
    }
};

// The same for vectors of a row, in any order.
struct VecArgmax {
    FloatVec values = broadcast(-std::numeric_limits<float>::infinity());
    IntVec ids = {}, has_nan = {};

    void update(FloatVec x, int64_t column) {
        const IntVec more = x > values;
        values = more ? x : values;
        ids = more ? IntVec{} + (int32_t)column : ids;
        has_nan |= x != x;
    }

    Argmax reduce() const {
        Argmax first;
        for (int64_t lane = 0; lane < LANES; ++lane) {
            const int64_t id = ids[lane] + lane;
            if (values[lane] > first.value || (values[lane] == first.value && id < first.id)) first.value = values[lane], first.id = id;
            if (has_nan[lane]) first.update(std::numeric_limits<float>::quiet_NaN(), id);
        }
        return first;
    }
};

// Where greedy decoding writes the argmax of each row, over all tokens but the special ones, and EOS if
// it is allowed.
struct ArgmaxOutput {
    float* values;  // (rows,)
    int64_t* ids;   // (rows,)
    int64_t num_special, eos, vocab_size;  // eos -1: not allowed

    void write(int64_t row, Argmax first) const { values[row] = first.value, ids[row] = first.id; }

    bool is_allowed(int64_t id) const { return (id >= num_special || id == eos) && id < vocab_size; }

    // Set the logits of tokens that are not allowed to -inf.
    FloatVec mask(FloatVec x, int64_t column) const {
        if (column >= num_special && column + LANES <= vocab_size) return x;
        for (int64_t i = 0; i < LANES; ++i)
            if (!is_allowed(column + i)) x[i] = -std::numeric_limits<float>::infinity();
        return x;
    }
};

extern "C" {

// Find the `count` largest of each row of (rows, width), in descending order, of equal ones the first. If
// a row holds NaN, its first value is NaN.
void dragoman_topk(const float* x, int64_t rows, int64_t width, int64_t count, float* values, int64_t* ids) {
    for (int64_t row = 0; row < rows; ++row, x += width, values += count, ids += count) {
        std::fill(values, values + count, -std::numeric_limits<float>::infinity());
        std::fill(ids, ids + count, 0);
        int64_t held = 0;
        bool no_nan = true;
        auto update = [&](int64_t first, int64_t last) {
            for (int64_t at = first; at < last; ++at) {
                no_nan &= x[at] == x[at];
                if (held == count && !(x[at] > values[count - 1])) continue;
                held += held < count;
                int64_t place = held - 1;
                for (; place > 0 && x[at] > values[place - 1]; --place) values[place] = values[place - 1], ids[place] = ids[place - 1];
                values[place] = x[at], ids[place] = at;
            }
        };
        int64_t at = 0;
        for (; at + TOPK_BLOCK <= width; at += TOPK_BLOCK) {
            FloatVec most = load(x + at), sums = most;
            for (int64_t i = LANES; i < TOPK_BLOCK; i += LANES) {
                const FloatVec next = load(x + at + i);
                most = vec_max(most, next);
                sums += next;
            }
            // The sum is NaN if a term is, or for infinities of both signs: then every value is tested.
            const float all_of_them = reduce_add(sums);
            if (held < count || reduce_max(most) > values[count - 1] || all_of_them != all_of_them) update(at, at + TOPK_BLOCK);
        }
        update(at, width);
        if (!no_nan) values[0] = std::numeric_limits<float>::quiet_NaN();
    }
}

// Write the log-sum-exp of each row: (rows,).
void dragoman_log_sum_exp(const float* x, int64_t rows, int64_t width, float* out) {
    for (int64_t row = 0; row < rows; ++row, x += width) {
        float top = x[0];
        int64_t at = 0;
        if (width >= LANES) {
            FloatVec most = load(x);
            for (; at + LANES <= width; at += LANES) most = vec_max(most, load(x + at));
            top = reduce_max(most);
        }
        for (; at < width; ++at) top = x[at] > top ? x[at] : top;
        FloatVec total = {};
        for (at = 0; at + LANES <= width; at += LANES) total += vec_exp(load(x + at) - top);
        float last[LANES];
        std::fill(last, last + LANES, top - 100.0f);
        std::copy(x + at, x + width, last);
        if (at < width) total += vec_exp(load(last) - top);
        out[row] = top + std::log(reduce_add(total));
    }
}
}

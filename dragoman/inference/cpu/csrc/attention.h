// Attention of one query position over keys and values at arbitrary addresses.
#pragma once

#include <limits>

#include "simd.h"

constexpr int64_t VALUE_VECTORS = 8;  // vectors of the context accumulated in registers

// Prefetch `count` numbers: keys and values of many sentences exceed the L1 and L2 caches.
template <class Cell>
static inline void prefetch(const Cell* from, int64_t count) {
    for (int64_t at = 0; at < count; at += 64 / (int64_t)sizeof(Cell)) __builtin_prefetch(from + at, 0, 2);
}

// Attend from a query (H, Dh) to `length` positions; Dh is a multiple of 16. `key(t)` and `value(t)`
// return pointers to (H, Dh), `prefetch_next(t)` may prefetch for the next call. `weights` is scratch for
// H times the length, rounded up to a multiple of 16.
template <class Key, class Value, class Ahead>
static inline void attend(const float* query, float* context, int64_t heads, int64_t head_width, int64_t length, float* weights, Key key,
                          Value value, Ahead prefetch_next) {
    const int64_t padded_length = (length + LANES - 1) / LANES * LANES;
    const float root = std::sqrt((float)head_width);
    for (int64_t t = 0; t < length; ++t) {
        const auto* row_pointer = key(t);
        prefetch_next(t);
        for (int64_t head = 0; head < heads; ++head) {
            FloatVec products = {};
            for (int64_t at = head * head_width; at < (head + 1) * head_width; at += LANES) products += load(query + at) * load(row_pointer + at);
            weights[head * padded_length + t] = reduce_add(products);
        }
    }
    for (int64_t head = 0; head < heads; ++head) {
        float* row = weights + head * padded_length;
        for (int64_t t = length; t < padded_length; ++t) row[t] = -std::numeric_limits<float>::infinity();
        FloatVec most = load(row);
        for (int64_t t = LANES; t < padded_length; t += LANES) most = vec_max(most, load(row + t));
        const FloatVec top = broadcast(reduce_max(most));
        FloatVec total = {};
        for (int64_t t = 0; t < padded_length; t += LANES) {
            const FloatVec exp_scores = vec_exp(load(row + t) - top);
            store(row + t, exp_scores);
            total += exp_scores;
        }
        // Queries include 1 / sqrt(Dh), in torch the scores are divided and overflow sooner: the same NaN.
        const float unscaled_max = reduce_max(most) * root;
        const float inv_sum = 1.0f / reduce_add(total) + (unscaled_max - unscaled_max);
        for (int64_t t = 0; t < padded_length; t += LANES) store(row + t, load(row + t) * inv_sum);
    }
    const int64_t vectors = heads * head_width / LANES, vectors_per_head = head_width / LANES;
    for (int64_t first = 0; first < vectors; first += VALUE_VECTORS) {
        const int64_t count = vectors - first < VALUE_VECTORS ? vectors - first : VALUE_VECTORS;
        const float* rows[VALUE_VECTORS];
        for (int64_t j = 0; j < count; ++j) rows[j] = weights + (first + j) / vectors_per_head * padded_length;
        FloatVec sums[VALUE_VECTORS] = {};
        if (count == VALUE_VECTORS) {
            for (int64_t t = 0; t < length; ++t) {
                const auto* row_pointer = value(t) + first * LANES;
                for (int64_t j = 0; j < VALUE_VECTORS; ++j) sums[j] += load(row_pointer + j * LANES) * rows[j][t];
            }
        } else {
            for (int64_t t = 0; t < length; ++t) {
                const auto* row_pointer = value(t) + first * LANES;
                for (int64_t j = 0; j < count; ++j) sums[j] += load(row_pointer + j * LANES) * rows[j][t];
            }
        }
        for (int64_t j = 0; j < count; ++j) store(context + (first + j) * LANES, sums[j]);
    }
}

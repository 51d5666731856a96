// Attention from single positions to keys and values that lie wherever they were written.
#pragma once

#include <limits>

#include "lanes.h"

constexpr int64_t TOGETHER = 8;  // vectors of values whose sums are kept in registers

// Ask for `count` numbers before they are needed: keys and values of many sentences are more than the nearest caches hold.
template <class Cell>
static inline void fetch(const Cell* from, int64_t count) {
    for (int64_t at = 0; at < count; at += 64 / (int64_t)sizeof(Cell)) __builtin_prefetch(from + at, 0, 2);
}

// Attend from (H, Dh) to `length` places, a head's width a multiple of 16. `key(t)` and `value(t)` point to (H, Dh), `ahead(t)` may fetch
// what the next call will read. `weights` has room for H times the length, rounded up to 16.
template <class Key, class Value, class Ahead>
static inline void attend(const float* query, float* context, int64_t heads, int64_t head_width, int64_t length, float* weights, Key key,
                          Value value, Ahead ahead) {
    const int64_t room = (length + LANES - 1) / LANES * LANES;
    const float root = std::sqrt((float)head_width);
    for (int64_t t = 0; t < length; ++t) {
        const auto* here = key(t);
        ahead(t);
        for (int64_t head = 0; head < heads; ++head) {
            Lanes products = {};
            for (int64_t at = head * head_width; at < (head + 1) * head_width; at += LANES) products += load(query + at) * load(here + at);
            weights[head * room + t] = sum(products);
        }
    }
    for (int64_t head = 0; head < heads; ++head) {
        float* row = weights + head * room;
        for (int64_t t = length; t < room; ++t) row[t] = -std::numeric_limits<float>::infinity();
        Lanes most = load(row);
        for (int64_t t = LANES; t < room; t += LANES) most = larger(most, load(row + t));
        const Lanes top = all(largest(most));
        Lanes total = {};
        for (int64_t t = 0; t < room; t += LANES) {
            const Lanes raised = exponential(load(row + t) - top);
            store(row + t, raised);
            total += raised;
        }
        // Queries are divided by the root of a head's width before they meet the keys, in torch scores are: those overflow sooner.
        const float undivided = largest(most) * root;
        const float share = 1.0f / sum(total) + (undivided - undivided);
        for (int64_t t = 0; t < room; t += LANES) store(row + t, load(row + t) * share);
    }
    const int64_t vectors = heads * head_width / LANES, each = head_width / LANES;
    for (int64_t first = 0; first < vectors; first += TOGETHER) {
        const int64_t many = vectors - first < TOGETHER ? vectors - first : TOGETHER;
        const float* rows[TOGETHER];
        for (int64_t j = 0; j < many; ++j) rows[j] = weights + (first + j) / each * room;
        Lanes sums[TOGETHER] = {};
        if (many == TOGETHER) {
            for (int64_t t = 0; t < length; ++t) {
                const auto* here = value(t) + first * LANES;
                for (int64_t j = 0; j < TOGETHER; ++j) sums[j] += load(here + j * LANES) * rows[j][t];
            }
        } else {
            for (int64_t t = 0; t < length; ++t) {
                const auto* here = value(t) + first * LANES;
                for (int64_t j = 0; j < many; ++j) sums[j] += load(here + j * LANES) * rows[j][t];
            }
        }
        for (int64_t j = 0; j < many; ++j) store(context + (first + j) * LANES, sums[j]);
    }
}

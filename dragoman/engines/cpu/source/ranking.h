// The largest numbers of each row, and what makes log-probabilities of logits. Included once, by transformer.cpp.
#pragma once

#include <limits>

#include "lanes.h"

constexpr int64_t BLOCK = 4 * LANES;  // numbers that are looked at one by one only where one of them is large enough

extern "C" {

// Find the `count` largest of each row of (rows, width), in falling order and of equal ones the first; where a row holds NaN, that.
void dragoman_largest(const float* x, int64_t rows, int64_t width, int64_t count, float* values, int64_t* ids) {
    for (int64_t row = 0; row < rows; ++row, x += width, values += count, ids += count) {
        std::fill(values, values + count, -std::numeric_limits<float>::infinity());
        std::fill(ids, ids + count, 0);
        int64_t held = 0;
        bool whole = true;
        auto offer = [&](int64_t first, int64_t last) {
            for (int64_t at = first; at < last; ++at) {
                whole &= x[at] == x[at];
                if (held == count && !(x[at] > values[count - 1])) continue;
                held += held < count;
                int64_t place = held - 1;
                for (; place > 0 && x[at] > values[place - 1]; --place) values[place] = values[place - 1], ids[place] = ids[place - 1];
                values[place] = x[at], ids[place] = at;
            }
        };
        int64_t at = 0;
        for (; at + BLOCK <= width; at += BLOCK) {
            Lanes most = load(x + at), sums = most;
            for (int64_t i = LANES; i < BLOCK; i += LANES) {
                const Lanes next = load(x + at + i);
                most = larger(most, next);
                sums += next;
            }
            // A sum is NaN where one of its terms is, or where infinities of both signs meet: then each is looked at.
            const float all_of_them = sum(sums);
            if (held < count || largest(most) > values[count - 1] || all_of_them != all_of_them) offer(at, at + BLOCK);
        }
        offer(at, width);
        if (!whole) values[0] = std::numeric_limits<float>::quiet_NaN();
    }
}

// Give the logarithm of the sum of each row's exponentials: (rows,).
void dragoman_normaliser(const float* x, int64_t rows, int64_t width, float* out) {
    for (int64_t row = 0; row < rows; ++row, x += width) {
        float top = x[0];
        int64_t at = 0;
        if (width >= LANES) {
            Lanes most = load(x);
            for (; at + LANES <= width; at += LANES) most = larger(most, load(x + at));
            top = largest(most);
        }
        for (; at < width; ++at) top = x[at] > top ? x[at] : top;
        Lanes total = {};
        for (at = 0; at + LANES <= width; at += LANES) total += exponential(load(x + at) - top);
        float last[LANES];
        std::fill(last, last + LANES, top - 100.0f);
        std::copy(x + at, x + width, last);
        if (at < width) total += exponential(load(last) - top);
        out[row] = top + std::log(sum(total));
    }
}
}

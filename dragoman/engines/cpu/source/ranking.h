// The largest numbers of each row, and what makes log-probabilities of logits. Included once, by transformer.cpp.
#pragma once

#include <limits>

#include "lanes.h"

constexpr int64_t BLOCK = 4 * LANES;  // numbers that are looked at one by one only where one of them is large enough

// The largest of what is offered, the first of equal ones; NaN once one was offered.
struct First {
    float value = -std::numeric_limits<float>::infinity();
    int64_t id = 0;

    void offer(float x, int64_t at) {
        if (x > value || x != x) value = x, id = at;  // nothing is larger than NaN
    }
};

// The same for whole vectors of a row, whatever their order.
struct FirstOfLanes {
    Lanes values = all(-std::numeric_limits<float>::infinity());
    Whole ids = {}, damage = {};

    void offer(Lanes x, int64_t column) {
        const Whole more = x > values;
        values = more ? x : values;
        ids = more ? Whole{} + (int32_t)column : ids;
        damage |= x != x;
    }

    First among() const {
        First first;
        for (int64_t lane = 0; lane < LANES; ++lane) {
            const int64_t id = ids[lane] + lane;
            if (values[lane] > first.value || (values[lane] == first.value && id < first.id)) first.value = values[lane], first.id = id;
            if (damage[lane]) first.offer(std::numeric_limits<float>::quiet_NaN(), id);
        }
        return first;
    }
};

// What a search takes of each row: the largest of what may be taken, which is all past the first few, and among these the end, if it may come.
struct Taken {
    float* values;  // (rows,)
    int64_t* ids;   // (rows,)
    int64_t few, end, width;  // -1: no end

    void put(int64_t row, First first) const { values[row] = first.value, ids[row] = first.id; }

    bool may(int64_t id) const { return (id >= few || id == end) && id < width; }

    // Push out of sight what may not be taken.
    Lanes only(Lanes x, int64_t column) const {
        if (column >= few && column + LANES <= width) return x;
        for (int64_t i = 0; i < LANES; ++i)
            if (!may(column + i)) x[i] = -std::numeric_limits<float>::infinity();
        return x;
    }
};

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

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

#include "product.h"
#include "ranking.h"

struct Screen {
    Product rough;       // whole numbers of eight bits; its scale is a row's own, its bias takes away what inputs above nought add
    const float* bias;   // (E,), and noughts on to a whole panel
    const float *lost, *kept;  // (E,) the same; the lengths |e| and |w'|, and in `lost` what float32 itself may round away
    const float* exact;  // (E, D) the matrix, a row after the other
    float slack;         // what adding the bias may round away
};

struct Rounded {
    float scale, length, lost;  // what a whole number is worth, |x| and |d|, both a little enlarged
    Lanes least;                // in each lane the largest of what products are at least
};

constexpr float MIDDLE = 128.0f;  // stands for nought
constexpr int TURNS = 8;          // sums that go through their numbers side by side: each waits for itself

static inline Lanes load_bytes(const uint8_t* from) {
    typedef uint8_t Bytes __attribute__((vector_size(LANES)));
    Bytes x;
    std::memcpy(&x, from, sizeof x);
    return __builtin_convertvector(x, Lanes);
}

static Rounded round_row(const float* x, int64_t width, uint8_t* whole) {
    Lanes most = {}, squares = {}, lost = {};
    for (int64_t i = 0; i < width; i += LANES) {
        const Lanes v = load(x + i);
        most = larger(larger(v, -v), most);
        squares += v * v;
    }
    const float scale = largest(most) > 0.0f ? largest(most) / 127.0f : 1.0f, inverse = 1.0f / scale;
    for (int64_t i = 0; i < width; i += LANES) {
        const Lanes v = load(x + i);
        store_rounded(whole + i, v * inverse + MIDDLE);
        const Lanes apart = v - (load_bytes(whole + i) - MIDDLE) * scale;
        lost += apart * apart;
    }
    const float enlarged = 1.0001f;  // float32 sums of squares are exact to less than that
    return {scale, std::sqrt(sum(squares)) * enlarged, std::sqrt(sum(lost)) * enlarged, all(-std::numeric_limits<float>::infinity())};
}

// Multiply a row by some rows of the matrix in float32, and offer what comes of it.
static void settle(const Screen& s, const float* x, const int64_t* columns, int64_t count, First& first) {
    float sums[TURNS] = {};
    const float* weights[TURNS];
    for (int j = 0; j < TURNS; ++j) weights[j] = s.exact + columns[j < count ? j : 0] * s.rough.in;
    for (int64_t k = 0; k < s.rough.in; ++k)
        for (int j = 0; j < TURNS; ++j) sums[j] = std::fma(weights[j][k], x[k], sums[j]);  // as the vectors of `tile` are fused
    for (int64_t j = 0; j < count; ++j) first.offer(sums[j] + s.bias[columns[j]], columns[j]);
}

// Find the largest of each row's products among those that may be taken. What cannot be bounded, NaN say, is multiplied in float32 as well.
// Gives how many were. There is room for (rows, D) in `whole` and for (rows, E), up to whole panels, in `values`.
static int64_t screen(const Screen& s, const float* x, int64_t rows, const Taken& taken, uint8_t* whole, float* values) {
    const Product& p = s.rough;
    const int64_t wide = (p.out + PANEL - 1) / PANEL * PANEL;
    thread_local std::vector<Rounded> rounded;
    rounded.clear();
    for (int64_t row = 0; row < rows; ++row) rounded.push_back(round_row(x + row * p.in, p.in, whole + row * p.in));
    auto apart = [&](const Rounded& r, int64_t column) { return load(s.lost + column) * r.length + load(s.kept + column) * r.lost + s.slack; };

    multiply(p, (const uint8_t*)whole, rows, [&](int64_t row, int64_t column, Lanes v) {
        Rounded& r = rounded[row];
        const Lanes rough = taken.only(v * r.scale + load(s.bias + column), column), least = rough - apart(r, column);
        store(values + row * wide + column, rough);
        r.least = least > r.least ? least : r.least;  // a NaN is not larger
    });

    int64_t settled = 0;
    for (int64_t row = 0; row < rows; ++row) {
        const Rounded& r = rounded[row];
        const float* rough = values + row * wide;
        const Lanes bar = all(largest(r.least));
        int64_t columns[TURNS + LANES], held = 0;
        First first;
        for (int64_t at = 0; at < p.out; at += LANES) {
            const Whole below = load(rough + at) + apart(r, at) < bar;
            if (everywhere(below)) continue;
            for (int64_t i = 0; i < LANES; ++i)
                if (!below[i] && taken.may(at + i)) columns[held++] = at + i;
            int64_t done = 0;
            for (; held - done >= TURNS; done += TURNS) settle(s, x + row * p.in, columns + done, TURNS, first);
            std::copy(columns + done, columns + held, columns);
            held -= done, settled += done;
        }
        if (held) settle(s, x + row * p.in, columns, held, first);
        settled += held;
        taken.put(row, first);
    }
    return settled;
}

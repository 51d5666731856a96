// A Transformer's layers, called from dragoman/engines/cpu/compiled.py, which lays out what they read: the two must agree on every struct.
//
// Letters: D the stream's width, I = H * Dh the width of all heads together, E a product's outputs. Each thread has scratch of its own.

#include <algorithm>
#include <vector>

#include "attention.h"
#include "product.h"
#include "ranking.h"
#include "screening.h"

struct Norm {
    const float *weight, *bias;  // (D,); a norm without a weight changes nothing, one without a bias leaves the mean
    float epsilon;
};

struct Around {
    Norm before, after;  // of what goes into a part, of what is left when its change was added
};

struct Layer {
    Around around_self, around_cross, around_feed;
    Product query_key_value, output, query, key_value, cross_output, inner, outer;
};

struct Model {
    const Layer *encoder, *decoder;
    int64_t encoder_layers, decoder_layers;
    Norm encoder_norm, decoder_norm;
    Product narrow, pieces;  // `narrow` without a matrix where there is none
    const float* table;      // (V, D) what pieces of the target are embedded by; none where that takes more than looking up
    float table_scale;
    int64_t width, heads, head_width;
};

// Keys and values of the positions so far, a slot each, and of the sources: both (2, ..., I) for each layer.
struct Step {
    float* stream;                        // (N * F, D), which is used up; none where the next two tell it
    const int64_t* tokens;                // (N * F,)
    const float* place;                   // (D,) added to what they are embedded by, if anything
    float* logits;                        // (N * F, V)
    void* own;                            // (layers, caches, 2, slots, I)
    const void* memory;                   // (layers, 2, source places, I)
    const int64_t *caches, *firsts, *lengths;  // (N,): which cache a sentence has, where its source begins, how long it is
    const int32_t* past;                  // (N * F, past_room): the slots of a row's past, its new one last
    const Product* some;                  // only some of the vocabulary's rows, U; none where all are scored
    const int64_t *ids, *columns;         // the pieces that each sentence may use, and where they stand among the U, list behind list
    const int64_t *list_ends, *numbers;   // where each list ends, after a nought; (N,) which list a sentence has
    Taken taken;                          // what is wanted of the logits, which are then not written; without `ids` all are
    const Screen* screen;                 // what finds that quickly; none where there is nothing of the kind
    int64_t rows, fan, steps, past_room, cache_count, slots, places;
};

// Several steps of a search that takes the largest logit each time: of every row as it goes on, until its end or its limit.
struct Walk {
    Step step;                   // before the first of them; its tokens, sentences and `taken` are written over, one for each living row
    const float* places;         // (most, D) what each step adds to what pieces are embedded by, if anything
    const int64_t* limits;       // (N,)
    int64_t* rows;               // (N,) the living rows, and afterwards those that live on
    int64_t* ids;                // (most, N) what each row took, -1 where it took nothing
    float* logits;               // (most, N)
    int64_t all, first, most, at_least, end;  // N; the number of the first step, steps at most, and before which nothing may end
    int64_t stepped, settled;    // how many rows were taken a step further, and how many scores of theirs were computed twice
};

namespace {

struct Scratch {
    std::vector<float> stream, floats, hidden, weights, scores;
    std::vector<uint8_t> bytes, hidden_bytes;
    bool overflowed = false;  // whether this call rounded NaN or infinity to eight bits, which hides it
};

Scratch& scratch() {
    thread_local Scratch mine;
    return mine;
}

template <class Number>
Number* room(std::vector<Number>& in, int64_t count) {
    if ((int64_t)in.size() < count) in.resize(count);
    return in.data();
}

// Note NaN: what sums of numbers times nought are where one of them is not finite.
inline void note_overflow(Lanes noughts) {
    if (sum(noughts) != 0.0f) scratch().overflowed = true;
}

// Normalise a row (D,) and hand each vector of it to `put(at, lanes)`.
template <class Put>
inline void normalise(const Norm& norm, const float* x, int64_t width, Put put) {
    if (!norm.weight) {
        for (int64_t i = 0; i < width; i += LANES) put(i, load(x + i));
        return;
    }
    float mean = 0.0f;
    if (norm.bias) {
        Lanes total = {};
        for (int64_t i = 0; i < width; i += LANES) total += load(x + i);
        mean = sum(total) / (float)width;
    }
    Lanes squares = {};
    for (int64_t i = 0; i < width; i += LANES) {
        const Lanes apart = load(x + i) - mean;
        squares += apart * apart;
    }
    const float variance = sum(squares) / (float)width;
    // A variance that overflowed makes NaN, as torch's norm does, not nought; without a mean torch's has nought too.
    const float scale = 1.0f / std::sqrt(variance + norm.epsilon) + (norm.bias ? variance - variance : 0.0f);
    for (int64_t i = 0; i < width; i += LANES) {
        const Lanes scaled = (load(x + i) - mean) * scale * load(norm.weight + i);
        put(i, norm.bias ? scaled + load(norm.bias + i) : scaled);
    }
}

void normalise_rows(const Norm& norm, float* x, int64_t rows, int64_t width) {
    if (!norm.weight) return;
    for (int64_t row = 0; row < rows; ++row) normalise(norm, x + row * width, width, [&](int64_t i, Lanes v) { store(x + row * width + i, v); });
}

// Multiply rows, normalised first, in the product's own precision.
template <class End>
void enter(const Product& p, const Norm& norm, const float* x, int64_t rows, End end) {
    if (p.scale) {
        uint8_t* whole = room(scratch().bytes, rows * p.in);
        Lanes noughts = {};
        for (int64_t row = 0; row < rows; ++row)
            normalise(norm, x + row * p.in, p.in, [&](int64_t i, Lanes v) {
                noughts += v * 0.0f;
                store_rounded(whole + row * p.in + i, v * p.inverse + p.zero);
            });
        note_overflow(noughts);
        return multiply(p, whole, rows, end);
    }
    if (!norm.weight) return multiply(p, x, rows, end);
    float* normed = room(scratch().floats, rows * p.in);
    for (int64_t row = 0; row < rows; ++row)
        normalise(norm, x + row * p.in, p.in, [&](int64_t i, Lanes v) { store(normed + row * p.in + i, v); });
    multiply(p, (const float*)normed, rows, end);
}

const Norm NONE = {nullptr, nullptr, 0.0f};

auto added_to(float* x, int64_t width) {
    return [=](int64_t row, int64_t column, Lanes v) {
        float* here = x + row * width + column;
        store(here, load(here) + v);
    };
}

// Widen, keep the positive part, narrow, add. In int8 the positive part is rounded as it is made.
void feed(const Layer& layer, float* x, int64_t rows, int64_t width) {
    const Product &inner = layer.inner, &outer = layer.outer;
    const int64_t wide = outer.in;
    if (outer.scale) {
        uint8_t* bent = room(scratch().hidden_bytes, rows * wide);
        Lanes noughts = {};
        enter(inner, layer.around_feed.before, x, rows, [&](int64_t row, int64_t column, Lanes v) {
            const Lanes positive = larger(Lanes{}, v);
            noughts += positive * 0.0f;
            store_rounded(bent + row * wide + column, positive * outer.inverse + outer.zero);
        });
        note_overflow(noughts);
        multiply(outer, (const uint8_t*)bent, rows, added_to(x, width));
    } else {
        float* bent = room(scratch().hidden, rows * wide);
        enter(inner, layer.around_feed.before, x, rows, [&](int64_t row, int64_t column, Lanes v) {
            store(bent + row * wide + column, larger(Lanes{}, v));
        });
        multiply(outer, (const float*)bent, rows, added_to(x, width));
    }
    normalise_rows(layer.around_feed.after, x, rows, width);
}

template <class Cell>
void extend(const Model& model, const Layer& layer, const Step& step, int64_t number) {
    const int64_t inner = model.heads * model.head_width, width = model.width, rows = step.rows;
    const int64_t cache_size = 2 * step.slots * inner, value_after = step.slots * inner;
    Cell* own = (Cell*)step.own + number * step.cache_count * cache_size;
    float* query = room(scratch().hidden, 2 * rows * inner);
    float* context = query + rows * inner;
    const int64_t longest = std::max(step.steps, *std::max_element(step.lengths, step.lengths + rows / step.fan));
    float* weights = room(scratch().weights, model.heads * (longest + LANES));
    auto cache_of = [&](int64_t row) { return own + step.caches[row / step.fan] * cache_size; };
    auto past_of = [&](int64_t row) { return step.past + row * step.past_room; };

    enter(layer.query_key_value, layer.around_self.before, step.stream, rows, [&](int64_t row, int64_t column, Lanes v) {
        if (column < inner) return store(query + row * inner + column, v);
        const int64_t within = column - inner, part = within >= inner ? 1 : 0;
        store(cache_of(row) + part * value_after + past_of(row)[step.steps - 1] * inner + within - part * inner, v);
    });
    for (int64_t row = 0; row < rows; ++row) {
        const Cell* keys = cache_of(row);
        const int32_t* past = past_of(row);
        const int64_t next = std::min(row + 1, rows - 1);
        const Cell* next_keys = cache_of(next);
        const int32_t* next_past = past_of(next);
        attend(query + row * inner, context + row * inner, model.heads, model.head_width, step.steps, weights,
               [&](int64_t t) { return keys + past[t] * inner; }, [&](int64_t t) { return keys + value_after + past[t] * inner; },
               [&](int64_t t) {
                   fetch(next_keys + next_past[t] * inner, inner);
                   fetch(next_keys + value_after + next_past[t] * inner, inner);
               });
    }
    enter(layer.output, NONE, context, rows, added_to(step.stream, width));
    normalise_rows(layer.around_self.after, step.stream, rows, width);

    enter(layer.query, layer.around_cross.before, step.stream, rows, [&](int64_t row, int64_t column, Lanes v) {
        store(query + row * inner + column, v);
    });
    const Cell* memory = (const Cell*)step.memory + number * 2 * step.places * inner;
    for (int64_t row = 0; row < rows; ++row) {
        const Cell* keys = memory + step.firsts[row / step.fan] * inner;
        const int64_t next = std::min(row + 1, rows - 1) / step.fan;
        const Cell* next_keys = memory + step.firsts[next] * inner;
        attend(query + row * inner, context + row * inner, model.heads, model.head_width, step.lengths[row / step.fan], weights,
               [&](int64_t t) { return keys + t * inner; }, [&](int64_t t) { return keys + (step.places + t) * inner; },
               [&](int64_t t) {
                   if (t >= step.lengths[next]) return;
                   fetch(next_keys + t * inner, inner);
                   fetch(next_keys + (step.places + t) * inner, inner);
               });
    }
    enter(layer.cross_output, NONE, context, rows, added_to(step.stream, width));
    normalise_rows(layer.around_cross.after, step.stream, rows, width);
    feed(layer, step.stream, rows, width);
}

template <class Cell>
void prepare(const Product& p, const float* values, int64_t rows, Cell* memory, int64_t places, int64_t inner) {
    enter(p, NONE, values, rows, [&](int64_t row, int64_t column, Lanes v) {
        const int64_t part = column >= inner ? 1 : 0;
        store(memory + (part * places + row) * inner + column - part * inner, v);
    });
}

// Embed the newest pieces, all of which stand at one place; nothing where one is none of the vocabulary.
float* embed(const Model& model, const Step& step) {
    const int64_t width = model.width;
    float* stream = room(scratch().stream, step.rows * width);
    for (int64_t row = 0; row < step.rows; ++row) {
        if (step.tokens[row] < 0 || step.tokens[row] >= model.pieces.out) return nullptr;
        for (int64_t i = 0; i < width; i += LANES) {
            const Lanes looked_up = load(model.table + step.tokens[row] * width + i) * model.table_scale;
            store(stream + row * width + i, step.place ? looked_up + load(step.place + i) : looked_up);
        }
    }
    return stream;
}

// Write the logits of what comes next: all, or only those of each sentence's list.
void score(const Model& model, const Step& step, const Norm& norm, const float* last) {
    const Product& scores = step.some ? *step.some : model.pieces;
    const int64_t pieces = model.pieces.out;
    const int64_t wide = step.some ? (scores.out + LANES - 1) / LANES * LANES : pieces;
    float* made = step.some ? room(scratch().scores, step.rows * wide) : step.logits;
    enter(scores, norm, last, step.rows, [=](int64_t row, int64_t column, Lanes v) {
        float* here = made + row * wide + column;
        if (column + LANES <= wide) return store(here, v);
        for (int64_t i = 0; column + i < wide; ++i) here[i] = v[i];
    });
    for (int64_t row = 0; step.some && row < step.rows; ++row) {
        const int64_t* end = step.list_ends + step.numbers[row / step.fan];
        for (int64_t at = end[0]; at < end[1]; ++at) step.logits[row * pieces + step.ids[at]] = made[row * wide + step.columns[at]];
    }
}

// Find what a search takes, without writing the logits.
void take(const Model& model, const Step& step, const Norm& norm, const float* last) {
    thread_local std::vector<FirstOfLanes> firsts;
    firsts.assign(step.rows, FirstOfLanes());
    enter(model.pieces, norm, last, step.rows, [&](int64_t row, int64_t column, Lanes v) {
        firsts[row].offer(step.taken.only(v, column), column);
    });
    for (int64_t row = 0; row < step.rows; ++row) step.taken.put(row, firsts[row].among());
}

}  // namespace

extern "C" {

int64_t dragoman_has_int8() { return HAS_INT8; }

int64_t dragoman_panel() { return PANEL; }

// Send whole sentences (rows, D), one behind the other, through the encoder: `ends` says where each ends. Gives -2 where int8 met what is
// not finite, else 0; in float32 that shows in what is computed.
int64_t dragoman_read(const Model* model, float* x, const int64_t* ends, int64_t sentences) {
    scratch().overflowed = false;
    const int64_t inner = model->heads * model->head_width, width = model->width, rows = ends[sentences - 1];
    for (int64_t number = 0; number < model->encoder_layers; ++number) {
        const Layer& layer = model->encoder[number];
        float* made = room(scratch().hidden, 4 * rows * inner);
        float* context = made + 3 * rows * inner;
        enter(layer.query_key_value, layer.around_self.before, x, rows, [&](int64_t row, int64_t column, Lanes v) {
            store(made + row * 3 * inner + column, v);
        });
        for (int64_t sentence = 0, first = 0; sentence < sentences; first = ends[sentence++]) {
            const int64_t length = ends[sentence] - first;
            float* weights = room(scratch().weights, model->heads * (length + LANES));
            const float* keys = made + first * 3 * inner + inner;
            for (int64_t row = first; row < ends[sentence]; ++row)
                attend(made + row * 3 * inner, context + row * inner, model->heads, model->head_width, length, weights,
                       [&](int64_t t) { return keys + t * 3 * inner; }, [&](int64_t t) { return keys + t * 3 * inner + inner; },
                       [](int64_t) {});
        }
        enter(layer.output, NONE, context, rows, added_to(x, width));
        normalise_rows(layer.around_self.after, x, rows, width);
        feed(layer, x, rows, width);
    }
    normalise_rows(model->encoder_norm, x, rows, width);
    return scratch().overflowed ? -2 : 0;
}

// Make the keys and values of encoded sources (rows, D) for every layer of the decoder: into (layers, 2, places, I), from place `first`.
// Gives what `dragoman_read` does.
int64_t dragoman_prepare(const Model* model, const float* values, int64_t first, int64_t rows, void* memory, int64_t places) {
    scratch().overflowed = false;
    const int64_t inner = model->heads * model->head_width;
    for (int64_t number = 0; number < model->decoder_layers; ++number) {
        const Product& p = model->decoder[number].key_value;
        const int64_t at = (number * 2 * places + first) * inner;
        if (p.scale)
            prepare(p, values, rows, (Half*)memory + at, places, inner);
        else
            prepare(p, values, rows, (float*)memory + at, places, inner);
    }
    return scratch().overflowed ? -2 : 0;
}

// Take one more position of every row, and score what comes next or find what a search takes of it; gives how many scores were
// computed twice, -1 where a piece is none of the vocabulary, or -2 where int8 met what is not finite.
int64_t dragoman_step(const Model* model, const Step* asked) {
    Step step = *asked;
    scratch().overflowed = false;
    if (!step.stream && !(step.stream = embed(*model, step))) return -1;
    for (int64_t number = 0; number < model->decoder_layers; ++number) {
        const Layer& layer = model->decoder[number];
        if (layer.key_value.scale)
            extend<Half>(*model, layer, step, number);
        else
            extend<float>(*model, layer, step, number);
    }
    const float* last = step.stream;
    const Norm* norm = &model->decoder_norm;
    if (model->narrow.weight) {
        float* narrow = room(scratch().hidden, step.rows * model->pieces.in);
        enter(model->narrow, *norm, step.stream, step.rows, [&](int64_t row, int64_t column, Lanes v) {
            store(narrow + row * model->pieces.in + column, v);
        });
        last = narrow, norm = &NONE;
    }
    if (!step.taken.ids) {
        score(*model, step, *norm, last);
    } else if (!step.screen) {
        take(*model, step, *norm, last);
    } else {
        normalise_rows(*norm, step.stream, step.rows, model->width);
        uint8_t* whole = room(scratch().bytes, step.rows * model->pieces.in);
        return screen(*step.screen, last, step.rows, step.taken, whole, room(scratch().scores, step.rows * (step.taken.width + PANEL)));
    }
    return scratch().overflowed ? -2 : 0;
}

// Go some steps; gives how many rows live on, or -1 less the number of a step where a logit is NaN or infinite. Its pieces are the
// kernels' own.
int64_t dragoman_walk(const Model* model, Walk* walk) {
    Step& step = walk->step;
    int64_t *caches = (int64_t*)step.caches, *firsts = (int64_t*)step.firsts, *lengths = (int64_t*)step.lengths, *tokens = (int64_t*)step.tokens;
    for (int64_t number = walk->first; number < walk->first + walk->most && step.rows; ++number, ++step.steps) {
        int64_t* ids = walk->ids + (number - walk->first) * walk->all;
        float* logits = walk->logits + (number - walk->first) * walk->all;
        step.place = walk->places ? walk->places + (number - walk->first) * model->width : nullptr;
        step.taken.end = number >= walk->at_least ? walk->end : -1;
        const int64_t settled = dragoman_step(model, &step);
        if (settled < 0) return -1 - number;
        walk->stepped += step.rows, walk->settled += settled;
        int64_t living = 0;
        for (int64_t at = 0; at < step.rows; ++at) {
            const float logit = step.taken.values[at];
            const int64_t id = step.taken.ids[at], row = walk->rows[at];
            if (!(logit < std::numeric_limits<float>::infinity())) return -1 - number;
            const bool possible = std::isfinite(logit), ends = id == walk->end, goes_on = possible && !ends && walk->limits[row] > number;
            if (possible && (ends || goes_on)) ids[row] = id, logits[row] = logit;
            if (!goes_on) continue;
            walk->rows[living] = row, tokens[living] = id;
            caches[living] = caches[at], firsts[living] = firsts[at], lengths[living] = lengths[at], ++living;
        }
        step.rows = living;
    }
    return step.rows;
}
}

// Transformer inference kernels: encoder, decoder step, greedy decoding. Called from cpp_transformer.py;
// c_structs.py mirrors the structs, and fields and their order must agree.
//
// Shape letters: D model width, I = H * Dh width of all heads, E output features of a linear layer, V
// vocabulary, N sentences, F beams per sentence. Each thread has its own scratch buffers.

#include <algorithm>
#include <vector>

#include "attention.h"
#include "beam_step.h"
#include "gemm.h"
#include "topk.h"
#include "int8_filter.h"

struct Norm {
    const float *weight, *bias;  // (D,); identity without a weight, RMS norm without a bias
    float epsilon;
};

struct ResidualNorms {
    Norm pre_norm, post_norm;  // of the sublayer's input, of the sum after it
};

struct Layer {
    ResidualNorms self_norms, cross_norms, ffn_norms;
    Linear query_key_value, output, query, key_value, cross_output, inner, outer;
};

struct Model {
    const Layer *encoder, *decoder;
    int64_t encoder_layers, decoder_layers;
    Norm encoder_norm, decoder_norm;
    Linear down_proj, output;      // `down_proj` (factorized output) has no matrix if unused
    const float* embedding_table;  // (V, D) of the target; null if embedding is more than a lookup
    float embedding_scale;
    int64_t width, heads, head_width;
};

// One decoder step of all rows: KV cache with a slot for each step and beam, and cross-attention keys and
// values of the sources, both (2, ..., I) for each layer.
struct DecodeStep {
    float* hidden_states;   // (N * F, D), overwritten; null if tokens and position are embedded here
    const int64_t* tokens;  // (N * F,)
    const float* position;  // (D,) position vector added to the embeddings; null for none
    float* logits;          // (N * F, V)
    void* kv_cache;         // (layers, caches, 2, slots, I)
    const void* memory;     // (layers, 2, source positions, I)
    // (N,): cache of each sentence, first source position, source length.
    const int64_t *cache_ids, *source_starts, *lengths;
    const int32_t* past_slots;    // (N * F, past_stride): slots of each row's past, its new one last
    const Linear* output_subset;  // output projection of a shortlist's U tokens; null for all tokens
    const int64_t *ids, *subset_columns;        // allowed tokens of each sentence, and their columns in U
    const int64_t *subset_ends, *sentence_ids;  // zero and the end of each list; (N,) list of a sentence
    ArgmaxOutput argmax;            // with `ids`, the argmax is written instead of the logits
    const Int8Filter* int8_filter;  // computes the argmax faster; null if unused
    int64_t rows, beams_per_sentence, steps, past_stride, cache_count, slots, source_positions;
};

// Several steps of greedy decoding: every row continues until EOS or its limit.
struct GreedyRun {
    DecodeStep step;              // the first step; its per-row arrays are overwritten for active rows
    const float* position_table;  // (max_steps, D) position vectors; null for none
    const int64_t* limits;        // (N,) maximum output lengths
    int64_t* rows;                // (N,) active rows before, and those still active after
    int64_t* ids;                 // (max_steps, N) tokens; -1 for rows that are finished
    float* logits;                // (max_steps, N)
    int64_t num_rows, first_step, max_steps, min_length, eos;  // EOS is allowed from step min_length on
    int64_t rows_stepped, rescored;  // decoder rows computed, and logits recomputed in float32
};

namespace {

struct Scratch {
    std::vector<float> hidden_states, floats, hidden, weights, scores;
    std::vector<uint8_t> bytes, hidden_bytes;
    bool met_nonfinite = false;  // this call quantized NaN or infinity, which hides it
};

Scratch& scratch() {
    thread_local Scratch instance;
    return instance;
}

template <class Number>
Number* scratch_buffer(std::vector<Number>& in, int64_t count) {
    if ((int64_t)in.size() < count) in.resize(count);
    return in.data();
}

// Record values that are not finite: their sum times zero is NaN.
inline void note_nonfinite(FloatVec zeros) {
    if (reduce_add(zeros) != 0.0f) scratch().met_nonfinite = true;
}

// Normalize a row (D,) and pass each vector of it to `put(at, vector)`.
template <class Put>
inline void normalize(const Norm& norm, const float* x, int64_t width, Put put) {
    if (!norm.weight) {
        for (int64_t i = 0; i < width; i += LANES) put(i, load(x + i));
        return;
    }
    float mean = 0.0f;
    if (norm.bias) {
        FloatVec total = {};
        for (int64_t i = 0; i < width; i += LANES) total += load(x + i);
        mean = reduce_add(total) / (float)width;
    }
    FloatVec squares = {};
    for (int64_t i = 0; i < width; i += LANES) {
        const FloatVec apart = load(x + i) - mean;
        squares += apart * apart;
    }
    const float variance = reduce_add(squares) / (float)width;
    // A layer norm whose variance overflows is NaN, as in torch, not zero; torch's RMS norm is zero too.
    const float scale = 1.0f / std::sqrt(variance + norm.epsilon) + (norm.bias ? variance - variance : 0.0f);
    for (int64_t i = 0; i < width; i += LANES) {
        const FloatVec scaled = (load(x + i) - mean) * scale * load(norm.weight + i);
        put(i, norm.bias ? scaled + load(norm.bias + i) : scaled);
    }
}

void normalize_rows(const Norm& norm, float* x, int64_t rows, int64_t width) {
    if (!norm.weight) return;
    for (int64_t row = 0; row < rows; ++row) normalize(norm, x + row * width, width, [&](int64_t i, FloatVec v) { store(x + row * width + i, v); });
}

// Normalize rows and apply a linear layer in its precision.
template <class End>
void norm_linear(const Linear& p, const Norm& norm, const float* x, int64_t rows, End end) {
    if (p.scale) {
        uint8_t* int_values = scratch_buffer(scratch().bytes, rows * p.in_features);
        FloatVec zeros = {};
        for (int64_t row = 0; row < rows; ++row)
            normalize(norm, x + row * p.in_features, p.in_features, [&](int64_t i, FloatVec v) {
                zeros += v * 0.0f;
                store_uint8(int_values + row * p.in_features + i, v * p.inv_scale + p.zero_point);
            });
        note_nonfinite(zeros);
        return matmul(p, int_values, rows, end);
    }
    if (!norm.weight) return matmul(p, x, rows, end);
    float* normed = scratch_buffer(scratch().floats, rows * p.in_features);
    for (int64_t row = 0; row < rows; ++row)
        normalize(norm, x + row * p.in_features, p.in_features, [&](int64_t i, FloatVec v) { store(normed + row * p.in_features + i, v); });
    matmul(p, (const float*)normed, rows, end);
}

const Norm NO_NORM = {nullptr, nullptr, 0.0f};

auto add_to(float* x, int64_t width) {
    return [=](int64_t row, int64_t column, FloatVec v) {
        float* here = x + row * width + column;
        store(here, load(here) + v);
    };
}

// Feed-forward network: linear, ReLU, linear, residual sum. In int8 the ReLU's output is quantized directly.
void feed_forward(const Layer& layer, float* x, int64_t rows, int64_t width) {
    const Linear &inner = layer.inner, &outer = layer.outer;
    const int64_t wide = outer.in_features;
    if (outer.scale) {
        uint8_t* ffn_hidden = scratch_buffer(scratch().hidden_bytes, rows * wide);
        FloatVec zeros = {};
        norm_linear(inner, layer.ffn_norms.pre_norm, x, rows, [&](int64_t row, int64_t column, FloatVec v) {
            const FloatVec positive = vec_max(FloatVec{}, v);
            zeros += positive * 0.0f;
            store_uint8(ffn_hidden + row * wide + column, positive * outer.inv_scale + outer.zero_point);
        });
        note_nonfinite(zeros);
        matmul(outer, (const uint8_t*)ffn_hidden, rows, add_to(x, width));
    } else {
        float* ffn_hidden = scratch_buffer(scratch().hidden, rows * wide);
        norm_linear(inner, layer.ffn_norms.pre_norm, x, rows, [&](int64_t row, int64_t column, FloatVec v) {
            store(ffn_hidden + row * wide + column, vec_max(FloatVec{}, v));
        });
        matmul(outer, (const float*)ffn_hidden, rows, add_to(x, width));
    }
    normalize_rows(layer.ffn_norms.post_norm, x, rows, width);
}

template <class Cell>
void decode_layer(const Model& model, const Layer& layer, const DecodeStep& step, int64_t number) {
    const int64_t inner = model.heads * model.head_width, width = model.width, rows = step.rows;
    const int64_t cache_size = 2 * step.slots * inner, value_after = step.slots * inner;
    Cell* kv_cache = (Cell*)step.kv_cache + number * step.cache_count * cache_size;
    float* query = scratch_buffer(scratch().hidden, 2 * rows * inner);
    float* context = query + rows * inner;
    const int64_t longest = std::max(step.steps, *std::max_element(step.lengths, step.lengths + rows / step.beams_per_sentence));
    float* weights = scratch_buffer(scratch().weights, model.heads * (longest + LANES));
    auto cache_of = [&](int64_t row) { return kv_cache + step.cache_ids[row / step.beams_per_sentence] * cache_size; };
    auto past_slots_of = [&](int64_t row) { return step.past_slots + row * step.past_stride; };

    norm_linear(layer.query_key_value, layer.self_norms.pre_norm, step.hidden_states, rows, [&](int64_t row, int64_t column, FloatVec v) {
        if (column < inner) return store(query + row * inner + column, v);
        const int64_t within = column - inner, part = within >= inner ? 1 : 0;
        store(cache_of(row) + part * value_after + past_slots_of(row)[step.steps - 1] * inner + within - part * inner, v);
    });
    for (int64_t row = 0; row < rows; ++row) {
        const Cell* keys = cache_of(row);
        const int32_t* past_slots = past_slots_of(row);
        const int64_t next = std::min(row + 1, rows - 1);
        const Cell* next_keys = cache_of(next);
        const int32_t* next_past = past_slots_of(next);
        attend(query + row * inner, context + row * inner, model.heads, model.head_width, step.steps, weights,
               [&](int64_t t) { return keys + past_slots[t] * inner; }, [&](int64_t t) { return keys + value_after + past_slots[t] * inner; },
               [&](int64_t t) {
                   prefetch(next_keys + next_past[t] * inner, inner);
                   prefetch(next_keys + value_after + next_past[t] * inner, inner);
               });
    }
    norm_linear(layer.output, NO_NORM, context, rows, add_to(step.hidden_states, width));
    normalize_rows(layer.self_norms.post_norm, step.hidden_states, rows, width);

    norm_linear(layer.query, layer.cross_norms.pre_norm, step.hidden_states, rows, [&](int64_t row, int64_t column, FloatVec v) {
        store(query + row * inner + column, v);
    });
    const Cell* memory = (const Cell*)step.memory + number * 2 * step.source_positions * inner;
    for (int64_t row = 0; row < rows; ++row) {
        const Cell* keys = memory + step.source_starts[row / step.beams_per_sentence] * inner;
        const int64_t next = std::min(row + 1, rows - 1) / step.beams_per_sentence;
        const Cell* next_keys = memory + step.source_starts[next] * inner;
        attend(query + row * inner, context + row * inner, model.heads, model.head_width, step.lengths[row / step.beams_per_sentence], weights,
               [&](int64_t t) { return keys + t * inner; }, [&](int64_t t) { return keys + (step.source_positions + t) * inner; },
               [&](int64_t t) {
                   if (t >= step.lengths[next]) return;
                   prefetch(next_keys + t * inner, inner);
                   prefetch(next_keys + (step.source_positions + t) * inner, inner);
               });
    }
    norm_linear(layer.cross_output, NO_NORM, context, rows, add_to(step.hidden_states, width));
    normalize_rows(layer.cross_norms.post_norm, step.hidden_states, rows, width);
    feed_forward(layer, step.hidden_states, rows, width);
}

template <class Cell>
void project_memory(const Linear& p, const float* values, int64_t rows, Cell* memory, int64_t positions, int64_t inner) {
    norm_linear(p, NO_NORM, values, rows, [&](int64_t row, int64_t column, FloatVec v) {
        const int64_t part = column >= inner ? 1 : 0;
        store(memory + (part * positions + row) * inner + column - part * inner, v);
    });
}

// Embed the last tokens, all at one position; null if an id is outside the vocabulary.
float* embed(const Model& model, const DecodeStep& step) {
    const int64_t width = model.width;
    float* hidden_states = scratch_buffer(scratch().hidden_states, step.rows * width);
    for (int64_t row = 0; row < step.rows; ++row) {
        if (step.tokens[row] < 0 || step.tokens[row] >= model.output.out_features) return nullptr;
        for (int64_t i = 0; i < width; i += LANES) {
            const FloatVec embedded = load(model.embedding_table + step.tokens[row] * width + i) * model.embedding_scale;
            store(hidden_states + row * width + i, step.position ? embedded + load(step.position + i) : embedded);
        }
    }
    return hidden_states;
}

// Write the logits of the next token: all, or those of each sentence's shortlist.
void compute_logits(const Model& model, const DecodeStep& step, const Norm& norm, const float* decoder_output) {
    const Linear& scores = step.output_subset ? *step.output_subset : model.output;
    const int64_t vocab_size = model.output.out_features;
    const int64_t wide = step.output_subset ? (scores.out_features + LANES - 1) / LANES * LANES : vocab_size;
    float* made = step.output_subset ? scratch_buffer(scratch().scores, step.rows * wide) : step.logits;
    norm_linear(scores, norm, decoder_output, step.rows, [=](int64_t row, int64_t column, FloatVec v) {
        float* here = made + row * wide + column;
        if (column + LANES <= wide) return store(here, v);
        for (int64_t i = 0; column + i < wide; ++i) here[i] = v[i];
    });
    for (int64_t row = 0; step.output_subset && row < step.rows; ++row) {
        const int64_t* end = step.subset_ends + step.sentence_ids[row / step.beams_per_sentence];
        for (int64_t at = end[0]; at < end[1]; ++at) step.logits[row * vocab_size + step.ids[at]] = made[row * wide + step.subset_columns[at]];
    }
}

// Write the argmax without the logits.
void compute_argmax(const Model& model, const DecodeStep& step, const Norm& norm, const float* decoder_output) {
    thread_local std::vector<VecArgmax> best;
    best.assign(step.rows, VecArgmax());
    norm_linear(model.output, norm, decoder_output, step.rows, [&](int64_t row, int64_t column, FloatVec v) {
        best[row].update(step.argmax.mask(v, column), column);
    });
    for (int64_t row = 0; row < step.rows; ++row) step.argmax.write(row, best[row].reduce());
}

}  // namespace

extern "C" {

int64_t dragoman_has_int8() { return HAS_INT8; }

int64_t dragoman_panel_width() { return PANEL; }

// Encode sentences (rows, D), concatenated; `ends` are their ends. Return -2 if int8 inputs have NaN or infinity,
// else 0; in float32 they propagate.
int64_t dragoman_encode(const Model* model, float* x, const int64_t* ends, int64_t sentences) {
    scratch().met_nonfinite = false;
    const int64_t inner = model->heads * model->head_width, width = model->width, rows = ends[sentences - 1];
    for (int64_t number = 0; number < model->encoder_layers; ++number) {
        const Layer& layer = model->encoder[number];
        float* made = scratch_buffer(scratch().hidden, 4 * rows * inner);
        float* context = made + 3 * rows * inner;
        norm_linear(layer.query_key_value, layer.self_norms.pre_norm, x, rows, [&](int64_t row, int64_t column, FloatVec v) {
            store(made + row * 3 * inner + column, v);
        });
        for (int64_t sentence = 0, first = 0; sentence < sentences; first = ends[sentence++]) {
            const int64_t length = ends[sentence] - first;
            float* weights = scratch_buffer(scratch().weights, model->heads * (length + LANES));
            const float* keys = made + first * 3 * inner + inner;
            for (int64_t row = first; row < ends[sentence]; ++row)
                attend(made + row * 3 * inner, context + row * inner, model->heads, model->head_width, length, weights,
                       [&](int64_t t) { return keys + t * 3 * inner; }, [&](int64_t t) { return keys + t * 3 * inner + inner; },
                       [](int64_t) {});
        }
        norm_linear(layer.output, NO_NORM, context, rows, add_to(x, width));
        normalize_rows(layer.self_norms.post_norm, x, rows, width);
        feed_forward(layer, x, rows, width);
    }
    normalize_rows(model->encoder_norm, x, rows, width);
    return scratch().met_nonfinite ? -2 : 0;
}

// Project encoder outputs (rows, D) to cross-attention keys and values of every decoder layer, into
// (layers, 2, positions, I) from position `first` on. Returns as `dragoman_encode`.
int64_t dragoman_project_memory(const Model* model, const float* values, int64_t first, int64_t rows, void* memory, int64_t positions) {
    scratch().met_nonfinite = false;
    const int64_t inner = model->heads * model->head_width;
    for (int64_t number = 0; number < model->decoder_layers; ++number) {
        const Linear& p = model->decoder[number].key_value;
        const int64_t at = (number * 2 * positions + first) * inner;
        if (p.scale)
            project_memory(p, values, rows, (Half*)memory + at, positions, inner);
        else
            project_memory(p, values, rows, (float*)memory + at, positions, inner);
    }
    return scratch().met_nonfinite ? -2 : 0;
}

// Run one decoder step of every row, and write logits or their argmax. Return the number of logits that
// were recomputed in float32, -1 if a token id is outside the vocabulary, -2 if int8 inputs have NaN or infinity.
int64_t dragoman_decode_step(const Model* model, const DecodeStep* request) {
    DecodeStep step = *request;
    scratch().met_nonfinite = false;
    if (!step.hidden_states && !(step.hidden_states = embed(*model, step))) return -1;
    for (int64_t number = 0; number < model->decoder_layers; ++number) {
        const Layer& layer = model->decoder[number];
        if (layer.key_value.scale)
            decode_layer<Half>(*model, layer, step, number);
        else
            decode_layer<float>(*model, layer, step, number);
    }
    const float* decoder_output = step.hidden_states;
    const Norm* norm = &model->decoder_norm;
    if (model->down_proj.weight) {
        float* down_projected = scratch_buffer(scratch().hidden, step.rows * model->output.in_features);
        norm_linear(model->down_proj, *norm, step.hidden_states, step.rows, [&](int64_t row, int64_t column, FloatVec v) {
            store(down_projected + row * model->output.in_features + column, v);
        });
        decoder_output = down_projected, norm = &NO_NORM;
    }
    if (!step.argmax.ids) {
        compute_logits(*model, step, *norm, decoder_output);
    } else if (!step.int8_filter) {
        compute_argmax(*model, step, *norm, decoder_output);
    } else {
        normalize_rows(*norm, step.hidden_states, step.rows, model->width);
        uint8_t* int_values = scratch_buffer(scratch().bytes, step.rows * model->output.in_features);
        return filtered_argmax(*step.int8_filter, decoder_output, step.rows, step.argmax, int_values, scratch_buffer(scratch().scores, step.rows * (step.argmax.vocab_size + PANEL)));
    }
    return scratch().met_nonfinite ? -2 : 0;
}

// Run greedy decoding steps. Return the number of active rows, or -1 minus the number of the step whose
// logits are NaN or infinite.
int64_t dragoman_decode_greedy(const Model* model, GreedyRun* run) {
    DecodeStep& step = run->step;
    int64_t *cache_ids = (int64_t*)step.cache_ids, *source_starts = (int64_t*)step.source_starts, *lengths = (int64_t*)step.lengths, *tokens = (int64_t*)step.tokens;
    for (int64_t number = run->first_step; number < run->first_step + run->max_steps && step.rows; ++number, ++step.steps) {
        int64_t* ids = run->ids + (number - run->first_step) * run->num_rows;
        float* logits = run->logits + (number - run->first_step) * run->num_rows;
        step.position = run->position_table ? run->position_table + (number - run->first_step) * model->width : nullptr;
        step.argmax.eos = number >= run->min_length ? run->eos : -1;
        const int64_t rescored = dragoman_decode_step(model, &step);
        if (rescored < 0) return -1 - number;
        run->rows_stepped += step.rows, run->rescored += rescored;
        int64_t active = 0;
        for (int64_t at = 0; at < step.rows; ++at) {
            const float logit = step.argmax.values[at];
            const int64_t id = step.argmax.ids[at], row = run->rows[at];
            if (!(logit < std::numeric_limits<float>::infinity())) return -1 - number;
            const bool possible = std::isfinite(logit), ends = id == run->eos, continues = possible && !ends && run->limits[row] > number;
            if (possible && (ends || continues)) ids[row] = id, logits[row] = logit;
            if (!continues) continue;
            run->rows[active] = row, tokens[active] = id;
            cache_ids[active] = cache_ids[at], source_starts[active] = source_starts[at], lengths[active] = lengths[at], ++active;
        }
        step.rows = active;
    }
    return step.rows;
}
}

// One beam search step on the CPU: the fast form of BeamState.advance (dragoman/decoding/beam_step.py),
// which is the reference. It makes the same decisions and writes the same buffers; tests compare them.
// Included once, by transformer.cpp.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

// Mirrored by CBeamStep in c_structs.py. N sentences with F beams before the step, C candidates per beam, beam size K.
struct BeamStep {
    const float* log_probs;    // (N * F, C)
    const int64_t* ids;        // (N * F, C)
    const int64_t* sentences;  // (N,) row of each sentence in the buffers of the beam state
    const double* sums;        // (N, F) log-probability of each hypothesis; -inf for an empty beam slot
    const uint8_t* alive;      // (N,)
    // Buffers of the beam state, R rows.
    uint8_t* all_finite;        // ()
    const int64_t* limits;      // (R,)
    int64_t* active_beams;        // (R,)
    double* finished;           // (R, 2 * K, 4): score, steps, parent, log-probability of EOS
    double* truncated;          // (R, K)
    int64_t* truncated_at;      // (R,)
    int64_t* history_parents;   // (T, R, K)
    int64_t* history_tokens;    // (T, R, K)
    double* history_log_probs;  // (T, R, K)
    const double* length_divisors;
    // Outputs, W = min(K, F * C) columns.
    int64_t* new_tokens;   // (N, W)
    int64_t* new_parents;  // (N, W)
    double* new_sums;      // (N, W)
    uint8_t* new_alive;    // (N,)
    int64_t count, beams_per_sentence, candidates, beam_size, nbest, eos, step, rows;
};

namespace {

struct BeamCandidate {
    double sum, log_prob;
    int64_t token, parent;

    // Ties go to the lower token, then to the better parent.
    bool better_than(const BeamCandidate& other) const {
        if (sum != other.sum) return sum > other.sum;
        if (token != other.token) return token < other.token;
        return parent < other.parent;
    }
};

// Insert the candidates of one sentence into `best`, sorted, of at most `wanted`.
inline void select_candidates(const BeamStep& b, int64_t n, size_t wanted, std::vector<BeamCandidate>& best, bool alive) {
    best.clear();
    for (int64_t beam = 0; beam < b.beams_per_sentence; ++beam) {
        const int64_t row = n * b.beams_per_sentence + beam;
        for (int64_t c = 0; c < b.candidates; ++c) {
            const double log_prob = b.log_probs[row * b.candidates + c];
            if (std::isnan(log_prob) && alive) *b.all_finite = 0;
            const BeamCandidate candidate = {b.sums[row] + log_prob, log_prob, b.ids[row * b.candidates + c], beam};
            if (best.size() == wanted && !candidate.better_than(best.back())) continue;
            if (best.size() < wanted) best.push_back(candidate);
            size_t at = best.size() - 1;
            for (; at > 0 && candidate.better_than(best[at - 1]); --at) best[at] = best[at - 1];
            best[at] = candidate;
        }
    }
}

// The n-th largest score of a sentence's finished hypotheses; -inf if there are fewer.
inline double nth_best_score(const double* finished, int64_t beam_size, int64_t nbest) {
    std::vector<double> scores(beam_size);
    for (int64_t i = 0; i < beam_size; ++i) scores[i] = finished[i * 4];
    std::sort(scores.begin(), scores.end(), [](double a, double b) { return a > b; });
    return scores[nbest - 1];
}

void advance_sentence(const BeamStep& b, int64_t n, std::vector<BeamCandidate>& best) {
    const double none = -std::numeric_limits<double>::infinity();
    const int64_t width = std::min(b.beam_size, b.beams_per_sentence * b.candidates), sentence = b.sentences[n];
    const bool alive = b.alive[n];
    select_candidates(b, n, (size_t)width, best, alive);
    const int64_t open = b.active_beams[sentence];
    double* finished = b.finished + sentence * 2 * b.beam_size * 4;
    int64_t ended_count = 0;
    double best_sum = none;
    std::vector<uint8_t> parent_ended(b.beams_per_sentence, 0);
    for (int64_t i = 0; i < width; ++i) {
        const BeamCandidate& c = best[i];
        const bool valid = std::isfinite(c.sum) && i < open, ends = c.token == b.eos;
        const bool survives = valid && !ends && b.limits[sentence] > b.step;
        if (valid && ends) {
            parent_ended[c.parent] = 1;
            if (alive) {
                double* entry = finished + (b.beam_size - open + ended_count++) * 4;
                entry[0] = c.sum / b.length_divisors[b.step + 1], entry[1] = (double)b.step;
                entry[2] = (double)c.parent, entry[3] = c.log_prob;
            }
        }
        if (survives) best_sum = std::max(best_sum, c.sum);
        b.new_tokens[n * width + i] = c.token, b.new_parents[n * width + i] = c.parent;
        b.new_sums[n * width + i] = survives ? c.sum : none;
        const int64_t at = (b.step * b.rows + sentence) * b.beam_size + i;
        b.history_parents[at] = c.parent, b.history_tokens[at] = c.token, b.history_log_probs[at] = c.log_prob;
    }
    b.active_beams[sentence] = open - ended_count;
    const bool any_survives = best_sum > none;
    if (alive && !any_survives) {  // nothing can continue: the length limit
        for (int64_t beam = 0; beam < b.beams_per_sentence; ++beam) {
            const double sum = b.sums[n * b.beams_per_sentence + beam];
            if (std::isfinite(sum) && !parent_ended[beam]) b.truncated[sentence * b.beam_size + beam] = sum / b.length_divisors[b.step];
        }
        b.truncated_at[sentence] = b.step;
    }
    const double bound = best_sum / b.length_divisors[b.limits[sentence] + 1];
    b.new_alive[n] = alive && any_survives && !(bound <= nth_best_score(finished, b.beam_size, b.nbest));
}

}  // namespace

extern "C" void dragoman_beam_step(const BeamStep* request) {
    thread_local std::vector<BeamCandidate> best;
    for (int64_t n = 0; n < request->count; ++n) advance_sentence(*request, n, best);
}

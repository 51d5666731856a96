"""Build the explanation of one translation, part by part; what a model lacks is named.

The logit lens is what the model would predict if its decoder ended after each of its layers: the
decoder's final norm and the output matrix are applied to the hidden state after every layer
(nostalgebraist 2020, "interpreting GPT: the logit lens"). The last layer's are the model's own
logits. Early layers write in a space that the output matrix was not trained on, so their ranks are
weak evidence: that a token ranks high says something, that it ranks low says little.

The diagnosis of a search compares its output with a reference. A *search error*: the model prefers
the reference, and the search did not find it. A *model error*: the model itself prefers what was
found (Stahlberg and Byrne, 2019).
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dragoman.attention.attention_mechanism import Mechanism
from dragoman.attention.attention_weight_hooks import find_attentions, record
from dragoman.config import Config
from dragoman.data.inference_batches import pad_batch, pad_sources
from dragoman.decoding.beam_trace import BeamTrace
from dragoman.decoding.hypothesis import Hypothesis
from dragoman.decoding.length_penalty import LengthPenalty, WuLengthPenalty
from dragoman.explain.attention_and_logit_capture import (
    CapturedSite,
    capture_pair,
    layer_numbers,
    locate_sites,
)
from dragoman.explain.attention_head_roles import summarize_heads
from dragoman.explain.attribution import (
    GRADIENT_METHODS,
    TokenAttribution,
    attribute_tokens,
    attribute_with_heads,
    attribution_fields,
    attribution_note,
    known_methods,
)
from dragoman.explain.explanation import (
    Array,
    AttentionSite,
    Attribution,
    Explanation,
    HeadSummary,
    NBestEntry,
    Step,
)
from dragoman.explain.head_ablation import linear_head_estimates
from dragoman.explain.position_encoding_analysis import summarize_positions
from dragoman.explain.teacher_forced_pass import TeacherForcedPair
from dragoman.explain.token_spans import token_texts, tokenize_text
from dragoman.layers.convs2s import ConvS2SAttention
from dragoman.models.encoder_decoder import EncoderDecoder
from dragoman.models.prefix_language_model import PrefixLM
from dragoman.text.sentencepiece_tokenizer import Tokenizer, Tokenizers, normalize
from dragoman.text.special_tokens import BOS, EOS, PAD, UNK

TOP_TOKENS = 8  # runners-up of each step
NEVER_PRODUCED = (PAD, BOS, UNK)  # forbidden at every step
MAX_GRADIENT_WORK = 120_000_000_000  # multiplications: about 3 s on one CPU core
LONG_TEXT = (
    "Attribution takes a backward pass for each token: in a text of this length it is computed for "
    "a token once the page of `dragoman explore` selects it, or for all by --attribution "
    "attention_x_gradient. Until then attention stands in for it."
)
_SAMPLED_WEIGHTS = 64  # of each parameter, for the model's digest

_NO_ATTENTION = (
    "This model has no attention: its decoder sees the source only as the encoder's final state."
)
LENS_TOKENS = 5  # most probable tokens of each layer
RANKS = "lens.rank"  # name of the array
NO_BEAM = "Sampling draws one token after another: there is no beam to show."
# Scores from the incremental decoder and from teacher forcing differ by rounding.
SCORE_TOLERANCE = 1e-4
Verdict = Literal["same", "equal", "search_error", "model_error"]


class ExplainedTarget(NamedTuple):
    """The target to explain, and how it was found."""

    tokens: Sequence[int]  # EOS included if it was reached
    text: str
    forced: int = 0  # first tokens that were given: a prefix, or all of a reference
    masked: Sequence[int] = ()  # forbidden tokens at each step; by default those never produced
    search_sum: float | None = None  # the log-probability that the search found for it


def explain_pair(
    model: EncoderDecoder,
    tokenizers: Tokenizers,
    config: Config,
    *,
    text: str,
    source: Sequence[int],
    target: ExplainedTarget,
    penalty: LengthPenalty,
    request: Mapping[str, Any],
    attribution: str | None = "auto",
) -> Explanation:
    """Return the explanation of a source (without EOS) and the target that a search found.

    Each part is a function of the model and the pair. A part that this model has not is a sentence
    in `missing`, by panel. `attribution` is a method, None for none, or "auto": attention x
    gradient if the model has cross-attention, and input x gradient; none where that would take
    more than `MAX_GRADIENT_WORK`.
    """
    src_text = tokenize_text(
        tokenizers.src,
        normalize(text, tokenizers.src.normalization),
        [*source, EOS],
        lang=config.data.src_lang,
    )
    tgt_text = tokenize_text(tokenizers.tgt, target.text, target.tokens, lang=config.data.tgt_lang)
    captured = capture_pair(model, source, target.tokens)
    sites = [each.site for each in captured.sites]
    arrays: dict[str, Array] = {}
    for each in captured.sites:
        arrays[each.site.tensor], arrays[each.site.contribution] = each.weights, each.contributions
    arrays |= captured.extras
    steps = build_steps(captured.logits, target, tokenizers.tgt)
    total = math.fsum(step.logprob for step in steps)
    missing = {} if sites else {"heads": _NO_ATTENTION, "head": _NO_ATTENTION}
    pair = TeacherForcedPair.build(model, [*source, EOS], target.tokens)
    attributions = list[Attribution]()
    if note := attribution_note(pair):
        missing["attribution"] = note
    estimates: Mapping[str, NDArray[np.float32]] = {}
    attributed = list[TokenAttribution]()
    if attribution == "auto" and not note and pair.gradient_work() > MAX_GRADIENT_WORK:
        attribution, estimates = None, linear_head_estimates(pair)
        missing["attribution"] = LONG_TEXT
    if attribution in ("auto", *GRADIENT_METHODS):
        attributed, estimates = attribute_with_heads(pair)
        if attribution != "auto":
            attributed = [each for each in attributed if each.method == attribution]
    if not attributed and attribution is not None:  # raises for a method that the model has not
        attributed = [attribute_tokens(pair, attribution)]
    if note and attributed and attribution != "occlusion":
        attributed.append(attribute_tokens(pair, "occlusion"))
    for one in attributed:
        fields, found = attribution_fields(one)
        attributions.append(fields)
        arrays |= found
    lens = lens_fields(read_logit_lens(pair), lambda ids: token_texts(tokenizers.tgt, ids))
    positions = summarize_positions(pair, _site_ids(model))
    arrays |= lens.arrays | positions.arrays
    heads = summarize_heads(
        sites,
        arrays,
        src_text,
        tgt_text,
        attribution=arrays[attributions[0].source] if attributions else None,
        ranks=_count_ranks(tokenizers),
    )
    return Explanation(
        model=describe_model(model, tokenizers, config),
        request=dict(request),
        source=src_text,
        target=tgt_text,
        steps=steps,
        score=build_score(steps, penalty),
        sites=sites,
        heads=_with_estimates(heads, sites, estimates),
        lens=lens.fields,
        attribution=attributions,
        positions=positions.positions,
        extras={name.partition(".")[2]: name for name in captured.extras},
        arrays=arrays,
        checks=_check_capture(model, source, target, captured.sites, captured.logits, total),
        missing=missing,
    )


def _site_ids(model: EncoderDecoder) -> dict[str, str]:
    """Return the sites of module paths; of a prefix LM's three the decoder's."""
    return {
        each.module_path: each.site.id
        for each in locate_sites(model)
        if each.part in ("", "decoder")
    }


def _with_estimates(
    heads: Sequence[HeadSummary],
    sites: Sequence[AttentionSite],
    estimates: Mapping[str, NDArray[np.float32]],
) -> list[HeadSummary]:
    """Return the summaries of heads with the estimated effects of their attentions, if any."""
    paths = {site.id: site.path for site in sites}
    if not estimates:
        return list(heads)
    return [
        dataclasses.replace(each, effect_estimate=float(estimates[paths[each.site]][each.head]))
        for each in heads
    ]


def build_steps(logits: Tensor, target: ExplainedTarget, tokenizer: Tokenizer) -> list[Step]:
    """Return a step for each target token from the model's logits (T, V)."""
    log_probs = logits.float().log_softmax(-1)
    tokens = torch.tensor(list(target.tokens), dtype=torch.long)
    chosen = logits.gather(1, tokens.unsqueeze(1))
    ranks = 1 + (logits > chosen).sum(dim=1)
    entropies = -(log_probs.exp() * log_probs.clamp_min(-1e4)).sum(dim=1)
    best = log_probs.topk(min(TOP_TOKENS, log_probs.size(1)), dim=1)
    texts = iter(token_texts(tokenizer, best.indices.flatten().tolist()))
    masked = target.masked or [len(NEVER_PRODUCED)] * len(tokens)
    return [
        Step(
            id=int(token),
            logprob=float(log_probs[at, token]),
            rank=int(ranks[at]),
            entropy=float(entropies[at]),
            forced=at < target.forced,
            masked=int(masked[at]),
            top=[
                (number, next(texts), value)
                for number, value in zip(
                    best.indices[at].tolist(), best.values[at].tolist(), strict=True
                )
            ],
        )
        for at, token in enumerate(tokens.tolist())
    ]


def build_score(steps: Sequence[Step], penalty: LengthPenalty) -> dict[str, Any]:
    """Return the score of a target: its log-probability, and the same under a length penalty."""
    total = math.fsum(step.logprob for step in steps)
    return {
        "sum": total,
        "normalised": penalty.score(total, len(steps)),
        "penalty": describe_penalty(penalty),
    }


def describe_penalty(penalty: LengthPenalty) -> str:
    """Return the length penalty as it is stated: "gnmt 0.6", or "none"."""
    if isinstance(penalty, WuLengthPenalty):
        return f"gnmt {penalty.alpha:g}" if penalty.alpha else "none"
    return type(penalty).__name__


def describe_model(model: EncoderDecoder, tokenizers: Tokenizers, config: Config) -> dict[str, Any]:
    """Return the description of a model in its explanations."""
    return {
        "task": "translate",
        "name": config.recipe or "",
        "digest": model_digest(model, tokenizers),
        "family": model_family(model),
        "layers": {
            "encoder": len(layer_numbers(model.encoder)),
            "decoder": len(layer_numbers(model.decoder)),
        },
        "heads": config.model.heads,
        "d_model": config.model.width,
        "positions": config.model.positions,
        "attributions": known_methods(model),
        "tokenizer": tokenizers.tgt.algorithm,
        "vocab": {"source": len(tokenizers.src), "target": len(tokenizers.tgt)},
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
    }


def model_family(model: EncoderDecoder) -> str:
    """Return the family that decides which panels a model fills."""
    if isinstance(model, PrefixLM):
        return "prefix_lm"
    attentions = list(find_attentions(model).values())
    names = {type(each).__name__ for each in attentions} | {
        type(each.alignment).__name__ for each in attentions if isinstance(each, Mechanism)
    }
    families = {
        "MonotonicAlignment": "monotonic",
        "MochaAlignment": "monotonic",
        "LocationSensitiveAlignment": "location",
        "LSHAttention": "reformer",
        ConvS2SAttention.__name__: "convs2s",
        "SelfAttention": "transformer",
    }
    for name, family in families.items():
        if name in names:
            return family
    blocks = {type(block).__name__ for _, block in model.decoder.blocks()}
    return "convs2s" if "ConvolutionLayer" in blocks else "rnn"


def model_digest(model: EncoderDecoder, tokenizers: Tokenizers) -> str:
    """Return a SHA-256 of the tokenizers, the shapes and a sample of each parameter's weights."""
    hasher = hashlib.sha256(f"{tokenizers.src.digest} {tokenizers.tgt.digest}".encode())
    for name, parameter in model.named_parameters():
        flat = parameter.detach().reshape(-1)
        stride = max(1, flat.numel() // _SAMPLED_WEIGHTS)
        sample = flat[::stride].float().cpu().numpy().astype("<f4")
        hasher.update(json.dumps([name, list(parameter.shape)]).encode())
        hasher.update(sample.tobytes())
    return hasher.hexdigest()


def _count_ranks(tokenizers: Tokenizers) -> dict[str, int]:
    """Return the number of frequency ranks of each side; 0 if they are unknown."""
    return {
        side: 1 + max((rank for rank in tokenizer.frequency_ranks if rank is not None), default=-1)
        for side, tokenizer in (("source", tokenizers.src), ("target", tokenizers.tgt))
    }


def _check_capture(
    model: EncoderDecoder,
    source: Sequence[int],
    target: ExplainedTarget,
    sites: Sequence[CapturedSite],
    logits: Tensor,
    total: float,
) -> dict[str, float]:
    """Return how far the capture is from what must hold.

    `row_sum`: rows of weights from 1; `output`: weights times values from the module's, relative;
    `capture`: logits from those of a pass without capture; `score`: summed log-probability from
    that of the search.
    """
    sums = [each.weights.sum(axis=-1) for each in sites if each.site.sum == "one"]
    checks = {
        "row_sum": max((float(np.abs(each - 1.0).max(initial=0.0)) for each in sums), default=0.0),
        "output": max((each.output_error for each in sites), default=0.0),
        "capture": float((plain_logits(model, source, target.tokens) - logits).abs().max()),
    }
    if target.search_sum is not None:
        checks["score"] = abs(total - target.search_sum)
    return checks


@torch.inference_mode()
def plain_logits(model: EncoderDecoder, source: Sequence[int], target: Sequence[int]) -> Tensor:
    """Return the logits (T, V) of a teacher-forced pass in which nothing is recorded."""
    device = next(model.parameters()).device
    src, _ = pad_sources([source], device)
    tgt_in, _ = pad_batch([[BOS, *target[:-1]]], device)
    return model(src, tgt_in)[0].float().cpu()


# The logit lens


class LogitLens(NamedTuple):
    """The predictions after each of L decoder layers, for T target positions."""

    layers: list[str]  # "d0", "d1" and so on
    ranks: NDArray[np.int32]  # (L, T) rank of the target token; 1 is the most probable
    top_ids: NDArray[np.int64]  # (L, T, 5) most probable tokens, best first
    top_probs: NDArray[np.float32]  # (L, T, 5) their probabilities
    final_logits: Tensor  # (T, V) of the last layer: the model's own
    skipped: int  # layers of another width than the last, which the output matrix cannot read


class LensFields(NamedTuple):
    """The lens as an explanation has it, and the arrays that it names."""

    fields: dict[str, Any]  # layers, rank, top, exact_last
    arrays: dict[str, NDArray[Any]]


@torch.no_grad()
def read_logit_lens(pair: TeacherForcedPair, *, top: int = LENS_TOKENS) -> LogitLens:
    """Return the rank of each target token and the most probable tokens after each layer."""
    model, outputs = pair.model, list[Tensor]()
    # Explicit attention weights, as in the pass whose numbers stand beside these.
    with record(model, list(find_attentions(model))):
        pair.hidden(pair.embed_source(), pair.embed_target(), layer_outputs=outputs)
    width = outputs[-1].size(-1)
    layers, ranks, top_ids, top_probs = [], [], [], []
    logits = torch.empty(0)
    for number, output in enumerate(outputs):
        if output.size(-1) != width:
            continue
        logits = model.project(model.output(model.decoder.finish(output)))[0].float()  # (T, V)
        best = logits.topk(min(top, logits.size(-1)), dim=-1)
        layers.append(f"d{number}")
        ranks.append(token_ranks(logits, pair.tgt_out))
        top_ids.append(best.indices)
        top_probs.append((best.values - logits.logsumexp(-1, keepdim=True)).exp())
    return LogitLens(
        layers,
        torch.stack(ranks).cpu().numpy().astype(np.int32),
        torch.stack(top_ids).cpu().numpy(),
        torch.stack(top_probs).cpu().numpy(),
        logits,
        len(outputs) - len(layers),
    )


def lens_fields(lens: LogitLens, name_tokens: Callable[[list[int]], list[str]]) -> LensFields:
    """Return the lens as an explanation has it; `name_tokens` returns the texts of token ids."""
    texts = iter(name_tokens(lens.top_ids.flatten().tolist()))
    top = [
        [[[next(texts), round(prob, 5)] for prob in position] for position in layer]
        for layer in lens.top_probs.tolist()
    ]
    fields = {"layers": lens.layers, "rank": RANKS, "top": top, "exact_last": True}
    return LensFields(fields, {RANKS: lens.ranks})


def token_ranks(logits: Tensor, tokens: Tensor) -> Tensor:
    """Return the rank (T,) of each token among its logits (T, V): 1 plus the number above it."""
    chosen = logits.gather(1, tokens.unsqueeze(1))
    return (logits > chosen).sum(dim=1) + 1


# How the output was found


class TracedSearch(NamedTuple):
    """The n best of one source, with the trace of the search."""

    hypotheses: Sequence[Hypothesis]  # best first
    texts: Sequence[str]
    trace: BeamTrace | None  # None if the strategy has no beam
    masked: Sequence[int]  # tokens that were forbidden at each position of the best
    max_length: int  # of an output, EOS not counted
    prefix: Sequence[int] = ()  # the forced tokens

    @property
    def best(self) -> Hypothesis:
        """The best hypothesis."""
        return self.hypotheses[0]


class Diagnosis(NamedTuple):
    """Whether the search or the model is why a reference was not the output."""

    verdict: Verdict
    sentence: str


def diagnose(
    *,
    reference: float,
    found: float,
    same_tokens: bool = False,
    finished: bool = True,
    name: str = "the reference",
) -> Diagnosis:
    """Compare the normalised score of a reference with that of what the search found.

    An output that is not `finished` ranks behind every finished one, whatever its score.
    """
    if same_tokens:
        return Diagnosis("same", f"The search found {name}, with a score of {found:.2f}.")
    scores = f"{reference:.2f} against {found:.2f}"
    if not finished:
        return Diagnosis(
            "search_error",
            f"Search error: the output was cut at its maximum length, so {name}, which ends, "
            f"ranks before it whatever their scores: {reference:.2f} for {name}, {found:.2f} for "
            "the output.",
        )
    if abs(reference - found) <= SCORE_TOLERANCE:
        return Diagnosis("equal", f"The model scores {name} as it scores its own output, {scores}.")
    if reference > found:
        return Diagnosis(
            "search_error",
            f"Search error: the model scores {name} higher than its own output, {scores}, "
            "but the search did not find it; try a wider beam.",
        )
    return Diagnosis(
        "model_error",
        f"Model error: the model scores {name} lower than its own output, {scores}, "
        "so no search would prefer it.",
    )


def add_search(
    explanation: Explanation,
    searched: TracedSearch,
    tokenizer: Tokenizer,
    *,
    has_reference: bool = False,
) -> Explanation:
    """Return the explanation with its n-best list and beam trace.

    If its target is a reference, `score` also has the score of what was found (`own`) and how the
    two compare (`reference`).
    """
    own, score = searched.best, dict(explanation.score)
    if has_reference:
        found = diagnose(
            reference=score["normalised"],
            found=own.score,
            same_tokens=[token.id for token in explanation.target.tokens] == _written(own),
            finished=own.finished,
        )
        score["own"] = {"sum": own.total, "normalised": own.score}
        score["reference"] = {
            "sum": score["sum"],
            "normalised": score["normalised"],
            "verdict": found.verdict,
            "sentence": found.sentence,
        }
    trace = searched.trace
    ids = {token for each in searched.hypotheses for token in _written(each)}
    if trace is not None:
        ids |= {int(token) for token in trace.token[1:]}
    named = sorted(ids)
    return dataclasses.replace(
        explanation,
        score=score,
        nbest=list_nbest(searched),
        beam=trace,
        missing=dict(explanation.missing) | ({"beam": NO_BEAM} if trace is None else {}),
        token_texts=dict(zip(named, token_texts(tokenizer, named), strict=True)),
    )


def _written(hypothesis: Hypothesis) -> list[int]:
    """Return the tokens of a hypothesis, EOS included if it is finished."""
    return [*hypothesis.tokens, EOS] if hypothesis.finished else list(hypothesis.tokens)


def list_nbest(searched: TracedSearch) -> list[NBestEntry]:
    """Return the n-best list with the last node of each in the trace."""
    trace = searched.trace
    leaves: Sequence[int | None] = (
        [None] * len(searched.hypotheses) if trace is None else trace.leaves
    )
    return [
        NBestEntry(list(each.tokens), text, each.total, each.score, leaf)
        for each, text, leaf in zip(searched.hypotheses, searched.texts, leaves, strict=True)
    ]

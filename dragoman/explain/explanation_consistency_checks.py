"""Check that an explanation matches what the model computed.

Every check returns sentences, none if it holds. `check_explanation` reads the explanation alone;
`check_against_model` runs the model again, with hooks of PyTorch on its modules, on a path that
shares nothing with the capture but the model itself. A sentence begins with the name of its check,
such as "row sums" or "token spans"; the tests run all of them on every family of models.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import regex  # type: ignore[import-untyped]
import torch
from torch import Tensor, nn

from dragoman.attention.attention_weight_hooks import AttentionRecord, find_attentions, record
from dragoman.attention.lsh import LSHAttention
from dragoman.attention.multi_head import MultiHead
from dragoman.data.inference_batches import pad_batch, pad_sources
from dragoman.errors import DataError
from dragoman.explain.attention_and_logit_capture import LocatedSite, locate_sites
from dragoman.explain.explanation import Explanation, TokenizedText
from dragoman.explain.explanation_json import decode_tensor, pool_matrix
from dragoman.explain.explanation_schema_validation import find_problems
from dragoman.layers.convs2s import ConvS2SAttention
from dragoman.models.encoder_decoder import EncoderDecoder
from dragoman.text.special_tokens import BOS, EOS, byte_of_token

ROW_SUM = 1e-5
OUTPUT = 1e-4  # relative to the largest output
LOG_PROB = 1e-4
SCORE = 1e-4
POOLED = 1e-6
QUANTIZED = 0.004  # of the scale

_PENALTY = re.compile(r"gnmt (\d+(?:\.\d+)?(?:e-?\d+)?)")


def check_explanation(explanation: Explanation) -> list[str]:
    """Return the inconsistencies within an explanation: weights, score, steps, token spans."""
    return [
        *_check_rows(explanation),
        *_check_score(explanation),
        *_check_steps(explanation),
        *check_spans(explanation.source),
        *check_spans(explanation.target),
    ]


def check_against_model(explanation: Explanation, model: EncoderDecoder) -> list[str]:
    """Return where an explanation of a translation differs from the model: outputs and steps."""
    source = [token.id for token in explanation.source.tokens if token.id != EOS]
    target = [token.id for token in explanation.target.tokens]
    return [
        *_check_weights(explanation, model, source, target),
        *_check_log_probs(explanation, model, source, target),
    ]


def check_wire_form(explanation: Explanation, budget: int | None) -> list[str]:
    """Return the inconsistencies of the JSON form of an explanation, pooled rows included."""
    values = explanation.to_dict(budget)
    problems = [f"JSON form: {problem}" for problem in find_problems(values)]
    size = len(explanation.to_json(budget).encode())
    if budget is not None and size > budget:
        problems.append(f"JSON form: it must have at most {budget} bytes; found {size}")
    if values["limits"]["bytes"] != size:
        problems.append(
            f"JSON form: limits.bytes must be {size}; found {values['limits']['bytes']}"
        )
    for name, entry in values["tensors"].items():
        exact = explanation.arrays.get(name)
        if exact is None or name in explanation.pools:
            continue
        pool = entry["pool"]
        expected = exact if pool is None else pool_matrix(exact, pool["q"], pool["k"])
        if pool is not None and not np.allclose(
            expected.sum(-1), _mean_rows(exact.sum(-1), pool["q"]), atol=POOLED
        ):
            problems.append(f"pooled rows: {name} must sum to the mean of its rows' sums")
        found = decode_tensor(entry)
        if found.shape != expected.shape:
            problems.append(
                f"JSON form: {name} must have shape {expected.shape}; found {found.shape}"
            )
        elif entry["dtype"] in ("u8", "i8") and found.size:
            error = float(np.abs(found - expected).max())
            if error > QUANTIZED * max(entry["scale"], 1e-12):
                problems.append(
                    f"JSON form: {name} must be within {QUANTIZED} of exact; found {error}"
                )
    try:
        again = Explanation.from_json(explanation.to_json(budget))
    except DataError as error:
        return [*problems, f"JSON form: it must be readable; found: {error}"]
    if again.digest != explanation.digest:
        problems.append("JSON form: it must keep the digest")
    return problems


def check_spans(text: TokenizedText) -> list[str]:
    """Return the problems of the spans of a text's tokens."""
    spans = [token.span for token in text.tokens]
    problems = list[str]()
    at = 0
    for token in text.tokens:
        if token.span[0] != at or token.span[1] < at:
            problems.append(f"token spans: {token.text!r} must begin at {at}; found {token.span}")
        at = token.span[1]
    if text.tokens and at != len(text.text):
        problems.append(f"token spans: they must end at {len(text.text)}; found {at}")
    if "".join(text.text[start:end] for start, end in spans) != text.text and text.tokens:
        problems.append("token spans: joined they must be the text")
    borders = {0, *(found.end() for found in regex.finditer(r"\X", text.text))}
    problems += [
        f"token spans: a span must not split a grapheme; found {token.text!r} at {token.span}"
        for token in text.tokens
        if not set(token.span) <= borders and byte_of_token(token.text) is None
    ]
    ranges = [at for word in text.words for at in range(*word)]
    if ranges != sorted(set(ranges)):
        problems.append(
            f"token spans: words must be ascending ranges of tokens; found {text.words}"
        )
    return problems


def _check_rows(explanation: Explanation) -> Iterator[str]:
    """Yield the problems of row sums, masked keys, and shapes."""
    lengths = {
        "source": len(explanation.source.tokens),
        "target": len(explanation.target.tokens),
        "target_in": len(explanation.target.tokens),
    }
    for site in explanation.sites:
        weights = explanation.arrays.get(site.tensor)
        if weights is None:
            continue
        expected = (
            site.heads,
            lengths.get(site.query, weights.shape[1]),
            lengths.get(site.key, weights.shape[2]),
        )
        if site.tensor not in explanation.pools and weights.shape != expected:
            yield f"weights: {site.id} must have shape {expected}; found {weights.shape}"
            continue
        sums = weights.sum(axis=-1)
        if site.sum == "one" and np.abs(sums - 1.0).max(initial=0.0) > ROW_SUM:
            yield f"row sums: {site.id} must sum to 1; found {sums.min()} to {sums.max()}"
        if site.sum == "sub" and sums.max(initial=0.0) > 1.0 + ROW_SUM:
            yield f"row sums: {site.id} must sum to at most 1; found {sums.max()}"
        if site.sum != "none" and weights.min(initial=0.0) < 0.0:
            yield f"weights: {site.id} must not be negative; found {weights.min()}"
        if (
            site.causal
            and site.tensor not in explanation.pools
            and np.triu(weights, k=1 + weights.shape[2] - weights.shape[1]).any()
        ):
            yield f"weights: {site.id} must not attend to later positions"


def _check_score(explanation: Explanation) -> Iterator[str]:
    """Yield where the score is not the sum of the steps, or not by the stated penalty."""
    total, stated = explanation.score.get("sum"), explanation.score.get("normalised")
    if total is None or stated is None:
        return
    found = math.fsum(step.logprob for step in explanation.steps)
    if abs(found - total) > SCORE * max(1.0, abs(total)):
        yield f"score: it must be the sum of the steps, {found}; found {total}"
    penalty = _PENALTY.fullmatch(str(explanation.score.get("penalty")))
    alpha = float(penalty.group(1)) if penalty else 0.0
    expected = total / ((5.0 + len(explanation.steps)) / 6.0) ** alpha
    if abs(expected - stated) > SCORE * max(1.0, abs(expected)):
        yield f"score: normalised, it must be {expected}; found {stated}"


def _check_steps(explanation: Explanation) -> Iterator[str]:
    """Yield the problems of the distributions of the steps."""
    if [step.id for step in explanation.steps] != [
        token.id for token in explanation.target.tokens
    ] and explanation.model.get("task", "translate") == "translate":
        yield "steps: there must be a step for each target token, with its id"
    for at, step in enumerate(explanation.steps):
        values = [logprob for _, _, logprob in step.top]
        if values != sorted(values, reverse=True):
            yield f"steps: the tokens of step {at} must be the most probable first"
        if math.fsum(math.exp(value) for value in values) > 1.0 + 1e-4:
            yield f"steps: the probabilities of step {at} must sum to at most 1"
        if step.rank <= len(step.top):
            token_id, _, logprob = step.top[step.rank - 1]
            # Equal logits share a rank.
            if token_id != step.id and abs(logprob - step.logprob) > LOG_PROB:
                yield f"steps: token {step.id} of step {at} must have rank {step.rank} in its top"


def _check_weights(
    explanation: Explanation,
    model: EncoderDecoder,
    source: Sequence[int],
    target: Sequence[int],
) -> Iterator[str]:
    """Yield where weights times values, projected, differ from the module's output."""
    device = next(model.parameters()).device
    src, _ = pad_sources([source], device)
    tgt_in, _ = pad_batch([[BOS, *target[:-1]]], device)
    outputs, records = _run_with_hooks(model, src, tgt_in)
    by_module = dict[str, list[LocatedSite]]()
    for located in locate_sites(model):
        by_module.setdefault(located.module_path, []).append(located)
    attentions = find_attentions(model)
    for path, parts in by_module.items():
        if path not in records:
            continue
        whole = torch.zeros_like(records[path].weights[0])
        for located in parts:
            weights = explanation.arrays.get(located.site.tensor)
            rows, columns = located.part_slices(src.size(1))
            part = whole[:, rows, columns]
            if weights is None or part.shape != weights.shape:
                yield f"outputs: {located.site.id} must have weights of shape {tuple(part.shape)}"
                break
            part.copy_(torch.from_numpy(np.ascontiguousarray(weights)))
        else:
            expected = outputs[path]
            found = _project(attentions[path], whole @ records[path].values[0], src.size(1))
            error = float((found - expected).abs().max() / expected.abs().max().clamp_min(1e-9))
            if error > OUTPUT:
                sites = ", ".join(located.site.id for located in parts)
                yield f"outputs: {sites} must add up to the output of {path}; found {error:.2g} off"
            yield from _check_contributions(
                explanation, attentions[path], records[path].values[0], parts, src.size(1)
            )


def _check_contributions(
    explanation: Explanation,
    module: nn.Module,
    values: Tensor,
    parts: Sequence[LocatedSite],
    sources: int,
) -> Iterator[str]:
    """Yield where a contribution is not the norm of one weight times its projected value."""
    nothing = _project(module, torch.zeros_like(values), sources)
    norms = list[Tensor]()
    for head in range(values.size(0)):
        alone = torch.zeros_like(values)
        alone[head] = values[head]
        norms.append((_project(module, alone, sources) - nothing).norm(dim=-1))
    for located in parts:
        contributions = explanation.arrays.get(located.site.contribution)
        weights = explanation.arrays.get(located.site.tensor)
        if contributions is None or weights is None:
            continue
        keys = torch.stack(norms)[:, located.part_slices(sources)[1]].cpu().numpy()  # (H, K)
        expected = np.abs(weights) * keys[:, None, :]
        scale = max(float(expected.max(initial=0.0)), 1e-9)
        if np.abs(contributions - expected).max(initial=0.0) > OUTPUT * scale:
            yield f"contributions: {located.site.id} must have norms of weight times value"


def _run_with_hooks(
    model: EncoderDecoder, src: Tensor, tgt_in: Tensor
) -> tuple[dict[str, Tensor], dict[str, AttentionRecord]]:
    """Run the model; return the output (T, D) of each attention, and the records of its values."""
    outputs = dict[str, Tensor]()
    handles = []

    def keep(path: str) -> Callable[..., None]:
        def hook(_: nn.Module, __: Any, output: Any) -> None:
            outputs[path] = (output if isinstance(output, Tensor) else output.context)[0].float()

        return hook

    try:
        for path, module in find_attentions(model).items():
            handles.append(module.register_forward_hook(keep(path)))
        with torch.inference_mode(), record(model) as records:
            model(src, tgt_in)
    finally:
        for handle in handles:
            handle.remove()
    for path, recorded in records.items():
        # An RNN decoder calls `Mechanism.step`, which no hook sees: its context is in the record.
        outputs.setdefault(path, recorded.output[0].transpose(0, 1).flatten(1).float())
    return outputs, dict(records)


def _project(module: nn.Module, contexts: Tensor, sources: int) -> Tensor:
    """Return the output (T, D) of an attention for the contexts (H, T, Dv) of its heads."""
    joined = contexts.transpose(0, 1).flatten(1)
    with torch.inference_mode():
        if isinstance(module, (MultiHead, LSHAttention)):
            return module.output(joined).float()
        if isinstance(module, ConvS2SAttention):
            return module.output(joined * sources**0.5).float()
    return joined.float()


def _check_log_probs(
    explanation: Explanation,
    model: EncoderDecoder,
    source: Sequence[int],
    target: Sequence[int],
) -> Iterator[str]:
    """Yield where the steps are not those of a plain pass and of the incremental decoder."""
    device = next(model.parameters()).device
    src, _ = pad_sources([source], device)
    tgt_in, _ = pad_batch([[BOS, *target[:-1]]], device)
    with torch.inference_mode():
        forced = model(src, tgt_in)[0].float().log_softmax(-1)
        state, steps = model.start(model.encode(src, None)), list[Tensor]()
        for token in tgt_in[0]:
            logits, state = model.step(token.unsqueeze(0), state)
            steps.append(logits[0].float().log_softmax(-1))
    for name, log_probs in (("a teacher-forced pass", forced), ("the decoder", torch.stack(steps))):
        for at, (step, token) in enumerate(zip(explanation.steps, target, strict=True)):
            expected = float(log_probs[at, token])
            if abs(expected - step.logprob) > LOG_PROB:
                yield (
                    f"steps: step {at} must have the log-probability of {name}, {expected:.6f}; "
                    f"found {step.logprob:.6f}"
                )
                break
            best = int(log_probs[at].argmax())
            if step.top and abs(float(log_probs[at, best]) - step.top[0][2]) > LOG_PROB:
                yield f"steps: the most probable token of step {at} must be that of {name}"
                break


def _mean_rows(values: np.ndarray[Any, Any], edges: Sequence[int]) -> np.ndarray[Any, Any]:
    totals = np.add.reduceat(values.astype(np.float64), np.asarray(edges[:-1]), axis=-1)
    means: np.ndarray[Any, Any] = totals / np.diff(edges)
    return means

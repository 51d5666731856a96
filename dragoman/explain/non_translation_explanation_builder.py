"""Explanations of the tasks besides translation, made from one input that can be run again.

A `TaskExplainer` (`task_explainers/base.py`) is run with its attentions recorded, with
parts switched off, and with gradients; everything in the explanation comes from such passes.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from dragoman.attention.attention_weight_hooks import (
    AttentionRecords,
    WeightsEdit,
    edit,
    record,
)
from dragoman.errors import ConfigError, suggest_name
from dragoman.explain.attention_head_roles import summarize_heads
from dragoman.explain.explanation import (
    Ablation,
    Attribution,
    Explanation,
    HeadSummary,
    Step,
)
from dragoman.explain.task_explainers.base import (
    INPUT_X_GRADIENT,
    INTEGRATED_GRADIENTS,
    OCCLUSION,
    VALUE_ZEROING,
    Floats,
    RecordedSite,
    Switch,
    TaskExplainer,
    to_array,
)

TOP = 8  # candidates of a step
MIN_POINTS, MAX_POINTS = 32, 256  # between zero vectors and the input's, of integrated gradients
MAX_GAP = 0.05  # from completeness; more points are taken above it
ARRAY_NAMES = {
    INPUT_X_GRADIENT: "ixg",
    INTEGRATED_GRADIENTS: "ig",
    VALUE_ZEROING: "vz",
    OCCLUSION: "occ",
}


def explain_task(
    given: TaskExplainer, *, off: Sequence[str] = (), attribution: str | None = INPUT_X_GRADIENT
) -> Explanation:
    """Return the explanation of an input, with some parts of the model switched off."""
    if attribution == INPUT_X_GRADIENT and not given.embeddings:
        attribution = OCCLUSION
    if attribution is not None:
        _check_method(given, attribution)
    changed = _Ablations(given, off)
    given = given.decide(changed.off, changed.edits)
    with torch.no_grad(), changed.apply(), record(given.model) as records:
        log_probs = given.run(off=changed.off)[0]  # (T, V)
    ids = given.choose(log_probs)
    seen = given.read_sites(records)
    arrays = dict[str, NDArray[Any]]()
    for each in seen:
        arrays[each.site.tensor] = to_array(each.weights)
        arrays[each.site.contribution] = to_array(each.contributions)
    explained = given.explained(log_probs.unsqueeze(0), ids)[0]
    missing = dict(given.missing)
    if given.num_tokens > len(given.source.tokens):
        missing["text"] = (
            f"The first {len(given.source.tokens):,} of {given.num_tokens:,} tokens are explained: "
            "the model reads no more at once."
        )
    found = Explanation(
        model={
            "task": given.task,
            "name": given.config.recipe or "",
            "heads": given.config.model.heads,
            "d_model": given.config.model.width,
            "off_switches": list(given.special_switches),
            "attributions": given.attributions,
            **given.model_fields,
        },
        request={**given.request, "off": list(off)},
        source=given.source,
        target=given.target(ids),
        steps=make_steps(given, log_probs, ids) if given.is_distribution else [],
        score=_make_score(given, explained),
        sites=[each.site for each in seen],
        positions=given.positions,
        arrays=arrays,
        checks=_make_checks(given, seen, log_probs, changed, records),
        missing=missing,
    )
    estimates = estimate_effects(given, seen, ids, changed)
    found.heads.extend(_summarize_heads(found, estimates))
    for what, (name, array) in given.extras(seen, ids).items():
        found.extras[what], arrays[name] = name, array
    if not seen:
        missing["heads"] = missing["head"] = "This model has no attention."
    if attribution is not None:
        made, values = _attribute(given, ids, attribution, changed)
        found.attribution.append(made)
        arrays.update(values)
    lens = given.read_lens(ids, changed.off) if not changed.edits else None
    if lens is not None:
        arrays.update(lens[1])
    return replace(found, lens=None if lens is None else lens[0])


def make_steps(given: TaskExplainer, log_probs: Tensor, ids: Sequence[int]) -> list[Step]:
    """Return the steps of log-probabilities (T, V)."""
    log_probs = log_probs.float().cpu()
    best = log_probs.topk(min(TOP, log_probs.size(1)), dim=1)
    output_ids, values = best.indices.tolist(), best.values.tolist()
    names = given.name_outputs(ids, output_ids)
    # A log-probability of minus infinity counts for nothing.
    entropies = -(log_probs.exp() * log_probs.clamp(min=-1e30)).sum(dim=1)
    return [
        Step(
            id=token,
            logprob=float(row[token]),
            rank=int((row > row[token]).sum()) + 1,
            entropy=float(entropy),
            forced=at < given.forced,
            masked=given.forbidden,
            top=list(zip(output_ids[at], names[at], values[at], strict=True)),
        )
        for at, (token, row, entropy) in enumerate(zip(ids, log_probs, entropies, strict=True))
    ]


def ablate_task(given: TaskExplainer, explanation: Explanation, heads: Sequence[str]) -> Ablation:
    """Return the effect of switching heads off, besides those that are off already.

    `effect` is the change of each explained output; the new output, its steps and its score are
    those of a fresh pass.
    """
    before = list(explanation.request.get("off", ()))
    off = [*before, *(head for head in heads if head not in before)]
    ids = [step.id for step in explanation.steps] or [0]
    base = _run_explained(given, ids, _Ablations(given, before))
    effect = _run_explained(given, ids, _Ablations(given, off)) - base
    new = explain_task(given, off=off, attribution=None)
    return Ablation(
        off=list(heads),
        effect=[float(each) for each in effect],
        sum_change=float(effect.sum()),
        target=new.target,
        steps=new.steps,
        score=new.score,
    )


def task_head_effects(
    given: TaskExplainer, explanation: Explanation
) -> Iterator[tuple[str, float]]:
    """Yield each head with the change of the explained outputs' sum when it is switched off."""
    before = list(explanation.request.get("off", ()))
    ids = [step.id for step in explanation.steps] or [0]
    base = _run_explained(given, ids, _Ablations(given, before)).sum()
    for summary in explanation.heads:
        changes = _Ablations(given, [*before, summary.name])
        yield summary.name, float(_run_explained(given, ids, changes).sum() - base)


def attribute_task(
    given: TaskExplainer, explanation: Explanation, method: str
) -> tuple[Attribution, dict[str, NDArray[Any]]]:
    """Return the attribution of an explanation's outputs to its input by a method."""
    _check_method(given, method)
    ids = [step.id for step in explanation.steps] or [0]
    return _attribute(given, ids, method, _Ablations(given, explanation.request.get("off", ())))


class _Ablations:
    """Parts of a model that are switched off: edits of attention weights, and other parts."""

    def __init__(self, given: TaskExplainer, names: Sequence[str]) -> None:
        self.given = given
        special = given.special_switches
        switches, self.off = list[Switch](), list[str]()
        wanted = list(dict.fromkeys(names))
        heads = [name for name in wanted if name not in special]
        by_head = find_switches(given) if heads else {}
        for name in wanted:
            if name not in special and name not in by_head:
                known = [*by_head, *special]
                raise ConfigError(
                    [
                        "what is switched off must be a head of the model, such as "
                        f"{next(iter(known), 'none: it has no attention')}; found {name!r}; "
                        f"{suggest_name(name, known) if known else 'leave it out'}"
                    ]
                )
            if name in special and not special[name]:
                self.off.append(name)
            switches += special[name] if name in special else [by_head[name]]
        self.edits = combine_switches(switches)

    @contextmanager
    def apply(self) -> Iterator[None]:
        """Switch the parts off within the block."""
        with edit(self.given.model, self.edits):
            yield


def find_switches(given: TaskExplainer) -> dict[str, Switch]:
    """Return the switches of all heads by name, such as "e0.1"."""
    with torch.no_grad(), record(given.model) as records:
        given.run()
    return {
        f"{seen.site.id}.{head}": switch
        for seen in given.read_sites(records)
        for head, switch in enumerate(seen.switches)
    }


def combine_switches(switches: Sequence[Switch]) -> dict[str, WeightsEdit]:
    """Return one edit for each attention that applies all of its switches."""
    by_path: dict[str, list[WeightsEdit]] = {}
    for switch in switches:
        by_path.setdefault(switch.path, []).append(switch.off)

    def chain(edits: Sequence[WeightsEdit]) -> WeightsEdit:
        def apply_all(weights: Tensor) -> Tensor:
            for each in edits:
                weights = each(weights)
            return weights

        return apply_all

    return {path: chain(edits) for path, edits in by_path.items()}


@torch.no_grad()
def _run_explained(given: TaskExplainer, ids: Sequence[int], changes: _Ablations) -> Tensor:
    """Return the explained numbers (T,) of given outputs, with explicit attention weights."""
    # Recorded, so that an unchanged pass has the bits of an explanation.
    with changes.apply(), record(given.model):
        return given.explained(given.run(off=changes.off), ids)[0].double().cpu()


def _make_score(given: TaskExplainer, explained: Tensor) -> dict[str, Any]:
    """Return the score: the sum of the log-probabilities, or the predicted number."""
    total = math.fsum(explained.tolist())
    if not given.is_distribution:
        return {"value": total, **given.score_fields}
    return {"sum": total, "normalised": total, "penalty": "none", **given.score_fields}


def _make_checks(
    given: TaskExplainer,
    seen: Sequence[RecordedSite],
    log_probs: Tensor,
    changes: _Ablations,
    records: AttentionRecords,
) -> dict[str, float]:
    """Return how exactly the numbers fit the model: see the checks in docs/explanation.md."""
    sums = [
        (each.weights.sum(dim=-1) - 1).abs().max().item()
        for each in seen
        if each.site.sum == "one" and not changes.edits and each.weights.numel()
    ]
    outputs = [
        (
            (call.weights @ call.values - call.output).abs().max()
            / call.output.abs().max().clamp(1e-6)
        )
        for path in records
        for call in records.calls(path)
        if call.output.numel()
    ]
    checks = {
        "row_sum": max(sums, default=0.0),
        "output": max((each.item() for each in outputs), default=0.0),
    }
    if not changes.edits:
        with torch.no_grad():
            plain = given.run(off=changes.off)[0]
        # Relative to large numbers, such as log-posteriors of points far from every component.
        change = (plain - log_probs).abs() / log_probs.abs().clamp(min=1)
        checks["capture"] = float(change[log_probs.isfinite()].max())
    return checks


def _summarize_heads(found: Explanation, estimates: Mapping[str, float]) -> list[HeadSummary]:
    """Return the labels, entropy, distance and estimated effect of every head."""
    kinds = {site.id: site.kind for site in found.sites}
    return [
        replace(
            each,
            distance=None if kinds[each.site] == "pool" else each.distance,
            effect_estimate=estimates.get(each.name),
        )
        for each in summarize_heads(found.sites, found.arrays, found.source, found.target)
    ]


def estimate_effects(
    given: TaskExplainer, seen: Sequence[RecordedSite], ids: Sequence[int], changes: _Ablations
) -> dict[str, float]:
    """Return the first-order change of the explained sum when each head is switched off.

    A gate between the weights (1) and the weights without the head (0) has a gradient; the estimate
    is minus it.
    """
    gates: dict[str, Tensor] = {}
    by_path: dict[str, list[tuple[Tensor, WeightsEdit]]] = {}
    for each in seen:
        for head, switch in enumerate(each.switches):
            gate = torch.ones((), device=each.weights.device, requires_grad=True)
            gates[f"{each.site.id}.{head}"] = gate
            by_path.setdefault(switch.path, []).append((gate, switch.off))
    if not gates:
        return {}

    def make_edit(parts: Sequence[tuple[Tensor, WeightsEdit]]) -> WeightsEdit:
        def apply_gates(weights: Tensor) -> Tensor:
            fixed = weights.detach()
            return weights + sum(
                ((1 - gate) * (off(fixed) - fixed) for gate, off in parts),
                torch.zeros_like(weights),
            )

        return apply_gates

    edits = {path: make_edit(parts) for path, parts in by_path.items()}
    with torch.enable_grad(), changes.apply(), edit(given.model, edits):
        total = given.explained(given.run(off=changes.off), ids).sum()
        gradients = torch.autograd.grad(total, list(gates.values()), allow_unused=True)
    return {
        name: 0.0 if gradient is None else -float(gradient)
        for name, gradient in zip(gates, gradients, strict=True)
    }


# Attribution


def _check_method(given: TaskExplainer, method: str) -> None:
    """Raise ConfigError for a method of attribution that the model does not allow."""
    known = given.attributions
    if method not in known:
        raise ConfigError(
            [
                f"an attribution of this model must be one of {', '.join(known)}; found "
                f"{method!r:.60}; {suggest_name(method, known, listed=True)}"
            ]
        )


def _attribute(
    given: TaskExplainer, ids: Sequence[int], method: str, changes: _Ablations
) -> tuple[Attribution, dict[str, NDArray[Any]]]:
    """Return an attribution and its array (T, S)."""
    gap = None
    if method == OCCLUSION:
        with changes.apply():
            values = given.occlude(ids)
    elif method == VALUE_ZEROING:
        values = zero_each_value(given, ids, changes)
    elif method == INTEGRATED_GRADIENTS:
        values, gap = integrated_gradients(given, ids, changes)
    else:
        values = input_x_gradient(given, ids, changes)
    source, target = f"{ARRAY_NAMES[method]}.s", f"{ARRAY_NAMES[method]}.t"
    values = np.ascontiguousarray(values, np.float32)
    arrays = {source: np.ascontiguousarray(values[:, : given.split])}
    if values.shape[1] > given.split:
        arrays[target] = np.ascontiguousarray(values[:, given.split :])
    return (
        Attribution(
            method=method,
            source=source,
            target=target if target in arrays else None,
            signed=True,
            gap=gap,
        ),
        arrays,
    )


def input_x_gradient(
    given: TaskExplainer, ids: Sequence[int], changes: _Ablations, *, scale: float = 1.0
) -> Floats:
    """Return the input times the gradient of each explained number: (T, S).

    With a `scale` the gradient is that at so much of the input's vectors.
    """
    rows = []
    size = given.max_copies
    for first in range(0, len(ids), size):
        count = min(size, len(ids) - first)
        with torch.enable_grad(), _scale_outputs(given.embeddings, scale) as taps, changes.apply():
            explained = given.explained(given.run(count, off=changes.off), ids)  # (count, T)
            chosen = explained[torch.arange(count), torch.arange(first, first + count)].sum()
            leaves = [leaf for calls in taps.values() for _, leaf in calls]
            gradients = iter(torch.autograd.grad(chosen, leaves, allow_unused=True))
        parts = {
            number: [
                torch.zeros(value.shape[:-1]) if gradient is None else (value * gradient).sum(-1)
                for (value, _), gradient in zip(calls, gradients, strict=False)
            ]
            for number, calls in taps.items()
        }
        rows.append(given.sum_inputs(parts, count).float().cpu().numpy())
    return np.concatenate(rows) if rows else np.zeros((0, given.split), np.float32)


@torch.no_grad()
def zero_each_value(given: TaskExplainer, ids: Sequence[int], changes: _Ablations) -> Floats:
    """Return the drop (T, S) of each explained number when a token's values are zero.

    Mohebbi et al. (2023), "Quantifying Context Mixing in Transformers", who compare hidden states;
    the output is compared here. A weight of zero is the same as a value of zero.
    """
    base = _run_explained(given, ids, changes)
    count = given.split + (len(given.target(ids).tokens) if given.reads_target else 0)
    drops = []
    for token in range(count):
        with edit(given.model, given.zero_values(token)):
            drops.append(base - _run_explained(given, ids, changes))
    return to_array(torch.stack(drops, dim=1))


def integrated_gradients(
    given: TaskExplainer, ids: Sequence[int], changes: _Ablations
) -> tuple[Floats, float]:
    """Return integrated gradients (T, S) from zero vectors, and how far they are from complete.

    Complete means that a row sums to f(x) - f(0); the distance is relative to the largest such
    change. Points are doubled until it is small. Sundararajan, Taly and Yan (2017).
    """
    ends = []
    for scale in (1.0, 0.0):
        with torch.no_grad(), _scale_outputs(given.embeddings, scale), changes.apply():
            ends.append(given.explained(given.run(off=changes.off), ids)[0].cpu().numpy())
    change = ends[0] - ends[1]
    count, values, gap = MIN_POINTS, np.zeros((0, 0), np.float32), math.inf
    while gap > MAX_GAP and count <= MAX_POINTS:
        points = (np.arange(count) + 0.5) / count
        values = np.mean(
            [input_x_gradient(given, ids, changes, scale=float(point)) for point in points], axis=0
        )
        error = np.abs(values.sum(axis=1) - change).max()
        gap = float(error / max(np.abs(change).max(), 1e-6))
        count *= 2
    return values, gap


@contextmanager
def _scale_outputs(
    modules: Sequence[nn.Module], scale: float
) -> Iterator[dict[int, list[tuple[Tensor, Tensor]]]]:
    """Scale the outputs of modules within the block, and collect them with leaves of the graph.

    Only in this thread: others may run the same model.
    """
    owner, taps = threading.get_ident(), dict[int, list[tuple[Tensor, Tensor]]]()

    def make_hook(number: int) -> Callable[..., Tensor | None]:
        def hook(module: nn.Module, inputs: Any, output: Tensor) -> Tensor | None:
            if threading.get_ident() != owner:
                return None
            value = output.detach()
            leaf = (value * scale).requires_grad_(torch.is_grad_enabled())
            taps[number].append((value, leaf))
            return leaf

        return hook

    handles = []
    for number, module in enumerate(modules):
        taps[number] = []
        handles.append(module.register_forward_hook(make_hook(number)))
    try:
        yield taps
    finally:
        for handle in handles:
            handle.remove()

"""Explanations of the tasks besides translation, made from one input that can be run again.

A `TaskInput` is one encoded input of a model. It is run with its attentions recorded, with parts
switched off, and with gradients; everything in the explanation comes from such passes. What is
switched off by a name such as "e0.1" depends on the attention: the weights of a head become zero,
those of an attention pooling, which has nothing else to return, become uniform.
"""

from __future__ import annotations

import abc
import math
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from dragoman.attention.recorder import (
    AttentionRecords,
    RecordableAttention,
    WeightsEdit,
    edit,
    find_attentions,
    record,
)
from dragoman.config import Config
from dragoman.errors import ConfigError, suggest_name
from dragoman.explain.explanation import (
    Ablation,
    AttentionSite,
    Attribution,
    Explanation,
    HeadSummary,
    Step,
    TokenizedText,
)
from dragoman.explain.head_labels import summarize_heads

Floats = NDArray[np.float32]
TOP = 8  # candidates of a step
MAX_COPIES = 32  # of an input in one batch, for gradients of several outputs
MIN_POINTS, MAX_POINTS = 32, 256  # between zero vectors and the input's, of integrated gradients
MAX_GAP = 0.05  # from completeness; more points are taken above it
INPUT_X_GRADIENT, INTEGRATED_GRADIENTS, VALUE_ZEROING, OCCLUSION = (
    "input_x_gradient",
    "integrated_gradients",
    "value_zeroing",
    "occlusion",
)
ARRAY_NAMES = {
    INPUT_X_GRADIENT: "ixg",
    INTEGRATED_GRADIENTS: "ig",
    VALUE_ZEROING: "vz",
    OCCLUSION: "occ",
}


class Switch(NamedTuple):
    """A part of a model that can be switched off: an attention, and its weights without it."""

    path: str
    off: WeightsEdit


class SeenSite(NamedTuple):
    """An attention site with what one pass recorded there."""

    site: AttentionSite
    weights: Tensor  # (H, Q, K)
    contributions: Tensor  # (H, Q, K) lengths of weight times value, as the model adds them
    switches: tuple[Switch, ...]  # of each head


class TaskInput(abc.ABC):
    """One encoded input of a model, and what its outputs mean."""

    task: ClassVar[str]
    # Whether an output is a distribution; a number has no probabilities.
    is_distribution: ClassVar[bool] = True

    def __init__(self, model: nn.Module, config: Config) -> None:
        self.model, self.config = model, config

    # What a task defines

    @property
    @abc.abstractmethod
    def source(self) -> TokenizedText:
        """The input."""

    @property
    @abc.abstractmethod
    def request(self) -> dict[str, Any]:
        """The input as JSON values, from which the predictor can build it again."""

    @abc.abstractmethod
    def run(self, copies: int = 1, *, off: Sequence[str] = ()) -> Tensor:
        """Return log-probabilities (copies, T, V) of equal copies of the input.

        `off` names parts that are no attention weights, such as a memory.
        """

    @abc.abstractmethod
    def choose(self, log_probs: Tensor) -> list[int]:
        """Return the output ids (T,) that are explained, of log-probabilities (T, V)."""

    @abc.abstractmethod
    def name_output(self, number: int) -> str:
        """Return the text of an output id."""

    @abc.abstractmethod
    def target(self, ids: Sequence[int]) -> TokenizedText:
        """Return the output."""

    @abc.abstractmethod
    def read_sites(self, records: AttentionRecords) -> list[SeenSite]:
        """Return the attention sites of a pass."""

    @property
    def embeddings(self) -> Sequence[nn.Module]:
        """The modules whose outputs are the input's vectors; () if there are none to change."""
        return ()

    def sum_inputs(self, parts: Mapping[int, Sequence[Tensor]], copies: int) -> Tensor:
        """Return numbers (copies, S) of the source's tokens, then of the target's if it is read.

        `parts` are numbers (rows, positions) of each call of each of the embeddings.
        """
        raise NotImplementedError

    reads_target: ClassVar[bool] = False  # whether the target's tokens are inputs too

    def occlude(self, ids: Sequence[int]) -> Floats:
        """Return the drop (T, S) of each explained number without each token of `sum_inputs`."""
        raise NotImplementedError

    def zero_values(self, token: int) -> dict[str, WeightsEdit]:
        """Return edits that make the values of a token of `sum_inputs` zero in all attentions."""
        raise NotImplementedError

    @property
    def attributions(self) -> list[str]:
        """The methods of attribution that the model allows."""
        gradients = [INPUT_X_GRADIENT, INTEGRATED_GRADIENTS] if self.embeddings else []
        attentions = [VALUE_ZEROING] if find_attentions(self.model) else []
        return [*gradients, *attentions, OCCLUSION]

    @property
    def max_copies(self) -> int:
        """How many copies of the input fit in a batch."""
        return MAX_COPIES

    @property
    def forbidden(self) -> int:
        """The number of outputs that the model may not choose."""
        return 0

    @property
    def split(self) -> int:
        """The columns of `sum_inputs` that are the source's; the others are the target's."""
        return len(self.source.tokens)

    @property
    def special_switches(self) -> dict[str, tuple[Switch, ...]]:
        """Parts that can be switched off besides heads, by name; () for those that `run` knows."""
        return {}

    @property
    def forced(self) -> int:
        """The number of outputs that were given; the others were chosen."""
        return 0

    def decide(self, off: Sequence[str], edits: Mapping[str, WeightsEdit]) -> TaskInput:
        """Return the input with the outputs that the changed model chooses: by default the same."""
        return self

    @property
    def model_fields(self) -> dict[str, Any]:
        """Further fields of `Explanation.model`."""
        return {}

    @property
    def score_fields(self) -> dict[str, Any]:
        """Further fields of `Explanation.score`, of the last pass."""
        return {}

    @property
    def positions(self) -> dict[str, Any]:
        """How order enters the model."""
        return describe_positions(self.config.model.positions)

    @property
    def missing(self) -> dict[str, str]:
        """What the task has not, by panel, with the reason."""
        return {"beam": "This model predicts at once: there is no search."}

    def read_lens(
        self, ids: Sequence[int], off: Sequence[str]
    ) -> tuple[dict[str, Any], dict[str, NDArray[Any]]] | None:
        """Return the logit lens and its arrays, or None if the model has no output matrix."""
        return None

    def extras(
        self, seen: Sequence[SeenSite], ids: Sequence[int]
    ) -> dict[str, tuple[str, NDArray[Any]]]:
        """Return further arrays of explained ids by what they are: name and array."""
        return {}

    def explained(self, log_probs: Tensor, ids: Sequence[int]) -> Tensor:
        """Return the explained numbers (copies, T): log-probabilities of ids (T,)."""
        wanted = torch.tensor(list(ids), device=log_probs.device)
        return log_probs.gather(2, wanted.view(1, -1, 1).expand(len(log_probs), -1, 1)).squeeze(2)


# Explanations


def explain_task(
    given: TaskInput, *, off: Sequence[str] = (), attribution: str | None = INPUT_X_GRADIENT
) -> Explanation:
    """Return the explanation of an input, with some parts of the model switched off."""
    changed = _Changes(given, off)
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
        method = attribution if given.embeddings else OCCLUSION
        made, values = _attribute(given, ids, method, changed)
        found.attribution.append(made)
        arrays.update(values)
    lens = given.read_lens(ids, changed.off) if not changed.edits else None
    if lens is not None:
        arrays.update(lens[1])
    return replace(found, lens=None if lens is None else lens[0])


def make_steps(given: TaskInput, log_probs: Tensor, ids: Sequence[int]) -> list[Step]:
    """Return the steps of log-probabilities (T, V)."""
    log_probs = log_probs.float().cpu()
    best = log_probs.topk(min(TOP, log_probs.size(1)), dim=1)
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
            top=[
                (number, given.name_output(number), value)
                for number, value in zip(numbers, values, strict=True)
            ],
        )
        for at, (token, row, entropy, numbers, values) in enumerate(
            zip(ids, log_probs, entropies, best.indices.tolist(), best.values.tolist(), strict=True)
        )
    ]


def ablate_task(given: TaskInput, explanation: Explanation, heads: Sequence[str]) -> Ablation:
    """Return what changes when heads are switched off besides those that are off already.

    `effect` is the change of each explained output; the new output, its steps and its score are
    those of a fresh pass.
    """
    before = list(explanation.request.get("off", ()))
    off = [*before, *(head for head in heads if head not in before)]
    ids = [step.id for step in explanation.steps] or [0]
    base = _run_explained(given, ids, _Changes(given, before))
    effect = _run_explained(given, ids, _Changes(given, off)) - base
    new = explain_task(given, off=off, attribution=None)
    return Ablation(
        off=list(heads),
        effect=[float(each) for each in effect],
        sum_change=float(effect.sum()),
        target=new.target,
        steps=new.steps,
        score=new.score,
    )


def task_head_effects(given: TaskInput, explanation: Explanation) -> Iterator[tuple[str, float]]:
    """Yield each head with the change of the explained outputs' sum when it is switched off."""
    before = list(explanation.request.get("off", ()))
    ids = [step.id for step in explanation.steps] or [0]
    base = _run_explained(given, ids, _Changes(given, before)).sum()
    for summary in explanation.heads:
        changes = _Changes(given, [*before, summary.name])
        yield summary.name, float(_run_explained(given, ids, changes).sum() - base)


def attribute_task(
    given: TaskInput, explanation: Explanation, method: str
) -> tuple[Attribution, dict[str, NDArray[Any]]]:
    """Return the attribution of an explanation's outputs to its input by a method."""
    known = given.attributions
    if method not in known:
        raise ConfigError(
            [
                f"an attribution of this model must be one of {', '.join(known)}; found "
                f"{method!r}; {suggest_name(method, known)}"
            ]
        )
    ids = [step.id for step in explanation.steps] or [0]
    return _attribute(given, ids, method, _Changes(given, explanation.request.get("off", ())))


class _Changes:
    """Parts of a model that are switched off: edits of attention weights, and other parts."""

    def __init__(self, given: TaskInput, names: Sequence[str]) -> None:
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


def find_switches(given: TaskInput) -> dict[str, Switch]:
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
def _run_explained(given: TaskInput, ids: Sequence[int], changes: _Changes) -> Tensor:
    """Return the explained numbers (T,) of given outputs, with explicit attention weights."""
    # Recorded, so that an unchanged pass has the bits of an explanation.
    with changes.apply(), record(given.model):
        return given.explained(given.run(off=changes.off), ids)[0].double().cpu()


def _make_score(given: TaskInput, explained: Tensor) -> dict[str, Any]:
    """Return the score: the sum of the log-probabilities, or the predicted number."""
    total = math.fsum(explained.tolist())
    if not given.is_distribution:
        return {"value": total, **given.score_fields}
    return {"sum": total, "normalised": total, "penalty": "none", **given.score_fields}


def _make_checks(
    given: TaskInput,
    seen: Sequence[SeenSite],
    log_probs: Tensor,
    changes: _Changes,
    records: AttentionRecords,
) -> dict[str, float]:
    """Return how exactly the numbers fit the model: see the invariants in docs/explanation.md."""
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
    given: TaskInput, seen: Sequence[SeenSite], ids: Sequence[int], changes: _Changes
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


def _attribute(
    given: TaskInput, ids: Sequence[int], method: str, changes: _Changes
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
    given: TaskInput, ids: Sequence[int], changes: _Changes, *, scale: float = 1.0
) -> Floats:
    """Return the input times the gradient of each explained number: (T, S).

    With a `scale` the gradient is that at so much of the input's vectors.
    """
    rows = []
    size = given.max_copies
    for first in range(0, len(ids), size):
        count = min(size, len(ids) - first)
        with torch.enable_grad(), _tap(given.embeddings, scale) as taps, changes.apply():
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
def zero_each_value(given: TaskInput, ids: Sequence[int], changes: _Changes) -> Floats:
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
    given: TaskInput, ids: Sequence[int], changes: _Changes
) -> tuple[Floats, float]:
    """Return integrated gradients (T, S) from zero vectors, and how far they are from complete.

    Complete means that a row sums to f(x) - f(0); the distance is relative to the largest such
    change. Points are doubled until it is small. Sundararajan, Taly and Yan (2017).
    """
    ends = []
    for scale in (1.0, 0.0):
        with torch.no_grad(), _tap(given.embeddings, scale), changes.apply():
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
def _tap(
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


# Sites


def heads_of(path: str, heads: int, *, part: int = 0, of: int = 1) -> tuple[Switch, ...]:
    """Return the switches of an attention's heads: their weights become zero.

    Where a pass has the rows of several texts one after another, only in one part `of` them.
    """

    def make_off(head: int) -> WeightsEdit:
        def off(weights: Tensor) -> Tensor:
            changed = weights.clone()
            size = weights.size(0) // of
            changed[part * size : (part + 1) * size, head] = 0.0
            return changed

        return off

    return tuple(Switch(path, make_off(head)) for head in range(heads))


def uniform_switch(path: str, *, row: int = 0, of: int = 1) -> Switch:
    """Return the switch of a pooling: its weights become uniform over what they were above zero.

    A softmax of bounded scores is zero at masked positions only. A pass of several copies has `of`
    rows for each, of which `row` is changed.
    """

    def off(weights: Tensor) -> Tensor:
        support = (weights > 0).to(weights)
        uniform = support / support.sum(dim=-1, keepdim=True).clamp(min=1)
        chosen = torch.arange(weights.size(0), device=weights.device) % of == row
        return torch.where(chosen.view(-1, 1, 1, 1), uniform, weights)

    return Switch(path, off)


def column_off(
    column: int, *, row: int = 0, of: int = 1, part: int = 0, parts: int = 1
) -> WeightsEdit:
    """Return an edit that makes a column of weights zero, in all rows of a pass or some.

    Those are every `row` of `of`, or one part of several that stand one after another.
    """

    def off(weights: Tensor) -> Tensor:
        rows = torch.arange(weights.size(0), device=weights.device)
        chosen = (rows % of == row) & (rows // max(1, weights.size(0) // parts) == part)
        changed = weights.clone()
        changed[chosen, :, :, column] = 0.0
        return changed

    return off


def contribution_norms(
    attention: RecordableAttention | None, weights: Tensor, values: Tensor
) -> Tensor:
    """Return the lengths (H, Q, K) of weights (H, Q, K) times values (H, K, Dv).

    The values are those after the output projection of their head, if the attention has one.
    """
    output = getattr(attention, "output", None)
    values = values.float()
    if isinstance(output, nn.Linear):
        heads, _, width = values.shape
        weight = output.weight.float().view(-1, heads, width)  # (D, H, Dv)
        values = torch.einsum("hkv,dhv->hkd", values, weight)
    return weights.float().abs() * values.norm(dim=-1).unsqueeze(1)


class StackSites(NamedTuple):
    """How the attentions of one stack become sites: names and axes."""

    path: str  # prefix of the module paths, such as "encoder."
    letter: str  # of the ids
    group: str
    axis: str  # of queries and keys
    length: int  # positions of the axis
    kind: str = "self"
    suffix: str = ""  # of the ids, where a stack reads two texts
    part: int = 0  # of the pass's rows, where a stack reads several texts
    parts: int = 1
    lengths: tuple[int, ...] = ()  # of several rows that are put one after another
    labels: list[str] | None = None
    first_layer: int = 0
    causal: bool = False


def read_stack(
    records: AttentionRecords, attentions: Mapping[str, RecordableAttention], stack: StackSites
) -> list[SeenSite]:
    """Return the self-attention sites of a stack, in order, one layer after another."""
    found = list[SeenSite]()
    for path in records:
        if not path.startswith(stack.path) or not path.endswith(".self"):
            continue
        seen = records[path]
        heads = seen.weights.size(1)
        lengths = stack.lengths or (stack.length,)
        total = sum(lengths)
        weights = seen.weights.new_zeros(heads, total, total)
        values = seen.values.new_zeros(heads, total, seen.values.size(-1))
        start = 0
        for row, length in enumerate(lengths, stack.part):
            here = slice(start, start + length)
            weights[:, here, here] = seen.weights[row, :, :length, :length]
            values[:, here] = seen.values[row, :, :length]
            start += length
        layer = stack.first_layer + len(found)
        site = AttentionSite(
            id=f"{stack.letter}{layer}{stack.suffix}",
            path=path,
            kind=stack.kind,
            group=stack.group,
            layer=layer,
            heads=heads,
            query=stack.axis,
            key=stack.axis,
            sum=row_sum(attentions[path]),
            causal=stack.causal,
            query_labels=stack.labels,
            key_labels=stack.labels,
        )
        norms = contribution_norms(attentions[path], weights, values)
        switches = heads_of(path, heads, part=stack.part, of=stack.parts)
        found.append(SeenSite(site, weights, norms, switches))
    return found


def row_sum(attention: RecordableAttention) -> str:
    """Return what a row of an attention's weights sums to; heads that are mixed sum to anything."""
    return "none" if getattr(attention, "mix_weights", None) is not None else "one"


def describe_positions(kind: str) -> dict[str, Any]:
    """Return how order enters a model whose `model.positions` is `kind`."""
    known = {
        "sinusoidal": ("sinusoidal", "Sines and cosines of the position are added to the input."),
        "learned": ("learned", "A trained vector of each position is added to the input."),
        "rotary": ("rotary", "Queries and keys are rotated by an angle of their position."),
        "none": ("none", "Nothing but the layers themselves knows the order of the tokens."),
    }
    name, note = known.get(
        kind, ("relative", "Attention scores depend on the distance of query and key.")
    )
    return {"kind": name, "note": note, "tensor": None, "curves": [], "reach": None}


def to_array(values: Tensor) -> Floats:
    """Return a tensor as a float32 array."""
    return np.ascontiguousarray(values.detach().float().cpu().numpy(), np.float32)

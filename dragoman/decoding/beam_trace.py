"""The trace of a beam search: each candidate of each step, and why it was kept or dropped.

A `BeamObserver` in a `SearchRequest` receives from the search what the model scored, which tokens
were forbidden and what `BeamState.advance` decided. It decides nothing itself.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from dragoman.decoding.hypothesis import Hypothesis
from dragoman.text.special_tokens import EOS

if TYPE_CHECKING:  # a trace that was read from a file needs no torch
    from torch import Tensor

    from dragoman.decoding.beam_step import ActiveBeams, BeamDecisions
    from dragoman.ops.topk import TopK

REASONS = (
    "kept",  # continues in the beam
    "beam_full",  # better candidates filled the beam; cut: the score of the last of them
    "finished",  # ended with EOS and is one of the n best
    "worse_finished",  # ended with EOS; cut: the normalised score of the last of the n best
    "length_cap",  # the maximum length is reached, and it is not EOS
    "no_repeat",  # would repeat an n-gram
    "constraint",  # forbidden: by a constraint, a forced prefix, or because it is never written
    "duplicate",  # the text of another hypothesis; no strategy of ours drops these
    "early_stop",  # cannot enter the n best any more; cut: the best normalised score it could reach
)
(
    KEPT,
    BEAM_FULL,
    FINISHED,
    WORSE_FINISHED,
    LENGTH_CAP,
    NO_REPEAT,
    CONSTRAINT,
    DUPLICATE,
    EARLY_STOP,
) = range(len(REASONS))

MAX_NODES = 20_000  # of a trace; worse candidates are dropped
_CANDIDATES_PER_BEAM = 2  # recorded at a step, times the size of the beam

IntArray = NDArray[np.int32]
FloatArray = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class BeamTrace:
    """The tree of a beam search, a node for each candidate; parents come before their children.

    Node 0 is the root: no token, parent -1, step -1. Candidates of one step are in descending
    order of their scores. A score is a sum of log-probabilities; normalised, it is divided by the
    length penalty.
    """

    width: int  # of the beam
    parent: IntArray  # (N,)
    token: IntArray  # (N,)
    logprob: FloatArray  # (N,) the model's log-probability of the token
    cum: FloatArray  # (N,) sum of the log-probabilities from the root
    step: IntArray  # (N,)
    reason: NDArray[np.uint8]  # (N,) index in REASONS
    cut: FloatArray  # (N,) the score it was compared with, see REASONS; NaN if there was none
    leaves: tuple[int, ...] = ()  # the last node of each of the n best, EOS if finished
    dropped: int = 0  # nodes left out because there were more than MAX_NODES

    def __len__(self) -> int:
        """Return the number of nodes, the root included."""
        return len(self.parent)

    def __repr__(self) -> str:
        """Return the size of the tree in one line."""
        steps = int(self.step.max(initial=-1)) + 1
        return f"BeamTrace(width={self.width}, {len(self)} nodes, {steps} steps)"

    def path(self, node: int) -> list[int]:
        """Return the nodes from the first token to this one, without the root."""
        nodes = list[int]()
        while node > 0:
            nodes.append(node)
            node = int(self.parent[node])
        return nodes[::-1]

    def tokens(self, node: int) -> list[int]:
        """Return the token ids from the first to this node's, EOS included."""
        return [int(self.token[each]) for each in self.path(node)]

    def children(self) -> list[list[int]]:
        """Return the children of every node, best first."""
        children: list[list[int]] = [[] for _ in range(len(self))]
        for node, parent in enumerate(self.parent.tolist()):
            if parent >= 0:
                children[parent].append(node)
        return children

    def reason_name(self, node: int) -> str:
        """Return the reason of a node, one of REASONS."""
        return REASONS[self.reason[node]]

    def chosen(self) -> frozenset[int]:
        """Return the nodes of the best hypothesis, the root included."""
        return frozenset([0, *(self.path(self.leaves[0]) if self.leaves else ())])


class _Node(NamedTuple):
    """One candidate while the search is running."""

    parent: int
    token: int
    logprob: float
    cum: float
    step: int


class _SentenceTrace:
    """The nodes of one sentence so far."""

    def __init__(self) -> None:
        self.nodes = [_Node(-1, -1, 0.0, 0.0, -1)]
        self.reasons, self.cuts = [KEPT], [math.nan]
        self.slots: list[int] = [0]  # the node of each beam slot, -1 for an empty one
        self.latest: dict[tuple[int, int], int] = {}  # (slot, token) -> node of the last step
        self.masked: dict[int, int] = {}  # node -> tokens that were forbidden after it

    def add(self, node: _Node, slot: int, reason: int, cut: float) -> None:
        """Append a candidate of the hypothesis in a beam slot."""
        self.latest[slot, node.token] = len(self.nodes)
        self.nodes.append(node)
        self.reasons.append(reason)
        self.cuts.append(cut)

    def tokens(self, node: int) -> tuple[int, ...]:
        """Return the token ids from the first to this node's."""
        tokens = list[int]()
        while node > 0:
            tokens.append(self.nodes[node].token)
            node = self.nodes[node].parent
        return tuple(reversed(tokens))


class BeamObserver:
    """Records the beam search of a request: `traces` has one trace for each of its rows.

    One observer belongs to one run of one request. Strategies without a beam leave it empty.
    """

    def __init__(self, *, max_nodes: int = MAX_NODES) -> None:
        self.traces: list[BeamTrace] = []
        self.masked: list[list[int]] = []  # tokens forbidden at each position of each row's best
        self._max_nodes = max_nodes
        self._width = 1
        self._sentences: list[_SentenceTrace] = []

    def start(self, sentences: int, width: int, topk: Callable[[Tensor, int], TopK]) -> None:
        """Begin the traces of a batch with a beam of this size; `topk` ranks as the search does."""
        self.traces, self.masked, self._width, self._topk = [], [], width, topk
        self._sentences = [_SentenceTrace() for _ in range(sentences)]

    def observe_scores(self, log_probs: Tensor) -> None:
        """Take the model's log-probabilities (N * F, V), before any token is forbidden."""
        self._log_probs = log_probs
        self._forbidden = log_probs.new_zeros(log_probs.shape).byte()  # reasons

    def observe_forbidden(self, logits: Tensor, reason: str = "constraint") -> None:
        """Take the logits (N * F, V) after tokens were forbidden, for a reason of REASONS."""
        is_new = logits.isneginf() & (self._forbidden == KEPT)
        self._forbidden.masked_fill_(is_new, REASONS.index(reason))

    def observe_decisions(self, beams: ActiveBeams, decided: BeamDecisions) -> None:
        """Take the decisions of a step on the hypotheses that were active before it."""
        candidates = self._rank_candidates(beams)
        step = int(decided.step)
        columns = _DecisionColumns(
            *(each.cpu().numpy() for each in decided if each is not decided.step)
        )
        rows = zip(beams.sentences.tolist(), beams.alive.tolist(), strict=True)
        for row, (number, is_alive) in enumerate(rows):
            if is_alive:
                self._record(self._sentences[number], step, candidates.of(row), columns.of(row))

    def _rank_candidates(self, beams: ActiveBeams) -> _StepCandidates:
        """Return the best candidates of each hypothesis: of all, and of those that are allowed."""
        shape = beams.tokens.shape
        count = min(_CANDIDATES_PER_BEAM * self._width, self._log_probs.size(1))
        is_forbidden = self._forbidden != KEPT

        def rank(log_probs: Tensor) -> _CandidateTable:
            values, ids = self._topk(log_probs, count)
            columns = (values.double(), ids, self._forbidden.gather(1, ids))
            return _CandidateTable(*(each.cpu().numpy().reshape(*shape, -1) for each in columns))

        return _StepCandidates(
            rank(self._log_probs),
            rank(self._log_probs.masked_fill(is_forbidden, -math.inf)),
            beams.log_prob_sums.cpu().numpy(),
            is_forbidden.sum(dim=1).cpu().numpy().reshape(shape),
        )

    def _record(
        self,
        sentence: _SentenceTrace,
        step: int,
        candidates: _StepCandidates,
        decided: _DecisionColumns,
    ) -> None:
        """Add the best candidates of one sentence at one step, with their reasons."""
        selected = {
            (int(slot), int(token)): rank
            for rank, (slot, token) in enumerate(zip(decided.parents, decided.tokens, strict=True))
            if np.isfinite(decided.log_prob_sums[rank])
        }
        # If there are fewer candidates than beam slots, none is compared with it.
        last = min(int(decided.active_beams), decided.log_prob_sums.size) - 1
        sentence.latest = {}
        sentence.masked |= dict(zip(sentence.slots, candidates.num_forbidden.tolist(), strict=True))
        for total, slot, token, log_prob, forbidden in candidates.best(
            _CANDIDATES_PER_BEAM * self._width
        ):
            rank = selected.get((slot, token))
            if forbidden:
                reason, cut = forbidden, math.nan
            elif rank is None or not decided.valid[rank]:
                reason, cut = BEAM_FULL, float(decided.log_prob_sums[last])
            elif decided.ended[rank]:
                reason, cut = FINISHED, math.nan  # among the n best or not is known at the end
            elif not decided.survives[rank]:
                reason, cut = LENGTH_CAP, math.nan
            elif decided.alive:
                reason, cut = KEPT, math.nan
            else:
                reason, cut = EARLY_STOP, float(decided.bounds[rank])
            node = _Node(sentence.slots[slot], token, log_prob, total, step)
            sentence.add(node, slot, reason, cut)

    def observe_beams(self, beams: ActiveBeams, parents: Tensor) -> None:
        """Take the hypotheses (N, F) that continue, and the beam slots of their parents."""
        rows = zip(
            beams.sentences.tolist(),
            beams.tokens.tolist(),
            parents.tolist(),
            beams.log_prob_sums.isfinite().tolist(),
            beams.alive.tolist(),
            strict=True,
        )
        for number, tokens, slots, is_open, is_alive in rows:
            if is_alive:
                sentence = self._sentences[number]
                sentence.slots = [
                    sentence.latest[slot, token] if opened else -1
                    for slot, token, opened in zip(slots, tokens, is_open, strict=True)
                ]

    def finish(self, found: Sequence[Sequence[Hypothesis]]) -> None:
        """Take the n best of each sentence, and build the traces."""
        self.traces = [
            self._build(sentence, hypotheses)
            for sentence, hypotheses in zip(self._sentences, found, strict=True)
        ]
        self._sentences = []

    def _build(self, sentence: _SentenceTrace, hypotheses: Sequence[Hypothesis]) -> BeamTrace:
        """Return the trace of a sentence whose n best are known."""
        wanted = {
            (*each.tokens, *([EOS] if each.finished else [])): rank
            for rank, each in enumerate(hypotheses)
        }
        leaves = [0] * len(hypotheses)
        cut = min((each.score for each in hypotheses if each.finished), default=math.nan)
        lengths = {len(tokens) for tokens in wanted}
        for node, reason in enumerate(sentence.reasons):
            if reason not in (KEPT, FINISHED) or sentence.nodes[node].step + 1 not in lengths:
                rank = None
            else:
                rank = wanted.get(sentence.tokens(node))
            if rank is not None:
                leaves[rank] = node
            elif reason == FINISHED:
                sentence.reasons[node], sentence.cuts[node] = WORSE_FINISHED, cut
        nodes = sentence.nodes
        trace = BeamTrace(
            width=self._width,
            parent=np.array([each.parent for each in nodes], np.int32),
            token=np.array([each.token for each in nodes], np.int32),
            logprob=np.array([each.logprob for each in nodes]),
            cum=np.array([each.cum for each in nodes]),
            step=np.array([each.step for each in nodes], np.int32),
            reason=np.array(sentence.reasons, np.uint8),
            cut=np.array(sentence.cuts),
            leaves=tuple(leaves),
        )
        self.masked.append(
            [sentence.masked[nodes[node].parent] for node in trace.path(trace.leaves[0])]
        )
        return limit_nodes(trace, self._max_nodes)


class _DecisionColumns(NamedTuple):
    """The fields of `BeamDecisions` but the step, as arrays."""

    parents: NDArray[np.int64]
    tokens: NDArray[np.int64]
    log_prob_sums: FloatArray
    valid: NDArray[np.bool_]
    ended: NDArray[np.bool_]
    survives: NDArray[np.bool_]
    bounds: FloatArray
    active_beams: NDArray[np.int64]
    alive: NDArray[np.bool_]

    def of(self, row: int) -> _DecisionColumns:
        """Return those of one sentence."""
        return _DecisionColumns(*(each[row] for each in self))


class _Candidate(NamedTuple):
    """One continuation of one hypothesis."""

    total: float  # with the log-probabilities before it
    slot: int  # of the hypothesis in the beam
    token: int
    log_prob: float
    forbidden: int  # the reason, KEPT if it is allowed


class _CandidateTable(NamedTuple):
    """The C best continuations of each hypothesis, (N, F, C) each, in descending order."""

    log_probs: FloatArray
    tokens: NDArray[np.int64]
    reasons: NDArray[np.uint8]

    def of(self, row: int) -> _CandidateTable:
        """Return those of one sentence, (F, C)."""
        return _CandidateTable(*(each[row] for each in self))

    def firsts(self, slots: NDArray[np.bool_]) -> _CandidateTable:
        """Return the best of each hypothesis; those of other slots are not finite."""
        log_probs = np.where(slots[:, None], self.log_probs[:, :1], -np.inf)
        return _CandidateTable(log_probs, self.tokens[:, :1], self.reasons[:, :1])

    def best(self, sums: FloatArray, count: int) -> Iterator[_Candidate]:
        """Yield the best candidates of hypotheses with these sums (F,)."""
        totals = sums[:, None] + self.log_probs
        at = np.nonzero(np.isfinite(totals))
        order = np.lexsort((at[0], self.tokens[at], -totals[at]))[:count]
        at = (at[0][order], at[1][order])
        yield from map(
            _Candidate,
            totals[at].tolist(),
            at[0].tolist(),
            self.tokens[at].tolist(),
            self.log_probs[at].tolist(),
            self.reasons[at].tolist(),
        )


class _StepCandidates(NamedTuple):
    """The candidate continuations of the hypotheses of a step."""

    every: _CandidateTable
    allowed: _CandidateTable
    sums: FloatArray  # (N, F) of the hypotheses
    num_forbidden: NDArray[np.int64]  # (N, F)

    def of(self, row: int) -> _StepCandidates:
        """Return those of one sentence."""
        return _StepCandidates(
            self.every.of(row), self.allowed.of(row), self.sums[row], self.num_forbidden[row]
        )

    def best(self, count: int) -> list[_Candidate]:
        """Return candidates of one sentence, best first.

        They are the best of all and the best of those that are allowed, `count` each, and the best
        of each hypothesis: one that is dropped must have a continuation that shows why.
        """
        has_allowed = np.isfinite(self.allowed.log_probs[:, 0])
        chosen = {
            *self.every.best(self.sums, count),
            *self.allowed.best(self.sums, count),
            *self.allowed.firsts(has_allowed).best(self.sums, len(has_allowed)),
            *self.every.firsts(~has_allowed).best(self.sums, len(has_allowed)),
        }
        return sorted(chosen, key=_search_order)


def _search_order(candidate: _Candidate) -> tuple[float, int, int]:
    """Return the key by which the search ranks; ties by lower token, then parent beam."""
    return (-candidate.total, candidate.token, candidate.slot)


def limit_nodes(trace: BeamTrace, most: int) -> BeamTrace:
    """Return a trace of at most so many nodes; the paths of the n best always stay.

    Pruned leaves are removed first, those with the lowest scores first, then other leaves in the
    same order, and then the nodes that became leaves by that.
    """
    excess = len(trace) - most
    if excess <= 0:
        return trace
    fixed = {0}.union(*(trace.path(leaf) for leaf in trace.leaves))
    num_children = np.bincount(trace.parent[1:], minlength=len(trace))

    def priority(node: int) -> tuple[bool, float, int]:
        return (trace.reason[node] != BEAM_FULL, float(trace.cum[node]), -node)

    leaves = [
        priority(node)
        for node in range(1, len(trace))
        if not num_children[node] and node not in fixed
    ]
    heapq.heapify(leaves)
    keep = np.ones(len(trace), dtype=bool)
    while leaves and excess > 0:
        node = -heapq.heappop(leaves)[2]
        keep[node] = False
        excess -= 1
        parent = int(trace.parent[node])
        num_children[parent] -= 1
        if not num_children[parent] and parent not in fixed:
            heapq.heappush(leaves, priority(parent))
    numbers = np.cumsum(keep) - 1
    parents = trace.parent[keep]
    return BeamTrace(
        width=trace.width,
        parent=np.where(parents < 0, -1, numbers[parents]).astype(np.int32),
        token=trace.token[keep],
        logprob=trace.logprob[keep],
        cum=trace.cum[keep],
        step=trace.step[keep],
        reason=trace.reason[keep],
        cut=trace.cut[keep],
        leaves=tuple(int(numbers[leaf]) for leaf in trace.leaves),
        dropped=trace.dropped + int((~keep).sum()),
    )

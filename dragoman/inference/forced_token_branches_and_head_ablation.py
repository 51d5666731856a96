"""Branches and head ablations stored in an explanation file: its counterfactuals.

A branch takes another token at a step and decodes the rest again. Its output is compared with the
explained one token by token: kept, changed or new. `explain/head_ablation.py` switches heads off.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from dragoman.decoding.hypothesis import Hypothesis
from dragoman.errors import DataError
from dragoman.explain.explanation import Explanation
from dragoman.explain.explanation_json import encode_step, encode_text
from dragoman.explain.token_spans import tokenize_text
from dragoman.explain.translation_explanation_builder import (
    ExplainedTarget,
    build_steps,
    plain_logits,
)
from dragoman.text.special_tokens import BOS, EOS, PAD

if TYPE_CHECKING:
    from dragoman.inference.explainable_translator import TranslationExplainer


MAX_BRANCHES = 256  # of one explanation; each is a search of its own
TokenState = Literal["kept", "changed", "new"]
MAX_COMPARED = 4_000_000  # cells of the comparison, tokens times tokens; past it all have changed


def branch_prefix(explanation: Explanation, step: int, token: int) -> list[int]:
    """Return the forced tokens of a branch; raise DataError for a step that is not there."""
    target = [each.id for each in explanation.target.tokens]
    if not 0 <= step < len(target):
        raise DataError(
            f"a branch must leave the target at one of its steps, 0 to {len(target) - 1}",
            found=f"{step}",
            fix="choose a step of the explanation",
        )
    return [*target[:step], token]


def list_branches(explanation: Explanation, per_step: int) -> list[tuple[int, int]]:
    """Return (step, token) of the most probable alternatives of each step that was not forced."""
    found = list[tuple[int, int]]()
    for at, step in enumerate(explanation.steps):
        others = [token for token, _, _ in step.top if token != step.id and token not in (PAD, BOS)]
        found += [(at, token) for token in others[:per_step] if not step.forced]
    return found[:MAX_BRANCHES]


def compute_branches(
    translator: TranslationExplainer, explanation: Explanation, chosen: Sequence[tuple[int, int]]
) -> dict[str, dict[str, Any]]:
    """Return branches as JSON values, by `step:token`: target, steps, score and changes."""
    prefixes = [branch_prefix(explanation, step, token) for step, token in chosen]
    found = translator.search_prefixes(explanation, prefixes)
    before = [each.id for each in explanation.target.tokens]
    branches = dict[str, dict[str, Any]]()
    for (step, token), prefix, (hypothesis, text) in zip(chosen, prefixes, found, strict=True):
        tokens = _written(hypothesis)
        target = ExplainedTarget(tokens=tokens, text=text, forced=len(prefix))
        source = [each.id for each in explanation.source.tokens[:-1]]
        logits = plain_logits(translator.model, source, tokens)
        steps = build_steps(logits, target, translator.tokenizers.tgt)
        total = math.fsum(each.logprob for each in steps)
        changes = compare_tokens(
            before,
            tokens,
            score_before=explanation.score.get("normalised"),
            score_after=hypothesis.score,
        )
        branches[f"{step}:{token}"] = {
            "target": encode_text(
                tokenize_text(translator.tokenizers.tgt, text, tokens, lang=explanation.target.lang)
            ),
            "steps": [encode_step(dataclasses.replace(each, top=[])) for each in steps],
            "score": {
                "sum": round(total, 6),
                "normalised": round(hypothesis.score, 6),
                "penalty": explanation.score.get("penalty"),
            },
            "changes": changes.to_dict(),
        }
    return branches


def list_heads(explanation: Explanation, most: int) -> list[str]:
    """Return the heads with the largest effects, exact where known and else estimated."""
    effects = dict[str, float]()
    for head in explanation.heads:
        effect = head.effect_estimate if head.effect_exact is None else head.effect_exact
        if effect is not None:
            effects[f"{head.site}.{head.head}"] = abs(effect)
    return sorted(effects, key=lambda each: -effects[each])[:most]


def add_ablations(predictor: Any, explanation: Explanation, heads: Sequence[str]) -> Explanation:
    """Return the explanation with the effect of switching off each head alone.

    A page that was written to a file shows only these; a served one computes any.
    """
    found = {head: predictor.ablate(explanation, [head]).to_dict() for head in heads}
    return dataclasses.replace(explanation, ablations={**explanation.ablations, **found})


def _written(hypothesis: Hypothesis) -> list[int]:
    """Return the tokens of a hypothesis, EOS included if it is finished."""
    return [*hypothesis.tokens, EOS] if hypothesis.finished else list(hypothesis.tokens)


@dataclass(frozen=True, slots=True)
class TokenChanges:
    """How one output became another.

    A token of the new output is kept if the old one has it too, changed if it replaces tokens
    of the old one, and new if it replaces none.
    """

    states: list[TokenState]  # of each token of the new output
    origins: list[int | None]  # the token of the old output that is kept or replaced
    removed: list[int]  # tokens of the old output with no counterpart
    summary: str  # "3 of 9 tokens changed, score -4.21 -> -4.87"

    def to_dict(self) -> dict[str, Any]:
        """Return everything as JSON values."""
        return {
            "states": list(self.states),
            "origins": list(self.origins),
            "removed": list(self.removed),
            "summary": self.summary,
        }


def compare_outputs(before: Explanation, after: Explanation) -> TokenChanges:
    """Compare the outputs of two explanations, their ends of sentence included."""
    return compare_tokens(
        [token.id for token in before.target.tokens],
        [token.id for token in after.target.tokens],
        score_before=before.score.get("normalised"),
        score_after=after.score.get("normalised"),
    )


def compare_tokens(
    before: Sequence[int],
    after: Sequence[int],
    *,
    score_before: float | None = None,
    score_after: float | None = None,
) -> TokenChanges:
    """Compare two outputs by the fewest insertions, deletions and replacements of tokens."""
    pairs = _align(list(before), list(after))
    states, origins, removed = list[TokenState](), list[int | None](), list[int]()
    for old, new in pairs:
        if new is None:
            assert old is not None, "a pair has a side"
            removed.append(old)
            continue
        kept = old is not None and before[old] == after[new]
        states.append("kept" if kept else "new" if old is None else "changed")
        origins.append(old)
    return TokenChanges(
        states,
        origins,
        removed,
        _summarize(states, len(removed), score_before, score_after),
    )


def _summarize(
    states: Sequence[TokenState],
    removed: int,
    score_before: float | None,
    score_after: float | None,
) -> str:
    """Return the changes in one line."""
    changed, new = states.count("changed"), states.count("new")
    parts = [
        f"{count} of {len(states)} token{'s' * (len(states) != 1)} {name}"
        for count, name in ((changed, "changed"), (new, "new"))
        if count
    ]
    if len(parts) == 2:
        parts[1] = f"{new} new"
    parts += [f"{removed} removed"] * bool(removed)
    line = ", ".join(parts) or "no token changed"
    if score_before is None or score_after is None:
        return line
    return f"{line}, score {score_before:.2f} -> {score_after:.2f}"


def _align(before: list[int], after: list[int]) -> list[tuple[int | None, int | None]]:
    """Return pairs of positions, in order; None where a token has no counterpart."""
    first = 0
    while first < min(len(before), len(after)) and before[first] == after[first]:
        first += 1
    last = 0
    while (
        last < min(len(before), len(after)) - first
        and before[len(before) - 1 - last] == after[len(after) - 1 - last]
    ):
        last += 1
    start: list[tuple[int | None, int | None]] = [(at, at) for at in range(first)]
    end = [(len(before) - at, len(after) - at) for at in range(last, 0, -1)]
    middle = _align_middle(before[first : len(before) - last], after[first : len(after) - last])
    moved = [
        (None if old is None else old + first, None if new is None else new + first)
        for old, new in middle
    ]
    return [*start, *moved, *end]


def _align_middle(before: list[int], after: list[int]) -> list[tuple[int | None, int | None]]:
    """Align the parts between equal ends by the least edit distance; of equal ones, the first."""
    rows, columns = len(before), len(after)
    if rows * columns > MAX_COMPARED:
        paired = min(rows, columns)
        return [
            *((at, at) for at in range(paired)),
            *((at, None) for at in range(paired, rows)),
            *((None, at) for at in range(paired, columns)),
        ]
    # costs[i][j]: the least edits from before[i:] to after[j:]
    costs = [[0] * (columns + 1) for _ in range(rows + 1)]
    for i in range(rows, -1, -1):
        row = costs[i]
        for j in range(columns, -1, -1):
            if i == rows or j == columns:
                row[j] = rows - i + columns - j
            elif before[i] == after[j]:
                row[j] = costs[i + 1][j + 1]
            else:
                row[j] = 1 + min(costs[i + 1][j + 1], costs[i + 1][j], row[j + 1])
    pairs = list[tuple[int | None, int | None]]()
    i = j = 0
    while i < rows or j < columns:
        both = i < rows and j < columns
        if (both and before[i] == after[j]) or (both and costs[i][j] == 1 + costs[i + 1][j + 1]):
            pairs.append((i, j))
            i, j = i + 1, j + 1
        elif i < rows and costs[i][j] == 1 + costs[i + 1][j]:
            pairs.append((i, None))
            i += 1
        else:
            pairs.append((None, j))
            j += 1
    return pairs

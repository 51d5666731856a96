"""What differs between two translations, token by token: kept, changed or new."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from dragoman.explain.explanation import Explanation

TokenState = Literal["kept", "changed", "new"]
MAX_COMPARED = 4_000_000  # cells of the comparison, tokens times tokens; past it all have changed


@dataclass(frozen=True, slots=True)
class TokenChanges:
    """How one output became another.

    A token of the new output is kept if it stands in the old one too, changed if it replaces
    tokens of the old one, and new if nothing stood there.
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
    """Align what lies between equal ends by the least edit distance; of equal ones, the first."""
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

"""Constraints compiled to an automaton over tokens, with look-ahead: no violation, no dead end.

A token is allowed if some completion within the remaining tokens fulfils all constraints. That is
known exactly:

- `Require`, `Forbid` and `Regex` are one minimal DFA over classes of characters (their product).
- `EqualLength` and `Punctuation` determine the characters allowed at a position. A table holds
  the least number of tokens from each (state of the DFA, position) to an accepted end.
- `Mirror` and `NoCopy` remember characters, so their automata have a state for each assignment of
  characters to positions. It is never built: the table bounds from below, and a memoized search
  looks for one completion. With one character per token, characters that no constraint tells apart
  are interchangeable, which leaves few states; else states are compared as they are.

Constraints are on the decoded text. A token is the characters that it adds to it, however the text
is tokenized; tokens of single bytes must form valid UTF-8. `ConstrainedRows`
(`constrained_logits.py`) masks the tokens that are not allowed, for every strategy.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from dragoman.decoding.output_constraint_definitions import (
    Constraint,
    EqualLength,
    Mirror,
    NoCopy,
    Punctuation,
    is_mark,
    mark_characters,
)
from dragoman.decoding.regex_to_dfa import (
    ANYTHING,
    DEAD,
    EMPTY,
    MAX_CODE_POINT,
    Alphabet,
    Alternation,
    BoolArray,
    Characters,
    Concatenation,
    Expression,
    build_dfa,
    collect_sets,
    whitespace,
)
from dragoman.decoding.token_surface_forms import (
    NEVER_WRITTEN,
    SURROGATES,
    TokenCharacters,
    code_point_bounds,
    missing_bytes,
)
from dragoman.errors import ConfigError, DataError

IntArray = NDArray[np.int64]

UNREACHABLE = 1 << 30  # tokens to an accepted end where there is none
MAX_TABLE_CELLS = 40_000_000  # states of the DFA times distinct tokens
MAX_SEARCHED_STATES = 20_000  # by one search for a completion; past it a token is not allowed


class ConstraintError(DataError):
    """Constraints that no output fulfils together."""


class NotBlank(Constraint):
    """The output holds more than white space; added when the translator searches again."""

    name = "not_blank"

    def holds(self, source: str, output: str) -> bool:
        """Whether some character is no white space."""
        return bool(output.strip())

    def expressions(self) -> Iterable[tuple[Expression, bool]]:
        """Yield the expression."""
        solid = Characters(whitespace().complement())
        return [(Concatenation((ANYTHING, solid, ANYTHING)), True)]


class AutomatonState(NamedTuple):
    """The state of the text so far."""

    state: int  # of the DFA
    position: int  # characters written
    is_first: bool  # whether no token has been written
    pending: bytes  # of a character whose last bytes are missing
    mirrored: Mapping[str, str]  # the output's character for each of the source's
    owners: Mapping[str, object]  # the source's character where each of the output's occurs


_NOTHING: Mapping[str, Any] = MappingProxyType({})


class CompiledConstraints:
    """Constraints compiled for a vocabulary, shared by all sentences."""

    def __init__(self, constraints: Iterable[Constraint], vocabulary: TokenCharacters) -> None:
        self.constraints, self.vocabulary = tuple(constraints), vocabulary
        given = {type(each) for each in self.constraints}
        self.equal_length, self.mirror = EqualLength in given, Mirror in given
        self.no_copy, self.punctuation = NoCopy in given, Punctuation in given
        self.remembers = self.mirror or self.no_copy
        # Which of the characters outside the vocabulary were written is not remembered.
        self.has_bytes = vocabulary.has_bytes and not self.remembers
        self._compile([pair for each in self.constraints for pair in each.expressions()])
        self._bound_codes = functools.cache(self._count_codes)
        self.tables = dict[int, IntArray]()  # those that sentences share, by length

    def _compile(self, expressions: list[tuple[Expression, bool]]) -> None:
        """Build the DFA, and the state that each token leads to from each state."""
        if self.vocabulary.strip:  # the decoder strips white space at the ends
            solid = Characters(whitespace().complement())
            more = Alternation((EMPTY, Concatenation((ANYTHING, solid))))
            stripped = Alternation((EMPTY, Concatenation((solid, more))))
            expressions = [*expressions, (stripped, True)]
        never = [NEVER_WRITTEN, SURROGATES, *([mark_characters()] if self.punctuation else [])]
        sets = [each for expression, _ in expressions for each in collect_sets(expression)]
        self.alphabet = alphabet = Alphabet([*sets, *never])
        dfa = build_dfa(ANYTHING, alphabet)
        for expression, must_match in expressions:
            other = build_dfa(expression, alphabet)
            dfa = dfa.intersect(other if must_match else other.complement())
        self.start, self.accepts = dfa.start, dfa.accepts
        is_excluded = alphabet.members(NEVER_WRITTEN) | alphabet.members(SURROGATES)
        self.transitions = dfa.transitions.copy()
        self.transitions[:, is_excluded] = DEAD
        vocabulary, table = self.vocabulary, self.vocabulary.table
        # Class of each character of the vocabulary; past the end of a token one that moves nothing.
        self.classes = np.append(alphabet.classes_of(vocabulary.codes), alphabet.size)
        still = np.arange(len(self.accepts), dtype=np.int32)[:, None]
        self._moves = np.concatenate([self.transitions, still], axis=1)  # (S, M + 1)
        by_class = self.classes[table.characters]  # (V, W)
        rows = np.where(table.valid[:, None], by_class, -1)
        distinct, self.kinds = np.unique(rows, axis=0, return_inverse=True)  # tokens alike
        self.kinds = self.kinds.reshape(-1)
        if len(self.accepts) * len(distinct) > MAX_TABLE_CELLS:
            raise ConfigError(
                [
                    "the constraints must be simple enough for this vocabulary; found "
                    f"{len(self.accepts):,} states for {len(distinct):,} kinds of tokens; "
                    "shorten a counted repetition, or require fewer words"
                ]
            )
        self.kind_lengths = (distinct < alphabet.size).sum(axis=1)
        is_token = distinct[:, 0] >= 0
        reached = np.broadcast_to(still, (len(self.accepts), len(distinct)))
        for column in distinct.T:
            reached = self._moves[reached, column]
        self.next_by_kind = np.where(is_token, reached, DEAD)  # (S, G)
        first = vocabulary.first_table
        reached = np.full(vocabulary.size, self.start, dtype=np.int32)
        for column in self.classes[first.characters].T:
            reached = self._moves[reached, column]
        self.next_of_first = np.where(first.valid, reached, DEAD)  # (V,)

    def next_state(self, state: AutomatonState, token: int) -> int:
        """Return the state of the DFA that one token leads to."""
        if state.is_first:
            return int(self.next_of_first[token])
        return int(self.next_by_kind[state.state, self.kinds[token]])

    def _count_codes(self, pending: bytes) -> dict[int, int]:
        """Return how many characters of each class begin with these bytes."""
        bounds = code_point_bounds(pending)
        return {} if bounds is None else self.alphabet.counts_between(*bounds)

    def codes_beginning_with(self, pending: bytes) -> dict[int, int]:
        """Return how many characters of each class begin with these bytes, computed once."""
        return self._bound_codes(pending)

    def bind(self, source: str) -> SentenceConstraints:
        """Return the constraints of one sentence."""
        return SentenceConstraints(self, source)


class _SearchLimitError(Exception):
    """The search for a completion visited too many states."""


class SentenceConstraints:
    """The automaton of one sentence: which tokens may follow, and how each continues."""

    reason = "constraint"  # reason in a beam trace for a token that it forbids

    def __init__(self, compiled: CompiledConstraints, source: str) -> None:
        self.compiled, self.source = compiled, source
        self.needs_check = compiled.remembers
        vocabulary = compiled.vocabulary
        # Characters that are not allowed at a free position; the last number is past a token's end.
        self._blocked = np.zeros(len(vocabulary.characters) + 1, dtype=bool)
        if compiled.no_copy:
            self._block(each for each in source if not is_mark(each))
        if compiled.punctuation:
            is_mark_class = compiled.alphabet.members(mark_characters())
            self._blocked[:-1] |= is_mark_class[compiled.classes[:-1]]
            self._mark_classes = set(np.flatnonzero(is_mark_class).tolist())
        else:
            self._mark_classes = set()
        self._forced = {
            at: each for at, each in enumerate(source) if compiled.punctuation and is_mark(each)
        }
        self._first_end = 1 + max(self._forced, default=-1)  # the least length of an output
        # Positions from here on are alike.
        self._steady = len(source) if compiled.equal_length else self._first_end
        self._known_kinds = dict[Any, IntArray]()
        # Whether every character is allowed at every position.
        self._is_open = not self._forced and not compiled.remembers and not self._blocked.any()
        self._tokens_left = self._shared_table() if self._is_open else self._build_table()
        self._known = dict[Any, bool]()
        self._visited = 0

    def _block(self, characters: Iterable[str]) -> None:
        numbers = self.compiled.vocabulary.numbers
        self._blocked[[numbers[each] for each in characters if each in numbers]] = True

    def start(self) -> AutomatonState:
        """Return the state before the first token."""
        return AutomatonState(self.compiled.start, 0, True, b"", _NOTHING, _NOTHING)

    def accepts(self, state: AutomatonState) -> bool:
        """Whether the text so far fulfils all constraints."""
        return not state.pending and self._is_end(state.state, state.position)

    def _is_end(self, state: int, position: int) -> bool:
        return bool(self.compiled.accepts[state]) and self._is_last(position)

    def _is_last(self, position: int) -> bool:
        if self.compiled.equal_length:
            return position == len(self.source)
        return position >= self._first_end

    # The table of distances.

    def _shared_table(self) -> IntArray:
        """Return the table that all sentences of this length share."""
        tables = self.compiled.tables
        if self._steady not in tables:
            tables[self._steady] = self._build_table()
        return tables[self._steady]

    def _build_table(self) -> IntArray:
        """Return the least tokens from (state, position) to an accepted end, (S, P + 2).

        Mirror and NoCopy count only by the characters of the source. The last column, past the
        longest text, is unreachable.
        """
        compiled, steady = self.compiled, self._steady
        table = np.full((len(compiled.accepts), steady + 2), UNREACHABLE, dtype=np.int64)
        for position in range(steady, -1, -1):
            if self._is_last(position):
                table[compiled.accepts, position] = 0
            if compiled.equal_length and position == steady:
                continue
            kinds = self._kinds_at(position)
            nexts = compiled.next_by_kind[:, kinds]  # (S, G)
            ends = self._columns(position + compiled.kind_lengths[kinds])
            edges = list(self._byte_edges(position))
            end = min(position + 1, self._last_column)
            while True:
                before = table[:, position].copy()
                if kinds.size:
                    found = 1 + table[nexts, ends].min(axis=1)
                    table[:, position] = np.minimum(table[:, position], found)
                for number, cost in edges:
                    found = cost + table[compiled.transitions[:, number], end]
                    table[:, position] = np.minimum(table[:, position], found)
                table[DEAD, position] = UNREACHABLE
                is_loop = position == steady  # a token leads to the same column
                if not is_loop or np.array_equal(before, table[:, position]):
                    break
        return np.minimum(table, UNREACHABLE)

    def _kinds_at(self, position: int) -> IntArray:
        """Return the kinds of tokens that may be written from a position on."""
        # With one character per token only the character at the position decides.
        is_simple = self.compiled.vocabulary.is_character_level
        key = self._forced.get(position) if is_simple else position
        if key not in self._known_kinds:
            kinds = self.compiled.kinds[self._allowed_by_position(position)]
            counts = np.bincount(kinds, minlength=len(self.compiled.kind_lengths))
            self._known_kinds[key] = np.flatnonzero(counts)
        return self._known_kinds[key]

    @property
    def _last_column(self) -> int:
        return self._steady + 1 if self.compiled.equal_length else self._steady

    def _columns(self, positions: IntArray) -> IntArray:
        """Return the table's column of each position."""
        return np.minimum(positions, self._last_column)

    def _byte_edges(self, position: int) -> Iterator[tuple[int, int]]:
        """Yield classes of characters that bytes can write at a position, with their bytes."""
        if not self.compiled.has_bytes:
            return
        forced = self._forced.get(position)
        if forced is not None:
            yield self.compiled.alphabet.class_of(forced), len(forced.encode())
            return
        for cost, low, high in ((1, 0, 0x7F), (2, 0x80, 0x7FF), (3, 0x800, 0xFFFF),
                                (4, 0x10000, MAX_CODE_POINT)):  # fmt: skip
            for number in self._open_classes(self.compiled.alphabet.counts_between(low, high)):
                yield number, cost

    def _open_classes(self, counts: Mapping[int, int]) -> Iterator[int]:
        """Yield the classes of which some character is allowed at a free position."""
        yield from (number for number in counts if number not in self._mark_classes)

    # What may follow.

    def _allowed_by_position(
        self, position: int, state: AutomatonState | None = None, *, first: bool = False
    ) -> BoolArray:
        """Return the tokens whose characters are allowed from a position on, (V,)."""
        vocabulary = self.compiled.vocabulary
        table = vocabulary.first_table if first else vocabulary.table
        if self._is_open:
            return table.valid
        allowed: BoolArray = table.valid.copy()
        for column in range(table.characters.shape[1]):
            at = position + column
            forced = self._forced.get(at)
            x = self.source[at] if at < len(self.source) else None
            if forced is None and state is not None and x is not None:
                forced = state.mirrored.get(x)
            if forced is None:
                characters = ~self._blocked
                if state is not None:
                    taken = [
                        vocabulary.numbers[each]
                        for each, owner in state.owners.items()
                        if owner != x or x is None
                    ]
                    characters[taken] = False
            else:
                characters = np.zeros_like(self._blocked)
                number = vocabulary.numbers.get(forced)
                if number is not None:
                    characters[number] = at in self._forced or not self._blocked[number]
            characters[-1] = True
            allowed &= characters[table.characters[:, column]]
        return allowed

    def allowed(self, state: AutomatonState, remaining: int) -> BoolArray:
        """Return which tokens may follow, (V,), if so many more may be written before EOS.

        If `needs_check`, `can_complete` then decides on each of them.
        """
        compiled = self.compiled
        found = np.zeros(compiled.vocabulary.size, dtype=bool)
        if remaining > 0:
            if not state.pending:
                distances = self._distances(state)
                found = distances < remaining
            if compiled.has_bytes:
                close = self._byte_distances(state.state, state.position, state.pending) < remaining
                found[compiled.vocabulary.byte_ids[close]] = True
        found[compiled.vocabulary.end] = self.accepts(state)
        return found

    def _distances(self, state: AutomatonState) -> IntArray:
        """Return the tokens to an accepted end after each token that writes characters, (V,)."""
        compiled, vocabulary = self.compiled, self.compiled.vocabulary
        table = vocabulary.first_table if state.is_first else vocabulary.table
        if state.is_first:
            columns = self._columns(state.position + table.lengths)
            distances = self._tokens_left[compiled.next_of_first, columns]
        else:
            columns = self._columns(state.position + compiled.kind_lengths)
            by_kind = self._tokens_left[compiled.next_by_kind[state.state], columns]
            distances = by_kind[compiled.kinds]
        allowed = self._allowed_by_position(state.position, state, first=state.is_first)
        distances = np.where(allowed, distances, UNREACHABLE)
        if state.is_first and vocabulary.strip and not self.accepts(state):
            # After spaces alone the next token is again the first.
            is_space = table.valid & (table.lengths == 0)
            nearest = int(distances[~is_space].min(initial=UNREACHABLE))
            distances[is_space] = min(1 + nearest, UNREACHABLE)
        return distances

    @functools.cached_property
    def _known_byte_distances(self) -> dict[tuple[int, int, bytes], IntArray]:
        return {}

    def _byte_distances(self, state: int, position: int, pending: bytes) -> IntArray:
        """Return the tokens to an accepted end after each byte, (256,)."""
        column = min(position + 1, self._last_column)
        key = (state, min(position, self._last_column), pending)
        known = self._known_byte_distances.get(key)
        if known is not None:
            return known
        compiled, forced = self.compiled, self._forced.get(position)
        distances = np.full(256, UNREACHABLE, dtype=np.int64)
        for byte in range(256):
            more = pending + bytes([byte])
            if forced is None:
                classes = list(self._open_classes(compiled.codes_beginning_with(more)))
            elif forced.encode().startswith(more):
                classes = [compiled.alphabet.class_of(forced)]
            else:
                continue
            if classes:
                ends = self._tokens_left[compiled.transitions[state, classes], column]
                distances[byte] = missing_bytes(more) + int(ends.min())
        self._known_byte_distances[key] = distances
        return distances

    def advance(self, state: AutomatonState, token: int) -> AutomatonState:
        """Return the state after a token that `allowed` returned."""
        vocabulary, compiled = self.compiled.vocabulary, self.compiled
        table = vocabulary.first_table if state.is_first else vocabulary.table
        if not table.valid[token]:
            return self._advance_byte(state, token)
        length = int(table.lengths[token])
        text = [vocabulary.characters[each] for each in table.characters[token, :length]]
        mirrored, owners = state.mirrored, state.owners
        if compiled.remembers and text:
            mirrored, owners = self._remember(state, text)
        is_first = state.is_first and vocabulary.strip and not text
        following = compiled.next_state(state, token)
        return AutomatonState(following, state.position + length, is_first, b"", mirrored, owners)

    def _advance_byte(self, state: AutomatonState, token: int) -> AutomatonState:
        byte = int(np.flatnonzero(self.compiled.vocabulary.byte_ids == token)[0])
        pending = state.pending + bytes([byte])
        state = state._replace(is_first=False, pending=pending)
        if missing_bytes(pending):
            return state
        number = self.compiled.alphabet.class_of(pending.decode())
        following = int(self.compiled.transitions[state.state, number])
        return state._replace(state=following, position=state.position + 1, pending=b"")

    def _remember(
        self, state: AutomatonState, text: Sequence[str]
    ) -> tuple[Mapping[str, str], Mapping[str, object]]:
        """Return the states of Mirror and NoCopy after some more characters."""
        mirrored, owners = dict(state.mirrored), dict(state.owners)
        for at, character in enumerate(text, start=state.position):
            x = self.source[at] if at < len(self.source) else None
            if self.compiled.mirror and x is not None and not is_mark(x):
                mirrored[x] = character
            if self.compiled.no_copy and not is_mark(character):
                owners[character] = at if x is None else x
        return mirrored, owners

    def _agrees(self, state: AutomatonState, token: int) -> bool:
        """Whether the characters of a token agree with one another under Mirror and NoCopy."""
        vocabulary = self.compiled.vocabulary
        table = vocabulary.first_table if state.is_first else vocabulary.table
        length = int(table.lengths[token])
        mirrored, owners = dict(state.mirrored), dict(state.owners)
        for column in range(length):
            character = vocabulary.characters[table.characters[token, column]]
            at = state.position + column
            x = self.source[at] if at < len(self.source) else None
            is_mirrored = self.compiled.mirror and x is not None and not is_mark(x)
            if is_mirrored and mirrored.setdefault(str(x), character) != character:
                return False
            owner = at if x is None else x
            is_owned = self.compiled.no_copy and not is_mark(character)
            if is_owned and owners.setdefault(character, owner) != owner:
                return False
        return True

    # Whether Mirror and NoCopy can be fulfilled to the end.

    def can_complete(self, state: AutomatonState, token: int, remaining: int) -> bool:
        """Whether a token that `allowed` returned leaves a completion under all constraints."""
        if token == self.compiled.vocabulary.end or not self.needs_check:
            return True
        return self._agrees(state, token) and self._has_completion(
            self.advance(state, token), remaining - 1
        )

    def _has_completion(self, state: AutomatonState, remaining: int) -> bool:
        self._visited = 0
        try:
            return self._search(state, remaining)
        except (_SearchLimitError, RecursionError):
            return False

    def _search(self, state: AutomatonState, remaining: int) -> bool:
        """Whether an accepted end is at most so many tokens away; depth first, memoized."""
        if self.accepts(state):
            return True
        column = min(state.position, self._last_column)
        if not state.is_first and self._tokens_left[state.state, column] > remaining:
            return False
        is_compact = self.compiled.vocabulary.is_character_level and not state.is_first
        key = (
            self._compact_key(state, remaining)
            if is_compact
            else (state.state, state.position, state.is_first, remaining,
                  frozenset(state.mirrored.items()), frozenset(state.owners.items()))
        )  # fmt: skip
        known = self._known.get(key)
        if known is not None:
            return known
        self._visited += 1
        if self._visited > MAX_SEARCHED_STATES:
            raise _SearchLimitError
        distances = self._distances(state)
        found = any(
            self._agrees(state, token) and self._search(self.advance(state, token), remaining - 1)
            for token in self._candidates(state, distances, remaining, is_compact=is_compact)
        )
        self._known[key] = found
        return found

    def _candidates(
        self, state: AutomatonState, distances: IntArray, remaining: int, *, is_compact: bool
    ) -> list[int]:
        """Return tokens to try, nearest to an end first; of interchangeable ones the first."""
        tokens = np.flatnonzero(distances < remaining)
        if is_compact and tokens.size:
            vocabulary = self.compiled.vocabulary
            characters = vocabulary.table.characters[tokens, 0]
            # A character that occurs in the text already is not interchangeable.
            taken = [vocabulary.numbers[each] for each in state.owners]
            kinds = np.where(
                np.isin(characters, taken), -1 - characters, self.compiled.classes[characters]
            )
            if self.compiled.no_copy:  # a mark may be repeated, another character may not
                kinds = 2 * kinds + self.compiled.vocabulary.is_mark[characters]
            tokens = tokens[np.unique(kinds, return_index=True)[1]]
        return tokens[np.argsort(distances[tokens], kind="stable")].tolist()

    def _compact_key(self, state: AutomatonState, remaining: int) -> Any:
        """Return all that completions depend on, with interchangeable characters as their class."""
        classes, numbers = self.compiled.classes, self.compiled.vocabulary.numbers
        rest = set(self.source[state.position :])
        mirrored = tuple(
            (x, int(classes[numbers[y]]), is_mark(y))
            for x, y in state.mirrored.items()
            if x in rest
        )
        used = dict[int, int]()
        owned = list[tuple[str, int]]()
        for character, owner in state.owners.items():
            number = int(classes[numbers[character]])
            used[number] = used.get(number, 0) + 1
            if owner in rest and (not self.compiled.mirror or is_mark(str(owner))):
                owned.append((str(owner), number))
        # Only how many characters of a class are left, where they may not be enough.
        scarce = tuple(
            sorted(
                (number, self._open_counts[number] - count)
                for number, count in used.items()
                if self._open_counts[number] - count < remaining
            )
        )
        return state.state, state.position, remaining, tuple(sorted(mirrored)), tuple(
            sorted(owned)
        ), scarce  # fmt: skip

    @functools.cached_property
    def _open_counts(self) -> IntArray:
        """The number of characters of each class that may stand at a free position."""
        vocabulary = self.compiled.vocabulary
        is_written = np.zeros(len(vocabulary.characters) + 1, dtype=bool)
        is_written[vocabulary.table.characters[vocabulary.table.valid].reshape(-1)] = True
        is_open = (is_written & ~self._blocked & ~vocabulary.is_mark)[:-1]
        return np.bincount(
            self.compiled.classes[:-1][is_open], minlength=self.compiled.alphabet.size + 1
        )

    def is_possible(self, remaining: int, prefix: Sequence[int] = ()) -> bool:
        """Whether an output of at most so many tokens, after a prefix, fulfils everything."""
        state = self.start()
        for token in prefix:
            if not self.allowed(state, remaining)[token]:
                return False
            if not self.can_complete(state, token, remaining):
                return False
            state, remaining = self.advance(state, token), remaining - 1
        if self.accepts(state):
            return True
        tokens = np.flatnonzero(self.allowed(state, remaining))
        if not self.needs_check:
            return bool(tokens.size)
        return self._has_completion(state, remaining)


def check_constraints(
    compiled: CompiledConstraints,
    constraints: SentenceConstraints,
    limit: int,
    prefix: Sequence[int] = (),
    *,
    line: int | None = None,
    limit_name: str = "decode.max_length_extra",
) -> None:
    """Raise ConstraintError that names the constraints which no output fulfils together.

    `limit_name` is the option that allows longer outputs.
    """
    if constraints.is_possible(limit, prefix):
        return
    source = constraints.source
    shown = f"{source!r:.60}" + (f" (line {line})" if line is not None else "")
    if prefix and constraints.is_possible(limit):
        raise ConstraintError(
            "the prefix must agree with the constraints",
            found=f"one that no output continues for {shown}",
            fix="change the prefix or drop a constraint",
        )
    kept = list(compiled.constraints)
    is_length_to_blame = _is_possible(kept, compiled.vocabulary, source, UNREACHABLE >> 1)
    most = limit if is_length_to_blame else UNREACHABLE >> 1
    for each in compiled.constraints:  # drop whatever is not needed for the conflict
        others = [other for other in kept if other is not each]
        if not _is_possible(others, compiled.vocabulary, source, most):
            kept = others
    names = " and ".join(each.describe(source) for each in kept)
    missing = [
        character
        for each in kept
        for text in (each.words or ([source] if isinstance(each, Punctuation) else []))
        for character in compiled.vocabulary.missing(text)
        if each.words or is_mark(character)
    ]
    if missing:
        raise ConstraintError(
            "the model's vocabulary must hold the characters that a constraint demands",
            found=f"none for {missing[0]!r} of {names}, for {shown}",
            fix="use another word, or train on text with it; text.character_coverage=1.0 keeps all "
            "characters",
        )
    if is_length_to_blame:
        raise ConstraintError(
            "some output must fulfil all constraints",
            found=f"none of at most {limit} tokens under {names}, for {shown}",
            fix=f"raise {limit_name}, or drop a constraint",
        )
    fix = "drop one of them" if len(kept) > 1 else "change it"
    raise ConstraintError(
        "some output must fulfil all constraints",
        found=f"none under {names}, for {shown}",
        fix=fix,
    )


def _is_possible(
    constraints: Sequence[Constraint], vocabulary: TokenCharacters, source: str, limit: int
) -> bool:
    return CompiledConstraints(constraints, vocabulary).bind(source).is_possible(limit)

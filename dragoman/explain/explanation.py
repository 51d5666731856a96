"""Explanation: one output of a model with everything that can be seen of how it came about.

The arrays are exact float32 and integer arrays. The JSON form (`explanation_json.py`, documented
field by field in `docs/explanation.md`) is quantized and stays within a budget of bytes. This
module imports no torch: an explanation that was read from a file can be shown without it.
"""

from __future__ import annotations

import importlib
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from dragoman.bundle.format import BOX
from dragoman.errors import DataError

if TYPE_CHECKING:
    from dragoman.decoding.beam_trace import BeamTrace

AttentionWeights = NDArray[np.float32]
Array = NDArray[Any]

FORMAT = "dragoman.explanation"
FORMAT_VERSION = 1
DEFAULT_BUDGET = 2_000_000  # bytes of the JSON form
PANELS = ("strip", "beam", "heads", "head", "token", "positions", "attribution")
SPACE_MARK = "\u2581"


@dataclass(frozen=True, slots=True)
class Token:
    """One token of a text."""

    id: int
    text: str  # a leading space is " "; a byte token is "<0xE4>"
    span: tuple[int, int]  # code points of the text; empty for special tokens
    special: bool = False
    rank: int | None = None  # rank by frequency, 0 for the most frequent; None if unknown


@dataclass(frozen=True, slots=True)
class TokenizedText:
    """A text, its tokens and its words."""

    text: str
    dir: Literal["ltr", "rtl"] = "ltr"
    lang: str = ""
    tokens: list[Token] = field(default_factory=list)
    words: list[tuple[int, int]] = field(default_factory=list)  # ranges of tokens


@dataclass(frozen=True, slots=True)
class Step:
    """The model's distribution at one target position, and the token there."""

    id: int
    logprob: float
    rank: int  # 1 is the most probable token
    entropy: float  # in nats
    forced: bool = False  # whether the token was given (prefix, reference), not chosen
    masked: int = 0  # tokens that were forbidden here
    top: list[tuple[int, str, float]] = field(default_factory=list)  # id, text, log-probability


@dataclass(frozen=True, slots=True)
class AttentionSite:
    """One attention layer, or one part of its weights: what its rows and columns are."""

    id: str  # "e0", "d0", "x0"; "x0b" for a second attention of the layer
    path: str  # of the module: "decoder.3.cross"
    kind: str  # self, cross, conv, memory, set or pool
    group: str  # encoder, decoder or cross
    layer: int
    heads: int
    query: str  # name of the axis of the rows
    key: str  # name of the axis of the columns
    sum: str = "one"  # what a row sums to: "one", "sub" (at most one) or "none"
    causal: bool = False
    ordered: bool = True  # False for sets
    segments: list[tuple[str, int, int]] = field(default_factory=list)  # parts of the key axis
    query_labels: list[str] | None = None  # for axes that are no strip of tokens
    key_labels: list[str] | None = None

    @property
    def tensor(self) -> str:
        """Name of the array of weights, (H, Q, K)."""
        return f"{self.id}.w"

    @property
    def contribution(self) -> str:
        """Name of the array of contribution norms, (H, Q, K)."""
        return f"{self.id}.c"


@dataclass(frozen=True, slots=True)
class HeadSummary:
    """Statistics of one head in this example."""

    site: str
    head: int
    labels: list[tuple[str, float]] = field(default_factory=list)  # name, score
    entropy: float | None = None  # mean of the rows, in nats
    distance: float | None = None  # mean |i - j|; None where positions have no order
    effect_estimate: float | None = None  # first-order change of the target's log-probability
    effect_exact: float | None = None  # the change when the head is off

    @property
    def name(self) -> str:
        """The head as it is written everywhere: "x3.2"."""
        return f"{self.site}.{self.head}"


@dataclass(frozen=True, slots=True)
class NBestEntry:
    """One entry of the n-best list."""

    tokens: list[int]  # without the end of sentence
    text: str
    sum: float  # log-probability
    normalised: float  # under the length penalty
    leaf: int | None = None  # node of the beam trace


@dataclass(frozen=True, slots=True)
class Attribution:
    """How much each source token, and each earlier target token, changed each target token."""

    method: str
    source: str  # name of an array (T, S)
    target: str | None = None  # name of an array (T, T)
    signed: bool = True
    gap: float | None = None  # relative distance from completeness, where the method promises it


@dataclass(frozen=True, kw_only=True, slots=True)
class Ablation:
    """The effect of switching off heads or other parts of a model."""

    off: list[str]
    effect: list[float]  # change of each explained output's log-probability, teacher-forced
    sum_change: float
    target: TokenizedText  # the new output
    steps: list[Step]
    score: dict[str, Any]

    @property
    def text(self) -> str:
        """The new output's text."""
        return self.target.text

    @property
    def tokens(self) -> list[str]:
        """The new output's tokens."""
        return [token.text for token in self.target.tokens]

    def to_dict(self) -> dict[str, Any]:
        """Return everything as JSON values, as in `Explanation.ablations`."""
        from dragoman.explain.explanation_json import encode_step, encode_text

        return {
            "off": list(self.off),
            "effect": [round(each, 6) for each in self.effect],
            "sum_change": round(self.sum_change, 6),
            "text": self.text,
            "target": encode_text(self.target),
            "steps": [encode_step(step) for step in self.steps],
            "score": self.score,
        }


@dataclass(frozen=True, kw_only=True)
class Explanation:
    """One output of a model, how it was found, and what can be seen inside.

    `arrays[site.tensor][head]` has one row per query position. A row sums to 1, or to at most 1
    for alignments that are not normalized (`site.sum`). Row t of an axis "target" is the position
    that predicts target token t. Parts that a model lacks are named in `missing`, by panel.
    """

    model: dict[str, Any]
    request: dict[str, Any]
    source: TokenizedText
    target: TokenizedText
    steps: list[Step] = field(default_factory=list)
    score: dict[str, Any] = field(default_factory=dict)  # sum, normalised, penalty
    nbest: list[NBestEntry] = field(default_factory=list)
    beam: BeamTrace | None = None
    sites: list[AttentionSite] = field(default_factory=list)
    heads: list[HeadSummary] = field(default_factory=list)
    lens: dict[str, Any] | None = None
    attribution: list[Attribution] = field(default_factory=list)
    positions: dict[str, Any] = field(default_factory=dict)
    extras: dict[str, str] = field(default_factory=dict)  # what it is -> name of an array
    arrays: dict[str, Array] = field(default_factory=dict)
    checks: dict[str, float] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)  # panel -> why there is nothing
    token_texts: dict[int, str] = field(default_factory=dict)  # texts of ids in the beam and n-best
    branches: dict[str, dict[str, Any]] = field(default_factory=dict)
    ablations: dict[str, dict[str, Any]] = field(default_factory=dict)
    # Of an explanation that was read from JSON: group borders of pooled arrays, and its digest.
    pools: dict[str, dict[str, list[int]]] = field(default_factory=dict)
    stored_digest: str = ""

    def __repr__(self) -> str:
        """Return input and output, the score and the numbers of tokens and attention sites."""
        found = [self.text, self.translation]
        if self.model.get("task") in ("classify", "pairs") and self.steps:
            step = self.steps[0]  # of the label; the target is empty, or the second sentence
            label = next((text for id_, text, _ in step.top if id_ == step.id), f"#{step.id}")
            found = [*(text for text in found if text), label]
        shown = [repr(text) if len(text) <= 60 else f"{text[:59]!r}…" for text in found]
        texts = f"{' | '.join(shown[:-1])} -> {shown[-1]}"
        score = self.score.get("normalised")
        counts = (
            f"{len(self.source.tokens)} source and {len(self.target.tokens)} target tokens, "
            f"{len(self.sites)} attentions"
        )
        return f"Explanation({texts}, {'' if score is None else f'score={score:.4f}, '}{counts})"

    @property
    def text(self) -> str:
        """The input text."""
        return self.source.text

    @property
    def translation(self) -> str:
        """The output text."""
        return self.target.text

    @property
    def src_tokens(self) -> list[str]:
        """S source tokens as the tokenizer writes them, `</s>` last."""
        return [token.text.replace(" ", SPACE_MARK) for token in self.source.tokens]

    @property
    def tgt_tokens(self) -> list[str]:
        """T target tokens as the tokenizer writes them, `</s>` last if it was reached."""
        return [token.text.replace(" ", SPACE_MARK) for token in self.target.tokens]

    @property
    def log_probs(self) -> list[float]:
        """The log-probability of each target token."""
        return [step.logprob for step in self.steps]

    @property
    def attentions(self) -> dict[str, AttentionWeights]:
        """The weights (H, Q, K) of every attention site by its module's path."""
        return {
            site.path: self.arrays[site.tensor] for site in self.sites if site.tensor in self.arrays
        }

    @property
    def alignment(self) -> AttentionWeights | None:
        """Cross-attention weights averaged over layers and heads: (T, S); None without any."""
        cross_attentions = [
            self.arrays[site.tensor].mean(axis=0)
            for site in self.sites
            if (site.group, site.query, site.key) == ("cross", "target", "source")
            and site.tensor in self.arrays
        ]
        if not cross_attentions:
            return None
        mean: AttentionWeights = np.mean(np.stack(cross_attentions), axis=0, dtype=np.float32)
        return mean

    def site(self, name: str) -> AttentionSite:
        """Return a site by its id; raise KeyError if there is none."""
        return next((site for site in self.sites if site.id == name), None) or _no_site(name)

    def with_path(self, path: str | os.PathLike[str], *, share: bool = False) -> Explanation:
        """Return the explanation with its model's directory, for the commands that pages show.

        The built-in model has an empty path: commands use it where no other is named. With `share`,
        for files that others read, an absolute path is cut to its last part.
        """
        shown = os.fsdecode(path)
        if Path(shown) == BOX:
            shown = ""
        elif share and os.path.isabs(shown):
            shown = Path(shown).name
        return replace(self, model={**self.model, "path": shown})

    @property
    def digest(self) -> str:
        """SHA-256 of the content, without checks, limits and precomputed branches.

        The same request to the same model gives the same digest; one that was read from JSON keeps
        the digest it was written with.
        """
        from dragoman.explain.explanation_json import compute_digest

        return self.stored_digest or compute_digest(self)

    def _repr_html_(self) -> str:
        """Return the explorer page in a frame, and a table for notebooks that remove frames."""
        # By name, because the page lies in a higher layer.
        notebook_display = importlib.import_module("dragoman.explore.notebook_display")
        cell: str = notebook_display.render_cell(self)
        return cell

    def to_dict(self, budget: int | None = DEFAULT_BUDGET) -> dict[str, Any]:
        """Return everything as JSON values in at most `budget` bytes; None for no limit.

        What does not fit is pooled or left out, and `limits` lists what.
        """
        from dragoman.explain.explanation_json_size_limit import encode_explanation

        return encode_explanation(self, budget)

    def to_json(self, budget: int | None = DEFAULT_BUDGET) -> str:
        """Return everything as one JSON object; non-ASCII text is not escaped."""
        from dragoman.explain.explanation_json import dump_json

        return dump_json(self.to_dict(budget))

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Explanation:
        """Return the explanation of a JSON object; raise DataError for another format."""
        from dragoman.explain.explanation_json import decode_explanation

        return decode_explanation(values)

    @classmethod
    def from_json(cls, text: str | bytes) -> Explanation:
        """Return the explanation of a JSON text; raise DataError for anything else."""
        try:
            values = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise DataError(
                "an explanation must be a JSON object",
                found=str(error)[:200],
                fix="write it with dragoman explain --json",
            ) from error
        return cls.from_dict(values)


def _no_site(name: str) -> AttentionSite:
    raise KeyError(name)


def is_cross_attention(path: str) -> bool:
    """Whether a path is that of a cross-attention layer."""
    return path.startswith("decoder.") and not path.endswith(".self")


def check_labels(
    weights: AttentionWeights | None, src_tokens: Sequence[str], tgt_tokens: Sequence[str]
) -> None:
    """Raise DataError unless the weights have a row per target and a column per source token."""
    if weights is None:
        raise DataError(
            "an attention map must be drawn from attention weights",
            found="None, the alignment of a model without cross-attention",
            fix="draw one of the explanation's attentions instead, if it has any",
        )
    if weights.shape != (len(tgt_tokens), len(src_tokens)):
        raise DataError(
            "an attention map must have a row per target token and a column per source token",
            found=f"shape {weights.shape} for {len(tgt_tokens)} target and {len(src_tokens)} "
            "source tokens",
            fix="pass one head or the mean of several, with its tokens",
        )

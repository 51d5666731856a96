"""The interface of explaining tasks besides translation: the parts that each task defines.

A `TaskExplainer` holds one encoded input of a model and runs it again; the tasks' own are in the
other modules of this folder. What is switched off by a name such as "e0.1" depends on the
attention: the weights of a head become zero, those of an attention pooling, which has nothing else
to return, become uniform.
"""

from __future__ import annotations

import abc
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from dragoman.attention.attention_weight_hooks import (
    AttentionRecords,
    RecordableAttention,
    WeightsEdit,
    find_attentions,
)
from dragoman.config import Config
from dragoman.explain.classification_occlusion import find_spans
from dragoman.explain.explanation import AttentionSite, Token, TokenizedText
from dragoman.explain.token_spans import find_words, grapheme_ends, text_direction
from dragoman.text.special_tokens import SPECIAL_TOKENS

Floats = NDArray[np.float32]
BATCH_ROWS = 32  # changed inputs that are run together
MAX_COPIES = 32  # of an input in one batch, for gradients of several outputs
INPUT_X_GRADIENT, INTEGRATED_GRADIENTS, VALUE_ZEROING, OCCLUSION = (
    "input_x_gradient",
    "integrated_gradients",
    "value_zeroing",
    "occlusion",
)


class Switch(NamedTuple):
    """A part of a model that can be switched off: an attention, and its weights without it."""

    path: str
    off: WeightsEdit


class RecordedSite(NamedTuple):
    """An attention site with the records of one pass."""

    site: AttentionSite
    weights: Tensor  # (H, Q, K)
    contributions: Tensor  # (H, Q, K) lengths of weight times value, as the model adds them
    switches: tuple[Switch, ...]  # of each head


class TaskExplainer(abc.ABC):
    """One encoded input of a model, and the meaning of its outputs."""

    task: ClassVar[str]
    # Whether an output is a distribution; a number has no probabilities.
    is_distribution: ClassVar[bool] = True

    def __init__(self, model: nn.Module, config: Config) -> None:
        self.model, self.config = model, config
        self.num_tokens = 0  # of the whole text, where only the first ones are read

    # Defined by each task

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
    def name_output(self, output_id: int) -> str:
        """Return the text of an output id."""

    def name_outputs(
        self, ids: Sequence[int], output_ids: Sequence[Sequence[int]]
    ) -> list[list[str]]:
        """Return the texts of some output ids at each position of the output `ids`."""
        return [[self.name_output(output_id) for output_id in row] for row in output_ids]

    @abc.abstractmethod
    def target(self, ids: Sequence[int]) -> TokenizedText:
        """Return the output."""

    @abc.abstractmethod
    def read_sites(self, records: AttentionRecords) -> list[RecordedSite]:
        """Return the attention sites of a pass."""

    @property
    def embeddings(self) -> Sequence[nn.Module]:
        """The modules whose outputs are the input's vectors; () if there are none to change."""
        return ()

    @abc.abstractmethod
    def sum_inputs(self, parts: Mapping[int, Sequence[Tensor]], copies: int) -> Tensor:
        """Return numbers (copies, S) of the source's tokens, then of the target's if it is read.

        `parts` are numbers (rows, positions) of each call of each of the embeddings.
        """

    reads_target: ClassVar[bool] = False  # whether the target's tokens are inputs too

    @abc.abstractmethod
    def occlude(self, ids: Sequence[int]) -> Floats:
        """Return the drop (T, S) of each explained number without each token of `sum_inputs`."""

    @abc.abstractmethod
    def zero_values(self, token: int) -> dict[str, WeightsEdit]:
        """Return edits that make the values of a token of `sum_inputs` zero in all attentions."""

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

    def decide(self, off: Sequence[str], edits: Mapping[str, WeightsEdit]) -> TaskExplainer:
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
        """The panels that the task lacks, with the reason."""
        return {"beam": "This model predicts at once: there is no search."}

    def read_lens(
        self, ids: Sequence[int], off: Sequence[str]
    ) -> tuple[dict[str, Any], dict[str, NDArray[Any]]] | None:
        """Return the logit lens and its arrays, or None if the model has no output matrix."""
        return None

    def extras(
        self, seen: Sequence[RecordedSite], ids: Sequence[int]
    ) -> dict[str, tuple[str, NDArray[Any]]]:
        """Return further arrays of explained ids by what they are: name and array."""
        return {}

    def explained(self, log_probs: Tensor, ids: Sequence[int]) -> Tensor:
        """Return the explained numbers (copies, T): log-probabilities of ids (T,)."""
        wanted = torch.tensor(list(ids), device=log_probs.device)
        return log_probs.gather(2, wanted.view(1, -1, 1).expand(len(log_probs), -1, 1)).squeeze(2)


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
) -> list[RecordedSite]:
    """Return the self-attention sites of a stack, in order, one layer after another."""
    found = list[RecordedSite]()
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
        found.append(RecordedSite(site, weights, norms, switches))
    return found


def row_sum(attention: RecordableAttention) -> str:
    """Return the sum of a row of an attention's weights; mixed heads have no fixed sum."""
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


def locate_tokens(
    text: str, words: Sequence[str], ids: Sequence[int], *, spans: Sequence[Any] | None = None
) -> TokenizedText:
    """Return a text with tokens that are found in it, one after the other.

    A token's span begins where the one before it ends, so that spans tile the text; what a
    tokenizer dropped before a token, such as a space, belongs to it. The text ends with its last
    token: what was not read is left out.
    """
    found = find_spans(text, words) if spans is None else spans
    edges = grapheme_ends(text)
    tokens, start = list[Token](), 0
    for word, token_id, span in zip(words, ids, found, strict=True):
        end = start if span is None else max(start, edges[span[1]])
        # The rank by frequency of a vocabulary that is sorted by it.
        rank = token_id - len(SPECIAL_TOKENS) if token_id >= len(SPECIAL_TOKENS) else None
        tokens.append(Token(int(token_id), text[start:end] or word, (start, end), rank=rank))
        start = end
    return TokenizedText(
        text=text[:start],
        dir=text_direction(text),
        tokens=tokens,
        words=find_words(text, tokens),
    )


def name_classes(names: Sequence[str]) -> TokenizedText:
    """Return classes as the tokens of an output without a text."""
    return TokenizedText(
        text="", tokens=[Token(output_id, name, (0, 0)) for output_id, name in enumerate(names)]
    )

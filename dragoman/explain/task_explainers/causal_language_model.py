"""Texts of causal language models as inputs to be explained: given, or continued by the model.

A causal model's text is its own input: token t is predicted from those before it, so the axis of
the keys is the target, one position earlier. A model with a memory reads it segment by segment and
attends to earlier ones; a model without reads overlapping windows, as it does when it scores.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from dragoman.attention.attention_weight_hooks import (
    AttentionRecord,
    AttentionRecords,
    WeightsEdit,
    edit,
    find_attentions,
)
from dragoman.errors import DataError
from dragoman.explain.explanation import AttentionSite, Token, TokenizedText
from dragoman.explain.task_explainers.base import (
    BATCH_ROWS,
    MAX_COPIES,
    Floats,
    RecordedSite,
    Switch,
    TaskExplainer,
    column_off,
    contribution_norms,
    describe_positions,
    heads_of,
    row_sum,
    to_array,
)
from dragoman.explain.token_spans import find_words, grapheme_ends, text_direction
from dragoman.models.forward_context import ForwardContext
from dragoman.models.language_model import NeuralLanguageModel
from dragoman.tasks.language_model import LanguageTask
from dragoman.text.language_model_tokenizer import (
    ByteTokenizer,
    LanguageModelTokenizer,
    SubwordTokenizer,
    WordTokenizer,
    document_lines,
)
from dragoman.text.special_tokens import BOS, EOS, PAD, SPECIAL_TOKENS, UNK

MAX_LOGITS = 1 << 25  # logits of a batch
LENS_TOKENS = 5  # most probable tokens of each layer
_MASK = "<mask>"


class ReadWindow(NamedTuple):
    """Positions that are read together, of which those from `scored` on predict tokens."""

    begin: int
    scored: int
    end: int


def spell_tokens(
    text: LanguageModelTokenizer,
    ids: Sequence[int],
    *,
    mask: int | None = None,
    words: Sequence[str] = (),
) -> TokenizedText:
    """Return tokens with the text that each adds, which their spans tile.

    A token that completes no character, such as one byte of several, has an empty span. `words` are
    those of the first tokens as they were given; unknown ones are shown as they were.
    """
    decoder, written, texts = text.decoder([]), "", list[str]()
    for at, token_id in enumerate(map(int, ids)):
        added = f"{' ' * bool(written)}{_MASK}" if token_id == mask else ""
        if token_id not in (PAD, BOS, mask):
            added = decoder.push(token_id)
        if token_id == UNK and at < len(words):
            added = added.replace(SPECIAL_TOKENS[UNK], words[at])
        written += added
        texts.append(added)
    ranks = text.tokenizer.frequency_ranks if isinstance(text, SubwordTokenizer) else None
    edges = grapheme_ends(written)
    tokens, start, read = list[Token](), 0, 0
    for token_id, token_text in zip(map(int, ids), texts, strict=True):
        read += len(token_text)
        end = max(start, edges[read])
        is_special = token_id in (PAD, BOS, mask)
        rank = token_id - len(SPECIAL_TOKENS)
        tokens.append(
            Token(
                token_id,
                token_text or name_token(text, token_id, mask=mask),
                (start, end),
                special=is_special,
                rank=None if is_special or rank < 0 else rank if ranks is None else ranks[token_id],
            )
        )
        start = end
    return TokenizedText(
        text=written, dir=text_direction(written), tokens=tokens, words=find_words(written, tokens)
    )


def name_token(text: LanguageModelTokenizer, token_id: int, *, mask: int | None = None) -> str:
    """Return a token's text: a leading space is " ", a byte that is no character "<0xE4>"."""
    if token_id == mask:
        return _MASK
    if token_id == EOS:
        return "\n"
    if token_id < len(SPECIAL_TOKENS):
        return SPECIAL_TOKENS[token_id]
    if isinstance(text, SubwordTokenizer):
        return text.tokenizer.tokens([token_id])[0].replace("\u2581", " ")
    if isinstance(text, ByteTokenizer):
        byte = token_id - len(SPECIAL_TOKENS)
        return chr(byte) if 32 <= byte < 127 or byte == 10 else f"<0x{byte:02X}>"
    return text.decoder([token_id]).push(token_id)


class LanguageModelInput(TaskExplainer):
    """A text with the probability of each token given those before it; its end may be the model's.

    `ids` are all tokens, of which `forced` were given and the others chosen one after another.
    """

    task: ClassVar[str] = "language"
    model: NeuralLanguageModel

    def __init__(
        self,
        model: NeuralLanguageModel,
        task: LanguageTask,
        ids: Sequence[int],
        *,
        forced: int | None = None,
        max_tokens: int = 0,
        text: str = "",
    ) -> None:
        super().__init__(model, task.config)
        if not len(ids) and not max_tokens:
            raise DataError(
                "a text to explain must have tokens", found=repr(text), fix="pass a text"
            )
        self.language, self.ids, self.text = task, [int(each) for each in ids], text
        self.given = len(self.ids) if forced is None else forced
        self.max_tokens = max_tokens

    @property
    def source(self) -> TokenizedText:
        """A language model has no source."""
        return TokenizedText(text="")

    @property
    def request(self) -> dict[str, Any]:
        """The text or prompt, and all tokens."""
        return {
            "text": self.text,
            "max_tokens": self.max_tokens,
            "prefix_ids": self.ids[: self.given],
            "ids": list(self.ids),
        }

    # Passes

    def reads(self) -> list[ReadWindow]:
        """Return how the input is read: what was given as in scoring, the rest as generated."""
        settings, total = self.config.language, len(self.ids)
        known = total if self.given >= total else self.given + 1
        if self.language.carries:
            size = settings.segment
            chunks = [(first, min(first + size, known)) for first in range(0, known, size)]
            chunks += [(at, at + 1) for at in range(known, total)]
            return [ReadWindow(begin, begin, end) for begin, end in chunks]
        return list(_windows(known, total, settings.segment, settings.resolved_eval_stride))

    def run(self, copies: int = 1, *, off: Sequence[str] = ()) -> Tensor:
        """Return the log-probabilities (copies, T, V) of the tokens."""
        rows = [self.lens_log_probs(hidden) for hidden in self._hidden(self._inputs(copies), off)]
        return torch.cat(rows, dim=1)

    def _inputs(self, copies: int) -> Tensor:
        """Return the model's input: <s> and all tokens but the last, (copies, T)."""
        device = next(self.model.parameters()).device
        return torch.tensor([[BOS, *self.ids[:-1]]], device=device).repeat(copies, 1)

    def lens_log_probs(self, hidden: Tensor) -> Tensor:
        """Return the log-probabilities (..., V) of states (..., E)."""
        return self.model.project(hidden).float().log_softmax(dim=-1)

    def _hidden(
        self, inputs: Tensor, off: Sequence[str], *, layers: list[list[Tensor]] | None = None
    ) -> Iterator[Tensor]:
        """Yield the hidden states (copies, t, E) of each read; append those of the layers."""
        memory = self.config.language.resolved_eval_memory
        state = None
        for read in self.reads():
            tokens = inputs[:, read.begin : read.end]
            outputs = None if layers is None else list[Tensor]()
            if self.language.carries:
                starts = "memory" in off and read.begin % self.config.language.segment == 0
                if state is None or starts:
                    state = self.model.start(len(inputs), memory=memory)
                x = self.model.embed(tokens, first=state.length)
                if torch.is_grad_enabled() and not x.requires_grad:
                    # A cache is written in place unless a gradient flows into it.
                    x = x.detach().requires_grad_()
                hidden, inner = self.model.decoder.extend(
                    x, state.children["decoder"], layer_outputs=outputs
                )
                state = state.advance(tokens.size(1), children={"decoder": inner})
            else:
                context = ForwardContext(layer_outputs=outputs)
                hidden = self.model.decoder(self.model.embed(tokens), context)
            if layers is not None and outputs is not None:
                layers.append([each[:, read.scored - read.begin :] for each in outputs])
            yield self.model.output(hidden[:, read.scored - read.begin :])

    @torch.no_grad()
    def decide(self, off: Sequence[str], edits: Mapping[str, WeightsEdit]) -> TaskExplainer:
        """Return the text continued to `max_tokens`, each time by the most probable token."""
        ids = self.ids[: self.given]
        wanted = self.given + self.max_tokens
        if not self.max_tokens or (len(self.ids) == wanted and not off and not edits):
            return self
        banned = [PAD, BOS, UNK, *([EOS] if self.config.text.tokenizer == "bytes" else [])]
        with edit(self.model, edits):
            while len(ids) < wanted:
                # The last token is not read; it is a placeholder for the one to choose.
                longer = LanguageModelInput(
                    self.model, self.language, [*ids, EOS], forced=self.given, max_tokens=1
                )
                log_probs = longer.run(off=off)[0, -1]
                log_probs[banned] = -torch.inf
                ids.append(int(log_probs.argmax()))
        return LanguageModelInput(
            self.model,
            self.language,
            ids,
            forced=self.given,
            max_tokens=self.max_tokens,
            text=self.text,
        )

    def choose(self, log_probs: Tensor) -> list[int]:
        """Return the tokens of the text."""
        return self.ids

    @property
    def forced(self) -> int:
        """The number of given tokens."""
        return self.given

    def name_output(self, output_id: int) -> str:
        """Return a token's text."""
        return name_token(self.language.text, output_id)

    def target(self, ids: Sequence[int]) -> TokenizedText:
        """Return the text."""
        words = list[str]()
        if isinstance(self.language.text, WordTokenizer):
            for line in document_lines(self.text):
                words += [*line.split(), "\n"]
        return spell_tokens(self.language.text, ids, words=words)

    @property
    def model_fields(self) -> dict[str, Any]:
        """The family, and how much the model reads at a time."""
        settings = self.config.language
        is_xl = self.language.carries and settings.memory > 0
        kinds = " ".join(self.config.model.decoder)
        family = "transformer_xl" if is_xl else "rnn" if self.language.carries else "transformer"
        return {
            "family": "reformer" if "reformer" in kinds else family,
            "segment": settings.segment,
            "memory": settings.resolved_eval_memory if is_xl else 0,
        }

    @property
    def positions(self) -> dict[str, Any]:
        """How order enters; the reach of a memory."""
        found = describe_positions(self.config.model.positions)
        if self.has_memory:
            settings = self.config.language
            found["reach"] = settings.resolved_eval_memory + settings.segment
            found["note"] += (
                f" Segments of {settings.segment} tokens attend to at most "
                f"{settings.resolved_eval_memory} tokens before them."
            )
        return found

    @property
    def has_memory(self) -> bool:
        """Whether segments attend to earlier ones."""
        return self.language.carries and self.config.language.memory > 0

    @property
    def missing(self) -> dict[str, str]:
        """There is no beam search, and no source."""
        return {"beam": "A language model chooses token by token: there is no beam."}

    # Sites

    def read_sites(self, records: AttentionRecords) -> list[RecordedSite]:
        """Return the decoder's self-attentions over the whole text.

        A row has weights at the positions that were read with it or are in the memory.
        """
        attentions, reads = find_attentions(self.model), self.reads()
        segments, labels = self._segments()
        found = list[RecordedSite]()
        for path in records:
            weights, norms = self._assemble(records.calls(path), reads, attentions[path])
            site = AttentionSite(
                id=f"d{len(found)}",
                path=path,
                kind="memory" if segments else "self",
                group="decoder",
                layer=len(found),
                heads=weights.size(0),
                query="target",
                key="memory+target_in" if segments else "target_in",
                sum=row_sum(attentions[path]),
                causal=True,
                segments=segments,
                key_labels=labels,
            )
            found.append(RecordedSite(site, weights, norms, heads_of(path, weights.size(0))))
        return found

    def _assemble(
        self, calls: Sequence[AttentionRecord], reads: Sequence[ReadWindow], attention: Any
    ) -> tuple[Tensor, Tensor]:
        """Return weights and contributions (H, T, T) of the calls of one attention."""
        total, heads = len(self.ids), calls[0].weights.size(1)
        weights = calls[0].weights.new_zeros(heads, total, total)
        norms = torch.zeros_like(weights, dtype=torch.float32)
        for call, read in zip(calls, reads, strict=True):
            rows = call.weights[0, :, read.scored - read.begin :]
            here = np.s_[:, read.scored : read.end, read.end - rows.size(-1) : read.end]
            weights[here] = rows
            norms[here] = contribution_norms(attention, rows, call.values[0])
        return weights, norms

    def _segments(self) -> tuple[list[tuple[str, int, int]], list[str] | None]:
        """Return memory and current segment of the keys, with their labels; () without a memory."""
        total = len(self.ids)
        current = (total - 1) // self.config.language.segment * self.config.language.segment
        if not self.has_memory or not current:
            return [], None
        tokens = self.target(self.ids).tokens
        labels = [SPECIAL_TOKENS[BOS], *(token.text for token in tokens[:-1])]
        return [("memory", 0, current), ("current", current, total)], labels

    @property
    def special_switches(self) -> dict[str, tuple[Switch, ...]]:
        """The memory: without it each segment is read alone."""
        return {"memory": ()} if self.has_memory else {}

    # Attribution and lens

    @property
    def max_copies(self) -> int:
        """As many copies as have at most MAX_LOGITS logits."""
        size = len(self.ids) * self.model.output_weight.size(0)
        return max(1, min(MAX_COPIES, MAX_LOGITS // max(size, 1)))

    @property
    def embeddings(self) -> Sequence[nn.Module]:
        """The token embeddings."""
        return (self.model.embedding,)

    @property
    def split(self) -> int:
        """All inputs are the target's own tokens."""
        return 0

    def sum_inputs(self, parts: Mapping[int, Sequence[Tensor]], copies: int) -> Tensor:
        """Return numbers (copies, T) of the tokens that were read, <s> first."""
        total = parts[0][0].new_zeros(copies, len(self.ids))
        for part, read in zip(parts[0], self.reads(), strict=True):
            total[:, read.begin : read.end] += part
        return total

    reads_target: ClassVar[bool] = True

    def zero_values(self, token: int) -> dict[str, WeightsEdit]:
        """Return edits that make the values of a token that was read zero, wherever it is a key."""
        reads = self.reads()

        def make_edit() -> WeightsEdit:
            calls = itertools.count()

            def off(weights: Tensor) -> Tensor:
                read = reads[next(calls) % len(reads)]
                column = token - (read.end - weights.size(-1))
                if not 0 <= column < weights.size(-1):
                    return weights
                return column_off(column)(weights)

            return off

        return {path: make_edit() for path in find_attentions(self.model)}

    @torch.no_grad()
    def occlude(self, ids: Sequence[int]) -> Floats:
        """Return the drop (T, T) of each token's log-probability with each input unknown."""
        total, base = len(self.ids), self.explained(self.run(), ids)
        rows, size = list[Tensor](), min(self.max_copies, BATCH_ROWS)
        for first in range(0, total, size):
            at = torch.arange(first, min(first + size, total))
            inputs = self._inputs(len(at))
            inputs[torch.arange(len(at)), at] = UNK
            parts = [self.lens_log_probs(hidden) for hidden in self._hidden(inputs, ())]
            rows.append(base - self.explained(torch.cat(parts, dim=1), ids))
        return to_array(torch.cat(rows)).T

    @torch.no_grad()
    def read_lens(
        self, ids: Sequence[int], off: Sequence[str]
    ) -> tuple[dict[str, Any], dict[str, NDArray[Any]]] | None:
        """Return the rank of each token, and the most probable ones, after each layer."""
        reads = list[list[Tensor]]()
        for _ in self._hidden(self._inputs(1), off, layers=reads):
            pass
        layers = [torch.cat(each, dim=1)[0] for each in zip(*reads, strict=True)]
        return make_lens(
            self.model, layers, ids, log_probs=self.lens_log_probs, name=self.name_output
        )


def make_lens(
    model: NeuralLanguageModel,
    layers: Sequence[Tensor],
    ids: Sequence[int],
    *,
    log_probs: Callable[[Tensor], Tensor],
    name: Callable[[int], str],
) -> tuple[dict[str, Any], dict[str, NDArray[Any]]]:
    """Return the lens of layers' outputs (T, D), and its ranks (L, T).

    `log_probs` turns states (..., E) into log-probabilities (..., V), `name` a token id into text.
    """
    wanted = torch.tensor(list(ids)).unsqueeze(1)
    width = layers[-1].size(-1)
    ranks, tops, names = list[NDArray[Any]](), list[Any](), list[str]()
    for number, output in enumerate(layers):
        if output.size(-1) != width:  # the output matrix cannot read it
            continue
        found = log_probs(model.output(model.decoder.finish(output.unsqueeze(0))))[0].cpu()
        ranks.append(((found > found.gather(1, wanted)).sum(dim=1) + 1).numpy())
        best = found.topk(min(LENS_TOKENS, found.size(1)), dim=1)
        tops.append(
            [
                [
                    [name(token), round(float(np.exp(value)), 6)]
                    for token, value in zip(tokens, values, strict=True)
                ]
                for tokens, values in zip(best.indices.tolist(), best.values.tolist(), strict=True)
            ]
        )
        names.append(f"d{number}")
    lens = {"layers": names, "rank": "lens.rank", "top": tops, "exact_last": True}
    return lens, {"lens.rank": np.stack(ranks).astype(np.uint32)}


def _windows(known: int, total: int, segment: int, stride: int) -> Iterator[ReadWindow]:
    """Yield the windows in which a model without a memory reads `known` and generated positions."""
    first = min(segment, known)
    yield ReadWindow(0, 0, first)
    for scored in range(first, known, stride):
        stop = min(scored + stride, known)
        yield ReadWindow(max(0, stop - segment), scored, stop)
    begin = max(0, known - segment)
    spans = list[tuple[int, int]]()
    for at in range(known, total):
        if at - begin >= segment:  # the last half of a segment is read again
            begin = at + 1 - max(1, segment // 2)
        spans.append((begin, at))
    for begin, group in itertools.groupby(spans, key=lambda span: span[0]):
        positions = [at for _, at in group]
        yield ReadWindow(begin, positions[0], positions[-1] + 1)

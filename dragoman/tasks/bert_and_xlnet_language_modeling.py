"""Masked and permuted language modeling, and sentence-order prediction: BERT, XLNet, ALBERT."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F

from dragoman.data.bucket_shapes import BatchShape
from dragoman.data.collate import TensorBatch
from dragoman.data.in_memory_examples import InMemoryExamples
from dragoman.data.inference_batches import pad_batch
from dragoman.data.masked_and_permuted_inputs import (
    choose_positions,
    draw_swaps,
    factorization_ranks,
    join_segments,
    mask_tokens,
    predicted_count,
    segment_columns,
)
from dragoman.errors import DataError
from dragoman.models.bert_and_xlnet_language_model import (
    MaskedLM,
    build_masked_lm,
    gather_positions,
)
from dragoman.models.language_model import LanguageDropout
from dragoman.runtime import signals
from dragoman.tasks.language_model import MAX_NLL, LanguageTask
from dragoman.tasks.non_translation_task import TaskScore
from dragoman.text.language_model_tokenizer import SubwordTokenizer
from dragoman.text.special_tokens import BOS, EOS, SPECIAL_TOKENS
from dragoman.training.bf16_mixed_precision import Precision
from dragoman.training.progress_display import Progress
from dragoman.training.task_protocol import Loss

MASK_PATTERN = re.compile(r"<mask>|\[MASK\]", re.IGNORECASE)
_UNMERGED = "\ue000"  # for private use: no text has it, so no subword
_IGNORED = -100  # a row whose halves are of two documents has no order


@dataclass(frozen=True, kw_only=True)
class MaskedBatch(TensorBatch):
    """Rows of tokens of which some are to be predicted."""

    inputs: Tensor  # (B, L)
    positions: Tensor  # (B, P) of the tokens to be predicted
    targets: Tensor  # (B, P)
    ranks: Tensor | None = None  # (B, L) the factorization order of a permuted model
    in_order: Tensor | None = None  # (B,) 1 in order, 0 swapped, -100 neither

    @property
    def tokens(self) -> int:
        """The number of tokens."""
        return self.inputs.numel()

    @property
    def padded_tokens(self) -> int:
        """The number of tokens: there is no padding."""
        return self.inputs.numel()


class TokenGuess(NamedTuple):
    """A candidate token for a mask."""

    token: str
    probability: float


class PseudoLogLikelihood(NamedTuple):
    """Salazar et al. (2020): the product of each token's probability given all other tokens."""

    log_prob: float
    tokens: int


class FilledText(NamedTuple):
    """A text with its masks filled in."""

    text: str  # with the most probable token in place of each mask
    guesses: list[list[TokenGuess]]  # of each mask, most probable first


class MaskedLanguageTask(LanguageTask):
    """Predict some tokens of a segment from all others.

    With `language.objective=masked` they are replaced (Devlin et al. 2019); with `permuted` they
    are predicted one after another in a random order (Yang et al. 2019), as an attention mask. With
    `language.sentence_order` a segment is two halves, swapped half the time (Lan et al. 2020).
    """

    metrics: ClassVar[Mapping[str, bool]] = {"pseudo_perplexity": False, "order_accuracy": True}

    @property
    def mask_token(self) -> int:
        """The id of the mask: it follows the vocabulary's tokens."""
        return len(self.text)

    def build_model(self) -> MaskedLM:
        """Build the model."""
        return build_masked_lm(
            self.config.model,
            vocab_size=len(self.text),
            sentence_order=self.language.sentence_order,
            dropout=LanguageDropout.of(self.language),
        )

    def collate(
        self,
        store: InMemoryExamples,
        examples: NDArray[np.int64],
        *,
        shapes: Sequence[BatchShape] = (),
        seed: int = 0,
        training: bool = False,
    ) -> Any:
        """Return segments with some tokens masked, drawn from `seed`."""
        assert self._plan is not None, "a batch is part of a plan"
        stream, spans = self.stream(store), self._plan.locate(examples)
        index = spans.starts[:, None] + np.arange(spans.length)
        tokens = stream.targets[index % len(stream.targets)].astype(np.int64)
        in_order = None
        if self.language.sentence_order:
            swapped = draw_swaps(len(tokens), seed, "order")
            tokens, in_order = join_segments(tokens, swapped)
            crosses = _crosses_documents(
                stream.starts, spans.starts, index.shape[1], len(stream.targets)
            )
            in_order = np.where(crosses, _IGNORED, in_order)
        return self._masked_batch(examples, tokens, in_order, seed)

    def _masked_batch(
        self,
        examples: NDArray[np.int64],
        tokens: NDArray[np.int64],
        in_order: NDArray[np.int64] | None,
        seed: int,
    ) -> MaskedBatch:
        """Choose the positions to predict in rows (B, L)."""
        columns, rate = self._columns(tokens.shape[1]), self.language.mask_rate
        order = None if in_order is None else torch.from_numpy(in_order)
        if self.language.objective == "masked":
            masked = mask_tokens(
                tokens, columns, rate=rate, mask_token=self.mask_token, key=(seed, "mask")
            )
            inputs, positions, targets = map(torch.from_numpy, masked)
            return MaskedBatch(
                examples=examples,
                inputs=inputs,
                positions=positions,
                targets=targets,
                in_order=order,
            )
        count = predicted_count(len(columns), rate)
        chosen = choose_positions(columns, len(tokens), count, seed, "order")
        ranks = factorization_ranks(tokens.shape[1], chosen)
        return MaskedBatch(
            examples=examples,
            inputs=torch.from_numpy(tokens),
            positions=torch.from_numpy(chosen),
            targets=torch.from_numpy(np.take_along_axis(tokens, chosen, axis=1)),
            ranks=torch.from_numpy(ranks),
        )

    def _columns(self, length: int) -> NDArray[np.int64]:
        """Return the columns of rows of `length` that may be predicted: no special tokens."""
        if self.language.sentence_order:
            return segment_columns(length - 3)
        return np.arange(length)

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        """Return the cross-entropy of the predicted tokens, and of the order of segments."""
        assert isinstance(model, MaskedLM), f"found {type(model).__name__}"
        if batch.ranks is not None:
            predicted = model.permuted(batch.inputs, batch.ranks, batch.positions)
            return self._loss(model, predicted, predicted, batch.targets)
        hidden = model.decode(batch.inputs)
        predicted = gather_positions(hidden, batch.positions)
        found = self._loss(model, predicted, predicted, batch.targets)
        if batch.in_order is None:
            return found
        assert model.order is not None, "a model of sentence order has a head for it"
        order = F.cross_entropy(
            model.order(hidden).float(), batch.in_order, ignore_index=_IGNORED, reduction="sum"
        )
        # The sum is divided by the predicted tokens, of which every row has the same number.
        return Loss(found.total + batch.targets.size(1) * order, found.nll, found.count)

    # Evaluation

    def evaluate(
        self,
        model: nn.Module,
        store: InMemoryExamples,
        *,
        device: torch.device,
        precision: Precision,
        progress: Progress,
    ) -> dict[str, float]:
        """Return loss and pseudo-perplexity per token, every token predicted once.

        With sentence-order prediction also the accuracy on each segment in order and swapped.
        """
        assert isinstance(model, MaskedLM), f"found {type(model).__name__}"
        stream = self.stream(store)
        nll, count, right, judged = 0.0, 0, 0, 0
        rows = max(1, self.config.train.batch_tokens // self.language.segment)
        batches = list(_evaluation_rows(stream.targets, self.language.segment, rows))
        with progress.phase("validating", len(batches), "batches") as phase:
            for starts, tokens in batches:
                signals.raise_if_stop_requested()
                with precision.autocast(device):
                    if self.language.sentence_order and tokens.shape[1] >= 2:
                        crosses = _crosses_documents(
                            stream.starts, starts, tokens.shape[1], len(stream.targets)
                        )
                        right += self._count_right(model, tokens[~crosses], device)
                        judged += 2 * int((~crosses).sum())
                    nll += self._segment_nll(model, tokens, device)
                count += tokens.size
                phase.advance()
        loss = nll / max(count, 1)
        metrics = {"loss": loss, "pseudo_perplexity": math.exp(min(loss, MAX_NLL))}
        if judged:
            metrics["order_accuracy"] = right / judged
        return metrics

    @torch.no_grad()
    def _segment_nll(
        self, model: MaskedLM, tokens: NDArray[np.int64], device: torch.device
    ) -> float:
        """Return the negative log-likelihood of segments (B, T), every token predicted once."""
        rows, columns = tokens, np.arange(tokens.shape[1])
        if self.language.sentence_order:
            rows, columns = _frame(tokens)
        groups = len(columns)
        if self.language.eval_masked == "rate":
            groups = math.ceil(
                len(columns) / predicted_count(len(columns), self.language.mask_rate)
            )
        mixed = choose_positions(columns, 1, len(columns), "evaluation")[0]
        inputs = torch.from_numpy(rows).to(device)
        total = torch.zeros((), device=device)
        for group in np.array_split(mixed, groups):
            positions = torch.from_numpy(group).to(device).expand(len(rows), -1)
            logits = model.project(self._predict(model, inputs, positions)).float()
            total += F.cross_entropy(
                logits.flatten(0, 1), inputs.gather(1, positions).flatten(), reduction="sum"
            )
        return float(total)

    def _predict(self, model: MaskedLM, inputs: Tensor, positions: Tensor) -> Tensor:
        """Return states that predict the tokens at positions (B, P), in their order if permuted."""
        if self.language.objective == "permuted":
            order = torch.arange(1, positions.size(1) + 1, device=inputs.device)
            ranks = torch.zeros_like(inputs).scatter(1, positions, order.expand_as(positions))
            return model.permuted(inputs, ranks, positions)
        masked = inputs.scatter(1, positions, model.mask_token)
        return gather_positions(model.decode(masked), positions)

    def _count_right(self, model: MaskedLM, tokens: NDArray[np.int64], device: torch.device) -> int:
        """Return how many of segments (B, T), each in order and swapped, are classified right."""
        assert model.order is not None, "a model of sentence order has a head for it"
        right = 0
        for swapped in (False, True) if len(tokens) else ():
            joined = join_segments(tokens, np.full(len(tokens), swapped))
            hidden = model.decode(torch.from_numpy(joined.tokens).to(device))
            right += int((model.order(hidden).argmax(1) == int(not swapped)).sum())
        return right

    def scores(self, metrics: Mapping[str, float]) -> list[TaskScore]:
        """Return pseudo-perplexity and the accuracy of sentence order, with how they are made."""
        settings = self.language
        masked = "one" if settings.eval_masked == "one" else f"{settings.mask_rate:g}"
        signature = (
            f"tokens:{self.config.text.tokenizer}|objective:{settings.objective}|"
            f"segment:{settings.segment}|masked:{masked}"
        )
        return [
            TaskScore(name, metrics[name], signature) for name in self.metrics if name in metrics
        ]

    def golden_outputs(self, model: nn.Module, inputs: Sequence[Any]) -> list[Any]:
        """Return the pseudo-log-likelihood of each text, and its number of tokens."""
        assert isinstance(model, MaskedLM), f"found {type(model).__name__}"
        if not all(isinstance(each, str) for each in inputs):
            raise TypeError("a golden input of a language model must be text")
        return [self.pseudo_log_likelihood(model, text)._asdict() for text in inputs]

    def pseudo_log_likelihood(self, model: MaskedLM, text: str) -> PseudoLogLikelihood:
        """Return the sum of the log-probabilities of a text's tokens, each given the others.

        A text is cut after the tokens of a training segment.
        """
        tokens = self.text.encode(text)[: self.language.segment].astype(np.int64)[None]
        device = next(model.parameters()).device
        nll = self._segment_nll(model, tokens, device) if tokens.size else 0.0
        return PseudoLogLikelihood(-nll, tokens.size)

    # Filling in

    @staticmethod
    def has_mask(text: str) -> bool:
        """Whether a text has a <mask> or [MASK]."""
        return MASK_PATTERN.search(text) is not None

    @torch.no_grad()
    def fill_masks(
        self, model: MaskedLM, texts: Sequence[str], *, top: int = 5
    ) -> list[FilledText]:
        """Return the most probable tokens for each <mask> or [MASK] of texts.

        Masks do not attend to each other. Raise DataError for a text without a mask, or with more
        tokens than a segment.
        """
        rows = [self._encode_with_masks(text) for text in texts]
        if not rows:
            return []
        inputs, mask = pad_batch(rows, next(model.parameters()).device)
        masked = inputs == self.mask_token
        if self.language.objective == "permuted":
            hidden = self._fill_permuted(model, inputs, mask, masked)
        else:
            hidden = model.decode(inputs, mask)[masked]  # (N, E)
        logits = model.project(hidden).float()  # (N, V)
        logits[:, [*range(len(SPECIAL_TOKENS)), self.mask_token]] = -torch.inf
        best = logits.softmax(-1).topk(min(top, len(self.text) - len(SPECIAL_TOKENS)))
        found = iter(zip(best.indices.tolist(), best.values.tolist(), strict=True))
        return [self._filled_text(row, found) for row in rows]

    def _fill_permuted(
        self, model: MaskedLM, inputs: Tensor, mask: Tensor | None, masked: Tensor
    ) -> Tensor:
        """Return states (N, E) that predict the masks of rows (B, L) from the other tokens."""
        ranks = (
            masked.long()
        )  # given tokens first, then the masks, which do not attend to each other
        if mask is not None:
            ranks = ranks.masked_fill(~mask, 2)  # padding is unseen by all
        count = int(masked.sum(dim=1).max())
        positions = masked.int().argsort(dim=1, descending=True, stable=True)[:, :count]
        return model.permuted(inputs, ranks, positions)[masked.gather(1, positions)]

    def _filled_text(
        self, tokens: list[int], best: Iterator[tuple[list[int], list[float]]]
    ) -> FilledText:
        """Return the text of a row with masks, taking the guesses of each mask from `best`."""
        guesses, decoder, text = [], self.text.decoder([]), ""
        for token in tokens[1:-1] if self.language.sentence_order else tokens[:-1]:
            if token == self.mask_token:
                ids, values = next(best)
                pairs = zip(map(self._token_text, ids), values, strict=True)
                guesses.append([TokenGuess(*pair) for pair in pairs])
                token = ids[0]
            text += decoder.push(token)
        return FilledText(text, guesses)

    def encode_masked(self, text: str) -> tuple[list[int], list[int]]:
        """Return the tokens that are read (L,), and the columns (T,) of those that are predicted.

        Those are the masks of a text, or all of its tokens if it has none, as in
        `pseudo_log_likelihood`.
        """
        if self.has_mask(text):
            row = self._encode_with_masks(text)
            return row, [at for at, token in enumerate(row) if token == self.mask_token]
        tokens = self.text.encode(text)[: self.language.segment].astype(np.int64)[None]
        rows, columns = (
            _frame(tokens)
            if self.language.sentence_order and tokens.size
            else (tokens, np.arange(tokens.shape[1]))
        )
        return rows[0].tolist(), columns.tolist()

    def _encode_with_masks(self, text: str) -> list[int]:
        """Return the tokens of one line and EOS, the mask in place of <mask> and [MASK]."""
        parts = MASK_PATTERN.split(text)
        if len(parts) == 1:
            raise DataError(
                "a text to be filled in must have a <mask>",
                found=f"{text!r:.80}",
                fix='write <mask> in place of a token: "The <mask> sat."',
            )
        tokens = [BOS] if self.language.sentence_order else []
        for number, part in enumerate(parts):
            part = part.replace("\n", " ")
            if number < len(parts) - 1 and self.config.text.tokenizer in ("bpe", "unigram"):
                part = part.removesuffix(" ")  # a space begins the subword after it: the mask
            tokens += [self.mask_token] if number else []
            tokens += self._encode_after_mask(part) if number else self.text.encode_prompt(part)
        tokens.append(EOS)
        if len(tokens) > self.language.segment:
            raise DataError(
                f"a text to be filled in must have at most {self.language.segment - 1} tokens, "
                "those of a training segment",
                found=f"{len(tokens) - 1}",
                fix="shorten it",
            )
        return tokens

    def _encode_after_mask(self, text: str) -> list[int]:
        """Return the tokens of a text that follows a mask.

        SentencePiece puts a space before a text, so text after a mask would begin with one more
        than in the whole text. It is encoded after a character that is never merged.
        """
        if text and isinstance(self.text, SubwordTokenizer):
            before = self.text.encode_prompt(_UNMERGED)
            found = self.text.encode_prompt(_UNMERGED + text)
            if found[: len(before)] == before:
                return found[len(before) :]
        return self.text.encode_prompt(text)

    def _token_text(self, token: int) -> str:
        """Return a token as text; a space as "␣", and a byte that is no character by its name."""
        if text := self.text.decoder([]).push(token).strip():
            return text
        if not isinstance(self.text, SubwordTokenizer):
            return f"<{token}>"
        [name] = self.text.tokenizer.tokens([token])
        return name.replace("\N{LOWER ONE EIGHTH BLOCK}", "␣")


def _evaluation_rows(
    targets: NDArray[np.int32], segment: int, rows: int
) -> Iterator[tuple[NDArray[np.int64], NDArray[np.int64]]]:
    """Yield the starts (B,) and tokens (B, T) of consecutive segments; the last may be shorter."""
    whole = len(targets) // segment
    starts = np.arange(whole) * segment
    for first in range(0, whole, rows):
        chosen = starts[first : first + rows]
        yield chosen, targets[chosen[:, None] + np.arange(segment)].astype(np.int64)
    if rest := len(targets) - whole * segment:
        yield np.array([whole * segment]), targets[-rest:][None].astype(np.int64)


def _frame(tokens: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return segments (B, T) as sentence-order prediction frames them, and the tokens' columns.

    A last token that makes the length odd follows the second half.
    """
    half = tokens.shape[1] // 2
    start, end = (np.full((len(tokens), 1), each) for each in (BOS, EOS))
    rows = np.concatenate([start, tokens[:, :half], end, tokens[:, half:], end], axis=1)
    columns = np.concatenate([1 + np.arange(half), 2 + half + np.arange(tokens.shape[1] - half)])
    return rows, columns


def _crosses_documents(
    documents: NDArray[np.int64], starts: NDArray[np.int64], length: int, total: int
) -> NDArray[np.bool_]:
    """Whether a document begins within each segment after its first token: (B,).

    `documents` are the positions where documents begin; the stream of `total` tokens wraps around.
    """
    first = starts % total
    ends = first + length
    inside = np.searchsorted(documents, np.minimum(ends, total)) > np.searchsorted(
        documents, first, side="right"
    )
    return inside | (ends > total)

"""Texts of masked and permuted language models as inputs to be explained."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from dragoman.attention.attention_weight_hooks import (
    AttentionRecords,
    WeightsEdit,
    find_attentions,
)
from dragoman.errors import DataError
from dragoman.explain.explanation import AttentionSite, TokenizedText
from dragoman.explain.task_explainers.base import (
    MAX_COPIES,
    Floats,
    RecordedSite,
    StackSites,
    TaskExplainer,
    column_off,
    contribution_norms,
    heads_of,
    read_stack,
    row_sum,
    to_array,
)
from dragoman.explain.task_explainers.causal_language_model import (
    MAX_LOGITS,
    make_lens,
    name_token,
    spell_tokens,
)
from dragoman.models.bert_and_xlnet_language_model import MaskedLM, gather_positions
from dragoman.tasks.bert_and_xlnet_language_modeling import MaskedLanguageTask
from dragoman.text.special_tokens import SPECIAL_TOKENS, UNK


class MaskedText(TaskExplainer):
    """A text with masks to be filled in; without any, each token is masked in turn."""

    task: ClassVar[str] = "language"
    model: MaskedLM

    def __init__(self, model: MaskedLM, task: MaskedLanguageTask, text: str) -> None:
        super().__init__(model, task.config)
        self.language, self.text = task, text
        self.has_masks = task.has_mask(text)
        row, columns = task.encode_masked(text) if text.strip() else ([], [])
        self.row, self.columns = row, columns  # tokens (L,), and positions that are predicted (T,)
        if not columns:
            raise DataError(
                "a text to explain must have tokens", found=repr(text), fix="pass a text"
            )

    @property
    def is_permuted(self) -> bool:
        """Whether tokens are predicted by a query stream."""
        return self.config.language.objective == "permuted"

    @property
    def source(self) -> TokenizedText:
        """The tokens that the model reads, masks included."""
        return spell_tokens(self.language.text, self.row, mask=self.language.mask_token)

    @property
    def request(self) -> dict[str, Any]:
        """The text."""
        return {"text": self.text, "masks": self.has_masks}

    @property
    def forbidden(self) -> int:
        """Special tokens are not filled in."""
        return len(SPECIAL_TOKENS) + 1 if self.has_masks else 0

    @property
    def forced(self) -> int:
        """Tokens that are given and masked in turn."""
        return 0 if self.has_masks else len(self.columns)

    def run(self, copies: int = 1, *, off: Sequence[str] = ()) -> Tensor:
        """Return the log-probabilities (copies, T, V) at the masks."""
        return self.lens_log_probs(self._hidden(self._inputs(copies)))

    def lens_log_probs(self, hidden: Tensor) -> Tensor:
        """Return the log-probabilities (..., V) of states (..., E)."""
        logits = self.model.project(hidden).float()
        if self.has_masks:
            banned = [*range(len(SPECIAL_TOKENS)), self.language.mask_token]
            logits = logits.index_fill(-1, torch.tensor(banned, device=logits.device), -torch.inf)
        return logits.log_softmax(dim=-1)

    def _inputs(self, copies: int) -> Tensor:
        device = next(self.model.parameters()).device
        return torch.tensor([self.row], device=device).repeat(copies, 1)

    def _hidden(self, inputs: Tensor, *, layers: list[Tensor] | None = None) -> Tensor:
        """Return the states (copies, T, E) that predict the tokens at the columns."""
        copies, count = len(inputs), len(self.columns)
        columns = torch.tensor([self.columns], device=inputs.device)  # (1, T)
        if self.has_masks:  # all at once
            positions = columns.expand(copies, -1)
            return self._states(inputs, positions, layers)
        rows = inputs.repeat_interleave(count, dim=0)  # (copies T, L), one mask in each
        positions = columns.t().repeat(copies, 1)  # (copies T, 1)
        if not self.is_permuted:
            rows = rows.scatter(1, positions, self.language.mask_token)
        hidden = self._states(rows, positions, layers)
        return hidden.view(copies, count, -1)

    def _states(
        self, rows: Tensor, positions: Tensor, layers: list[Tensor] | None = None
    ) -> Tensor:
        """Return the states (B, P, E) at positions (B, P) of rows (B, L), and of each layer."""
        outputs = None if layers is None else list[Tensor]()
        if self.is_permuted:
            ranks = torch.zeros_like(rows).scatter(1, positions, 1)
            hidden = self.model.permuted(rows, ranks, positions, layer_outputs=outputs)
            found = [each[:, rows.size(1) :] for each in outputs or ()]
        else:
            hidden = gather_positions(self.model.decode(rows, layer_outputs=outputs), positions)
            found = [gather_positions(each, positions) for each in outputs or ()]
        if layers is not None:
            layers += found
        return hidden

    def choose(self, log_probs: Tensor) -> list[int]:
        """Return the most probable token of each mask, or the tokens of the text."""
        if self.has_masks:
            return log_probs.argmax(dim=1).tolist()
        return [self.row[at] for at in self.columns]

    def name_output(self, output_id: int) -> str:
        """Return a token's text."""
        return name_token(self.language.text, output_id, mask=self.language.mask_token)

    def target(self, ids: Sequence[int]) -> TokenizedText:
        """Return the predicted tokens, one after the other."""
        return spell_tokens(self.language.text, ids)

    @property
    def model_fields(self) -> dict[str, Any]:
        """The family and the objective."""
        settings = self.config.language
        return {
            "family": "transformer",
            "objective": settings.objective,
            "segment": settings.segment,
        }

    @property
    def missing(self) -> dict[str, str]:
        """There is no beam search."""
        return {"beam": "Masks are filled in at once: there is no beam."}

    def read_sites(self, records: AttentionRecords) -> list[RecordedSite]:
        """Return the stack's self-attentions.

        Of a text with masks all rows, unless a query stream predicts them; of a text without, row t
        is that of token t in the pass where it is masked.
        """
        attentions, length = find_attentions(self.model), len(self.row)
        if self.has_masks and not self.is_permuted:
            stack = StackSites("decoder.", "e", "encoder", "source", length)
            return read_stack(records, attentions, stack)
        found = list[RecordedSite]()
        for path in records:
            seen = records[path]
            if self.has_masks:
                weights, values = seen.weights[0, :, length:, :length], seen.values[0, :, :length]
                norms = contribution_norms(attentions[path], weights, values)
            else:
                at = [length] * len(self.columns) if self.is_permuted else self.columns
                rows = [seen.weights[t, :, [row], :length] for t, row in enumerate(at)]
                weights = torch.cat(rows, dim=1)
                norms = torch.cat(
                    [
                        contribution_norms(attentions[path], row, seen.values[t, :, :length])
                        for t, row in enumerate(rows)
                    ],
                    dim=1,
                )
            site = AttentionSite(
                id=f"e{len(found)}",
                path=path,
                kind="self",
                group="encoder",
                layer=len(found),
                heads=weights.size(0),
                query="target",
                key="source",
                sum=row_sum(attentions[path]),
            )
            found.append(RecordedSite(site, weights, norms, heads_of(path, weights.size(0))))
        return found

    @property
    def max_copies(self) -> int:
        """As many copies as have at most MAX_LOGITS logits."""
        size = len(self.columns) * self.model.output_weight.size(0)
        return max(1, min(MAX_COPIES, MAX_LOGITS // max(size, 1)))

    @property
    def embeddings(self) -> Sequence[nn.Module]:
        """The token embeddings."""
        return (self.model.embedding,)

    def sum_inputs(self, parts: Mapping[int, Sequence[Tensor]], copies: int) -> Tensor:
        """Return numbers (copies, L) of the tokens that are read."""
        values = parts[0][0][:, : len(self.row)]
        return values.view(copies, -1, len(self.row)).sum(dim=1)

    def zero_values(self, token: int) -> dict[str, WeightsEdit]:
        """Return edits that make the values of a token zero."""
        return {path: column_off(token) for path in find_attentions(self.model)}

    @torch.no_grad()
    def occlude(self, ids: Sequence[int]) -> Floats:
        """Return the drop (T, L) of each token's log-probability with each other token unknown."""
        base, total = self.explained(self.run(), ids), len(self.row)
        drops = []
        for at in range(total):
            inputs = self._inputs(1)
            if int(inputs[0, at]) != self.language.mask_token:
                inputs[0, at] = UNK
            drops.append(base - self.explained(self.lens_log_probs(self._hidden(inputs)), ids))
        return to_array(torch.cat(drops)).T

    @torch.no_grad()
    def read_lens(
        self, ids: Sequence[int], off: Sequence[str]
    ) -> tuple[dict[str, Any], dict[str, NDArray[Any]]] | None:
        """Return the rank of each token, and the most probable ones, after each layer."""
        layers = list[Tensor]()
        self._hidden(self._inputs(1), layers=layers)
        width = len(self.columns)
        return make_lens(
            self.model,
            [each.reshape(width, -1) for each in layers],
            ids,
            log_probs=self.lens_log_probs,
            name=self.name_output,
        )

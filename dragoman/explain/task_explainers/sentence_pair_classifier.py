"""A pair of sentences to be classified or compared, as an input to be explained."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from dragoman.attention.attention_weight_hooks import AttentionRecords, WeightsEdit, find_attentions
from dragoman.explain.explanation import AttentionSite, TokenizedText
from dragoman.explain.task_explainers.base import (
    BATCH_ROWS,
    Floats,
    RecordedSite,
    StackSites,
    TaskExplainer,
    column_off,
    contribution_norms,
    heads_of,
    locate_tokens,
    read_stack,
    to_array,
)
from dragoman.models.sentence_pair_classifier import PairModel, PairOutput
from dragoman.tasks.sentence_pair_classification import PairsTask, expected_score


class ComparedPair(TaskExplainer):
    """Two sentences, the label of the pair, and its score."""

    task: ClassVar[str] = "pairs"
    model: PairModel

    def __init__(self, model: PairModel, task: PairsTask, first: str, second: str) -> None:
        super().__init__(model, task.config)
        self.pairs, self.texts = task, (first, second)
        self.words = task.words(first), task.words(second)
        self.encoded = task.encode_pair(first, second)
        self._sides = tuple(
            locate_tokens(text, words, ids)
            for text, words, ids in zip(self.texts, self.words, self.encoded.tokens, strict=True)
        )
        self._score: float | None = None

    @property
    def source(self) -> TokenizedText:
        """The first sentence."""
        return self._sides[0]

    @property
    def request(self) -> dict[str, Any]:
        """Both sentences."""
        return {"first": self.texts[0], "second": self.texts[1], "text": "\t".join(self.texts)}

    def run(self, copies: int = 1, *, off: Sequence[str] = ()) -> Tensor:
        """Return the log-probabilities (copies, 1, L) of the labels, or else of the scores."""
        return self._compare([self.encoded] * copies)

    def _compare(self, encoded: Sequence[Any]) -> Tensor:
        device = next(self.model.parameters()).device
        batch = self.pairs.batch_pairs(encoded).to(device)
        output: PairOutput = self.model(batch.token_ids, batch.flags, batch.lengths)
        if output.score is not None:
            scores = expected_score(output.score.detach(), self.pairs.min_score)
            self._score = float(scores[0])
        logits = output.score if output.labels is None else output.labels
        assert logits is not None, "a model of pairs has labels or scores"
        return logits.float().log_softmax(dim=-1).unsqueeze(1)

    @property
    def names(self) -> Sequence[str]:
        """The labels, or the whole scores of a model without labels."""
        if self.pairs.text.labels is not None:
            return self.pairs.text.labels.names
        return [str(each) for each in range(self.pairs.min_score, self.pairs.max_score + 1)]

    def choose(self, log_probs: Tensor) -> list[int]:
        """Return the most probable label."""
        return [int(log_probs[0].argmax())]

    def name_output(self, output_id: int) -> str:
        """Return a label."""
        return self.names[output_id]

    def target(self, ids: Sequence[int]) -> TokenizedText:
        """Return the second sentence."""
        return self._sides[1]

    @property
    def model_fields(self) -> dict[str, Any]:
        """The interaction of the sentences, and the labels."""
        return {
            "family": "pairs",
            "interaction": self.config.pairs.interaction,
            "labels": list(self.names),
        }

    @property
    def score_fields(self) -> dict[str, Any]:
        """The score of the pair, where the model has one."""
        return {} if self._score is None else {"score": self._score}

    @property
    def embeddings(self) -> Sequence[nn.Module]:
        """The embeddings of words, and of whether they occur in the other sentence."""
        return self.model.embedding, self.model.flag_embedding

    def sum_inputs(self, parts: Mapping[int, Sequence[Tensor]], copies: int) -> Tensor:
        """Return numbers of the words of both sentences, (copies, S + T)."""
        values = parts[0][0] + parts[1][0]
        first, second = map(len, self.words)
        if self.pairs.is_sequence:  # with </s> in between
            return torch.cat([values[:, :first], values[:, first + 1 : first + 1 + second]], dim=1)
        return torch.cat([values[:copies, :first], values[copies:, :second]], dim=1)

    reads_target: ClassVar[bool] = True

    def zero_values(self, token: int) -> dict[str, WeightsEdit]:
        """Return edits that make the values of a word of either sentence zero."""
        side, column = (0, token) if token < self.split else (1, token - self.split)
        paths = list(find_attentions(self.model))
        if self.pairs.is_sequence:
            at = column if side == 0 else self.split + 1 + column
            return {path: column_off(at) for path in paths}
        # Direction `a` reads the second sentence, `b` the first.
        other = f"interaction.cross.{'ba'[side]}"
        return {
            path: column_off(column) if path == other else column_off(column, part=side, parts=2)
            for path in paths
            if path == other or not path.startswith("interaction.cross.")
        }

    @torch.no_grad()
    def occlude(self, ids: Sequence[int]) -> Floats:
        """Return the drop of the label's log-probability without each word of both sentences."""
        base = self.run()[0, 0, ids[0]]
        changed = []
        for side, words in enumerate(self.words):
            for at in range(len(words)):
                kept = [" ".join(each) for each in self.words]
                kept[side] = " ".join([*words[:at], *words[at + 1 :]])
                changed.append(self.pairs.encode_pair(*kept))
        drops = [
            base - self._compare(changed[first : first + BATCH_ROWS])[:, 0, ids[0]]
            for first in range(0, len(changed), BATCH_ROWS)
        ]
        return to_array(torch.cat(drops))[None]

    def read_sites(self, records: AttentionRecords) -> list[RecordedSite]:
        """Return the attentions of the encoder on each sentence, and co-attention both ways."""
        attentions = find_attentions(self.model)
        first, second = map(len, self.words)
        if self.pairs.is_sequence:
            labels = [*self.words[0], "</s>", *self.words[1]]
            joint = StackSites(
                "encoder.", "e", "encoder", "source+target", len(labels), labels=labels
            )
            return read_stack(records, attentions, joint)
        sites = self._read_sides(records, "encoder.", 0)
        layers = 1 + max((each.site.layer for each in sites), default=-1)
        for path, suffix, query, key, shape in (
            ("interaction.cross.a", "", "source", "target", (first, second)),
            ("interaction.cross.b", "b", "target", "source", (second, first)),
        ):
            if path not in records:
                continue
            seen = records[path]
            site = AttentionSite(
                id=f"x0{suffix}",
                path=path,
                kind="cross",
                group="cross",
                layer=0,
                heads=seen.weights.size(1),
                query=query,
                key=key,
            )
            weights = seen.weights[0, :, : shape[0], : shape[1]]
            norms = contribution_norms(None, weights, seen.values[0, :, : shape[1]])
            sites.append(RecordedSite(site, weights, norms, heads_of(path, site.heads)))
        return sites + self._read_sides(records, "interaction.composition.", layers)

    def _read_sides(
        self, records: AttentionRecords, path: str, first_layer: int
    ) -> list[RecordedSite]:
        """Return the attentions of a stack that reads both sentences."""
        attentions = find_attentions(self.model)
        return [
            site
            for side, (axis, suffix) in enumerate((("source", ""), ("target", "b")))
            for site in read_stack(
                records,
                attentions,
                StackSites(
                    path,
                    "e",
                    "encoder",
                    axis,
                    len(self.words[side]),
                    suffix=suffix,
                    part=side,
                    parts=2,
                    first_layer=first_layer,
                ),
            )
        ]

    @property
    def missing(self) -> dict[str, str]:
        """There is no search and no lens."""
        return {
            "beam": "A pair gets its label at once: there is no search.",
            "token": "A model of pairs predicts labels, not tokens: there is no logit lens.",
        }

"""Builds model, batch plan, validator and trainer of a translation run, from prepared data."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from dragoman.bundle import Card, CardScore, write_bundle
from dragoman.bundle.translation_bundle_loader import build_loaded_model
from dragoman.config import Config
from dragoman.config.translation_directions import Direction, parse_direction, parse_directions
from dragoman.data.batch_plan import BatchPlan
from dragoman.data.collate import collate
from dragoman.data.parallel_corpus import SentencePair
from dragoman.data.token_store import TokenStore
from dragoman.data.translation_direction_sampling import SampledPlan, sample_examples
from dragoman.evaluate.confidence_calibration import ConfidenceMap
from dragoman.evaluate.translation_metrics import bleu_score, choose_tokenizer, score_translations
from dragoman.inference import Translation, Translator
from dragoman.models.encoder_decoder import EncoderDecoder
from dragoman.models.factory import build_model
from dragoman.runs.auto_config import max_epochs
from dragoman.runs.base_training_builder import VALIDATION_BATCH_TOKENS, DataSummary, RunBuilder
from dragoman.runs.final_model_and_card import (
    calibrate_confidence,
    describe_calibration,
    select_golden_sentences,
    select_scored_sentences,
    translation_data_rows,
)
from dragoman.runs.finetune import load_init_weights
from dragoman.runs.measured_resource_estimate import estimate_validation_seconds
from dragoman.runs.time_budget import TimeBudget
from dragoman.runs.translation_data_preparation import PreparedData
from dragoman.tasks.translation import (
    MultilingualValidator,
    Regularization,
    TranslationTask,
    TranslationValidator,
    ValidationSample,
)
from dragoman.training.bf16_mixed_precision import choose_precision
from dragoman.training.data_loader import CollateFunction
from dragoman.training.progress_display import Progress


class TranslationBuilder(RunBuilder):
    """Builds the parts of the training run of a translation model."""

    prepared: PreparedData

    def __init__(
        self,
        config: Config,
        prepared: PreparedData,
        *,
        device: torch.device,
        progress: Progress,
        weights: Path | None = None,
    ) -> None:
        super().__init__(config, device=device, progress=progress)
        self.prepared, self.weights = prepared, weights
        self.calibration: ConfidenceMap | None = None  # of the final weights, set by `score`

    @cached_property
    def plan(self) -> BatchPlan | SampledPlan:
        """Assignment of sentence pairs to batches."""
        store, config = self.prepared.train, self.config.train
        temperature = self.config.data.direction_temperature
        if temperature > 1 and len(store.direction_names) > 1:
            examples = sample_examples(store, temperature, config.seed)
            return SampledPlan(store, examples, batch_tokens=config.batch_tokens, seed=config.seed)
        return BatchPlan(
            store.src_lengths, store.tgt_lengths, batch_tokens=config.batch_tokens, seed=config.seed
        )

    @property
    def task(self) -> TranslationTask:
        """The label-smoothed loss."""
        return TranslationTask(
            smoothing=self.config.train.label_smoothing,
            regularization=Regularization.of(self.config.train),
            num_tags=len(self.prepared.tokenizers.src.tag_ids),
        )

    def build_model(self) -> EncoderDecoder:
        """Build the model, with random weights from the seed or those of the pretrained model."""
        torch.manual_seed(self.config.train.seed)
        src, tgt = self.prepared.tokenizers
        model = build_model(self.config.model, src_vocab_size=len(src), tgt_vocab_size=len(tgt))
        if self.weights is not None:
            model.load_state_dict(
                dict(load_init_weights(self.weights, self.config, self.prepared.tokenizers))
            )
        return model.to(self.device)

    def collate_function(self) -> CollateFunction:
        """Return the function that reads and pads sentence pairs."""
        return partial(
            collate,
            self.prepared.train,
            shapes=self.plan.shapes,
            tokenizers=self.prepared.tokenizers,
            dropout=self.config.text.bpe_dropout,
            max_length=self.config.data.max_length,
        )

    def tokens_per_step(self) -> float:
        """Return the mean tokens per step, both sides, with end-of-sentence tokens."""
        store = self.prepared.train
        tokens = (
            int(store.src_lengths.sum(dtype="int64"))
            + int(store.tgt_lengths.sum(dtype="int64"))
            + 2 * len(store)
        )
        tokens = round(tokens * self.plan.examples / len(store))  # some may be repeated
        return tokens * self.config.train.gradient_accumulation / self.plan.batches(0)

    def max_useful_steps(self) -> int:
        """Return the steps of as many epochs as are useful; more would overfit."""
        return max(100, self.steps_of(max_epochs(self.config)))

    def data_summary(self) -> DataSummary:
        """Return the numbers of pairs and the vocabulary sizes."""
        prepared = self.prepared
        src, tgt = (len(each) for each in prepared.tokenizers)
        vocabulary = f"{src:,}" if src == tgt else f"{src:,} and {tgt:,}"
        valid = len(prepared.valid) if prepared.valid is not None else 0
        return DataSummary(len(prepared.train), valid, "pairs", f"vocabulary size {vocabulary}")

    def validation_seconds(self, model: nn.Module) -> float:
        """Return the estimated seconds of one validation, measured on a few sentences."""
        if isinstance(self.validator, MultilingualValidator):
            validators = self.validator.validators.values()
            return sum(estimate_validation_seconds(each, model) for each in validators)
        return estimate_validation_seconds(self.validator, model)

    @cached_property
    def validator(self) -> TranslationValidator | MultilingualValidator | None:
        """The validator: loss on all validation pairs, BLEU of greedy search on some."""
        store, most = self.prepared.valid, self.config.train.validate_sentences
        if store is None:
            return None
        if not store.direction_names:
            every = np.arange(len(store), dtype=np.int64)
            return self._build_validator(store, every, self.prepared.sentences[:most])
        most_each = max(1, most // len(store.direction_names)) if most else 0
        validators = {
            name: self._build_validator(
                store, examples, self._direction_sentences(name)[:most_each], parse_direction(name)
            )
            for name, examples in store.direction_examples().items()
            if len(examples)
        }
        return MultilingualValidator(validators=validators)

    def _build_validator(
        self,
        store: TokenStore,
        examples: NDArray[np.int64],
        sentences: Sequence[SentencePair],
        direction: Direction | None = None,
    ) -> TranslationValidator:
        """Build the validator of some examples, and of sentences to translate."""
        plan = SampledPlan(store, examples, batch_tokens=VALIDATION_BATCH_TOKENS, seed=0)
        tgt_lang = direction.target if direction else self.config.data.tgt_lang
        choice = choose_tokenizer("", tgt_lang, [pair.tgt for pair in sentences])
        if choice.script or choice.warnings:  # the default, 13a, is not reported
            for sentence in choice.notes:
                self.progress.note(sentence)
        return TranslationValidator(
            batches=lambda: [collate(store, batch) for batch in plan.epoch(0)],
            count=plan.batches(0),
            device=self.device,
            precision=choose_precision(self.config.train.precision, self.device),
            sample=ValidationSample(
                [pair.src for pair in sentences], [pair.tgt for pair in sentences]
            ),
            translate=lambda model, texts: self.translate(
                model, texts, beam=1, direction=direction
            ),
            score=lambda texts, references: bleu_score(texts, references, tgt_lang=tgt_lang).value,
            progress=self.progress,
        )

    def _direction_sentences(self, name: str) -> list[SentencePair]:
        """Return the validation sentences of a direction; all of a model with one direction."""
        return [pair for pair in self.prepared.sentences if pair.direction == name]

    def translate(
        self,
        model: nn.Module,
        texts: Sequence[str],
        *,
        beam: int | None = None,
        direction: Direction | None = None,
    ) -> list[str]:
        """Translate with a model in training."""
        assert isinstance(model, EncoderDecoder), (
            f"translation needs an EncoderDecoder; found {type(model).__name__}"
        )
        translator = Translator(model, self.prepared.tokenizers, self.config)
        return translator.translate(texts, beam=beam, **_direction_options(direction))

    def score(self, weights: Mapping[str, Tensor], time_budget: TimeBudget) -> list[CardScore]:
        """Return BLEU, chrF and TER on as many validation sentences as the time budget allows.

        Those of a multilingual model are scored by direction. The same translations calibrate the
        confidence, which `write` adds to the bundle.
        """
        prepared = self.prepared
        model = build_loaded_model(self.config, prepared.tokenizers, weights).to(self.device)
        translator = Translator(model, prepared.tokenizers, self.config)

        def translate(pairs: Sequence[SentencePair]) -> list[Translation]:
            languages = _direction_options(parse_direction(pairs[0].direction)) if pairs else {}
            return list(translator.stream([pair.src for pair in pairs], **languages))

        began, trial = time.monotonic(), prepared.sentences[:32]
        translate([pair for pair in trial if pair.direction == trial[0].direction])
        seconds_each = (time.monotonic() - began) / max(1, len(trial))
        most = len(select_scored_sentences(prepared.sentences, time_budget, seconds_each))
        scores, scored = list[CardScore](), list[SentencePair]()
        translations = list[Translation]()
        for name in dict.fromkeys(pair.direction for pair in prepared.sentences):
            sentences = self._direction_sentences(name)
            pairs = sentences[: most * len(sentences) // len(prepared.sentences)]
            if pairs:
                found = translate(pairs)
                scores += self._score_direction(name, found, pairs, of=len(sentences))
                scored, translations = scored + pairs, translations + found
        if scored:
            self.calibration = calibrate_confidence(translations, scored)
        if self.calibration is not None:
            self.progress.note(describe_calibration(self.calibration))
        return scores

    def _score_direction(
        self,
        name: str,
        translations: Sequence[Translation],
        pairs: Sequence[SentencePair],
        *,
        of: int,
    ) -> list[CardScore]:
        """Return the scores of some of the `of` validation sentences of a direction."""
        direction = parse_direction(name)
        found = score_translations(
            [each.text for each in translations],
            [pair.tgt for pair in pairs],
            tgt_lang=direction.target if direction else self.config.data.tgt_lang,
        )
        which = "all" if len(pairs) == of else "the first"
        on = f"validation set{f' {name}' if name else ''}, {which} {len(pairs):,} pairs"
        self.progress.note(f"{on}: {', '.join(f'{each.name} {each.value:.1f}' for each in found)}")
        return [CardScore(each.name, each.value, each.signature, on) for each in found]

    def data_rows(self) -> dict[str, str]:
        """Return the rows of the model card about the sentence pairs."""
        return translation_data_rows(self.config, self.prepared)

    def write(
        self, path: Path, weights: Mapping[str, Tensor], card: Card, fields: Mapping[str, Any]
    ) -> str:
        """Write the bundle of a translation model."""
        write_bundle(
            path,
            config=self.config,
            tokenizers=self.prepared.tokenizers,
            weights=weights,
            card=card,
            golden=select_golden_sentences(self.prepared),
            identifier=self.prepared.identifier,
            manifest_fields=fields,
            calibration=self.calibration,
        )
        directions = parse_directions(self.config.data.directions)
        to = f"--to {directions[0].target} " if len(directions) > 1 else ""
        return f'dragoman translate -m {{model}} {to}"…"'


def _direction_options(direction: Direction | None) -> dict[str, str]:
    """Return the options of a translation in a direction."""
    if direction is None:
        return {}
    return {"source_language": direction.source, "target_language": direction.target}

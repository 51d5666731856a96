"""Builds model, batch plan, validator and trainer from a configuration and prepared data."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property, partial
from pathlib import Path

import torch
from torch import nn

from dragoman.checkpoint.run_directory import RunDirectory
from dragoman.config import Config
from dragoman.data.collate import BatchPlan, collate
from dragoman.evaluate.metrics import bleu_score, choose_tokenizer
from dragoman.inference import Translator
from dragoman.models.encoder_decoder import EncoderDecoder
from dragoman.models.factory import build_model
from dragoman.runs.auto_config import MAX_EPOCHS
from dragoman.runs.data_preparation import PreparedData
from dragoman.runs.finetune import load_init_weights
from dragoman.tasks.translation import TranslationTask, TranslationValidator, ValidationSample
from dragoman.training.distributed.process_group import ProcessGroup
from dragoman.training.mixed_precision import choose_precision
from dragoman.training.progress import Progress
from dragoman.training.trainer import ReplanSteps, Trainer

VALIDATION_BATCH_TOKENS = 4000  # padded; without gradients, so it fits wherever training does


class RunBuilder:
    """Builds the parts of a training run."""

    def __init__(
        self,
        config: Config,
        prepared: PreparedData,
        *,
        device: torch.device,
        progress: Progress,
        weights: Path | None = None,
    ) -> None:
        self.config, self.prepared, self.device, self.progress = config, prepared, device, progress
        self.weights = weights  # initial weights, for fine-tuning

    @cached_property
    def plan(self) -> BatchPlan:
        """Assignment of sentence pairs to batches."""
        store, config = self.prepared.train, self.config.train
        return BatchPlan(
            store.src_lengths, store.tgt_lengths, batch_tokens=config.batch_tokens, seed=config.seed
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

    def build_trainer(
        self,
        run: RunDirectory,
        *,
        world: ProcessGroup,
        deadline: Callable[[], float] | None,
        replan: ReplanSteps | None,
    ) -> Trainer:
        """Build the trainer with its model, data and validator."""
        config = self.config
        collate_train = partial(
            collate,
            self.prepared.train,
            shapes=self.plan.shapes,
            tokenizers=self.prepared.tokenizers,
            dropout=config.text.bpe_dropout,
            max_length=config.data.max_length,
        )
        return Trainer(
            model=self.build_model(),
            task=TranslationTask(smoothing=config.train.label_smoothing),
            plan=self.plan,
            collate=collate_train,
            config=config.train,
            run=run,
            width=config.model.width,
            validate=self.validator,
            progress=self.progress,
            distributed=world,
            deadline=deadline,
            replan=replan,
        )

    def epochs_of(self, steps: int) -> float:
        """Return the epochs of a number of steps."""
        return steps * self.config.train.gradient_accumulation / self.plan.batches(0)

    def tokens_per_step(self) -> float:
        """Return the mean tokens per step, both sides, with end-of-sentence tokens."""
        store = self.prepared.train
        tokens = (
            int(store.src_lengths.sum(dtype="int64"))
            + int(store.tgt_lengths.sum(dtype="int64"))
            + 2 * len(store)
        )
        return tokens * self.config.train.gradient_accumulation / self.plan.batches(0)

    def max_useful_steps(self) -> int:
        """Return the steps of MAX_EPOCHS epochs; more would overfit."""
        return max(
            100, MAX_EPOCHS * self.plan.batches(0) // self.config.train.gradient_accumulation
        )

    @cached_property
    def validator(self) -> TranslationValidator | None:
        """The validator: loss on all validation pairs, BLEU of greedy search on some."""
        store, config = self.prepared.valid, self.config
        if store is None:
            return None
        plan = BatchPlan(
            store.src_lengths, store.tgt_lengths, batch_tokens=VALIDATION_BATCH_TOKENS, seed=0
        )
        chosen = self.prepared.sentences[: config.train.validate_sentences]
        choice = choose_tokenizer("", config.data.tgt_lang, [pair.tgt for pair in chosen])
        if choice.script or choice.warnings:  # the default, 13a, is not reported
            for sentence in choice.notes:
                self.progress.note(sentence)
        return TranslationValidator(
            batches=lambda: [collate(store, examples) for examples in plan.epoch(0)],
            count=plan.batches(0),
            device=self.device,
            precision=choose_precision(config.train.precision, self.device),
            sample=ValidationSample([pair.src for pair in chosen], [pair.tgt for pair in chosen]),
            translate=lambda model, texts: self.translate(model, texts, beam=1),
            score=lambda texts, references: (
                bleu_score(texts, references, tgt_lang=config.data.tgt_lang).value
            ),
            progress=self.progress,
        )

    def translate(
        self, model: nn.Module, texts: Sequence[str], *, beam: int | None = None
    ) -> list[str]:
        """Translate with a model in training."""
        assert isinstance(model, EncoderDecoder), (
            f"translation needs an EncoderDecoder; found {type(model).__name__}"
        )
        return Translator(model, self.prepared.tokenizers, self.config).translate(texts, beam=beam)

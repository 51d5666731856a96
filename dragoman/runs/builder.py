"""Putting a run's parts together: model, batches, validation, trainer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from dragoman.checkpoint.run_directory import RunDirectory
from dragoman.config import Config
from dragoman.data.batches import Batch, BatchPlan, collate
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

VALIDATION_BATCH_TOKENS = (
    4000  # slots; validation needs no gradients, so this fits wherever training does
)


class RunBuilder:
    """What a configuration and prepared data make together."""

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
        self.weights = weights  # to fine-tune from

    @cached_property
    def plan(self) -> BatchPlan:
        """Which pairs form which batch."""
        store, config = self.prepared.train, self.config.train
        return BatchPlan(
            store.src_lengths, store.tgt_lengths, batch_tokens=config.batch_tokens, seed=config.seed
        )

    def model(self) -> EncoderDecoder:
        """Build the model, its weights drawn from the run's seed or those of the model that is fine-tuned."""
        torch.manual_seed(self.config.train.seed)
        src, tgt = self.prepared.tokenizers
        model = build_model(self.config.model, src_vocab_size=len(src), tgt_vocab_size=len(tgt))
        if self.weights is not None:
            model.load_state_dict(
                dict(load_init_weights(self.weights, self.config, self.prepared.tokenizers))
            )
        return model.to(self.device)

    def trainer(
        self,
        run: RunDirectory,
        *,
        world: ProcessGroup,
        deadline: Callable[[], float] | None,
        replan: ReplanSteps | None,
    ) -> Trainer:
        """Put everything together."""
        config = self.config
        return Trainer(
            model=self.model(),
            task=TranslationTask(smoothing=config.train.label_smoothing),
            plan=self.plan,
            collate=self.collate,
            config=config.train,
            run=run,
            width=config.model.width,
            validate=self.validation(),
            progress=self.progress,
            distributed=world,
            deadline=deadline,
            replan=replan,
        )

    def collate(self, examples: NDArray[np.int64], seed: int) -> Batch:
        """Make a batch in one of the plan's shapes; with BPE-dropout, each time cut into other pieces."""
        prepared, config = self.prepared, self.config
        return collate(
            prepared.train,
            examples,
            shapes=self.plan.shapes,
            tokenizers=prepared.tokenizers,
            dropout=config.text.bpe_dropout,
            seed=seed,
            max_length=config.data.max_length,
        )

    def epochs(self, steps: int) -> float:
        """Return how often so many steps see the corpus."""
        return steps * self.config.train.gradient_accumulation / self.plan.batches(0)

    def tokens_per_step(self) -> float:
        """Return the tokens of both sides that a step sees on average, their ends included."""
        store = self.prepared.train
        tokens = (
            int(store.src_lengths.sum(dtype="int64"))
            + int(store.tgt_lengths.sum(dtype="int64"))
            + 2 * len(store)
        )
        return tokens * self.config.train.gradient_accumulation / self.plan.batches(0)

    def max_useful_steps(self) -> int:
        """Count the updates past which a corpus is only learnt by heart."""
        return max(
            100, MAX_EPOCHS * self.plan.batches(0) // self.config.train.gradient_accumulation
        )

    def validation(self) -> TranslationValidator | None:
        """Measure on the validation pairs: loss on all of them, BLEU on the first few, translated greedily."""
        store, config = self.prepared.valid, self.config
        if store is None:
            return None
        plan = BatchPlan(
            store.src_lengths, store.tgt_lengths, batch_tokens=VALIDATION_BATCH_TOKENS, seed=0
        )
        chosen = self.prepared.sentences[: config.train.validate_sentences]
        choice = choose_tokenizer("", config.data.tgt_lang, [pair.tgt for pair in chosen])
        if choice.script or choice.warnings:  # 13a needs no word
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
        """Translate with a model that is not a bundle yet."""
        assert isinstance(model, EncoderDecoder), (
            f"only an encoder-decoder translates; found {type(model).__name__}"
        )
        return Translator(model, self.prepared.tokenizers, self.config).translate(texts, beam=beam)

"""The final model of a run: its weights, golden sentences and model card."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from torch import Tensor

from dragoman.bundle import Card, CardScore
from dragoman.bundle.card import format_command
from dragoman.bundle.golden_vectors import GoldenInput
from dragoman.checkpoint.run_directory import Checkpoint, RunDirectory
from dragoman.checkpoint.weight_average import average_weights
from dragoman.config import Config
from dragoman.config.root_config import file_names
from dragoman.data.parallel_corpus import SentencePair
from dragoman.errors import CorruptError
from dragoman.evaluate.confidence_calibration import (
    ConfidenceMap,
    TranslationTokens,
    fit_confidence,
)
from dragoman.evaluate.translation_metrics import sentence_chrf
from dragoman.inference import Translation
from dragoman.runs.time_budget import TimeBudget
from dragoman.runs.translation_data_preparation import PreparedData
from dragoman.training.progress_display import format_duration
from dragoman.training.trainer import TrainResult

NUM_GOLDEN_SENTENCES = 3  # inputs of the golden vectors


def select_weights(run: RunDirectory, config: Config) -> tuple[dict[str, Tensor], str]:
    """Return the weights of the final model and a description of which they are."""
    if config.train.average_checkpoints > 1:
        newest = [
            checkpoint
            for _, checkpoint in zip(
                range(config.train.average_checkpoints), run.verified_checkpoints(), strict=False
            )
        ]
        if newest:
            steps = ", ".join(str(checkpoint.step) for checkpoint in newest)
            return average_weights(
                [_ema_or_weights(checkpoint) for checkpoint in newest]
            ), f"average of steps {steps}"
    best = run.best() if config.train.final_checkpoint == "best" else None
    checkpoint = best or next(run.verified_checkpoints(), None)
    if checkpoint is None:
        raise CorruptError(
            "a finished run must have a valid checkpoint",
            found=f"none in {run.path}",
            fix="train again in another directory",
        )
    ema = ", EMA" if checkpoint.load_ema() is not None else ""
    return _ema_or_weights(
        checkpoint
    ), f"step {checkpoint.step}, {'best' if best else 'last'} checkpoint{ema}"


def select_golden_sentences(prepared: PreparedData) -> list[str | GoldenInput]:
    """Return a few sentences of medium length for the golden vectors, and of each direction."""
    names = list(dict.fromkeys(pair.direction for pair in prepared.sentences if pair.direction))
    if names:
        each = max(1, NUM_GOLDEN_SENTENCES // len(names))
        return [
            GoldenInput(text, name.rpartition("-")[2])
            for name in names
            for text in _middle_texts(
                [pair for pair in prepared.sentences if pair.direction == name], each
            )
        ]
    texts = _middle_texts(prepared.sentences, NUM_GOLDEN_SENTENCES)
    if not texts:
        ids = [
            prepared.train.pair(index)[0].tolist()
            for index in range(min(NUM_GOLDEN_SENTENCES, len(prepared.train)))
        ]
        decoded = prepared.tokenizers.src.decode_batch(ids)
        tags = {number: language for language, number in prepared.tokenizers.src.tag_ids.items()}
        return [
            GoldenInput(text, tags[row[0]]) if row[0] in tags else text
            for text, row in zip(decoded, ids, strict=True)
            if text.strip()
        ]
    return list(texts)


def _middle_texts(sentences: Sequence[SentencePair], number: int) -> list[str]:
    """Return sources of medium length."""
    texts = sorted(
        {pair.src.strip() for pair in sentences} - {""}, key=lambda text: (len(text), text)
    )
    middle = len(texts) // 2
    return texts[middle : middle + number]


def translation_data_rows(config: Config, prepared: PreparedData) -> dict[str, str]:
    """Return the rows of the model card about the sentence pairs."""
    data = config.data
    names = [
        Path(name).name for files in (data.src, data.tgt, data.pairs) for name in file_names(files)
    ]
    valid = [
        Path(name).name
        for files in (data.valid_src, data.valid_tgt, data.valid_pairs)
        for name in file_names(files)
    ]
    report = prepared.train.report
    rows = {"training pairs": f"{report.pairs:,} ({', '.join(names)})"}
    if prepared.train.direction_names:
        rows["pairs by direction"] = ", ".join(
            f"{name} {len(own):,}" for name, own in prepared.train.direction_examples().items()
        )
    if report.skipped:
        rows["skipped pairs"] = report.summary()
    if prepared.valid is not None:
        rows["validation pairs"] = (
            f"{len(prepared.valid):,} ({', '.join(valid) or 'held out of the training pairs'})"
        )
    return rows


def build_model_card(
    config: Config,
    *,
    data: Mapping[str, str],
    result: TrainResult,
    chosen: str,
    scores: Sequence[CardScore],
    seconds: float,
    machine: str,
) -> Card:
    """Return the contents of the model card."""
    added = config.train.extend_vocabulary
    training = {
        **({"fine-tuned from": config.train.init_from} if config.train.init_from else {}),
        **({"tokens added": f"{added:,}, learnt from the corpus"} if added else {}),
        "steps": f"{result.step:,}",
        "weights": chosen,
        "time": f"{format_duration(seconds)} on {machine}",
        "seed": str(config.train.seed),
    }
    return Card(
        command=format_command(sys.argv[1:]), data=data, training=training, scores=tuple(scores)
    )


def select_scored_sentences(
    sentences: Sequence[SentencePair], time_budget: TimeBudget, seconds_each: float
) -> list[SentencePair]:
    """Return as many validation sentences as the time budget allows to translate."""
    if not time_budget.is_limited:
        return list(sentences)
    return list(
        sentences[: int(time_budget.scoring_seconds_left() / max(1.2 * seconds_each, 1e-6))]
    )


def calibrate_confidence(
    translations: Sequence[Translation], pairs: Sequence[SentencePair]
) -> ConfidenceMap | None:
    """Return the calibrated confidence of translations with references; None with too few."""
    return fit_confidence(
        [TranslationTokens(each.tokens, each.log_probs, each.src_tokens) for each in translations],
        sentence_chrf([each.text for each in translations], [pair.tgt for pair in pairs]),
        [pair.src for pair in pairs],
    )


def describe_calibration(calibration: ConfidenceMap) -> str:
    """Return the calibration error of the confidence in one line."""
    return (
        f"confidence of {calibration.measured_on:,} held-out validation sentences: expected "
        f"calibration error {100 * calibration.calibration_error:.1f} %, "
        f"AUROC {calibration.auroc:.2f}"
    )


def _ema_or_weights(checkpoint: Checkpoint) -> dict[str, Tensor]:
    """Return a checkpoint's EMA weights, which validation used, or its weights without EMA."""
    return {**checkpoint.load_weights(), **(checkpoint.load_ema() or {})}

"""The end of a run: which weights the model takes, and what its card says."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from torch import Tensor

from dragoman.bundle import Card
from dragoman.bundle import Score as CardScore
from dragoman.bundle.card import command_line
from dragoman.config import Config
from dragoman.config.tree import file_names
from dragoman.data.corpus import Pair
from dragoman.errors import CorruptError
from dragoman.runs.clock import Clock
from dragoman.runs.prepare import Prepared
from dragoman.training.average import average_weights
from dragoman.training.checkpoint import Checkpoint, RunDirectory
from dragoman.training.loop import Result
from dragoman.training.meter import duration

GOLDEN = 3  # sentences whose translations the bundle keeps, to check itself by


def choose_weights(run: RunDirectory, config: Config) -> tuple[dict[str, Tensor], str]:
    """Take the weights that the finished model will have, and say which they are."""
    if config.train.average > 1:
        newest = [checkpoint for _, checkpoint in zip(range(config.train.average), run.verified(), strict=False)]
        if newest:
            steps = ", ".join(str(checkpoint.step) for checkpoint in newest)
            return average_weights([_weights(checkpoint) for checkpoint in newest]), f"average of steps {steps}"
    best = run.best() if config.train.choose == "best" else None
    checkpoint = best or next(run.verified(), None)
    if checkpoint is None:
        raise CorruptError(
            "a finished run must have a checkpoint that verifies", found=f"none in {run.path}", fix="train again in another directory"
        )
    running = ", as a running average" if checkpoint.load_ema() is not None else ""
    return _weights(checkpoint), f"step {checkpoint.step}, {'the best' if best else 'the last'}{running}"


def golden_texts(prepared: Prepared) -> list[str]:
    """Choose a few sentences of middling length that the bundle will check itself by."""
    texts = sorted({pair.src.strip() for pair in prepared.sentences} - {""}, key=lambda text: (len(text), text))
    if not texts:
        ids = [prepared.train.pair(index)[0].tolist() for index in range(min(GOLDEN, len(prepared.train)))]
        return [text for text in prepared.tokenizers.src.decode_batch(ids) if text.strip()]
    middle = len(texts) // 2
    return texts[middle : middle + GOLDEN]


def make_card(
    config: Config, *, prepared: Prepared, result: Result, chosen: str, scores: Sequence[CardScore], seconds: float, machine: str
) -> Card:
    """Gather the facts for the model card."""
    data = config.data
    names = [Path(name).name for files in (data.src, data.tgt, data.pairs) for name in file_names(files)]
    valid = [Path(name).name for files in (data.valid_src, data.valid_tgt, data.valid_pairs) for name in file_names(files)]
    report = prepared.train.report
    facts = {"training pairs": f"{report.pairs:,} ({', '.join(names)})"}
    if report.set_aside:
        facts["set aside"] = report.sentence()
    if prepared.valid is not None:
        facts["validation pairs"] = f"{len(prepared.valid):,} ({', '.join(valid) or 'held out of the training pairs'})"
    training = {
        **({"fine-tuned from": config.train.init_from} if config.train.init_from else {}),
        "updates": f"{result.step:,}",
        "weights": chosen,
        "time": f"{duration(seconds)} on {machine}",
        "seed": str(config.train.seed),
    }
    return Card(command=command_line(sys.argv[1:]), data=facts, training=training, scores=tuple(scores))


def sentences_to_score(sentences: Sequence[Pair], clock: Clock, seconds_each: float) -> list[Pair]:
    """Take as many validation sentences as there is time to translate."""
    if not clock.limited:
        return list(sentences)
    return list(sentences[: int(clock.left_to_score() / max(1.2 * seconds_each, 1e-6))])


def _weights(checkpoint: Checkpoint) -> dict[str, Tensor]:
    """Take a checkpoint's running average where it has one, over its weights: what validation judged."""
    return {**checkpoint.load_weights(), **(checkpoint.load_ema() or {})}

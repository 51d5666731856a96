"""A model from several checkpoints of one run, finished or not."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import NamedTuple

from dragoman.bundle import Bundle, Card, write_bundle
from dragoman.bundle import format as layout
from dragoman.bundle.card import command_line
from dragoman.bundle.golden import golden_cases
from dragoman.bundle.loading import expected_weights
from dragoman.errors import BundleError
from dragoman.runs.place import Place
from dragoman.text.tokenizer import load_tokenizers
from dragoman.training.average import average_weights
from dragoman.training.checkpoint import RunDirectory


class Averaged(NamedTuple):
    """What was made: where, and of which steps, newest first."""

    out: Path
    steps: list[int]


def average_run(model: str | Path, out: str | Path, *, last: int) -> Averaged:
    """Average the newest checkpoints of the run in a model's directory and write the result as a model of its own."""
    place, target = Place(model), Place(out)
    place.require_run()
    target.require_no_run()
    newest = list(itertools.islice(RunDirectory(place.training).verified(), last))
    if len(newest) < last:
        raise BundleError(
            f"{last} checkpoints must verify to be averaged",
            found=f"{len(newest)} in {place.training}",
            fix=f"ask for --last {len(newest)}, or keep more with train.keep" if newest else "train until the first checkpoint",
        )
    steps = [checkpoint.step for checkpoint in newest]
    # The weights themselves, not their running averages: an average of averages has looked too far back.
    weights = average_weights(checkpoint.load_weights() for checkpoint in newest)
    chosen = f"average of steps {', '.join(map(str, steps))}"
    card = Card(
        command=command_line(["average", str(place.out), "--last", str(last), "--out", str(target.out)]), training={"weights": chosen}
    )
    config, tokenizers = place.config(), load_tokenizers(place.text)
    expected = expected_weights(config, tokenizers)
    for checkpoint in newest:
        checkpoint.require_fit({"weights": expected})
    write_bundle(
        target.out,
        config=config,
        tokenizers=tokenizers,
        weights=weights,
        card=card,
        golden=_golden_texts(place) if place.finished else [],
        facts={"updates": steps[0], "weights_from": chosen},
    )
    return Averaged(target.out, steps)


def _golden_texts(place: Place) -> list[str]:
    """Return the inputs of the finished model's golden vectors."""
    bundle = Bundle.load(place.out)
    sizes = len(bundle.tokenizers.src), len(bundle.tokenizers.tgt)
    return [case["input"] for case in golden_cases(bundle.golden, *sizes, str(place.out / layout.GOLDEN))]

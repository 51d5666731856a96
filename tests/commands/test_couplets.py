"""Couplets end to end: train on verses, fine-tune on couplets, complete them under constraints."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from dragoman.cli.app import main
from dragoman.evaluate.couplet_metrics import score_couplets

FIRST = "春山江月风花云雪"
SECOND = "夏水河日雨草霞霜"
ANSWERS = dict(zip(FIRST + "，", SECOND + "，", strict=True))


def couplets(count: int, seed: int) -> tuple[list[str], list[str]]:
    """Draw first lines, some with repeated characters and commas, and their second lines."""
    draw = random.Random(seed)
    first = ["".join(draw.choices(FIRST, k=draw.randint(3, 6))) for _ in range(count)]
    first = [line + "，" + line[0] * 2 if draw.random() < 0.3 else line for line in first]
    return first, ["".join(ANSWERS[each] for each in line) for line in first]


def write(folder: Path, name: str, pairs: tuple[list[str], list[str]]) -> list[str]:
    for side, lines in zip(("first", "second"), pairs, strict=True):
        text = "".join(f"{line}\n" for line in lines)
        (folder / f"{name}.{side}").write_text(text, encoding="utf-8")
    return ["--src", str(folder / f"{name}.first"), "--tgt", str(folder / f"{name}.second")]


def test_a_fine_tuned_model_answers_within_the_rules(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    verses, lines = write(tmp_path, "verse", couplets(150, 1)), write(
        tmp_path, "couplet", couplets(60, 2)
    )  # fmt: skip
    settings = [
        f"data.cache_dir={tmp_path / 'cache'}",
        "model.encoder=[transformer*1]",
        "model.decoder=[transformer*1]",
        "model.width=32",
        "model.heads=2",
        "model.ffn_width=32",
        "train.batch_tokens=400",
        "train.threads=1",
    ]
    common = ["--device", "cpu", *(part for each in settings for part in ("--set", each))]
    base, tuned = tmp_path / "verses", tmp_path / "couplets"
    run = ["train", *common, "--recipe", "couplets", *verses, *lines, "--out", str(base)]
    assert main([*run, "--set", "train.steps=40", "--set", "train.warmup_steps=10"]) == 0
    more = ["--set", f"data.cache_dir={tmp_path / 'cache'}", "--set", "train.threads=1"]
    run = ["train", "--device", "cpu", *more, "--init-from", str(base), *lines]
    assert main([*run, "--set", "train.steps=20", "--out", str(tuned)]) == 0
    capsys.readouterr()
    first, second = couplets(25, 3)
    names = ("equal_length", "mirror", "no_copy", "punctuation")
    options = [part for name in names for part in ("--constraint", name)]
    assert main(["translate", "-m", str(tuned), *options, *first]) == 0
    answers = capsys.readouterr().out.splitlines()
    scores = score_couplets(first, answers, second)
    assert scores.any_violation == 0
    assert scores.equal_length == 1.0
    assert main(["score", "-m", str(tuned), *lines]) == 0
    assert "per character" in capsys.readouterr().err

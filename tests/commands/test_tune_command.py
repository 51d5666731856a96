"""`dragoman tune`: whole searches in miniature, stopped, killed, resumed and rejected."""

from __future__ import annotations

import csv
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from dragoman.cli.app import main
from dragoman.runtime import optional_package_checks

ROOT = Path(__file__).resolve().parents[2]
SETTINGS = (
    "model.width=16", "model.heads=2", "model.ffn_width=32", "model.encoder=transformer",
    "model.decoder=transformer", "text.tokenizer=characters", "text.byte_fallback=false",
    "train.steps=4", "train.batch_tokens=200", "train.threads=1", "train.device=cpu",
    "train.validate_every=2", "train.checkpoint_every=2", "decode.beam=1",
    "decode.max_length_ratio=1", "decode.max_length_extra=2",
)  # fmt: skip


def arguments(corpus: Path, *options: str) -> list[str]:
    files = [
        f"--{option}={corpus / file}"
        for option, file in (
            ("src", "a.src"), ("tgt", "a.tgt"), ("valid-src", "v.src"), ("valid-tgt", "v.tgt")
        )
    ]  # fmt: skip
    settings = [f"--set={each}" for each in SETTINGS]
    cache = f"--set=data.cache_dir={corpus / 'cache'}"
    fixed = ["--recipe=tiny", "--search=dropout,learning_rate", "--budget=10m"]
    return ["tune", *files, *fixed, *settings, cache, "--out", str(corpus / "study"), *options]


def rows(corpus: Path) -> list[dict[str, str]]:
    with (corpus / "study" / "trials.csv").open() as file:
        return list(csv.DictReader(file))


def test_a_search_gives_a_table_and_settings_that_train(
    backwards: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments(backwards, "--trials=2")) == 0
    printed = capsys.readouterr()
    table = printed.out.splitlines()
    assert table[0].split() == ["trial", "loss", "dropout", "learning_rate", "time", "state"]
    assert {line.split()[0] for line in table[1:3]} == {"0", "1"}
    assert all(len(line) <= 80 for line in printed.err.splitlines())
    best = table[1].split()[0]
    assert os.listdir(backwards / "study" / "trials") == [f"000{best}"]
    model = backwards / "study" / "trials" / f"000{best}"
    assert main(["verify", str(model)]) == 0
    capsys.readouterr()

    # The same command finds its work done; more trials are added to it.
    before = rows(backwards)
    assert main(arguments(backwards, "--trials=2")) == 0
    assert rows(backwards) == before

    out = backwards / "final"
    config = backwards / "study" / "best.yaml"
    assert main(["train", f"--config={config}", "--set=train.steps=1", f"--out={out}"]) == 0
    assert main(["verify", str(out)]) == 0


def start(corpus: Path, *options: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "dragoman", *arguments(corpus, *options)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        # A shell in the background has SIGINT ignored, which children inherit.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )


def wait_for(process: subprocess.Popen[str], journal: Path, event: bytes, count: int) -> None:
    """Wait until the journal has so many of an event."""
    for _ in range(6000):
        if journal.exists() and journal.read_bytes().count(event) >= count:
            return
        assert process.poll() is None, process.communicate()
        time.sleep(0.01)
    raise AssertionError("the search did not get there")


def test_killed_and_interrupted_searches_continue(
    backwards: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Values and losses are those of a search that was never stopped."""
    journal = backwards / "study" / "journal.jsonl"
    long = (
        "--set=train.steps=60",
        "--set=train.validate_every=20",
        "--set=train.checkpoint_every=20",
    )
    process = start(backwards, "--trials=2", *long)
    wait_for(process, journal, b'"value"', 2)
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=60)

    process = start(backwards, "--trials=2", *long)
    wait_for(process, journal, b'"start"', 2)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 75, err
    assert "Traceback" not in err
    assert "resuming the study" in err
    assert "run the same command again to resume" in err
    assert out.splitlines()[0].split()[0] == "trial"

    assert main(arguments(backwards, "--trials=2", *long)) == 0
    resumed = rows(backwards)
    (backwards / "study").rename(backwards / "pieces")
    assert main(arguments(backwards, "--trials=2", *long)) == 0
    capsys.readouterr()
    same = ("trial", "state", "loss", "model.dropout", "train.learning_rate", "validations")
    assert [[row[name] for name in same] for row in resumed] == [
        [row[name] for name in same] for row in rows(backwards)
    ]


def test_vocabularies_are_compared_per_character_and_without_a_recipe(
    backwards: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = arguments(backwards, "--trials=2", "--search=text.vocab_size=40,60")
    line = [each for each in line if each != "--recipe=tiny" and "tokenizer" not in each]
    line = [each for each in line if "dropout" not in each]
    assert main(line) == 0
    printed = capsys.readouterr()
    assert "compared per character" in printed.err
    assert printed.out.splitlines()[0].split()[:3] == ["trial", "loss/char", "vocab_size"]
    # One tokenizer for each vocabulary size, and no other prepared data than that of two sizes.
    assert len(list((backwards / "cache").glob("text-*"))) <= 3


def test_other_tasks_are_tuned(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = "".join(
        f"{label}\t{word} film number {number}\n"
        for number in range(30)
        for label, word in (("good", "fine"), ("bad", "awful"))
    )
    (tmp_path / "reviews.tsv").write_text("label\ttext\n" + text)
    line = ["tune", "--task=classify", f"--train={tmp_path / 'reviews.tsv'}", "--budget=10m",
            "--set=train.steps=4", "--set=train.threads=1", "--search=learning_rate",
            "--metric=accuracy", "--trials=2", f"--set=data.cache_dir={tmp_path / 'cache'}",
            "--set=train.device=cpu", "--out", str(tmp_path / "study")]  # fmt: skip
    assert main(line) == 0
    assert capsys.readouterr().out.splitlines()[0].split()[:2] == ["trial", "accuracy"]


def test_a_dry_run_writes_nothing(backwards: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments(backwards, "--dry-run")) == 0
    printed = capsys.readouterr()
    assert printed.out == ""
    assert "search model.dropout        0..0.4 (base 0.1)" in printed.err
    assert not (backwards / "study").exists()


def test_without_the_extra(
    backwards: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(optional_package_checks, "missing_reason", lambda package: f"no {package}")
    assert main(arguments(backwards)) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "found no optuna" in line
    assert "pip install 'dragoman[tune]'" in line
    assert not (backwards / "study").exists()


@pytest.mark.parametrize(
    ("options", "part"),
    [
        (["--search=model.dropuot=0..1"], "did you mean model.dropout?"),
        (["--budget=10"], "a duration must be a number with its unit"),
        (["--budget=1m", "--trial-budget=2m"], "--trial-budget must be at most --budget"),
        (["--metric=blue"], "did you mean bleu?"),
        (["--set=train.time_budget=9"], "use --trial-budget"),
        (["--set=train.init_from=model"], "train.init_from is not for tuning; found model"),
        (["--src=/nowhere"], "equally many files"),
    ],
)
def test_invalid_arguments_are_one_line(
    backwards: Path, capsys: pytest.CaptureFixture[str], options: list[str], part: str
) -> None:
    assert main(arguments(backwards, *options)) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert part in line
    assert not (backwards / "study").exists()


def test_no_data_is_a_mistake(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tune", "--budget=1m", f"--out={tmp_path / 'study'}"]) == 2
    assert "tuning needs data; found none" in capsys.readouterr().err


def test_an_empty_training_file_is_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    empty = tmp_path / "empty.jsonl"
    empty.write_text("\n")
    options = ["--train", str(empty), "--out", str(tmp_path / "out"), "--budget", "30s"]
    assert main(["tune", "--task", "classify", *options, "--dry-run"]) == 2
    assert "empty.jsonl must hold examples to train on; found no line" in capsys.readouterr().err


def test_a_search_without_a_complete_trial_is_an_error(
    backwards: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = arguments(backwards, "--search=model.heads=3", "--trials=1")
    for _ in range(2):  # resumed, too
        assert main(options) == 2
        captured = capsys.readouterr()
        assert "failed" in captured.out
        assert "error: some trial must be complete; found trial 0: model.heads must" in captured.err

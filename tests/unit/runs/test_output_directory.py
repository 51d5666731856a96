"""The output directory of a run: the files that a resumed run must find again."""

from __future__ import annotations

from pathlib import Path

import pytest

from dragoman.config import Config
from dragoman.errors import ConfigError, CorruptError
from dragoman.runs import output_directory
from dragoman.runs.output_directory import DataFile, OutputDirectory, require_same_files
from dragoman.storage.atomic_write import replace_file

TRAIN, VALID = (DataFile(part, f"data/{part}.txt", 5, "abc") for part in ("train", "valid"))


@pytest.mark.parametrize(
    ("before", "now", "found"),
    [
        ([TRAIN], [TRAIN, VALID], "train.txt, valid.txt instead of train.txt"),
        ([TRAIN, VALID], [TRAIN], "train.txt instead of train.txt, valid.txt"),
        ([VALID], [], "none instead of valid.txt"),
        ([], [VALID], "valid.txt instead of none"),
    ],
)
def test_missing_and_additional_files_are_named(
    before: list[DataFile], now: list[DataFile], found: str
) -> None:
    require_same_files(now, now)
    with pytest.raises(CorruptError) as caught:
        require_same_files(before, now)
    assert f"must read the files that it started with; found {found}; " in str(caught.value)


@pytest.mark.parametrize("written", [0, 1, 2, 3])
def test_a_run_has_started_once_all_its_files_are_written(
    written: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Killed(BaseException):
        pass

    def write(path: Path, data: bytes) -> None:
        if len(list(path.parent.iterdir())) == written:
            raise Killed
        replace_file(path, data)

    output_dir = OutputDirectory(tmp_path / "model")
    output_dir.training.mkdir(parents=True)
    request = Config()
    config = request.replace(train={"steps": 7})
    monkeypatch.setattr(output_directory, "replace_file", write)
    if written < 3:
        with pytest.raises(Killed):
            output_dir.write(request, config, [TRAIN, VALID])
        assert not output_dir.has_run
    else:
        output_dir.write(request, config, [TRAIN, VALID])
        assert output_dir.has_run
        assert (output_dir.request(), output_dir.config()) == (request, config)
        assert output_dir.data_files() == [TRAIN, VALID]


def started(folder: Path, **train: object) -> OutputDirectory:
    """Return a directory whose run was asked for the defaults, and resolved to other steps."""
    directory = OutputDirectory(folder)
    directory.training.mkdir()
    directory.write(Config(), Config().replace(train={"steps": 77, **train}), [])
    return directory


@pytest.mark.parametrize(
    ("section", "name", "value"),
    [
        ("train", "steps", 5), ("train", "checkpoint_every", 5), ("train", "validate_every", 5),
        ("train", "validate_sentences", 5), ("train", "keep_checkpoints", 5),
        ("train", "average_checkpoints", 5), ("train", "final_checkpoint", "last"),
        ("train", "patience", 5), ("train", "target_exact", 0.5), ("train", "time_budget", 5.0),
        ("train", "device", "cpu"), ("train", "threads", 5), ("train", "compile", "off"),
        ("train", "tensorboard", True), ("train", "deterministic", True),
        ("decode", "beam", 7), ("data", "cache_dir", "elsewhere"),
    ],
)  # fmt: skip
def test_a_resumed_run_may_change_what_does_not_change_its_steps(
    section: str, name: str, value: object, tmp_path: Path
) -> None:
    directory = started(tmp_path)
    request = Config().replace(**{section: {name: value}})
    assert request != Config()
    found = directory.resume_config(request)
    assert getattr(getattr(found, section), name) == value
    if name != "steps":
        assert found.train.steps == 77


@pytest.mark.parametrize(
    ("section", "name", "value"),
    [
        ("train", "seed", 9), ("train", "learning_rate", 0.5), ("train", "batch_tokens", 99),
        ("train", "best_metric", "bleu"), ("train", "ema_decay", 0.5),
        ("model", "dropout", 0.5), ("text", "vocab_size", 99), ("data", "max_length", 9),
    ],
)  # fmt: skip
def test_a_resumed_run_keeps_everything_else(
    section: str, name: str, value: object, tmp_path: Path
) -> None:
    directory = started(tmp_path)
    with pytest.raises(ConfigError, match=rf"{section}\.{name} cannot change in the run"):
        directory.resume_config(Config().replace(**{section: {name: value}}))


def test_explicit_settings_of_a_resumed_run_are_changes_even_if_first_asked_for(
    tmp_path: Path,
) -> None:
    directory = started(tmp_path)
    assert directory.resume_config(None).train.steps == 77
    assert directory.resume_config(Config()).train.steps == 77
    asked = directory.resume_config(Config(), ["train.steps"])
    assert asked.train.steps == Config().train.steps


@pytest.mark.parametrize(("run", "request_"), [("translate", "classify"), ("classify", "sets")])
def test_a_run_of_another_task_is_not_resumed(run: str, request_: str, tmp_path: Path) -> None:
    output_dir = OutputDirectory(tmp_path / "model")
    output_dir.training.mkdir(parents=True)
    output_dir.write(Config(task=run), Config(task=run), [TRAIN])
    assert output_dir.resume_config(Config(task=run)).task == run
    with pytest.raises(ConfigError, match=f"--task cannot change .*{request_} instead of {run};"):
        output_dir.resume_config(Config(task=request_))

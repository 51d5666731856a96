"""The output directory of a run: the files that a resumed run must find again."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from dragoman.config import Config, read_config, to_dict
from dragoman.errors import ConfigError, CorruptError
from dragoman.runs import output_directory_and_resume_checks
from dragoman.runs.output_directory_and_resume_checks import (
    DataFile,
    OutputDirectory,
    require_same_files,
)
from dragoman.storage.atomic_and_safe_file_io import replace_file

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


def test_a_file_of_the_same_size_with_other_contents_has_changed() -> None:
    changed = VALID._replace(sha256="def")
    with pytest.raises(CorruptError, match=r"data/valid\.txt must not change after the start"):
        require_same_files([TRAIN, VALID], [TRAIN, changed])


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
    monkeypatch.setattr(output_directory_and_resume_checks, "replace_file", write)
    if written < 3:
        with pytest.raises(Killed):
            output_dir.write(request, config, [TRAIN, VALID])
        assert not output_dir.has_run
    else:
        output_dir.write(request, config, [TRAIN, VALID])
        assert output_dir.has_run
        assert (output_dir.request(), output_dir.config()) == (request, config)
        assert output_dir.data_files() == [TRAIN, VALID]


# Settings of a run that do not change its steps, with a value other than the default.
CHANGEABLE = [
    ("train", "steps", 5), ("train", "checkpoint_every", 5), ("train", "validate_every", 5),
    ("train", "validate_sentences", 5), ("train", "keep_checkpoints", 5),
    ("train", "average_checkpoints", 5), ("train", "final_checkpoint", "last"),
    ("train", "patience", 5), ("train", "target_exact", 0.5), ("train", "time_budget", 5.0),
    ("train", "device", "cpu"), ("train", "threads", 5), ("train", "compile", "off"),
    ("train", "fsdp", "on"), ("train", "tensorboard", True), ("train", "deterministic", True),
    ("decode", "beam", 7), ("data", "cache_dir", "elsewhere"),
]  # fmt: skip


def started(folder: Path, **train: object) -> OutputDirectory:
    """Return a directory whose run requested the defaults, and resolved to other steps."""
    directory = OutputDirectory(folder)
    directory.training.mkdir()
    directory.write(Config(), Config().replace(train={"steps": 77, **train}), [])
    return directory


@pytest.mark.parametrize(("section", "name", "value"), CHANGEABLE)
def test_a_resumed_run_may_change_settings_that_do_not_affect_its_steps(
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


def test_a_resumed_run_compares_every_setting_but_those_that_may_change(tmp_path: Path) -> None:
    """All settings are changed at once; every other one is named as a problem."""
    directory = started(tmp_path)
    settings = {
        section: {name: f"not {value}" for name, value in values.items()}
        for section, values in to_dict(Config()).items()
        if isinstance(values, dict)
    }
    with pytest.raises(ConfigError) as caught:
        directory.resume_config(Config().replace(**settings))
    compared = {f"{section}.{name}" for section, values in settings.items() for name in values}
    compared -= {f"{section}.{name}" for section, name, _ in CHANGEABLE}
    compared -= {f"decode.{name}" for name in settings["decode"]}
    assert {problem.split(" cannot change")[0] for problem in caught.value.problems} == compared


def test_explicit_settings_of_a_resumed_run_are_changes_even_if_in_the_first_request(
    tmp_path: Path,
) -> None:
    directory = started(tmp_path)
    assert directory.resume_config(None).train.steps == 77
    assert directory.resume_config(Config()).train.steps == 77
    asked = directory.resume_config(Config(), ["train.steps"])
    assert asked.train.steps == Config().train.steps


@pytest.mark.parametrize(
    ("first", "second"),
    [("translate", "classify"), ("classify", "tag"), ("tag", "translate"), ("language", "sets")],
)
def test_a_run_of_another_task_cannot_be_resumed(first: str, second: str, tmp_path: Path) -> None:
    """It ended in a KeyError: the stored request has only the sections of its own task."""
    directory = OutputDirectory(tmp_path)
    directory.training.mkdir()
    config = read_config(task=first)
    directory.write(config, config, [])
    assert directory.resume_config(read_config(task=first)) == config
    with pytest.raises(ConfigError) as caught:
        directory.resume_config(read_config(task=second))
    (problem,) = caught.value.problems
    assert problem == (
        f"the task cannot change in the run in {tmp_path}; found {second} instead of {first}; "
        "choose another --out"
    )


def test_another_recipe_is_named_instead_of_all_its_settings(tmp_path: Path) -> None:
    directory = OutputDirectory(tmp_path)
    directory.training.mkdir()
    request = read_config(recipe="tiny")
    directory.write(request, request.replace(train={"steps": 77}), [])
    with pytest.raises(ConfigError) as caught:
        directory.resume_config(read_config(recipe="small"))
    (problem,) = caught.value.problems
    assert f"the recipe cannot change in the run in {tmp_path}; found small instead of" in problem
    with pytest.raises(ConfigError, match="found none instead of tiny; repeat the same command"):
        directory.resume_config(Config())
    same_settings = replace(request, recipe="")
    assert directory.resume_config(same_settings) == directory.config()

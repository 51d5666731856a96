"""Records of a task without a validation file: which ones are held out."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from language_kit import config_of, lines_of
from tagging_kit import make_config, make_records, make_task

from dragoman.bundle.non_translation_bundle_loader import task_text_files
from dragoman.config import Config, read_config
from dragoman.data.batch_plan import Cursor
from dragoman.data.labeled_records import Record, open_records
from dragoman.errors import ConfigError, DataError, StoppedError
from dragoman.runs import non_translation_training_builder
from dragoman.runs.base_training_builder import RunBuilder
from dragoman.runtime import signals
from dragoman.tasks.bert_and_xlnet_language_modeling import MaskedBatch
from dragoman.tasks.tagging import TaggingTask
from dragoman.training.progress_display import Phase, QuietProgress


def numbers(records: object) -> list[int]:
    return [] if records is None else [record.number for record in records()]  # type: ignore[operator]


def split(config: Config, path: Path, valid: Sequence[str] = ()) -> tuple[Any, Any]:
    """Return the readers of training and validation records."""
    reader = open_records(config, [path])
    names = {"train": [str(path)], "valid": valid}
    return non_translation_training_builder._split_records(config, names, reader)


@pytest.mark.parametrize("lines", [9, 10, 23])
def test_every_record_is_trained_on_or_held_out(
    lines: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One in five, at most three, and none where that would be one alone."""
    monkeypatch.setattr(non_translation_training_builder, "MAX_HELD_OUT", 3)
    path = tmp_path / "train.txt"
    path.write_text("".join(f"line {number}\n" for number in range(lines)))
    config = Config().replace(data={"hold_out": 5})
    train, valid = split(config, path)
    found = numbers(valid)
    assert [(number - 1) // 5 for number in found] == (
        [] if lines < 10 else [0, 1, 2][: lines // 5]
    )
    assert found == numbers(valid)
    assert sorted([*numbers(train), *numbers(valid)]) == list(range(1, lines + 1))
    given = split(config, path, valid=[str(path)])
    assert numbers(given[0]) == numbers(given[1]) == list(range(1, lines + 1))


def test_examples_held_out_of_alternating_classes_are_of_both(tmp_path: Path) -> None:
    path = tmp_path / "train.txt"
    path.write_text("".join(f"line {number}\n" for number in range(400)))
    found = []
    for seed in (1, 1, 2):
        config = Config().replace(data={"hold_out": 10}, train={"seed": seed})
        _, valid = split(config, path)
        found.append(numbers(valid))
    assert len(found[0]) == 40
    assert 10 < sum(number % 2 for number in found[0]) < 30
    assert found[0] == found[1] != found[2]


def test_steps_and_epochs_are_converted_into_each_other() -> None:
    """Twelve micro-batches in an epoch are four steps of three."""
    builder = MagicMock()
    builder.plan.batches.return_value = 12
    builder.config.train.gradient_accumulation = 3
    for epochs, steps in ((1.0, 4), (2.5, 10), (0.01, 1)):
        assert RunBuilder.steps_of(builder, epochs) == steps
    assert RunBuilder.epochs_of(builder, 10) == 2.5


def test_a_new_run_learns_its_vocabularies_and_a_resumed_one_keeps_them(tmp_path: Path) -> None:
    config, folder = make_config(), tmp_path / "text"
    first, second = make_records(20, seed=1), make_records(1, seed=2)

    def open_task(records: list[Record], *, resumed: bool) -> dict[str, bytes]:
        task = non_translation_training_builder._open_task(
            config, TaggingTask, folder, lambda: iter(records), resumed=resumed
        )
        files = {path.name: path.read_bytes() for path in folder.iterdir()}
        assert task_text_files(task) == files
        return files

    learned = open_task(first, resumed=True)  # the first attempt ended before they were written
    assert open_task(second, resumed=True) == learned
    assert open_task(second, resumed=False) != learned


def test_the_masked_tokens_of_a_batch_depend_on_its_seed(tmp_path: Path) -> None:
    train = tmp_path / "train.txt"
    train.write_text("".join(f"{line}\n" for line in lines_of(40)))
    config = config_of("transformer", language={"segment": 16, "objective": "masked"})
    config = config.replace(data={"train": str(train), "hold_out": 0})
    prepared = non_translation_training_builder.prepare_task(
        config, tmp_path / "text", QuietProgress()
    )
    builder = non_translation_training_builder.TaskBuilder(
        config, prepared, device=torch.device("cpu"), progress=QuietProgress()
    )
    collate, examples = builder.collate_function(), builder.plan.batch(Cursor(0, 0))
    first, again, other = (collate(examples, seed=seed) for seed in (1, 1, 2))
    assert isinstance(first, MaskedBatch)
    assert isinstance(again, MaskedBatch)
    assert isinstance(other, MaskedBatch)
    assert torch.equal(first.inputs, again.inputs)
    assert torch.equal(first.positions, again.positions)
    assert not torch.equal(first.positions, other.positions)


@pytest.mark.parametrize(
    ("phase", "entered"),
    [
        ("reading the vocabulary", []),
        ("encoding the training examples", ["encoding the training examples"]),
    ],
)
def test_preparation_ends_after_the_phase_of_a_stop_request(
    phase: str, entered: list[str], tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    class StoppedInPhase(QuietProgress):
        def phase(
            self, name: str, total: int | None = None, unit: str = ""
        ) -> AbstractContextManager[Phase]:
            seen.append(name)
            if name == phase:
                signals.request_stop("a test")
            return super().phase(name, total, unit)

    request.addfinalizer(signals.uninstall_handlers)
    seen = list[str]()
    train = tmp_path / "train.jsonl"
    train.write_text("".join(f"{json.dumps(each.fields)}\n" for each in make_records(20)))
    config = make_config().replace(data={"train": str(train), "valid": str(train)})
    with pytest.raises(StoppedError):
        non_translation_training_builder.prepare_task(config, tmp_path / "text", StoppedInPhase())
    assert seen == ["reading the vocabulary", *entered]


def test_a_validation_file_must_hold_examples(tmp_path: Path) -> None:
    train, valid = tmp_path / "train.jsonl", tmp_path / "valid.jsonl"
    train.write_text("".join(f"{json.dumps(each.fields)}\n" for each in make_records(20)))
    valid.write_text("")
    config = make_config().replace(data={"train": str(train), "valid": str(valid)})
    with pytest.raises(DataError, match=r"valid\.jsonl must hold examples; found none; check"):
        non_translation_training_builder.prepare_task(config, tmp_path / "text", QuietProgress())


def test_a_validation_file_of_generated_examples_is_an_error(tmp_path: Path) -> None:
    valid = tmp_path / "valid.jsonl"
    valid.write_text('{"set": [1, 2], "target": 2}\n')
    config = Config(task="sets").replace(
        data={"valid": str(valid)}, sets={"problem": "maximum", "epoch_sets": 10}
    )
    with pytest.raises(ConfigError, match=f"data.valid needs data.train, .*data.valid={valid}; le"):
        non_translation_training_builder.prepare_task(config, tmp_path / "text", QuietProgress())


def test_bad_lines_that_are_left_out_are_counted(tmp_path: Path) -> None:
    """In the notes of the run and in the model card; those of held-out examples only once."""
    rows = [{"tokens": ["a", "b"], "tags": ["X", "O"]}] * 30
    path = tmp_path / "train.jsonl"
    good = "".join(f"{json.dumps(row)}\n" for row in rows)
    path.write_text(f"{{\n{good}[1]\n")
    config = make_config().replace(
        data={"train": str(path), "on_bad_line": "skip", "hold_out": 5}, train={"steps": 1}
    )
    progress = MagicMock(wraps=QuietProgress())
    prepared = non_translation_training_builder.prepare_task(config, tmp_path / "text", progress)
    skipped = "2 bad lines (train.jsonl 1, train.jsonl 32)"
    assert [each.args[0] for each in progress.note.call_args_list] == [
        f"training sentences: skipped {skipped}"
    ]
    builder = non_translation_training_builder.TaskBuilder(
        config, prepared, device=torch.device("cpu"), progress=progress
    )
    assert builder.data_rows()["skipped sentences"] == skipped

    valid = tmp_path / "valid.jsonl"
    valid.write_text(f"{good}oops\n")
    config = config.replace(data={"valid": str(valid)})
    progress = MagicMock(wraps=QuietProgress())
    non_translation_training_builder.prepare_task(config, tmp_path / "again", progress)
    assert progress.note.call_args.args == (
        "validation sentences: skipped 1 bad line (valid.jsonl 31)",
    )


def prepare_classifier(
    tmp_path: Path, examples: int, *overrides: str
) -> tuple[Config, non_translation_training_builder.PreparedTask]:
    """Return the prepared run of a small recipe on texts of ten words."""
    path = tmp_path / "train.jsonl"
    letters = "abcdefghijklmnopqrstuvwxyz"
    rows = [
        {"text": " ".join(letters[(row + at) % 26] for at in range(10)), "label": row % 2}
        for row in range(examples)
    ]
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    config = read_config(
        recipe="kim2014",
        overrides=[f"data.train={path}", "model.width=16", "classify.filters=4", *overrides],
    )
    folder = tmp_path / "text"
    return config, non_translation_training_builder.prepare_task(config, folder, QuietProgress())


@pytest.mark.parametrize(
    ("examples", "steps", "rows"),
    [(20, (3, 5), 4), (300, (40, 79), 4), (4800, (36, 40), 120)],
)
def test_few_examples_are_trained_on_in_small_batches(
    examples: int, steps: tuple[int, int], rows: int, tmp_path: Path
) -> None:
    """At least 40 steps per epoch, or batches of a few examples; many examples change nothing."""
    config, prepared = prepare_classifier(tmp_path, examples, "data.hold_out=0")
    progress = MagicMock(wraps=QuietProgress())
    fit = non_translation_training_builder.fit_to_few_examples
    fitted = fit(config, prepared, keep=(), progress=progress)
    builder = non_translation_training_builder.TaskBuilder(
        fitted, prepared, device=torch.device("cpu"), progress=progress
    )
    assert steps[0] <= builder.steps_of(1.0) <= steps[1]
    assert all(len(batch) <= 2 * rows for batch in builder.plan.epoch(0))  # type: ignore[attr-defined]
    notes = [call.args[0] for call in progress.note.call_args_list]
    changed = fitted.train.batch_tokens != config.train.batch_tokens
    assert changed == (examples < 4800) == bool(notes)
    assert all(f"because {examples} examples are few" in note for note in notes)


@pytest.mark.parametrize(
    ("overrides", "keep"),
    [
        ([], ["train.batch_tokens"]),
        (["train.batch_tokens=1100"], []),
        (["train.epochs=0", "train.steps=9"], []),
    ],
)
def test_a_batch_size_that_was_set_is_kept(
    overrides: list[str], keep: list[str], tmp_path: Path
) -> None:
    """And that of a run of so many steps, whose number does not depend on it."""
    config, prepared = prepare_classifier(tmp_path, 60, *overrides)
    fit = non_translation_training_builder.fit_to_few_examples
    found = fit(config, prepared, keep=keep, progress=QuietProgress())
    assert found.train.batch_tokens == config.train.batch_tokens


def test_the_least_time_of_a_step_is_measured_on_a_part_of_its_batch(tmp_path: Path) -> None:
    """With gradients, whose sums and carried states are left as they were."""
    config, prepared = prepare_classifier(tmp_path, 400)
    builder = non_translation_training_builder.TaskBuilder(
        config, prepared, device=torch.device("cpu"), progress=QuietProgress()
    )
    model = builder.build_model()
    sizes = list[int]()
    loss = builder.task.loss

    def count(model: torch.nn.Module, batch: Any) -> Any:
        sizes.append(len(batch.examples))
        return loss(model, batch)

    builder.task.loss = count  # type: ignore[method-assign]
    assert builder.min_step_seconds(model) > 0
    assert sizes == [25, 25]  # of 120: 256 tokens
    assert all(parameter.grad is None for parameter in model.parameters())
    builder.device = torch.device("cuda")
    assert builder.min_step_seconds(model) == 0.0


@pytest.mark.parametrize(
    ("examples", "overrides", "keep", "chosen"),
    [
        (1000, [], [], "last"),
        (5200, [], [], "best"),
        (1000, [], ["train.best_metric"], "best"),
        (1000, ["train.best_metric=loss"], [], "best"),
        (1000, ["data.hold_out=0"], [], "best"),
    ],
)
def test_few_held_out_examples_choose_no_checkpoint(
    examples: int, overrides: list[str], keep: list[str], chosen: str, tmp_path: Path
) -> None:
    """Unless the metric was chosen; one example in ten is held out."""
    config, prepared = prepare_classifier(tmp_path, examples, *overrides)
    progress = MagicMock(wraps=QuietProgress())
    fitted = non_translation_training_builder.fit_to_few_examples(
        config, prepared, keep=keep, progress=progress
    )
    assert fitted.train.final_checkpoint == chosen
    notes = [call.args[0] for call in progress.note.call_args_list]
    assert any("100 validation examples are too few" in note for note in notes) == (
        chosen == "last"
    )


def test_the_labels_of_a_tagger_are_those_of_its_tokens() -> None:
    records = make_records(20)
    task = make_task(records)
    tokens = sum(len(record.fields["tokens"]) for record in records)
    assert task.num_scored(task.encode(records)) == tokens > 40


@pytest.mark.parametrize(
    ("lines", "given", "epochs"), [(40, 50_000, 200.0), (4, 50_000, 200.0), (40, 9, 0.0)]
)
def test_a_small_text_is_read_two_hundred_times_at_most(
    lines: int, given: int, epochs: float, tmp_path: Path
) -> None:
    train = tmp_path / "train.txt"
    train.write_text("".join(f"{line}\n" for line in lines_of(lines)))
    config = config_of("transformer", language={"segment": 16}).replace(
        data={"train": str(train), "hold_out": 0}, train={"steps": given, "batch_tokens": 64}
    )
    prepared = non_translation_training_builder.prepare_task(
        config, tmp_path / "text", QuietProgress()
    )
    builder = non_translation_training_builder.TaskBuilder(
        config, prepared, device=torch.device("cpu"), progress=QuietProgress()
    )
    assert builder.max_useful_steps() == (builder.steps_of(epochs) if epochs else given)

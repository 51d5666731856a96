"""The output directory of a run: the files that a resumed run must find again."""

from __future__ import annotations

from pathlib import Path

import pytest

from dragoman.config import Config
from dragoman.errors import CorruptError
from dragoman.runs import output_directory
from dragoman.runs.output_directory import DataFile, OutputDirectory, require_same_files
from dragoman.storage.atomic import replace_file

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

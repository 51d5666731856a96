"""The output directory of a run: the files that a resumed run must find again."""

from __future__ import annotations

import pytest

from dragoman.errors import CorruptError
from dragoman.runs.model_directory import DataFile, require_same_files

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

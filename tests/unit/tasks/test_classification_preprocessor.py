"""What classification learns from its training records: attributes that are not known."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from dragoman.config import Config
from dragoman.config.root_config import file_names
from dragoman.data.labeled_records import open_records
from dragoman.errors import DataError
from dragoman.tasks.classification import UNLABELED, ClassificationTask

RECORDS = [
    {"text": "a theft", "label": "a", "attributes": ["profit", "violence"]},
    {"text": "a lie", "label": "b", "attributes": None},
    {"text": "a fraud", "label": "b"},
    {"text": "a joke", "label": "a", "attributes": []},
]


def write_config(path: Path, *, hold_out: int, attribute_field: str = "attributes") -> Config:
    """Write the records as a training file; return settings that name it."""
    path.write_text("".join(f"{json.dumps(each)}\n" for each in RECORDS))
    return Config(task="classify").replace(
        text={"tokenizer": "words"},
        data={"train": str(path), "hold_out": hold_out},
        classify={"attribute_field": attribute_field, "pooling": "max"},
    )


@pytest.mark.parametrize("hold_out", [0, 2])
def test_attributes_that_are_null_or_missing_are_unknown(tmp_path: Path, hold_out: int) -> None:
    """Names of records that are held out are collected too, and may be null as well."""
    config = write_config(tmp_path / "train.jsonl", hold_out=hold_out)
    records = open_records(config, file_names(config.data.train))
    task = ClassificationTask(config, ClassificationTask.fit_text(config, records))
    assert task.text.attributes is not None
    assert task.text.attributes.names == ("profit", "violence")
    found = task.encode(records()).values["attributes"]
    unknown = [UNLABELED, UNLABELED]
    np.testing.assert_array_equal(found, [[1, 1], unknown, unknown, [0, 0]])


def test_some_record_must_have_attributes(tmp_path: Path) -> None:
    config = write_config(tmp_path / "train.jsonl", hold_out=0, attribute_field="atributes")
    records = open_records(config, file_names(config.data.train))
    with pytest.raises(DataError, match="must have attributes; found none in the field 'atribut"):
        ClassificationTask.fit_text(config, records)

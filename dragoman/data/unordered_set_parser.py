"""Sets and targets in records: lists of numbers or vectors, and a number or a label."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dragoman.config.unordered_set_input_task import SetsConfig
from dragoman.data.labeled_records import Record
from dragoman.errors import DataError

MAX_NUMBER = float(np.finfo(np.float32).max)


def _set_error(record: Record | None, must: str, found: object, fix: str) -> DataError:
    """Return the error of a set, with its line if it has one."""
    if record is not None:
        return record.error(must, found, fix)
    return DataError(f"a set {must}", found=f"{found!s:.120}", fix=fix)


def parse_set(
    value: Any,
    sets: SetsConfig,
    record: Record | None,
    *,
    images: bool = False,
    width: int | None = None,
) -> NDArray[np.float32]:
    """Return a set (n, F) of a list of numbers, of vectors, or of images by rows."""
    where = f" in {sets.set_field!r}" if record is not None else ""
    must = f"must have a list of numbers, or of equally long lists of numbers{where}"
    if not isinstance(value, (list, tuple)) or not value:
        found = "an empty list" if isinstance(value, (list, tuple)) else repr(value)
        fix = "write [1.5, 2, 7] or [[0, 1], [2, 3]]"
        if isinstance(value, str):
            fix = f"{fix} in a JSONL file, without quotes"
        raise _set_error(record, must, found, fix)
    try:
        array = np.array(value)
        if array.dtype.kind in "bU":  # which float64 would convert
            raise _set_error(record, must, repr(value), "write numbers without quotes")
        array = array.astype(np.float64)
    except OverflowError:
        array = np.array(np.inf)  # an integer above float64, reported below
    except (TypeError, ValueError):
        raise _set_error(record, must, repr(value), "use vectors of one length") from None
    if not (np.abs(array) <= MAX_NUMBER).all():
        raise _set_error(
            record,
            f"must have finite numbers (float32){where}",
            repr(value),
            "replace null and NaN by numbers"
            if np.isnan(array).any()
            else f"write numbers up to {MAX_NUMBER:.2g}, for example in another unit",
        )
    if array.ndim == 1:
        array = array[:, None]
    if images and array.ndim == 3:
        array = array.reshape(len(array), -1)
    if array.ndim != 2 or not array.shape[1]:
        raise _set_error(record, must, repr(value), "write [1.5, 2, 7] or [[0, 1], [2, 3]]")
    if width is not None and array.shape[1] != width:
        raise _set_error(
            record,
            f"must have elements of {width} numbers{where}, as the first set of training",
            f"{array.shape[1]} numbers",
            f"use {width} numbers in every element",
        )
    if len(array) > sets.max_size:
        raise _set_error(
            record,
            f"must have at most {sets.max_size} elements{where}",
            len(array),
            "raise sets.max_size, or split the set",
        )
    return array.astype(np.float32)


def is_label(target: object) -> bool:
    """Whether the target of the first set is a label, so that the problem is classification."""
    return isinstance(target, (str, bool))


def parse_number(record: Record, field: str) -> float:
    """Return a target that is a finite number in float32."""
    value = record.value(field)
    try:
        number = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError):
        number = math.nan
    except OverflowError:  # a whole number above float64
        number = math.inf
    if abs(number) <= MAX_NUMBER:
        return number
    if not math.isnan(number):
        raise record.error(
            f"must have a finite number (float32) in {field!r}",
            repr(value),
            f"write a number up to {MAX_NUMBER:.2g}, for example in another unit",
        )
    raise record.error(
        f"must have a number in {field!r}",
        repr(value),
        "write a number, or set sets.problem=classification for labels",
    )

"""Load a model directory as the predictor of its task."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from dragoman.bundle.format import read_task, require_bundle
from dragoman.inference.catalogue import PREDICTORS


def load(path: str | Path, *, device: str = "auto", **options: Any) -> Any:
    """Load a model: a `Translator`, `Classifier`, `Tagger`, `LanguageModel`, and so on by its task.

    The device `auto` is a GPU if there is one. Further options are those of the class's `load`.
    """
    require_bundle(Path(path))
    return PREDICTORS.load(read_task(Path(path))).load(path, device=device, **options)

"""Registry of the predictors: the classes that `dragoman.load` returns, by task.

The family of an entry is the command that runs such models. Importing it needs no torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dragoman.bundle.format import model_paths, read_task, require_bundle
from dragoman.registry import Entry, Registry

PREDICTORS = Registry(
    "predictor",
    translate=Entry(
        "dragoman.inference.translator:Translator",
        "Translator: text in another language",
        family="translate",
    ),
    classify=Entry(
        "dragoman.inference.predictors.classifier:Classifier",
        "Classifier: the label of a text, or several labels",
        family="predict",
    ),
    tag=Entry(
        "dragoman.inference.predictors.tagger:Tagger",
        "Tagger: a tag for every word or character",
        family="predict",
    ),
    pairs=Entry(
        "dragoman.inference.predictors.sentence_pair_classifier:PairClassifier",
        "PairClassifier: how two sentences are related",
        family="predict",
    ),
    sets=Entry(
        "dragoman.inference.predictors.unordered_set_predictor:SetModel",
        "SetModel: a value of a set of items",
        family="predict",
    ),
    language=Entry(
        "dragoman.inference.predictors.language_model:LanguageModel",
        "LanguageModel: the continuation of a text",
        family="generate",
    ),
)


def load(
    path: str | Path | Sequence[str | Path] | None = None, *, device: str = "auto", **options: Any
) -> Any:
    """Load a model: a `Translator`, `Classifier`, `Tagger`, `LanguageModel`, and so on by its task.

    Without a path it is the built-in translator; several paths are an ensemble of translators. The
    device `auto` is a GPU if there is one. Further options are those of the class's `load`.
    """
    paths = model_paths(path)
    for each in paths:
        require_bundle(each)
    if len(paths) != 1:
        return PREDICTORS.load("translate").load(paths, device=device, **options)
    return PREDICTORS.load(read_task(paths[0])).load(paths[0], device=device, **options)

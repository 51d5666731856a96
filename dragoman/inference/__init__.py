"""Inference: the translator, the engines behind it, and the predictors of other tasks."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dragoman.decoding.search_interface import SearchRequest
    from dragoman.inference.dragoman_model_engine import NativeEngine
    from dragoman.inference.engine_protocol import Engine
    from dragoman.inference.predictors.base import Predictor
    from dragoman.inference.predictors.catalogue import load
    from dragoman.inference.predictors.classifier import Classification, Classifier
    from dragoman.inference.predictors.language_model import Continuation, LanguageModel, TextScore
    from dragoman.inference.predictors.masked_language_model import MaskedLanguageModel, MaskFilling
    from dragoman.inference.predictors.sentence_pair_classifier import (
        PairClassifier,
        PairPrediction,
    )
    from dragoman.inference.predictors.tagger import Tagger, Tagging
    from dragoman.inference.predictors.unordered_set_predictor import SetModel, SetPrediction
    from dragoman.inference.translation_log_probabilities import PairScore
    from dragoman.inference.translation_options import TranslationOptions
    from dragoman.inference.translation_result import Translation
    from dragoman.inference.translator import Translator

__all__ = [
    "Classification",
    "Classifier",
    "Continuation",
    "Engine",
    "LanguageModel",
    "MaskFilling",
    "MaskedLanguageModel",
    "NativeEngine",
    "PairClassifier",
    "PairPrediction",
    "PairScore",
    "Predictor",
    "SearchRequest",
    "SetModel",
    "SetPrediction",
    "Tagger",
    "Tagging",
    "TextScore",
    "Translation",
    "TranslationOptions",
    "Translator",
    "load",
]

_MODULES = {
    "Classification": "dragoman.inference.predictors.classifier",
    "Classifier": "dragoman.inference.predictors.classifier",
    "Continuation": "dragoman.inference.predictors.language_model",
    "Engine": "dragoman.inference.engine_protocol",
    "LanguageModel": "dragoman.inference.predictors.language_model",
    "MaskFilling": "dragoman.inference.predictors.masked_language_model",
    "MaskedLanguageModel": "dragoman.inference.predictors.masked_language_model",
    "NativeEngine": "dragoman.inference.dragoman_model_engine",
    "PairClassifier": "dragoman.inference.predictors.sentence_pair_classifier",
    "PairPrediction": "dragoman.inference.predictors.sentence_pair_classifier",
    "PairScore": "dragoman.inference.translation_log_probabilities",
    "Predictor": "dragoman.inference.predictors.base",
    "SearchRequest": "dragoman.decoding.search_interface",
    "SetModel": "dragoman.inference.predictors.unordered_set_predictor",
    "SetPrediction": "dragoman.inference.predictors.unordered_set_predictor",
    "Tagger": "dragoman.inference.predictors.tagger",
    "Tagging": "dragoman.inference.predictors.tagger",
    "TextScore": "dragoman.inference.predictors.language_model",
    "Translation": "dragoman.inference.translation_result",
    "TranslationOptions": "dragoman.inference.translation_options",
    "Translator": "dragoman.inference.translator",
    "load": "dragoman.inference.predictors.catalogue",
}


def __getattr__(name: str) -> Any:
    """Import a public name on first use: importing one engine must not import the translator."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULES[name]), name)

"""Running a model: the translator, the engine interface, and the engines behind it."""

from __future__ import annotations

from dragoman.inference.engine import Engine, SearchRequest
from dragoman.inference.native_engine import NativeEngine
from dragoman.inference.pair_scores import PairScore
from dragoman.inference.translation import Translation
from dragoman.inference.translation_options import TranslationOptions
from dragoman.inference.translator import Translator

__all__ = [
    "Engine",
    "NativeEngine",
    "PairScore",
    "SearchRequest",
    "Translation",
    "TranslationOptions",
    "Translator",
]

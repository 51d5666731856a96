"""Translating with a trained model: raw text in, raw text out."""

from dragoman.translator.options import Options
from dragoman.translator.pair_scores import PairScore
from dragoman.translator.translation import Translation
from dragoman.translator.translator import Translator

__all__ = ["Options", "PairScore", "Translation", "Translator"]

"""Seeing how a model came to its output: the explanation as data, as a picture, and in the terminal."""

from dragoman.explain.explanation import Explanation

__all__ = ["Explanation"]

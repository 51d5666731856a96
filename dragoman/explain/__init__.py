"""Attention weights of a translation as data, as a PNG and in the terminal."""

from dragoman.explain.explanation import Explanation

__all__ = ["Explanation"]

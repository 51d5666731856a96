"""Explanations of model outputs: attention, attribution, beam traces, plots and reports."""

from dragoman.explain.explanation import Explanation

__all__ = ["Explanation"]

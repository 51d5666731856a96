"""The explorer: one page that shows how a model came to its output, served or as one file.

The package is also a function: `dragoman.explore(model, text)` shows the page in a notebook.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path

    from dragoman.explain.explanation import Explanation


class _CallablePackage(ModuleType):
    """A package that can be called, because its name is that of its main function."""

    def __call__(
        self, model: Explanation | str | Path | Any, text: str | None = None, **options: Any
    ) -> Explanation:
        """Explain a text; a notebook shows the result as the explorer page.

        `model` is a predictor, a model directory or an explanation, which is returned as it is.
        Options are those of `explain`, such as beam=4.
        """
        from dragoman.explore.notebook_display import explore

        return explore(model, text, **options)


sys.modules[__name__].__class__ = _CallablePackage

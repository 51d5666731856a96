"""Griffe extension of the API reference: turn `.. math::` of the docstrings into TeX blocks."""

from __future__ import annotations

import re
from typing import Any

import griffe

_DIRECTIVE = re.compile(r"^\.\. math::[ \t]*(.*(?:\n[ \t]+\S.*)*)", flags=re.MULTILINE)


class MathDirectives(griffe.Extension):
    """Rewrite `.. math::` directives as display mathematics that MathJax renders."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        """Rewrite the docstring of an object that was loaded."""
        if obj.docstring is not None:
            obj.docstring.value = _DIRECTIVE.sub(
                lambda found: f"$$\n{found[1].strip()}\n$$", obj.docstring.value
            )

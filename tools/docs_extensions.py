"""Griffe extension of the API reference: convert docstrings from reST to Markdown."""

from __future__ import annotations

import re
from typing import Any

import griffe

_DIRECTIVE = re.compile(r"^\.\. math::[ \t]*(.*(?:\n[ \t]+\S.*)*)", flags=re.MULTILINE)


class DocstringMarkdown(griffe.Extension):
    """Turn `.. math::` into blocks that MathJax renders, and keep `#12` from becoming a heading."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        """Rewrite the docstring of an object that was loaded."""
        if obj.docstring is not None:
            text = _DIRECTIVE.sub(lambda found: f"$$\n{found[1].strip()}\n$$", obj.docstring.value)
            obj.docstring.value = re.sub(r"^#(?=\d)", r"\\#", text, flags=re.MULTILINE)

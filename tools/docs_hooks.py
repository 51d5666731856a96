"""MkDocs hooks of the documentation site.

Links from docs/ to other files of the repository become links to the repository, and code is
colored by a style sheet that Pygments writes.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
_OUTSIDE = re.compile(r"\]\(((?:\.\./)+[^)#\s]+)(#[^)\s]*)?\)")


def on_page_markdown(markdown: str, *, page: Any, config: Any, **kwargs: Any) -> str:
    """Return the page with each relative link that leaves docs/ as a link to the repository."""
    folder = Path(page.file.abs_src_path).parent
    docs = Path(config.docs_dir)

    def absolute(found: re.Match[str]) -> str:
        target = (folder / found[1]).resolve()
        if target.is_relative_to(docs) or not target.exists():
            return found[0]  # MkDocs checks it
        return (
            f"]({config.repo_url}/blob/main/{target.relative_to(ROOT).as_posix()}{found[2] or ''})"
        )

    return _OUTSIDE.sub(absolute, markdown)


def on_post_build(*, config: Any, **kwargs: Any) -> None:
    """Write the style sheet for highlighted code."""
    from pygments.formatters import HtmlFormatter

    sheet = Path(config.site_dir) / "css" / "pygments.css"
    sheet.write_text(HtmlFormatter(style="default").get_style_defs(".highlight"), encoding="utf-8")

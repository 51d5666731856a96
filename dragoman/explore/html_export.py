"""One self-contained HTML file of the explorer page with one explanation.

The built page (`static/`, see `tools/build_explorer_page.py`) has no imports, which browsers block
from `file://`: its scripts and styles are written into the file and allowed by their hashes only.
The explanation is deflated: attention weights are mostly small, so a file shrinks to about half.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
import math
import re
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dragoman.storage.user_output_files import write_output

if TYPE_CHECKING:
    from dragoman.explain.explanation import Explanation

STATIC_DIR = Path(__file__).parent / "static"

_BYTES = {"u8": 1, "i8": 1, "u16": 2, "u32": 4, "i32": 4, "f32": 4}  # by dtype of a tensor
_LESS = "."  # for the "<" of base 85, which must not stand in a script element
_ISLAND = '<script type="application/json" id="explanation" data-encoding="deflate">'
_STYLESHEET = re.compile(r'<link rel="stylesheet" href="([^"]+)">')
_SCRIPT = re.compile(r'<script([^>]*) src="([^"]+)"([^>]*)></script>')
_TITLE = re.compile(r"<title>[^<]*</title>")
_CHARSET = re.compile(r'<meta charset="utf-8">', re.IGNORECASE)


def encode_island(explanation: Explanation | Mapping[str, Any]) -> str:
    """Return the script element with an explanation, deflated and in base 85.

    Inside are its JSON without the data of tensors, a line end, and that data one after the other.
    """
    values = explanation if isinstance(explanation, Mapping) else explanation.to_dict()
    tensors = values.get("tensors", {})
    data = b"".join(base64.b64decode(entry["data"]) for entry in tensors.values())
    bare = {name: {**entry, "data": ""} for name, entry in tensors.items()}
    text = json.dumps(
        {**values, "tensors": bare}, ensure_ascii=False, separators=(",", ":"), allow_nan=False
    )
    packed = zlib.compress(text.encode("utf-8") + b"\n" + data, level=9)
    coded = base64.b85encode(packed).decode("ascii").replace("<", _LESS)
    return f"{_ISLAND}{coded}</script>"


def read_island(page: str) -> dict[str, Any]:
    """Return the explanation of a page of `export_html`; raise ValueError if it has none."""
    start = page.find(_ISLAND)
    if start < 0:
        raise ValueError("the page must be one that dragoman explore --html wrote")
    end = page.index("</script>", start)
    packed = base64.b85decode(page[start + len(_ISLAND) : end].replace(_LESS, "<"))
    text, data = zlib.decompress(packed).split(b"\n", 1)
    values: dict[str, Any] = json.loads(text)
    at = 0
    for entry in values["tensors"].values():
        size = math.prod(entry["shape"]) * _BYTES[entry["dtype"]]
        entry["data"] = base64.b64encode(data[at : at + size]).decode("ascii")
        at += size
    return values


def export_html(
    explanation: Explanation | Mapping[str, Any],
    path: Path | str | None = None,
    *,
    title: str | None = None,
) -> str:
    """Return the explorer page with one explanation as one HTML text; write it if `path` is given.

    The text needs no network and no server: it opens from disk, and its content security policy
    allows nothing but the scripts and styles in it.
    """
    page = (STATIC_DIR / "index.html").read_text(encoding="utf-8")
    scripts: list[str] = []
    styles: list[str] = []

    def inline_style(found: re.Match[str]) -> str:
        styles.append(_read_static(found[1]))
        return f"<style>{styles[-1]}</style>"

    def inline_script(found: re.Match[str]) -> str:
        scripts.append(_read_static(found[2]))
        kind = ' type="module"' if 'type="module"' in found[1] + found[3] else ""
        return f"<script{kind}>{scripts[-1]}</script>"

    page = _STYLESHEET.sub(inline_style, page)
    page = _SCRIPT.sub(inline_script, page)
    policy = content_policy(scripts, styles)
    island = encode_island(explanation)
    page = _CHARSET.sub(
        lambda found: f'{found[0]}\n<meta http-equiv="Content-Security-Policy" content="{policy}">',
        page,
        count=1,
    )
    if title is not None:
        page = _TITLE.sub(lambda _: f"<title>{html.escape(title)}</title>", page, count=1)
    head, body = page.rsplit("</body>", 1)
    page = f"{head}{island}\n</body>{body}"
    if path is not None:
        write_output(Path(path), page.encode("utf-8"))
    return page


def content_policy(scripts: list[str], styles: list[str]) -> str:
    """Return the content security policy that allows these inline scripts and styles alone."""

    def sources(texts: list[str]) -> str:
        return " ".join(f"'sha256-{_hash_base64(text)}'" for text in texts)

    return (
        f"default-src 'none'; script-src {sources(scripts)}; style-src {sources(styles)}; "
        "img-src data:; base-uri 'none'; form-action 'none'; require-trusted-types-for 'script'"
    )


def _hash_base64(text: str) -> str:
    return base64.b64encode(hashlib.sha256(text.encode("utf-8")).digest()).decode("ascii")


def _read_static(address: str) -> str:
    return (STATIC_DIR / address.removeprefix("static/")).read_text(encoding="utf-8")

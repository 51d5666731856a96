"""The file `text.json` beside a model's tokenizers: what they are and how their text is normalised."""

from __future__ import annotations

import json
from pathlib import Path

from dragoman.errors import BundleError
from dragoman.files.atomic import read_regular
from dragoman.text.normalise import FORMS

FORMAT = 1
_MAX_BYTES = 1 << 20
KINDS = ("bpe", "unigram", "characters")


def write_settings(directory: Path, *, kind: str, normalisation: str) -> None:
    """Write `text.json` into a directory."""
    settings = {"format": FORMAT, "kind": kind, "normalisation": normalisation}
    (directory / "text.json").write_text(json.dumps(settings, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def read_settings(directory: Path) -> dict[str, str]:
    """Read and check `text.json`, which says what the models beside it are."""
    path = directory / "text.json"
    try:
        settings = json.loads(read_regular(path, _MAX_BYTES))
    except OSError as error:
        raise BundleError(
            "a model directory must hold text/text.json", found=f"{path}: {error.strerror}", fix="copy the whole model directory"
        ) from error
    except (ValueError, RecursionError) as error:
        raise BundleError("text.json must be JSON", found=f"{path}: {error}", fix="copy the model directory anew") from error
    if not isinstance(settings, dict) or settings.get("kind") not in KINDS or settings.get("normalisation") not in [*FORMS]:
        raise BundleError(
            "text.json must name a known kind and normalisation", found=f"{path}: {settings!r:.200}", fix="copy the model directory anew"
        )
    if settings.get("format") != FORMAT:
        raise BundleError(
            f"text.json must have format {FORMAT}", found=f"format {settings.get('format')!r}", fix="use the dragoman that wrote it"
        )
    return settings

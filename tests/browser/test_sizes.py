"""Sizes: the page's own files, and exported files of short, long and pooled explanations."""

from __future__ import annotations

import zlib

import numpy as np
import pytest
from synthetic import make_explanation

from dragoman.explain.explanation import Explanation
from dragoman.explore.html_export import STATIC_DIR, export_html, read_island

FILES = [path for path in sorted(STATIC_DIR.rglob("*")) if path.is_file()]


def test_the_page_is_small():
    """All files that a wheel has, d3-hierarchy with its licence included."""
    assert sum(path.stat().st_size for path in FILES) <= 147_000


def test_the_compressed_page_is_small():
    """What a wheel grows by."""
    assert sum(len(zlib.compress(path.read_bytes(), 9)) for path in FILES) <= 60_000


@pytest.mark.parametrize(("tokens", "limit"), [(30, 450_000), (60, 1_100_000)])
def test_exported_file_of_144_heads_with_contributions(tokens, limit):
    explanation = make_explanation(
        source_length=tokens, target_length=tokens, layers=6, heads=8, nodes=tokens * 8
    )
    page = export_html(explanation).encode()
    assert len(page) <= limit
    assert read_island(page.decode())["tensors"] == explanation["tensors"]


def test_exported_file_of_512_tokens_is_pooled():
    small = make_explanation(source_length=512, target_length=512, layers=2, heads=8, nodes=2000)
    explanation = Explanation.from_dict(small)
    values = explanation.to_dict()
    page = export_html(explanation).encode()
    assert len(page) <= 2_400_000
    island = read_island(page.decode())
    assert island["limits"]["pooled"]
    pooled = island["tensors"]["x0.w"]
    assert pooled["pool"]["k"][-1] == len(values["source"]["tokens"])
    assert np.prod(pooled["shape"]) < 8 * 512 * 512

"""Sizes: the page's own files, and exported files of short, long and pooled explanations."""

from __future__ import annotations

import shutil
import zlib

import numpy as np
import pytest
from synthetic import make_explanation

from dragoman.explain.explanation import Explanation
from dragoman.explore.html_export import (
    STATIC_DIR,
    export_html,
    minify_static_files,
    read_island,
)

# Bytes of the sources: with comments, in two languages, not minified.
LIMITS = {".js": 205_000, ".css": 28_000, ".html": 12_000}


def own_files() -> dict[str, bytes]:
    """Return the page's files that we wrote, by path."""
    return {
        str(path.relative_to(STATIC_DIR)): path.read_bytes()
        for path in sorted(STATIC_DIR.rglob("*"))
        if path.is_file() and "vendor" not in path.parts
    }


@pytest.mark.parametrize("kind", LIMITS)
def test_own_files_are_small(kind):
    size = sum(len(data) for name, data in own_files().items() if name.endswith(kind))
    assert 0 < size <= LIMITS[kind]


@pytest.fixture(scope="module")
def wheel_files(tmp_path_factory) -> dict[str, bytes]:
    """The page's files as they are in a wheel, by path."""
    minify = pytest.importorskip("minify", reason="needs tdewolff-minify")
    folder = tmp_path_factory.mktemp("wheel") / "static"
    shutil.copytree(STATIC_DIR, folder)
    minify_static_files(folder, minify.string)
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


def test_files_of_a_wheel_are_small(wheel_files):
    own = [len(data) for name, data in wheel_files.items() if not name.startswith("vendor")]
    assert sum(own) <= 140_000


def test_compressed_files_of_a_wheel_are_small(wheel_files):
    """What a wheel grows by, d3-hierarchy included."""
    assert sum(len(zlib.compress(data, 9)) for data in wheel_files.values()) <= 61_000


def test_nothing_else_is_shipped():
    assert {name.rsplit(".", 1)[-1] for name in own_files()} == {"js", "css", "html"}
    vendor = {path.name for path in (STATIC_DIR / "vendor").iterdir()}
    assert vendor == {"README.md", "d3-hierarchy.min.js", "d3-hierarchy.LICENSE"}


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

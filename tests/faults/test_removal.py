"""Exports and bundles remove only what they wrote; links are not followed."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from exchange_kit import LINES, build_exportable_model

from dragoman.bundle import Bundle, write_bundle
from dragoman.errors import BundleError
from dragoman.exchange import export
from dragoman.exchange.export import export_ctranslate2, export_onnx
from dragoman.inference import exported_engine_files as engine_folder
from dragoman.runs.translation_data_preparation import _remove_tokenizers
from dragoman.storage.manifest import read_manifest

pytest.importorskip("ctranslate2")

ENGINE = "ctranslate2-float32"
CANARY = "mine, and not to be touched"


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a model with an engine."""
    model, tokenizers, config = build_exportable_model()
    path = tmp_path_factory.mktemp("removal") / "model"
    write_bundle(
        path, config=config, tokenizers=tokenizers, weights=model.state_dict(), golden=LINES
    )
    export_ctranslate2(path)
    return path


@pytest.fixture
def model(original: Path, tmp_path: Path) -> Path:
    """Copy the model, to be damaged."""
    return Path(shutil.copytree(original, tmp_path / "model"))


@pytest.fixture
def outside(tmp_path: Path) -> Path:
    """Write a user's folder, with files named as ours are."""
    folder = tmp_path / "outside"
    (folder / ENGINE).mkdir(parents=True)
    for name in (
        "canary",
        f"{ENGINE}/canary",
        f"{ENGINE}/model.bin",
        f"{ENGINE}/manifest.json",
        "source.model",
        "text.json",
    ):
        (folder / name).write_text(CANARY)
    return folder


@pytest.fixture
def no_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail where the work of an export begins."""
    for name in ("save_ctranslate2", "save_onnx"):
        monkeypatch.setattr(
            export, name, lambda *_, **__: pytest.fail("worked before the place was checked")
        )


def contents(folder: Path) -> dict[str, str | bytes]:
    """Read everything below a folder; a link is where it leads."""
    return {
        path.relative_to(folder).as_posix(): os.readlink(path)
        if path.is_symlink()
        else path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_symlink() or path.is_file()
    }


def link_engines(model: Path, outside: Path) -> None:
    shutil.rmtree(model / "engines")
    (model / "engines").symlink_to(outside)


def link_engine(model: Path, outside: Path) -> None:
    shutil.rmtree(model / "engines" / ENGINE)
    (model / "engines" / ENGINE).symlink_to(outside / ENGINE)


def dangling_engines(model: Path, outside: Path) -> None:
    shutil.rmtree(model / "engines")
    (model / "engines").symlink_to(outside / "nothing")


def notes(model: Path, outside: Path) -> None:
    (model / "engines" / ENGINE / "notes.txt").write_text(CANARY)


def folder_inside(model: Path, outside: Path) -> None:
    (model / "engines" / ENGINE / "mine").mkdir()
    (model / "engines" / ENGINE / "mine" / "notes.txt").write_text(CANARY)


def folder_instead(model: Path, outside: Path) -> None:
    (model / "engines" / ENGINE / "model.bin").unlink()
    (model / "engines" / ENGINE / "model.bin").mkdir()


def no_manifest(model: Path, outside: Path) -> None:
    (model / "engines" / ENGINE / "manifest.json").unlink()
    (model / "engines" / ENGINE / "model.bin").write_text(CANARY)


def a_file(model: Path, outside: Path) -> None:
    shutil.rmtree(model / "engines" / ENGINE)
    (model / "engines" / ENGINE).write_text(CANARY)


@pytest.mark.parametrize(
    ("damage", "found"),
    [
        (link_engines, "a symbolic link to"),
        (link_engine, "a symbolic link to"),
        (dangling_engines, "a symbolic link to"),
        (notes, "'notes.txt', which its manifest does not list"),
        (folder_inside, "'mine', which its manifest does not list"),
        (folder_instead, "a folder 'model.bin' in it"),
        (no_manifest, "no manifest that can be read"),
        (a_file, "found a file"),
    ],
)
def test_an_export_replaces_nothing_but_an_engine(
    damage: Callable[[Path, Path], None], found: str, model: Path, outside: Path, no_work: None
) -> None:
    damage(model, outside)
    before = contents(model), contents(outside)
    with pytest.raises(BundleError, match=found):
        export_ctranslate2(model)
    assert (contents(model), contents(outside)) == before


def test_files_added_during_an_export_are_kept(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save = export.save_ctranslate2
    before = contents(model)

    def saving(*arguments: object, **options: object) -> None:
        save(*arguments, **options)  # type: ignore[arg-type]
        notes(model, model)

    monkeypatch.setattr(export, "save_ctranslate2", saving)
    with pytest.raises(BundleError, match=r"notes\.txt"):
        export_ctranslate2(model)
    assert contents(model) == before | {f"engines/{ENGINE}/notes.txt": CANARY.encode()}


def test_a_link_among_the_listed_files_is_removed_and_not_followed(
    model: Path, outside: Path
) -> None:
    (model / "engines" / ENGINE / "model.bin").unlink()
    (model / "engines" / ENGINE / "model.bin").symlink_to(outside / "canary")
    before = contents(outside)
    export_ctranslate2(model)
    assert contents(outside) == before
    assert not (model / "engines" / ENGINE / "model.bin").is_symlink()
    assert not list(model.rglob(".tmp-*"))


def test_an_engine_is_replaced_where_only_listed_files_are_there(model: Path) -> None:
    (model / "engines" / ENGINE / "model.bin").write_bytes(b"damaged")
    (model / "engines" / ENGINE / "config.json").unlink()
    assert set(contents(export_ctranslate2(model).path)) == {
        *read_manifest(model / "engines" / ENGINE)["files"],
        "manifest.json",
    }


def test_leftovers_are_removed_by_full_name_without_following_links(
    model: Path, outside: Path
) -> None:
    gone = subprocess.run(
        [sys.executable, "-c", "import os; print(os.getpid())"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.strip()
    ours, engines = f".tmp-engine-{gone}-00ff00ff", model / "engines"
    (engines / ours / "deep").mkdir(parents=True)
    (engines / ours / "deep" / "link").symlink_to(outside)
    kept = [f".tmp-engine-{gone}-notes", ".tmp-engine-mine", f".tmp-engine-{gone}-00ff00ff-mine"]
    for name in kept:
        (engines / name).mkdir()
        (engines / name / "canary").write_text(CANARY)
    (engines / f".tmp-engine-{gone}-11ff11ff").symlink_to(outside)
    before = contents(outside)
    export_ctranslate2(model)
    assert contents(outside) == before
    assert not (engines / ours).exists()
    assert all((engines / name / "canary").read_text() == CANARY for name in kept)
    assert (engines / f".tmp-engine-{gone}-11ff11ff").is_symlink()


def test_a_bundle_is_not_written_through_a_link(model: Path, outside: Path) -> None:
    loaded = Bundle.load(model)
    weights = loaded.model.state_dict()
    shutil.rmtree(model / "text")
    (model / "text").symlink_to(outside)
    kept = model / ".tmp-bundle-mine"
    kept.mkdir()
    (kept / "canary").write_text(CANARY)
    before = contents(model), contents(outside)
    with pytest.raises(
        BundleError, match="text must be a folder of the model itself; found a symbolic link to"
    ):
        write_bundle(model, config=loaded.config, tokenizers=loaded.tokenizers, weights=weights)
    assert (contents(model), contents(outside)) == before
    (model / "text").unlink()
    write_bundle(model, config=loaded.config, tokenizers=loaded.tokenizers, weights=weights)
    assert (kept / "canary").read_text() == CANARY


@pytest.mark.parametrize("export", [export_ctranslate2, export_onnx])
@pytest.mark.parametrize(
    ("out", "found"),
    [
        ("outside/canary", "a file at"),
        ("outside", "a directory with files at"),
        ("empty", "an empty directory at"),
        ("link", "a symbolic link at"),
        ("outside/canary/below/it", "a file at"),
        ("link/below", "a broken link at"),
    ],
)
def test_taken_output_directory_is_detected_before_the_work(
    export: Callable[..., object], out: str, found: str, model: Path, outside: Path, no_work: None
) -> None:
    parent_dir = model.parent
    (parent_dir / "empty").mkdir()
    (parent_dir / "link").symlink_to(parent_dir / "nowhere")
    before = contents(parent_dir)
    with pytest.raises(BundleError, match=found):
        export(model, parent_dir / out)
    assert contents(parent_dir) == before


def test_a_failed_export_leaves_no_parents_behind(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(export, "save_ctranslate2", fail)
    with pytest.raises(KeyboardInterrupt):
        export_ctranslate2(model, model.parent / "new" / "deep" / "out")
    assert not (model.parent / "new").exists()


def test_published_directory_is_checked_again(model: Path) -> None:
    with (
        pytest.raises(BundleError, match="a directory with files at"),
        engine_folder.publish_engine(model, {}),
    ):
        pytest.fail("there is something")


def test_tokenizers_of_an_earlier_attempt_are_replaced_and_nothing_else(
    model: Path, outside: Path
) -> None:
    folder = model / "text"
    (folder / "notes.txt").write_text(CANARY)
    before = contents(folder)
    with pytest.raises(BundleError, match=r"found 'notes\.txt' in it"):
        _remove_tokenizers(folder)
    assert contents(folder) == before
    (model / "linked").symlink_to(folder)
    (folder / "notes.txt").unlink()
    with pytest.raises(BundleError, match="found a symbolic link"):
        _remove_tokenizers(model / "linked")
    _remove_tokenizers(folder)
    assert not folder.exists()

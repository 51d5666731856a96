"""An engine inside a bundle: exported atomically, found, verified, with a fallback if damaged."""

from __future__ import annotations

import json
import logging
import math
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from confidence_kit import add_calibration
from exchange_kit import LINES, begins_alike, build_exportable_model, run_readme
from sync_kit import SyncRecorder

from dragoman.bundle import Bundle, write_bundle
from dragoman.decoding.greedy import GreedySearch
from dragoman.doctor import load_model_under_test, run_checks
from dragoman.errors import BundleError, ConfigError, CorruptError
from dragoman.exchange import export
from dragoman.exchange.export import export_ctranslate2
from dragoman.inference import Engine, Translator, engine_selection, untrusted_engine_trial
from dragoman.inference.ctranslate2_engine import CTranslate2Engine
from dragoman.inference.engine_selection import choose_engine, open_engine
from dragoman.inference.engine_throughput import list_engines
from dragoman.inference.exported_engine_files import (
    engine_digest,
    list_engine_names,
    model_digest,
    publish_engine,
)
from dragoman.storage.atomic_and_safe_file_io import FileRecord, hash_file
from dragoman.storage.checksum_verification import verify_directory
from dragoman.storage.manifest import read_manifest, write_manifest

pytest.importorskip("ctranslate2")


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    """Write a model's directory."""
    model, tokenizers, config = build_exportable_model(output_bias=True)
    config = config.replace(decode={"beam": 1, "max_length_extra": 6, "max_length_ratio": 1.0})
    path = tmp_path / "my-model"
    write_bundle(
        path, config=config, tokenizers=tokenizers, weights=model.state_dict(), golden=LINES
    )
    return path


def test_an_engine_in_the_bundle_is_found_and_computes_the_same(bundle: Path) -> None:
    before = Translator.load(bundle).translate(LINES)
    exported = export_ctranslate2(bundle, quantization="float32")
    assert exported.path == bundle / "engines" / "ctranslate2-float32"
    assert (exported.parity.equal, exported.parity.sentences) == (5, 5)
    assert exported.parity.difference < 1e-4
    assert "equal on 5 of 5 sentences (100.0 %)" in str(exported.parity)
    translator = Translator.load(bundle)
    assert translator.engine.name == "ctranslate2-float32"
    assert translator.translate(LINES) == before
    assert Translator.load(bundle, engine="native").engine.name == "native"
    assert all(check.ok for check in verify_directory(bundle))
    assert any(
        check.name == "engines/ctranslate2-float32/model.bin" for check in verify_directory(bundle)
    )


def test_a_trial_searches_for_the_first_golden_sentence_alone() -> None:
    requests: list[Any] = []
    engine: Any = SimpleNamespace(generate=requests.append)
    for cases in ([{"src": [5, 6]}, {"src": [7]}], []):
        bundle: Any = SimpleNamespace(golden={"cases": cases})
        engine_selection.decode_golden(engine, bundle)
    assert [
        (each.sources, each.limits, each.prefixes, len(each.sample_ids)) for each in requests
    ] == [([[5, 6]], [12], [[]], 1)]


def test_an_engine_is_durable_before_it_is_visible(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder, final = SyncRecorder(monkeypatch), tmp_path / "engines" / "some"
    with publish_engine(final, {"kind": "engine"}) as folder:
        (folder / "inside").mkdir()
        for name in ("model.bin", "inside/words.json"):
            (folder / name).write_bytes(b"0123")
            (folder / name).chmod(0o600)
    recorder.check_published(final)
    assert sorted(read_manifest(final)["files"]) == ["inside/words.json", "model.bin"]
    assert (final / "model.bin").stat().st_mode & 0o777 == (
        final / "manifest.json"
    ).stat().st_mode & 0o777


@pytest.mark.parametrize("quantization", ["float32", "int8", "int8_float32"])
@pytest.mark.parametrize("beam", [1, 3])
def test_an_export_changes_no_output_of_the_default_options(
    bundle: Path, quantization: str, beam: int, tmp_path: Path
) -> None:
    """An int8 engine that was exported once changed 11 % of all later translations."""
    loaded = Bundle.load(bundle)
    config = loaded.config.replace(decode={"beam": beam})
    path = tmp_path / "another"
    write_bundle(
        path,
        config=config,
        tokenizers=loaded.tokenizers,
        weights=loaded.model.state_dict(),
        golden=LINES,
    )
    before = list(Translator.load(path).stream(LINES))
    export_ctranslate2(path, quantization=quantization)
    for measure in (False, True):
        after = Translator.load(path, measure=measure)
        assert [each.text for each in after.stream(LINES)] == [each.text for each in before]
        if quantization != "float32" or beam > 1:
            assert after.engine.name == "native"
            assert [each.log_probs for each in after.stream(LINES)] == [
                each.log_probs for each in before
            ]


def test_the_default_export_is_exact(bundle: Path) -> None:
    assert export_ctranslate2(bundle).path.name == "ctranslate2-float32"


def test_int8_is_used_only_on_request(bundle: Path, caplog: pytest.LogCaptureFixture) -> None:
    def named(**options: str) -> str:
        caplog.clear()
        with caplog.at_level(logging.INFO, logger="dragoman"):
            return Translator.load(bundle, **options).engine.name  # type: ignore[arg-type]

    export_ctranslate2(bundle, quantization="int8")
    assert (named(), caplog.records) == ("native", [])
    assert named(precision="int8") == "ctranslate2-int8"
    assert named(engine="ctranslate2-int8") == "ctranslate2-int8"
    assert named(engine="ctranslate2") == "ctranslate2-int8"
    assert "the engine ctranslate2-int8 computes in int8: some outputs differ" in caplog.text
    for engine, fix in (
        ("ctranslate2", "--quantization float32"),
        ("ctranslate2-int8", "leave out --precision"),
    ):
        with pytest.raises(
            ConfigError, match=f"must compute in float32; found one in int8; .*{fix}"
        ):
            named(engine=engine, precision="float32")
    export_ctranslate2(bundle, quantization="float32")
    assert list_engine_names(bundle) == ["ctranslate2-float32", "ctranslate2-int8"]
    assert (named(engine="ctranslate2"), caplog.records) == ("ctranslate2-float32", [])
    assert named() == "ctranslate2-float32"
    assert named(precision="int8") == "ctranslate2-int8"
    assert named(engine="ctranslate2", precision="int8") == "ctranslate2-int8"
    with pytest.raises(ConfigError, match="found 'ctranslate'"):
        Translator.load(bundle, engine="ctranslate")
    with pytest.raises(ConfigError, match="found the device cuda"):
        choose_engine(Bundle.load(bundle), "ctranslate2", torch.device("cuda"))
    assert choose_engine(Bundle.load(bundle), "auto", torch.device("cuda")) is None


def test_automatic_engine_leaves_beam_search_to_the_native_one(
    bundle: Path, caplog: pytest.LogCaptureFixture
) -> None:
    before = Translator.load(bundle).translate(LINES, beam=3)
    export_ctranslate2(bundle)
    translator = Translator.load(bundle)
    assert translator.engine.name == "ctranslate2-float32"
    with caplog.at_level(logging.INFO, logger="dragoman"):
        assert translator.translate(LINES, beam=3) == before
    assert (
        "ctranslate2-float32 stops a beam search by another rule, and was not requested by name: "
        "the native engine is used" in caplog.text
    )


@pytest.fixture
def foreign_engine(bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Export an engine and forget that it was made here, as on a machine that the model was copied
    to.
    """
    folder = export_ctranslate2(bundle, quantization="float32").path
    monkeypatch.setattr(untrusted_engine_trial, "trust_directory", lambda: tmp_path / "trusted")
    return folder


def resign(folder: Path) -> None:
    """Write a manifest that fits the files of an engine, as an attacker would."""
    content = read_manifest(folder)
    (folder / "manifest.json").unlink()
    rest = {
        name: value
        for name, value in content.items()
        if name not in ("files", "format", "manifest_sha256")
    }
    write_manifest(folder, {name: hash_file(folder / name) for name in content["files"]}, rest)


def without_heads(folder: Path) -> None:
    """Set the encoder's heads to 0, by which CTranslate2 divides: the process that reads it dies of
    SIGFPE.
    """
    data = bytearray((folder / "model.bin").read_bytes())
    at = data.index(b"encoder/num_heads\0") + len(b"encoder/num_heads\0")
    assert data[at : at + 8] == bytes([0, 2, 2, 0, 0, 0, 4, 0]), (
        "rank, type, bytes and value as CTranslate2 writes them"
    )
    data[at + 6] = 0
    (folder / "model.bin").write_bytes(data)
    resign(folder)


def test_engine_from_another_machine_is_not_loaded_unless_named(
    bundle: Path,
    foreign_engine: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    without_heads(foreign_engine)
    with caplog.at_level(logging.INFO, logger="dragoman"):
        translator = Translator.load(bundle)
    assert translator.engine.name == "native"
    assert translator.translate(LINES)
    assert (
        "the engine ctranslate2-float32 must be exported on this machine to be opened; found "
        "one that came with the model" in caplog.text
    )
    assert (
        list_engines(Bundle.load(bundle), GreedySearch())[1].trouble
        == "not made here: opened only if --engine names it"
    )
    rows = {finding.name: finding for finding in run_checks(load_model_under_test(bundle))}
    assert rows["ctranslate2-float32"].passed is None
    assert "must be exported on this machine" in rows["ctranslate2-float32"].note
    assert all(check.ok for check in verify_directory(bundle))
    with pytest.raises(
        BundleError,
        match=(
            "must pass a trial in a child process; found a crash with SIGFPE; use --engine native"
        ),
    ):
        Translator.load(bundle, engine="ctranslate2")
    assert not untrusted_engine_trial.is_trusted(engine_digest(foreign_engine))


def test_engine_from_another_machine_is_tried_once_in_a_child_process(
    bundle: Path,
    foreign_engine: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.INFO, logger="dragoman"):
        assert Translator.load(bundle, engine="ctranslate2").engine.name == "ctranslate2-float32"
    assert "was not exported on this machine: trying it in a child process, once" in caplog.text
    monkeypatch.setattr(
        untrusted_engine_trial, "run_in_child", lambda *_, **__: pytest.fail("tried twice")
    )
    for engine in ("ctranslate2", "auto"):
        assert Translator.load(bundle, engine=engine).engine.name == "ctranslate2-float32"
    record = untrusted_engine_trial.trust_directory() / engine_digest(foreign_engine)
    assert (record.stat().st_mode & 0o777, record.parent.stat().st_mode & 0o777) == (0o600, 0o700)


def test_a_trial_that_hangs_is_ended(
    bundle: Path, foreign_engine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(untrusted_engine_trial, "TRIAL_TIMEOUT", 0.2)
    with pytest.raises(BundleError, match=r"found no answer within 0\.2 seconds"):
        Translator.load(bundle, engine="ctranslate2")


def test_trust_record_is_a_regular_file_named_by_its_digest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(untrusted_engine_trial, "trust_directory", lambda: tmp_path)
    digest = "a" * 64
    assert not untrusted_engine_trial.is_trusted(digest)
    untrusted_engine_trial.record_trust(digest)
    assert untrusted_engine_trial.is_trusted(digest)
    (tmp_path / ("b" * 64)).symlink_to(tmp_path / digest)
    assert not untrusted_engine_trial.is_trusted("b" * 64)
    assert not untrusted_engine_trial.is_trusted("../" + digest)


def test_an_engine_is_used_by_name_where_no_record_can_be_written(
    bundle: Path,
    foreign_engine: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    (tmp_path / "trusted").write_text("in the way")
    assert Translator.load(bundle, engine="ctranslate2").engine.name == "ctranslate2-float32"
    assert "could not be recorded as trusted" in caplog.text


def test_an_engine_that_is_not_there_is_reported_with_the_command_that_makes_it(
    bundle: Path,
) -> None:
    with pytest.raises(
        ConfigError, match=r"found none; make it: dragoman export .*my-model --to ctranslate2"
    ):
        Translator.load(bundle, engine="ctranslate2")


def damage_model(folder: Path) -> None:
    data = bytearray((folder / "model.bin").read_bytes())
    data[len(data) // 2] ^= 1
    (folder / "model.bin").write_bytes(data)


def lose_model(folder: Path) -> None:
    (folder / "model.bin").unlink()


def lose_manifest(folder: Path) -> None:
    (folder / "manifest.json").unlink()


def link_model(folder: Path) -> None:
    (folder / "model.bin").rename(folder.parent / "elsewhere.bin")
    (folder / "model.bin").symlink_to(folder.parent / "elsewhere.bin")


def make_another(folder: Path) -> None:
    """Leave an engine behind, as training resumed in the same directory does."""
    model, tokenizers, _ = build_exportable_model(output_bias=True)
    with torch.no_grad():
        model.output.bias[:] += 1.0  # type: ignore[index]
    path = folder.parents[1]
    write_bundle(
        path,
        config=Bundle.load(path).config,
        tokenizers=tokenizers,
        weights=model.state_dict(),
        golden=LINES,
    )


@pytest.mark.parametrize(
    ("name", "is_source"),
    [
        ("config.json", True),
        ("weights.safetensors", True),
        ("text/shared.model", True),
        ("card.md", False),
        ("golden.json", False),
        ("calibration.json", False),
    ],
)
def test_an_engine_belongs_to_settings_weights_and_tokenizers(name: str, is_source: bool) -> None:
    """By their contents: a file of the same size may be another."""
    names = ("config.json", "weights.safetensors", "text/shared.model", "card.md", "golden.json")
    files = {each: {"bytes": 5, "sha256": "abc"} for each in (*names, "calibration.json")}
    changed = files | {name: {"bytes": 5, "sha256": "def"}}
    before, after = (
        model_digest(SimpleNamespace(manifest={"files": each}))  # type: ignore[arg-type]
        for each in (files, changed)
    )
    assert (before != after) == is_source


@pytest.mark.parametrize(
    ("damage", "warning"),
    [
        (damage_model, "model.bin"),
        (lose_model, "model.bin"),
        (lose_manifest, "manifest.json"),
        (link_model, "model.bin"),
        (make_another, "one exported from other weights"),
    ],
)
def test_damaged_engine_warns_once_and_falls_back_to_the_native_one(
    damage: Callable[[Path], None], warning: str, bundle: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = export_ctranslate2(bundle, quantization="float32").path
    damage(folder)
    with caplog.at_level(logging.INFO, logger="dragoman"):
        translator = Translator.load(bundle)
    assert translator.engine.name == "native"
    [record] = caplog.records
    assert warning in record.getMessage()
    assert translator.translate(LINES) == Translator.load(bundle, engine="native").translate(LINES)
    assert record.getMessage().endswith(": the native engine is used, and the result is the same")
    named = Translator.load(bundle, engine="ctranslate2")
    assert [named.engine.name, caplog.records[-1].getMessage()] == ["native", record.getMessage()]
    if damage is not make_another:
        assert any(not check.ok and warning in check.name for check in verify_directory(bundle))


def test_an_engine_that_computes_something_else_is_not_used(bundle: Path) -> None:
    """Golden vectors catch what hashes cannot: here, an engine whose manifest claims to be this
    model's and is not.
    """
    export_ctranslate2(bundle, quantization="float32")
    loaded = Bundle.load(bundle)
    for case in loaded.golden["cases"]:
        case["log_probs"] = [number - 1.0 for number in case["log_probs"]]
    with pytest.raises(CorruptError, match=r"found 1\.00"):
        open_engine(loaded, "ctranslate2-float32")


def test_an_engine_may_drift_by_twice_its_error_at_export(
    bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At least by 0.002, which is another release or machine and not another model."""
    export_ctranslate2(bundle, quantization="float32")
    loaded = Bundle.load(bundle)
    verify, facts, shifted = engine_selection.verify_engine, dict[str, float](), 0.0
    monkeypatch.setattr(engine_selection, "verify_engine", lambda *found: verify(*found) | facts)
    for error, shift, is_used in (
        (0.0, 0.0018, True),
        (0.0, 0.0022, False),
        (0.1, 0.19, True),
        (0.1, 0.21, False),
    ):
        for case in loaded.golden["cases"]:
            case["log_probs"] = [number + shifted - shift for number in case["log_probs"]]
        shifted, facts["golden_error"] = shift, error
        if is_used:
            assert open_engine(loaded, "ctranslate2-float32").name == "ctranslate2-float32"
            continue
        with pytest.raises(CorruptError, match="of the golden vectors"):
            open_engine(loaded, "ctranslate2-float32")


def test_a_model_that_searches_by_beams_stays_on_the_native_engine(bundle: Path) -> None:
    export_ctranslate2(bundle, quantization="float32")
    config = Bundle.load(bundle).config.replace(decode={"beam": 2})
    searching: Any = SimpleNamespace(path=bundle, config=config)
    assert choose_engine(searching, "auto", torch.device("cpu")) is None


def test_a_calibration_makes_no_engine_stale(bundle: Path, tmp_path: Path) -> None:
    calibrated = add_calibration(bundle, tmp_path / "calibrated")
    assert model_digest(Bundle.load(calibrated)) == model_digest(Bundle.load(bundle))


def test_an_engine_that_computes_nan_is_not_used(
    bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    export_ctranslate2(bundle, quantization="float32")
    monkeypatch.setattr(
        CTranslate2Engine,
        "log_probs",
        lambda self, sources, targets: [[math.nan] * (len(each) + 1) for each in targets],
    )
    with pytest.raises(CorruptError, match=r"must compute what it did .* found nan"):
        open_engine(Bundle.load(bundle), "ctranslate2-float32")
    assert Translator.load(bundle).engine.name == "native"


def test_an_engine_may_list_no_other_files(bundle: Path) -> None:
    folder = export_ctranslate2(bundle, quantization="float32").path
    content = read_manifest(folder)
    (folder / "manifest.json").unlink()
    files = {name: FileRecord(**record) for name, record in content["files"].items()}
    rest = {
        name: value
        for name, value in content.items()
        if name not in ("files", "format", "manifest_sha256")
    }
    write_manifest(folder, {**files, "hook.py": FileRecord(0, "0" * 64)}, rest)
    untrusted_engine_trial.record_trust(engine_digest(folder))
    with pytest.raises(BundleError, match=r"found 'hook\.py'"):
        open_engine(Bundle.load(bundle), "ctranslate2-float32")


@pytest.mark.slow  # tests/faults/test_fallbacks.py has it in this process
def test_missing_engine_package_is_one_warning(bundle: Path, tmp_path: Path) -> None:
    export_ctranslate2(bundle, quantization="float32")
    code = "import sys, importlib.util as u; real = u.find_spec\n"
    code += (
        "u.find_spec = lambda name, *rest: None if name == 'ctranslate2' else real(name, *rest)\n"
    )
    code += "from dragoman.cli.app import main; sys.exit(main(sys.argv[1:]))"
    run = [sys.executable, "-c", code]
    root = Path(__file__).resolve().parents[3]
    auto = subprocess.run(
        [*run, "translate", "-m", str(bundle), *LINES],
        cwd=root,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert auto.returncode == 0
    assert auto.stdout.splitlines() == Translator.load(bundle, engine="native").translate(LINES)
    [line] = [line for line in auto.stderr.splitlines() if "engine" in line]
    assert (
        "is not used (found no ctranslate2; to have it: pip install 'dragoman[fast]'): the "
        "native engine is used" in line
    )
    named = subprocess.run(
        [*run, "export", str(bundle), "--to", "ctranslate2"],
        cwd=root,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert named.returncode == 2
    assert "found no ctranslate2" in named.stderr


def test_a_standalone_export_has_vocabularies_and_tokenizers(bundle: Path, tmp_path: Path) -> None:
    import ctranslate2
    import sentencepiece

    out = tmp_path / "standalone"
    assert export_ctranslate2(bundle, out, quantization="float32").path == out
    assert not (bundle / "engines").exists()
    assert json.loads((out / "shared_vocabulary.json").read_text("utf-8"))[:4] == [
        "<pad>",
        "<s>",
        "</s>",
        "<unk>",
    ]
    src, tgt = (
        sentencepiece.SentencePieceProcessor(model_file=str(out / name))
        for name in ("source.spm", "target.spm")
    )
    theirs = ctranslate2.Translator(str(out)).translate_batch(
        [src.encode(LINES[0], out_type=str)], beam_size=1, max_decoding_length=9
    )
    assert begins_alike(run_readme(out), Translator.load(bundle).translate(LINES[:1])[0])
    assert tgt.decode(theirs[0].hypotheses[0]).startswith(
        Translator.load(bundle).translate(LINES[:1])[0][:3]
    )
    with pytest.raises(BundleError, match="a directory with files at"):
        export_ctranslate2(bundle, out)


def test_an_interrupted_export_leaves_nothing(
    bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: object) -> Engine:
        raise KeyboardInterrupt

    before = sorted(path.name for path in bundle.rglob("*"))
    monkeypatch.setattr(export, "compare_engine", interrupt)
    with pytest.raises(KeyboardInterrupt):
        export_ctranslate2(bundle)
    assert sorted(path.name for path in bundle.rglob("*") if path.name != "engines") == before
    assert not list(bundle.rglob(".tmp-*"))
    assert Translator.load(bundle).engine.name == "native"


def test_a_killed_export_is_swept_away_by_the_next(bundle: Path) -> None:
    process = subprocess.run(
        [sys.executable, "-c", "import os; print(os.getpid())"],
        capture_output=True,
        text=True,
        check=True,
    )
    left = bundle / "engines" / f".tmp-engine-{process.stdout.strip()}-00ff00ff"
    left.mkdir(parents=True)
    (left / "model.bin").write_bytes(b"half")
    ours = bundle / "engines" / f".tmp-engine-{os.getpid()}-00ff00ff"
    ours.mkdir()
    assert all(check.ok for check in verify_directory(bundle))
    export_ctranslate2(bundle, quantization="float32")
    assert not left.exists()
    assert ours.exists(), "another export may be writing there"


def test_an_export_that_computes_something_else_is_not_kept(
    bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Bundle, "golden_error", lambda *_: 0.25)
    with pytest.raises(CorruptError, match=r"found 0\.2500 off"):
        export_ctranslate2(bundle, quantization="float32")
    assert list_engine_names(bundle) == []


def test_bleu_is_compared_where_there_are_references(bundle: Path) -> None:
    parity = export_ctranslate2(
        bundle, quantization="float32", texts=LINES, references=[line.upper() for line in LINES]
    ).parity
    assert parity.bleu is not None
    assert f"BLEU {parity.bleu[0]:.2f} native" in str(parity)
    assert parity.to_dict()["bleu"] == parity.bleu[1]


@pytest.mark.parametrize(
    ("asked", "used", "exact"),
    [
        ("ctranslate2-float32", None, True),
        ("ctranslate2-int8", None, False),
        ("ctranslate2-float32", "ctranslate2-int8", False),
        ("ctranslate2-float32", "onnx-float32", True),
    ],
)
def test_a_fallback_reports_whether_results_differ(
    asked: str, used: str | None, exact: bool
) -> None:
    engine = None if used is None else SimpleNamespace(name=used)
    message = engine_selection._fallback_message(asked, engine)
    assert message.startswith(used or "the native engine")
    assert message.endswith("the same" if exact else "but for rounding")

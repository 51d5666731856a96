"""Bundles: atomic writing, verification, golden vectors and errors for other directories."""

from __future__ import annotations

import copy
import json
import math
import os
import re
from pathlib import Path

import pytest
import torch
import yaml
from confidence_kit import CALIBRATION
from safetensors.torch import load_file
from sync_kit import SyncRecorder

from dragoman.bundle import Bundle, Card, CardScore, write_bundle
from dragoman.bundle import format as layout
from dragoman.bundle.card import format_command, write_card
from dragoman.bundle.golden_vectors import (
    GoldenInput,
    _case_problem,
    check_golden,
    encode_golden,
    make_golden,
    read_golden_cases,
)
from dragoman.bundle.reader import manifest_parameters
from dragoman.config import Config
from dragoman.errors import (
    BundleError,
    ConfigError,
    CorruptError,
    DivergedError,
    PermissionDeniedError,
)
from dragoman.models.factory import build_model
from dragoman.storage.atomic_and_safe_file_io import FileRecord
from dragoman.storage.checksum_verification import verify_directory
from dragoman.storage.int8_quantization import quantize_rows
from dragoman.storage.manifest import read_manifest, write_manifest
from dragoman.storage.tensor_files import write_tensors
from dragoman.text.sentencepiece_tokenizer import Tokenizers, train_tokenizers

LINES = ["ein mann geht", "eine frau steht", "zwei kinder spielen"] * 10


def make(
    *, joint: bool = True, seed: int = 0, encoder: str = "transformer"
) -> tuple[Config, Tokenizers, dict[str, torch.Tensor]]:
    sizes = {
        "width": 16,
        "heads": 2,
        "ffn_width": 16,
        "encoder": (encoder,),
        "decoder": ("transformer",),
    }
    config = Config().replace(
        text={"vocab_size": 300, "shared_vocab": joint},
        model={**sizes, "tie_embeddings": "all" if joint else "target"},
    )
    tokenizers = train_tokenizers(LINES, [line.upper() for line in LINES], config.text)
    torch.manual_seed(seed)
    model = build_model(
        config.model, src_vocab_size=len(tokenizers.src), tgt_vocab_size=len(tokenizers.tgt)
    )
    return config, tokenizers, model.state_dict()


def write(path: Path, **options) -> None:
    config, tokenizers, weights = make(
        **{key: options.pop(key) for key in ("joint", "seed", "encoder") if key in options}
    )
    write_bundle(path, config=config, tokenizers=tokenizers, weights=weights, **options)


@pytest.mark.parametrize("joint", [True, False])
def test_a_written_bundle_is_read_back(tmp_path: Path, joint: bool) -> None:
    config, tokenizers, weights = make(joint=joint)
    write_bundle(
        tmp_path / "m",
        config=config,
        tokenizers=tokenizers,
        weights=weights,
        golden=["ein mann"],
        manifest_fields={"steps": 7},
    )
    bundle = Bundle.load(tmp_path / "m")
    assert bundle.config == config
    assert bundle.tokenizers.shared_vocab is joint
    assert bundle.tokenizers.src.digest == tokenizers.src.digest
    assert bundle.manifest_fields()["steps"] == 7
    assert bundle.parameters == sum(each.numel() for each in bundle.model.parameters())
    for name, tensor in bundle.model.state_dict().items():
        assert torch.equal(tensor, weights[name]), name
    assert not bundle.model.training


def test_a_bundle_may_have_a_calibration(tmp_path: Path) -> None:
    """It is listed and read; a bundle without one, such as an older one, has None."""
    write(tmp_path / "m", calibration=CALIBRATION)
    bundle = Bundle.load(tmp_path / "m")
    assert bundle.calibration == CALIBRATION
    assert layout.CALIBRATION in bundle.manifest["files"]
    before = (tmp_path / "m" / layout.CALIBRATION).read_bytes()
    write(tmp_path / "m", calibration=CALIBRATION)
    assert (tmp_path / "m" / layout.CALIBRATION).read_bytes() == before
    write(tmp_path / "m")
    assert Bundle.load(tmp_path / "m").calibration is None
    assert not (tmp_path / "m" / layout.CALIBRATION).exists()


def test_the_card_explains_the_confidence(tmp_path: Path) -> None:
    text = write_card(Card(), Config(), parameters=1, calibration=CALIBRATION)
    assert "## Confidence" in text
    assert "a sentence chrF of at least 61.5, the median of the validation set" in text
    assert "| expected calibration error | 5.2 % in 10 bins of equal mass;" in text
    assert "about 4.0 % on as many sentences |" in text
    assert "fitted on 400 validation sentences and measured on 410 others" in text
    assert "Confidence" not in write_card(Card(), Config(), parameters=1)


def test_a_bundle_keeps_base_names_of_its_makers_files(tmp_path: Path) -> None:
    """Corpus paths are reduced to base names, for privacy."""
    config, tokenizers, weights = make()
    files = {
        name: f"/home/somebody/secret/{name}.txt"
        for name in ("src", "tgt", "valid_src", "valid_tgt")
    }
    config = config.replace(data={**files, "cache_dir": "/home/somebody/cache"})
    named = [
        "--src",
        files["src"],
        f"--tgt={files['tgt']}",
        "--set",
        f"data.cache_dir={config.data.cache_dir}",
    ]
    card = Card(command=format_command(["train", *named, "--budget", "1h"]))
    write_bundle(tmp_path / "m", config=config, tokenizers=tokenizers, weights=weights, card=card)
    for each in (tmp_path / "m").rglob("*"):
        assert not each.is_file() or b"somebody" not in each.read_bytes(), each
    bundle = Bundle.load(tmp_path / "m")
    assert (bundle.config.data.src, bundle.config.data.valid_tgt, bundle.config.data.cache_dir) == (
        "src.txt",
        "valid_tgt.txt",
        "",
    )
    assert (
        "dragoman train --src src.txt --tgt=tgt.txt --set data.cache_dir=cache --budget 1h"
        in bundle.card
    )


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", ["shared.pieces.json", "source.pieces.json", "source.model"])
@pytest.mark.parametrize("what", ["a pipe", "a device", "another list"])
def test_files_that_the_manifest_does_not_list_are_not_opened(
    tmp_path: Path, name: str, what: str
) -> None:
    write(tmp_path / "m")
    path = tmp_path / "m" / "text" / name
    if what == "a pipe":
        os.mkfifo(path)
    elif what == "a device":
        path.symlink_to("/dev/zero")
    else:
        path.write_text('{"pieces": []}')
    if name in layout.TEXT_FILES:
        with pytest.raises(
            CorruptError, match=f"{name} must be as it was written; found not listed"
        ):
            Bundle.load(tmp_path / "m")
    else:
        assert len(Bundle.load(tmp_path / "m").tokenizers.src) == 300


def test_the_files_are_those_of_the_design(tmp_path: Path) -> None:
    write(tmp_path / "m")
    found = sorted(
        str(each.relative_to(tmp_path / "m"))
        for each in (tmp_path / "m").rglob("*")
        if each.is_file()
    )
    assert found == [
        "card.md",
        "config.json",
        "golden.json",
        "manifest.json",
        "text/shared.model",
        "text/text.json",
        "weights.safetensors",
    ]


def test_a_bundle_is_written_beside_a_training_run_that_stays_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "training").mkdir()
    (tmp_path / "training" / "log.jsonl").write_text("{}\n")
    write(tmp_path)
    assert Bundle.load(tmp_path).model
    assert (tmp_path / "training" / "log.jsonl").read_text() == "{}\n"


def test_a_bundle_replaces_another_with_other_files(tmp_path: Path) -> None:
    write(tmp_path, joint=False)
    write(tmp_path, joint=True, seed=1)
    assert Bundle.load(tmp_path).tokenizers.shared_vocab
    assert not (tmp_path / "text" / "source.model").exists()
    assert not list(tmp_path.glob(".tmp*"))


@pytest.mark.parametrize("moves", range(6))
def test_a_write_that_is_interrupted_leaves_no_bundle_and_reports_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moves: int
) -> None:
    """A crash between any two moves leaves the old bundle, none, or the new one."""
    write(tmp_path)
    done = 0
    replace = os.replace

    def failing(src, dst) -> None:
        nonlocal done
        if done == moves:
            raise KeyboardInterrupt
        done += 1
        replace(src, dst)

    monkeypatch.setattr(os, "replace", failing)
    with pytest.raises(KeyboardInterrupt):
        write(tmp_path, seed=1)
    monkeypatch.undo()
    with pytest.raises(BundleError, match=r"half-written: it has no manifest\.json"):
        Bundle.load(tmp_path)
    write(tmp_path, seed=1)
    assert Bundle.load(tmp_path).model


def test_every_file_is_durable_before_the_manifest_is_in_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A power loss must not leave a manifest that does not match its files."""
    write(tmp_path)
    old = (tmp_path / "manifest.json").stat().st_ino
    recorder = SyncRecorder(monkeypatch)
    write(tmp_path, seed=1)
    names = [
        each for each in tmp_path.rglob("*") if each.is_file() and each.name != "manifest.json"
    ]
    moves, last = (
        [recorder.moved(path) for path in names],
        recorder.moved(tmp_path / "manifest.json"),
    )
    removed = recorder.removed(old)
    assert len(names) == 6
    assert removed < min(moves)
    assert max(moves) < last
    for path, moved in zip(names, moves, strict=True):
        assert recorder.synced(path)[0] < removed, f"{path} was moved before it was synced"
        assert any(moved < at < last for at in recorder.synced(path.parent)), (
            f"the name {path} was not durable before the manifest's"
        )
    assert recorder.synced(tmp_path / "manifest.json")[0] < removed
    directory = recorder.synced(tmp_path)
    assert any(removed < at < min(moves) for at in directory), (
        "the old manifest must be gone for good before anything changes"
    )
    assert max(directory) > last


def test_only_leftovers_of_our_own_are_removed(tmp_path: Path) -> None:
    write(tmp_path)
    ours, theirs = tmp_path / ".tmp-bundle-77-00ff00ff", tmp_path / ".tmp-bundle-of-mine"
    for folder in (ours, theirs):
        folder.mkdir()
        (folder / "notes.txt").write_text("mine")
    (tmp_path / ".tmp-bundle-78-00ff00ff").write_text("a file")
    (tmp_path / ".tmp-bundle-79-00ff00ff").symlink_to(theirs)
    write(tmp_path, seed=1)
    assert sorted(path.name for path in tmp_path.glob(".tmp-bundle*")) == [
        ".tmp-bundle-78-00ff00ff",
        ".tmp-bundle-79-00ff00ff",
        ".tmp-bundle-of-mine",
    ]
    assert (theirs / "notes.txt").read_text() == "mine"


def test_a_write_that_fails_before_anything_moved_leaves_the_old_bundle(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path)
    before = (tmp_path / "weights.safetensors").read_bytes()

    def full(*arguments, **options):
        raise OSError(28, "No space left on device", "weights.safetensors")

    monkeypatch.setattr("dragoman.bundle.writer.write_tensors", full)
    with pytest.raises(Exception, match="No space left on device"):
        write(tmp_path, seed=1)
    with pytest.raises(Exception, match="No space left on device"):
        write(tmp_path / "new")
    assert not (tmp_path / "new").exists()
    monkeypatch.undo()
    assert Bundle.load(tmp_path).model
    assert (tmp_path / "weights.safetensors").read_bytes() == before
    assert not list(tmp_path.glob(".tmp*"))


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_directory_without_permission_is_rejected(tmp_path: Path) -> None:
    tmp_path.chmod(0o555)
    with pytest.raises(PermissionDeniedError, match=re.escape(str(tmp_path))):
        write(tmp_path)


def test_weights_that_are_not_finite_are_never_written(tmp_path: Path) -> None:
    config, tokenizers, weights = make()
    name = next(iter(weights))
    weights[name] = torch.full_like(weights[name], torch.nan)
    with pytest.raises(DivergedError, match=f"{name} between nan"):
        write_bundle(tmp_path / "m", config=config, tokenizers=tokenizers, weights=weights)
    assert not (tmp_path / "m").exists()


def test_nothing_there(tmp_path: Path) -> None:
    with pytest.raises(BundleError, match=f"found nothing at {tmp_path}/m; check the path"):
        Bundle.load(tmp_path / "m")


def test_a_near_name_is_offered(tmp_path: Path) -> None:
    write(tmp_path / "my-model")
    with pytest.raises(BundleError, match=f"did you mean {tmp_path}/my-model"):
        Bundle.load(tmp_path / "mymodel")
    with pytest.raises(BundleError, match=f"did you mean {tmp_path}/my-model"):
        Bundle.load(tmp_path)
    write(tmp_path / "a")
    write(tmp_path / "b")
    with pytest.raises(BundleError, match=r"/a, .*/b or .*/my-model\?"):
        Bundle.load(tmp_path)


def test_a_file_in_place_of_a_directory(tmp_path: Path) -> None:
    write(tmp_path)
    with pytest.raises(BundleError, match=f"found the file .*; pass its directory, {tmp_path}"):
        Bundle.load(tmp_path / "weights.safetensors")


def test_an_empty_directory_and_one_of_something_else(tmp_path: Path) -> None:
    with pytest.raises(BundleError, match="which is empty"):
        Bundle.load(tmp_path)
    (tmp_path / "holiday.jpg").touch()
    with pytest.raises(BundleError, match=r"with holiday\.jpg"):
        Bundle.load(tmp_path)


def test_an_unfinished_run_reports_how_to_continue(tmp_path: Path) -> None:
    (tmp_path / "training").mkdir()
    with pytest.raises(BundleError, match=r"unfinished training run.*--resume.*dragoman average"):
        Bundle.load(tmp_path)


def test_another_toolkits_model_is_not_opened(tmp_path: Path) -> None:
    """Pickled weights are another program's (fairseq#5610)."""
    (tmp_path / "checkpoint_best.pt").write_bytes(b"\x80\x02")
    with pytest.raises(BundleError, match=r"checkpoint_best\.pt, another program's model"):
        Bundle.load(tmp_path)


@pytest.mark.parametrize(
    "name",
    [
        "card.md",
        "config.json",
        "weights.safetensors",
        "text/shared.model",
        "golden.json",
        "manifest.json",
    ],
)
def test_every_flipped_bit_is_noticed_and_the_file_named(tmp_path: Path, name: str) -> None:
    write(tmp_path)
    data = bytearray((tmp_path / name).read_bytes())
    for position in range(0, len(data), max(1, len(data) // 9)):
        data[position] ^= 4
        (tmp_path / name).write_bytes(data)
        with pytest.raises((CorruptError, BundleError), match=re.escape(name)):
            _ = Bundle.load(tmp_path).model
        data[position] ^= 4


def test_golden_vectors_notice_a_model_that_computes_something_else(tmp_path: Path) -> None:
    write(tmp_path, golden=["ein mann", "zwei frauen"])
    bundle = Bundle.load(tmp_path)
    model = bundle.model
    check_golden(model, bundle.tokenizers, bundle.golden, "golden.json")
    with torch.no_grad():
        next(model.parameters()).mul_(1.01)
    with pytest.raises(
        CorruptError,
        match=r"golden\.json, case 1 \('ein mann'\): token 1 must have log-probability .*; found -",
    ):
        check_golden(model, bundle.tokenizers, bundle.golden, "golden.json")


def test_golden_vectors_notice_a_tokenizer_that_decodes_something_else(tmp_path: Path) -> None:
    write(tmp_path, golden=["ein mann"])
    bundle = Bundle.load(tmp_path)
    golden = copy.deepcopy(bundle.golden)
    golden["cases"][0]["output"] += " x"
    with pytest.raises(CorruptError, match=r"output must be .* x'; found .*tokenizer has changed"):
        check_golden(bundle.model, bundle.tokenizers, golden, "golden.json")


def test_golden_vectors_notice_a_model_that_computes_nan(tmp_path: Path) -> None:
    write(tmp_path, golden=["ein mann"])
    bundle = Bundle.load(tmp_path)
    model = bundle.model
    with torch.no_grad():
        next(model.parameters()).fill_(torch.nan)
    with pytest.raises(CorruptError, match=r"token 1 must have log-probability .*; found nan"):
        check_golden(model, bundle.tokenizers, bundle.golden, "golden.json")


def test_the_golden_error_is_the_largest_and_nan_where_one_is(tmp_path: Path) -> None:
    write(tmp_path, golden=["ein mann", "zwei frauen"])
    bundle = Bundle.load(tmp_path)
    rows = [list(case["log_probs"]) for case in bundle.golden_cases]
    assert bundle.golden_error(lambda src, tgt: rows) == 0.0
    rows[0][0] += 0.25
    rows[1][1] -= 0.5
    assert bundle.golden_error(lambda src, tgt: rows) == pytest.approx(0.5)
    rows[1][0] = math.nan
    assert math.isnan(bundle.golden_error(lambda src, tgt: rows))


def test_models_that_choose_are_compared_where_their_vectors_were_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rounding on a GPU may change an LSH bucket, so golden vectors are checked on the CPU."""
    checked = []
    monkeypatch.setattr(
        "dragoman.bundle.translation_bundle_loader.check_golden",
        lambda model, *_: checked.append(next(model.parameters()).device.type),
    )
    for encoder in ("reformer", "transformer"):
        write(tmp_path / encoder, encoder=encoder)
        assert (
            next(Bundle.load(tmp_path / encoder, device="meta").model.parameters()).device.type
            == "meta"
        )
    assert checked == ["cpu", "meta"]


def test_a_multilingual_model_that_is_written_again_keeps_its_golden_languages(
    tmp_path: Path,
) -> None:
    config, _, _ = make()
    tokenizers = train_tokenizers(LINES, LINES, config.text, ["en", "fr"])
    torch.manual_seed(0)
    size = len(tokenizers.src)
    model = build_model(config.model, src_vocab_size=size, tgt_vocab_size=size)
    parts = {"config": config, "tokenizers": tokenizers, "weights": model.state_dict()}
    inputs = [GoldenInput("ein mann", "fr"), GoldenInput("zwei frauen", "en")]
    write_bundle(tmp_path / "first", **parts, golden=inputs)
    first = Bundle.load(tmp_path / "first")
    assert first.golden_inputs() == inputs
    write_bundle(tmp_path / "again", **parts, golden=first.golden_inputs())
    again = Bundle.load(tmp_path / "again")
    assert again.golden_cases == first.golden_cases
    tags = tokenizers.src.tag_ids
    assert [case["src"][0] for case in again.golden_cases] == [tags["fr"], tags["en"]]


def test_golden_vectors_notice_another_tokenizer(tmp_path: Path) -> None:
    config, tokenizers, weights = make()
    write_bundle(
        tmp_path, config=config, tokenizers=tokenizers, weights=weights, golden=["ein mann"]
    )
    bundle = Bundle.load(tmp_path)
    other = train_tokenizers(
        ["other text"] * 30, ["words of it"] * 30, Config().replace(text={"vocab_size": 300}).text
    )
    with pytest.raises(CorruptError, match=r"case 1 .*: tokens must be .*found"):
        check_golden(bundle.model, other, bundle.golden, "golden.json")


def test_golden_vectors_are_made_without_given_inputs(tmp_path: Path) -> None:
    write(tmp_path)
    golden = json.loads((tmp_path / "golden.json").read_text())
    assert len(golden["cases"]) >= 2
    assert all(
        len(case["log_probs"]) == len(case["tgt"]) + case["finished"] for case in golden["cases"]
    )


def test_blank_golden_inputs_are_left_out() -> None:
    config, tokenizers, weights = make()
    model = build_model(
        config.model, src_vocab_size=len(tokenizers.src), tgt_vocab_size=len(tokenizers.tgt)
    ).eval()
    model.load_state_dict(weights)
    assert [
        case["input"] for case in make_golden(model, tokenizers, ["", "ein mann"])["cases"]
    ] == ["ein mann"]


@pytest.mark.parametrize(("spare", "kept"), [(0, ["mann"]), (1, ["mann", "ein mann"])])
def test_golden_inputs_fit_learned_positions_with_their_end(
    tmp_path: Path, spare: int, kept: list[str]
) -> None:
    config, tokenizers, _ = make()
    positions = len(tokenizers.src.encode("ein mann")) + spare
    config = config.replace(
        model={"positions": "learned", "max_positions": positions},
        data={"max_length": positions - 1},
    )
    torch.manual_seed(0)
    size = len(tokenizers.src)
    model = build_model(config.model, src_vocab_size=size, tgt_vocab_size=size)
    write_bundle(
        tmp_path,
        config=config,
        tokenizers=tokenizers,
        weights=model.state_dict(),
        golden=["mann", "ein mann"],
    )
    assert [case["input"] for case in Bundle.load(tmp_path).golden_cases] == kept


@pytest.mark.parametrize(
    ("damage", "found"),
    [
        (lambda golden: golden.update(format=9), "found 9"),
        (lambda golden: golden.update(cases={}), "found dict"),
        (lambda golden: golden["cases"][0].pop("tgt"), "found fields are missing"),
        (
            lambda golden: golden["cases"][0].update(finished=1),
            "found text or flag of another type",
        ),
        (lambda golden: golden["cases"][0].update(src=[]), "found an empty source"),
        (lambda golden: golden["cases"][0].update(src=[True]), "found src that is not a list"),
        (lambda golden: golden["cases"][0].update(tgt=[5] * 600), "found tgt that is not a list"),
        (
            lambda golden: golden["cases"][0]["log_probs"].pop(),
            "found log_probs that are not one per token",
        ),
        (
            lambda golden: golden["cases"][0]["log_probs"].__setitem__(0, "x"),
            "found log_probs that are not numbers",
        ),
    ],
)
def test_golden_vectors_of_another_form_are_rejected_before_the_model_runs(
    tmp_path: Path, damage, found: str
) -> None:
    write(tmp_path, golden=["ein mann"])
    bundle = Bundle.load(tmp_path, check_golden=False)
    golden = json.loads(json.dumps(bundle.golden))
    damage(golden)
    with pytest.raises(BundleError, match=found):
        check_golden(bundle.model, bundle.tokenizers, golden, "golden.json")


@pytest.mark.parametrize(("finished", "count"), [(True, 3), (False, 2)])
def test_a_golden_case_has_a_number_for_each_token_and_for_its_end(
    finished: bool, count: int
) -> None:
    for numbers in range(5):
        case = {
            "input": "a",
            "src": [5],
            "tgt": [6, 7],
            "finished": finished,
            "output": "b",
            "log_probs": [-0.5] * numbers,
        }
        assert _case_problem(case, 8, 8) == (
            "" if numbers == count else "log_probs that are not one per token"
        )
    assert _case_problem(case | {"log_probs": [-0.5] * count}, 8, 7).startswith(
        "tgt that is not a list"
    )


def test_the_text_of_a_card_may_be_given_whole(tmp_path: Path) -> None:
    write(tmp_path, card="# Mine\n")
    assert Bundle.load(tmp_path).card == "# Mine\n"


def test_the_card_has_scores_with_signatures_and_names_missing_facts() -> None:
    """A score without its signature cannot be compared (fairseq#2593, #637, #3245)."""
    config = Config().replace(data={"src_lang": "no", "tgt_lang": "en"})
    card = Card(
        command="dragoman train --src a --tgt b",
        data={"training pairs": "29,000 | train.de"},
        scores=(CardScore("BLEU", 38.25, "nrefs:1|case:mixed|tok:13a", "test_2016"),),
        license="CC-BY-4.0",
    )
    text = write_card(card, config, parameters=1_234_567)
    head = yaml.safe_load(text.split("---")[1])
    assert head["language"] == ["no", "en"]  # not False: Norway is not a boolean
    assert head["license"] == "CC-BY-4.0"
    assert "1,234,567 parameters" in text
    assert "| BLEU | 38.25 | test_2016 | `nrefs:1\\|case:mixed\\|tok:13a` |" in text
    assert "29,000 \\| train.de" in text
    bare = write_card(Card(), Config(), parameters=1)
    for phrase in ("Not recorded", "was not recorded", "None were measured", "Not stated"):
        assert phrase in bare


def test_loading_a_bundle_leaves_torchs_generator_alone(tmp_path: Path) -> None:
    write(tmp_path)
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    _ = Bundle.load(tmp_path).model
    assert torch.equal(torch.rand(3), expected)


def write_int8(path: Path) -> dict[str, torch.Tensor]:
    """Write a bundle in int8 and return its weights before."""
    config, tokenizers, weights = make()
    write_bundle(
        path,
        config=config,
        tokenizers=tokenizers,
        weights=weights,
        golden=["ein mann"],
        quantization="int8",
    )
    return weights


def test_int8_weights_are_those_of_torchs_own_quantization(tmp_path: Path) -> None:
    weights = write_int8(tmp_path / "m")
    bundle = Bundle.load(tmp_path / "m")
    assert bundle.manifest["quantization"] == "int8"
    stored = load_file(tmp_path / "m" / layout.WEIGHTS)
    for name, tensor in bundle.model.state_dict().items():
        assert tensor.dtype == torch.float32
        if tensor.dim() < 2:
            assert torch.equal(tensor, weights[name]), name
            assert stored[name].dtype == torch.float32
            continue
        scales = weights[name].abs().amax(dim=1) / 127
        zeros = torch.zeros(len(scales), dtype=torch.int32)
        torchs = torch.fake_quantize_per_channel_affine(
            weights[name], scales, zeros, 0, quant_min=-127, quant_max=127
        )
        torch.testing.assert_close(tensor, torchs, rtol=1e-6, atol=1e-9)
        assert stored[name].dtype == torch.int8


def test_int8_takes_about_a_quarter_and_is_verified(tmp_path: Path) -> None:
    write_int8(tmp_path / "small")
    write(tmp_path / "large", golden=["ein mann"])
    small, large = (
        (tmp_path / name / layout.WEIGHTS).stat().st_size for name in ("small", "large")
    )
    assert small < 0.5 * large  # vectors and the header are a large part of a model this small
    assert all(check.ok for check in verify_directory(tmp_path / "small"))
    data = bytearray((tmp_path / "small" / layout.WEIGHTS).read_bytes())
    data[-1] ^= 4
    (tmp_path / "small" / layout.WEIGHTS).write_bytes(data)
    with pytest.raises(CorruptError, match=layout.WEIGHTS):
        Bundle.load(tmp_path / "small")


def test_int8_engines_read_the_stored_rows_again(tmp_path: Path) -> None:
    """The int8 kernels quantize what was dequantized: the same values and scales."""
    write_int8(tmp_path / "m")
    stored = load_file(tmp_path / "m" / layout.WEIGHTS)
    for name, tensor in Bundle.load(tmp_path / "m").model.state_dict().items():
        if tensor.dim() == 2:
            values, scales = quantize_rows(tensor)
            assert torch.equal(values.to(torch.int8), stored[name]), name
            torch.testing.assert_close(scales, stored[f"{name}.scale"], rtol=1e-6, atol=0)


def test_writing_int8_weights_in_int8_again_changes_nothing(tmp_path: Path) -> None:
    write_int8(tmp_path / "m")
    bundle = Bundle.load(tmp_path / "m")
    again = {"config": bundle.config, "tokenizers": bundle.tokenizers, "golden": ["ein mann"]}
    write_bundle(tmp_path / "n", **again, weights=bundle.model.state_dict(), quantization="int8")
    before, after = (load_file(tmp_path / name / layout.WEIGHTS) for name in ("m", "n"))
    assert all(
        torch.equal(before[name], after[name]) for name in before if not name.endswith(".scale")
    )


def rewrite_weights(path: Path, change) -> None:
    """Change the stored tensors, with a manifest that fits them."""
    tensors = load_file(path / layout.WEIGHTS)
    change(tensors)
    (path / layout.WEIGHTS).unlink()
    record = write_tensors(path / layout.WEIGHTS, tensors)
    listed = read_manifest(path)
    files = {
        name: FileRecord(each["bytes"], each["sha256"]) for name, each in listed["files"].items()
    }
    fields = {
        name: value
        for name, value in listed.items()
        if name not in ("files", "format", "manifest_sha256")
    }
    (path / "manifest.json").unlink()
    write_manifest(path, files | {layout.WEIGHTS: record}, fields)


MATRIX = "decoder.0.cross.key_value.weight"


@pytest.mark.parametrize(
    ("change", "error", "found"),
    [
        (lambda t: t.pop(f"{MATRIX}.scale"), BundleError, rf"found no {MATRIX}\.scale"),
        (
            lambda t: t.update({f"{MATRIX}.scale": t[f"{MATRIX}.scale"][:-1]}),
            BundleError,
            rf"{MATRIX}\.scale F32",
        ),
        (
            lambda t: t.update({f"{MATRIX}.scale": t[f"{MATRIX}.scale"].double()}),
            BundleError,
            rf"found {MATRIX}\.scale F64",
        ),
        (
            lambda t: t.update({f"{MATRIX}.scale": t[f"{MATRIX}.scale"].view(-1, 1)}),
            BundleError,
            rf"found {MATRIX}\.scale F32 \[\d+, 1\]",
        ),
        (lambda t: t.update({MATRIX: t[MATRIX][:, :-1]}), BundleError, rf"{MATRIX} I8"),
        (lambda t: t.update({MATRIX: t[MATRIX].to(torch.uint8)}), BundleError, rf"{MATRIX} U8"),
        (
            lambda t: t.update({"other.scale": torch.ones(3)}),
            BundleError,
            r"found other\.scale F32",
        ),
        (lambda t: t[f"{MATRIX}.scale"].fill_(float("nan")), CorruptError, "finite"),
        (lambda t: t[f"{MATRIX}.scale"][3:4].fill_(float("inf")), CorruptError, "finite"),
        (lambda t: t[f"{MATRIX}.scale"].fill_(3e38), CorruptError, "finite"),
        (lambda t: t[f"{MATRIX}.scale"].mul_(-1), CorruptError, "log-probability"),
        (lambda t: t[MATRIX].fill_(0), CorruptError, "log-probability"),
    ],
)
def test_bad_int8_weights_are_rejected(tmp_path: Path, change, error, found: str) -> None:
    write_int8(tmp_path / "m")
    rewrite_weights(tmp_path / "m", change)
    with pytest.raises(error, match=found):
        _ = Bundle.load(tmp_path / "m").model


def test_biases_and_norms_are_not_read_from_int8(tmp_path: Path) -> None:
    write_int8(tmp_path / "m")
    [name, *_] = (
        name
        for name, tensor in Bundle.load(tmp_path / "m").model.state_dict().items()
        if tensor.dim() == 1
    )
    rewrite_weights(tmp_path / "m", lambda t: t.update({name: t[name].to(torch.int8)}))
    with pytest.raises(BundleError, match=f"{re.escape(name)} I8"):
        _ = Bundle.load(tmp_path / "m").model


def test_other_quantizations_are_rejected(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="one of float32, int8; found 'int4'; float32 is exact"):
        write(tmp_path / "m", quantization="int4")
    assert not (tmp_path / "m").exists()


def test_golden_log_probabilities_may_differ_by_a_thousandth(tmp_path: Path) -> None:
    write(tmp_path, golden=["ein mann", "zwei frauen"])
    bundle = Bundle.load(tmp_path)
    for off, kept in ((8e-4, True), (-8e-4, True), (1.2e-3, False), (-1.2e-3, False)):
        golden = json.loads(json.dumps(bundle.golden))
        golden["cases"][1]["log_probs"][-1] += off
        if kept:
            check_golden(bundle.model, bundle.tokenizers, golden, "golden.json")
        else:
            with pytest.raises(CorruptError, match="case 2"):
                check_golden(bundle.model, bundle.tokenizers, golden, "golden.json")


def test_sixteen_golden_cases_are_kept() -> None:
    config, tokenizers, weights = make()
    model = build_model(
        config.model, src_vocab_size=len(tokenizers.src), tgt_vocab_size=len(tokenizers.tgt)
    ).eval()
    model.load_state_dict(weights)
    inputs = [f"{number} mann" for number in range(18)]
    golden = make_golden(model, tokenizers, inputs)
    assert [case["input"] for case in golden["cases"]] == inputs[:16]
    sizes = len(tokenizers.src), len(tokenizers.tgt)
    assert read_golden_cases(golden, *sizes, "it") == golden["cases"]
    golden["cases"].append(golden["cases"][0])
    with pytest.raises(BundleError, match="at most 16 cases; found 17 of them"):
        read_golden_cases(golden, *sizes, "it")
    for case in golden["cases"]:
        length = len(case["tgt"]) - len(case["src"])
        assert length <= 50 if case["finished"] else length == 50


def test_golden_inputs_are_cut_to_512_tokens() -> None:
    _, tokenizers, _ = make()
    tokens = tokenizers.src.encode("mann " * 600)
    assert encode_golden(tokenizers, "mann " * 600, "") == tokens[:512]


@pytest.mark.parametrize(
    ("count", "parameters"),
    [(7, 7), (0, 0), (-1, 0), (True, 0), ("7", 0), (10**10, 10**10), (10**10 + 1, 0)],
)
def test_a_number_of_parameters_that_cannot_be_is_zero(count: object, parameters: int) -> None:
    assert manifest_parameters({"parameters": count}) == parameters
    assert manifest_parameters({}) == 0


def test_a_multilingual_bundle_names_its_directions_and_first_target(tmp_path: Path) -> None:
    config, _, _ = make()
    config = config.replace(
        data={"directions": ("de-fr", "fr-de", "en-de")}, text={"language_tags": True}
    )
    tokenizers = train_tokenizers(LINES, LINES, config.text, ["de", "fr"])
    size = len(tokenizers.src)
    model = build_model(config.model, src_vocab_size=size, tgt_vocab_size=size)
    write_bundle(tmp_path, config=config, tokenizers=tokenizers, weights=model.state_dict())
    bundle = Bundle.load(tmp_path)
    assert bundle.manifest_fields()["directions"] == ["de-fr", "fr-de", "en-de"]
    assert bundle.default_target == "fr"
    assert "# Multilingual translator: de-fr, fr-de, en-de" in bundle.card
    assert 'translate(["…"], target_language="fr")' in bundle.card
    assert yaml.safe_load(bundle.card.split("---")[1])["language"] == ["de", "en", "fr"]


@pytest.mark.parametrize(
    ("task", "changes", "title", "call", "tag"),
    [
        ("translate", {}, "Translator", 'translate(["…"])', "translation"),
        ("language", {}, "Language model", 'complete("…")[0].text', "text-generation"),
        (
            "language",
            {"language": {"objective": "masked"}},
            "Language model",
            'fill_mask("… <mask> …")',
            "text-generation",
        ),
        ("tag", {}, "Tagger", 'predict(["…"])', "token-classification"),
        ("sets", {}, "Set model", 'predict(["…"])', "other"),
    ],
)
def test_the_card_shows_how_a_model_of_its_task_is_used(
    task: str, changes: dict[str, dict[str, object]], title: str, call: str, tag: str
) -> None:
    text = write_card(Card(), Config(task=task).replace(**changes), parameters=1)
    assert f"\n# {title}\n" in text
    assert call in text
    assert yaml.safe_load(text.split("---")[1])["pipeline_tag"] == tag
    assert ("sentences of up to 200 tokens" in text) == (task == "translate")


def test_float32_weights_are_not_said_to_be_quantized(tmp_path: Path) -> None:
    write(tmp_path, manifest_fields={"quantization": "int8", "steps": 3})
    fields = Bundle.load(tmp_path).manifest_fields()
    assert fields["steps"] == 3
    assert "quantization" not in fields


def test_several_corpus_files_keep_their_base_names_in_order(tmp_path: Path) -> None:
    config, tokenizers, weights = make()
    config = config.replace(data={"pairs": ("/a/one.tsv", "/b/two.tsv")})
    write_bundle(tmp_path, config=config, tokenizers=tokenizers, weights=weights)
    assert Bundle.load(tmp_path).config.data.pairs == ("one.tsv", "two.tsv")


@pytest.mark.parametrize(
    ("task", "objective", "command"),
    [
        ("translate", None, "translate"),
        ("language", "causal", "generate"),
        ("language", "masked", "predict"),
        ("language", "permuted", "predict"),
        ("tag", "masked", "predict"),
    ],
)
def test_the_command_of_a_model(task: str, objective: str | None, command: str) -> None:
    assert layout.model_command(task, objective) == command


def test_a_configuration_without_a_task_is_of_translation(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert layout.read_task(tmp_path) == "translate"
    assert layout.read_command(tmp_path) == "translate"
    (tmp_path / "config.json").write_text(
        '{"task": "language", "language": {"objective": "masked"}}'
    )
    assert layout.read_command(tmp_path) == "predict"
    (tmp_path / "config.json").write_text('{"task": "poetry"}')
    assert layout.read_command(tmp_path) == ""

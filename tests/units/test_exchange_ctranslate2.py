"""Export to CTranslate2: every setting that it can express gives its numbers, the others are refused, and the engine keeps our promises."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from model_kit import shaken

from dragoman.bundle import Bundle, write_bundle
from dragoman.config import Config
from dragoman.decoding.beam import Beam
from dragoman.decoding.greedy import Greedy
from dragoman.decoding.hypothesis import Hypothesis
from dragoman.decoding.packing import pack, pack_sources
from dragoman.decoding.penalties import WuPenalty
from dragoman.decoding.sampling import Sampling
from dragoman.engines import Engine, Native, Request
from dragoman.engines.choosing import choose_engine, open_engine
from dragoman.engines.ctranslate2 import CTranslate2
from dragoman.engines.folder import engine_names
from dragoman.errors import BundleError, ConfigError, CorruptError
from dragoman.exchange import exporting
from dragoman.exchange.ctranslate2 import save_ctranslate2
from dragoman.exchange.exporting import export_ctranslate2
from dragoman.files.verify import verify_directory
from dragoman.models.build import build_model
from dragoman.models.encoder_decoder import EncoderDecoder
from dragoman.text.specials import BOS, EOS, UNK
from dragoman.text.tokenizer import Tokenizers, train_tokenizers
from dragoman.translator import Translator

pytest.importorskip("ctranslate2")

LINES = ["ein mann geht", "eine frau geht schnell", "zwei hunde", "ein hund und ein mann sehen eine frau", "der hund"]
BASE = {"encoder": ["self*2"], "decoder": ["self*2"], "width": 32, "heads": 4, "feedforward": 64, "dropout": 0.0}
TOKENIZERS: dict[bool, Tokenizers] = {}


def tokenizers_of(config: Config) -> Tokenizers:
    """Learn tokenizers once for all tests."""
    joint = config.text.joint
    if joint not in TOKENIZERS:
        TOKENIZERS[joint] = train_tokenizers(LINES * 3, [line.upper() for line in LINES] * 3, config.text)
    return TOKENIZERS[joint]


def made(**model: Any) -> tuple[EncoderDecoder, Tokenizers, Config]:
    """Build a model whose every weight, norms and biases included, has moved off its first value."""
    config = Config().replace(model={**BASE, **model}, text={"vocabulary": 300, "joint": model.get("tie", "all") == "all"})
    tokenizers = tokenizers_of(config)
    torch.manual_seed(0)
    net = shaken(build_model(config.model, src_vocabulary=len(tokenizers.src), tgt_vocabulary=len(tokenizers.tgt))).eval()
    return net, tokenizers, config


SETTINGS: dict[str, dict[str, Any]] = {
    "as it is": {},
    "pre-norm": {"residual": "pre"},
    "pre-norm without a last norm": {"residual": "pre", "final_norm": "off"},
    "post-norm with a last norm": {"final_norm": "on", "norm": "rms"},
    "sines in halves": {"positions": "sinusoidal_halves"},
    "learned positions": {"positions": "learned", "max_positions": 400},
    "no positions": {"positions": "none"},
    "rotary": {"positions": "rotary"},
    "t5's buckets": {"positions": "t5"},
    "shaw": {"positions": "shaw"},
    "gelu": {"activation": "gelu"},
    "swish": {"activation": "swish"},
    "geglu": {"activation": "geglu"},
    "rms": {"norm": "rms", "residual": "pre", "norm_epsilon": 0.05},
    "t5's norm": {"norm": "t5", "norm_epsilon": 1e-6},
    "grouped heads": {"kv_heads": 2},
    "one head of keys": {"kv_heads": 1, "head_width": 12},
    "no biases": {"attention_bias": False},
    "output bias": {"output_bias": True, "norm_epsilon": 0.05},
    "target tied": {"tie": "target"},
    "untied": {"tie": "none", "scale_embeddings": False},
    "unequal stacks": {"encoder": ["self(heads=2)*3"], "decoder": ["self"]},
    "like llama": {"positions": "rotary", "kv_heads": 2, "residual": "pre", "norm": "rms", "activation": "swiglu", "attention_bias": False},
    "no biases at all": {"attention_bias": False, "feedforward_bias": False},
    "a gate without biases": {"activation": "swiglu", "feedforward_bias": False},
    "shared layers": {"share_layers": "all"},
    "narrow embeddings of length one": {"embedding_width": 16, "fix_norm": True},
}


@pytest.mark.parametrize("name", SETTINGS)
def test_log_probabilities_are_ours_for_every_setting_that_it_can_express(name: str, tmp_path: Path) -> None:
    model, tokenizers, config = made(**SETTINGS[name])
    save_ctranslate2(model, tokenizers, config, tmp_path, quantisation="float32")
    engine = CTranslate2(tmp_path, tokenizers, name="it", longest=1024, workers=1)
    sources = [tokenizers.src.encode(line) for line in [*LINES, " ".join(LINES * 3)]]
    targets = [tokenizers.tgt.encode(line.upper()) for line in [*LINES, " ".join(LINES * 3)]]
    with torch.inference_mode():
        given, mask = pack([[BOS, *target] for target in targets])
        log_probs = model.project(model.decode(given, model.encode(*pack_sources(sources)), mask)).log_softmax(-1)
    for row, (target, found) in enumerate(zip(targets, engine.log_probs(sources, targets), strict=True)):
        expected = [float(log_probs[row, place, token]) for place, token in enumerate([*target, EOS])]
        assert found == pytest.approx(expected, abs=2e-5)


@pytest.mark.parametrize(
    ("model", "found"),
    [
        ({"encoder": ["bilstm"]}, "BiLSTMLayer as block 0"),
        ({"positions": "alibi"}, "found LinearBias"),
        ({"norm": "scale"}, "found ScaleNorm"),
        ({"residual": "scaled"}, "found Scaled"),
        ({"window": 3}, "found 3 and 3"),
        ({"qk_norm": "rms"}, "found RMSNorm"),
        ({"encoder": ["self(activation=gelu)", "self"]}, "GELU and ReLU"),
        ({"talking_heads": True}, "found self.mix_scores"),
    ],
)
def test_what_it_cannot_express_is_refused_with_the_reason(model: dict[str, Any], found: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as refused:
        save_ctranslate2(*made(**model), tmp_path, quantisation="float32")
    assert found in str(refused.value)
    assert "the native engine runs every model" in str(refused.value)


def test_quantising_leaves_the_living_model_alone(tmp_path: Path) -> None:
    model, tokenizers, config = made()
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    save_ctranslate2(model, tokenizers, config, tmp_path, quantisation="int8")
    assert all(torch.equal(weight, before[name]) for name, weight in model.state_dict().items())
    with pytest.raises(ConfigError, match="found 'int4'"):
        save_ctranslate2(model, tokenizers, config, tmp_path, quantisation="int4")


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Native, CTranslate2, Tokenizers]:
    """Give both engines of one model, whose outputs are of all lengths and include forbidden pieces."""
    model, tokenizers, config = made(output_bias=True)
    with torch.no_grad():
        model.output.bias[EOS] += 7.0  # type: ignore[index]
        model.output.bias[UNK] += 7.0  # type: ignore[index]
    folder = tmp_path_factory.mktemp("engine")
    save_ctranslate2(model, tokenizers, config, folder, quantisation="float32")
    return Native(lambda: model), CTranslate2(folder, tokenizers, name="it", longest=1024, workers=2), tokenizers


def request(tokenizers: Tokenizers, **more: Any) -> Request:
    """Ask for a few lines, each with a limit of its own."""
    sources = [tokenizers.src.encode(line) for line in LINES]
    asked: dict[str, Any] = {"limits": [3, 30, 7, 12, 1], "prefixes": [[]] * 5, "strategy": Greedy(), "lines": range(5)}
    return Request(sources=sources, **{**asked, **more})


def assert_same(ours: list[list[Hypothesis]], theirs: list[list[Hypothesis]]) -> None:
    """Compare two searches' results, numbers included."""
    for one, other in zip(ours, theirs, strict=True):
        for mine, its in zip(one, other, strict=True):
            assert (mine.tokens, mine.finished) == (its.tokens, its.finished)
            assert its.log_probs == pytest.approx(mine.log_probs, abs=2e-5)
            assert its.score == pytest.approx(mine.score, abs=2e-4)


def test_greedy_search_is_ours_with_limits_prefixes_and_forbidden_pieces(pair: tuple[Native, CTranslate2, Tokenizers]) -> None:
    native, engine, tokenizers = pair
    prefix, ended = tokenizers.tgt.encode("EINE"), set[bool]()
    for asked in (
        request(tokenizers),
        request(tokenizers, at_least=4),
        request(tokenizers, prefixes=[prefix, [], prefix, [], prefix * 3]),
        request(tokenizers, strategy=Greedy(penalty=WuPenalty(0.0))),
    ):
        ours = native.generate(asked)
        assert_same(ours, engine.generate(asked))
        ended |= {one[0].finished for one in ours}
    assert ended == {True, False}, "outputs of both kinds must come up"


def test_unscored_outputs_are_the_scored_ones(pair: tuple[Native, CTranslate2, Tokenizers]) -> None:
    _, engine, tokenizers = pair
    for strategy in (Greedy(), Beam(3, 2)):
        scored, plain = (engine.generate(request(tokenizers, strategy=strategy, scored=scored)) for scored in (True, False))
        assert [[each.tokens for each in row] for row in scored] == [[each.tokens for each in row] for row in plain]
    assert not any(row[0].log_probs for row in engine.generate(request(tokenizers, scored=False)))


def test_a_beam_ranks_by_our_penalty_and_scores_as_the_model_does(pair: tuple[Native, CTranslate2, Tokenizers]) -> None:
    """Its search ends by another rule, so its n best need not be ours; what it says of them must be true all the same."""
    native, engine, tokenizers = pair
    prefix = tokenizers.tgt.encode("EINE")
    penalty = WuPenalty(0.7)
    asked = request(tokenizers, strategy=Beam(4, 3, penalty), prefixes=[prefix, *[[]] * 4], limits=[30, 30, 7, 12, 2])
    for row, found in enumerate(engine.generate(asked)):
        assert 1 <= len(found) <= 3
        assert found[0].tokens[: len(asked.prefixes[row])] == asked.prefixes[row]
        assert [each.score for each in found if each.finished] == sorted((each.score for each in found if each.finished), reverse=True)
        for each in found:
            assert len(each.tokens) <= asked.limits[row]
            assert not {0, BOS, UNK} & set(each.tokens)
            forced = Request(
                sources=[asked.sources[row]], limits=[len(each.tokens)], prefixes=[each.tokens], strategy=Greedy(penalty), lines=[0]
            )
            [[again]] = native.generate(forced)
            assert each.log_probs[: len(each.tokens)] == pytest.approx(again.log_probs[: len(each.tokens)], abs=2e-5)
            assert each.score == pytest.approx(penalty.score(sum(each.log_probs), len(each.log_probs)), abs=1e-5)


def test_what_the_engine_cannot_do_it_says(pair: tuple[Native, CTranslate2, Tokenizers]) -> None:
    _, engine, _ = pair
    assert engine.refusal(Greedy()) == engine.refusal(Beam(4, 2), 1024) == ""
    assert "sampling" in engine.refusal(Sampling(1.0, 0, 1.0, 1))
    assert "1024" in engine.refusal(Greedy(), 1025)

    class Other:
        def score(self, total: float, length: int) -> float:
            return total

        bound = score  # type: ignore[assignment]

    assert "Other" in engine.refusal(Greedy(penalty=Other()))  # type: ignore[arg-type]


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    """Write a model's directory."""
    model, tokenizers, config = made(output_bias=True)
    config = config.replace(decode={"beam": 1, "max_extra": 6, "max_ratio": 1.0})
    path = tmp_path / "my-model"
    write_bundle(path, config=config, tokenizers=tokenizers, weights=model.state_dict(), golden=LINES)
    return path


def test_an_engine_in_the_bundle_is_found_and_says_the_same(bundle: Path) -> None:
    before = Translator.load(bundle).translate(LINES)
    exported = export_ctranslate2(bundle, quantisation="float32")
    assert exported.path == bundle / "engines" / "ctranslate2-float32"
    assert (exported.parity.equal, exported.parity.sentences) == (5, 5)
    assert exported.parity.difference < 1e-4
    assert "equal on 5 of 5 sentences (100.0 %)" in str(exported.parity)
    translator = Translator.load(bundle)
    assert translator.engine.name == "ctranslate2-float32"
    assert translator.translate(LINES) == before
    assert Translator.load(bundle, engine="native").engine.name == "native"
    assert all(check.ok for check in verify_directory(bundle))
    assert any(check.name == "engines/ctranslate2-float32/model.bin" for check in verify_directory(bundle))


def test_the_quickest_engine_is_taken_and_one_may_be_named(bundle: Path) -> None:
    for quantisation in ("float32", "int8"):
        export_ctranslate2(bundle, quantisation=quantisation)
    assert engine_names(bundle) == ["ctranslate2-float32", "ctranslate2-int8"]
    for wanted, expected in (("auto", "int8"), ("ctranslate2", "int8"), ("ctranslate2-float32", "float32")):
        assert Translator.load(bundle, engine=wanted).engine.name == f"ctranslate2-{expected}"
    with pytest.raises(ConfigError, match="found 'ctranslate'"):
        Translator.load(bundle, engine="ctranslate")
    with pytest.raises(ConfigError, match="found the device cuda"):
        choose_engine(Bundle.load(bundle), "ctranslate2", torch.device("cuda"))
    assert choose_engine(Bundle.load(bundle), "auto", torch.device("cuda")) is None


def test_an_engine_that_is_not_there_is_told_with_the_command_that_makes_it(bundle: Path) -> None:
    with pytest.raises(ConfigError, match=r"found none; make it: dragoman export .*my-model --to ctranslate2"):
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
    """Leave an engine behind, as a training does that goes on in the same directory."""
    model, tokenizers, _ = made(output_bias=True)
    with torch.no_grad():
        model.output.bias[:] += 1.0  # type: ignore[index]
    path = folder.parents[1]
    write_bundle(path, config=Bundle.load(path).config, tokenizers=tokenizers, weights=model.state_dict(), golden=LINES)


@pytest.mark.parametrize(
    ("harm", "said"),
    [
        (damage_model, "model.bin"),
        (lose_model, "model.bin"),
        (lose_manifest, "manifest.json"),
        (link_model, "model.bin"),
        (make_another, "one made from other weights"),
    ],
)
def test_a_damaged_engine_costs_a_line_and_the_native_one_translates(
    harm: Callable[[Path], None], said: str, bundle: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = export_ctranslate2(bundle, quantisation="float32").path
    harm(folder)
    with caplog.at_level(logging.INFO, logger="dragoman"):
        translator = Translator.load(bundle)
    assert translator.engine.name == "native"
    [record] = caplog.records
    assert said in record.getMessage()
    assert translator.translate(LINES) == Translator.load(bundle, engine="native").translate(LINES)
    assert record.getMessage().endswith(": the native engine is used, and the result is the same")
    named = Translator.load(bundle, engine="ctranslate2")
    assert [named.engine.name, caplog.records[-1].getMessage()] == ["native", record.getMessage()]
    if harm is not make_another:
        assert any(not check.ok and said in check.name for check in verify_directory(bundle))


def test_an_engine_that_computes_something_else_is_not_used(bundle: Path) -> None:
    """Golden vectors catch what hashes cannot: here, an engine whose manifest claims to be this model's and is not."""
    export_ctranslate2(bundle, quantisation="float32")
    loaded = Bundle.load(bundle)
    for case in loaded.golden["cases"]:
        case["log_probs"] = [number - 1.0 for number in case["log_probs"]]
    with pytest.raises(CorruptError, match=r"found 1\.00"):
        open_engine(loaded, "ctranslate2-float32")


def test_an_engine_may_list_no_other_files(bundle: Path) -> None:
    from dragoman.files.manifest import read_manifest, write_manifest

    folder = export_ctranslate2(bundle, quantisation="float32").path
    content = read_manifest(folder)
    (folder / "manifest.json").unlink()
    from dragoman.files.atomic import FileRecord

    files = {name: FileRecord(**record) for name, record in content["files"].items()}
    rest = {name: value for name, value in content.items() if name not in ("files", "format", "manifest_sha256")}
    write_manifest(folder, {**files, "hook.py": FileRecord(0, "0" * 64)}, rest)
    with pytest.raises(BundleError, match=r"found 'hook\.py'"):
        open_engine(Bundle.load(bundle), "ctranslate2-float32")


def test_an_engine_that_is_not_installed_costs_a_line(bundle: Path, tmp_path: Path) -> None:
    export_ctranslate2(bundle, quantisation="float32")
    code = "import sys, importlib.util as u; real = u.find_spec\n"
    code += "u.find_spec = lambda name, *rest: None if name == 'ctranslate2' else real(name, *rest)\n"
    code += "from dragoman.cli.app import main; sys.exit(main(sys.argv[1:]))"
    run = [sys.executable, "-c", code]
    root = Path(__file__).resolve().parents[2]
    auto = subprocess.run([*run, "translate", "-m", str(bundle), *LINES], cwd=root, capture_output=True, text=True, timeout=300)
    assert auto.returncode == 0
    assert auto.stdout.splitlines() == Translator.load(bundle, engine="native").translate(LINES)
    [line] = [line for line in auto.stderr.splitlines() if "engine" in line]
    assert "is not used (found no ctranslate2; to have it: pip install 'dragoman[fast]'): the native engine is used" in line
    named = subprocess.run([*run, "export", str(bundle), "--to", "ctranslate2"], cwd=root, capture_output=True, text=True, timeout=300)
    assert named.returncode == 2
    assert "found no ctranslate2" in named.stderr


def test_a_standalone_export_has_vocabularies_and_tokenizers(bundle: Path, tmp_path: Path) -> None:
    import ctranslate2
    import sentencepiece

    out = tmp_path / "standalone"
    assert export_ctranslate2(bundle, out, quantisation="float32").path == out
    assert not (bundle / "engines").exists()
    assert json.loads((out / "shared_vocabulary.json").read_text("utf-8"))[:4] == ["<pad>", "<s>", "</s>", "<unk>"]
    src, tgt = (sentencepiece.SentencePieceProcessor(model_file=str(out / name)) for name in ("source.spm", "target.spm"))
    theirs = ctranslate2.Translator(str(out)).translate_batch([src.encode(LINES[0], out_type=str)], beam_size=1, max_decoding_length=9)
    assert tgt.decode(theirs[0].hypotheses[0]).startswith(Translator.load(bundle).translate(LINES[:1])[0][:3])
    with pytest.raises(BundleError, match="a directory with files at"):
        export_ctranslate2(bundle, out)


def test_an_interrupted_export_leaves_nothing(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object) -> Engine:
        raise KeyboardInterrupt

    before = sorted(path.name for path in bundle.rglob("*"))
    monkeypatch.setattr(exporting, "compare", interrupt)
    with pytest.raises(KeyboardInterrupt):
        export_ctranslate2(bundle)
    assert sorted(path.name for path in bundle.rglob("*") if path.name != "engines") == before
    assert not list(bundle.rglob(".tmp-*"))
    assert Translator.load(bundle).engine.name == "native"


def test_a_killed_export_is_swept_away_by_the_next(bundle: Path) -> None:
    process = subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, text=True, check=True)
    left = bundle / "engines" / f".tmp-engine-{process.stdout.strip()}-00ff00ff"
    left.mkdir(parents=True)
    (left / "model.bin").write_bytes(b"half")
    ours = bundle / "engines" / f".tmp-engine-{os.getpid()}-00ff00ff"
    ours.mkdir()
    assert all(check.ok for check in verify_directory(bundle))
    export_ctranslate2(bundle, quantisation="float32")
    assert not left.exists()
    assert ours.exists(), "another export may be writing there"


def test_an_export_that_computes_something_else_is_not_kept(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exporting, "golden_error", lambda *_: 0.25)
    with pytest.raises(CorruptError, match=r"found 0\.2500 off"):
        export_ctranslate2(bundle, quantisation="float32")
    assert engine_names(bundle) == []


def test_bleu_is_compared_where_there_are_references(bundle: Path) -> None:
    parity = export_ctranslate2(bundle, quantisation="float32", texts=LINES, references=[line.upper() for line in LINES]).parity
    assert parity.bleu is not None
    assert f"BLEU {parity.bleu[0]:.2f} native" in str(parity)
    assert parity.facts()["bleu"] == parity.bleu[1]

"""Export to Hugging Face: `transformers` loads the directory and computes the same."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from exchange_kit import BASE, LINES, begins_alike, run_readme, tokenizers_of
from model_kit import perturb_weights
from safetensors import SafetensorError

from dragoman.bundle import Bundle, write_bundle
from dragoman.config import Config
from dragoman.errors import BundleError, ConfigError, CorruptError, DiskError
from dragoman.exchange import export
from dragoman.exchange.export import export_hugging_face
from dragoman.exchange.export_parity import Parity
from dragoman.exchange.huggingface_import import import_marian
from dragoman.inference import Translator
from dragoman.models.factory import build_model

transformers = pytest.importorskip("transformers")


def made(path: Path, *, joint: bool = True, **model: Any) -> Path:
    """Write a bundle whose every weight has moved off its first value."""
    config = Config().replace(
        model={**BASE, **model},
        text={"vocab_size": 300, "shared_vocab": joint},
        decode={"max_length_ratio": 1.0, "max_length_extra": 9},
    )
    tokenizers = tokenizers_of(config)
    torch.manual_seed(0)
    net = perturb_weights(
        build_model(
            config.model, src_vocab_size=len(tokenizers.src), tgt_vocab_size=len(tokenizers.tgt)
        )
    )
    write_bundle(path, config=config, tokenizers=tokenizers, weights=net.state_dict(), golden=LINES)
    return path


@pytest.mark.parametrize(
    ("kind", "model"),
    [
        ("Marian", {}),
        ("Marian", {"attention_bias": False, "ffn_bias": False}),
        (
            "Marian",
            {"encoder": ["transformer*2"], "decoder": ["transformer*2"], "share_layers": "all"},
        ),
        ("Marian", {"positions": "sinusoidal_halves", "activation": "swish", "output_bias": True}),
        (
            "Marian",
            {"activation": "gelu", "attention_bias": False, "kv_heads": 2, "norm_epsilon": 1e-5},
        ),
        ("Marian", {"tie_embeddings": "target", "joint": False}),
        ("Marian", {"tie_embeddings": "none", "joint": False, "scale_embeddings": False}),
        ("Marian", {"tie_embeddings": "none"}),
        (
            "Marian",
            {"fix_norm": True, "encoder": ["transformer*3"], "decoder": ["transformer(heads=2)"]},
        ),
        ("Pegasus", {"residual": "pre_norm"}),
        (
            "Pegasus",
            {
                "residual": "pre_norm",
                "positions": "sinusoidal_halves",
                "scale_embeddings": False,
                "output_bias": True,
            },
        ),
    ],
)
def test_transformers_loads_it_and_computes_the_same(
    kind: str, model: dict[str, Any], tmp_path: Path
) -> None:
    bundle = made(tmp_path / "m", **model)
    done = export_hugging_face(bundle, tmp_path / "out")
    assert (done.parity.equal, done.parity.sentences) == (5, 5)
    assert done.parity.difference < 2e-4
    assert json.loads((done.path / "config.json").read_text())["architectures"][0].startswith(kind)
    back = import_marian(done.path, tmp_path / "back").path
    for options in ({}, {"beam": 1}, {"beam": 3, "nbest": 1}):
        assert Translator.load(back).translate(LINES, **options) == Translator.load(
            bundle
        ).translate(LINES, **options), "a round trip"
    assert Bundle.load(back).config.decode == Bundle.load(bundle).config.decode
    assert {"model.safetensors", "vocab.json", "source.spm", "target.spm", "manifest.json"} <= {
        each.name for each in done.path.iterdir()
    }


def test_its_own_classes_and_a_beam_of_its_own_run_from_the_directory_alone(tmp_path: Path) -> None:
    bundle = made(tmp_path / "m", positions="sinusoidal_halves")
    out = export_hugging_face(bundle, tmp_path / "out").path
    from dragoman.exchange.huggingface_runner import quiet_transformers

    with quiet_transformers():
        model = transformers.MarianMTModel.from_pretrained(out)
        tokenizer = transformers.AutoTokenizer.from_pretrained(out)
        ids = model.generate(
            **tokenizer(LINES[:2], return_tensors="pt", padding=True),
            max_new_tokens=10,
            num_beams=1,
        )
    assert begins_alike(run_readme(out), Translator.load(bundle).translate(LINES[:1])[0])
    assert tokenizer(LINES[0]).input_ids[:-1] == Bundle.load(bundle).tokenizers.src.encode(LINES[0])
    decoded = tokenizer.batch_decode(ids, skip_special_tokens=True)
    ours = Translator.load(bundle).translate(LINES[:2], beam=1)
    assert all(
        mine.startswith(its) or its.startswith(mine)
        for mine, its in zip(ours, decoded, strict=True)
    )


@pytest.mark.parametrize(
    ("model", "found"),
    [
        ({"positions": "learned"}, "found Learned"),
        ({"positions": "rotary"}, "found RotaryPositions"),
        ({"activation": "swiglu"}, "found SwiGLU"),
        ({"norm": "rms"}, "found RMSNorm"),
        ({"norm_epsilon": 0.01}, "found 0.01"),
        ({"norm_epsilon": 1e-4}, "found 0.0001"),
        ({"window": 3}, "model.window must be 0, no limit; found 3"),
        ({"qk_norm": "rms"}, "model.qk_norm must be none"),
        ({"head_width": 4}, "head_width=4"),
        ({"residual": "pre_norm", "final_norm": "off"}, "must end in a norm"),
        ({"residual": "pre_norm", "tie_embeddings": "target"}, "model.tie_embeddings=target"),
        ({"decoder": ["lstm"]}, "block 0"),
    ],
)
def test_unsupported_models_are_rejected_with_the_reason(
    model: dict[str, Any], found: str, tmp_path: Path
) -> None:
    bundle = made(tmp_path / "m", **model)
    with pytest.raises(ConfigError) as error:
        export_hugging_face(bundle, tmp_path / "out")
    assert found in str(error.value)
    assert sorted(each.name for each in tmp_path.iterdir()) == ["m"], "nothing is left behind"


def test_generation_is_that_of_the_models_decode_settings(tmp_path: Path) -> None:
    out = export_hugging_face(made(tmp_path / "m"), tmp_path / "out").path
    settings = json.loads((out / "generation_config.json").read_text())
    assert (settings["num_beams"], settings["length_penalty"]) == (4, 0.6)
    assert settings["suppress_tokens"] == [0, 1, 3]
    assert (settings["decoder_start_token_id"], settings["eos_token_id"]) == (1, 2)
    assert settings["max_length"] == 512
    config = json.loads((out / "config.json").read_text())
    assert config["max_position_embeddings"] == 512
    assert config["dragoman"]["data"]["max_length"] == 200
    assert config["dragoman"]["text"] == {"kind": "bpe", "normalisation": "nfc"}
    back = import_marian(out, tmp_path / "back").path
    assert Bundle.load(back).config.data.max_length == 200


def test_existing_path_is_rejected(tmp_path: Path) -> None:
    bundle = made(tmp_path / "m")
    (tmp_path / "out").write_text("mine")
    with pytest.raises(BundleError, match="found a file at"):
        export_hugging_face(bundle, tmp_path / "out")
    assert (tmp_path / "out").read_text() == "mine"


def test_export_with_other_outputs_is_discarded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bundle = made(tmp_path / "m")
    wrong = Parity(program="huggingface", sentences=5, equal=1, difference=0.0)
    monkeypatch.setattr(export, "compare_texts", lambda *_: wrong)
    with pytest.raises(CorruptError, match="found 1 of 5 equal"):
        export_hugging_face(bundle, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_weights_that_cannot_be_written_are_an_error_of_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk that became full was a traceback, for safetensors has an error of its own."""

    def fail(*_: object, **__: object) -> None:
        raise SafetensorError("I/O error: No space left on device (os error 28)")

    monkeypatch.setattr(transformers.PreTrainedModel, "save_pretrained", fail)
    with pytest.raises(DiskError, match="No space left on device"):
        export_hugging_face(made(tmp_path / "m"), tmp_path / "out")
    assert not (tmp_path / "out").exists()

"""Export to ONNX: two graphs, run by onnxruntime alone, write what the model writes; the page's
loop among them.
"""

from __future__ import annotations

import errno
import json
import os
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from exchange_kit import LINES, begins_alike, run_readme, tokenizers_of
from model_kit import perturb_weights

from dragoman.bundle import Bundle, write_bundle
from dragoman.config import Config
from dragoman.decoding.beam_search import BeamSearch
from dragoman.decoding.greedy import GreedySearch
from dragoman.errors import BundleError, ConfigError
from dragoman.exchange import onnx_export as exchange_onnx
from dragoman.exchange.export import export_onnx
from dragoman.exchange.onnx_traced_modules import (
    BATCH,
    PAST,
    SOURCE,
    TracedDecoderStep,
    TracedEncoder,
    example_state,
    find_state_tensors,
)
from dragoman.inference import NativeEngine, SearchRequest, Translator
from dragoman.models.encoder_decoder import EncoderDecoder
from dragoman.models.factory import build_model
from dragoman.storage import disk_space_and_errors
from dragoman.storage.disk_space_and_errors import DiskFullError

pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")

ROOT = Path(__file__).resolve().parents[3]
BASE = {
    "encoder": ["transformer"],
    "decoder": ["transformer"],
    "width": 16,
    "heads": 2,
    "ffn_width": 32,
    "dropout": 0.0,
}


def built(**model: Any) -> tuple[EncoderDecoder, Config]:
    """Build a small model with random weights."""
    config = Config().replace(
        model={**BASE, **model},
        text={"vocab_size": 300},
        decode={"beam": 1, "max_length_ratio": 1.0, "max_length_extra": 9},
    )
    torch.manual_seed(0)
    return build_model(config.model, src_vocab_size=300, tgt_vocab_size=300).eval().requires_grad_(
        False
    ), config


def made(path: Path, **model: Any) -> Path:
    """Write a bundle."""
    net, config = built(**model)
    tokenizers = tokenizers_of(config)
    net = perturb_weights(
        build_model(
            config.model, src_vocab_size=len(tokenizers.src), tgt_vocab_size=len(tokenizers.tgt)
        )
    )
    write_bundle(path, config=config, tokenizers=tokenizers, weights=net.state_dict(), golden=LINES)
    return path


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Export a Transformer once: tracing takes its time."""
    directory = tmp_path_factory.mktemp("onnx")
    bundle = made(directory / "m")
    done = export_onnx(bundle, directory / "out")
    assert (done.parity.equal, done.parity.sentences) == (5, 5)
    assert done.parity.difference < 1e-4
    return bundle, done.path


def test_the_engine_over_the_graphs_is_ours_with_limits_and_prefixes(
    exported: tuple[Path, Path],
) -> None:
    from dragoman.exchange.onnx_runner import OnnxRuntimeEngine

    loaded, engine = Bundle.load(exported[0]), OnnxRuntimeEngine(exported[1])
    native, tokenizers = NativeEngine(lambda: loaded.model), loaded.tokenizers
    prefix = tokenizers.tgt.encode("EINE")
    sources = [tokenizers.src.encode(line) for line in LINES]
    for prefixes, min_length in (([[]] * 5, 0), ([prefix, [], prefix * 3, [], []], 3)):
        query = SearchRequest(
            sources=sources,
            limits=[3, 20, 7, 12, 1],
            prefixes=prefixes,
            strategy=GreedySearch(),
            sample_ids=range(5),
            min_length=min_length,
        )
        for [ours], [theirs] in zip(native.generate(query), engine.generate(query), strict=True):
            assert (ours.tokens, ours.finished) == (theirs.tokens, theirs.finished)
            assert theirs.log_probs == pytest.approx(ours.log_probs, abs=2e-5)
    assert "beam" in engine.unsupported_reason(BeamSearch(2))
    assert "1024" in engine.unsupported_reason(GreedySearch(), 5000)


def test_batches_of_one_and_lengths_that_were_not_traced(exported: tuple[Path, Path]) -> None:
    import onnxruntime

    model, facts = (
        Bundle.load(exported[0]).model,
        json.loads((exported[1] / "model.json").read_text()),
    )
    encoder, step = (
        onnxruntime.InferenceSession(str(exported[1] / name))
        for name in ("encoder.onnx", "decoder_step.onnx")
    )
    for rows, length in ((1, 1), (2, 17)):
        src = torch.randint(4, 100, (rows, length))
        mask = torch.arange(length) < torch.tensor([[length], [3]])[:rows]
        found = encoder.run(None, {"src": src.numpy(), "mask": mask.numpy()})
        state = {each["name"]: value for each, value in zip(facts["state"], found, strict=True)}
        ours = model.start(model.encode(src, mask))
        for number in range(5):
            tokens = torch.randint(4, 100, (rows,))
            results = step.run(
                None,
                {
                    each.name: {"tokens": tokens.numpy(), **state}[each.name]
                    for each in step.get_inputs()
                },
            )
            named = dict(zip([each.name for each in step.get_outputs()], results, strict=True))
            logits, ours = model.step(tokens, ours)
            np.testing.assert_allclose(named.pop("logits"), logits.numpy(), atol=2e-5)
            state |= {name.removeprefix("new_"): value for name, value in named.items()}
            assert state["decoder_0_cache_key_value"].shape[-2] == number + 1


def test_the_loop_on_the_page_reproduces_the_models_output(
    exported: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    page = (ROOT / "docs" / "export.md").read_text("utf-8")
    [code] = [
        block
        for block in re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL)
        if "onnxruntime" in block
    ]
    names: dict[str, Any] = {}
    exec(code.replace('"my-model-onnx"', repr(str(exported[1]))), names)
    capsys.readouterr()
    ours = Translator.load(exported[0], engine="native").translate(LINES)
    for line, mine in zip(LINES, ours, strict=True):
        limit = len(Bundle.load(exported[0]).tokenizers.src.encode(line)) + 9
        assert names["translate"](line, max_length=limit).strip() == mine.strip()


def test_the_readme_runs_as_it_is(exported: tuple[Path, Path]) -> None:
    ours = Translator.load(exported[0], engine="native").translate(LINES[:1], beam=1)[0]
    assert begins_alike(run_readme(exported[1]), ours)


FAMILIES: dict[str, dict[str, Any]] = {
    "rotary, grouped, gated": {
        "positions": "rotary",
        "kv_heads": 1,
        "activation": "swiglu",
        "norm": "rms",
        "residual": "pre_norm",
    },
    "t5's buckets": {"positions": "t5"},
    "values of another width": {"value_width": 5},
    "widths of their own": {
        "encoder": ["conv(width=24)*2", "conv(width=40, kernel_size=1)"],
        "decoder": ["conv(width=24, dilation=2)*2", "conv(width=40)"],
        "positions": "none",
    },
    "recurrent": {
        "encoder": ["bilstm"],
        "decoder": ["lstm(attention=additive)"],
        "positions": "none",
    },
    "both": {"encoder": ["transformer", "bigru"], "decoder": ["gru(attention=dot)", "transformer"]},
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [name for name in FAMILIES if name not in ("both", "widths of their own")]
)
def test_other_families_are_exported_or_rejected_with_the_reason(name: str, tmp_path: Path) -> None:
    """Torch unrolls a recurrent encoder at the length that it is traced with, so its graph holds
    for no other.
    """
    bundle = made(tmp_path / "m", **FAMILIES[name])
    if name == "recurrent":
        with pytest.raises(
            ConfigError, match="must be one that torch traces for every length; found "
        ):
            export_onnx(bundle, tmp_path / "out")
        assert not (tmp_path / "out").exists()
    else:
        assert export_onnx(bundle, tmp_path / "out").parity.equal_fraction == 1.0


def test_an_export_error_names_its_first_cause() -> None:
    """torch.export wraps the cause in advice with terminal colors."""
    advice = RuntimeError("\x1b[96mThis is step 1/3\x1b[0m of exporting")
    advice.__cause__ = ValueError("a\nlist")
    with (
        pytest.raises(ConfigError, match="found ValueError: a list; the native engine runs"),
        exchange_onnx.raising_export_errors(Config()),
    ):
        raise advice


@pytest.mark.parametrize("name", FAMILIES)
def test_the_graphs_before_tracing_step_as_the_model_does(name: str) -> None:
    """What is traced is this: a state taken apart into tensors, put together again, and grown by
    joining.
    """
    model, _ = built(**FAMILIES[name])
    slots = find_state_tensors(model)
    src, mask = torch.randint(4, 300, (2, 6)), torch.arange(6) < torch.tensor([[6], [4]])
    tensors = list(TracedEncoder(model, slots)(src, mask))
    step, ours = TracedDecoderStep(model, slots), model.start(model.encode(src, mask))
    for _ in range(4):
        tokens = torch.randint(4, 300, (2,))
        logits, *new = step(tokens, tensors)
        expected, ours = model.step(tokens, ours)
        torch.testing.assert_close(logits, expected)
        changed = iter(new)
        tensors = [
            old if slot.is_read_only else next(changed)
            for slot, old in zip(slots, tensors, strict=True)
        ]


def test_growing_axes_are_found_by_trying_two_sizes() -> None:
    model, _ = built()
    by_name = {slot.label: slot.axes for slot in find_state_tensors(model)}
    assert by_name["decoder_0_cache_key_value"] == {0: BATCH, 3: PAST}
    assert by_name["decoder_0_memory_key_value"] == {0: BATCH, 3: SOURCE}
    assert [each.size(0) for each in example_state(model, find_state_tensors(model))] == [3, 3, 3]


def test_untraceable_model_is_rejected_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, config = built()

    def fail(*_: object) -> None:
        raise RuntimeError("an operator\nthat it lacks")

    monkeypatch.setattr(exchange_onnx, "_export_graph", fail)
    with pytest.raises(
        ConfigError,
        match=r"\(transformer, transformer\).*found RuntimeError: an operator that it lacks",
    ):
        exchange_onnx.save_onnx(model, config, tmp_path)


def test_positions_without_a_cache_are_rejected(tmp_path: Path) -> None:
    model, config = built(
        encoder=["bilstm"], decoder=["lstm(attention=additive)"], positions="sinusoidal"
    )
    with pytest.raises(ConfigError, match=r"found model\.positions=sinusoidal without one"):
        exchange_onnx.save_onnx(model, config, tmp_path)


def test_existing_path_is_rejected(tmp_path: Path) -> None:
    bundle = made(tmp_path / "m")
    with pytest.raises(BundleError, match="a directory with files at"):
        export_onnx(bundle, bundle)


def test_a_full_disk_is_not_an_error_of_the_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bundle = made(tmp_path / "m")

    def fail(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(torch.onnx, "export", fail)
        with pytest.raises(DiskFullError, match="No space left on device"):
            export_onnx(bundle, tmp_path / "out")
    monkeypatch.setattr(disk_space_and_errors, "free_disk_bytes", lambda path: 1000)
    with pytest.raises(DiskFullError, match=r"an export must fit .* found 1\.0 kB free"):
        export_onnx(bundle, tmp_path / "out")
    assert not (tmp_path / "out").exists()

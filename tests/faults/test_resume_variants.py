"""Resuming is bit-exact for models that share, drop or factorize weights."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from training_kit import assert_same_run, tensors_of, tiny_model, tiny_trainer

from dragoman.checkpoint.run_directory import RunDirectory
from dragoman.models.factory import count_parameters
from dragoman.runtime import signals

DEEP = {"encoder": ("transformer*3",), "decoder": ("transformer*3",)}
VARIANTS: dict[str, dict[str, object]] = {
    "shared": {**DEEP, "share_layers": "all"},
    "shared attention": {**DEEP, "share_layers": "attention", "positions": "transformer_xl"},
    "left out": {**DEEP, "layer_drop": 0.5},
    "shared and left out": {**DEEP, "share_layers": "all", "layer_drop": 0.5},
    "factorised, of length one": {"embedding_width": 4, "fix_norm": True, "norm": "scale"},
    "talking in a window": {"talking_heads": True, "window": 2},
}


@pytest.fixture(autouse=True)
def _no_requests():
    yield
    signals.uninstall_handlers()


def run(
    path: Path,
    model: dict[str, object],
    *,
    stop_after: int = 0,
    resume: bool = False,
    **settings: object,
) -> None:
    def on_record(record):
        if "event" not in record and record["step"] == stop_after:
            signals.request_stop("a test")

    with RunDirectory(path) as directory:
        tiny_trainer(
            directory,
            model=model,
            parts={"on_record": on_record},
            steps=6,
            checkpoint_every=3,
            **settings,
        ).fit(resume=resume)
    signals.uninstall_handlers()


@pytest.mark.parametrize("name", VARIANTS)
def test_stopped_and_resumed(tmp_path: Path, name: str) -> None:
    """A layer that layer drop left out of the first step has optimizer state too."""
    model = VARIANTS[name]
    run(tmp_path / "whole", model)
    run(tmp_path / "cut", model, stop_after=1)
    run(tmp_path / "cut", model, resume=True)
    assert_same_run(tmp_path / "whole", tmp_path / "cut")
    saved = {
        key: tensor
        for key, tensor in tensors_of(tmp_path / "whole").items()
        if key.startswith("weights/")
    }
    assert sum(tensor.numel() for tensor in saved.values()) == count_parameters(tiny_model(**model))


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_stopped_and_resumed_with_sgd(tmp_path: Path, momentum: float) -> None:
    options = {"optimizer": "sgd", "momentum": momentum, "learning_rate": 0.1}
    run(tmp_path / "whole", {}, **options)
    run(tmp_path / "cut", {}, stop_after=1, **options)
    run(tmp_path / "cut", {}, resume=True, **options)
    assert_same_run(tmp_path / "whole", tmp_path / "cut")
    slots = {
        key.rpartition(".")[2] for key in tensors_of(tmp_path / "whole") if "optimizer/" in key
    }
    assert slots == ({"momentum_buffer"} if momentum else set())


@pytest.mark.parametrize("name", ["shared", "factorised, of length one"])
def test_weights_load_into_a_meta_model(tmp_path: Path, name: str) -> None:
    """As a bundle is loaded: built on the meta device, then filled."""
    run(tmp_path / "whole", VARIANTS[name])
    weights = {
        key.partition("/")[2]: tensor
        for key, tensor in tensors_of(tmp_path / "whole").items()
        if key.startswith("weights/")
    }
    plain, laid_out = tiny_model(**VARIANTS[name]), None
    plain.load_state_dict(weights)
    with torch.device("meta"):
        laid_out = tiny_model(**VARIANTS[name])
    assert set(laid_out.state_dict()) == set(weights)
    laid_out.load_state_dict(weights, assign=True)
    src, tgt = torch.randint(4, 24, (2, 5)), torch.randint(4, 24, (2, 6))
    torch.testing.assert_close(laid_out.eval()(src, tgt), plain.eval()(src, tgt), rtol=0, atol=0)
    assert count_parameters(laid_out) == count_parameters(plain)

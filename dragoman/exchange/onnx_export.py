"""Export to ONNX: `encoder.onnx`, and `decoder_step.onnx` with an explicit KV cache; no search.

The encoder returns the decoder's initial state, cross-attention keys and values included. A decoder
step takes the state and one token per row, and returns the logits of the next token and the new
state. The first step is like any other: its KV cache is empty.
"""

from __future__ import annotations

import contextlib
import io
import json
import logging
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from dragoman.config import Config
from dragoman.errors import ConfigError, DragomanError
from dragoman.exchange.onnx_traced_modules import (
    BATCH,
    PAST,
    SOURCE,
    StateTensor,
    TracedDecoderStep,
    TracedEncoder,
    example_state,
    find_state_tensors,
)
from dragoman.exchange.transformer_export_spec import NATIVE_HINT, require_two_stacks
from dragoman.models.encoder_decoder import EncoderDecoder
from dragoman.runtime.optional_package_checks import require_packages
from dragoman.storage.atomic_and_safe_file_io import native_path
from dragoman.text.special_tokens import BOS, EOS, PAD, UNK

ENCODER, DECODER_STEP, DESCRIPTION = "encoder.onnx", "decoder_step.onnx", "model.json"


def save_onnx(model: EncoderDecoder, config: Config, directory: Path) -> None:
    """Write two ONNX graphs, and `model.json` with the names that a decoding loop needs."""
    require_packages("onnx", "onnxscript", "onnxruntime")
    require_two_stacks(model, "ONNX")
    with raising_export_errors(config):
        slots = find_state_tensors(model)
        _require_position_cache(slots, config)
        _export_graph(
            TracedEncoder(model, slots),
            _encoder_inputs(),
            _encoder_names(slots),
            directory / ENCODER,
        )
        tensors = example_state(model, slots)
        _export_graph(
            TracedDecoderStep(model, slots),
            _step_inputs(slots, tensors),
            _step_names(slots),
            directory / DECODER_STEP,
        )
    description = {
        "format": 1,
        "dtype": "float32",
        "state": [
            {"name": slot.label, "only_read": slot.is_read_only, "grows": slot.kind == "cache"}
            for slot in slots
        ],
        "pad": PAD,
        "bos": BOS,
        "eos": EOS,
        "unk": UNK,
        "most_positions": max_exported_positions(config),
    }
    (directory / DESCRIPTION).write_text(json.dumps(description, indent=1) + "\n", encoding="utf-8")


@contextlib.contextmanager
def raising_export_errors(config: Config) -> Iterator[None]:
    """Convert any error of torch or onnxruntime: neither has its own for unsupported models.

    One of the disk is none of the model.
    """
    try:
        yield
    except (DragomanError, OSError):
        raise
    except Exception as error:
        found = _describe_cause(error)
        blocks = ", ".join((*config.model.encoder, *config.model.decoder))
        must = (
            f"to be exported to ONNX a model ({blocks}) must be one "
            "that torch traces for every length"
        )
        raise ConfigError([f"{must}; found {found}; {NATIVE_HINT}"]) from error


def _describe_cause(error: BaseException) -> str:
    """Return the first error of a chain in one line: torch's own is advice in terminal colors."""
    while error.__cause__ is not None:
        error = error.__cause__
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]


def max_exported_positions(config: Config) -> int:
    """Return the maximum number of positions of the graphs: position tables are finite."""
    return min(config.model.max_positions, 2048)


def _require_position_cache(slots: Sequence[StateTensor], config: Config) -> None:
    """Raise for a model with positions whose state has no cache that holds its length."""
    added = config.model.positions in ("sinusoidal", "sinusoidal_halves", "learned")
    if added and not any(slot.kind == "cache" for slot in slots):
        raise ConfigError(
            [
                "to be exported to ONNX a model with positions must keep a cache, "
                "whose length is its position; "
                f"found model.positions={config.model.positions} without one; {NATIVE_HINT}"
            ]
        )


def _encoder_inputs() -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return example inputs of the encoder, and their dynamic axes."""
    src = torch.full((3, 5), 4)
    mask = torch.arange(5) < torch.tensor([[5], [3], [4]])
    batch, source = torch.export.Dim(BATCH), torch.export.Dim(SOURCE)
    return (src, mask), {"src": {0: batch, 1: source}, "mask": {0: batch, 1: source}}


def _step_inputs(
    slots: Sequence[StateTensor], tensors: list[torch.Tensor]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return example inputs of a decoder step, and their dynamic axes."""
    dims = {
        BATCH: torch.export.Dim(BATCH),
        SOURCE: torch.export.Dim(SOURCE),
        PAST: torch.export.Dim(PAST),
    }
    grown = [{axis: dims[what] for axis, what in slot.axes.items()} for slot in slots]
    return (torch.full((3,), 5), tensors), {"tokens": {0: dims[BATCH]}, "tensors": grown}


def _encoder_names(slots: Sequence[StateTensor]) -> tuple[list[str], list[str]]:
    """Return the names of the encoder's inputs and outputs."""
    return ["src", "mask"], [slot.label for slot in slots]


def _step_names(slots: Sequence[StateTensor]) -> tuple[list[str], list[str]]:
    """Return the names of a step's inputs and outputs: X becomes new_X."""
    return ["tokens", *(slot.label for slot in slots)], [
        "logits",
        *(f"new_{slot.label}" for slot in slots if not slot.is_read_only),
    ]


def _export_graph(
    graph: torch.nn.Module,
    inputs: tuple[tuple[Any, ...], dict[str, Any]],
    names: tuple[list[str], list[str]],
    path: Path,
) -> None:
    """Trace one graph and write it as a single file."""
    arguments, shapes = inputs
    with _quiet_exporter(), torch.no_grad():
        program = torch.onnx.export(
            graph.eval(),
            arguments,
            dynamo=True,
            dynamic_shapes=shapes,
            input_names=names[0],
            output_names=names[1],
            verbose=False,
        )
        assert program is not None, "the dynamo exporter must return a program"
        with native_path(path.parent) as folder:
            program.save(str(Path(folder, path.name)), external_data=False)


@contextlib.contextmanager
def _quiet_exporter() -> Iterator[None]:
    """Redirect the exporter's printed progress away from stdout."""
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with (
            warnings.catch_warnings(),
            contextlib.redirect_stdout(io.StringIO()),
            contextlib.redirect_stderr(io.StringIO()),
        ):
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)

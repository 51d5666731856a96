"""A loaded bundle: configuration and tokenizers immediately, the model on first use."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dragoman.bundle import format as layout
from dragoman.bundle.golden_vectors import (
    GoldenInput,
    check_golden,
    has_discrete_attention,
    largest_error,
    read_golden_cases,
)
from dragoman.bundle.reader import (
    BundleContents,
    listed_fields,
    manifest_parameters,
    read_bundle,
    read_finite_tensors,
    require_task,
)
from dragoman.config import Config
from dragoman.config.root_config import TRANSLATE
from dragoman.config.translation_directions import parse_directions
from dragoman.errors import BundleError, ConfigError
from dragoman.models.block_validation import count_layers
from dragoman.models.encoder_decoder import EncoderDecoder
from dragoman.models.factory import build_meta_model
from dragoman.storage.atomic_and_safe_file_io import read_regular
from dragoman.storage.tensor_files import read_header
from dragoman.text.language_identification import LanguageIdentifier
from dragoman.text.sentencepiece_tokenizer import Tokenizers, load_tokenizers


class Bundle:
    """A verified model directory."""

    def __init__(
        self, contents: BundleContents, *, device: str | torch.device = "cpu", check: bool = True
    ) -> None:
        require_task(contents, TRANSLATE)
        self.path, self.config = contents.path, contents.config
        self.tokenizers = load_tokenizers(contents.path / layout.TEXT, contents.text_files)
        self.card, self.manifest, self.golden = contents.card, contents.manifest, contents.golden
        self.calibration = contents.calibration
        self._device, self._check = torch.device(device), check
        self._text_files = contents.text_files

    @classmethod
    def load(
        cls, path: str | Path, *, device: str | torch.device = "cpu", check_golden: bool = True
    ) -> Bundle:
        """Read and verify a bundle; weights are hashed now and loaded on first use of `model`."""
        return cls(read_bundle(Path(path)), device=device, check=check_golden)

    def __repr__(self) -> str:
        """Return the directory, recipe and number of parameters."""
        recipe = f"{self.config.recipe or 'none':.60}"
        return f"Bundle({str(self.path)!r}, recipe {recipe}, {self.parameters:,} parameters)"

    @functools.cached_property
    def model(self) -> EncoderDecoder:
        """The model in evaluation mode, weights loaded and golden vectors checked."""
        weights = read_weights(self.path / layout.WEIGHTS, self.config, self.tokenizers)
        model = build_loaded_model(self.config, self.tokenizers, weights)
        if self._check:
            # Discrete choices, such as LSH buckets, may differ on another device.
            device = torch.device("cpu") if has_discrete_attention(model) else self._device
            path = str(self.path / layout.GOLDEN)
            check_golden(model.to(device), self.tokenizers, self.golden, path)
        return model.to(self._device)

    @functools.cached_property
    def identifier(self) -> LanguageIdentifier | None:
        """The classifier of source languages of a multilingual model; None for others."""
        return read_identifier(self.path / layout.TEXT, self._text_files)

    @property
    def default_target(self) -> str | None:
        """The target language of the first direction of a multilingual model; None for others."""
        directions = parse_directions(self.config.data.directions)
        return directions[0].target if directions else None

    @property
    def golden_cases(self) -> Sequence[Mapping[str, Any]]:
        """The golden vectors; raise BundleError for values that are not valid."""
        sizes = len(self.tokenizers.src), len(self.tokenizers.tgt)
        return read_golden_cases(self.golden, *sizes, str(self.path / layout.GOLDEN))

    def golden_inputs(self) -> list[str | GoldenInput]:
        """Return the inputs of the golden vectors, with their target languages."""
        return [
            GoldenInput(case["input"], case.get("target_language", ""))
            for case in self.golden_cases
        ]

    def golden_error(
        self, score: Callable[[list[list[int]], list[list[int]]], list[list[float]]]
    ) -> float:
        """Return the largest error of the log-probabilities that an engine gives the golden pairs.

        `score` takes the tokens of sources and targets.
        """
        cases = self.golden_cases
        found = score([case["src"] for case in cases], [case["tgt"] for case in cases])
        return largest_error(cases, found)

    @property
    def parameters(self) -> int:
        """The number of parameters in the manifest; 0 if it has none."""
        return manifest_parameters(self.manifest)

    def manifest_fields(self) -> Mapping[str, Any]:
        """Return the manifest without its file list: release, parameters and further fields."""
        return listed_fields(self.manifest)


def read_identifier(folder: Path, names: Collection[str]) -> LanguageIdentifier | None:
    """Read the language classifier of a folder of text files; None if it is not in `names`."""
    if layout.LANGUAGE_ID not in names:
        return None
    path = folder / layout.LANGUAGE_ID
    limit = layout.MAX_FILE_BYTES[f"{layout.TEXT}/{layout.LANGUAGE_ID}"]
    return LanguageIdentifier.from_bytes(read_regular(path, limit), str(path))


def expected_weights(config: Config, tokenizers: Tokenizers) -> dict[str, Tensor]:
    """Return the weights of the architecture as meta tensors: names, shapes and dtypes."""
    expected = dict(_build_meta(config, tokenizers).state_dict())
    count = sum(tensor.numel() for tensor in expected.values())
    if count > layout.MAX_PARAMETERS:
        raise BundleError(
            f"a model must have at most {layout.MAX_PARAMETERS:,} parameters",
            found=f"{count:,}",
            fix="check config.json",
        )
    return expected


def read_weights(path: Path, config: Config, tokenizers: Tokenizers) -> dict[str, Tensor]:
    """Read weights; names, shapes and dtypes are checked before anything is allocated."""
    # Bytes of one embedding in int8: a small file cannot make us build a large model.
    least = config.model.resolved_embedding_width * len(tokenizers.tgt)
    if least > path.stat().st_size:
        found = f"{path.stat().st_size} bytes for a model.width of {config.model.width}"
        raise BundleError(
            f"{path} must hold the model's embeddings, {least} bytes",
            found=found,
            fix="copy the model directory again",
        )
    try:
        _require_enough_tensors(path, config)
        expected = expected_weights(config, tokenizers)
    except ConfigError as error:
        must = f"{path.parent / layout.CONFIG} must describe a model that can be built"
        raise BundleError(
            must, found="; ".join(error.problems), fix="use the dragoman that wrote it"
        ) from error
    return read_finite_tensors(path, expected)


def _require_enough_tensors(path: Path, config: Config) -> None:
    """Raise BundleError if a file has fewer tensors than the model has layers."""
    layers, tensors = count_layers(config.model), len(read_header(path))
    if layers > tensors:
        raise BundleError(
            f"{path} must hold the weights of the model's {layers:,} layers",
            found=f"{tensors:,} tensors",
            fix="copy the model directory again",
        )


def build_loaded_model(
    config: Config, tokenizers: Tokenizers, weights: Mapping[str, Tensor]
) -> EncoderDecoder:
    """Build a model with the given weights, on the CPU, in evaluation mode."""
    model = _build_meta(config, tokenizers)
    model.load_state_dict(dict(weights), assign=True)
    return model.eval().requires_grad_(False)


def _build_meta(config: Config, tokenizers: Tokenizers) -> EncoderDecoder:
    """Build the model on the meta device."""
    return build_meta_model(
        config.model, src_vocab_size=len(tokenizers.src), tgt_vocab_size=len(tokenizers.tgt)
    )

"""Convert a model for the CPU: to the C++ kernels or to PyTorch, in float32 or calibrated int8.

In int8 all linear layers, the output projection too, have int8 weights; embeddings and norms stay
in float32. `packed_linear.py` is for PyTorch, `cpp_weight_packing.py` for the C++ kernels.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from dragoman.data.inference_batches import pad_sources
from dragoman.inference.cpu.cpp_kernel_library_loader import load_kernel_library
from dragoman.inference.cpu.cpp_transformer import CppTransformer
from dragoman.inference.cpu.cpp_weight_packing import cpp_unsupported_reason
from dragoman.inference.cpu.packed_linear import (
    ActivationRange,
    LinearFunction,
    int8_linear,
    int8_unsupported_reason,
    packed_linear,
    plain_linear,
)
from dragoman.inference.cpu.packed_weight_torch_transformer import (
    TorchTransformer,
    torch_unsupported_reason,
)
from dragoman.models.encoder_decoder import EncoderDecoder
from dragoman.text.special_tokens import BOS, SPECIAL_TOKENS

FLOAT32, INT8, FLOAT16, BFLOAT16 = "float32", "int8", "float16", "bfloat16"
HALF_PRECISIONS = (FLOAT16, BFLOAT16)  # on a GPU only
PRECISIONS = (FLOAT32, INT8, *HALF_PRECISIONS)

TokenPair = tuple[Sequence[int], Sequence[int]]  # token ids of a source and its output

_RANDOM_SENTENCES, _RANDOM_LENGTH = 16, 16  # calibration sentences of random tokens


class ConversionResult(NamedTuple):
    """The converted model; None if it must run as it is.

    If the precision is unsupported, the reason, and a conversion to float32 if there is one.
    """

    model: TorchTransformer | CppTransformer | None
    unsupported_reason: str = ""


def convert_model(
    model: EncoderDecoder, precision: str, pairs: Sequence[TokenPair] = ()
) -> ConversionResult:
    """Convert a model for the CPU; `pairs` of sentences calibrate the int8 activation ranges."""
    unsupported_reason = torch_unsupported_reason(model)
    if unsupported_reason:
        return ConversionResult(None, unsupported_reason)
    library = None if cpp_unsupported_reason(model) else load_kernel_library()
    if precision == INT8:
        unsupported_reason = int8_unsupported_reason()
        if library is not None and library.dragoman_has_int8():
            return ConversionResult(
                CppTransformer(model, library, iter(_calibrate_ranges(model, pairs)))
            )
        if not unsupported_reason:
            ranges = iter(_calibrate_ranges(model, pairs))
            return ConversionResult(
                TorchTransformer(
                    model,
                    lambda weight, bias, *, relu=False: int8_linear(
                        weight, bias, next(ranges), relu=relu
                    ),
                )
            )
    return ConversionResult(
        TorchTransformer(model, packed_linear)
        if library is None
        else CppTransformer(model, library),
        unsupported_reason,
    )


def _calibrate_ranges(model: EncoderDecoder, pairs: Sequence[TokenPair]) -> list[ActivationRange]:
    """Return the input range of each linear layer, in the order of packing."""
    observer = _RangeObserver()
    transformer = TorchTransformer(model, observer)
    vocabularies = [len(model._embedding(side).weight) for side in ("src", "tgt")]
    for src, tgt in [*pairs, *_random_pairs(*vocabularies)]:
        _run_pair(transformer, src, tgt)
    return observer.ranges


class _RangeObserver:
    """Builds plain linear layers that record the range of their inputs, in order."""

    def __init__(self) -> None:
        self.ranges: list[ActivationRange] = []

    def __call__(
        self, weight: Tensor, bias: Tensor | None, *, relu: bool = False
    ) -> LinearFunction:
        """Build a linear layer that records the range of its inputs."""
        number, linear = len(self.ranges), plain_linear(weight, bias, relu=relu)
        self.ranges.append(ActivationRange(0.0, 0.0))

        def observed(x: Tensor) -> Tensor:
            low, high = self.ranges[number]
            bounds = (float(x.min()), float(x.max()))
            finite_bounds = [
                each for each in bounds if math.isfinite(each)
            ]  # overflow has no scale
            self.ranges[number] = ActivationRange(
                min([low, *finite_bounds]), max([high, *finite_bounds])
            )
            return linear(x)

        return observed


@torch.inference_mode()
def _run_pair(transformer: TorchTransformer, src: Sequence[int], tgt: Sequence[int]) -> None:
    """Run a source and its output through every linear layer."""
    state = transformer.start(transformer.encode(*pad_sources([src])))
    for token in [BOS, *tgt]:
        _, state = transformer.step(torch.tensor([token]), state)


def _random_pairs(src_vocab_size: int, tgt_vocab_size: int) -> list[TokenPair]:
    """Return sentences of random tokens, always the same: a bundle has few of its own."""
    generator = torch.Generator().manual_seed(0)

    def draw(vocabulary: int) -> list[int]:
        return torch.randint(
            min(len(SPECIAL_TOKENS), vocabulary - 1),
            vocabulary,
            (_RANDOM_LENGTH,),
            generator=generator,
        ).tolist()

    return [(draw(src_vocab_size), draw(tgt_vocab_size)) for _ in range(_RANDOM_SENTENCES)]

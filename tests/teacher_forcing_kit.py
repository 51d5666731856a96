"""Small models and pairs for tests of teacher forcing and of the explanations computed with it."""

from __future__ import annotations

import torch
from model_kit import perturb_weights

from dragoman.config import ModelConfig
from dragoman.explain.head_ablation import HeadEffect, head_batches, measure_head_batch
from dragoman.explain.teacher_forced_pass import TeacherForcedPair
from dragoman.models.encoder_decoder import EncoderDecoder
from dragoman.models.factory import build_model
from dragoman.models.language_model import NeuralLanguageModel, build_language_model
from dragoman.text.special_tokens import EOS

VOCABULARY = 23
SIZES = {"width": 16, "heads": 2, "ffn_width": 24, "dropout": 0.0, "attention_dropout": 0.0}


def blocks(text: str) -> tuple[str, ...]:
    """Return the blocks of a text such as "lstm + transformer*2"."""
    return tuple(part.strip() for part in text.split("+")) if text else ()


def tiny_model(
    encoder: str = "transformer*2", decoder: str = "transformer*2", **changes: object
) -> EncoderDecoder:
    """Build a model of a few thousand weights, all off their first values."""
    stacks = {"encoder": blocks(encoder), "decoder": blocks(decoder)}
    settings = {**SIZES, **stacks, **changes}
    torch.manual_seed(0)
    model = build_model(
        ModelConfig(**settings),  # type: ignore[arg-type]
        src_vocab_size=VOCABULARY,
        tgt_vocab_size=VOCABULARY,
    )
    return perturb_weights(model, 0.3).eval().requires_grad_(False)


def tiny_language_model(decoder: str = "transformer*2", **changes: object) -> NeuralLanguageModel:
    """Build a language model of a few thousand weights."""
    settings = {**SIZES, "encoder": (), "decoder": blocks(decoder), **changes}
    torch.manual_seed(0)
    model = build_language_model(ModelConfig(**settings), vocab_size=VOCABULARY)  # type: ignore[arg-type]
    return perturb_weights(model, 0.3).eval().requires_grad_(False)


def tiny_pair(
    model: EncoderDecoder | NeuralLanguageModel, src: int = 5, tgt: int = 6, seed: int = 1
) -> TeacherForcedPair:
    """Return a random source and target of some lengths, each with its end of sentence."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(4, VOCABULARY, (src + tgt,), generator=generator).tolist()
    is_language_model = isinstance(model, NeuralLanguageModel)
    source = None if is_language_model else [*ids[: src - 1], EOS]
    return TeacherForcedPair.build(model, source, [*ids[src : src + tgt - 1], EOS])


def measure_head_effects(pair: TeacherForcedPair) -> list[HeadEffect]:
    """Return the effect of each head that is off alone, the decoder's heads first."""
    batches = head_batches(pair)
    return [effect for batch in batches for effect in measure_head_batch(pair, batch)]

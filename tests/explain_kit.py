"""Small translators of several families with random weights, for tests of explanations."""

from __future__ import annotations

import functools

import torch

from dragoman.config import read_config
from dragoman.inference import Translator
from dragoman.models.factory import build_model
from dragoman.text.sentencepiece_tokenizer import train_tokenizers

LINES = ["das haus", "ein hund", "a", "hund und haus"] * 9
TEXT = "hund und haus"


@functools.cache
def explained_translator(name: str) -> Translator:
    """Build a small translator of a family once; its weights, biases too, are random."""
    blocks = {
        "transformer": ["model.encoder=[transformer*2]", "model.decoder=[transformer*2]"],
        "shaw": [
            "model.encoder=[transformer*2]",
            "model.decoder=[transformer*2]",
            "model.positions=shaw",
        ],
        "nested": [
            "model.encoder=[reformer(layers=2), transformer]",
            "model.decoder=[lstm, cross_attention, transformer]",
        ],
        "reformer": [
            "model.encoder=[reformer(layers=2, buckets=4)]",
            "model.decoder=[reformer(layers=2, buckets=4)]",
        ],
        "prefix_lm": [
            "model.architecture=prefix_lm",
            "model.encoder=[]",
            "model.decoder=[transformer*2]",
        ],
        "monotonic": [
            "model.encoder=[bilstm]",
            "model.decoder=[lstm(attention=additive, alignment=monotonic)]",
        ],
        "location": [
            "model.encoder=[bigru]",
            "model.decoder=[gru(attention=additive, alignment=location_sensitive)]",
        ],
        "summary": ["model.encoder=[bilstm]", "model.decoder=[lstm]"],
        "convs2s": ["model.encoder=[conv*2]", "model.decoder=[conv*2]"],
        "rnn": ["model.encoder=[bilstm]", "model.decoder=[lstm(attention=additive)]"],
    }[name]
    config = read_config(
        overrides=[
            *blocks,
            "model.width=16",
            "model.heads=2",
            "model.ffn_width=32",
            "text.vocab_size=300",
            "text.tokenizer=characters",
            "text.shared_vocab=false",
            "model.tie_embeddings=target",
            "decode.max_length_ratio=0.5",
            "decode.max_length_extra=2",
        ]
    )
    tokenizers = train_tokenizers(LINES, [line.upper() for line in LINES], config.text)
    torch.manual_seed(7)
    model = build_model(
        config.model, src_vocab_size=len(tokenizers.src), tgt_vocab_size=len(tokenizers.tgt)
    ).eval()
    with torch.no_grad():  # biases are zero at first: an error in them would not show
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return Translator(model, tokenizers, config)

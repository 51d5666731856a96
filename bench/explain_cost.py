"""Time what explaining one sentence costs on one core, part by part.

    python bench/explain_cost.py [--tokens 32] [--beam 4] [--layers 6] [--width 512] [--repeats 3]

The model is a Transformer with random weights, so that every output has as many tokens as its
source; the vocabulary is learned from random words. Each part is a function that the explanation
calls; `rest` is the time outside of all parts. It prints medians and one line of JSON.
"""

from __future__ import annotations

import argparse
import functools
import json
import random
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from dragoman.config import Config, read_config
from dragoman.explain import explanation_json, translation_explanation_builder
from dragoman.explore.html_export import export_html
from dragoman.inference import Translator
from dragoman.inference.single_batch_translator import BatchTranslator
from dragoman.models.factory import build_model
from dragoman.text.sentencepiece_tokenizer import train_tokenizers

LIMIT_SECONDS = 2.5
LIMIT_BYTES, LIMIT_HTML_BYTES = 1_000_000, 2_000_000  # of 32 tokens
# Parts of an explanation: where a function is called from, its name there, and what it does.
PARTS: list[tuple[Any, str, str]] = [
    (BatchTranslator, "trace_search", "beam search"),
    (translation_explanation_builder, "capture_pair", "capture: weights, contributions, logits"),
    (translation_explanation_builder, "_check_capture", "checks: a second pass"),
    (translation_explanation_builder, "build_steps", "steps"),
    (translation_explanation_builder, "tokenize_text", "token spans"),
    (translation_explanation_builder, "summarize_heads", "head labels"),
    (translation_explanation_builder, "attribute_with_heads", "attribution and estimated effects"),
    (translation_explanation_builder, "read_logit_lens", "logit lens"),
    (translation_explanation_builder, "summarize_positions", "positions"),
    (translation_explanation_builder, "describe_model", "model digest"),
]


def main() -> None:
    """Print the median seconds of each part."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    for name, value in (
        ("tokens", 32), ("beam", 4), ("layers", 6), ("width", 512), ("heads", 8),
        ("vocab-size", 16_000), ("repeats", 3),
    ):  # fmt: skip
        parser.add_argument(f"--{name}", type=int, default=value)
    options = parser.parse_args()
    torch.set_num_threads(1)
    translator, text = build_translator(options)
    translator.explain(text, beam=options.beam)  # converts the model, compiles patterns
    rounds = [measure(translator, text, options.beam) for _ in range(options.repeats)]
    names = list(rounds[0]["seconds"])
    medians = {
        name: statistics.median(each["seconds"].get(name, 0.0) for each in rounds) for name in names
    }
    for name, seconds in medians.items():
        print(f"{name:44} {seconds:8.3f} s")
    size = rounds[0]["bytes"]
    print(f"{'limit of the whole, without JSON':44} {LIMIT_SECONDS:8.3f} s")
    page = rounds[0]["html_bytes"]
    print(f"JSON: {size:,} bytes (limit: {LIMIT_BYTES:,})")
    print(f"HTML: {page:,} bytes (limit: {LIMIT_HTML_BYTES:,})")
    signature = {"torch": torch.__version__, "threads": torch.get_num_threads()} | vars(options)
    print(
        json.dumps(
            {"bench": "explain_cost", "seconds": medians, "bytes": size, "html_bytes": page}
            | signature
        )
    )


def build_translator(options: argparse.Namespace) -> tuple[Translator, str]:
    """Return a translator with random weights, and a text of the requested number of tokens."""
    source = random.Random(1)
    words = ["".join(source.choices("abcdefghijklmnoprstuw", k=7)) for _ in range(12_000)]
    lines = [" ".join(source.choices(words, k=20)) for _ in range(3_000)]
    config = _config(options)
    tokenizers = train_tokenizers(lines, lines, config.text)
    torch.manual_seed(1)
    model = build_model(
        config.model, src_vocab_size=len(tokenizers.src), tgt_vocab_size=len(tokenizers.tgt)
    ).eval()
    ids = tokenizers.src.encode(lines[0])
    while len(ids) < options.tokens - 1:
        ids += tokenizers.src.encode(source.choice(lines))
    return Translator(model, tokenizers, config), tokenizers.src.decode(ids[: options.tokens - 1])


def _config(options: argparse.Namespace) -> Config:
    return read_config(
        overrides=[
            f"model.encoder=[transformer*{options.layers}]",
            f"model.decoder=[transformer*{options.layers}]",
            f"model.width={options.width}",
            f"model.heads={options.heads}",
            f"model.ffn_width={4 * options.width}",
            f"text.vocab_size={options.vocab_size}",
            "data.max_length=4096",
            "decode.max_length_ratio=1.0",
            "decode.max_length_extra=1",
        ]
    )


def measure(translator: Translator, text: str, beam: int) -> dict[str, Any]:
    """Explain a text once; return the seconds of each part, and the sizes as JSON and HTML."""
    seconds: dict[str, float] = {}
    originals = [(owner, name, getattr(owner, name, None)) for owner, name, _ in PARTS]
    try:
        for (owner, name, label), (_, _, function) in zip(PARTS, originals, strict=True):
            if function is not None:
                setattr(owner, name, _timed(function, label, seconds))
        begin = time.process_time()
        explanation = translator.explain(text, beam=beam)
        whole = time.process_time() - begin
    finally:
        for owner, name, function in originals:
            if function is not None:
                setattr(owner, name, function)
    begin = time.process_time()
    encoded = explanation_json.dump_json(explanation.to_dict()).encode()
    coding = time.process_time() - begin
    rest = whole - sum(seconds.values())
    return {
        "seconds": seconds | {"rest": rest, "the whole": whole, "JSON": coding},
        "bytes": len(encoded),
        "html_bytes": len(export_html(explanation).encode()),
    }


def _timed(
    function: Callable[..., Any], label: str, seconds: dict[str, float]
) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(*given: Any, **options: Any) -> Any:
        begin = time.process_time()
        try:
            return function(*given, **options)
        finally:
            seconds[label] = seconds.get(label, 0.0) + time.process_time() - begin

    return call


if __name__ == "__main__":
    main()

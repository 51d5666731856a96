"""Systems of decode_cpu.py that run in this environment: Dragoman's engines and four peers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.workload import (
    SHAPES,
    VOCABULARIES,
    Batch,
    TranslateBatch,
    TranslateBatches,
    layers,
    output_length,
)


class NumberTokenizer:
    """Tokenizer stub whose tokens are the numbers of their ids."""

    def __init__(self, size: int) -> None:
        self._size = size

    def __len__(self) -> int:
        return self._size

    def tokens(self, ids: Sequence[int]) -> list[str]:
        """Return the tokens of ids."""
        from dragoman.text.special_tokens import SPECIAL_TOKENS

        return [SPECIAL_TOKENS[each] if each < len(SPECIAL_TOKENS) else f"p{each}" for each in ids]


def build_model_and_config(size: str) -> Any:
    """Return the model of a size and its configuration."""
    import torch

    from dragoman.config import Config
    from dragoman.models.factory import build_model

    torch.manual_seed(0)
    config = Config().replace(model=SHAPES[size])
    vocabulary = VOCABULARIES[size]
    return build_model(
        config.model, src_vocab_size=vocabulary, tgt_vocab_size=vocabulary
    ).eval(), config


def exported_model(size: str, precision: str, folder: Path) -> Path:
    """Export the model to CTranslate2 once and return its directory."""
    from dragoman.exchange.ctranslate2_export import save_ctranslate2
    from dragoman.text.sentencepiece_tokenizer import Tokenizers

    directory = folder / f"{size}-{precision}"
    if not (directory / "model.bin").exists():
        directory.mkdir()
        model, config = build_model_and_config(size)
        tokenizer: Any = NumberTokenizer(VOCABULARIES[size])
        save_ctranslate2(
            model, Tokenizers(tokenizer, tokenizer), config, directory, quantization=precision
        )
    return directory


def engine_translator(engine: Any, beam: int) -> TranslateBatches:
    """Return a function that translates batches with one of our engines."""
    from dragoman.decoding.beam_search import BeamSearch
    from dragoman.decoding.greedy import GreedySearch
    from dragoman.inference import SearchRequest
    from dragoman.runtime.thread_pool_map import map_in_threads

    strategy = GreedySearch() if beam == 1 else BeamSearch(beam)

    def build_request(batch: Batch) -> Any:
        many, length = (
            len(batch),
            output_length(batch) - 1,
        )  # EOS is one more step; all decode the same number
        return SearchRequest(
            sources=batch,
            limits=[length] * many,
            prefixes=[[]] * many,
            strategy=strategy,
            sample_ids=range(many),
            min_length=length,
            return_scores=False,
        )

    def translate(batches: Sequence[Batch]) -> None:
        for found in map_in_threads(
            engine.generate, map(build_request, batches), engine.client_threads
        ):  # as the translator does
            assert found, "an engine must answer"

    return translate


def native(size: str, precision: str, beam: int, cores: int) -> TranslateBatches:
    """Return our native engine with one single-threaded worker per core."""
    from dragoman.inference import NativeEngine

    model, _ = build_model_and_config(size)
    return engine_translator(NativeEngine(lambda: model, precision=precision, workers=cores), beam)


def exported_engine(
    size: str, precision: str, beam: int, cores: int, folder: Path
) -> TranslateBatches:
    """Return our CTranslate2 engine."""
    from dragoman.inference.ctranslate2_engine import CTranslate2Engine
    from dragoman.text.sentencepiece_tokenizer import Tokenizers

    tokenizer: Any = NumberTokenizer(VOCABULARIES[size])
    directory = exported_model(size, precision, folder)
    return engine_translator(
        CTranslate2Engine(
            directory,
            Tokenizers(tokenizer, tokenizer),
            name=f"ctranslate2-{precision}",
            longest=1024,
            workers=cores,
        ),
        beam,
    )


def ctranslate2_direct(
    size: str, precision: str, beam: int, cores: int, folder: Path, *, workers: bool
) -> TranslateBatches:
    """Return CTranslate2 as documented: several workers, or all threads for each batch."""
    from ctranslate2 import Translator

    split = (
        {"inter_threads": cores, "intra_threads": 1}
        if workers
        else {"inter_threads": 1, "intra_threads": cores}
    )
    program = Translator(str(exported_model(size, precision, folder)), device="cpu", **split)
    tokenizer = NumberTokenizer(VOCABULARIES[size])

    def translate(batches: Sequence[Batch]) -> None:
        waiting = [
            result
            for batch in batches
            for result in program.translate_batch(
                [tokenizer.tokens(source) for source in batch],
                beam_size=beam,
                max_decoding_length=output_length(batch),
                min_decoding_length=output_length(batch),
                max_input_length=0,
                asynchronous=True,
            )
        ]
        for each in waiting:
            each.result()

    return translate


def transformers(size: str, precision: str, beam: int) -> TranslateBatch:
    """Return transformers' Marian model of the same size with `generate`."""
    import torch

    from bench.peers import build_marian

    torch.manual_seed(0)
    _, config = build_model_and_config(size)
    model: Any = build_marian(config.model, layers(size), VOCABULARIES[size]).eval()
    if precision == "int8":
        model = torch.ao.quantization.quantize_dynamic(model, {torch.nn.Linear}, dtype=torch.qint8)

    def translate(batch: Batch, length: int) -> Sequence[Sequence[int]]:
        ids = pad_with_eos(batch)
        with torch.inference_mode():
            found = model.generate(
                ids,
                attention_mask=(ids != 0).long(),
                num_beams=beam,
                do_sample=False,
                min_new_tokens=length,
                max_new_tokens=length,
            )
        return found[:, 1:].tolist()  # without BOS

    return translate


def torch_transformer_peer(size: str, precision: str, beam: int) -> TranslateBatch:
    """Return `torch.nn.Transformer` with a plain search; it has no KV cache."""
    import torch
    from torch import nn
    from torch.nn import functional as F

    from bench.peers import NNTransformer
    from dragoman.text.special_tokens import BOS, EOS, PAD

    torch.manual_seed(0)
    _, config = build_model_and_config(size)
    model = NNTransformer(config.model, layers(size), VOCABULARIES[size]).eval()

    @torch.inference_mode()
    def translate(batch: Batch, length: int) -> Sequence[Sequence[int]]:
        ids = pad_with_eos(batch)
        padding_mask = ids == PAD
        memory = model.transformer.encoder(
            model.embed(ids), src_key_padding_mask=padding_mask
        ).repeat_interleave(beam, 0)
        padding_mask = padding_mask.repeat_interleave(beam, 0)
        prefix = torch.full((len(batch) * beam, 1), BOS)
        # the beams start equal
        scores = torch.tensor([0.0] + [-torch.inf] * (beam - 1)).repeat(len(batch), 1)
        starts = torch.arange(len(batch))[:, None] * beam
        for _ in range(length):
            causal = nn.Transformer.generate_square_subsequent_mask(prefix.shape[1]).isinf()
            states = model.transformer.decoder(
                model.embed(prefix),
                memory,
                tgt_mask=causal,
                memory_key_padding_mask=padding_mask,
                tgt_is_causal=True,
            )
            logits = F.linear(states[:, -1], model.embedding.weight)
            logits[:, [PAD, EOS]] = -torch.inf
            if beam == 1:
                prefix = torch.cat([prefix, logits.argmax(-1, keepdim=True)], dim=1)
                continue
            extended = scores[:, :, None] + logits.log_softmax(-1).view(len(batch), beam, -1)
            scores, indices = extended.flatten(1).topk(beam)
            rows, tokens = starts + indices // logits.shape[1], indices % logits.shape[1]
            prefix = torch.cat([prefix[rows.flatten()], tokens.view(-1, 1)], dim=1)
        return prefix[::beam, 1:].tolist()

    return translate


def pad_with_eos(batch: Batch) -> Any:
    """Return a padded tensor of the sources, each with EOS."""
    import torch

    from dragoman.text.special_tokens import EOS, PAD

    longest = max(map(len, batch)) + 1
    return torch.tensor([[*source, EOS, *[PAD] * (longest - 1 - len(source))] for source in batch])

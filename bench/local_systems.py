"""Those that translate in this interpreter: our native engine and our exported one, CTranslate2, transformers, torch.nn.Transformer."""

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
    """Stands for a tokenizer: pieces spelt by their numbers, for programs that want them spelt."""

    def __init__(self, size: int) -> None:
        self._size = size

    def __len__(self) -> int:
        return self._size

    def tokens(self, ids: Sequence[int]) -> list[str]:
        """Spell some."""
        from dragoman.text.special_tokens import SPECIAL_TOKENS

        return [SPECIAL_TOKENS[each] if each < len(SPECIAL_TOKENS) else f"p{each}" for each in ids]


def build_model_and_config(size: str) -> Any:
    """Build the model and its configuration."""
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
    """Export the model to CTranslate2, once for all who want it."""
    from dragoman.exchange.ctranslate2_export import save_ctranslate2
    from dragoman.text.tokenizer import Tokenizers

    place = folder / f"{size}-{precision}"
    if not (place / "model.bin").exists():
        place.mkdir()
        model, config = build_model_and_config(size)
        tokenizer: Any = NumberTokenizer(VOCABULARIES[size])
        save_ctranslate2(
            model, Tokenizers(tokenizer, tokenizer), config, place, quantization=precision
        )
    return place


def engine_translator(engine: Any, beam: int) -> TranslateBatches:
    """Translate through the face of our engines."""
    from dragoman.decoding.beam_search import BeamSearch
    from dragoman.decoding.greedy import GreedySearch
    from dragoman.inference import SearchRequest
    from dragoman.runtime.threads import map_in_threads

    strategy = GreedySearch() if beam == 1 else BeamSearch(beam)

    def build_request(batch: Batch) -> Any:
        many, length = (
            len(batch),
            output_length(batch) - 1,
        )  # an end is a step that we do not count: all do as many steps
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
    """Ours, a worker of one thread for each core."""
    from dragoman.inference import NativeEngine

    model, _ = build_model_and_config(size)
    return engine_translator(NativeEngine(lambda: model, precision=precision, workers=cores), beam)


def exported_engine(
    size: str, precision: str, beam: int, cores: int, folder: Path
) -> TranslateBatches:
    """CTranslate2 behind the face of our engines."""
    from dragoman.inference.ctranslate2_engine import CTranslate2Engine
    from dragoman.text.tokenizer import Tokenizers

    tokenizer: Any = NumberTokenizer(VOCABULARIES[size])
    place = exported_model(size, precision, folder)
    return engine_translator(
        CTranslate2Engine(
            place,
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
    """CTranslate2 as its own documentation uses it: a queue of batches, or all threads on each."""
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
    """Marian's model of the same shape through `generate`."""
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
        return found[:, 1:].tolist()  # without the start

    return translate


def torch_transformer_peer(size: str, precision: str, beam: int) -> TranslateBatch:
    """`torch.nn.Transformer` with the search that its user writes: it has no cache, so every step goes over the whole prefix."""
    import torch
    from torch import nn
    from torch.nn import functional as F

    from bench.peers import TorchTransformer
    from dragoman.text.special_tokens import BOS, EOS, PAD

    torch.manual_seed(0)
    _, config = build_model_and_config(size)
    model = TorchTransformer(config.model, layers(size), VOCABULARIES[size]).eval()

    @torch.inference_mode()
    def translate(batch: Batch, length: int) -> Sequence[Sequence[int]]:
        ids = pad_with_eos(batch)
        padding_mask = ids == PAD
        memory = model.transformer.encoder(
            model.embed(ids), src_key_padding_mask=padding_mask
        ).repeat_interleave(beam, 0)
        padding_mask = padding_mask.repeat_interleave(beam, 0)
        prefix = torch.full((len(batch) * beam, 1), BOS)
        scores = torch.tensor([0.0] + [-torch.inf] * (beam - 1)).repeat(
            len(batch), 1
        )  # at first all beams are alike
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
            scores, places = extended.flatten(1).topk(beam)
            rows, pieces = starts + places // logits.shape[1], places % logits.shape[1]
            prefix = torch.cat([prefix[rows.flatten()], pieces.view(-1, 1)], dim=1)
        return prefix[::beam, 1:].tolist()

    return translate


def pad_with_eos(batch: Batch) -> Any:
    """Put a batch into one tensor, an end behind each sentence."""
    import torch

    from dragoman.text.special_tokens import EOS, PAD

    longest = max(map(len, batch)) + 1
    return torch.tensor([[*source, EOS, *[PAD] * (longest - 1 - len(source))] for source in batch])

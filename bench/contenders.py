"""Those that translate in this interpreter: our native engine and our exported one, CTranslate2, transformers, torch.nn.Transformer."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.forced import SHAPES, VOCABULARIES, Batch, Translate, TranslateOne, layers, steps


class Spelling:
    """Stands for a tokenizer: pieces spelt by their numbers, for programs that want them spelt."""

    def __init__(self, size: int) -> None:
        self._size = size

    def __len__(self) -> int:
        return self._size

    def pieces(self, ids: Sequence[int]) -> list[str]:
        """Spell some."""
        from dragoman.text.specials import SPECIALS

        return [SPECIALS[each] if each < len(SPECIALS) else f"p{each}" for each in ids]


def build(size: str) -> Any:
    """Build the model and its configuration."""
    import torch

    from dragoman.config import Config
    from dragoman.models.build import build_model

    torch.manual_seed(0)
    config = Config().replace(model=SHAPES[size])
    vocabulary = VOCABULARIES[size]
    return build_model(config.model, src_vocabulary=vocabulary, tgt_vocabulary=vocabulary).eval(), config


def exported(size: str, precision: str, folder: Path) -> Path:
    """Export the model to CTranslate2, once for all who want it."""
    from dragoman.exchange.ctranslate2 import save_ctranslate2
    from dragoman.text.tokenizer import Tokenizers

    place = folder / f"{size}-{precision}"
    if not (place / "model.bin").exists():
        place.mkdir()
        model, config = build(size)
        spelling: Any = Spelling(VOCABULARIES[size])
        save_ctranslate2(model, Tokenizers(spelling, spelling), config, place, quantisation=precision)
    return place


def through_engine(engine: Any, beam: int) -> Translate:
    """Translate through the face of our engines."""
    from dragoman.decoding.beam import Beam
    from dragoman.decoding.greedy import Greedy
    from dragoman.engines import Request
    from dragoman.engines.spreading import spread

    strategy = Greedy() if beam == 1 else Beam(beam)

    def asked(batch: Batch) -> Any:
        many, length = len(batch), steps(batch) - 1  # an end is a step that we do not count: all do as many steps
        return Request(
            sources=batch,
            limits=[length] * many,
            prefixes=[[]] * many,
            strategy=strategy,
            lines=range(many),
            at_least=length,
            scored=False,
        )

    def translate(batches: Sequence[Batch]) -> None:
        for found in spread(engine.generate, map(asked, batches), engine.callers):  # as the translator does
            assert found, "an engine must answer"

    return translate


def native(size: str, precision: str, beam: int, cores: int) -> Translate:
    """Ours, a worker of one thread for each core."""
    from dragoman.engines import Native

    model, _ = build(size)
    return through_engine(Native(lambda: model, precision=precision, workers=cores), beam)


def our_export(size: str, precision: str, beam: int, cores: int, folder: Path) -> Translate:
    """CTranslate2 behind the face of our engines."""
    from dragoman.engines.ctranslate2 import CTranslate2
    from dragoman.text.tokenizer import Tokenizers

    spelling: Any = Spelling(VOCABULARIES[size])
    place = exported(size, precision, folder)
    return through_engine(
        CTranslate2(place, Tokenizers(spelling, spelling), name=f"ctranslate2-{precision}", longest=1024, workers=cores), beam
    )


def ctranslate2_itself(size: str, precision: str, beam: int, cores: int, folder: Path, *, workers: bool) -> Translate:
    """CTranslate2 as its own documentation uses it: a queue of batches, or all threads on each."""
    from ctranslate2 import Translator

    split = {"inter_threads": cores, "intra_threads": 1} if workers else {"inter_threads": 1, "intra_threads": cores}
    program = Translator(str(exported(size, precision, folder)), device="cpu", **split)
    spelling = Spelling(VOCABULARIES[size])

    def translate(batches: Sequence[Batch]) -> None:
        waiting = [
            result
            for batch in batches
            for result in program.translate_batch(
                [spelling.pieces(source) for source in batch],
                beam_size=beam,
                max_decoding_length=steps(batch),
                min_decoding_length=steps(batch),
                max_input_length=0,
                asynchronous=True,
            )
        ]
        for each in waiting:
            each.result()

    return translate


def transformers(size: str, precision: str, beam: int) -> TranslateOne:
    """Marian's model of the same shape through `generate`."""
    import torch

    from bench.peers import marian

    torch.manual_seed(0)
    _, config = build(size)
    model: Any = marian(config.model, layers(size), VOCABULARIES[size]).eval()
    if precision == "int8":
        model = torch.ao.quantization.quantize_dynamic(model, {torch.nn.Linear}, dtype=torch.qint8)

    def translate(batch: Batch, length: int) -> Sequence[Sequence[int]]:
        ids = ended(batch)
        with torch.inference_mode():
            found = model.generate(
                ids, attention_mask=(ids != 0).long(), num_beams=beam, do_sample=False, min_new_tokens=length, max_new_tokens=length
            )
        return found[:, 1:].tolist()  # without the start

    return translate


def torch_transformer(size: str, precision: str, beam: int) -> TranslateOne:
    """`torch.nn.Transformer` with the search that its user writes: it has no cache, so every step goes over the whole prefix."""
    import torch
    from torch import nn
    from torch.nn import functional as F

    from bench.peers import TorchTransformer
    from dragoman.text.specials import BOS, EOS, PAD

    torch.manual_seed(0)
    _, config = build(size)
    model = TorchTransformer(config.model, layers(size), VOCABULARIES[size]).eval()

    @torch.inference_mode()
    def translate(batch: Batch, length: int) -> Sequence[Sequence[int]]:
        ids = ended(batch)
        hidden = ids == PAD
        memory = model.transformer.encoder(model.embed(ids), src_key_padding_mask=hidden).repeat_interleave(beam, 0)
        hidden = hidden.repeat_interleave(beam, 0)
        prefix = torch.full((len(batch) * beam, 1), BOS)
        scores = torch.tensor([0.0] + [-torch.inf] * (beam - 1)).repeat(len(batch), 1)  # at first all beams are alike
        starts = torch.arange(len(batch))[:, None] * beam
        for _ in range(length):
            causal = nn.Transformer.generate_square_subsequent_mask(prefix.shape[1]).isinf()
            states = model.transformer.decoder(
                model.embed(prefix), memory, tgt_mask=causal, memory_key_padding_mask=hidden, tgt_is_causal=True
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


def ended(batch: Batch) -> Any:
    """Put a batch into one tensor, an end behind each sentence."""
    import torch

    from dragoman.text.specials import EOS, PAD

    longest = max(map(len, batch)) + 1
    return torch.tensor([[*source, EOS, *[PAD] * (longest - 1 - len(source))] for source in batch])

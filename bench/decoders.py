"""Who decodes in `decode_gpu.py`: the translator, its native engine by itself, and `transformers.generate`."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import torch

from bench.drawn import Corpus
from dragoman.config import Config
from dragoman.decoding.packing import batches_by_length
from dragoman.engines import Native, Request
from dragoman.exchange.transformers_side import quietly
from dragoman.models.encoder_decoder import EncoderDecoder
from dragoman.text.specials import BOS, EOS, PAD
from dragoman.translator import Translator
from dragoman.translator.checks import without_controls
from dragoman.translator.options import Options

DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}
ALONE = 200  # sentences that are also translated one by one


class Given(NamedTuple):
    """What every contender is made from."""

    model: EncoderDecoder
    corpus: Corpus
    config: Config
    texts: list[str]
    folder: Path  # the same weights as transformers reads them
    device: torch.device


class Ours:
    """The translator, native engine, from text to text."""

    name = "ours"

    def __init__(self, given: Given, dtype: str) -> None:
        # A CPU has no half precision to show here.
        precision = dtype if given.device.type == "cuda" else "float32"
        self._translator = Translator(Native(lambda: given.model, precision=precision), given.corpus.tokenizers, given.config)
        self._texts = given.texts

    def __call__(self, size: int, beam: int) -> list[str]:
        """Translate everything."""
        return self._translator.translate(self._texts, beam=beam, batch_size=size or None, window=len(self._texts))

    def spell(self, found: list[str]) -> list[str]:
        """Leave text as it is."""
        return found

    def alone(self, beam: int, size: int) -> list[str]:
        """Translate some of them in small batches."""
        return self._translator.translate(self._texts[:ALONE], beam=beam, batch_size=size)


class Engine:
    """The native engine by itself, from ids to ids, as the peer."""

    name = "ours, ids"

    def __init__(self, given: Given, dtype: str) -> None:
        self._native = Native(lambda: given.model, precision=dtype if given.device.type == "cuda" else "float32")
        self._sources = given.corpus.tokenizers.src.encode_batch([text.strip() for text in given.texts])
        self._tokenizer, self._decode = given.corpus.tokenizers.tgt, given.config.decode

    def __call__(self, size: int, beam: int) -> list[list[int]]:
        """Search for everything."""
        lengths = [len(source) + 1 for source in self._sources]
        made: dict[int, list[int]] = {}
        for group in batches_by_length(lengths, slots=self._native.slots or 2048, width=beam, most=size or None):
            sources = [self._sources[number] for number in group]
            limits = [int(self._decode.max_ratio * len(source)) + self._decode.max_extra for source in sources]
            strategy = Options(beam=beam).strategy(self._decode)
            request = Request(sources=sources, limits=limits, prefixes=[[]] * len(group), strategy=strategy, lines=group, scored=False)
            made |= {number: found[0].tokens for number, found in zip(group, self._native.generate(request), strict=True)}
        return [made[number] for number in range(len(lengths))]

    def spell(self, found: list[list[int]]) -> list[str]:
        """Turn ids into text as the translator does."""
        return [without_controls(text) for text in self._tokenizer.decode_batch(found)]


class Theirs:
    """`transformers.generate`, by batches of like lengths; searches until nothing unfinished can still win, as ours does."""

    name = "transformers"
    early = False

    def __init__(self, given: Given, dtype: str) -> None:
        import transformers

        library: Any = transformers
        with quietly():
            self._model = library.MarianMTModel.from_pretrained(str(given.folder)).to(given.device, DTYPES[dtype]).eval()
        self._tokenizer, self._decode, self._device = given.corpus.tokenizers.tgt, given.config.decode, given.device
        self._sources = [[*ids, EOS] for ids in given.corpus.tokenizers.src.encode_batch([text.strip() for text in given.texts])]
        self._order = sorted(range(len(given.texts)), key=lambda number: -len(self._sources[number]))

    @torch.inference_mode()
    def __call__(self, size: int, beam: int) -> list[list[int]]:
        """Generate for everything, and bring the ids to the host."""
        made: dict[int, list[int]] = {}
        for first in range(0, len(self._order), size):
            numbers = self._order[first : first + size]
            rows = [torch.tensor(self._sources[number]) for number in numbers]
            ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=PAD).to(self._device)
            longest = int(self._decode.max_ratio * (ids.shape[1] - 1)) + self._decode.max_extra
            settings = {"num_beams": beam, "do_sample": False, "max_length": None, "forced_eos_token_id": None}
            settings |= {"length_penalty": 0.0, "early_stopping": self.early} if beam > 1 else {}
            found = self._model.generate(input_ids=ids, attention_mask=ids != PAD, max_new_tokens=longest + 1, **settings)
            made |= dict(zip(numbers, found[:, 1:].tolist(), strict=True))
        return [made[number] for number in range(len(self._order))]

    def spell(self, found: list[list[int]]) -> list[str]:
        """Turn ids into text as ours does."""
        # It knows one limit for a batch; an output that does not end is compared up to its own.
        limits = [int(self._decode.max_ratio * (len(source) - 1)) + self._decode.max_extra for source in self._sources]
        cut = [ids[: ids.index(EOS)] if EOS in ids else ids[:limit] for ids, limit in zip(found, limits, strict=True)]
        spelt = self._tokenizer.decode_batch([[each for each in ids if each not in (PAD, BOS)] for ids in cut])
        return [without_controls(text) for text in spelt]


class TheirsEarly(Theirs):
    """The same, ending a sentence when as many hypotheses are finished as the beam is wide: quicker, not always the best found."""

    name = "transformers, early"
    early = True

"""Systems of decode_gpu.py: Dragoman's translator, its engine and `transformers.generate`."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import torch

from bench.synthetic_corpus import PreparedCorpus
from dragoman.config import Config
from dragoman.data.inference_batches import group_by_length
from dragoman.exchange.huggingface_runner import quiet_transformers
from dragoman.inference import NativeEngine, SearchRequest, Translator
from dragoman.inference.translation_options import TranslationOptions
from dragoman.models.encoder_decoder import EncoderDecoder
from dragoman.text.sentencepiece_tokenizer import replace_control_chars
from dragoman.text.special_tokens import BOS, EOS, PAD

DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}
SMALL_BATCH_SENTENCES = 200  # sentences also translated in small batches


class BenchmarkInputs(NamedTuple):
    """Model, data and settings of all systems."""

    model: EncoderDecoder
    corpus: PreparedCorpus
    config: Config
    texts: list[str]
    folder: Path  # the same weights in transformers' format
    device: torch.device


class OurTranslator:
    """The translator with the native engine, text to text."""

    name = "ours"

    def __init__(self, inputs: BenchmarkInputs, dtype: str) -> None:
        # Half precision is for GPUs.
        precision = dtype if inputs.device.type == "cuda" else "float32"
        self._translator = Translator(
            NativeEngine(lambda: inputs.model, precision=precision),
            inputs.corpus.tokenizers,
            inputs.config,
        )
        self._texts = inputs.texts

    def __call__(self, size: int, beam: int) -> list[str]:
        """Translate all sentences."""
        return self._translator.translate(
            self._texts, beam=beam, batch_size=size or None, buffer_size=len(self._texts)
        )

    def detokenize(self, found: list[str]) -> list[str]:
        """Return the text unchanged."""
        return found

    def translate_in_small_batches(self, beam: int, size: int) -> list[str]:
        """Translate a few sentences in small batches."""
        return self._translator.translate(
            self._texts[:SMALL_BATCH_SENTENCES], beam=beam, batch_size=size
        )


class OurEngine:
    """The native engine, ids to ids."""

    name = "ours, ids"

    def __init__(self, inputs: BenchmarkInputs, dtype: str) -> None:
        self._native = NativeEngine(
            lambda: inputs.model, precision=dtype if inputs.device.type == "cuda" else "float32"
        )
        self._sources = inputs.corpus.tokenizers.src.encode_batch(
            [text.strip() for text in inputs.texts]
        )
        self._tokenizer, self._decode = inputs.corpus.tokenizers.tgt, inputs.config.decode

    def __call__(self, size: int, beam: int) -> list[list[int]]:
        """Translate all sentences."""
        lengths = [len(source) + 1 for source in self._sources]
        made: dict[int, list[int]] = {}
        for group in group_by_length(
            lengths,
            batch_tokens=self._native.batch_tokens or 2048,
            rows_per_sentence=beam,
            max_rows=size or None,
        ):
            sources = [self._sources[number] for number in group]
            limits = [
                int(self._decode.max_length_ratio * len(source)) + self._decode.max_length_extra
                for source in sources
            ]
            strategy = TranslationOptions(beam=beam).strategy(self._decode)
            request = SearchRequest(
                sources=sources,
                limits=limits,
                prefixes=[[]] * len(group),
                strategy=strategy,
                sample_ids=group,
                return_scores=False,
            )
            made |= {
                number: found[0].tokens
                for number, found in zip(group, self._native.generate(request), strict=True)
            }
        return [made[number] for number in range(len(lengths))]

    def detokenize(self, found: list[list[int]]) -> list[str]:
        """Return the text of token ids."""
        return [replace_control_chars(text) for text in self._tokenizer.decode_batch(found)]


class TransformersPeer:
    """`transformers.generate` on batches of similar length, without early stopping."""

    name = "transformers"
    early_stopping = False

    def __init__(self, inputs: BenchmarkInputs, dtype: str) -> None:
        import transformers

        library: Any = transformers
        with quiet_transformers():
            self._model = (
                library.MarianMTModel.from_pretrained(str(inputs.folder))
                .to(inputs.device, DTYPES[dtype])
                .eval()
            )
        self._tokenizer, self._decode, self._device = (
            inputs.corpus.tokenizers.tgt,
            inputs.config.decode,
            inputs.device,
        )
        self._sources = [
            [*ids, EOS]
            for ids in inputs.corpus.tokenizers.src.encode_batch(
                [text.strip() for text in inputs.texts]
            )
        ]
        self._order = sorted(
            range(len(inputs.texts)), key=lambda number: -len(self._sources[number])
        )

    @torch.inference_mode()
    def __call__(self, size: int, beam: int) -> list[list[int]]:
        """Translate all sentences and copy the ids to the host."""
        made: dict[int, list[int]] = {}
        for first in range(0, len(self._order), size):
            numbers = self._order[first : first + size]
            rows = [torch.tensor(self._sources[number]) for number in numbers]
            ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=PAD).to(
                self._device
            )
            longest = (
                int(self._decode.max_length_ratio * (ids.shape[1] - 1))
                + self._decode.max_length_extra
            )
            settings = {
                "num_beams": beam,
                "do_sample": False,
                "max_length": None,
                "forced_eos_token_id": None,
            }
            settings |= (
                {"length_penalty": 0.0, "early_stopping": self.early_stopping} if beam > 1 else {}
            )
            found = self._model.generate(
                input_ids=ids, attention_mask=ids != PAD, max_new_tokens=longest + 1, **settings
            )
            made |= dict(zip(numbers, found[:, 1:].tolist(), strict=True))
        return [made[number] for number in range(len(self._order))]

    def detokenize(self, found: list[list[int]]) -> list[str]:
        """Return the text of token ids."""
        # `generate` has one length limit per batch; cut unfinished outputs at their own.
        limits = [
            int(self._decode.max_length_ratio * (len(source) - 1)) + self._decode.max_length_extra
            for source in self._sources
        ]
        cut = [
            ids[: ids.index(EOS)] if EOS in ids else ids[:limit]
            for ids, limit in zip(found, limits, strict=True)
        ]
        texts = self._tokenizer.decode_batch(
            [[each for each in ids if each not in (PAD, BOS)] for ids in cut]
        )
        return [replace_control_chars(text) for text in texts]


class TransformersEarlyStopping(TransformersPeer):
    """The same with `early_stopping`: faster, not always the best hypothesis."""

    name = "transformers, early"
    early_stopping = True

"""Run a Hugging Face directory with `transformers` alone, to compare its translations."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from dragoman.storage.atomic_and_safe_file_io import native_path

_BATCH_ROWS = 32  # sentences per batch


@contextlib.contextmanager
def quiet_transformers() -> Iterator[None]:
    """Silence progress bars and advice; one suggests a normalizer that would change the text."""
    from transformers import utils

    logging: Any = utils.logging
    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()


class ScoredText(NamedTuple):
    """A translation by another program, and its log-probability."""

    text: str
    total: float


class TransformersRunner:
    """A loaded Marian or Pegasus directory."""

    def __init__(self, directory: Path) -> None:
        import transformers

        with quiet_transformers(), native_path(directory) as folder:
            load_options: Any = {"local_files_only": True, "trust_remote_code": False}
            self.tokenizer: Any = transformers.MarianTokenizer.from_pretrained(
                folder, **load_options
            )
            self.model: Any = transformers.AutoModelForSeq2SeqLM.from_pretrained(
                folder, use_safetensors=True, dtype=torch.float32, **load_options
            ).eval()

    def translate(self, texts: Sequence[str], limits: Sequence[int]) -> list[ScoredText]:
        """Translate greedily, each up to its maximum length in tokens."""
        outputs: dict[int, ScoredText] = {}
        most = int(self.model.config.max_position_embeddings) - 2  # the model has no more positions
        limits = [min(limit, most) for limit in limits]
        order = sorted(range(len(texts)), key=lambda number: -len(texts[number]))
        for first in range(0, len(order), _BATCH_ROWS):
            rows = order[first : first + _BATCH_ROWS]
            outputs |= dict(
                zip(
                    rows,
                    self._batch([texts[row] for row in rows], [limits[row] for row in rows]),
                    strict=True,
                )
            )
        return [outputs[row] for row in range(len(texts))]

    @torch.inference_mode()
    def _batch(self, texts: Sequence[str], limits: Sequence[int]) -> list[ScoredText]:
        """Translate one batch; log-probabilities are those before tokens are suppressed."""
        inputs = self.tokenizer(list(texts), return_tensors="pt", padding=True)
        settings = self.model.generation_config
        options = {
            "max_new_tokens": max(limits) + 1,
            "max_length": None,
            "num_beams": 1,
            "do_sample": False,
            "forced_eos_token_id": None,
        }
        with quiet_transformers():
            generated = self.model.generate(
                **inputs, **options, output_logits=True, return_dict_in_generate=True
            )
        end = (
            settings.eos_token_id
            if isinstance(settings.eos_token_id, int)
            else settings.eos_token_id[0]
        )
        log_probs = torch.stack(generated.logits, dim=1).log_softmax(-1)
        outputs = []
        for row, limit in enumerate(limits):
            ids = generated.sequences[row, 1:].tolist()
            ids = ids[: ids.index(end) + 1] if end in ids[: limit + 1] else ids[:limit]
            total = sum(
                float(log_probs[row, position, token]) for position, token in enumerate(ids)
            )
            text = self.tokenizer.decode(
                ids, skip_special_tokens=True, clean_up_tokenization_spaces=False
            )
            outputs.append(ScoredText(text, total))
        return outputs

"""Running a Hugging Face directory as its users do: text in, text out, by `transformers` alone. Only to compare with."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from dragoman.files.atomic import native_path

_ROWS = 32  # sentences together


@contextlib.contextmanager
def quietly() -> Iterator[None]:
    """Keep its progress bars and advice off a person's screen: among the advice is a normaliser that would change the text."""
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


class Said(NamedTuple):
    """One translation of another program, and the log-probability that it gave it."""

    text: str
    total: float


class Transformers:
    """A Marian or Pegasus directory, loaded."""

    def __init__(self, directory: Path) -> None:
        import transformers

        with quietly(), native_path(directory) as folder:
            safely: Any = {"local_files_only": True, "trust_remote_code": False}
            self.tokenizer: Any = transformers.MarianTokenizer.from_pretrained(folder, **safely)
            self.model: Any = transformers.AutoModelForSeq2SeqLM.from_pretrained(
                folder, use_safetensors=True, dtype=torch.float32, **safely
            ).eval()

    def translate(self, texts: Sequence[str], limits: Sequence[int]) -> list[Said]:
        """Translate greedily, none longer than its limit of pieces."""
        said: dict[int, Said] = {}
        most = int(self.model.config.max_position_embeddings) - 2  # past which it has no positions
        limits = [min(limit, most) for limit in limits]
        order = sorted(range(len(texts)), key=lambda number: -len(texts[number]))
        for first in range(0, len(order), _ROWS):
            rows = order[first : first + _ROWS]
            said |= dict(zip(rows, self._batch([texts[row] for row in rows], [limits[row] for row in rows]), strict=True))
        return [said[row] for row in range(len(texts))]

    @torch.inference_mode()
    def _batch(self, texts: Sequence[str], limits: Sequence[int]) -> list[Said]:
        """Translate one batch and read what it thought of each piece before anything was forbidden."""
        given = self.tokenizer(list(texts), return_tensors="pt", padding=True)
        settings = self.model.generation_config
        options = {"max_new_tokens": max(limits) + 1, "max_length": None, "num_beams": 1, "do_sample": False, "forced_eos_token_id": None}
        with quietly():
            made = self.model.generate(**given, **options, output_logits=True, return_dict_in_generate=True)
        end = settings.eos_token_id if isinstance(settings.eos_token_id, int) else settings.eos_token_id[0]
        log_probs = torch.stack(made.logits, dim=1).log_softmax(-1)
        said = []
        for row, limit in enumerate(limits):
            ids = made.sequences[row, 1:].tolist()
            ids = ids[: ids.index(end) + 1] if end in ids[: limit + 1] else ids[:limit]
            total = sum(float(log_probs[row, place, token]) for place, token in enumerate(ids))
            text = self.tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
            said.append(Said(text, total))
        return said

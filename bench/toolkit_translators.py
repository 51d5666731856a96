"""Translators of eole, OpenNMT-py and JoeyNMT, run in the environments of these toolkits.

Each builds a model of the given size with random weights and translates batches of token ids. The
minimum and maximum output lengths are equal, so all decode the same number of steps. Dragoman is
not installed in these environments.

All compute in float32: eole 0.6.4 rejects int8 on CPUs, OpenNMT-py 3.5.1 accepts it and computes
in float32, JoeyNMT does not support it.
"""

from __future__ import annotations

import io
import logging
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from bench.toolkit_configs import SPECIALS, TOOLKIT_CONFIGS, TrainingJob

Batch = list[list[int]]
UNKNOWN, PAD, START, END = range(SPECIALS)  # the same ids in all three


class TranslationJob(NamedTuple):
    """Size of the model, and beam size."""

    shape: dict[str, Any]  # width, heads, ffn_width, layers
    vocabulary: int
    beam: int
    folder: Path


def train_toolkit_model(name: str, translation_job: TranslationJob) -> Path:
    """Create a model with a toolkit's training command, once, in one step; return its directory."""
    folder = translation_job.folder / name
    if (folder / "done").exists():
        return folder
    folder.mkdir(parents=True)
    job = TrainingJob(**translation_job.shape, folder=folder, batch_tokens=64)
    tokens = [f"p{each}" for each in range(SPECIALS, translation_job.vocabulary)]
    text = [tokens[at : at + 8] for at in range(0, 80, 8)]
    job.write(tokens, text, text)
    done = subprocess.run(
        TOOLKIT_CONFIGS[name].command(Path(sys.executable), job, name),
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise RuntimeError((done.stderr.strip().splitlines() or ["its command failed"])[-1])
    (folder / "done").touch()
    return folder


def pad_batch(batch: Batch, *, end: bool) -> tuple[Any, Any]:
    """Return padded sources and their lengths; OpenNMT-py and eole have no source EOS."""
    import torch

    rows = [[*source, END] if end else source for source in batch]
    lengths = torch.tensor([len(row) for row in rows])
    longest = int(lengths.max())
    return torch.tensor([row + [PAD] * (longest - len(row)) for row in rows]), lengths


def opennmt_translator(translation_job: TranslationJob) -> Callable[[Batch, int], Any]:
    """Return OpenNMT-py's translator, which has a KV cache."""
    os.environ["TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"] = "1"  # its checkpoints contain pickled options
    from onmt.opts import translate_opts
    from onmt.translate.translator import build_translator
    from onmt.utils.parse import ArgumentParser

    model = next(train_toolkit_model("OpenNMT-py", translation_job).glob("*.pt"))
    parser = ArgumentParser()
    translate_opts(parser)
    search = (
        ["-beam_size", "1", "-random_sampling_topk", "1"]
        if translation_job.beam == 1
        else ["-beam_size", str(translation_job.beam)]
    )
    options = parser.parse_args(["-model", str(model), "-src", "none", "-gpu", "-1", *search])
    translator = build_translator(
        options, report_score=False, logger=logging.getLogger("quiet"), out_file=io.StringIO()
    )

    def translate(batch: Batch, steps: int) -> Any:
        src, lengths = pad_batch(batch, end=False)
        translator.min_length = translator.max_length = steps
        translator.max_length_ratio = 0
        batch_inputs = {
            "src": src[:, :, None],
            "srclen": lengths,
            "ind_in_bucket": range(len(batch)),
        }
        return [
            best[0].tolist()
            for best in translator.translate_batch(batch_inputs, attn_debug=False)["predictions"]
        ]

    return translate


def eole_translator(translation_job: TranslationJob) -> Callable[[Batch, int], Any]:
    """Return eole's translator, which has a KV cache."""
    from eole.config.run import PredictConfig
    from eole.predict import build_predictor

    model = train_toolkit_model("eole", translation_job) / "eole"
    search = (
        {"beam_size": 1, "top_k": 1}
        if translation_job.beam == 1
        else {"beam_size": translation_job.beam}
    )
    config = PredictConfig(
        model_path=str(model),
        src="none",
        world_size=1,
        gpu_ranks=[],
        compute_dtype="fp32",
        **search,
    )
    predictor = build_predictor(
        config, device_id=-1, report_score=False, logger=logging.getLogger("quiet")
    )

    def translate(batch: Batch, steps: int) -> Any:
        src, lengths = pad_batch(batch, end=False)
        predictor.update_settings(min_length=steps, max_length=steps, max_length_ratio=0)
        batch_inputs = {"src": src, "srclen": lengths, "ind_in_bucket": list(range(len(batch)))}
        return [
            best[0].tolist()
            for best in predictor.predict_batch(batch_inputs, attn_debug=False)["predictions"]
        ]

    return translate


def joeynmt_translator(translation_job: TranslationJob) -> Callable[[Batch, int], Any]:
    """Return JoeyNMT's search, which recomputes the prefix at every step."""
    import torch
    from joeynmt.batch import Batch as TheirBatch
    from joeynmt.config import parse_global_args
    from joeynmt.model import build_model
    from joeynmt.search import search
    from joeynmt.vocabulary import Vocabulary

    settings = parse_global_args(
        TOOLKIT_CONFIGS["JoeyNMT"].settings(
            TrainingJob(**translation_job.shape, folder=translation_job.folder)
        )
    )
    vocabulary = Vocabulary(
        [f"p{each}" for each in range(SPECIALS, translation_job.vocabulary)],
        settings.data["special_symbols"],
    )
    torch.manual_seed(0)
    model = build_model(settings.model, src_vocab=vocabulary, trg_vocab=vocabulary).eval()

    def translate(batch: Batch, steps: int) -> Any:
        src, lengths = pad_batch(batch, end=True)
        rows = torch.arange(len(batch))
        joey_batch = TheirBatch(
            src, lengths, None, None, None, rows, torch.device("cpu"), PAD, END, is_train=False
        )
        limits = {"max_output_length": steps, "min_output_length": steps}
        return search(model, joey_batch, beam_size=translation_job.beam, beam_alpha=1.0, **limits)[
            0
        ].tolist()

    return translate


TOOLKIT_TRANSLATORS = {
    "OpenNMT-py": opennmt_translator,
    "eole": eole_translator,
    "JoeyNMT": joeynmt_translator,
}
"""Translator of each toolkit."""

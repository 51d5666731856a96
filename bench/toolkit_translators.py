"""Toolkits that translate in interpreters of their own: eole, OpenNMT-py and JoeyNMT, loaded as their commands load them.

Each builds a model of the asked shape with weights of its own and gives a function that translates one batch of piece ids; the shortest
and the longest output that it may give are the same, so that all make the same steps. This library is not there to be imported.

All compute in float32: eole 0.6.4 refuses int8 on a CPU (its check reads a setting that is gone), OpenNMT-py 3.5.1 takes it and
computes in float32 (it compares a name with a type), JoeyNMT has none.
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
UNKNOWN, PAD, START, END = range(SPECIALS)  # all three number them so


class TranslationJob(NamedTuple):
    """What is loaded, and how it searches."""

    shape: dict[str, Any]  # width, heads, ffn_width, layers
    vocabulary: int
    beam: int
    folder: Path


def train_toolkit_model(name: str, translation_job: TranslationJob) -> Path:
    """Let a toolkit's own command make a model in one update, once, and give the folder that it is saved in."""
    folder = translation_job.folder / name
    if (folder / "done").exists():
        return folder
    folder.mkdir(parents=True)
    job = TrainingJob(**translation_job.shape, folder=folder, batch_tokens=64)
    pieces = [f"p{each}" for each in range(SPECIALS, translation_job.vocabulary)]
    text = [pieces[at : at + 8] for at in range(0, 80, 8)]
    job.write(pieces, text, text)
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
    """Put a batch into one tensor, and its lengths into another; OpenNMT-py and eole know no end of a source."""
    import torch

    rows = [[*source, END] if end else source for source in batch]
    lengths = torch.tensor([len(row) for row in rows])
    longest = int(lengths.max())
    return torch.tensor([row + [PAD] * (longest - len(row)) for row in rows]), lengths


def opennmt_translator(translation_job: TranslationJob) -> Callable[[Batch, int], Any]:
    """Load OpenNMT-py's translator, which has a cache."""
    os.environ["TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"] = (
        "1"  # its checkpoints hold its options, pickled
    )
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
    """Load eole's translator, which has a cache."""
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
    """Build JoeyNMT's model and search, which computes every prefix anew."""
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
    pieces = Vocabulary(
        [f"p{each}" for each in range(SPECIALS, translation_job.vocabulary)],
        settings.data["special_symbols"],
    )
    torch.manual_seed(0)
    model = build_model(settings.model, src_vocab=pieces, trg_vocab=pieces).eval()

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
"""How each is loaded, by its name."""

"""Training configurations of OpenNMT-py, eole and JoeyNMT, and the parsers of their logs.

Nothing here imports Dragoman, because the environments of the toolkits import this module.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

SPECIALS = 4  # unknown, padding, BOS and EOS, which each toolkit adds
_BOTH_SIDES = re.compile(r"(\d+)/\s*(\d+) tok/s")
_ONE_SIDE = re.compile(r"Tokens per Sec:\s+(\d+)")


class TrainingJob(NamedTuple):
    """Model size, training length and the directory of src, tgt and vocabulary."""

    width: int
    heads: int
    ffn_width: int
    layers: int
    folder: Path
    dropout: float = 0.1
    batch_tokens: int = 2048
    steps: int = 1
    report_every: int = 1
    bucket: int = 20_000

    def write(self, tokens: list[str], src: list[list[str]], tgt: list[list[str]]) -> None:
        """Write the texts, as space-separated tokens, and the vocabulary."""
        for name, texts in (("train.src", src), ("train.tgt", tgt)):
            (self.folder / name).write_text(
                "".join(" ".join(text) + "\n" for text in texts), encoding="utf-8"
            )
        (self.folder / "vocabulary").write_text(
            "".join(f"{token}\t1\n" for token in tokens), encoding="utf-8"
        )
        (self.folder / "tokens").write_text(
            "".join(f"{token}\n" for token in tokens), encoding="utf-8"
        )


class ToolkitConfig(NamedTuple):
    """A toolkit's training command and log format."""

    settings: Callable[[TrainingJob], dict[str, Any]]
    arguments: tuple[str, ...]  # arguments of Python; the configuration file follows
    rates: Callable[[str], list[float]]
    sides: int  # sides whose tokens its log counts: 2, or 1 for the target

    def command(self, python: Path, job: TrainingJob, name: str) -> list[str]:
        """Write the configuration and return the training command."""
        config_path = job.folder / f"{name}.yaml"
        config_path.write_text(json.dumps(self.settings(job)), encoding="utf-8")  # JSON is YAML too
        return [str(python), *self.arguments, str(config_path)]


def opennmt_config(job: TrainingJob) -> dict[str, Any]:
    """Return the configuration of OpenNMT-py 3."""
    return _files(job) | {
        "share_vocab": True,
        "save_model": str(job.folder / "OpenNMT-py"),
        "train_steps": job.steps,
        "save_checkpoint_steps": job.steps,
        "report_every": job.report_every,
        "world_size": 1,
        "gpu_ranks": [],
        "num_workers": 0,
        "encoder_type": "transformer",
        "decoder_type": "transformer",
        "enc_layers": job.layers,
        "dec_layers": job.layers,
        "heads": job.heads,
        "hidden_size": job.width,
        "word_vec_size": job.width,
        "transformer_ff": job.ffn_width,
        "dropout": [job.dropout],
        "attention_dropout": [0.0],
        "add_qkvbias": True,
        "label_smoothing": 0.1,
        "position_encoding": True,
        "share_embeddings": True,
        "share_decoder_embeddings": True,
        "batch_type": "tokens",
        "batch_size": job.batch_tokens,
        "bucket_size": job.bucket,
        "normalization": "tokens",
        "optim": "adam",
        "learning_rate": 1e-4,
        "max_grad_norm": 0,
    }


def eole_config(job: TrainingJob) -> dict[str, Any]:
    """Return the configuration of eole."""
    return _files(job) | {
        "share_vocab": True,
        "overwrite": True,
        "report_every": job.report_every,
        "training": {
            "model_path": str(job.folder / "eole"),
            "train_steps": job.steps,
            "save_checkpoint_steps": job.steps,
            "world_size": 1,
            "gpu_ranks": [],
            "num_workers": 0,
            "dropout": [job.dropout],
            "attention_dropout": [0.0],
            "label_smoothing": 0.1,
            "batch_type": "tokens",
            "batch_size": job.batch_tokens,
            "bucket_size": job.bucket,
            "normalization": "tokens",
            "optim": "adam",
            "learning_rate": 1e-4,
            "max_grad_norm": 0,
            "compute_dtype": "fp32",
            "log_attention_entropy": False,  # slow, and the others do not compute it
        },
        "model": {
            "architecture": "transformer",
            "layers": job.layers,
            "heads": job.heads,
            "hidden_size": job.width,
            "transformer_ff": job.ffn_width,
            "add_qkvbias": True,
            "add_final_linear_bias": True,
            "add_ffnbias": True,
            "embeddings": {
                "word_vec_size": job.width,
                "position_encoding_type": "SinusoidalInterleaved",
            },
            "share_embeddings": True,
            "share_decoder_embeddings": True,
        },
    }


def joeynmt_config(job: TrainingJob) -> dict[str, Any]:
    """Return the configuration of JoeyNMT, which does not batch by length."""
    sides = {
        side: {
            "lang": language,
            "level": "word",
            "max_length": 512,
            "voc_file": str(job.folder / "tokens"),
        }
        for side, language in (("src", "src"), ("trg", "tgt"))
    }
    stack = {
        "type": "transformer",
        "num_layers": job.layers,
        "num_heads": job.heads,
        "hidden_size": job.width,
        "ff_size": job.ffn_width,
        "dropout": job.dropout,
        "layer_norm": "pre",
        "embeddings": {"embedding_dim": job.width, "scale": True},
    }
    return {
        "name": "bench",
        "model_dir": str(job.folder / "JoeyNMT"),
        "use_cuda": False,
        "data": {
            "train": str(job.folder / "train"),
            "dev": str(job.folder / "train"),
            "dataset_type": "plain",
            **sides,
        },
        "testing": {"beam_size": 1},
        "training": {
            "overwrite": True,
            "optimizer": "adam",
            "learning_rate": 1e-4,
            "learning_rate_min": 0.0,
            "scheduling": "noam",  # required; `plateau` fails with this torch
            "label_smoothing": 0.1,
            "normalization": "tokens",
            "batch_type": "token",
            "batch_size": job.batch_tokens,
            "shuffle": False,
            "epochs": 10**6,
            "updates": job.steps,
            "logging_freq": job.report_every,
            "validation_freq": job.report_every * 10**6,
        },
        "model": {
            "tied_embeddings": True,
            "tied_softmax": True,
            "encoder": stack,
            "decoder": stack,
        },
    }


def _files(job: TrainingJob) -> dict[str, Any]:
    texts = {
        "path_src": str(job.folder / "train.src"),
        "path_tgt": str(job.folder / "train.tgt"),
        "transforms": [],
    }
    return {
        "data": {"corpus_1": texts},
        "src_vocab": str(job.folder / "vocabulary"),
        "tgt_vocab": str(job.folder / "vocabulary"),
    }


def parse_both_sides(log: str) -> list[float]:
    """Return the source plus target tokens/s of each report."""
    return [float(src) + float(tgt) for src, tgt in _BOTH_SIDES.findall(log)]


def parse_target_side(log: str) -> list[float]:
    """Return the target tokens/s of each report."""
    return [float(rate) for rate in _ONE_SIDE.findall(log)]


TOOLKIT_CONFIGS = {
    "OpenNMT-py": ToolkitConfig(
        opennmt_config, ("-m", "onmt.bin.train", "-config"), parse_both_sides, 2
    ),
    "eole": ToolkitConfig(
        eole_config, ("-m", "eole.bin.main", "train", "-config"), parse_both_sides, 2
    ),
    "JoeyNMT": ToolkitConfig(
        joeynmt_config, ("-m", "joeynmt", "train", "--skip-test"), parse_target_side, 1
    ),
}
"""Training configuration of each toolkit, by its name."""

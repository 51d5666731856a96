"""Measure GPU translation throughput of Dragoman's native engine against `transformers.generate`.

    python bench/decode_gpu.py --data DIR      Multi30k in DIR; about three minutes
    python bench/decode_gpu.py                 synthetic text, on which outputs end by chance
    python bench/decode_gpu.py --size tiny --sentences 8 --train-steps 2 --dtypes float32

Both have the same weights. "ours" translates text to text; "ours, ids" and the peer translate token
ids in batches of similar length. Each runs at several batch sizes after warm-up; the best counts,
and the ratio to the best peer is printed. All search without a length penalty, which they define
differently. The peer runs with and without `early_stopping`; the faster counts. Outputs are
compared with the peer's in float32.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import sacrebleu
import torch

from bench.gpu_systems import (
    DTYPES,
    SMALL_BATCH_SENTENCES,
    BenchmarkInputs,
    OurEngine,
    OurTranslator,
    TransformersEarlyStopping,
    TransformersPeer,
)
from bench.synthetic_corpus import BenchmarkPlan, PreparedCorpus
from bench.train_gpu import (
    SIZES,
    build_trainer,
    device_name,
    free_memory,
    load_corpus,
    model_config,
    reset_peak,
    synchronize,
)
from dragoman.checkpoint.run_directory import RunDirectory
from dragoman.config import Config, DecodeConfig, TextConfig, TrainConfig
from dragoman.data.parallel_corpus import ParallelFiles
from dragoman.exchange.huggingface_export import save_hugging_face
from dragoman.models.encoder_decoder import EncoderDecoder
from dragoman.training.torch_compile import configure_backends

REFERENCE = ("transformers", "float32")
TEST_SETS = (
    "test_2016_flickr",
    "test_2017_flickr",
    "dev",
)  # of Multi30k: 3,014 unseen sentences


def main() -> None:
    """Train briefly, time every system and setting, print the ratios and one line of JSON."""
    options = parse_arguments()
    began = time.monotonic()
    device = torch.device(options.device)
    configure_backends(device, deterministic=False)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        corpus = load_corpus(options, folder)
        texts, references = sentences(options, corpus)
        model = train_briefly(options, corpus, device, folder / "run")
        # training may allow TF32; the reference outputs must not
        torch.set_float32_matmul_precision("highest")
        config = Config(
            text=TextConfig(tokenizer=corpus.tokenizers.src.algorithm),
            model=model_config(options.size),
            decode=DecodeConfig(beam=4, length_penalty=0.0),
        )
        (folder / "theirs").mkdir()
        save_hugging_face(model, corpus.tokenizers, config, folder / "theirs")
        print(
            f"{device_name(device)}, torch {torch.__version__}; {options.size}, "
            f"vocabulary of {len(corpus.tokenizers.tgt):,}, {len(texts):,} sentences, "
            f"best of {options.rounds}; ready after {time.monotonic() - began:.0f} s",
            flush=True,
        )
        rows: list[dict[str, Any]] = []
        for beam in options.beams:
            for dtype in options.dtypes:
                for kind in (
                    OurTranslator,
                    OurEngine,
                    TransformersPeer,
                    *([TransformersEarlyStopping] if beam > 1 else []),
                ):
                    if time.monotonic() - began < options.seconds:
                        rows += benchmark_system(
                            kind,
                            BenchmarkInputs(
                                model, corpus, config, texts, folder / "theirs", device
                            ),
                            beam,
                            dtype,
                            options,
                        )
                    free_memory(device)
    results = report(rows, references, options)
    signature = {
        "device": device_name(device),
        "torch": torch.__version__,
        "size": options.size,
        "sentences": len(texts),
    }
    kept = [{name: value for name, value in row.items() if name != "ids"} for row in rows]
    print(json.dumps({"bench": "decode_gpu", "rows": kept, "results": results} | signature))


def parse_arguments() -> argparse.Namespace:
    """Parse the arguments; defaults depend on the size."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--size", choices=list(SIZES), default="base")
    parser.add_argument("--sentences", type=int, default=3000)
    parser.add_argument("--beams", type=int, nargs="+", default=[4, 1])
    parser.add_argument(
        "--batches",
        type=int,
        nargs="+",
        default=[0, 1536],
        help="batch sizes; 0 for the translator's choice",
    )
    parser.add_argument("--peer-batches", type=int, nargs="+", default=[384, 768])
    parser.add_argument(
        "--dtypes", nargs="+", choices=list(DTYPES), default=["float16", "float32", "bfloat16"]
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--train-steps",
        type=int,
        default=1000,
        help="training steps before timing, so that outputs end",
    )
    parser.add_argument(
        "--data", type=Path, metavar="DIR", help="directory of multi30k/; default: synthetic text"
    )
    parser.add_argument("--vocabulary", type=int)
    parser.add_argument(
        "--length-factor",
        type=float,
        default=1.0,
        help="length of synthetic sentences relative to Multi30k's",
    )
    parser.add_argument(
        "--seconds", type=float, default=200.0, help="start no measurement after this long"
    )
    options = parser.parse_args()
    tiny = options.size == "tiny"
    options.vocabulary = options.vocabulary or (512 if tiny else 32_768)
    options.pairs = max(options.sentences, 200 if tiny else 60_000)
    options.batch_tokens = 256 if tiny else 25_600
    return options


def sentences(options: argparse.Namespace, corpus: PreparedCorpus) -> tuple[list[str], list[str]]:
    """Return the sentences to translate and their references, unseen in training if possible."""
    chosen = list(zip(corpus.src, corpus.tgt, strict=True))
    if options.data:
        folder = options.data / "multi30k"
        files = [(folder / f"{part}.de.xz", folder / f"{part}.en.xz") for part in TEST_SETS]
        chosen = [
            (pair.src, pair.tgt)
            for src, tgt in files
            if src.exists()
            for pair in ParallelFiles(src, tgt).pairs()
        ] + chosen
    return [src for src, _ in chosen[: options.sentences]], [
        tgt for _, tgt in chosen[: options.sentences]
    ]


def train_briefly(
    options: argparse.Namespace, corpus: PreparedCorpus, device: torch.device, folder: Path
) -> EncoderDecoder:
    """Train for a few steps, so that the model ends its sentences."""
    plan = BenchmarkPlan(
        corpus.store,
        batch_tokens=options.batch_tokens,
        max_shapes=8,
        steps=options.train_steps,
        rounds=1,
    )
    config = TrainConfig(
        steps=options.train_steps,
        batch_tokens=options.batch_tokens,
        checkpoint_every=10**6,
        learning_rate=3e-4,
        warmup_steps=options.train_steps // 2,
        compile="off",
        keep_checkpoints=1,
    )
    with RunDirectory(folder, keep_checkpoints=1) as run:
        trainer = build_trainer(
            model_config(options.size), plan, config, run, device, len(corpus.tokenizers.tgt)
        )
        trainer.fit(resume=False)
    assert isinstance(trainer.model, EncoderDecoder), "what was built"
    return trainer.model.eval()


def benchmark_system(
    kind: Any, inputs: BenchmarkInputs, beam: int, dtype: str, options: argparse.Namespace
) -> list[dict[str, Any]]:
    """Time a system at all its batch sizes; report errors and continue."""
    rows: list[dict[str, Any]] = []
    try:
        system = kind(inputs, dtype)
    except Exception as error:
        return [
            _failure_row({"system": kind.name, "beam": beam, "dtype": dtype, "batch": 0}, error)
        ]
    for size in options.peer_batches if issubclass(kind, TransformersPeer) else options.batches:
        rows.append(time_system(system, size, beam, dtype, inputs.device, options.rounds))
        free_memory(inputs.device)
    if kind is OurTranslator and "error" not in rows[0]:
        rows[0] |= _batch_independence(system, rows[0], beam)
    return rows


def time_system(
    system: Any, size: int, beam: int, dtype: str, device: torch.device, rounds: int
) -> dict[str, Any]:
    """Time one setting; print and return its row."""
    row: dict[str, Any] = {"system": system.name, "beam": beam, "dtype": dtype, "batch": size}
    try:
        reset_peak(device)
        took, found = _seconds(lambda: system(size, beam), device, rounds)
    except Exception as error:
        return _failure_row(row, error)
    row |= {
        "sentences_s": len(found) / min(took),
        "slowest": len(found) / max(took),
        "ids": system.detokenize(found),
    }
    row["MiB"] = torch.cuda.max_memory_allocated(device) / 2**20 if device.type == "cuda" else None
    memory = "" if row["MiB"] is None else f"  {row['MiB']:8,.0f} MiB"
    print(
        f"  {_label(row)}  {row['sentences_s']:9.1f} sentences/s "
        f"(slowest {row['slowest']:.1f}){memory}",
        flush=True,
    )
    return row


def _batch_independence(system: OurTranslator, row: dict[str, Any], beam: int) -> dict[str, Any]:
    """Return the fraction of outputs equal to those of batch sizes 1 and 64."""
    try:
        equal = {
            size: _equal_fraction(
                system.translate_in_small_batches(beam, size), row["ids"][:SMALL_BATCH_SENTENCES]
            )
            for size in (1, 64)
        }
    except Exception as error:
        _failure_row(row, error)
        return {}
    print(
        f"  {_label(row)}  equal to batch size 1: {equal[1]:.1%}, to 64: {equal[64]:.1%}",
        flush=True,
    )
    return {"equal_to_batch_1": equal[1], "equal_to_batch_64": equal[64]}


def _failure_row(row: dict[str, Any], error: Exception) -> dict[str, Any]:
    """Print and return the error of a row."""
    reason = " ".join(f"{type(error).__name__}: {error}".split())[:200]
    print(f"  {_label(row)}  failed: {reason}", flush=True)
    return row | {"error": reason}


def _label(row: dict[str, Any]) -> str:
    """Return the label of a row."""
    return f"{row['system']:19s} beam {row['beam']}  {row['dtype']:9s} batch {row['batch']:5d}"


def _equal_fraction(one: Sequence[str], other: Sequence[str]) -> float:
    """Return the fraction of equal outputs."""
    return sum(a == b for a, b in zip(one, other, strict=True)) / len(one)


def _seconds(
    action: Callable[[], Any], device: torch.device, rounds: int
) -> tuple[list[float], Any]:
    """Time an action after warm-up: one call, and on a GPU another one to capture CUDA graphs."""
    for _ in range(2 if device.type == "cuda" else 1):
        found = action()
    took = []
    for _ in range(rounds):
        synchronize(device)
        began = time.perf_counter()
        found = action()
        synchronize(device)
        took.append(time.perf_counter() - began)
    return took, found


def report(
    rows: Sequence[dict[str, Any]], references: list[str], options: argparse.Namespace
) -> list[dict[str, Any]]:
    """Print and return the best batch size of each system and its ratio to the peer."""
    results = []
    print("\nbest batch size of each:")
    for beam in options.beams:
        best: dict[tuple[str, str], dict[str, Any]] = {}
        for row in rows:
            key = (row["system"], row["dtype"])
            if (
                row["beam"] == beam
                and "error" not in row
                and row["sentences_s"] > best.get(key, {"sentences_s": 0.0})["sentences_s"]
            ):
                best[key] = row
        peers = [
            row for (system, _), row in best.items() if system.startswith(TransformersPeer.name)
        ]
        if not peers:
            continue
        reference_row = best.get(REFERENCE, peers[0])
        for (system, _), row in best.items():
            result = {
                name: row[name] for name in ("system", "beam", "dtype", "batch", "sentences_s")
            }
            result |= {
                "same_outputs": _equal_fraction(row["ids"], reference_row["ids"]),
                "bleu": sacrebleu.corpus_bleu(row["ids"], [references]).score,
            }
            print(
                f"  {_label(row)}  {row['sentences_s']:9.1f} sentences/s"
                f"  BLEU {result['bleu']:.2f}",
                end="",
            )
            print(
                f"  equal to {reference_row['system']} {reference_row['dtype']}: "
                f"{result['same_outputs']:.2%}",
                end="",
            )
            if not system.startswith(TransformersPeer.name):
                result |= _ratios(row, peers)
                print(
                    f"  {result['ratio_to_best']:.2f} times the best peer ({result['best']})",
                    end="",
                )
            print()
            results.append(result)
    return results


def _ratios(row: dict[str, Any], peers: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the ratios of a row to the fastest peer and to each peer of its dtype."""
    quickest = max(peers, key=lambda peer: float(peer["sentences_s"]))
    alike = {
        f"ratio to {peer['system']}": row["sentences_s"] / peer["sentences_s"]
        for peer in peers
        if peer["dtype"] == row["dtype"]
    }
    return alike | {
        "ratio_to_best": row["sentences_s"] / quickest["sentences_s"],
        "best": f"{quickest['system']}, {quickest['dtype']}",
    }


if __name__ == "__main__":
    main()

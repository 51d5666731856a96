"""Compare all recipes on Multi30k at equal training time on one GPU: BLEU and decoding speed.

    python bench/architectures.py --data DIR --work /tmp/architectures    train what is missing
    python bench/architectures.py --work /tmp/architectures --speed       then time decoding
    python bench/architectures.py --work /tmp/architectures --table       then print the table

DIR has multi30k/ and cmudict_g2p/. Every recipe is scaled to one size (width 128; 256 for networks
without self-attention) and trained with the same vocabulary of 5,500, optimizer, schedule, label
smoothing and dropout: only the architecture differs. `--parallel` runs share the GPU, in random
order. The time includes validation and checkpoints. Models are selected on the validation set; the
test set is translated once, at the end.
"""

from __future__ import annotations

import argparse
import json
import lzma
import os
import random
import statistics
import subprocess
import sys
import time
import traceback
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from architecture_configs import (
    PRONUNCIATION,
    TRANSLATION,
    Architecture,
    Dataset,
    list_architectures,
)

from dragoman.config import Config

HEADLINE_SEEDS = (1, 2, 3)
VALIDATION_SENTENCES = 500  # translated for the validation column


def add_files(architecture: Architecture, work: Path) -> Config:
    """Return a configuration with the files of its dataset."""
    files = {
        f"{prefix}{side}": str(work / architecture.dataset.folder / f"{split}.{ending}")
        for split, prefix in (("train", ""), ("dev", "valid_"))
        for side, ending in zip(("src", "tgt"), architecture.dataset.sides, strict=True)
    }
    return architecture.config.replace(data=files)


def prepare_all(chosen: list[Architecture], work: Path) -> None:
    """Train tokenizers and prepare the data before timing."""
    from dragoman.runs.translation_data_preparation import prepare_data
    from dragoman.training.progress_display import QuietProgress

    for architecture in {
        architecture.dataset.folder: architecture for architecture in chosen
    }.values():
        prepare_data(
            add_files(architecture, work),
            work / f"text-{architecture.dataset.folder}",
            QuietProgress(),
        )


def train_architecture(
    architecture: Architecture, *, seed: int, seconds: float, work: Path
) -> dict[str, Any]:
    """Train and score one model; return its row."""
    import torch

    from dragoman.bundle import Card, write_bundle
    from dragoman.bundle.translation_bundle_loader import build_loaded_model
    from dragoman.checkpoint.run_directory import RunDirectory
    from dragoman.inference import Translator
    from dragoman.models.factory import count_parameters
    from dragoman.runs.auto_config import apply_step_count
    from dragoman.runs.final_model_and_card import select_weights
    from dragoman.runs.time_budget import CLOSING_FRACTION, CLOSING_SECONDS, TimeBudget
    from dragoman.runs.translation_data_preparation import prepare_data
    from dragoman.runs.translation_training_builder import TranslationBuilder
    from dragoman.runtime.device import choose_device
    from dragoman.training.distributed.process_group import ProcessGroup
    from dragoman.training.progress_display import QuietProgress

    device = choose_device("auto")
    config, dataset, out = (
        add_files(architecture, work).replace(train={"seed": seed}),
        architecture.dataset,
        work / "models" / f"{slug(architecture.name)}-{seed}",
    )
    data = work / dataset.folder
    prepared = prepare_data(config, out / "text", QuietProgress())
    with RunDirectory(out / "training", keep_checkpoints=2) as run:
        step_time = (
            TranslationBuilder(config, prepared, device=device, progress=QuietProgress())
            .build_trainer(run, world=ProcessGroup(), deadline=None, replan=None)
            .measure_throughput(2.0)
        )
        steps = max(50, int(seconds / step_time.seconds_per_step))
        # post-norm needs it
        config = apply_step_count(config, steps).replace(train={"warmup_steps": max(1, steps // 8)})
        parts = TranslationBuilder(config, prepared, device=device, progress=QuietProgress())
        time_budget = TimeBudget((seconds + CLOSING_SECONDS) / (1 - CLOSING_FRACTION))
        trainer = parts.build_trainer(
            run,
            world=ProcessGroup(),
            deadline=time_budget.seconds_left,
            replan=lambda done, each: time_budget.plan_steps(done, each, most=10**9),
        )
        result = trainer.fit(resume=False)
        took = time_budget.elapsed()
        trainer_state = trainer.state
        tokens = trainer_state.tokens_seen
        weights, chosen = select_weights(run, config)
        del trainer
    torch.cuda.empty_cache()
    translator = Translator(
        build_loaded_model(config, prepared.tokenizers, weights).to(device),
        prepared.tokenizers,
        config,
    )
    row: dict[str, Any] = {
        "parameters": count_parameters(translator.model),
        "steps": result.step,
        "seconds": round(took, 1),
        "tokens": tokens,
        "tokens_a_second": round(tokens / took),
        "chosen": chosen,
        "loss": round(result.best.get("loss", float("nan")), 4),
    }
    for split in ("dev", dataset.test):
        outputs = translator.translate(
            read(data / f"{split}.{dataset.sides[0]}")[
                : VALIDATION_SENTENCES if split == "dev" else None
            ]
        )
        row["dev" if split == "dev" else "test"] = round(
            score_outputs(dataset, split, data, outputs), 2
        )
    write_bundle(
        out / "model",
        config=config,
        tokenizers=prepared.tokenizers,
        weights=weights,
        card=Card(command="bench/architectures.py"),
        golden=[],
    )
    return row


def score_outputs(dataset: Dataset, split: str, data: Path, outputs: list[str]) -> float:
    """Return BLEU, or for pronunciations the phoneme error rate in percent."""
    if dataset is TRANSLATION:
        import sacrebleu

        return float(
            sacrebleu.corpus_bleu(
                outputs, [read(data / f"{split}.{dataset.sides[1]}")[: len(outputs)]]
            ).score
        )
    errors = length = 0
    for output, listed in zip(outputs, read(data / f"{split}.all")[: len(outputs)], strict=True):
        distance, size = min((edit_distance(output, each), len(each)) for each in listed.split())
        errors, length = errors + distance, length + size
    return 100 * errors / length


def edit_distance(one: str, other: str) -> int:
    """Return the Levenshtein distance of two strings."""
    row = list(range(len(other) + 1))
    for position, letter in enumerate(one, 1):
        above, row[0] = row[0], position
        for column, wanted in enumerate(other, 1):
            above, row[column] = (
                row[column],
                min(row[column] + 1, row[column - 1] + 1, above + (letter != wanted)),
            )
    return row[-1]


def read(path: Path) -> list[str]:
    """Return the lines of a file."""
    return path.read_text(encoding="utf-8").splitlines()


def unpack_corpora(data: Path, work: Path) -> None:
    """Write both corpora as text files, with one character per letter or phoneme."""
    for dataset in (TRANSLATION, PRONUNCIATION):
        out = work / dataset.folder
        out.mkdir(parents=True, exist_ok=True)
        for split in ("train", "dev", dataset.test):
            for side in dataset.sides:
                lines = (
                    lzma.decompress((data / dataset.folder / f"{split}.{side}.xz").read_bytes())
                    .decode()
                    .splitlines()
                )
                if dataset is PRONUNCIATION:
                    lines = [
                        _encode_phones(line) if side == "phones" else line.replace(" ", "")
                        for line in lines
                    ]
                (out / f"{split}.{side}").write_text("\n".join(lines) + "\n", encoding="utf-8")
            if dataset is PRONUNCIATION and split != "train":
                records = map(
                    json.loads,
                    lzma.decompress(
                        (data / dataset.folder / f"{split}.all.jsonl.xz").read_bytes()
                    ).splitlines(),
                )
                (out / f"{split}.all").write_text(
                    "\n".join(" ".join(map(_encode_phones, each["prons"])) for each in records)
                    + "\n",
                    encoding="utf-8",
                )


def _encode_phones(phones: str) -> str:
    """Return phonemes such as AH0 as one character each."""
    return "".join(chr(0x4E00 + PHONES.setdefault(phone, len(PHONES))) for phone in phones.split())


PHONES: dict[str, int] = {}  # in the order of the training set, which is unpacked first


def training_jobs(chosen: list[Architecture]) -> list[tuple[Architecture, int]]:
    """Return architectures and seeds in random order."""
    every = [
        (architecture, seed)
        for architecture in chosen
        for seed in (HEADLINE_SEEDS if architecture.headline else (1,))
    ]
    random.Random(0).shuffle(every)
    # headline rows first, in case time runs out
    return sorted(every, key=lambda job: not job[0].headline)


def train_all(options: argparse.Namespace, chosen: list[Architecture]) -> None:
    """Run each job in a process, `--parallel` at a time; skip those that have a row."""
    rows = options.work / "rows.jsonl"
    done = {(row["name"], row["seed"]) for row in read_rows(rows)}
    waiting = [
        (architecture, seed)
        for architecture, seed in training_jobs(chosen)
        if (architecture.name, seed) not in done
    ]
    began = time.monotonic()

    def work(job: tuple[Architecture, int]) -> None:
        architecture, seed = job
        if options.stop_after and time.monotonic() - began > options.stop_after:
            return
        command = [
            sys.executable,
            __file__,
            "--work",
            str(options.work),
            "--seconds",
            str(options.seconds),
            "--one",
            architecture.name,
            "--seed",
            str(seed),
        ]
        ended = subprocess.run(command, capture_output=True, text=True)
        row = (
            json.loads(ended.stdout.splitlines()[-1])
            if ended.returncode == 0
            else {"failed": ended.stderr[-2000:]}
        )
        row = {"name": architecture.name, "group": architecture.group, "seed": seed, **row}
        with rows.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
        print(
            {
                key: row[key]
                for key in ("name", "seed", "dev", "parameters", "steps", "failed")
                if key in row
            },
            flush=True,
        )

    with ThreadPoolExecutor(options.parallel) as pool:
        list(pool.map(work, waiting))


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Return the rows written so far, without failures."""
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    return [row for row in map(json.loads, lines) if "failed" not in row]


def measure_speed(work: Path) -> None:
    """Time greedy decoding of the test set with each model, one after another."""
    import torch

    from dragoman.inference import Translator

    source = read(work / "multi30k" / "test_2016_flickr.de")
    for folder in sorted(work.glob("models/*-1")):
        if folder.name.startswith("pronunciation"):
            continue
        translator = Translator.load(folder / "model")
        translator.translate(source[:64], beam=1)
        torch.cuda.synchronize()
        began = time.monotonic()
        translator.translate(source, beam=1)
        torch.cuda.synchronize()
        rate = len(source) / (time.monotonic() - began)
        (folder / "speed.json").write_text(json.dumps({"sentences_a_second": round(rate)}))
        print(folder.name, round(rate), flush=True)


def table(work: Path) -> Iterator[str]:
    """Return the rows as a Markdown table, best first in each group."""
    rows = read_rows(work / "rows.jsonl")
    yield (
        "| recipe | parameters | epochs | tokens/s | BLEU, test 2016 | validation | "
        "greedy sentences/s |"
    )
    yield "|---|---|---|---|---|---|---|"
    names = dict.fromkeys(row["name"] for row in rows)
    groups = dict.fromkeys(row["group"] for row in rows)
    mean = {
        name: statistics.mean(row["test"] for row in rows if row["name"] == name) for name in names
    }
    for group in groups:
        yield f"| **{group}** | | | | | | |"
        for name in sorted(
            (row["name"] for row in rows if row["group"] == group and row["seed"] == 1),
            key=lambda name: -mean[name],
        ):
            own_rows = [row for row in rows if row["name"] == name]
            bleu = [row["test"] for row in own_rows]
            spread = f" ± {statistics.stdev(bleu):.1f} ({len(bleu)} seeds)" if len(bleu) > 1 else ""
            speed = work / "models" / f"{slug(name)}-1" / "speed.json"
            rate = json.loads(speed.read_text())["sentences_a_second"] if speed.exists() else None
            tokens = statistics.mean(row["tokens"] for row in own_rows)
            tokens_s = statistics.mean(row["tokens_a_second"] for row in own_rows)
            validation = statistics.mean(row["dev"] for row in own_rows)
            yield (
                f"| {name} | {own_rows[0]['parameters'] / 1e6:.1f} M | "
                f"{tokens / TOKENS_PER_EPOCH:.0f} | {tokens_s:,.0f} | {mean[name]:.1f}{spread} | "
                f"{validation:.1f} | {'' if rate is None else f'{rate:,}'} |"
            )


TOKENS_PER_EPOCH = 908_000  # tokens of both sides in one epoch, EOS included


def slug(name: str) -> str:
    """Return a directory name for an architecture's name."""
    return "".join(letter if letter.isalnum() else "_" for letter in name)


def main() -> None:
    """Parse the arguments; train, time decoding or print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--data",
        type=Path,
        default=os.environ.get("DRAGOMAN_DATA"),
        metavar="DIR",
        help="directory of multi30k/ and cmudict_g2p/; default: DRAGOMAN_DATA",
    )
    parser.add_argument("--work", type=Path, required=True, help="directory of results and models")
    parser.add_argument("--seconds", type=float, default=60.0, help="training time of each run")
    parser.add_argument("--parallel", type=int, default=6, help="runs that share the GPU")
    parser.add_argument("--only", nargs="*", default=None, help="names of architectures")
    parser.add_argument(
        "--trials",
        type=Path,
        help="JSON list of [name, architecture, {section: {setting: value}}] to compare",
    )
    parser.add_argument(
        "--stop-after", type=float, default=0.0, help="start no run after this many seconds"
    )
    parser.add_argument("--one", help=argparse.SUPPRESS)
    parser.add_argument("--seed", type=int, default=1, help=argparse.SUPPRESS)
    parser.add_argument("--speed", action="store_true", help="time decoding")
    parser.add_argument("--table", action="store_true", help="print the table")
    options = parser.parse_args()
    every = {architecture.name: architecture for architecture in list_architectures()}
    kept = options.work / "trials.json"
    if options.trials:
        options.work.mkdir(parents=True, exist_ok=True)
        kept.write_text(options.trials.read_text())
    if kept.exists():
        every = {
            name: Architecture(
                name, "trial", every[base].config.replace(**changes), dataset=every[base].dataset
            )
            for name, base, changes in json.loads(kept.read_text())
        }
    if options.table:
        print("\n".join(table(options.work)))
    elif options.speed:
        measure_speed(options.work)
    elif options.one:
        try:
            row = train_architecture(
                every[options.one], seed=options.seed, seconds=options.seconds, work=options.work
            )
        except Exception:
            traceback.print_exc()
            sys.exit(1)
        print(json.dumps(row))
    else:
        if options.data is None:
            parser.error("--data DIR is required; found none; pass it or set DRAGOMAN_DATA")
        unpack_corpora(options.data, options.work)
        chosen = [
            architecture
            for name, architecture in every.items()
            if options.only is None or name in options.only
        ]
        prepare_all(chosen, options.work)
        train_all(options, chosen)


if __name__ == "__main__":
    main()

"""Translating on a CPU: our native engine and our exported one beside CTranslate2 and transformers, on the same work.

    python bench/decode_cpu.py --size small --beam 1 --sentences 1000

Random weights of a fixed seed; sentences of like lengths go together, and every output is as long as its batch's longest source and two
more, so that all do the same steps. Each contender lives in a process of its own, which loads, finds its best batch size and warms up
before anything is timed; the rounds then go from one to the next, one at a time, so that a busy machine is busy for all. The best of the
rounds counts, in sentences a second of wall time, with the worst beside it and the process's peak memory.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

SHAPES = {
    "tiny": {"width": 32, "heads": 2, "feedforward": 64, "encoder": ["self*1"], "decoder": ["self*1"]},
    "small": {"width": 256, "heads": 4, "feedforward": 1024, "encoder": ["self*4"], "decoder": ["self*4"]},
    "base": {"width": 512, "heads": 8, "feedforward": 2048, "encoder": ["self*6"], "decoder": ["self*6"]},
}
VOCABULARIES = {"tiny": 500, "small": 8_000, "base": 32_000}
BATCHES = (16, 32, 64, 128)  # rows tried, beams counted
CONTENDERS = (
    "native float32",
    "native int8",
    "exported float32",
    "exported int8",
    "ctranslate2 float32 workers",
    "ctranslate2 int8 workers",
    "ctranslate2 float32 threads",
    "ctranslate2 int8 threads",
    "transformers float32",
    "transformers int8",
)
Batch = list[list[int]]
Translate = Callable[[Sequence[Batch]], None]


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


def sentences(count: int, vocabulary: int) -> Batch:
    """Draw sources, as long as those of a general corpus: 3 to 60 pieces, 14 on average."""
    import numpy as np

    chance = np.random.default_rng(0)
    lengths = np.clip(np.round(chance.gamma(6.0, 2.4, count)), 3, 60).astype(int)
    return [chance.integers(8, vocabulary, int(length)).tolist() for length in lengths]


def batched(sources: Batch, rows: int) -> list[Batch]:
    """Put sentences of like lengths together, the longest first."""
    ordered = sorted(sources, key=len, reverse=True)
    return [ordered[at : at + rows] for at in range(0, len(ordered), rows)]


def steps(batch: Batch) -> int:
    """Say how long every output of a batch is."""
    return max(map(len, batch)) + 2


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
        many, length = len(batch), steps(batch)
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
        for found in spread(engine.generate, map(asked, batches), engine.workers):
            assert found, "an engine must answer"

    return translate


def native(size: str, precision: str, beam: int, cores: int, folder: Path) -> Translate:
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


def transformers(size: str, precision: str, beam: int, cores: int, folder: Path) -> Translate:
    """Marian's model of the same shape, all threads on each batch, which is what `generate` does."""
    import torch
    from transformers import MarianConfig, MarianMTModel

    shape, vocabulary = SHAPES[size], VOCABULARIES[size]
    layers = int(str(shape["encoder"][0]).split("*")[1])  # type: ignore[index]
    sides = {f"{side}_{what}": shape[ours] for side in ("encoder", "decoder") for what, ours in (("attention_heads", "heads"),)}
    sides |= {f"{side}_ffn_dim": shape["feedforward"] for side in ("encoder", "decoder")}
    torch.manual_seed(0)
    config = MarianConfig(
        vocab_size=vocabulary,
        d_model=shape["width"],
        encoder_layers=layers,
        decoder_layers=layers,
        activation_function="relu",
        max_position_embeddings=512,
        pad_token_id=0,
        eos_token_id=2,
        decoder_start_token_id=1,
        forced_eos_token_id=None,
        **sides,
    )
    model: Any = MarianMTModel(config).eval()
    if precision == "int8":
        model = torch.ao.quantization.quantize_dynamic(model, {torch.nn.Linear}, dtype=torch.qint8)
    torch.set_num_threads(cores)

    def translate(batches: Sequence[Batch]) -> None:
        for batch in batches:
            longest = max(map(len, batch)) + 1
            ids = torch.tensor([[*source, 2, *[0] * (longest - 1 - len(source))] for source in batch])
            length = steps(batch)
            with torch.inference_mode():
                model.generate(
                    ids, attention_mask=(ids != 0).long(), num_beams=beam, do_sample=False, min_new_tokens=length, max_new_tokens=length
                )

    return translate


def contender(name: str, size: str, beam: int, cores: int, folder: Path) -> Translate:
    """Load one of the contenders."""
    program, precision, *split = name.split()
    if program == "ctranslate2":
        return ctranslate2_itself(size, precision, beam, cores, folder, workers=split == ["workers"])
    loaders = {"native": native, "exported": our_export, "transformers": transformers}
    return loaders[program](size, precision, beam, cores, folder)


def work(name: str, size: str, beam: int, count: int, cores: int, folder: Path) -> None:
    """Be a contender: load, find the best batch size, and then translate whenever a line comes in."""
    translate = contender(name, size, beam, cores, folder)
    sources = sentences(count, VOCABULARIES[size])
    tried = {}
    some = batched(sources, max(1, count // 4))[1]  # of middling length
    for rows in BATCHES:
        batches = batched(some, max(1, rows // beam))
        translate(batches[:1])
        begin = time.perf_counter()
        translate(batches)
        tried[rows] = time.perf_counter() - begin
    best = min(tried, key=lambda rows: tried[rows])
    batches = batched(sources, max(1, best // beam))
    print(json.dumps({"rows": best}), flush=True)
    for _ in sys.stdin:
        begin = time.perf_counter()
        translate(batches)
        seconds = time.perf_counter() - begin
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
        print(json.dumps({"seconds": seconds, "peak_mib": peak}), flush=True)


def race(names: Sequence[str], arguments: argparse.Namespace, folder: Path) -> Iterator[dict[str, Any]]:
    """Run the rounds and give a row for each contender."""
    given = [
        "--size",
        arguments.size,
        "--beam",
        str(arguments.beam),
        "--sentences",
        str(arguments.sentences),
        "--cores",
        str(arguments.cores),
    ]
    running: dict[str, tuple[Any, dict[str, Any]]] = {}
    for name in names:
        command = [sys.executable, __file__, *given, "--be", name, "--folder", str(folder)]
        environment = {**os.environ, "PYTHONWARNINGS": "ignore", "TOKENIZERS_PARALLELISM": "false"}
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)
        first = process.stdout.readline() if process.stdout else ""
        if first:
            running[name] = process, {"contender": name, "rounds": [], **json.loads(first)}
        else:
            print(f"{name}: did not start, and is left out", file=sys.stderr)
    for _ in range(arguments.rounds):
        for process, row in running.values():
            process.stdin.write("go\n")
            process.stdin.flush()
            told = json.loads(process.stdout.readline())
            row["rounds"].append(arguments.sentences / told["seconds"])
            row["peak_mib"] = told["peak_mib"]
    for process, row in running.values():
        process.stdin.close()
        process.wait()
        yield row


def show(rows: Sequence[dict[str, Any]], arguments: argparse.Namespace) -> None:
    """Print the table, how many times as fast we are, and a line of JSON."""
    import torch

    best = {row["contender"]: max(row["rounds"]) for row in rows}
    print(f"{arguments.size}, beam {arguments.beam}, {arguments.sentences} sentences, {arguments.cores} cores, best of {arguments.rounds}")
    print(f"{'contender':30s} {'sentences/s':>12s} {'worst':>8s} {'rows':>5s} {'peak MiB':>9s}  times CTranslate2, transformers")
    for row in rows:
        name = row["contender"]
        precision = name.split()[1]
        directly = [best[each] for each in best if each.startswith(f"ctranslate2 {precision}")]
        marian = best.get(f"transformers {precision}")
        ratios = [f"{best[name] / max(directly):.2f}" if directly else "-", f"{best[name] / marian:.2f}" if marian else "-"]
        print(f"{name:30s} {best[name]:12.1f} {min(row['rounds']):8.1f} {row['rows']:5d} {row['peak_mib']:9d}  {'  '.join(ratios)}")
    signature = {"torch": torch.__version__, "size": arguments.size, "beam": arguments.beam, "sentences": arguments.sentences}
    print(json.dumps({"bench": "decode_cpu", **signature, "cores": arguments.cores, "rows": rows}))


def main() -> None:
    """Parse, and race or be raced."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SHAPES, default="small")
    parser.add_argument("--beam", type=int, default=1)
    parser.add_argument("--sentences", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--cores", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--only", nargs="*", default=list(CONTENDERS), help="contenders, by the beginning of their names")
    parser.add_argument("--be", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.be:
        work(arguments.be, arguments.size, arguments.beam, arguments.sentences, arguments.cores, arguments.folder)
        return
    names = [name for name in CONTENDERS if any(name.startswith(each) for each in arguments.only)]
    needs = {"ctranslate2": "ctranslate2", "exported": "ctranslate2", "transformers": "transformers"}
    for name in list(names):
        program = needs.get(name.split()[0])
        if program and importlib.util.find_spec(program) is None:
            print(f"{name}: {program} is not installed, and is left out", file=sys.stderr)
            names.remove(name)
    with tempfile.TemporaryDirectory() as folder:
        show(list(race(names, arguments, Path(folder))), arguments)


if __name__ == "__main__":
    main()

"""Measure the overhead of Dragoman's CTranslate2 engine against CTranslate2 used directly.

    python bench/ctranslate2_overhead.py --size small --precision int8
    python bench/ctranslate2_overhead.py --size base --precision float32 --sentences 200

Both share one loaded model and run in turns, on ids and on text. The table has sentences/s and the
ratio to direct use, by wall time and by CPU time. Direct use follows CTranslate2's documentation:
sentences sorted by length, the best of several batch sizes, all batches queued asynchronously, and
SentencePiece for text. Ours are the engine (ids), `translate` on a list, and `stream` on a file, a
pipe and a generator. Weights are random, so every output has its maximum length.
"""

from __future__ import annotations

import argparse
import functools
import io
import json
import os
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dragoman.bundle import write_bundle
from dragoman.cli.input_lines import open_stream_lines
from dragoman.config import Config
from dragoman.decoding.beam_search import BeamSearch
from dragoman.decoding.greedy import GreedySearch
from dragoman.exchange.export import export_ctranslate2
from dragoman.inference import SearchRequest, Translator
from dragoman.models.factory import build_model
from dragoman.runtime.thread_pool_map import map_in_threads
from dragoman.text.sentencepiece_tokenizer import train_tokenizers

SHAPES: dict[str, dict[str, Any]] = {
    "tiny": {
        "width": 32,
        "heads": 2,
        "ffn_width": 64,
        "encoder": ["transformer*1"],
        "decoder": ["transformer*1"],
    },
    "small": {
        "width": 256,
        "heads": 4,
        "ffn_width": 1024,
        "encoder": ["transformer*4"],
        "decoder": ["transformer*4"],
    },
    "base": {
        "width": 512,
        "heads": 8,
        "ffn_width": 2048,
        "encoder": ["transformer*6"],
        "decoder": ["transformer*6"],
    },
}
VOCABULARIES = {"tiny": 500, "small": 8_000, "base": 32_000}
WORDS = 40_000
BATCHES = (32, 64, 128)  # batch sizes tried, in hypotheses
KINDS = ("ids", "text")


def synthetic_lines(count: int, seed: int) -> list[str]:
    """Return sentences of 4 to 40 made-up words with Zipfian frequencies."""
    rng = np.random.default_rng(7)
    letters = np.array(list("etaoinshrdlu"))
    words = np.array(["".join(rng.choice(letters, size)) for size in rng.integers(2, 9, WORDS)])
    rng = np.random.default_rng(seed)
    lengths = np.clip(np.round(rng.gamma(6.0, 2.0, count)), 4, 40).astype(int)
    return [" ".join(words[np.minimum(rng.zipf(1.2, length), WORDS) - 1]) for length in lengths]


def make_translator(folder: Path, size: str, precision: str) -> Translator:
    """Export a model with random weights and return its translator."""
    config = Config().replace(
        model=SHAPES[size],
        text={"vocab_size": VOCABULARIES[size]},
        decode={"max_length_ratio": 1.0, "max_length_extra": 2, "beam": 1},
    )
    text = synthetic_lines(20_000 if size != "tiny" else 2000, seed=1)
    tokenizers = train_tokenizers(text, text, config.text)
    torch.manual_seed(0)
    model = build_model(
        config.model, src_vocab_size=len(tokenizers.src), tgt_vocab_size=len(tokenizers.tgt)
    )
    path = folder / "model"
    write_bundle(
        path, config=config, tokenizers=tokenizers, weights=model.state_dict(), golden=text[:3]
    )
    export_ctranslate2(path, quantization=precision)
    return Translator.load(path, device="cpu", engine=f"ctranslate2-{precision}")


class DirectCTranslate2:
    """CTranslate2 used directly, with the model that our engine has loaded."""

    def __init__(self, translator: Translator, lines: Sequence[str], beam: int) -> None:
        engine: Any = translator.engine
        self._program, (self._src, self._tgt), self._lines, self._beam = (
            engine._translator,
            translator.tokenizers,
            lines,
            beam,
        )
        self._ids = {
            token: number for number, token in enumerate(self._tgt.tokens(range(len(self._tgt))))
        }
        self.src_tokens = [self._src.tokens(row) for row in self._src.encode_batch(list(lines))]
        tried = [
            (time_call(functools.partial(self.batches, self.src_tokens[::4], rows)), rows)
            for _ in range(3)
            for rows in BATCHES
        ]
        self.rows = min(tried)[1]

    def batches(self, src_tokens: Sequence[list[str]], rows: int = 0) -> list[list[str]]:
        """Translate token lists: queue all batches, return results in input order."""
        order = sorted(range(len(src_tokens)), key=lambda number: -len(src_tokens[number]))
        rows = max(1, (rows or self.rows) // self._beam)
        waiting = []
        for first in range(0, len(order), rows):
            group = order[first : first + rows]
            most = 3 + max(len(src_tokens[number]) for number in group)
            options = {
                "beam_size": self._beam,
                "max_decoding_length": most,
                "max_input_length": 0,
                "asynchronous": True,
            }
            waiting.append(
                (
                    group,
                    self._program.translate_batch(
                        [src_tokens[number] for number in group], **options
                    ),
                )
            )
        found: dict[int, list[str]] = {}
        for group, results in waiting:
            found |= {
                number: each.result().hypotheses[0]
                for number, each in zip(group, results, strict=True)
            }
        return [found[number] for number in range(len(src_tokens))]

    def text(self) -> list[str]:
        """Tokenize, translate and detokenize the lines."""
        found = self.batches(
            [self._src.tokens(row) for row in self._src.encode_batch(list(self._lines))]
        )
        return self._tgt.decode_batch([[self._ids[token] for token in row] for row in found])


def engine_translator(
    translator: Translator, direct: DirectCTranslate2, lines: Sequence[str], beam: int
) -> Callable[[], None]:
    """Return a function that translates ids with our engine in the same batches."""
    engine, rows = translator.engine, max(1, direct.rows // beam)
    ids = sorted(translator.tokenizers.src.encode_batch(list(lines)), key=len, reverse=True)

    def build_request(batch: list[list[int]]) -> SearchRequest:
        limits = [len(row) + 2 for row in batch]
        strategy = GreedySearch() if beam == 1 else BeamSearch(beam)
        return SearchRequest(
            sources=batch,
            limits=limits,
            prefixes=[[]] * len(batch),
            strategy=strategy,
            sample_ids=range(len(batch)),
            return_scores=False,
        )

    def run() -> None:
        requests = (build_request(ids[first : first + rows]) for first in range(0, len(ids), rows))
        assert all(map_in_threads(engine.generate, requests, engine.client_threads)), (
            "an engine must return hypotheses"
        )

    return run


def time_call(work: Callable[[], Any]) -> float:
    """Return the seconds of one call."""
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


def streaming_systems(
    translator: Translator, lines: Sequence[str], path: Path, beam: int
) -> dict[tuple[str, str], Callable[[], list[str]]]:
    """Return the functions that translate streams: a file, a pipe, a generator."""
    path.write_text("".join(f"{line}\n" for line in lines), "utf-8")

    def through(source: Iterable[str]) -> list[str]:
        return [each.text for each in translator.stream(source, beam=beam, return_scores=False)]

    def file() -> list[str]:
        with path.open("rb") as stream:
            return through(open_stream_lines(stream))

    def pipe() -> list[str]:
        with subprocess.Popen(["cat", path], stdout=subprocess.PIPE) as writer:
            assert isinstance(writer.stdout, io.BufferedReader), "a pipe"
            return through(open_stream_lines(writer.stdout))

    return {
        ("text", "ours, file"): file,
        ("text", "ours, pipe"): pipe,
        ("text", "ours, generator"): lambda: through(iter(lines)),
    }


def run_benchmark(
    translator: Translator, lines: Sequence[str], *, beam: int, rounds: int, folder: Path
) -> list[dict[str, Any]]:
    """Time all systems in turns; return one row for each."""
    direct = DirectCTranslate2(translator, lines, beam)
    systems: dict[tuple[str, str], Callable[[], Any]] = {
        ("ids", "direct"): lambda: direct.batches(direct.src_tokens),
        ("ids", "ours, engine"): engine_translator(translator, direct, lines, beam),
        ("text", "direct"): direct.text,
        ("text", "ours, translate"): lambda: translator.translate(lines, beam=beam),
        **streaming_systems(translator, lines, folder / "lines", beam),
    }
    for system in systems.values():
        system()
    rows: list[dict[str, Any]] = [
        {"kind": kind, "system": system, "wall": [], "cpu": []} for kind, system in systems
    ]
    for turn in range(rounds):
        for row, work in list(zip(rows, systems.values(), strict=True))[
            :: 1 if turn % 2 == 0 else -1
        ]:
            began = time.process_time()
            row["wall"].append(time_call(work))
            row["cpu"].append(time.process_time() - began)
    return [{**row, "rows": direct.rows} for row in rows]


def print_table(rows: Sequence[dict[str, Any]], arguments: argparse.Namespace) -> None:
    """Print the table with the ratios to direct use, and one line of JSON."""
    count = arguments.sentences
    about = (
        f"{arguments.size}, {arguments.precision}, beam {arguments.beam}, {count} sentences, "
        f"{arguments.workers} workers"
    )
    print(f"{about}, {arguments.rounds} rounds in turns")
    print(
        f"{'':5s}{'system':18s} {'sentences/s':>12s} {'median':>8s} {'ratio':>6s} "
        f"{'CPU s':>7s} {'ratio':>6s}"
    )
    for row in rows:
        base = next(
            each for each in rows if each["kind"] == row["kind"] and each["system"] == "direct"
        )
        best, median, cpu = (
            count / min(row["wall"]),
            count / statistics.median(row["wall"]),
            statistics.median(row["cpu"]),
        )
        # The median of the ratios of each round, which is robust against other load.
        ratio = statistics.median(
            there / here for there, here in zip(base["wall"], row["wall"], strict=True)
        )
        cpu_ratio = statistics.median(base["cpu"]) / cpu
        print(
            f"{row['kind']:5s}{row['system']:18s} {best:12.1f} {median:8.1f} {ratio:6.2f} "
            f"{cpu:7.2f} {cpu_ratio:6.2f}"
        )
    signature = {
        name: getattr(arguments, name)
        for name in ("size", "precision", "beam", "sentences", "workers")
    }
    print(
        json.dumps(
            {
                "bench": "ctranslate2_overhead",
                "torch": torch.__version__,
                **signature,
                "rows": list(rows),
            }
        )
    )


def main() -> None:
    """Parse the arguments and run the benchmark."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--size", choices=SHAPES, default="small")
    parser.add_argument("--precision", choices=("int8", "float32"), default="int8")
    parser.add_argument("--beam", type=int, default=1)
    parser.add_argument("--sentences", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.workers)
    with tempfile.TemporaryDirectory() as folder:
        translator = make_translator(Path(folder), arguments.size, arguments.precision)
        lines = synthetic_lines(arguments.sentences, seed=2)
        print_table(
            run_benchmark(
                translator, lines, beam=arguments.beam, rounds=arguments.rounds, folder=Path(folder)
            ),
            arguments,
        )


if __name__ == "__main__":
    main()

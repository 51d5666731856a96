"""Prepares each bad corpus named on standard input and reports, for each, how it ended and what it
cost. Run by test_bad_corpora.py.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from dragoman.config.root_config import DataConfig
from dragoman.data.parallel_corpus import BadPair, ParallelFiles, SentencePair
from dragoman.data.token_store import TokenStore
from dragoman.errors import DragomanError
from dragoman.text.sentencepiece_tokenizer import load_tokenizers


class Changing(ParallelFiles):
    """A corpus that another process writes to while it is read."""

    def records(self) -> Iterator[SentencePair | BadPair]:
        for record in super().records():
            if record.number == 1:
                with self.src.open("ab") as file:
                    file.write(b"one more\n")
            yield record


def forget_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def memory(name: str) -> int:
    """Read the process's memory in MB."""
    line = next(
        line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name)
    )
    return int(line.split()[1]) // 1024


def main() -> None:
    folder = Path(sys.argv[1])
    tokenizers = load_tokenizers(folder / "text")
    for line in sys.stdin:
        case = json.loads(line)
        kind = Changing if case["name"] == "changed" else ParallelFiles
        corpus = kind(folder / case["src"], folder / case["tgt"], on_bad_line=case["on_bad_line"])
        forget_peak()
        before, start = memory("VmRSS"), time.monotonic()
        try:
            store = TokenStore.prepare(
                corpus, tokenizers, folder=folder / f"cache-{case['name']}", data=DataConfig()
            )
            answer = {"code": 0, "message": store.report.summary(), "pairs": len(store)}
        except DragomanError as error:
            answer = {"code": error.exit_code, "message": str(error), "pairs": 0}
        answer |= {
            "memory": memory("VmHWM") - before,
            "seconds": time.monotonic() - start,
            "name": case["name"],
        }
        sys.stdout.write(json.dumps(answer) + "\n")


if __name__ == "__main__":
    main()

"""`dragoman data`: look at a corpus before training on it."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated

import typer

from dragoman.cli.options import JsonOption
from dragoman.cli.show import as_json, count, result, table
from dragoman.errors import ConfigError, DataError

if TYPE_CHECKING:
    from dragoman.data.corpus import Corpus

app = typer.Typer(name="data", help="Look at a corpus before training on it.")


@app.callback(invoke_without_command=True)
def group(context: typer.Context) -> None:
    """Look at a corpus before training on it."""
    if context.invoked_subcommand is None:
        print(context.get_help())


@app.command()
def check(
    src: Annotated[str, typer.Option(help="Source sentences.")] = "",
    tgt: Annotated[str, typer.Option(help="Target sentences.")] = "",
    pairs: Annotated[str, typer.Option(help="One TSV, CSV or JSONL file with both sides instead.")] = "",
    test_src: Annotated[str, typer.Option(help="Source sentences of a test set: is it in the training text?")] = "",
    test_tgt: Annotated[str, typer.Option(help="Target sentences of that test set.")] = "",
    test_pairs: Annotated[str, typer.Option(help="That test set in one file instead.")] = "",
    json: JsonOption = False,
) -> None:
    """Find misaligned files, empty lines, duplicates, odd lengths, invalid UTF-8, and leakage between train and test.

    The exit code is 0 when the corpus could be read, whatever was found in it: it is for you to judge.
    """
    from dragoman.data.checks import check_corpus
    from dragoman.training.progress import open_progress

    corpus = _corpus("", src, tgt, pairs)
    held_out = _corpus("test-", test_src, test_tgt, test_pairs) if test_src or test_tgt or test_pairs else None
    seen = 0

    def advance(total: int) -> None:
        nonlocal seen
        phase.advance(total - seen)
        seen = total

    with open_progress(sys.stderr).phase("checking", None, "pairs") as phase:
        findings = check_corpus(corpus, held_out=held_out, progress=advance)
    if not seen:
        files = " and ".join(map(str, corpus.files))
        raise DataError(f"{files} must hold text to check", found="no line at all", fix="check the path, or what wrote the file")
    if json:
        rows = [{"check": each.check, "count": each.count, "lines": each.lines, "advice": each.advice} for each in findings]
        as_json({"files": [str(path) for path in corpus.files], "findings": rows})
        return
    table(
        ["check", "found", "first at lines", "what to do"],
        [(each.check, f"{each.count:,}" if each.count else "-", _lines(each.lines, each.count), each.advice) for each in findings],
        right=["found"],
    )
    bad = [each for each in findings if not each.ok]
    verdict = f"{count(len(bad), 'check')} found something" if bad else "nothing to mend"
    result(f"\n{count(seen, 'pair')}: {verdict}")


def _lines(lines: list[int], total: int) -> str:
    """List line numbers, and say when there are more."""
    return ", ".join(map(str, lines)) + (", …" if total > len(lines) > 0 else "")


def _corpus(prefix: str, src: str, tgt: str, pairs: str) -> Corpus:
    """Open two files or one; all problems of the three options at once."""
    from dragoman.config import Config
    from dragoman.data.corpus import corpus_from_config

    config = Config().replace(data={"src": src, "tgt": tgt, "pairs": pairs})
    problems = [problem.replace("data.", f"--{prefix}") for problem in config.problems()]
    if not (src or tgt or pairs):
        problems.append(f"a check needs text; found neither --{prefix}src and --{prefix}tgt nor --{prefix}pairs; name them")
    if problems:
        raise ConfigError(problems)
    return corpus_from_config(config.data, "train")

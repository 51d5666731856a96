"""Opens the parallel corpus that a command's options name: two files, or one with both sides."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dragoman.errors import ConfigError

if TYPE_CHECKING:
    from dragoman.data.parallel_corpus import Corpus


def open_corpus(
    *,
    src: str,
    tgt: str,
    pairs: str,
    src_field: str = "",
    tgt_field: str = "",
    src_lang: str = "",
    tgt_lang: str = "",
    prefix: str = "",
    what: str = "a check",
) -> Corpus:
    """Open the corpus; raise one ConfigError with all problems, named `--{prefix}src` and so on."""
    from dragoman.config import Config
    from dragoman.data.parallel_corpus import build_corpus

    columns = {
        "src_field": src_field,
        "tgt_field": tgt_field,
        "src_lang": src_lang,
        "tgt_lang": tgt_lang,
    }
    config = Config().replace(data={"src": src, "tgt": tgt, "pairs": pairs, **columns})
    problems = [problem.replace("data.", f"--{prefix}") for problem in config.problems()]
    if not (src or tgt or pairs):
        problems.append(
            f"{what} needs text; found neither --{prefix}src and --{prefix}tgt nor "
            f"--{prefix}pairs; name them"
        )
    if not pairs and (src_field or tgt_field):
        flag, field = ("--src-field", src_field) if src_field else ("--tgt-field", tgt_field)
        problems.append(
            f"{flag} names a column of --pairs; found {field!r:.60} without --pairs; add --pairs "
            "FILE or leave it out"
        )
    if problems:
        raise ConfigError(problems)
    return build_corpus(config.data, "train")

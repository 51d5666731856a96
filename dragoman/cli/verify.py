"""`dragoman verify`: read every byte of a model and its checkpoints and compare with what was written."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from dragoman.cli.options import JsonOption
from dragoman.cli.show import as_json, count, note, result, size, table
from dragoman.errors import CorruptError


def verify(
    model: Annotated[Path, typer.Argument(metavar="DIRECTORY", help="A model, a run or one checkpoint.", show_default=False)],
    json: JsonOption = False,
) -> None:
    """Check every file of a model and of its checkpoints against the SHA-256 written when it was made.

    Files that are not part of the model are named; they do no harm, for nothing opens them.
    """
    from dragoman.files.verify import extra_files, verify_directory

    checks, extra = verify_directory(model), extra_files(model)
    bad = [check for check in checks if not check.ok]
    if extra and not json:
        note(f"{count(len(extra), 'extra file')}, not part of the model: {', '.join(extra[:10])}{', …' if len(extra) > 10 else ''}")
    if json:
        as_json({"files": [{**check._asdict(), "ok": check.ok} for check in checks], "extra": extra, "ok": not bad})
    elif bad:
        table(["file", "what is wrong"], [(check.name, check.problem) for check in bad])
    else:
        result(f"{count(len(checks), 'file')}, {size(sum(check.bytes for check in checks))}: every byte is as it was written")
    if bad:
        raise CorruptError(
            f"every file in {model} must be as it was written",
            found=f"{len(bad)} of {len(checks)} wrong: {', '.join(check.name for check in bad[:5])}{', ...' if len(bad) > 5 else ''}",
            fix="restore the files from a copy; a damaged checkpoint is passed over when training resumes",
        )

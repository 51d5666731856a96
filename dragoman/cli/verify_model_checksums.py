"""`dragoman verify`: check the SHA-256 of every file of a model and its checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from dragoman.cli.options import JsonOption, built_in_model
from dragoman.cli.terminal_output import (
    format_count,
    print_json,
    print_note,
    print_result,
    print_table,
)
from dragoman.errors import CorruptError
from dragoman.storage.disk_space_and_errors import format_bytes


def verify(
    model: Annotated[
        Path,
        typer.Argument(
            metavar="DIRECTORY",
            help="Model, run or checkpoint directory; by default the built-in model.",
            show_default=False,
            default_factory=built_in_model,
        ),
    ],
    json: JsonOption = False,
) -> None:
    """Verify the checksums of a model and its checkpoints.

    Every file is compared with the SHA-256 in its manifest. Files that are not part of
    the model are listed; they are never opened.
    """
    from dragoman.storage.checksum_verification import list_unlisted_files, verify_directory

    checks, extra = verify_directory(model), list_unlisted_files(model)
    bad = [check for check in checks if not check.ok]
    if extra and not json:
        print_note(
            f"{format_count(len(extra), 'extra file')}, not part of the model: "
            f"{', '.join(extra[:10])}{', …' if len(extra) > 10 else ''}"
        )
    if json:
        print_json(
            {
                "files": [{**check._asdict(), "ok": check.ok} for check in checks],
                "extra": extra,
                "ok": not bad,
            }
        )
    elif bad:
        print_table(["file", "problem"], [(check.name, check.problem) for check in bad])
    else:
        print_result(
            f"{format_count(len(checks), 'file')}, "
            f"{format_bytes(sum(check.bytes for check in checks))}: all checksums match"
        )
    if bad:
        raise CorruptError(
            f"every file in {model} must be as it was written",
            found=f"{len(bad)} of {len(checks)} wrong: "
            f"{', '.join(check.name for check in bad[:5])}{', ...' if len(bad) > 5 else ''}",
            fix="restore the files from a copy; a damaged checkpoint is skipped when training "
            "resumes",
        )

"""Options of constrained decoding, for `dragoman translate` and `dragoman generate`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from dragoman.decoding.output_constraint_definitions import Constraint

_PANEL = "Constraints"

ConstraintOption = Annotated[
    list[str] | None,
    typer.Option(
        metavar="NAME",
        help="Constraint that every output must fulfil: equal_length, mirror, no_copy or "
        "punctuation. May be repeated.",
        rich_help_panel=_PANEL,
    ),
]
RequireOption = Annotated[
    list[str] | None,
    typer.Option(
        metavar="WORD",
        help="Word that every output must contain. May be repeated.",
        rich_help_panel=_PANEL,
    ),
]
ForbidOption = Annotated[
    list[str] | None,
    typer.Option(
        metavar="WORD",
        help="Word that no output may contain. May be repeated.",
        rich_help_panel=_PANEL,
    ),
]
RegexOption = Annotated[
    str | None,
    typer.Option(
        metavar="PATTERN",
        help="Regular expression that every whole output must match.",
        rich_help_panel=_PANEL,
    ),
]


def parse_constraint_options(
    names: list[str] | None,
    require: list[str] | None,
    forbid: list[str] | None,
    regex: str | None,
) -> tuple[Constraint, ...]:
    """Return the constraints of the command line; raise ConfigError for invalid ones."""
    if not (names or require or forbid or regex is not None):
        return ()
    # Imported here, so that commands without constraints do not import numpy for them.
    from dragoman.decoding.output_constraint_definitions import parse_constraints

    return parse_constraints(
        names or (),
        require=require or (),
        forbid=forbid or (),
        regex=() if regex is None else [regex],
    )

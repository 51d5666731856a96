"""Count how this repository stands against the targets it set itself: `python tools/anchors.py`.

The targets come from counting the same things in eighteen codebases that people like to read: small modules, short
functions, as many lines of tests as of code, a docstring and type hints on every public name, and errors that show
what was found. Exit code 1 when one is missed.
"""

from __future__ import annotations

import ast
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
Function = ast.FunctionDef | ast.AsyncFunctionDef


class Module(NamedTuple):
    """A source file and its tree."""

    path: Path
    lines: int
    tree: ast.Module


class Row(NamedTuple):
    """One line of the table: what was counted, the target, whether it holds, and the worst places."""

    what: str
    found: str
    target: str
    holds: bool
    worst: list[str]


def modules(folder: Path) -> list[Module]:
    """Read every module under a folder; an empty `__init__.py` is no module of anybody's."""
    found = []
    for path in sorted(folder.rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        if text.strip():
            found.append(Module(path, text.count("\n"), ast.parse(text)))
    return found


def functions(tree: ast.AST) -> Iterator[Function]:
    """Go through every function and method."""
    return (node for node in ast.walk(tree) if isinstance(node, Function))


def public(module: Module) -> Iterator[tuple[str, Function | ast.ClassDef]]:
    """Go through the names a reader may use: public functions, classes, and the public methods of public classes."""
    for node in module.tree.body:
        if isinstance(node, (Function, ast.ClassDef)) and not node.name.startswith("_"):
            yield node.name, node
            for inner in node.body if isinstance(node, ast.ClassDef) else []:
                if isinstance(inner, Function) and not inner.name.startswith("_") and not is_setter(inner):
                    yield f"{node.name}.{inner.name}", inner


def is_setter(function: Function) -> bool:
    """Say whether a method only sets a property, which its getter explains."""
    return any(isinstance(each, ast.Attribute) and each.attr == "setter" for each in function.decorator_list)


def annotated(function: Function) -> bool:
    """Say whether every argument and the result have a type."""
    arguments = function.args
    every = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
    every += [each for each in (arguments.vararg, arguments.kwarg) if each]
    return function.returns is not None and all(each.annotation for each in every if each.arg not in ("self", "cls"))


def messages(tree: ast.AST) -> Iterator[tuple[ast.Raise, bool]]:
    """Go through the raised messages, with whether each carries what was found."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call) and (node.exc.args or node.exc.keywords):
            yield node, carries(node.exc)


def carries(call: ast.Call) -> bool:
    """Say whether an exception is given a value that was found: `found=`, or something that is not a fixed text."""
    if any(keyword.arg == "found" for keyword in call.keywords):
        return True
    return any(isinstance(part, (ast.FormattedValue, ast.Name, ast.Attribute)) for argument in call.args for part in ast.walk(argument))


def measure(root: Path) -> list[Row]:
    """Count everything that has a target."""
    package, tests = modules(root / "dragoman"), modules(root / "tests")

    def place(module: Module, node: ast.AST) -> str:
        return f"{module.path.relative_to(root)}:{getattr(node, 'lineno', 1)}"

    middle = statistics.median(module.lines for module in package)
    by_size = sorted(package, key=lambda module: -module.lines)
    lengths = sorted(
        (
            ((node.end_lineno or 0) - node.lineno + 1, f"{place(module, node)} {node.name}")
            for module in package
            for node in functions(module.tree)
        ),
        reverse=True,
    )
    ratio = sum(module.lines for module in tests) / max(1, sum(module.lines for module in package))
    names = [(f"{place(module, node)} {name}", node) for module in package for name, node in public(module)]
    bare = [where for where, node in names if not ast.get_docstring(node)]
    typed = [(f"{place(module, node)} {node.name}", annotated(node)) for module in package for node in functions(module.tree)]
    untyped = [where for where, holds in typed if not holds]
    raised = [(place(module, node), holds) for module in package for node, holds in messages(module.tree)]
    mute = [where for where, holds in raised if not holds]
    documented, hinted, found = (1 - len(a) / max(1, len(b)) for a, b in ((bare, names), (untyped, typed), (mute, raised)))
    return [
        Row("median module", f"{middle:.0f} lines", "< 200", middle < 200, [f"{m.path.relative_to(root)} {m.lines}" for m in by_size[:3]]),
        Row(
            "longest function",
            f"{lengths[0][0]} lines",
            "<= 80",
            lengths[0][0] <= 80,
            [f"{where} {n}" for n, where in lengths if n > 80][:5],
        ),
        Row("test lines to code lines", f"{ratio:.2f}", ">= 0.8", ratio >= 0.8, []),
        Row("public names with a docstring", f"{documented:.1%}", "100 %", not bare, bare[:5]),
        Row("functions with all types", f"{hinted:.1%}", "100 %", not untyped, untyped[:5]),
        Row("raised messages with what was found", f"{found:.1%} of {len(raised)}", ">= 90 %", found >= 0.9, mute[:10]),
    ]


def main() -> int:
    """Print the table; return 1 when a target is missed."""
    rows = measure(ROOT)
    for row in rows:
        print(f"{'ok    ' if row.holds else 'MISSED'}  {row.what:36}  {row.found:>16}  target {row.target}")
        for place in row.worst if not row.holds else []:
            print(f"        {place}")
    return 0 if all(row.holds for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())

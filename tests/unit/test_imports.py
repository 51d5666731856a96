"""Import rules: the layers, the modules without torch, and forbidden modules."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "dragoman"

# Lowest first; a module imports only from its own folder and from lines above it.
# docs/architecture.md explains the order.
LAYERS = (
    ("_version",),
    ("errors",),
    ("registry",),
    ("config",),
    ("runtime",),
    ("storage",),
    ("text",),
    ("data",),
    ("ops",),
    ("attention",),
    ("layers",),
    ("models",),
    ("recipes",),
    ("decoding",),
    ("checkpoint",),
    ("training",),
    ("evaluate",),
    ("tasks",),
    ("bundle", "explain"),
    ("inference",),
    ("exchange", "doctor"),
    ("runs",),
    ("demo",),
    ("explore", "tune"),
    ("cli",),
    ("__main__",),
)
# Folders that may import less than the table allows.
ONLY = {
    "errors": set(),
    "registry": {"errors"},
    "config": {"errors", "registry"},
    "runtime": {"errors", "config"},
    "storage": {"errors", "runtime"},
    "text": {"errors", "registry", "config", "runtime", "storage"},
    "ops": {"errors"},
    "attention": {"ops", "errors", "registry"},
    "layers": {"attention", "ops", "errors", "registry"},
    "models": {"layers", "attention", "ops", "errors", "registry", "config", "text"},
    "recipes": {
        "models",
        "config",
        "errors",
        "registry",
    },  # of models only how block lists are read; a test keeps torch out
    "decoding": {"models", "ops", "errors", "text"},
    "checkpoint": {"_version", "errors", "runtime", "storage"},
}
PARTS = [part for layer in LAYERS for part in layer]


def part_of(module: str) -> str:
    """Name the part a dotted module name belongs to: `dragoman.text.english_stemmer` is in text."""
    words = module.split(".")
    return words[1] if len(words) > 1 else "dragoman"


def modules() -> Iterator[tuple[str, Path]]:
    """Yield every module of the package with its dotted name."""
    for path in sorted(PACKAGE.rglob("*.py")):
        words = path.relative_to(ROOT).with_suffix("").parts
        yield ".".join(words[:-1] if words[-1] == "__init__" else words), path


def ours(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield a module's imports from this package, local and types-only ones included."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (
                (node.lineno, alias.name)
                for alias in node.names
                if alias.name.partition(".")[0] == "dragoman"
            )
        elif (
            isinstance(node, ast.ImportFrom)
            and node.module
            and node.module.partition(".")[0] == "dragoman"
        ):
            if node.module == "dragoman":
                yield from ((node.lineno, f"dragoman.{alias.name}") for alias in node.names)
            else:
                yield node.lineno, node.module
        elif isinstance(node, ast.ImportFrom) and node.level:
            raise AssertionError(f"line {node.lineno}: imports are written in full, from dragoman")


MODULES = dict(modules())


def test_every_folder_is_in_the_layer_table() -> None:
    found = {part_of(name) for name in MODULES} - {"dragoman"}
    assert found <= set(PARTS), (
        f"{found - set(PARTS)} must be put into the table of this test and of docs/architecture.md"
    )


@pytest.mark.parametrize("name", [name for name in MODULES if name != "dragoman"])
def test_imports_go_down_only(name: str) -> None:
    part = part_of(name)
    height = {each: number for number, layer in enumerate(LAYERS) for each in layer}
    for line, target in ours(ast.parse(MODULES[name].read_text(encoding="utf-8"))):
        other = part_of(target)
        if other == part:
            continue
        assert other in height, f"{name}:{line} imports {target}, which is no part of the table"
        assert height[other] <= height[part], f"{name}:{line} imports {target}, which stands higher"
        assert other in ONLY.get(part, set(PARTS)), (
            f"{name}:{line} imports {target}; {part} may import {sorted(ONLY[part])}"
        )


def test_packages_do_not_import_each_other_mutually() -> None:
    """Folders on one line may import one another in one direction only."""
    edges = {
        (part_of(name), part_of(target))
        for name, path in MODULES.items()
        for _, target in ours(ast.parse(path.read_text("utf-8")))
    }
    mutual = {
        tuple(sorted(edge))
        for edge in edges
        if edge[0] != edge[1] and edge[::-1] in edges and "dragoman" not in edge
    }
    assert not mutual


def run(code: str) -> str:
    """Run code in a fresh interpreter, at the repository's root."""
    return subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    ).stdout.strip()


@pytest.mark.parametrize(
    "module",
    [
        "dragoman",
        "dragoman.cli.app",
        "dragoman.__main__",
        "dragoman.config",
        "dragoman.runtime.signals",
        "dragoman.demo.date_corpus",
    ],
)
def test_light_modules_do_not_import_torch(module: str) -> None:
    heavy = run(
        f"import {module}, sys; print([m for m in ('torch', 'sentencepiece', 'matplotlib', "
        "'sacrebleu', 'starlette', 'uvicorn') if m in sys.modules])"
    )
    assert heavy == "[]"


@pytest.mark.parametrize("name", [name for name in MODULES if name.endswith(".catalogue")])
def test_catalogues_do_not_import_torch(name: str) -> None:
    assert run(f"import {name}, sys; print('torch' in sys.modules)") == "False"


def test_help_does_not_import_torch() -> None:
    """`dragoman --help` is fast: it lists every command without importing the heavy modules."""
    code = (
        "import sys; from dragoman.cli.app import main; main(['--help']); main(['train', "
        "'--help']); print('torch' in sys.modules)"
    )
    assert run(code).splitlines()[-1] == "False"


FORBIDDEN = {
    "random": "random numbers come from the caller's seed (flair#1189: seeds that do not fix "
    "the result)",
    "pickle": "nothing is stored as code (fairseq#5610: checkpoints that do not load)",
    "dill": "nothing is stored as code",
    "joblib": "nothing is stored as code",
    "shelve": "nothing is stored as code",
}


@pytest.mark.parametrize("name", list(MODULES))
def test_no_global_randomness_and_no_pickle(name: str) -> None:
    for node in ast.walk(ast.parse(MODULES[name].read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            for alias in node.names:
                assert alias.name not in FORBIDDEN, f"{name}:{node.lineno}: {FORBIDDEN[alias.name]}"
        if isinstance(node, ast.ImportFrom):
            assert node.module not in FORBIDDEN, (
                f"{name}:{node.lineno}: {FORBIDDEN[node.module or '']}"
            )
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            spelt = f"{node.value.id}.{node.attr}"
            assert spelt not in ("np.random", "numpy.random", "torch.load", "torch.save"), (
                f"{name}:{node.lineno} uses {spelt}"
            )


def test_no_module_is_called_utils() -> None:
    assert not [
        name
        for name in MODULES
        if any(word in ("utils", "util", "helpers", "common", "misc") for word in name.split("."))
    ]

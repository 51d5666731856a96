"""The targets that the repository sets itself hold, and the counter counts what it says."""

from __future__ import annotations

import ast
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def anchors() -> ModuleType:
    spec = importlib.util.spec_from_file_location("anchors", ROOT / "tools" / "anchors.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules["anchors"] = module
    spec.loader.exec_module(module)
    return module


def test_the_targets_hold(anchors: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    code = anchors.main()
    assert code == 0, capsys.readouterr().out


def call(text: str) -> ast.Call:
    node = ast.parse(text).body[0]
    assert isinstance(node, ast.Raise)
    assert isinstance(node.exc, ast.Call)
    return node.exc


@pytest.mark.parametrize(
    ("text", "carries"),
    [
        ('raise DataError("must", found="3 lines", fix="do")', True),
        ('raise ValueError(f"found {value}")', True),
        ("raise ConfigError(problems)", True),
        ('raise ConfigError([f"found {value}"])', True),
        ('raise ValueError("something is wrong")', False),
        ('raise ConfigError(["something is wrong"])', False),
    ],
)
def test_a_message_carries_what_was_found_or_not(anchors: ModuleType, text: str, carries: bool) -> None:
    assert anchors.carries(call(text)) is carries


def repository(tmp_path: Path, package: str, tests: str = "") -> Path:
    for folder, text in (("dragoman", package), ("tests", tests)):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "module.py").write_text(text, encoding="utf-8")
    return tmp_path


def test_what_is_missing_is_counted_and_named(anchors: ModuleType, tmp_path: Path) -> None:
    root = repository(tmp_path, 'def open_door(hinge):\n    raise ValueError("stuck")\n\n\ndef _private():\n    pass\n')
    rows = {row.what: row for row in anchors.measure(root)}
    assert not rows["public names with a docstring"].holds
    assert rows["public names with a docstring"].worst == ["dragoman/module.py:1 open_door"]
    assert rows["functions with all types"].found == "0.0%"
    assert not rows["raised messages with what was found"].holds
    assert not rows["test lines to code lines"].holds
    assert rows["median module"].holds


def test_a_long_function_is_named(anchors: ModuleType, tmp_path: Path) -> None:
    body = "".join(f"    x = {n}\n" for n in range(90))
    rows = {row.what: row for row in anchors.measure(repository(tmp_path, f'def long() -> None:\n    """Go on."""\n{body}'))}
    assert rows["longest function"].worst == ["dragoman/module.py:1 long 92"]
    assert not rows["longest function"].holds


def test_a_tidy_repository_passes(anchors: ModuleType, tmp_path: Path) -> None:
    check = '    if value < 0:\n        raise ValueError(f"found {value}")\n    return value\n'
    tidy = f'"""A module."""\n\n\ndef found(value: int) -> int:\n    """Give it back."""\n{check}'
    assert all(row.holds for row in anchors.measure(repository(tmp_path, tidy, tidy)))

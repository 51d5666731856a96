"""Imports of commands: argument errors are reported without torch, translate has no heavy ones."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from dragoman.bundle.format import BOX
from tests.classifier_kit import write_classifier

ROOT = Path(__file__).resolve().parents[2]

# Each takes from a tenth of a second to longer than torch itself, and none has a part in
# translating.
HEAVY = (
    "torch._dynamo",
    "torch._inductor",
    "torch.distributed.fsdp",
    "torch.onnx",
    "sympy",
    "matplotlib",
    "sacrebleu",
    "rich",
)
HEAVY += (
    "transformers",
    "onnxruntime",
    "triton",
    "pandas",
    "dragoman.runs",
    "dragoman.training.trainer",
    "dragoman.exchange",
)

# MODEL is a model; s and t are texts of the same length; x does not exist; full is a directory
# with files in it.
MISTAKES = [
    ("translate -m x text", "nothing at x"),
    ("translate -m s text", "the file s"),
    ("translate -m MODEL --device cqu text", "'cqu'"),
    ("translate -m MODEL --engine nativ text", "'nativ'"),
    ("translate -m MODEL --precision int9 text", "'int9'"),
    ("translate -m MODEL --shortlist s x text", "x must exist"),
    ("translate -m MODEL --sample --beam 3 text", "--beam 3"),
    ("translate -m MODEL --top-k 3 text", "--top-k needs --sample"),
    ("translate -m MODEL --mbr comet text", "found 'comet'"),
    (
        "augment -m MODEL --input x --output-src s --output-tgt t --method magic",
        "found 'magic'",
    ),
    ("translate -m MODEL --samples 8 text", "--samples needs --mbr"),
    ("translate -m MODEL --beam 0 text", "'0'"),
    ("translate --device cqu text", "'cqu'"),
    ("translate --mbr comet text", "found 'comet'"),
    ("translate -m MODEL --constraint mirored text", "'mirored'; did you mean mirror?"),
    ("translate -m MODEL --regex a(b text", "'(b' at position 2"),
    ("predict -m x text", "nothing at x"),
    ("predict -m MODEL text", "a model of the task translate; use `dragoman translate -m"),
    ("evaluate MODEL --test s", "found no --src and --ref"),
    ("data check --task dance s", "found --task 'dance' and s"),
    ("data check --task classify x", "x must exist"),
    ("recipes --task dance", "found 'dance'; choose one of classify, "),
    ("evaluate x --src s --ref t", "nothing at x"),
    ("evaluate MODEL --src x --ref t", "x must exist"),
    ("evaluate MODEL --src s --ref x", "x must exist"),
    ("evaluate MODEL --src s --ref t --tokenize nine", "'nine'"),
    ("evaluate MODEL --src s --ref t --device cqu", "'cqu'"),
    ("compare x t --ref t", "x must exist"),
    ("compare MODEL t --ref t", "no --src"),
    ("compare MODEL t --ref t --src x", "x must exist"),
    ("compare full t --ref t --src s", "found full with a"),
    ("compare t s --ref x", "x must exist"),
    ("compare t s --ref t --by ter", "'ter'"),
    ("info x", "nothing at x"),
    ("verify x", "found nothing there"),
    ("doctor x", "nothing at x"),
    ("doctor MODEL --src x", "x must exist"),
    ("doctor MODEL --export x", "nothing at x"),
    ("average x -o y", "found no x/training/config.json"),
    ("average full -o y", "found no full/training/config.json"),
    ("export x --to onnx -o y", "nothing at x"),
    ("export MODEL --to onyx -o y", "'onyx'"),
    ("export MODEL --to onnx", "no --out"),
    ("export MODEL --to onnx -o full", "a directory with files at full"),
    ("export MODEL --to onnx -o y --check x", "x must exist"),
    ("export MODEL --to onnx -o y --src s", "found only s"),
    ("export MODEL --to ctranslate2 --quantization int3", "'int3'"),
    ("import x -o y", "no directory at x"),
    ("import MODEL -o full", "a directory with files at full"),
    ("import MODEL -o y --check x", "x must exist"),
    ("train -o y", "found neither --src and --tgt nor --pairs"),
    ("train -o y --src s", "found only s"),
    ("train -o y --src x --tgt t", "x must exist"),
    ("train -o y --src s --tgt t --valid-src x --valid-tgt t", "x must exist"),
    ("train -o y --pairs x", "x must exist"),
    ("train -o s --src s --tgt t", "the file s"),
    ("train -o full --src s --tgt t", "found a in it"),
    ("train -o y --src s --tgt t --device cqu", "'cqu'"),
    ("train -o y --src s --tgt t --set train.device=cqu", "'cqu'"),
    ("train -o y --src s --tgt t --recipe x", "'x'"),
    ("train -o y --src s --tgt t --config x", "found x"),
    ("train -o y --src s --tgt t --budget 3", "'3'"),
    ("train -o y --src s --tgt t --set model.encoder=[x]", "'x'"),
    ("demo -o s", "found a file at "),
    ("demo -o full", "found a in it"),
    ("demo --device cqu", "'cqu'"),
    ("data check --src x --tgt t", "x must exist"),
    ("recipes show x", "'x'"),
    ("settings x", "'x'"),
]

# Each command runs in a fork of one interpreter that has parsed none: a fresh interpreter for each
# would take a minute.
RUN = """
import gc, io, json, os, sys
from contextlib import redirect_stderr, redirect_stdout
import dragoman.demo.training_and_evaluation
import dragoman.evaluate.system_comparison, dragoman.runs.output_directory_and_resume_checks
from dragoman.cli.app import main

gc.freeze()
for words in json.loads(sys.argv[1]):
    if child := os.fork():
        os.waitpid(child, 0)
        continue
    stderr = io.StringIO()
    with redirect_stderr(stderr), redirect_stdout(io.StringIO()):
        code = main(words)
    print(json.dumps([code, stderr.getvalue(), "torch" in sys.modules]), flush=True)
    os._exit(0)
"""


@pytest.fixture(scope="module")
def answers(
    bundle: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, tuple[int, str, bool]]:
    """Run every invalid command once: exit code, stderr, and whether torch was imported."""
    folder = tmp_path_factory.mktemp("mistakes")
    for name in ("s", "t"):
        (folder / name).write_text(f"{name} one\n{name} two\n")
    (folder / "full").mkdir()
    (folder / "full" / "a").write_text("mine")
    typed = [
        [str(bundle) if word == "MODEL" else word for word in line.split()] for line, _ in MISTAKES
    ]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", RUN, json.dumps(typed)],
        cwd=folder, env=environment, capture_output=True, text=True, timeout=300, check=True,
    )  # fmt: skip
    assert sorted(path.name for path in folder.iterdir()) == ["full", "s", "t"], (
        "a mistake must leave nothing behind"
    )
    return {
        line: tuple(json.loads(answer))
        for (line, _), answer in zip(MISTAKES, done.stdout.splitlines(), strict=True)
    }


@pytest.mark.parametrize(("line", "found"), MISTAKES)
def test_a_mistake_in_the_arguments_is_found_before_torch_is_imported(
    line: str, found: str, answers: dict[str, tuple[int, str, bool]]
) -> None:
    code, error_text, torch_imported = answers[line]
    assert code == 2
    assert found in error_text
    assert "Traceback" not in error_text
    assert not torch_imported


def test_translating_imports_nothing_heavy(bundle: Path) -> None:
    check_imports("translate", bundle)


@pytest.mark.skipif(not BOX.is_dir(), reason=f"no built-in model in {BOX}")
def test_translating_with_the_built_in_model_imports_nothing_heavy() -> None:
    check_imports("translate", BOX)  # its weights are in int8


def test_predicting_imports_nothing_heavy(tmp_path: Path) -> None:
    check_imports("predict", write_classifier(tmp_path / "model", steps=1))


def check_imports(command: str, model: Path) -> None:
    code = """
import json, sys
from dragoman.cli.app import main
code = main([sys.argv[1], "-m", sys.argv[2], "Guten Morgen."])
print(json.dumps([code, sorted(sys.modules)]))
"""
    done = subprocess.run(
        [sys.executable, "-c", code, command, str(model)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )
    result, modules = json.loads(done.stdout.splitlines()[-1])
    assert result == 0
    assert [name for name in HEAVY if name in modules] == []


def test_no_recipe_needs_more_than_torch_to_be_built() -> None:
    """Initializing weights on the meta device would import torch._dynamo."""
    code = """
import sys
from dragoman.config import read_config
from dragoman.models.factory import build_meta_model
from dragoman.recipes.catalogue import recipes_of

for name in recipes_of("translate"):
    model = build_meta_model(read_config(recipe=name).model, src_vocab_size=300, tgt_vocab_size=300)
    assert all(tensor.is_meta for tensor in model.parameters()), name
    assert "torch._dynamo" not in sys.modules, name
"""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr

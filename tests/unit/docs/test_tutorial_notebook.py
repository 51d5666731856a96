"""docs/tutorial.ipynb: every cell runs, and its output matches the text."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[3]
NOTEBOOK = ROOT / "docs" / "tutorial.ipynb"


@pytest.fixture(scope="module")
def executed(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Execute the notebook in an empty directory, in a kernel of this interpreter."""
    nbformat = pytest.importorskip("nbformat")
    nbclient = pytest.importorskip("nbclient")
    from jupyter_client.manager import KernelManager

    class ThisInterpreter(KernelManager):
        """Starts the kernel of this environment, whatever kernels are installed."""

        def format_kernel_cmd(self, extra_arguments: Any = None) -> list[str]:
            command = super().format_kernel_cmd(extra_arguments)
            return [sys.executable, *command[1:]]

    notebook = nbformat.read(NOTEBOOK, as_version=4)
    nbformat.validate(notebook)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(ROOT))
        patch.setenv("OMP_NUM_THREADS", "1")
        patch.setenv("PYDEVD_DISABLE_FILE_VALIDATION", "1")
        client = nbclient.NotebookClient(
            notebook,
            timeout=400,
            kernel_name="python3",
            kernel_manager_class=ThisInterpreter,
            resources={"metadata": {"path": str(tmp_path_factory.mktemp("notebook"))}},
        )
        return client.execute()


def outputs(notebook: Any, words: str) -> list[Any]:
    """Return the outputs of the one cell whose code holds these words."""
    [cell] = [cell for cell in notebook.cells if cell.cell_type == "code" and words in cell.source]
    return list(cell.outputs)


def text(found: list[Any]) -> str:
    return "".join(each.get("text", "") for each in found if each.get("name") == "stdout")


@pytest.mark.filterwarnings("default")  # of the notebook's own libraries
def test_every_cell_runs(executed: Any) -> None:
    assert not [
        output
        for cell in executed.cells
        for output in cell.get("outputs", ())
        if output.output_type == "error"
    ]


def test_the_model_learns(executed: Any) -> None:
    exact = re.match(r"(\d+) of 20 held-out", text(outputs(executed, "exact = sum")))
    assert exact
    assert int(exact[1]) >= 16


def test_the_attention_is_a_picture(executed: Any) -> None:
    [shown] = outputs(executed, "save_attention_map(")
    assert shown.data["image/png"]


def test_heads_have_effects(executed: Any) -> None:
    shown = text(outputs(executed, "head_effects"))
    assert (
        len(re.findall(r"without head [edx]\d\.\d the log-probability changes by [+-]\d", shown))
        == 3
    )


def test_the_explorer_is_shown(executed: Any) -> None:
    [shown] = outputs(executed, "dragoman.explore(")
    assert '<iframe sandbox="allow-scripts"' in shown.data["text/html"]
    assert "<table>" in shown.data["text/html"]
    assert shown.data["text/plain"].startswith("Explanation('der Hund hat gestern")


def test_the_stored_notebook_is_small() -> None:
    """The page of the explorer would be the largest part of the repository's documentation."""
    assert NOTEBOOK.stat().st_size < 200_000

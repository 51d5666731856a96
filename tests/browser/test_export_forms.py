"""One explanation, delivered as a file, as JSON and in a notebook: the same content everywhere."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from served_kit import SENTENCES
from test_served import PANELS, read_panel, use_every_panel

from dragoman.explain.explanation import Explanation
from dragoman.explore.html_export import export_html, read_island
from dragoman.explore.notebook_display import show_spaces


@pytest.fixture(scope="module")
def explanation(explorer) -> Explanation:
    found: Explanation = explorer.session.first.explanation
    return found


def test_a_file_works_from_disk_without_a_network(visit, explanation, tmp_path: Path) -> None:
    path = tmp_path / "page with space & ünïcode.html"
    export_html(explanation, path, title="a file")
    found = visit(path.as_uri(), offline=True)
    found.wait_until_ready()
    use_every_panel(found)
    for name in PANELS:
        assert len(read_panel(found.page, name).strip()) > 10, f"the panel {name} is empty"
    assert found.page.locator("#panel-strip .source .run").text_content() == SENTENCES[0]
    assert (found.foreign, found.console, found.violations, found.dialogs) == ([], [], [], [])
    assert len(found.requests) == 1  # the file itself


def test_export_import_export_keeps_the_content(explanation, tmp_path: Path) -> None:
    page = export_html(explanation, tmp_path / "one.html")
    stored = read_island(page)
    assert stored["digest"] == explanation.digest
    again = Explanation.from_dict(stored)
    assert again.digest == explanation.digest
    second = read_island(export_html(again, tmp_path / "two.html"))
    assert second == stored
    third = Explanation.from_json(json.dumps(second))
    assert third.digest == explanation.digest
    assert json.loads(third.to_json()) == json.loads(again.to_json())


def test_a_notebook_shows_the_page_in_a_sandbox(visit, explanation, tmp_path: Path) -> None:
    """As in a notebook that is trusted: the frame is there and its scripts run."""
    path = tmp_path / "notebook.html"
    cell = explanation._repr_html_()
    path.write_text(f"<!doctype html><meta charset=utf-8><body>{cell}", encoding="utf-8")
    found = visit(path.as_uri(), offline=True)
    frame = found.page.frame_locator("iframe")
    frame.locator('html[data-ready="true"]').wait_for(state="attached")
    assert frame.locator("#panel-strip .source .run").text_content() == SENTENCES[0]
    frame.locator("#target-2").click()
    assert frame.locator("#target-2").get_attribute("aria-current") == "true"
    frame.locator("#panel-heads .head-cell").last.click()
    frame.locator("#tool-theme").click()
    assert not found.page.locator(".dragoman-table").is_visible()
    assert (found.foreign, found.console, found.dialogs) == ([], [], [])


def test_a_notebook_without_frames_shows_a_table(visit, explanation, tmp_path: Path) -> None:
    """As on a code host: scripts, frames and styles are removed."""
    path = tmp_path / "stripped.html"
    path.write_text(
        f"<!doctype html><meta charset=utf-8><body>{explanation._repr_html_()}", encoding="utf-8"
    )
    found = visit(path.as_uri(), offline=True, java_script_enabled=True)
    found.page.evaluate(
        "document.querySelectorAll('iframe, script, style').forEach((each) => each.remove())"
    )
    table = found.page.locator("table")
    assert table.is_visible()
    rows = table.locator("tbody tr")
    assert rows.count() == len(explanation.steps)
    cells = rows.nth(1).locator("th, td").all_text_contents()
    assert cells[0] == show_spaces(explanation.target.tokens[1].text)
    assert float(cells[1]) == pytest.approx(2.718281828 ** explanation.steps[1].logprob, abs=6e-4)
    assert SENTENCES[0] in found.page.inner_text("body")

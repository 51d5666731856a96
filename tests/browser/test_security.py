"""What the page must not do: run foreign code, reach other hosts, or answer to other sites."""

from __future__ import annotations

import http.server
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from test_served import SHOWN

import dragoman
from dragoman.explore.html_export import export_html
from dragoman.explore.request_security import CONTENT_SECURITY_POLICY

SOURCES = Path(dragoman.__file__).parent / "explore" / "page"
SINKS = (
    "innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "createContextualFragment",
    ".srcdoc", "eval(", "new Function", "setTimeout('", 'setTimeout("', "javascript:", "DOMParser",
)  # fmt: skip
ATTACK = """() => {
  const button = document.createElement('button');
  document.body.append(button);
  button.setAttribute('style', 'color: red');
  try {
    button.setAttribute('onclick', 'window.attacked = true');
  } catch {
    // Trusted Types.
  }
  button.click();
}"""


@pytest.mark.parametrize("path", sorted((SOURCES / "js").glob("*.js")), ids=lambda path: path.name)
def test_the_sources_use_no_sink_for_code(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert not [sink for sink in SINKS if sink in text]


def test_the_page_has_no_inline_code_and_no_foreign_address() -> None:
    text = (SOURCES / "index.html").read_text(encoding="utf-8")
    assert " style=" not in text
    assert " on" + "click=" not in text
    assert "<style" not in text
    for line in text.splitlines():
        if "<script" in line:
            assert ' src="static/' in line
        if "http://" in line or "https://" in line:
            assert "xmlns='http://www.w3.org/2000/svg'" in line


def test_the_served_policy_is_the_strict_one(visit, explorer) -> None:
    found = visit("about:blank")
    answer = found.page.request.get(explorer.url)
    assert answer.headers["content-security-policy"] == CONTENT_SECURITY_POLICY
    assert answer.headers["cross-origin-opener-policy"] == "same-origin"


@pytest.mark.parametrize("delivery", ["served", "file"])
def test_an_inline_handler_is_blocked_and_seen(visit, explorer, tmp_path, delivery: str) -> None:
    """The control of the other tests: their listener does hear violations."""
    if delivery == "served":
        found = visit(explorer.url)
    else:
        path = tmp_path / "page.html"
        export_html(explorer.session.first.explanation, path)
        found = visit(path.as_uri(), offline=True)
    found.wait_until_ready()
    assert found.violations == []
    found.page.evaluate(ATTACK)
    found.wait_until("() => window.violations.length >= 2")
    assert {each.split()[0] for each in found.violations} == {
        "style-src-attr",
        "require-trusted-types-for",
    }
    assert found.page.evaluate("window.attacked") is None


@pytest.mark.parametrize("delivery", ["served", "file"])
def test_markup_as_html_throws(visit, explorer, tmp_path, delivery: str) -> None:
    if delivery == "served":
        found = visit(explorer.url)
    else:
        path = tmp_path / "page.html"
        export_html(explorer.session.first.explanation, path)
        found = visit(path.as_uri(), offline=True)
    found.wait_until_ready()
    error = found.page.evaluate(
        """() => { try { document.body.insertAdjacentHTML('beforeend', '<b>x</b>'); return ''; }
        catch (error) { return error.name; } }"""
    )
    assert error == "TypeError"


@pytest.mark.parametrize(
    "text",
    [
        "<script>window.attacked = true</script> Mann",
        "<img src=x onerror=window.attacked=true> Frau",
        "</script><script>alert(1)</script> steht",
        "]]> --> <!-- <svg onload=alert(1)>",
    ],
)
def test_a_hostile_text_is_text(visit, explorer, tmp_path, text: str) -> None:
    found = visit(explorer.url)
    found.wait_until_ready()
    page = found.page
    page.fill("#ask-text", text)
    with page.expect_response("**/api/explain") as asked:
        page.locator("#panel-ask").get_by_role("button", name="Translate").click()
    explanation = asked.value.json()
    shown = explanation["source"]["text"]
    found.wait_until(SHOWN, shown)
    path = tmp_path / "hostile.html"
    export_html(explanation, path, title=text)
    file = visit(path.as_uri(), offline=True)
    file.wait_until_ready()
    assert file.page.locator("#panel-strip .source .run").text_content() == shown
    assert file.page.title() == text
    for each in (found, file):
        assert each.page.evaluate("window.attacked") is None
        assert each.page.locator("main img, main svg[onload]").count() == 0
        assert (each.violations, each.dialogs, each.foreign) == ([], [], [])


@pytest.fixture
def other_site() -> Iterator[str]:
    """Serve an empty page of another site."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Type", "text/html")
            self.end_headers()
            self.wfile.write(b"<!doctype html><title>other</title><body>")

        def log_message(self, *arguments: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://localhost:{server.server_port}/"
        server.shutdown()
        thread.join()


def test_another_site_can_neither_read_nor_ask(browser, explorer, other_site: str) -> None:
    """A page that the person has open in another tab."""
    context = browser.new_context()
    page = context.new_page()
    page.goto(other_site)
    before = len(explorer.session.cache)
    attempt = """async ([url, options]) => {
      try { const answer = await fetch(url, options); return [answer.type, answer.status, await answer.text()]; }
      catch (error) { return [error.name]; }
    }"""
    session = f"{explorer.url}api/session"
    explain = f"{explorer.url}api/explain"
    body = '{"text": "Ein Mann geht fremd."}'
    kind = {"Content-Type": "application/json"}
    for url, options in (
        (session, {}),
        (session, {"mode": "no-cors"}),
        (explain, {"method": "POST", "body": body, "headers": kind}),
        (explain, {"method": "POST", "body": body, "mode": "no-cors"}),
        (explain, {"method": "POST", "body": body}),
    ):
        found = page.evaluate(attempt, [url, options])
        assert found in (["TypeError"], ["opaque", 0, ""])
    page.set_content(f'<iframe src="{explorer.url}"></iframe><img src="{session}">')
    page.wait_for_timeout(300)
    [_, frame] = page.frames
    assert frame.locator("#panel-strip").count() == 0
    assert len(explorer.session.cache) == before
    context.close()

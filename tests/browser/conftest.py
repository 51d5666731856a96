"""Chromium for the tests of the page, and visits that record requests, console lines and CSP
violations.

The browser is the program that DRAGOMAN_CHROMIUM names, or chromium, chromium-browser or
google-chrome. Without one the tests are skipped, with the reason. It never leaves this machine: a
visit aborts requests to other hosts and records them.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

sys.path.insert(0, str(Path(__file__).parent))

PROGRAMS = ("chromium", "chromium-browser", "google-chrome")
ARGUMENTS = [
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
]
LISTENER = """
window.violations = [];
document.addEventListener('securitypolicyviolation', (event) => {
  window.violations.push(`${event.effectiveDirective} ${event.blockedURI}`);
});
"""


def find_chromium() -> str | None:
    """Return the program of the browser, or None."""
    named = os.environ.get("DRAGOMAN_CHROMIUM")
    if named:
        return shutil.which(named)
    return next(filter(None, map(shutil.which, PROGRAMS)), None)


def why_no_browser() -> str:
    """Return why there is no browser; empty if there is one."""
    if not find_chromium():
        return f"needs Chromium: DRAGOMAN_CHROMIUM or one of {', '.join(PROGRAMS)} in PATH"
    try:
        import playwright.sync_api  # noqa: F401
    except ImportError:
        return "needs the package playwright: pip install 'dragoman[test]'"
    return ""


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Start a headless Chromium, once a module.

    Playwright keeps an event loop running, in which later tests of a session could start no other.
    """
    if reason := why_no_browser():
        pytest.skip(reason)
    from playwright.sync_api import sync_playwright

    is_root = hasattr(os, "geteuid") and os.geteuid() == 0
    with sync_playwright() as playwright:
        launched = playwright.chromium.launch(
            executable_path=find_chromium(),
            args=[*ARGUMENTS, *(["--no-sandbox"] if is_root else [])],
        )
        yield launched
        launched.close()


@dataclass
class Visit:
    """A page and what happened while it was open."""

    page: Any
    origin: str  # scheme, host and port; empty for a file
    requests: list[str] = field(default_factory=list)
    console: list[str] = field(default_factory=list)  # errors, warnings and uncaught exceptions
    dialogs: list[str] = field(default_factory=list)

    @property
    def foreign(self) -> list[str]:
        """Requests to another origin; data and blob addresses carry their content themselves."""
        return [
            url
            for url in self.requests
            if urlsplit(url).scheme not in ("data", "blob")
            and not url.startswith(self.origin or "file://")
        ]

    @property
    def violations(self) -> list[str]:
        """What the content security policy blocked."""
        found: list[str] = self.page.evaluate("window.violations")
        return found

    def wait_until_ready(self) -> None:
        """Wait until the page has shown its explanation."""
        self.page.locator('html[data-ready="true"]').wait_for(state="attached")

    def wait_until(self, condition: str, argument: Any = None) -> None:
        """Wait until a JavaScript function returns true."""
        from page_kit import wait_until

        wait_until(self.page, condition, argument)


@pytest.fixture
def visit(browser: Any) -> Iterator[Callable[..., Visit]]:
    """Open addresses: `visit(url, width=…, offline=…)` returns a Visit."""
    contexts = []

    def open_url(
        url: str, *, width: int = 1280, height: int = 900, offline: bool = False, **options: Any
    ) -> Visit:
        context = browser.new_context(
            viewport={"width": width, "height": height},
            locale=options.pop("locale", "en-US"),
            reduced_motion=options.pop("reduced_motion", "reduce"),
            **options,
        )
        contexts.append(context)
        context.add_init_script(LISTENER)
        parts = urlsplit(url)
        origin = f"{parts.scheme}://{parts.netloc}" if parts.scheme.startswith("http") else ""
        page = context.new_page()
        found = Visit(page, origin)
        page.on("request", lambda request: found.requests.append(request.url))
        page.on(
            "console",
            lambda message: (
                found.console.append(message.text) if message.type in ("error", "warning") else None
            ),
        )
        page.on("pageerror", lambda error: found.console.append(str(error)))

        def dismiss(dialog: Any) -> None:
            found.dialogs.append(dialog.message)
            dialog.dismiss()

        page.on("dialog", dismiss)
        if origin:
            own = parts.netloc
            page.route(lambda asked: urlsplit(asked).netloc != own, lambda route: route.abort())
        context.set_offline(offline)
        page.goto(url)
        return found

    yield open_url
    for context in contexts:
        context.close()


@pytest.fixture(scope="session")
def explorer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Serve a translation model with random weights, opened with one sentence."""
    from served_kit import SENTENCES, ServedExplorer, write_model

    from dragoman.explore.explorer_session import ExplorerSession
    from dragoman.explore.request_parsing import ExplainRequest

    path = write_model(tmp_path_factory.mktemp("explorer") / "random-model")
    session = ExplorerSession.load(path, device="cpu")
    session.first = session.explain(ExplainRequest(text=SENTENCES[0], beam=3))
    served = ServedExplorer(session, path)
    yield served
    served.close()

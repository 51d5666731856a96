"""Open the explorer page in Chromium without a server: Playwright answers its requests from the
package's files, or from the page's sources for tests that import one of its modules.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import numpy as np
from playwright.sync_api import Browser, BrowserContext, Page, Route, TimeoutError

import dragoman

STATIC = Path(dragoman.__file__).parent / "explore" / "static"
SOURCES = STATIC.parent / "page"
ORIGIN = "http://127.0.0.1:9"
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'"
)
TYPES = {".js": "text/javascript", ".css": "text/css", ".html": "text/html; charset=utf-8"}

Answer = Callable[[dict[str, Any]], Any]


class FakeServer:
    """The routes of the explorer: files from the package, explanations and answers from the
    test.
    """

    def __init__(
        self,
        explanation: dict[str, Any] | None,
        answers: dict[str, Answer] | None = None,
        *,
        from_sources: bool = False,
    ) -> None:
        self.folder = SOURCES if from_sources else STATIC
        self.explanations = {} if explanation is None else {explanation["digest"]: explanation}
        self.first = explanation["digest"] if explanation else None
        self.answers = {"off": self.switch_off} | (answers or {})
        self.requests: list[tuple[str, Any]] = []

    def switch_off(self, body: dict[str, Any]) -> dict[str, Any]:
        """Return an ablation that changes every token's log-probability by -0.1 and no token."""
        explanation = self.explanations[self.first or ""]
        count = len(explanation["steps"])
        return {
            "off": body["heads"],
            "effect": [-0.1] * count,
            "sum_change": -0.1 * count,
            "text": explanation["target"]["text"],
            "tokens": [token["id"] for token in explanation["target"]["tokens"]],
            "target": explanation["target"],
            "steps": explanation["steps"],
            "score": explanation["score"],
        }

    def handle(self, route: Route) -> None:
        """Answer one request of the page."""
        path = unquote(urlsplit(route.request.url).path)
        if path == "/explore/":
            self.send_file(route, self.folder / "index.html")
        elif path.startswith("/explore/static/vendor/"):
            self.send_file(route, STATIC / path.removeprefix("/explore/static/"))
        elif path.startswith("/explore/static/"):
            self.send_file(route, self.folder / path.removeprefix("/explore/static/"))
        elif path.startswith("/explore/api/"):
            self.answer(route, path.removeprefix("/explore/api/"))
        else:
            route.fulfill(status=404, body="")

    def send_file(self, route: Route, path: Path) -> None:
        """Send a file of the package, or nothing where it has not been written."""
        body = path.read_bytes() if path.is_file() else b""
        route.fulfill(
            body=body,
            headers={
                "Content-Type": TYPES.get(path.suffix, "text/plain"),
                "Content-Security-Policy": POLICY,
            },
        )

    def answer(self, route: Route, path: str) -> None:
        """Answer a call of the interface."""
        body = json.loads(route.request.post_data) if route.request.post_data else None
        self.requests.append((path, body))
        if path == "session":
            model = (
                next(iter(self.explanations.values()))["model"]
                if self.explanations
                else {"name": "synthetic"}
            )
            result: Any = {
                "model": model,
                "task": "translate",
                "targets": model.get("targets", []),
                "examples": ["The house is old.", "She keeps the keys."],
                "limits": {"characters": 2000, "beam": 16},
                "explanation": self.first,
            }
        elif path.startswith("e/") and path.count("/") == 1:
            result = self.explanations.get(path.removeprefix("e/"))
        else:
            name = path.rsplit("/", 1)[-1]
            result = self.answers[name](body or {}) if name in self.answers else None
            if isinstance(result, dict) and result.get("format") == "dragoman.explanation":
                self.explanations[result["digest"]] = result
        if result is None:
            route.fulfill(status=404, json={"error": f"no answer for {path}"})
        elif isinstance(result, str):
            route.fulfill(body=result, headers={"Content-Type": "application/x-ndjson"})
        else:
            route.fulfill(json=result)


def open_context(
    browser: Browser, width: int = 1280, dark: bool = False, **options: Any
) -> BrowserContext:
    """Return a browser context of this width and theme; height is that of a usual screen."""
    return browser.new_context(
        viewport={"width": width, "height": 900 if width >= 700 else 700},
        color_scheme="dark" if dark else "light",
        locale=options.pop("locale", "en-US"),
        reduced_motion=options.pop("reduced_motion", "reduce"),
        **options,
    )


def open_page(
    context: BrowserContext,
    explanation: dict[str, Any] | None,
    fragment: str = "",
    answers: dict[str, Answer] | None = None,
    *,
    from_sources: bool = False,
) -> tuple[Page, FakeServer, list[str]]:
    """Return the page once it is ready, its server, and the console messages (must stay empty)."""
    server = FakeServer(explanation, answers, from_sources=from_sources)
    page = context.new_page()
    problems: list[str] = []
    page.on(
        "console",
        lambda message: (
            problems.append(message.text) if message.type in ("error", "warning") else None
        ),
    )
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.route("**/*", server.handle)
    page.set_default_timeout(10_000)
    page.goto(f"{ORIGIN}/explore/{'#' + fragment if fragment else ''}")
    # wait_for_function would evaluate a string, which the page's policy forbids.
    try:
        page.wait_for_selector("html[data-ready=true]", state="attached")
    except TimeoutError as error:
        raise AssertionError(f"the page did not start: {problems}") from error
    return page, server, problems


def wait_until(page: Page, condition: str, argument: Any = None) -> None:
    """Wait until a JavaScript function returns true; `wait_for_function` would evaluate a string
    in the page, which its content security policy forbids.
    """
    for _ in range(1500):
        if page.evaluate(condition, argument):
            return
        page.wait_for_timeout(20)
    raise AssertionError(f"{condition} does not hold after 30 s")


PICTURE = """() => {
  const maps = [...document.querySelectorAll('.head-cell i')];
  const [image] = new Set(maps.map((each) => getComputedStyle(each).backgroundImage));
  return [image, maps.map((each) => {
    const { backgroundPosition, backgroundSize } = getComputedStyle(each);
    return [each.parentElement.dataset.head, ...`${backgroundPosition} ${backgroundSize}`.split(' ').map(parseFloat)];
  })];
}"""


def read_head_maps(page: Page) -> dict[str, np.ndarray]:
    """Return the colours of every head's small map, (50, 50, 3); none before they are drawn."""
    image, places = page.evaluate(PICTURE)
    if image == "none":
        return {}
    file = base64.b64decode(image.partition("base64,")[2].rstrip('")'))
    assert file[:2] == b"BM"
    width, height = np.frombuffer(file, "<i4", 2, 18)
    assert height < 0  # rows from top to bottom
    table = np.frombuffer(file, np.uint8, 1024, 54).reshape(256, 4)[:, 2::-1]
    pixels = table[np.frombuffer(file, np.uint8, offset=1078).reshape(-height, width)]
    maps = {}
    for head, x, y, wide, high in places:
        across, down = round(wide / 100), round(high / 100)
        column, row = round(x * (across - 1) / 100), round(y * (down - 1) / 100)
        side = width // across
        maps[head] = pixels[row * side :, column * side :][:side, :side]
    return maps


def wait_for_head_maps(page: Page) -> dict[str, np.ndarray]:
    """Return the colours of every head's small map once they are drawn."""
    for _ in range(500):
        if maps := read_head_maps(page):
            return maps
        page.wait_for_timeout(20)
    raise AssertionError("the maps of the heads were not drawn in 10 s")

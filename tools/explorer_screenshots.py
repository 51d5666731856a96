"""Take the pictures of docs/explorer.md: every panel of the explorer page, from a trained model.

    python tools/explorer_fixtures.py build/explorer --only translator
    python tools/explorer_screenshots.py build/explorer/translator docs/images

Needs Chromium (DRAGOMAN_CHROMIUM, or `chromium` in PATH) and the packages playwright and pillow.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

from PIL import Image

TEXT = "Zwei kleine Kinder haben heute im Garten einen alten Ball gefunden."
# Name of the picture -> what it shows, and the selection in the page's address.
PANELS = {
    "explorer": ("", "t={t}"),
    "explorer-translation": ("#panel-strip", "t={t}"),
    "explorer-beam": ("#panel-beam", "t={t}"),
    "explorer-heads": ("#panel-heads", "t={t}&h={h}"),
    "explorer-head": ("#panel-head", "t={t}&s={s}&h={h}"),
    "explorer-token": ("#panel-token", "t={t}&h={h}"),
    "explorer-order": ("#panel-positions", "h={h}"),
    "explorer-tour": ("window", "tour=4"),
}
CHOICE = """(word) => {
  const tokens = [...document.querySelectorAll('.side.target .tok')];
  return Math.max(0, tokens.findIndex((each) => each.textContent === word));
}"""


def take(page: Any, address: str, folder: Path, word: str) -> None:
    """Write one picture for every panel."""
    page.goto(address)
    page.wait_for_selector("html[data-ready=true]", state="attached")
    step = page.evaluate(CHOICE, word)
    page.click(f"#target-{step}")
    page.click("#panel-strip .reading button")  # the head that reads its source word
    page.wait_for_timeout(400)
    chosen = dict(part.split("=", 1) for part in page.url.split("#", 1)[1].split("&"))
    for name, (selector, fragment) in PANELS.items():
        page.goto("about:blank")
        page.goto(
            address + "#" + fragment.format(t=step, s=chosen.get("s", 0), h=chosen.get("h", "x0.0"))
        )
        page.wait_for_selector("html[data-ready=true]", state="attached")
        page.wait_for_timeout(400)
        # Its name is Chinese, and machines that take pictures often have no font for it.
        page.evaluate("document.getElementById('tool-lang').hidden = true")
        path = folder / f"{name}.png"
        if selector.startswith("#"):
            page.evaluate("document.querySelector('.dock').remove()")
            page.locator(selector).scroll_into_view_if_needed()
            page.wait_for_timeout(200)
            page.locator(selector).screenshot(path=path)
        else:
            page.screenshot(path=path)
        reduce_colors(path)
        print(path)


def reduce_colors(path: Path) -> None:
    """Write a picture with 256 colors: the page has few, and the file is half as large."""
    with Image.open(path) as image:
        image.convert("RGB").quantize(256, Image.Quantize.MAXCOVERAGE).save(path, optimize=True)


def main() -> int:
    """Explain the text with the model, open the page from a file and take the pictures."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--text", default=TEXT)
    parser.add_argument("--word", default="ball", help="word of the translation to select")
    parser.add_argument("--to", help="target language, for a model of several directions")
    parser.add_argument("--dark", action="store_true")
    arguments = parser.parse_args()
    from playwright.sync_api import sync_playwright

    import dragoman
    from dragoman.explore.html_export import export_html

    program = shutil.which(os.environ.get("DRAGOMAN_CHROMIUM") or "chromium")
    if program is None:
        print("the pictures need Chromium; found none; set DRAGOMAN_CHROMIUM", file=sys.stderr)
        return 2
    options = {"target_language": arguments.to} if arguments.to else {}
    explanation = dragoman.load(arguments.model).explain(arguments.text, beam=4, **options)
    arguments.folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        path = Path(folder) / "explorer.html"
        export_html(explanation, path, title="Explorer")
        is_root = hasattr(os, "geteuid") and os.geteuid() == 0
        browser = playwright.chromium.launch(
            executable_path=program, args=["--no-sandbox"] if is_root else []
        )
        page = browser.new_page(
            viewport={"width": 1280, "height": 860},
            color_scheme="dark" if arguments.dark else "light",
            reduced_motion="reduce",
            locale="en-US",
        )
        take(page, path.as_uri(), arguments.folder, arguments.word)
        browser.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())

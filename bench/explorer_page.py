"""Measure the explorer page in headless Chromium: load, grid of heads, selections, beam, memory.

    python bench/explorer_page.py [--tokens 60] [--layers 6] [--heads 8] [--repeats 5]

The page is one exported file with random numbers, opened from disk without a network. Main-thread
time is the browser's own count of the CPU time in tasks, which other programs disturb little. A
selection is timed until the page is laid out, and in CPU time with the frames that follow. It
prints medians beside the limits and one line of JSON; the calibration is a fixed loop of
JavaScript, to compare machines.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from dragoman.explore.html_export import export_html

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "browser"))

from synthetic import make_explanation

LIMITS = {  # milliseconds, and megabytes for the heap
    "interactive": 500,
    "grid, all heads": 120,
    "grid, 48 heads of 128 x 128": 100,
    "selection, p95": 40,
    "interactive, beam of 10000": 300,
    "heap": 80,
}
READY = """
new MutationObserver(() => {
  if (document.documentElement.dataset.ready) window.readyAt ??= performance.now();
}).observe(document, { attributes: true, subtree: true, attributeFilter: ['data-ready'] });
"""
CALIBRATION = """() => {
  const begin = performance.now();
  let sum = 0;
  for (let i = 0; i < 3e7; i++) sum += Math.sqrt(i % 1000);
  return [performance.now() - begin, sum][0];
}"""
PICTURE = "() => getComputedStyle(document.querySelector('.head-cell i')).backgroundImage"
TALL, SCREEN = {"width": 1280, "height": 4000}, {"width": 1280, "height": 860}
SELECT = """async (item) => {
  const begin = performance.now();
  item.click();
  await null; // canvases are painted here
  document.body.getBoundingClientRect();
  const elapsed = performance.now() - begin;
  for (let frame = 0; frame < 2; frame++) await new Promise(requestAnimationFrame);
  await new Promise((done) => setTimeout(done));
  return elapsed;
}"""


def main() -> None:
    """Measure everything; print medians and one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--tokens", type=int, default=60, help="source and target tokens")
    parser.add_argument("--layers", type=int, default=6, help="encoder and decoder layers, each")
    parser.add_argument("--heads", type=int, default=8, help="heads per layer")
    parser.add_argument("--repeats", type=int, default=5, help="loads of each page")
    chosen = parser.parse_args()
    program = os.environ.get("DRAGOMAN_CHROMIUM") or shutil.which("chromium")
    if program is None:
        raise SystemExit("the benchmark needs Chromium; found none in PATH; set DRAGOMAN_CHROMIUM")
    from playwright.sync_api import sync_playwright

    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        pages = write_pages(Path(folder), chosen)
        browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        runs = [measure(browser, pages) for _ in range(chosen.repeats)]
        browser.close()
        sizes = {name: path.stat().st_size for name, path in pages.items()}
    results = {name: round(statistics.median(run[name] for run in runs), 1) for name in runs[0]}
    for name, value in results.items():
        unit = "MB" if name == "heap" else "ms"
        limit = f"  (limit: {LIMITS[name]} {unit})" if name in LIMITS else ""
        print(f"{name:30} {value:8.1f} {unit}{limit}")
    for name, size in sizes.items():
        print(f"{'file, ' + name:30} {size / 1000:8.0f} kB")
    print(json.dumps({"results": results, "bytes": sizes, "repeats": chosen.repeats}))


def write_pages(folder: Path, chosen: argparse.Namespace) -> dict[str, Path]:
    """Write the exported files that are measured."""
    size = {"source_length": chosen.tokens, "target_length": chosen.tokens}
    explanations = {
        "page": make_explanation(**size, layers=chosen.layers, heads=chosen.heads),
        "grid": make_explanation(source_length=128, target_length=128, layers=2, heads=8),
        "beam": make_explanation(**size, layers=2, heads=4, nodes=10_000),
    }
    paths = {name: folder / f"{name}.html" for name in explanations}
    for name, explanation in explanations.items():
        export_html(explanation, paths[name])
    return paths


def measure(browser: Any, paths: dict[str, Path]) -> dict[str, float]:
    """Open each file once in a fresh context; return milliseconds, and megabytes for the heap."""
    results: dict[str, float] = {}
    for name, path in paths.items():
        # Tall enough that every head is in view.
        context = browser.new_context(viewport=TALL)
        context.set_offline(True)
        context.add_init_script(READY)
        page = context.new_page()
        page.goto(path.as_uri())
        page.wait_for_selector("html[data-ready=true]", state="attached")
        page.wait_for_timeout(300)
        client = context.new_cdp_session(page)
        client.send("Performance.enable", {"timeDomain": "threadTicks"})
        if name == "page":
            results["calibration"] = page.evaluate(CALIBRATION)
            results["interactive"] = page.evaluate("window.readyAt")
            results["grid, all heads"] = grid_time(page, client)
            page.set_viewport_size(SCREEN)
            results |= selection_times(page, client)
            client.send("HeapProfiler.collectGarbage")
            results["heap"] = metrics(client)["JSHeapUsedSize"] / 1e6
        elif name == "grid":
            results["grid, 48 heads of 128 x 128"] = grid_time(page, client)
        else:
            results["interactive, beam of 10000"] = page.evaluate("window.readyAt")
        context.close()
    return results


def grid_time(page: Any, client: Any) -> float:
    """Return the main-thread time of drawing the maps of all heads again, in milliseconds.

    The garbage of loading and of the calibration is collected before.
    """
    page.locator(".head-cell").first.focus()
    client.send("HeapProfiler.collectGarbage")
    page.wait_for_timeout(200)
    picture = page.evaluate(PICTURE)
    before = metrics(client)["TaskDuration"]
    page.keyboard.press("m")
    page.wait_for_timeout(500)
    elapsed = 1000 * (metrics(client)["TaskDuration"] - before)
    if page.evaluate(PICTURE) == picture:
        raise SystemExit("the heads were not drawn again in 500 ms; run it on a machine less busy")
    return elapsed


def selection_times(page: Any, client: Any) -> dict[str, float]:
    """Return the 95th percentiles of 200 selections: until the layout, and with the frames."""
    draw = random.Random(7)
    kinds = [
        page.query_selector_all(each) for each in (".target .tok", ".source .tok", ".head-cell")
    ]
    laid_out, with_frames = [], []
    for number in range(200):
        item = draw.choice(kinds[number % len(kinds)])
        before = metrics(client)["TaskDuration"]
        laid_out.append(item.evaluate(SELECT))
        with_frames.append(1000 * (metrics(client)["TaskDuration"] - before))
    return {
        "selection, p95": sorted(laid_out)[189],
        "selection with its frames, p95": sorted(with_frames)[189],
    }


def metrics(client: Any) -> dict[str, float]:
    """Return the browser's counters by name."""
    answer = client.send("Performance.getMetrics")
    return {entry["name"]: entry["value"] for entry in answer["metrics"]}


if __name__ == "__main__":
    main()

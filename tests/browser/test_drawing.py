"""Drawing: maps of all heads, long texts pooled and exact on zoom, families, and many selections."""

from __future__ import annotations

import base64
from typing import Any
from urllib.parse import parse_qs, urlsplit

import numpy as np
import pytest
from page_kit import open_context, open_page, read_head_maps, wait_for_head_maps
from synthetic import encode, make_explanation
from test_panels import CELLS, decode, number, open_tables

from dragoman.explain.explanation import Explanation
from dragoman.explore.html_export import export_html


@pytest.fixture
def context(browser: Any) -> Any:
    opened = open_context(browser)
    yield opened
    opened.close()


def test_maps_of_long_texts_show_the_maximum_of_each_block(context):
    explanation = make_explanation(source_length=100, target_length=128, layers=1, heads=2)
    page, _, _ = open_page(context, explanation)
    colours = wait_for_head_maps(page)["x0.1"]
    weights = decode(explanation, "x0.w")[1]
    rows, columns = weights.shape
    blocks = np.zeros(colours.shape[:2])
    assert blocks.shape == (50, 50)
    for r in range(rows):
        for c in range(columns):
            at = r * 50 // rows, c * 50 // columns
            blocks[at] = max(blocks[at], weights[r, c])
    codes = np.floor(255 * np.sqrt(blocks) + 0.5).astype(int)
    table: dict[int, tuple[int, ...]] = {}
    for code, colour in zip(codes.ravel(), colours.reshape(-1, 3)):
        assert table.setdefault(int(code), tuple(colour)) == tuple(colour)
    assert len(table) > 40


def test_maps_follow_the_measure_and_the_explanation(context):
    """Maps of the sentence before are gone as soon as another one is shown."""
    explanation = make_explanation(source_length=12, target_length=9, layers=1, heads=2)
    other = make_explanation(source_length=6, target_length=7, layers=2, heads=3)
    page, _, problems = open_page(context, explanation, answers={"explain": lambda _: other})
    weights = wait_for_head_maps(page)
    page.locator(".head-cell").first.focus()
    page.keyboard.press("m")
    for _ in range(100):
        if any((read_head_maps(page)[name] != weights[name]).any() for name in weights):
            break
        page.wait_for_timeout(20)
    else:
        raise AssertionError("contributions are drawn as weights")
    page.keyboard.press("m")
    page.locator("#panel-ask textarea").first.fill("Another sentence.")
    page.get_by_role("button", name="Translate").click()
    page.locator(".head-cell[data-head='x1.2']").wait_for()
    maps = wait_for_head_maps(page)
    assert len(maps) == 18
    assert {name: len(np.unique(maps[name].reshape(-1, 3), axis=0)) for name in maps}["x1.2"] > 5
    assert problems == []


def pooled_explanation() -> tuple[dict[str, Any], Explanation]:
    """Return a long explanation as a page gets it, and with its exact arrays."""
    exact = Explanation.from_dict(
        make_explanation(source_length=150, target_length=140, layers=2, heads=2, nodes=200)
    )
    values = exact.to_dict(budget=130_000)
    assert values["tensors"]["x1.w"]["pool"]
    return values, exact


def test_pooled_matrix_is_shown_and_exact_on_zoom(context):
    values, exact = pooled_explanation()
    asked: list[dict[str, list[str]]] = []
    page, _, problems = open_page(context, values, "h=x1.1&t=70&s=60")
    tensor = exact.arrays["x1.w"]

    def region(route: Any) -> None:
        query = parse_qs(urlsplit(route.request.url).query)
        asked.append(query)
        (q0, q1), (k0, k1) = (map(int, query[axis][0].split("-")) for axis in "qk")
        part = tensor[int(query["h"][0]), q0 : q1 + 1, k0 : k1 + 1].astype("<f4")
        shape = ",".join(map(str, part.shape))
        route.fulfill(body=part.tobytes(), headers={"X-Shape": shape})

    page.route("**/tensor/**", region)
    panel = page.locator("#panel-head")
    assert "pooled" in panel.inner_text()
    open_tables(panel)
    rows = page.evaluate(CELLS, "#panel-head .matrix-table")
    pooled = decode(values, "x1.w")[1]
    found = np.array([[number(cell) for cell in row[1:]] for row in rows])
    assert np.abs(found - pooled).max() <= 0.005
    assert " … " in rows[0][0]
    # A row of groups still sums to 1.
    assert np.allclose(found.sum(-1), 1, atol=0.03)

    for _ in range(3):
        panel.get_by_role("button", name="Zoom in").click()
    panel.get_by_text("pooled").wait_for(state="detached")
    rows = page.evaluate(CELLS, "#panel-head .matrix-table")
    q0, q1, k0, k1 = (int(each) for axis in "qk" for each in asked[-1][axis][0].split("-"))
    shown = np.array([[number(cell) for cell in row[1:]] for row in rows])
    assert shown.shape == (q1 - q0 + 1, k1 - k0 + 1)
    assert np.abs(shown - tensor[1, q0 : q1 + 1, k0 : k1 + 1]).max() <= 0.0006
    assert q0 <= 70 <= q1
    assert k0 <= 60 <= k1
    page.wait_for_url(f"**z={q0}-{q1},{k0}-{k1}*")
    panel.get_by_role("button", name="Whole").click()
    page.wait_for_url(lambda url: "z=" not in url)
    assert problems == []


def test_exact_weights_are_asked_once_where_no_contributions_are_stored(context):
    values, exact = pooled_explanation()
    page, _, problems = open_page(context, values, "h=x1.1&t=70&s=60&m=contribution")
    asked: list[str] = []

    def region(route: Any) -> None:
        asked.append(route.request.url)
        query = parse_qs(urlsplit(route.request.url).query)
        (q0, q1), (k0, k1) = (map(int, query[axis][0].split("-")) for axis in "qk")
        part = exact.arrays["x1.w"][1, q0 : q1 + 1, k0 : k1 + 1].astype("<f4")
        route.fulfill(body=part.tobytes())

    page.route("**/tensor/**", region)
    panel = page.locator("#panel-head")
    assert "weights are shown" in panel.inner_text()
    panel.get_by_role("button", name="Zoom in").click()
    panel.get_by_text("pooled").wait_for(state="detached")
    page.wait_for_timeout(300)
    assert len(asked) == 1
    assert "/tensor/x1.w?" in asked[0]
    assert problems == []


def test_many_selections_leave_the_numbers_right(browser, tmp_path):
    """80 random selections in an exported file of 144 heads, opened from disk without a network."""
    explanation = make_explanation(source_length=30, target_length=30, layers=6, heads=8)
    path = tmp_path / "page.html"
    export_html(explanation, path)
    context = open_context(browser)
    context.set_offline(True)
    page = context.new_page()
    problems: list[str] = []
    page.on("console", lambda message: problems.append(message.text))
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.goto(path.as_uri())
    page.wait_for_selector("html[data-ready=true]", state="attached")
    rng = np.random.default_rng(5)
    sites = [site["id"] for site in explanation["sites"]]
    picks = [
        (f"{sites[rng.integers(len(sites))]}.{rng.integers(8)}", int(t), int(s))
        for t, s in rng.integers(0, 29, (80, 2))
    ]
    found = page.evaluate(
        """(picks) => picks.map(([head, t, s]) => {
          document.querySelector(`.head-cell[data-head='${head}']`).click();
          document.getElementById(`target-${t}`).click();
          document.getElementById(`source-${s}`).click();
          return document.querySelector('#panel-head [role=gridcell]').textContent;
        })""",
        picks,
    )
    matrices = {site: decode(explanation, f"{site}.w") for site in sites}
    for (head, t, s), text in zip(picks, found):
        site, index = head.split(".")
        row = s if site[0] == "e" else t
        weights = matrices[site][int(index), row]
        value = number(text.rsplit(" ", 1)[1])
        if site[0] == "x":
            assert value == pytest.approx(weights[s], abs=0.0006), head
        else:
            assert np.abs(weights - value).min() <= 0.0006, head
    assert problems == []
    context.close()


def site_of(**changes: Any) -> dict[str, Any]:
    """Return a site of another family."""
    return {
        "path": "pool",
        "kind": "pool",
        "group": "encoder",
        "layer": 0,
        "heads": 1,
        "query": "seed",
        "key": "source",
        "sum": "one",
        "causal": False,
        "ordered": True,
        "segments": [],
        "query_labels": None,
        "key_labels": None,
        "contribution": None,
        **changes,
    }


def test_words_and_sentences_of_a_hierarchical_network(context):
    explanation = make_explanation(missing={"heads": "", "token": "no", "beam": "no"})
    explanation["missing"] = {"token": "no", "beam": "no"}
    count = len(explanation["source"]["tokens"])
    weights = np.zeros((2, count), dtype=np.float32)
    weights[0, :4] = [0.1, 0.2, 0.3, 0.4]
    weights[1, 4:] = 1 / (count - 4)
    for at in range(2):
        explanation["tensors"][f"w{at}.w"] = encode(weights[at][None, None], "u8")
        explanation["sites"].append(
            site_of(
                id=f"w{at}",
                query="sentence",
                tensor=f"w{at}.w",
                query_labels=[f"sentence {at + 1}"],
                segments=[[f"sentence {at + 1}", 4 * at, 4 if at == 0 else count]],
            )
        )
    page, _, problems = open_page(context, explanation, "h=w0.0")
    open_tables(page.locator("#panel-head"))
    rows = page.evaluate(CELLS, "#panel-head .matrix-table")
    assert [row[0] for row in rows] == ["sentence 1", "sentence 2"]
    found = np.array([[number(cell) for cell in row[1:]] for row in rows])
    assert np.abs(found - weights).max() <= 0.005
    assert "rows: sentences" in page.locator("#panel-head .axes").inner_text()
    assert problems == []


def test_elements_of_a_set_are_sorted_by_weight(context):
    explanation = make_explanation(missing={"heads": "", "token": "no", "positions": "no"})
    explanation["missing"] = {"token": "no", "positions": "no"}
    count = len(explanation["source"]["tokens"])
    weights = np.linspace(0.01, 0.3, count, dtype=np.float32)[None, None]
    explanation["tensors"]["x0.w"] = encode(weights, "u8")
    labels = [f"element {i}" for i in range(count)]
    explanation["sites"].append(
        site_of(
            id="x0",
            kind="set",
            group="cross",
            key="element",
            ordered=False,
            tensor="x0.w",
            query_labels=["seed 1"],
            key_labels=labels,
        )
    )
    page, _, problems = open_page(context, explanation, "h=x0.0")
    open_tables(page.locator("#panel-head"))
    names = page.locator("#panel-head .matrix-table thead th").all_text_contents()[1:]
    assert names == labels[::-1]
    assert problems == []


def test_choosing_probabilities_and_paths_are_shown(context):
    explanation = make_explanation(layers=1, heads=1)
    shape = explanation["tensors"]["x0.w"]["shape"]
    chosen = np.random.default_rng(1).random(shape).astype(np.float32)
    explanation["tensors"]["mono.p"] = encode(chosen, "u8")
    explanation["tensors"]["mono.path"] = encode(np.arange(shape[1], dtype=np.int32), "i32")
    explanation["extras"] = {"p_choose": "mono.p", "path": "mono.path"}
    page, _, problems = open_page(context, explanation, "h=x0.0")
    panel = page.locator("#panel-head")
    panel.get_by_role("button", name="Choosing probability").click()
    open_tables(panel)
    rows = page.evaluate(CELLS, "#panel-head .matrix-table")
    found = np.array([[number(cell) for cell in row[1:]] for row in rows])
    assert np.abs(found - decode(explanation, "mono.p")[0]).max() <= 0.005
    assert problems == []


def test_other_parts_can_be_switched_off(context):
    explanation = make_explanation(layers=1, heads=1)
    explanation["model"]["off_switches"] = ["memory"]
    effect = [-0.1] * len(explanation["target"]["tokens"])
    answer = {
        "effect": effect,
        "sum_change": sum(effect),
        "text": explanation["target"]["text"],
        "target": explanation["target"],
        "score": explanation["score"],
    }
    page, server, problems = open_page(
        context, explanation, "h=x0.0", {"off": lambda body: {**answer, "off": body["heads"]}}
    )
    page.get_by_role("button", name="Try without memory").click()
    page.locator("#panel-head .effects").wait_for()
    assert server.requests[-1][1] == {"heads": ["memory"]}
    assert "Without memory" in page.locator("#panel-head").inner_text()
    assert problems == []


def test_a_dark_page_prints_light_pictures(browser):
    explanation = make_explanation(layers=1, heads=1)
    shown = []
    for dark in (False, True):
        context = open_context(browser, dark=dark)
        page, _, problems = open_page(context, explanation, "h=x0.0")
        wait_for_head_maps(page)
        for event in ("beforeprint", "afterprint"):
            page.evaluate("(event) => { dispatchEvent(new Event(event)); }", event)
            page.wait_for_timeout(100 if event == "beforeprint" else 500)
            canvas = page.evaluate("document.querySelector('.matrix-canvas').toDataURL()")
            shown.append((read_head_maps(page)["x0.0"].tolist(), canvas))
        assert problems == []
        context.close()
    light, light_after, printed, dark_after = shown
    assert light == light_after == printed
    assert all(one != other for one, other in zip(printed, dark_after))


@pytest.mark.parametrize("forced", [False, True])
def test_colours_follow_theme_and_forced_colours(browser, forced):
    explanation = make_explanation(layers=1, heads=1)
    images = []
    for dark in (False, True):
        context = open_context(browser, dark=dark, forced_colors="active" if forced else "none")
        page, _, problems = open_page(context, explanation, "h=x0.0")
        canvas = page.locator("#panel-head .matrix-canvas")
        canvas.scroll_into_view_if_needed()
        images.append(
            page.evaluate(
                "document.querySelector('#panel-head .matrix-canvas').toDataURL('image/png')"
            )
        )
        assert problems == []
        context.close()
    assert len(set(images)) == 2
    assert all(len(base64.b64decode(image.partition(",")[2])) > 500 for image in images)

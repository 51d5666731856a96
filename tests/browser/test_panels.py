"""The panels of heads, one head, one token and word order: numbers, colours, tables and keys."""

from __future__ import annotations

import base64
import subprocess
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from page_kit import open_context, open_page, wait_for_head_maps, wait_until
from synthetic import encode, make_explanation

from dragoman.explore.html_export import export_html

CELLS = """(selector) => [...document.querySelectorAll(`${selector} tbody tr`)].map((row) =>
  [...row.children].map((cell) => cell.textContent))"""
TABLE = """async () => {
  const { cellImage } = await import('./static/js/draw.js');
  return [...cellImage(Float32Array.from({ length: 256 }, (_, i) => (i / 255) ** 2), 0, 1, 256).data];
}"""
PICTURES = """() => [...document.querySelectorAll('main canvas')].map((each) => each.toDataURL())
  .concat(getComputedStyle(document.querySelector('.head-cell i')).backgroundImage)"""
CENTRES = """([rows, columns]) => {
  const [left, top, cell] = document.querySelector('.matrix').dataset.cells.split(' ').map(Number);
  const context = document.querySelector('.matrix-canvas').getContext('2d');
  const colours = [];
  for (let r = 0; r < rows; r++) {
    for (let c = 0; c < columns; c++) {
      const at = [left + (c + 0.5) * cell, top + (r + 0.5) * cell].map((each) => Math.floor(each * devicePixelRatio));
      colours.push([...context.getImageData(...at, 1, 1).data]);
    }
  }
  return colours;
}"""


def open_tables(place: Any) -> None:
    """Press every button that shows a table."""
    buttons = place.get_by_role("button", name="Show as table")
    while buttons.count():
        buttons.first.click()


def average_ranks(values: np.ndarray) -> np.ndarray:
    """Return ranks of values; equal values share the mean of theirs."""
    return np.array([(values < each).sum() + ((values == each).sum() - 1) / 2 for each in values])


def decode(explanation: dict[str, Any], name: str) -> np.ndarray:
    """Return a tensor of the wire format as floats."""
    entry = explanation["tensors"][name]
    types = {"u8": "<u1", "i8": "<i1", "u16": "<u2", "u32": "<u4", "i32": "<i4", "f32": "<f4"}
    raw = np.frombuffer(base64.b64decode(entry["data"]), types[entry["dtype"]])
    values = raw.astype(np.float64)
    if entry["code"] == "sqrt":
        values = entry["scale"] * (values / 255) ** 2
    elif entry["dtype"] == "i8":
        values = entry["scale"] * values / 127
    return values.reshape(entry["shape"])


def number(text: str) -> float:
    """Return a number as the page writes it."""
    return float(text.replace("−", "-").replace("+", "").replace(",", ""))


@pytest.fixture
def show(browser: Any) -> Any:
    """Open the page with an explanation: `show(explanation, fragment, width=…)` returns it."""
    contexts = []

    def open_it(
        explanation: dict[str, Any],
        fragment: str = "",
        answers: dict[str, Callable[[dict[str, Any]], Any]] | None = None,
        *,
        from_sources: bool = False,
        **options: Any,
    ) -> tuple[Any, Any, list[str]]:
        context = open_context(browser, **options)
        contexts.append(context)
        return open_page(context, explanation, fragment, answers, from_sources=from_sources)

    yield open_it
    for context in contexts:
        context.close()


@pytest.fixture(scope="module")
def explanation() -> dict[str, Any]:
    return make_explanation(source_length=9, target_length=8, layers=2, heads=4, seed=3)


@pytest.mark.parametrize("head", ["x1.2", "d0.1", "e1.3"])
@pytest.mark.parametrize("measure", ["w", "c"])
def test_table_of_a_head_equals_its_matrix(show, explanation, head, measure):
    site, number_of_head = head.split(".")
    mode = "&m=contribution" if measure == "c" else ""
    page, _, problems = show(explanation, f"h={head}{mode}")
    page.locator("#panel-head").get_by_role("button", name="Show as table").click()
    rows = page.evaluate(CELLS, "#panel-head .matrix-table")
    found = np.array([[number(cell) for cell in row[1:]] for row in rows])
    expected = decode(explanation, f"{site}.{measure}")[int(number_of_head)]
    assert found.shape == expected.shape
    assert np.abs(found - expected).max() <= 0.005
    axes = {"x": ("target", "source"), "d": ("target", "target_in"), "e": ("source", "source")}
    queries = explanation[axes[site[0]][0]]["tokens"]
    assert [row[0] for row in rows] == [token["text"].strip() for token in queries]
    names = page.locator("#panel-head .matrix-table thead th").all_text_contents()[1:]
    keys = [token["text"].strip() for token in explanation["target"]["tokens"]]
    if site[0] == "d":
        assert names == ["<s>", *keys[:-1]]
    else:
        assert names == [token["text"].strip() for token in explanation["source"]["tokens"]]
    assert problems == []


def test_axis_titles_name_what_is_on_them(show, explanation):
    page, _, _ = show(explanation, "h=x0.0")
    axes = page.locator("#panel-head .axes")
    assert "rows: target tokens" in axes.inner_text()
    assert "columns: source tokens" in axes.inner_text()
    page.evaluate("location.hash = 'h=d0.0'")
    assert "columns: decoder input" in axes.inner_text()
    page.evaluate("location.hash = 'h=e0.0'")
    assert "rows: source tokens" in axes.inner_text()
    assert "columns: source tokens" in axes.inner_text()


@pytest.mark.parametrize("dark", [False, True])
def test_thumbnails_have_the_colour_of_their_weights(show, explanation, dark):
    page, _, problems = show(explanation, "v=heads", dark=dark)
    maps = wait_for_head_maps(page)
    assert len(maps) == sum(site["heads"] for site in explanation["sites"])
    table: dict[int, tuple[int, ...]] = {}
    for name, colours in maps.items():
        site, head = name.split(".")
        weights = decode(explanation, f"{site}.w")[int(head)]
        rows, columns = (np.arange(50) * count // 50 for count in weights.shape)
        codes = np.floor(255 * np.sqrt(weights) + 0.5).astype(int)[rows][:, columns]
        for code, colour in zip(codes.ravel(), colours.reshape(-1, 3)):
            assert table.setdefault(int(code), tuple(colour)) == tuple(colour)
    # One hue by luminance: a larger weight is never less different from no weight.
    light = np.array([0.2126, 0.7152, 0.0722])
    luminance = np.array([np.dot(table[code][:3], light) for code in sorted(table)])
    assert (np.diff(luminance) * (1 if dark else -1) >= -1e-9).all()
    assert abs(luminance[-1] - luminance[0]) > 120
    assert problems == []


@pytest.mark.parametrize("head", ["x1.0", "d0.2", "e0.1"])
def test_matrix_is_drawn_cell_by_cell(show, explanation, head):
    page, _, _ = show(explanation, f"h={head}&t=2&s=1", from_sources=True)
    site, number_of_head = head.split(".")
    weights = decode(explanation, f"{site}.w")[int(number_of_head)]
    table = np.array(page.evaluate(TABLE)).reshape(256, 4)
    rows, columns = weights.shape
    colours = page.evaluate(CENTRES, [rows, columns])
    codes = np.floor(255 * np.sqrt(weights) + 0.5).astype(int)
    assert np.array_equal(np.array(colours).reshape(rows, columns, 4), table[codes])


def test_the_built_page_shows_what_its_sources_show(show, explanation):
    shown = []
    for from_sources in (False, True):
        page, _, problems = show(explanation, "h=x1.0&t=2&s=1", from_sources=from_sources)
        open_tables(page)
        wait_for_head_maps(page)
        shown.append((page.locator("body").inner_text(), page.evaluate(PICTURES)))
        assert problems == []
    assert shown[0] == shown[1]
    text, pictures = shown[0]
    assert len(text) > 3000
    assert len(pictures) >= 4


def test_keys_move_the_cursor_and_the_selection(show, explanation):
    page, _, _ = show(explanation, "h=x1.0&t=2&s=1")
    matrix = page.locator("#panel-head .matrix")
    matrix.focus()
    for key in ("ArrowDown", "ArrowRight", "ArrowRight", "ArrowUp", "ArrowDown"):
        page.keyboard.press(key)
    page.wait_for_url(lambda url: "t=3" in url)
    page.wait_for_url(lambda url: "s=3" in url)
    cell = page.locator("#panel-head [role=gridcell]")
    weights = decode(explanation, "x1.w")[0]
    query = explanation["target"]["tokens"][3]["text"].strip()
    key = explanation["source"]["tokens"][3]["text"].strip()
    assert cell.text_content() == f"{query} reads {key}: {weights[3, 3]:.3f}"
    assert matrix.get_attribute("aria-rowcount") == str(weights.shape[0])
    row = page.locator("#panel-head [role=row]")
    assert row.get_attribute("aria-rowindex") == "4"
    assert cell.get_attribute("aria-colindex") == "4"
    page.keyboard.press("d")
    assert page.locator("#panel-head .matrix-table").is_visible()
    page.keyboard.press(" ")
    page.wait_for_url(lambda url: "off=x1.0" in url)


def test_strongest_links_and_row_are_those_of_the_matrix(show, explanation):
    page, _, _ = show(explanation, "h=x0.1&t=4")
    weights = decode(explanation, "x0.w")[1]
    links = page.evaluate(CELLS, "#panel-head .links")
    best = np.sort(weights.ravel())[::-1][: len(links)]
    assert [number(row[1]) for row in links] == pytest.approx(best, abs=0.0006)
    bars = page.locator("#panel-head .bars li:not(.rest)")
    values = [number(text.split("\n")[-1]) for text in bars.all_inner_texts()]
    assert values == pytest.approx(np.sort(weights[4])[::-1][: len(values)], abs=0.0006)
    page.locator("#panel-head .links button").first.click()
    at = np.unravel_index(weights.argmax(), weights.shape)
    page.wait_for_url(lambda url: f"t={at[0]}" in url)
    page.wait_for_url(lambda url: f"s={at[1]}" in url)


def test_heads_are_sorted_and_filtered(show, explanation):
    page, _, _ = show(explanation, "v=heads")
    panel = page.locator("#panel-heads")
    names = "[...document.querySelectorAll('.heads-group')].map((group) => [...group.querySelectorAll('.head-cell')].map((cell) => cell.dataset.head))"
    summaries = {f"{head['site']}.{head['head']}": head for head in explanation["heads"]}
    assert [len(group) for group in page.evaluate(names)] == [8, 8, 8]
    panel.get_by_role("button", name="Entropy").click()
    for group in page.evaluate(names):
        values = [summaries[name]["entropy"] for name in group]
        assert values == sorted(values)
    panel.get_by_role("button", name="Effect", exact=True).click()
    for group in page.evaluate(names):
        values = [summaries[name]["effect"]["estimate"] for name in group]
        assert values == sorted(values)
    panel.get_by_role("combobox").select_option("sink")
    shown = [name for group in page.evaluate(names) for name in group]
    assert sorted(shown) == sorted(
        name for name, head in summaries.items() if head["labels"][0][0] == "sink"
    )
    page.wait_for_url(lambda url: "label=sink" in url)


def test_grid_is_one_tab_stop_with_arrows(show, explanation):
    page, _, _ = show(explanation, "v=heads")
    assert page.locator(".head-cell[tabindex='0']").count() == 1
    page.locator(".head-cell[data-head='e0.0']").focus()
    page.keyboard.press("ArrowRight")
    assert page.evaluate("document.activeElement.dataset.head") == "e0.1"
    page.keyboard.press("ArrowDown")
    assert page.evaluate("document.activeElement.dataset.head") == "e1.1"
    assert page.locator(".head-cell[tabindex='0']").count() == 1
    page.keyboard.press("Enter")
    page.wait_for_url(lambda url: "h=e1.1" in url)
    page.keyboard.press(" ")
    cell = page.locator(".head-cell[data-head='e1.1']")
    assert "off" in (cell.get_attribute("aria-label") or "").split(", ")
    assert "is-off" in (cell.get_attribute("class") or "")
    label, score = next(
        head["labels"][0]
        for head in explanation["heads"]
        if (head["site"], head["head"]) == ("e1", 1)
    )
    assert f"{label.replace('-', '−')} {score:.2f}" in (cell.get_attribute("aria-label") or "")


def test_exact_effect_is_asked_of_the_model(show, explanation):
    tokens = explanation["target"]["tokens"]
    effect = [-0.25 * t for t in range(len(tokens))]
    changed = [dict(token) for token in tokens]
    changed[1] = {**changed[1], "id": 7999}

    def switch_off(body: dict[str, Any]) -> dict[str, Any]:
        return {
            "off": body["heads"],
            "effect": effect,
            "sum_change": sum(effect),
            "text": explanation["target"]["text"],
            "target": {**explanation["target"], "tokens": changed},
            "score": {"sum": -9.5, "normalised": -1.0, "penalty": "average"},
        }

    page, server, problems = show(explanation, "h=x1.0&t=2", {"off": switch_off})
    panel = page.locator("#panel-head")
    estimate = next(
        head["effect"]["estimate"]
        for head in explanation["heads"]
        if (head["site"], head["head"]) == ("x1", 0)
    )
    assert f"about {estimate:+.2f}".replace("-", "−") in panel.inner_text()
    panel.get_by_role("button", name="Switch x1.0 off").click()
    panel.locator(".effects").wait_for()
    assert ("e/" + explanation["digest"] + "/off", {"heads": ["x1.0"]}) in server.requests
    rows = page.evaluate(CELLS, "#panel-head .effects")
    assert [number(row[1]) for row in rows] == pytest.approx(effect, abs=0.005)
    assert f"changes by {sum(effect):.2f}".replace("-", "−") in panel.inner_text()
    assert f"1 of {len(tokens)} tokens" in panel.inner_text()
    assert panel.locator("ins").count() == 1
    assert "x1.0" in page.locator("#off-banner").inner_text()
    panel.get_by_role("button", name="Switch x1.0 on").click()
    assert page.locator("#off-banner").is_hidden()
    assert problems == []


def test_file_knows_only_what_was_precomputed(browser, explanation, tmp_path):
    effect = [-0.5] * len(explanation["target"]["tokens"])
    stored = {
        "off": ["x1.0"],
        "effect": effect,
        "sum_change": sum(effect),
        "text": explanation["target"]["text"],
        "target": explanation["target"],
        "score": {"sum": -9.5, "normalised": -1.0, "penalty": "average"},
    }
    path = tmp_path / "page.html"
    export_html({**explanation, "ablations": {"x1.0": stored}}, path)
    context = open_context(browser)
    context.set_offline(True)
    page = context.new_page()
    page.goto(f"{path.as_uri()}#h=x1.0&off=x1.0")
    page.locator('html[data-ready="true"]').wait_for(state="attached")
    panel = page.locator("#panel-head")
    assert panel.locator(".effects tbody tr").count() == len(effect)
    page.evaluate("location.hash = 'h=x1.1&off=x1.1'")
    panel.locator(".command").wait_for()
    assert "dragoman explain" in panel.locator(".command").inner_text()
    assert "--ablations x1.1" in panel.locator(".command").inner_text()
    assert panel.locator(".effects").count() == 0
    context.close()


def test_token_panel_shows_lens_and_attribution(show, explanation):
    page, _, problems = show(explanation, "h=x1.0&t=3&s=2")
    ranks = decode(explanation, "lens.rank")[:, 3]
    rows = page.evaluate(CELLS, ".lens-table")
    assert [number(row[1]) for row in rows] == ranks.tolist()
    last = explanation["lens"]["top"][-1][3]
    assert all(text.strip() in rows[-1][2] for text, _ in last)
    sources = page.evaluate(CELLS, ".sources-table")
    attribution = decode(explanation, "ixg.s")[3]
    crosses = np.concatenate([decode(explanation, f"x{layer}.w")[:, 3] for layer in range(2)])
    assert [number(row[1]) for row in sources] == pytest.approx(attribution, abs=0.0006)
    assert [number(row[2]) for row in sources] == pytest.approx(crosses.mean(0), abs=0.0006)
    assert [number(row[3]) for row in sources] == pytest.approx(
        decode(explanation, "x1.w")[0, 3], abs=0.0006
    )
    correlation = np.corrcoef(
        average_ranks(np.abs(attribution)), average_ranks(crosses.mean(0).astype(np.float32))
    )[0, 1]
    assert f"{correlation:.2f}".replace("-", "−") in page.locator(".agreement").inner_text()
    assert problems == []


def test_another_attribution_is_asked_of_the_model(show, explanation):
    shape = explanation["tensors"]["ixg.s"]["shape"]
    values = np.linspace(-1, 1, shape[0] * shape[1]).reshape(shape).astype("<f4")

    def attribute(body: dict[str, Any]) -> dict[str, Any]:
        entry = {
            "dtype": "f32",
            "code": "linear",
            "scale": 1.0,
            "shape": shape,
            "pool": None,
            "data": base64.b64encode(values.tobytes()).decode(),
        }
        return {
            "attribution": {
                "method": body["method"],
                "source": "occ.s",
                "target": None,
                "signed": True,
                "gap": None,
            },
            "tensors": {"occ.s": entry},
        }

    page, _, problems = show(explanation, "t=2", {"attribute": attribute})
    page.locator("#panel-token").get_by_role("button", name="Occlusion").click()
    page.locator(".sources-table thead", has_text="Occlusion").wait_for()
    sources = page.evaluate(CELLS, ".sources-table")
    assert [number(row[1]) for row in sources] == pytest.approx(values[2], abs=0.0006)
    assert problems == []


def test_a_long_text_is_attributed_token_by_token(show):
    """The selected token alone is asked for, once; other tokens show attention until then."""
    explanation = make_explanation(missing={"attribution": "A long text."})
    explanation["model"]["attributions"] = ["input_x_gradient", "occlusion"]
    shape = [len(explanation[side]["tokens"]) for side in ("target", "source")]
    whole = np.abs(np.random.default_rng(8).normal(0, 1, shape)).astype(np.float32)

    def attribute(body: dict[str, Any]) -> dict[str, Any]:
        row = np.zeros_like(whole)
        row[body["step"]] = whole[body["step"]]
        fields = {"method": body["method"], "source": "ixg.s", "target": None, "signed": True}
        return {"attribution": {**fields, "gap": None}, "tensors": {"ixg.s": encode(row, "f32")}}

    page, server, problems = show(explanation, "t=2", {"attribute": attribute})
    for step in (2, 5, 2, 3):
        page.locator(f"#target-{step}").click()
        page.locator(".sources-table thead", has_text="Input × gradient").wait_for()
        wait_until(page, "() => !document.body.dataset.busy")
        sources = page.evaluate(CELLS, ".sources-table")
        assert [number(row[1]) for row in sources] == pytest.approx(whole[step], abs=0.0006)
        strongest = explanation["source"]["tokens"][int(whole[step, :-1].argmax())]["text"].strip()
        assert strongest in page.inner_text("#panel-strip .reading")
        assert "of the attribution" in page.inner_text("#panel-strip .reading")
    asked = [body for path, body in server.requests if path.endswith("attribute")]
    assert [body["step"] for body in asked] == [2, 5, 3]
    assert {body["method"] for body in asked} == {"input_x_gradient"}
    assert problems == []


def test_positions_have_their_numbers(show, explanation):
    page, _, problems = show(explanation, "v=positions")
    panel = page.locator("#panel-positions")
    assert "Sines and cosines" in panel.inner_text()
    open_tables(panel)
    similarity = decode(explanation, "pos.sim")
    rows = page.evaluate(CELLS, "#panel-positions .matrix-table")
    found = np.array([[number(cell) for cell in row[1:]] for row in rows])
    assert np.abs(found - similarity).max() <= 0.005
    distances = page.evaluate(CELLS, "#panel-positions table:not(.matrix-table)")
    expected = [head["distance"] for head in explanation["heads"]]
    assert [number(row[2]) for row in distances] == pytest.approx(expected, abs=0.006)
    assert problems == []


def test_how_order_enters_is_said_once_in_the_language_of_the_page(show):
    explanation = make_explanation()
    note = explanation["positions"]["note"]
    page, _, _ = show(explanation)
    assert page.inner_text("#panel-positions").count(note) == 1
    page, _, _ = show(explanation, "lang=zh")
    assert note not in page.inner_text("#panel-positions")
    assert "\u6b63\u5f26" in page.inner_text("#panel-positions .lead")


def test_without_an_attribution_attention_names_the_source_word(show):
    """Hard choices of positions have no gradient: their attribution is zero everywhere."""
    explanation = make_explanation()
    for name in ("ixg.s", explanation["attribution"][0]["source"]):
        shape = explanation["tensors"][name]["shape"]
        explanation["tensors"][name] = encode(np.zeros(shape, dtype=np.float32), "u8")
    page, _, problems = show(explanation, "t=2")
    words = page.inner_text("#panel-strip .reading")
    assert "of the mean cross-attention" in words
    assert "weight 0.00" not in words
    assert problems == []


def test_rows_of_a_pair_are_not_read_as_its_label(show):
    """The rows of co-attention are words of the second sentence, none of them the label."""
    explanation = make_explanation(task="pairs", missing={"beam": "no"})
    explanation["missing"] = {"beam": "no", "token": "No lens."}
    explanation["steps"] = [
        {**explanation["steps"][0], "id": 0, "top": [[0, "contradiction", -0.25]]}
    ]
    page, _, problems = show(explanation)
    words = page.inner_text("#panel-strip .reading")
    assert "counted most for" in words
    assert "attends to it most" not in words
    assert "disagrees" not in words
    panel = page.locator("#panel-token")  # there is an attribution, if no lens
    assert "No lens." in panel.inner_text()
    assert panel.locator(".sources-table").is_visible()
    assert problems == []


def test_a_tag_has_no_alternative_to_take(show):
    page, server, problems = show(make_explanation(task="tag", missing={"beam": "no"}), "t=2")
    choices = page.locator("#panel-strip .choices")
    assert not {"Take one", "true"} & set(choices.inner_text().split("\n"))
    assert choices.locator("p").count() == 0
    choices.locator("[role=option]").nth(1).click()
    page.wait_for_timeout(100)
    assert not [path for path, _ in server.requests if path.endswith("/branch")]
    assert problems == []


def test_attention_pooling_is_not_called_self_attention(show):
    explanation = make_explanation(task="classify", layers=1, heads=1)
    for site in explanation["sites"]:
        if site["group"] == "encoder":
            site["kind"] = "pool"
    page, _, _ = show(explanation, "h=e0.0")
    text = page.inner_text("#panel-heads")
    assert "Attention pooling, layer 0" in text
    assert "Encoder self-attention" not in text
    assert "input tokens" in page.inner_text("#panel-head .axes")


def test_missing_parts_are_reported(show):
    missing = {
        "heads": "This model has no attention heads.",
        "head": "This model has no attention heads.",
        "token": "This model has no layers to read.",
        "positions": "This model has no positions.",
        "attribution": "Nothing was attributed.",
    }
    explanation = make_explanation(missing=missing)
    explanation["missing"] = {key: each for key, each in missing.items() if key != "attribution"}
    page, _, problems = show(explanation)
    for panel in ("heads", "head", "token", "positions"):
        assert missing[panel] in page.locator(f"#panel-{panel}").inner_text()
    assert problems == []


def test_canvases_are_hidden_from_assistive_technology(show, explanation):
    page, _, _ = show(explanation)
    shown = page.evaluate(
        "[...document.querySelectorAll('canvas')].filter((each) => !each.closest('[aria-hidden=true]')).length"
    )
    assert shown == 0
    assert page.locator("canvas").count() >= 3


@pytest.mark.parametrize("width", [320, 1280])
def test_nothing_scrolls_the_page_sideways(show, width):
    explanation = make_explanation(source_length=60, target_length=60, layers=2, heads=8)
    page, _, _ = show(explanation, "h=x1.0&t=4", width=width)
    open_tables(page)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    small = page.evaluate("""() => [...document.querySelectorAll('button, select, input:not(label input)')]
      .filter((each) => each.offsetParent !== null)
      .map((each) => [each.textContent, each.getBoundingClientRect()])
      .filter(([, box]) => box.width < 24 || box.height < 24).map(([text]) => text)""")
    assert small == []
    if width == 320:
        matrix = page.locator("#panel-head .matrix")
        assert matrix.get_attribute("tabindex") == "0"
        assert matrix.evaluate("(node) => node.scrollWidth > node.clientWidth")


def test_page_is_shown_in_chinese(show, explanation):
    page, _, _ = show(explanation, "lang=zh&h=x1.0&t=2")
    text = page.locator("#main").inner_text()
    for word in ("交叉注意力", "最强的连接", "每层之后该词元的名次", "每个头的平均注意距离"):
        assert word in text


@pytest.mark.parametrize(
    ("verdict", "own", "words"),
    [
        ("model_error", -1.0, "Model error"),
        ("search_error", -9.0, "Search error: the model scores your reference"),
        ("search_error", -1.0, "was cut at its maximum length"),
        ("equal", -2.0, "The model scores your reference as its own"),
        ("same", -2.0, "is your reference"),
    ],
)
def test_a_reference_is_judged_as_the_library_judged_it(show, verdict, own, words):
    explanation = make_explanation(target_length=5)
    explanation["request"]["reference"] = "another text"
    explanation["score"]["reference"] = {"sum": -8.0, "normalised": -2.0, "verdict": verdict}
    explanation["score"]["own"] = {"sum": 4 * own, "normalised": own}
    page, _, problems = show(explanation)
    assert words in page.locator("#panel-strip .reference").inner_text()
    assert problems == []


def test_a_note_on_attribution_takes_no_method_away(show):
    explanation = make_explanation()
    explanation["missing"] = {"attribution": "Gradients show what was chosen, not why."}
    explanation["model"]["attributions"] = ["input_x_gradient", "occlusion"]
    page, _, _ = show(explanation)
    panel = page.locator("#panel-token")
    names = (
        panel.get_by_role("group", name="Attribution method")
        .get_by_role("button")
        .all_inner_texts()
    )
    assert len(names) == 2
    assert "Occlusion" in names
    assert "Gradients show what was chosen" in panel.inner_text()


def test_heads_out_of_sight_are_drawn_too(show):
    page, _, problems = show(make_explanation(layers=4, heads=8), width=400)
    maps = wait_for_head_maps(page)
    assert len(maps) == 96
    assert all(len(np.unique(each.reshape(-1, 3), axis=0)) > 5 for each in maps.values())
    assert problems == []


def test_a_file_shows_commands_that_run(browser, tmp_path):
    explanation = make_explanation()
    explanation["model"]["path"] = "my models/de'en"
    explanation["request"] |= {"text": "a\tb 'c'", "off": ["x0.1"]}
    export_html(explanation, tmp_path / "page.html", title="Page")
    context = open_context(browser)
    page = context.new_page()
    page.goto((tmp_path / "page.html").as_uri())
    page.wait_for_selector("html[data-ready=true]", state="attached")
    command = page.inner_text("#panel-ask .command")
    shell = ["bash", "-c", rf"printf '%s\0' {command}"]
    words = subprocess.run(shell, capture_output=True, text=True, check=True).stdout.split("\0")
    assert words[:5] == ["dragoman", "explain", "-m", "my models/de'en", "a\tb 'c'"]
    assert words[words.index("--off") + 1] == "x0.1"
    assert page.inner_text("#model-line").startswith("de'en")
    assert "--branches 2" in page.inner_text("#panel-strip .choices")
    context.close()


def test_a_file_of_the_built_in_model_names_it_without_a_path(browser, tmp_path):
    explanation = make_explanation()
    explanation["model"]["path"] = ""
    export_html(explanation, tmp_path / "page.html", title="Page")
    page = open_context(browser).new_page()
    page.goto((tmp_path / "page.html").as_uri())
    page.wait_for_selector("html[data-ready=true]", state="attached")
    assert page.inner_text("#panel-ask .command").startswith("dragoman explain '")
    assert page.inner_text("#model-line").startswith("built-in model · ")


def test_attention_that_disagrees_with_attribution_is_named(show):
    explanation = make_explanation(source_length=9, target_length=8, seed=3)
    page, _, problems = show(explanation, "t=2")
    words = explanation["source"]["words"]
    sites = [site for site in explanation["sites"] if site["group"] == "cross"]
    rows = np.concatenate([decode(explanation, site["tensor"]) for site in sites])[:, 2]
    sums = [rows.mean(0)[start:end].sum() for start, end in words]
    start, end = words[int(np.argmax(sums))]
    attribution = np.abs(decode(explanation, explanation["attribution"][0]["source"])[2])
    attribution[[token["special"] for token in explanation["source"]["tokens"]]] = 0
    strongest = int(attribution.argmax())
    note = page.locator("#panel-strip .reading").get_by_text("Attention disagrees")
    assert note.count() == (0 if start <= strongest < end else 1)
    if note.count():
        assert f"{100 * max(sums):.0f}\u00a0%" in note.inner_text()
    assert problems == []


def test_candidates_that_were_left_out_are_counted(show):
    explanation = make_explanation()
    explanation["beam"]["dropped"] = 7
    page, _, problems = show(explanation, "v=beam")
    assert "7 of the worst are not shown" in page.inner_text("#panel-beam .beam-bar")
    assert problems == []


def test_a_pair_has_its_second_text_and_its_classes(show):
    explanation = make_explanation(task="pairs", missing={"beam": "no", "token": "no"})
    top = [[0, "contradiction", -0.25], [2, "neutral", -2.12], [1, "entailment", -2.29]]
    explanation["steps"] = [{**explanation["steps"][0], "id": 0, "top": top}]
    page, _, problems = show(explanation)
    target = page.locator("#panel-strip .side.target")
    assert target.locator(".run").inner_text() == explanation["target"]["text"]
    rows = target.locator(".classes li").all_inner_texts()
    assert [row.split("\n") for row in rows] == [
        ["contradiction", "0.78"],
        ["neutral", "0.12"],
        ["entailment", "0.10"],
    ]
    assert problems == []


def test_the_map_of_another_explanation_has_its_own_layout(show):
    """A sentence that is explained while a selection is drawn: the map follows the sentence."""
    longer = make_explanation(source_length=24, target_length=20, seed=5)
    page, _, problems = show(
        make_explanation(source_length=5, target_length=4),
        "h=x0.0&t=1&s=2",
        {"explain": lambda _: longer},
    )
    page.fill("#ask-text", "Another sentence.")
    with page.expect_response("**/api/explain"):
        page.locator("#panel-ask").get_by_role("button", name="Translate").click()
    wait_until(
        page, "() => document.querySelector('.matrix').getAttribute('aria-rowcount') === '20'"
    )
    drawn = "document.querySelector('#panel-head .matrix-canvas').toDataURL()"
    before = page.evaluate(drawn)
    page.evaluate(
        "document.querySelector('.matrix').dispatchEvent(new Event('scroll'))"
    )  # draws it again
    assert page.evaluate(drawn) == before
    assert problems == []


def test_the_map_scrolls_to_the_selected_token(show):
    page, _, problems = show(
        make_explanation(source_length=40, target_length=120), "h=x0.0&t=1&s=2"
    )
    matrix = page.locator("#panel-head .matrix")
    top = "(each) => each.scrollTop"
    assert matrix.evaluate(top) == 0
    page.click("#target-110")
    wait_until(page, "() => document.querySelector('.matrix').scrollTop > 100")
    matrix.evaluate("(each) => { each.scrollTop = 0; }")
    page.wait_for_timeout(100)
    assert matrix.evaluate(top) == 0  # a person may scroll away
    assert problems == []


def test_a_word_of_bytes_is_named_by_its_letters(show):
    explanation = make_explanation(source="Das \u7684 Haus.", target="The house.")
    tokens = explanation["source"]["tokens"]
    at = next(i for i, token in enumerate(tokens) if "\u7684" in token["text"])
    tokens[at]["text"] = "<0xE7>"
    weights = np.zeros(explanation["tensors"]["ixg.s"]["shape"], dtype=np.float32)
    weights[:, at] = 1
    explanation["tensors"]["ixg.s"] = encode(weights, "u8")
    page, _, problems = show(explanation, "t=1")
    assert "mostly from \u7684" in page.inner_text("#panel-strip .reading")
    assert problems == []


def test_a_long_hypothesis_is_shortened_where_it_is_named(show):
    explanation = make_explanation(source_length=6, target_length=6)
    for entry in explanation["nbest"]:
        entry["text"] = "word " * 80
    page, _, problems = show(explanation, "v=beam")
    assert len(page.inner_text("#panel-beam > .panel-body > .answer")) < 300
    assert problems == []


def test_an_address_that_the_server_has_forgotten_still_opens_the_page(show):
    page, _, _ = show(None, f"t=1&e={'ab' * 32}")
    assert page.is_visible("#page-error")
    assert page.is_visible("#ask-text")


def test_the_target_language_is_chosen_where_there_are_several(show, explanation):
    explanation = {**explanation, "model": {**explanation["model"], "targets": ["de", "fr"]}}
    answers = {"explain": lambda _: explanation}
    page, server, problems = show(explanation, "", answers)
    chosen = page.get_by_label("Translate into")
    assert chosen.locator("option").all_inner_texts() == ["automatic", "German", "French"]
    for language in ("", "fr"):
        chosen.select_option(language)
        page.get_by_role("button", name="Translate").click()
        wait_until(page, "() => !document.body.dataset.busy")
    page.locator("#tool-lang").click()  # the choice survives another language of the page
    assert page.locator("#ask-to").input_value() == "fr"
    bodies = [body for path, body in server.requests if path == "explain"]
    assert [body.get("target_language") for body in bodies] == [None, "fr"]
    assert problems == []


def test_alternatives_take_one_line_each(show, explanation):
    steps = [dict(each) for each in explanation["steps"]]
    top = [list(each) for each in steps[2]["top"]]
    top[-1][2] = -9.0
    steps[2]["top"] = top
    page, _, _ = show({**explanation, "steps": steps}, "t=2")
    assert "<0.001" in page.inner_text("[role=listbox]")
    heights = page.evaluate(
        "[...document.querySelectorAll('[role=option]')].map((each) => each.offsetHeight)"
    )
    assert len(set(heights)) == 1


def test_a_server_that_is_gone_is_named(show, explanation):
    page, _, _ = show(explanation)
    page.route("**/api/**", lambda route: route.abort())
    page.get_by_role("button", name="Translate").click()
    page.get_by_text("The server does not answer").wait_for()
    assert page.locator("#target-1").is_visible()


def test_the_page_says_that_it_is_working_and_takes_no_second_request(show):
    explanation = make_explanation()
    page, server, problems = show(explanation, "", {"explain": lambda _: make_explanation(seed=4)})
    waiting: list[Any] = []
    page.route("**/api/explain", lambda route: waiting.append(route))
    page.fill("#ask-text", "Another sentence.")
    button = page.locator("#panel-ask").get_by_role("button", name="Translate")
    button.click()
    working = "() => getComputedStyle(document.body, '::after').content"
    wait_until(page, f"() => ({working})().includes('Working')")
    button.click()
    page.wait_for_timeout(100)
    assert len(waiting) == 1
    server.handle(waiting[0])
    wait_until(page, f"() => ({working})() === 'none'")
    assert problems == []


def test_small_attributions_keep_their_digits(show):
    """Of a token that is nearly certain, every attribution is small."""
    explanation = make_explanation()
    name = explanation["attribution"][0]["source"]
    values = 1e-5 * np.random.default_rng(1).random(explanation["tensors"][name]["shape"])
    explanation["tensors"][name] = encode(values.astype(np.float32), "i8")
    page, _, _ = show(explanation, "t=2")
    shown = [number(row[1]) for row in page.evaluate(CELLS, ".sources-table")]
    assert shown == pytest.approx(decode(explanation, name)[2], abs=1e-7)
    assert max(shown) > 0

"""A session of the explorer: examples of every task, what is kept, and whose explanation it is."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
from explorer_kit import StubPredictor, make_explanation

from dragoman.explain.explanation import Explanation
from dragoman.explore.explorer_session import (
    ExplanationCache,
    ExplorerSession,
    StoredExplanation,
    read_examples,
    write_input,
)
from dragoman.explore.request_parsing import ExplainRequest, RequestError


@pytest.fixture
def session():
    made = ExplorerSession(StubPredictor(), path=Path("models/stub"))
    yield made
    made.close()


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("Guten Morgen.", "Guten Morgen."),
        (["A man sleeps.", "A man rests."], "A man sleeps.\tA man rests."),
        ([[1.5, 2.0], [3.0, 4.0]], "[[1.5, 2.0], [3.0, 4.0]]"),
        ([1.5, 7], "[1.5, 7]"),
        ({"tokens": ["Anna", "sleeps", "."], "column": ["a", "b", "c"]}, "Anna sleeps ."),
        ({"tokens": None}, ""),
        (None, ""),
        (3, ""),
    ],
)
def test_an_input_of_any_task_is_written_as_one_types_it(value: object, text: str) -> None:
    assert write_input(value) == text


@pytest.mark.parametrize(
    ("content", "examples"),
    [
        ({"cases": [{"input": "a"}, {"input": ["b", "c"]}]}, ["a", "b\tc"]),
        ({"cases": [{"input": None}]}, []),
        ({"cases": [{"other": 1}]}, []),
        ({"cases": 3}, []),
        ([], []),
        ("", []),
    ],
)
def test_examples_come_from_the_bundle(content: object, examples: list, tmp_path: Path) -> None:
    (tmp_path / "golden.json").write_text(json.dumps(content))
    assert read_examples(tmp_path) == examples


def test_a_model_without_examples_has_none(tmp_path: Path) -> None:
    assert read_examples(tmp_path) == []
    (tmp_path / "golden.json").write_bytes(b"\xff{")
    assert read_examples(tmp_path) == []


def entry(text: str, size: int = 1) -> StoredExplanation:
    found = make_explanation(text)
    found = dataclasses.replace(found, arrays={"x0.w": np.zeros(size, np.float32)})
    return StoredExplanation(found, ExplainRequest(text=text), text, b"")


def test_the_least_recently_used_is_forgotten_first() -> None:
    cache = ExplanationCache(most=2)
    for text in ("a", "b"):
        cache.add(entry(text))
    cache.get("a")
    cache.add(entry("c"))
    assert cache.get("a").digest == "a"
    with pytest.raises(RequestError, match="not in memory any more") as found:
        cache.get("b")
    assert found.value.status == 404


def test_large_explanations_are_forgotten_sooner() -> None:
    cache = ExplanationCache(max_bytes=1000)
    for text in ("a", "b", "c"):
        cache.add(entry(text, size=100))  # 400 bytes
    assert len(cache) == 2
    cache.add(entry("huge", size=10_000))  # the newest stays, whatever its size
    assert len(cache) == 1
    assert cache.get("huge").digest == "huge"


def test_the_same_explanation_is_kept_once(session: ExplorerSession) -> None:
    first = session.explain(ExplainRequest(text="a b"))
    assert session.explain(ExplainRequest(text="a b")).digest == first.digest
    assert len(session.cache) == 1


def test_a_stored_explanation_of_this_model_can_be_changed(session: ExplorerSession) -> None:
    stored = Explanation.from_json(make_explanation("ein Mann").to_json())
    found = session.open(stored)
    assert found.digest == stored.digest
    assert session.ablate(found, {"heads": ["x0.1"]})["off"] == ["x0.1"]
    assert session.branch(found, {"step": 1, "token": 7}).request.prefix_ids == (13, 7)


def test_a_stored_explanation_of_another_model_is_only_shown(session: ExplorerSession) -> None:
    stored = make_explanation("ein Mann")
    stored = dataclasses.replace(stored, model={**stored.model, "digest": "another"})
    found = session.open(stored)
    for change in (
        lambda: session.ablate(found, {"heads": []}),
        lambda: session.branch(found, {"step": 0, "token": 7}),
        lambda: session.attribute(found, {"method": "occlusion"}),
        lambda: list(session.effects(found)),
    ):
        with pytest.raises(RequestError, match="of another model"):
            change()


def test_a_target_language_is_named_where_there_are_several(session: ExplorerSession) -> None:
    """The first into which the model translates the text's language, unless one is asked for."""
    session.predictor.directions = ["de-en", "en-de", "en-fr"]
    session.predictor.identify_languages = lambda texts: ["de" if "ein" in texts[0] else "en"]
    assert session.describe()["targets"] == ["en", "de", "fr"]
    for text, asked, expected in (("ein a", None, "en"), ("a", None, "de"), ("a", "fr", "fr")):
        found = session.explain(ExplainRequest(text=text, target_language=asked))
        assert session.predictor.calls[-1] == (text, {"target_language": expected})
        assert found.request.target_language == expected
    session.predictor.target_language = "fr"  # of `dragoman explore --to fr`
    session.explain(ExplainRequest(text="a b"))
    assert session.predictor.calls[-1] == ("a b", {})


def test_a_task_has_its_own_options(session: ExplorerSession) -> None:
    session.task = "classify"
    request = ExplainRequest(text="a", beam=4, length_penalty=1.0, off=("x0.0",))
    session.explain(request)
    assert session.predictor.calls == [("a", {"off": ["x0.0"]})]
    for name, value in (("prefix", "x"), ("prefix_ids", (3,)), ("reference", "y")):
        with pytest.raises(RequestError, match=f"the task classify have no {name}"):
            session.explain(dataclasses.replace(request, **{name: value}))


def test_a_text_of_many_tokens_is_rejected(session: ExplorerSession) -> None:
    session.predictor.encode = lambda inputs: [each.split() for each in inputs]
    session.predictor.length = len
    session.explain(ExplainRequest(text="a " * 512))
    with pytest.raises(RequestError, match="at most 512 tokens; found 513") as found:
        session.explain(ExplainRequest(text="a " * 513))
    assert found.value.status == 413


def test_inputs_are_read_as_on_the_command_line(session: ExplorerSession) -> None:
    session.predictor.read_arguments = lambda texts: [text.upper() for text in texts]
    session.explain(ExplainRequest(text="ein Mann"))
    assert session.predictor.calls[0][0] == "EIN MANN"

"""The explorer's HTTP interface for models of every task: responses equal the library's results."""

from __future__ import annotations

import functools
import json
from pathlib import Path

import numpy as np
import pytest
from starlette.testclient import TestClient
from task_models_kit import Subject, subject_of

from dragoman.explain.explanation import Explanation
from dragoman.explore.explorer_session import ExplorerSession, write_input
from dragoman.explore.routes import build_app

BASE = "http://127.0.0.1:8023"
API = "/explore/api"
# Recipes of each task but translation: with heads, with levels, with memory, with seeds.
RECIPES = (
    "yang2016",
    "lin2017",
    "vaswani2017_tagger",
    "chen2017",
    "dai2019_lm",
    "radford2018",
    "lee2019",
)


@functools.cache
def subject(recipe: str) -> Subject:
    return subject_of(recipe)


@pytest.fixture(scope="module", params=RECIPES)
def explained(request: pytest.FixtureRequest):
    """Serve a model and explain an input that a user typed."""
    predictor, example = subject(request.param)
    session = ExplorerSession(predictor, path=Path(request.param))
    value = list(example) if isinstance(example, tuple) else example
    value = {"tokens": value} if session.task == "tag" else value
    with TestClient(build_app(session, port=8023), base_url=BASE) as client:
        body = {"text": write_input(value), "beam": 4, "length_penalty": 1.0}
        answer = client.post(f"{API}/explain", json=body)
        assert answer.status_code == 200, answer.text
        yield predictor, session, client, answer.json()
    session.close()


def test_every_task_is_explained_over_http(explained) -> None:
    predictor, session, client, found = explained
    assert found["model"]["task"] == predictor.task_name
    assert client.get(f"{API}/session").json()["task"] == predictor.task_name
    [given] = predictor.read_arguments([session.cache.get(found["digest"]).request.text])
    assert predictor.explain(given).digest == found["digest"]
    assert Explanation.from_dict(found).digest == found["digest"]
    address = f"{API}/e/{found['digest']}"
    for site in found["sites"]:
        if site["tensor"] is None:
            continue
        answer = client.get(f"{address}/tensor/{site['tensor']}")
        exact = np.frombuffer(answer.content, "<f4").reshape(
            [int(size) for size in answer.headers["x-shape"].split(",")]
        )
        np.testing.assert_array_equal(
            exact, session.cache.get(found["digest"]).explanation.arrays[site["tensor"]]
        )


def test_every_task_has_heads_to_switch_off(explained) -> None:
    predictor, session, client, found = explained
    explanation = session.cache.get(found["digest"]).explanation
    address = f"{API}/e/{found['digest']}"
    answer = client.post(f"{address}/effects", json={})
    assert answer.status_code == 200, answer.text
    lines = [json.loads(line) for line in answer.text.splitlines()]
    effects = dict(predictor.head_effects(explanation))
    assert {line["head"]: line["exact"] for line in lines} == pytest.approx(effects, abs=1e-4)
    names = [line["head"] for line in lines][:2] + list(explanation.model.get("off_switches", ()))[
        :2
    ]
    for name in names:
        answer = client.post(f"{address}/off", json={"heads": [name]})
        assert answer.status_code == 200, answer.text
        expected = predictor.ablate(explanation, [name])
        assert answer.json()["sum_change"] == pytest.approx(expected.sum_change, abs=1e-4)
        assert answer.json()["text"] == expected.text


def test_every_task_is_attributed_or_reports_why_not(explained) -> None:
    _, _, client, found = explained
    for method in client.get(f"{API}/session").json()["methods"]:
        body = {"method": method}
        answer = client.post(f"{API}/e/{found['digest']}/attribute", json=body)
        assert answer.status_code in (200, 400), answer.text
        if answer.status_code == 200:
            source = answer.json()["attribution"]["source"]
            assert source in answer.json()["tensors"]
        else:
            assert list(answer.json()) == ["error"]


def test_a_branch_is_decoded_or_rejected(explained) -> None:
    predictor, _, client, found = explained
    body = {"step": 0, "token": found["steps"][0]["top"][1][0] if found["steps"] else 4}
    answer = client.post(f"{API}/e/{found['digest']}/branch", json=body)
    if predictor.task_name == "language":
        assert answer.status_code == 200, answer.text
    else:
        assert answer.status_code == 400
        assert "have no prefix_ids" in answer.json()["error"] or "no decoding step" in answer.text

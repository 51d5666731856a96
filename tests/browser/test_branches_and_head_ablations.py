"""Branches and head ablations over HTTP: both equal a recomputation in Python."""

from __future__ import annotations

import json
import random
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from served_kit import SENTENCES

from dragoman.explain.explanation import Explanation
from dragoman.explain.explanation_json import decode_tensor
from dragoman.inference import Translator

COUNTS = pytest.mark.parametrize("count", [12, pytest.param(50, marks=pytest.mark.slow)])
TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def translator(explorer) -> Translator:
    """The same model, loaded once more, so that nothing is shared with the server."""
    return Translator.load(explorer.path, device="cpu")


@pytest.fixture(scope="module")
def explanations(explorer) -> list[dict[str, Any]]:
    """Explain a few sentences over HTTP."""
    return [
        explorer.call("explain", {"text": text, "beam": beam})
        for text, beam in zip(SENTENCES, (1, 2, 3, 4), strict=True)
    ]


def ids(explanation: dict[str, Any]) -> list[int]:
    return [token["id"] for token in explanation["target"]["tokens"]]


def check_steps(found: list[dict[str, Any]], expected: Explanation | Any) -> None:
    """Check tokens and log-probabilities."""
    assert [step["id"] for step in found] == [step.id for step in expected.steps]
    assert [step["logprob"] for step in found] == pytest.approx(
        [step.logprob for step in expected.steps], abs=TOLERANCE
    )


@COUNTS
def test_branches_equal_a_recomputation(explorer, translator, explanations, count) -> None:
    draw = random.Random(1)
    for number in range(count):
        explanation = explanations[number % len(explanations)]
        step = draw.randrange(len(explanation["steps"]))
        token = draw.choice(explanation["steps"][step]["top"][1:])[0]
        path = f"e/{explanation['digest']}/branch"
        status, content = explorer.ask(path, {"step": step, "token": token})
        prefix = [*ids(explanation)[:step], token]
        options = {"prefix_ids": prefix, "beam": explanation["request"]["beam"]}
        assert status == 200, content
        found = json.loads(content)
        expected = translator.explain(explanation["source"]["text"], **options)
        assert ids(found)[: step + 1] == prefix
        assert ids(found) == [each.id for each in expected.target.tokens]
        check_steps(found["steps"], expected)
        assert found["score"]["sum"] == pytest.approx(expected.score["sum"], abs=TOLERANCE)
        assert [each["forced"] for each in found["steps"]] == [
            at <= step for at in range(len(found["steps"]))
        ]
        assert found["digest"] == expected.digest


@COUNTS
def test_heads_off_equal_a_recomputation(explorer, translator, explanations, count) -> None:
    draw = random.Random(2)
    plain = {
        each["digest"]: translator.explain(each["source"]["text"], beam=each["request"]["beam"])
        for each in explanations
    }
    for number in range(count):
        explanation = explanations[number % len(explanations)]
        heads = [f"{head['site']}.{head['head']}" for head in explanation["heads"]]
        chosen = draw.sample(heads, draw.choice((1, 1, 1, 2, 3)))
        found = explorer.call(f"e/{explanation['digest']}/off", {"heads": chosen})
        base = plain[explanation["digest"]]
        expected = translator.ablate(base, chosen)
        assert found["off"] == chosen
        assert found["effect"] == pytest.approx(expected.effect, abs=TOLERANCE)
        assert found["sum_change"] == pytest.approx(sum(found["effect"]), abs=10 * TOLERANCE)
        assert found["text"] == expected.text
        check_steps(found["steps"], expected)
        if number % 5:
            continue
        # The new translation is what the model writes without these heads.
        fresh = translator.explain(
            explanation["source"]["text"], beam=explanation["request"]["beam"], off=chosen
        )
        assert ids(found) == [each.id for each in fresh.target.tokens]
        check_steps(found["steps"], fresh)


def test_nothing_off_changes_nothing(explorer, explanations) -> None:
    found = explorer.call(f"e/{explanations[0]['digest']}/off", {"heads": []})
    assert np.abs(found["effect"]).max() <= TOLERANCE
    assert ids(found) == ids(explanations[0])


def test_effects_of_all_heads_equal_single_ones(explorer, translator, explanations) -> None:
    explanation = explanations[1]
    lines = explorer.call(f"e/{explanation['digest']}/effects", {})
    assert sorted(line["head"] for line in lines) == sorted(
        f"{head['site']}.{head['head']}" for head in explanation["heads"]
    )
    for line in lines[:: max(1, len(lines) // 6)]:
        found = explorer.call(f"e/{explanation['digest']}/off", {"heads": [line["head"]]})
        assert line["exact"] == pytest.approx(found["sum_change"], abs=TOLERANCE)


def test_attributions_equal_a_recomputation(explorer, translator, explanations) -> None:
    explanation = explanations[0]
    base = translator.explain(explanation["source"]["text"], beam=1)
    for method in ("attention_x_gradient", "input_x_gradient", "occlusion", "value_zeroing"):
        found = explorer.call(f"e/{explanation['digest']}/attribute", {"method": method})
        attribution, arrays = translator.attribute(base, method)
        assert found["attribution"]["method"] == method
        shown = decode_tensor(found["tensors"][found["attribution"]["source"]])
        scale = found["tensors"][found["attribution"]["source"]]["scale"]
        np.testing.assert_allclose(shown, arrays[attribution.source], atol=0.005 * scale)


@pytest.mark.parametrize(
    ("path", "body", "words"),
    [
        ("branch", {"step": -1, "token": 5}, "step must be an integer"),
        ("branch", {"step": 10_000, "token": 5}, "step must be an integer"),
        ("branch", {"step": 0, "token": 10**6}, "found 1000000"),
        ("branch", {"step": 0, "token": 2**31}, "token must be an integer"),
        ("branch", {"step": 0, "token": "5"}, "found a string"),
        ("branch", {"step": None, "token": 5}, "found nothing"),
        ("off", {"heads": ["x9.0"]}, "found 'x9.0'"),
        ("off", {"heads": ["x0.99"]}, "found 'x0.99'"),
        ("off", {"heads": ["__class__"]}, "heads such as x3.2"),
        ("off", {"heads": {"x0": 1}}, "must be a list"),
        ("attribute", {"method": "__init__"}, "must be one of"),
        ("attribute", {"method": None}, "must be one of"),
    ],
)
def test_an_impossible_counterfactual_is_one_sentence(
    explorer, explanations, path: str, body: dict, words: str
) -> None:
    status, content = explorer.ask(f"e/{explanations[0]['digest']}/{path}", body)
    assert status == 400, content
    answer = json.loads(content)
    assert list(answer) == ["error"]
    assert words in answer["error"]


def test_special_tokens_may_be_forced_or_are_rejected(explorer, explanations) -> None:
    """No token id ends in a bug."""
    for token in range(8):
        status, content = explorer.ask(
            f"e/{explanations[0]['digest']}/branch", {"step": 1, "token": token}
        )
        assert status in (200, 400), content


def test_a_hundred_parallel_requests_are_answered_or_rejected(
    explorer, explanations, capfd: pytest.CaptureFixture[str]
) -> None:
    paths = [
        ("explain", {"text": SENTENCES[0], "beam": 2}),
        (f"e/{explanations[0]['digest']}/off", {"heads": ["x0.0"]}),
        ("explain", {"text": "a" * 5000}),
        (f"e/{'0' * 64}/branch", {"step": 0, "token": 1}),
        ("explain", {"text": 3}),
    ]
    with ThreadPoolExecutor(100) as pool:
        answers = list(pool.map(lambda n: explorer.ask(*paths[n % len(paths)]), range(100)))
    codes = [status for status, _ in answers]
    assert set(codes) <= {200, 400, 404, 413, 429}
    assert codes.count(200) >= 1
    for status, content in answers:
        if status != 200:
            assert list(json.loads(content)) == ["error"]
    assert explorer.call("explain", {"text": SENTENCES[0]})["source"]["text"] == SENTENCES[0]
    captured = capfd.readouterr()
    assert "Traceback" not in captured.err
    assert SENTENCES[0] not in captured.out + captured.err

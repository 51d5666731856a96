"""Request parsing: accepted requests, and the error message for all others."""

from __future__ import annotations

import json

import pytest

from dragoman.explore import request_parsing as checks
from dragoman.explore.request_parsing import ExplainRequest, Region, RequestError


def request_error(call, *arguments, **options) -> RequestError:
    with pytest.raises(RequestError) as found:
        call(*arguments, **options)
    assert "\n" not in found.value.sentence
    assert found.value.sentence.endswith(".")
    return found.value


def test_a_request_has_only_the_options_that_were_given() -> None:
    assert checks.read_explain_request({"text": "a b"}).options() == {}
    body = {"text": "a", "beam": 4, "length_penalty": 1, "prefix": "x", "off": ["x0.1", "x0.1"]}
    assert checks.read_explain_request(body).options() == {
        "beam": 4,
        "length_penalty": 1.0,
        "prefix": "x",
        "off": ["x0.1"],
    }
    none = checks.read_explain_request({"text": "a", "length_penalty": 0})
    assert none.options() == {"length_penalty": 0.0}  # not the model's own


def test_null_is_the_same_as_leaving_out() -> None:
    body = dict.fromkeys(ExplainRequest.__dataclass_fields__) | {"text": "a"}
    assert checks.read_explain_request(body) == ExplainRequest(text="a")


@pytest.mark.parametrize(
    ("body", "status", "words"),
    [
        ({}, 400, "text must be a string; found nothing"),
        ({"text": 3}, 400, "text must be a string; found a number"),
        ({"text": ["a"]}, 400, "found a list"),
        ({"text": " \n"}, 400, "at least one character"),
        ({"text": "a" * 4001}, 413, "at most 4,000 characters; found 4,001"),
        ({"text": "a\x00"}, 400, "found a NUL"),
        ({"text": "\ud800"}, 400, "surrogate"),
        ({"text": "a", "beam": 17}, 400, "beam must be an integer from 1 to 16; found 17"),
        ({"text": "a", "beam": 0}, 400, "found 0"),
        ({"text": "a", "beam": True}, 400, "found true or false"),
        ({"text": "a", "beam": 2.5}, 400, "found a number"),
        ({"text": "a", "beam": "4"}, 400, "found a string"),
        ({"text": "a", "length_penalty": -1}, 400, "from 0 to 5; found -1"),
        ({"text": "a", "length_penalty": float("nan")}, 400, "found nan"),
        ({"text": "a", "length_penalty": 1e308 * 10}, 400, "found inf"),
        ({"text": "a", "length_penalty": "1"}, 400, "found a string"),
        ({"text": "a", "prefix": 3}, 400, "prefix must be a string"),
        ({"text": "a", "prefix": "b", "prefix_ids": [4]}, 400, "exclude each other"),
        ({"text": "a", "prefix_ids": [-1]}, 400, "token ids"),
        ({"text": "a", "prefix_ids": [2**40]}, 400, "token ids"),
        ({"text": "a", "prefix_ids": [4] * 600}, 400, "at most 512 token ids"),
        ({"text": "a", "prefix_ids": {"0": 1}}, 400, "token ids"),
        ({"text": "a", "reference": 1}, 400, "reference must be a string"),
        ({"text": "a", "off": "x0.1"}, 400, "off must be a list"),
        ({"text": "a", "off": ["../x"]}, 400, "heads such as x3.2; found '../x'"),
        ({"text": "a", "off": [3]}, 400, "found a number"),
        ({"text": "a", "off": ["x0.1"] * 600}, 400, "at most 512 heads"),
        ({"text": "a", "temperature": 2}, 400, "found 'temperature'"),
    ],
)
def test_a_bad_request_is_one_sentence(body: dict, status: int, words: str) -> None:
    found = request_error(checks.read_explain_request, body)
    assert found.status == status
    assert words in found.sentence


def test_a_sentence_cannot_be_long_or_carry_control_characters() -> None:
    found = request_error(checks.read_explain_request, {"text": "a", "\x1b[2J" + "k" * 5000: 1})
    assert "\x1b" not in found.sentence
    assert len(found.sentence) < 700


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"[" * 100_000, b"\xff", b'{"text": NaN}', b"-Infinity", b"9" * 5000, b"'a'"],
)
def test_invalid_json_is_rejected(body: bytes) -> None:
    assert "must be JSON in UTF-8" in request_error(checks.read_json, body).sentence


@pytest.mark.parametrize("body", [b"[]", b"3", b'"a"', b"null", b"true"])
def test_the_body_is_an_object(body: bytes) -> None:
    assert "must be a JSON object" in request_error(checks.read_json, body).sentence


def test_a_surrogate_that_json_escapes_is_found() -> None:
    body = checks.read_json(b'{"text": "\\ud800"}')
    assert request_error(checks.read_explain_request, body).status == 400


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"step": -1, "token": 4}, "from 0 to 4; found -1"),
        ({"step": 5, "token": 4}, "from 0 to 4; found 5"),
        ({"step": 1.0, "token": 4}, "found a number"),
        ({"step": 1}, "token must be an integer"),
        ({"step": 1, "token": -4}, "found -4"),
        ({"step": 1, "token": 4, "beam": 2}, "found 'beam'"),
        ({"step": json.loads("1" * 400), "token": 4}, "found 1111"),
    ],
)
def test_a_branch_has_a_step_and_a_token(body: dict, words: str) -> None:
    assert words in request_error(checks.read_branch_request, body, num_steps=5).sentence


def test_branch_of_an_output_without_steps_is_rejected() -> None:
    body = {"step": 0, "token": 4}
    assert (
        "no decoding step" in request_error(checks.read_branch_request, body, num_steps=0).sentence
    )
    assert checks.read_branch_request(body, num_steps=1) == (0, 4)


@pytest.mark.parametrize(
    ("heads", "words"),
    [
        (["x0.4"], "found 'x0.4'; it has x0.0 to x0.3"),
        (["x9.0"], "found 'x9.0'; it has x0, e1"),
        (["x0.-1"], "heads such as x3.2"),
        (None, "must be a list"),
        (["memory"], "found 'memory'; it has x0, e1"),
        (["x0"], "found 'x0'"),
    ],
)
def test_heads_must_be_the_models(heads: object, words: str) -> None:
    sites = {"x0": 4, "e1": 2}
    assert words in request_error(checks.read_off_request, {"heads": heads}, sites=sites).sentence


def test_heads_are_read() -> None:
    assert checks.read_off_request({"heads": ["x0.3", "x0b.0"]}, sites={"x0": 4, "x0b": 1}) == [
        "x0.3",
        "x0b.0",
    ]
    assert checks.read_off_request({"heads": []}, sites={}) == []
    body = {"heads": ["memory", "seed.1"]}
    assert checks.read_off_request(body, sites={}, switches=["memory", "seed.1"]) == body["heads"]


def test_an_attribution_is_of_all_tokens_or_of_one() -> None:
    method = "input_x_gradient"
    read = checks.read_attribute_request
    assert read({"method": method}) == (method, None)
    assert read({"method": method, "step": 3}, num_steps=4) == (method, 3)
    for step in (4, -1, "3", None):
        found = request_error(read, {"method": method, "step": step}, num_steps=4)
        assert "step must be an integer" in str(found)


@pytest.mark.parametrize("method", ["guess", 3, None, ["occlusion"]])
def test_a_method_is_one_of_four(method: object) -> None:
    found = request_error(checks.read_attribute_request, {"method": method})
    assert "one of attention_x_gradient, input_x_gradient, integrated_gradients" in str(found)


@pytest.mark.parametrize(
    ("query", "words"),
    [
        ({"h": "-1"}, "h must be the number of a head"),
        ({"h": "x"}, "found 'x'"),
        ({"q": "5-2"}, "q must be a range such as 0-63; found '5-2'"),
        ({"k": "-3"}, "k must be a range"),
        ({"q": "0-99999999999"}, "q must be a range"),
        ({"z": "1"}, "found 'z'"),
    ],
)
def test_a_region_has_a_head_and_ranges(query: dict, words: str) -> None:
    assert words in request_error(checks.read_region, query).sentence


def test_a_region_is_read() -> None:
    assert checks.read_region({}) == Region(None, None, None)
    assert checks.read_region({"h": "2", "q": "0-63", "k": "7-7"}) == Region(2, (0, 63), (7, 7))

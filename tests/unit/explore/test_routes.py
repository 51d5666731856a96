"""The explorer over HTTP: responses, rejected requests, and limits per request."""

from __future__ import annotations

import asyncio
import concurrent.futures
import dataclasses
import json
import logging
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from explorer_kit import StubPredictor, make_explanation
from starlette.testclient import TestClient

from dragoman.explore import model_thread
from dragoman.explore import routes as application
from dragoman.explore.explorer_session import ExplorerSession
from dragoman.explore.model_thread import Cancellation, ModelWorker
from dragoman.explore.request_parsing import ExplainRequest, RequestError
from dragoman.explore.request_security import CONTENT_SECURITY_POLICY
from dragoman.explore.routes import build_app

BASE = "http://127.0.0.1:8023"
API = "/explore/api"
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for "
    "'script'"
)


@pytest.fixture
def predictor() -> StubPredictor:
    return StubPredictor()


@pytest.fixture
def session(predictor: StubPredictor) -> Iterator[ExplorerSession]:
    made = ExplorerSession(predictor, path=Path("models/stub-model"), examples=["Guten Morgen."])
    yield made
    predictor.gate.set()
    made.close()


@pytest.fixture
def client(session: ExplorerSession) -> Iterator[TestClient]:
    with TestClient(build_app(session, port=8023), base_url=BASE) as made:
        yield made


def explain(client: TestClient, text: str = "ein alter Mann", **more: object) -> dict:
    answer = client.post(f"{API}/explain", json={"text": text, **more})
    assert answer.status_code == 200, answer.text
    return answer.json()


def check_error(answer, status: int, words: str = "") -> None:
    """Check that an answer is one sentence, without a trace of the program."""
    assert answer.status_code == status, answer.text
    assert list(answer.json()) == ["error"]
    sentence = answer.json()["error"]
    assert words in sentence
    assert "\n" not in sentence
    assert "Traceback" not in sentence
    assert len(sentence) < 700


# The page and its files.


def test_the_root_leads_to_the_page(client: TestClient) -> None:
    for path in ("/", "/explore"):
        answer = client.get(path, follow_redirects=False)
        assert (answer.status_code, answer.headers["location"]) == (307, "/explore/")
    page = client.get("/explore/")
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    assert 'id="panel-nav"' in page.text


def test_files_have_types_and_digests(client: TestClient) -> None:
    script = client.get("/explore/static/explorer.js")
    assert script.headers["content-type"] == "text/javascript; charset=utf-8"
    assert client.get("/explore/static/explorer.css").headers["content-type"].startswith("text/css")
    assert script.headers["cache-control"] == "no-cache"
    again = client.get(
        "/explore/static/explorer.js", headers={"If-None-Match": script.headers["etag"]}
    )
    assert (again.status_code, again.content) == (304, b"")
    other = client.get("/explore/static/explorer.js", headers={"If-None-Match": '"x", W/"y"'})
    assert other.status_code == 200
    head = client.head("/explore/static/explorer.js")
    assert (head.status_code, head.content) == (200, b"")
    assert head.headers["content-length"] == str(len(script.content))


@pytest.mark.parametrize(
    "path",
    [
        "/explore/static/../app.py",
        "/explore/static/%2e%2e/app.py",
        "/explore/static/..%2fapp.py",
        "/explore/static//etc/passwd",
        "/explore/static/vendor/..%2f..%2f..%2fsession.py",
        "/explore/static/vendor%00/explorer.js",
        "/explore/static/vendor",
        "/explore/static/vendor/README.md",
        "/explore/page/js/main.js",
        "/explore/static/",
        "/etc/passwd",
        f"{API}/nothing",
        f"{API}/e/",
        f"{API}/e/..%2f..",
    ],
)
def test_no_path_leads_out_of_the_page(client: TestClient, path: str) -> None:
    check_error(client.get(path), 404)


# Headers and origins.


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/explore/"),
        ("GET", f"{API}/session"),
        ("GET", "/nothing"),
        ("DELETE", "/explore/"),
        ("GET", "/favicon.ico"),
        ("POST", f"{API}/explain"),
    ],
)
def test_every_answer_has_the_security_headers(client: TestClient, method: str, path: str) -> None:
    headers = client.request(method, path).headers
    assert CONTENT_SECURITY_POLICY == POLICY
    assert headers["content-security-policy"] == POLICY
    assert headers["x-content-type-options"] == "nosniff"
    assert headers["referrer-policy"] == "no-referrer"
    assert headers["cross-origin-opener-policy"] == "same-origin"
    assert headers["cross-origin-resource-policy"] == "same-origin"
    assert not [name for name in headers if name.startswith("access-control-")]
    assert "server" not in headers


@pytest.mark.parametrize(
    "host", ["127.0.0.1:8023", "localhost:8023", "LOCALHOST:8023", "[::1]:8023"]
)
def test_names_of_this_machine_are_accepted(client: TestClient, host: str) -> None:
    assert client.get(f"{API}/session", headers={"Host": host}).status_code == 200


@pytest.mark.parametrize(
    "host",
    [
        "evil.example:8023",
        "127.0.0.1",
        "127.0.0.1:80",
        "localhost",
        "127.0.0.1.evil.example:8023",
        "10.0.0.7:8023",
        "[::1]",
        "[::2]:8023",
        "user@127.0.0.1:8023",
        "",
        ":8023",
        "\xff:8023",
    ],
)
def test_other_names_are_rejected(client: TestClient, host: str) -> None:
    for method, path in (("GET", "/explore/"), ("POST", f"{API}/explain")):
        answer = client.request(method, path, headers={"Host": host.encode("latin-1")})
        check_error(answer, 403, "Host must be this server's address")


def test_another_address_may_be_allowed(session: ExplorerSession) -> None:
    with TestClient(build_app(session, host="0.0.0.0", port=8023), base_url=BASE) as client:
        for host, status in (
            ("10.0.0.7:8023", 200),
            ("[fe80::1]:8023", 200),
            ("a.example:8023", 403),
        ):
            assert client.get("/explore/", headers={"Host": host}).status_code == status


def test_port_80_needs_no_port(session: ExplorerSession) -> None:
    with TestClient(build_app(session, port=80), base_url="http://127.0.0.1") as client:
        assert client.get("/explore/").status_code == 200


@pytest.mark.parametrize(
    "headers",
    [
        {"Origin": "http://evil.example"},
        {"Origin": "null"},
        {"Origin": "http://127.0.0.1:9999"},
        {"Origin": "https://127.0.0.1:8023"},
        {"Origin": "http://localhost:8023"},  # another origin than 127.0.0.1
        {"Origin": ""},
        {"Sec-Fetch-Site": "cross-site"},
        {"Sec-Fetch-Site": "same-site"},
    ],
)
@pytest.mark.parametrize(
    "path", ["explain", "e/0/branch", "e/0/off", "e/0/attribute", "e/0/effects"]
)
def test_other_sites_cannot_post(
    client: TestClient, predictor: StubPredictor, headers: dict, path: str
) -> None:
    answer = client.post(f"{API}/{path}", json={"text": "a"}, headers=headers)
    check_error(answer, 403, "the explorer's own page")
    assert not predictor.calls


def test_the_own_page_can_post(client: TestClient) -> None:
    headers = {"Origin": BASE, "Sec-Fetch-Site": "same-origin"}
    answer = client.post(f"{API}/explain", json={"text": "a"}, headers=headers)
    assert answer.status_code == 200


def test_there_is_no_preflight(client: TestClient) -> None:
    headers = {"Origin": BASE, "Access-Control-Request-Method": "POST"}
    check_error(client.options(f"{API}/explain", headers=headers), 405)


def test_a_form_cannot_post(client: TestClient, predictor: StubPredictor) -> None:
    for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data"):
        answer = client.post(
            f"{API}/explain", content=b'{"text": "a"}', headers={"Content-Type": kind}
        )
        check_error(answer, 400, "must be application/json")
    assert not predictor.calls


# Explanations.


def test_the_session_names_the_model_and_the_limits(client: TestClient) -> None:
    found = client.get(f"{API}/session").json()
    assert found["model"]["path"] == "models/stub-model"
    assert found["task"] == "translate"
    assert found["examples"] == ["Guten Morgen."]
    assert found["explanation"] is None
    assert found["can_explain"] is True
    assert (found["limits"]["beam"], found["limits"]["characters"]) == (16, 4000)


def test_an_explanation_can_be_read_again(client: TestClient, predictor: StubPredictor) -> None:
    found = explain(client, beam=4, prefix="x", off=["x0.1"])
    assert found["format"] == "dragoman.explanation"
    assert predictor.calls == [("ein alter Mann", {"beam": 4, "prefix": "x", "off": ["x0.1"]})]
    address = f"{API}/e/{found['digest']}"
    again = client.get(address)
    assert again.json() == found
    known = client.get(address, headers={"If-None-Match": again.headers["etag"]})
    assert known.status_code == 304
    assert client.head(address).status_code == 200


def test_unknown_explanations_are_not_found(client: TestClient) -> None:
    for digest in ("0" * 64, "nothing", "A" * 64, "0" * 63):
        check_error(client.get(f"{API}/e/{digest}"), 404)
        for name in ("branch", "off", "attribute", "effects"):
            check_error(client.post(f"{API}/e/{digest}/{name}", json={}), 404)
        check_error(client.get(f"{API}/e/{digest}/tensor/x0.w"), 404)


def test_a_branch_keeps_what_is_before_it(client: TestClient, predictor: StubPredictor) -> None:
    found = explain(client, beam=2)
    answer = client.post(f"{API}/e/{found['digest']}/branch", json={"step": 2, "token": 99})
    assert answer.status_code == 200, answer.text
    ids = [token["id"] for token in found["target"]["tokens"]]
    assert predictor.calls[1] == ("ein alter Mann", {"beam": 2, "prefix_ids": [*ids[:2], 99]})
    other = answer.json()
    assert [step["forced"] for step in other["steps"]][:4] == [True, True, True, False]
    # A branch of a branch starts from the branch's own tokens.
    again = client.post(f"{API}/e/{other['digest']}/branch", json={"step": 0, "token": 98})
    assert again.status_code == 200
    assert predictor.calls[2][1] == {"beam": 2, "prefix_ids": [98]}


def test_a_branch_of_a_reference_is_decoded(client: TestClient, predictor: StubPredictor) -> None:
    found = explain(client, reference="EIN ALTER MANN")
    assert predictor.calls[0][1] == {"reference": "EIN ALTER MANN"}
    answer = client.post(f"{API}/e/{found['digest']}/branch", json={"step": 1, "token": 99})
    assert answer.status_code == 200, answer.text
    kept = found["target"]["tokens"][0]["id"]
    assert predictor.calls[1][1] == {"prefix_ids": [kept, 99]}  # which excludes a reference


def test_heads_are_switched_off(client: TestClient) -> None:
    address = f"{API}/e/{explain(client)['digest']}/off"
    assert client.post(address, json={"heads": ["x0.1"]}).json()["off"] == ["x0.1"]
    check_error(client.post(address, json={"heads": ["x0.2"]}), 400, "it has x0.0 to x0.1")
    check_error(client.post(address, json={"heads": ["y0.2"]}), 400, "found 'y0.2'")


def test_attributions_come_with_their_tensors(client: TestClient) -> None:
    address = f"{API}/e/{explain(client)['digest']}/attribute"
    found = client.post(address, json={"method": "occlusion"}).json()
    assert found["attribution"]["method"] == "occlusion"
    assert found["tensors"]["ixg.s"]["shape"] == [4, 4]
    check_error(client.post(address, json={"method": "guess"}), 400, "one of attention_x_gradient")


def test_effects_come_as_lines(client: TestClient) -> None:
    address = f"{API}/e/{explain(client)['digest']}/effects"
    for options in ({"json": {}}, {}):
        answer = client.post(address, **options)
        assert answer.headers["content-type"] == "application/x-ndjson"
        assert [json.loads(line) for line in answer.text.splitlines()] == [
            {"head": "x0.0", "exact": 0.0},
            {"head": "x0.1", "exact": -0.125},
        ]


def test_a_region_is_exact(client: TestClient, session: ExplorerSession) -> None:
    digest = explain(client)["digest"]
    exact = session.cache.get(digest).explanation.arrays["x0.w"]
    answer = client.get(f"{API}/e/{digest}/tensor/x0.w", params={"h": 1, "q": "0-2", "k": "1-1"})
    assert answer.headers["x-shape"] == "3,1"
    found = np.frombuffer(answer.content, "<f4").reshape(3, 1)
    np.testing.assert_array_equal(found, exact[1, 0:3, 1:2])
    whole = client.get(f"{API}/e/{digest}/tensor/x0.w")
    assert whole.headers["x-shape"] == "2,4,4"
    np.testing.assert_array_equal(np.frombuffer(whole.content, "<f4").reshape(2, 4, 4), exact)


@pytest.mark.parametrize(
    ("query", "status", "words"),
    [
        ("x0.w?h=2", 400, "found 2 of 2"),
        ("x0.w?q=0-4", 400, "must end before 4; found 0-4"),
        ("x0.w?k=9-9", 400, "must end before 4"),
        ("x0.w?h=NaN", 400, "number of a head"),
        ("x0.w?x=1", 400, "found 'x'"),
        ("nothing", 404, "no tensor 'nothing'"),
        ("..%2f..%2fsecret", 404, ""),
    ],
)
def test_a_bad_region_is_rejected(client: TestClient, query: str, status: int, words: str) -> None:
    digest = explain(client)["digest"]
    check_error(client.get(f"{API}/e/{digest}/tensor/{query}"), status, words)


def test_a_region_is_bounded(client: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dragoman.explore.explorer_session.REGION_CELLS", 20)
    digest = explain(client)["digest"]
    check_error(client.get(f"{API}/e/{digest}/tensor/x0.w"), 413, "at most 20 values; found 32")
    assert client.get(f"{API}/e/{digest}/tensor/x0.w?h=0").status_code == 200


# What a request may cost.


def test_a_body_is_bounded_by_its_length_and_by_what_arrives(client: TestClient) -> None:
    check_error(client.post(f"{API}/explain", json={"text": "a" * 200_000}), 413, "131,072 bytes")
    sent = 0

    def chunks() -> Iterator[bytes]:
        nonlocal sent
        for _ in range(1000):
            sent += 10_000
            yield b" " * 10_000

    headers = {"Content-Type": "application/json"}
    answer = client.post(f"{API}/explain", content=chunks(), headers=headers)
    check_error(answer, 413, "131,072 bytes")
    assert answer.headers["connection"] == "close"


@pytest.mark.parametrize("headers", [{"Content-Encoding": "gzip"}, {"Content-Encoding": "br"}])
def test_a_compressed_body_is_rejected(client: TestClient, headers: dict) -> None:
    check_error(
        client.post(f"{API}/explain", json={"text": "a"}, headers=headers), 400, "compressed"
    )


@pytest.mark.parametrize(
    "body", [b"{", b"\xff\xfe", b"[1]", b'{"text": NaN}', b"[" * 90_000, b"nul"]
)
def test_bad_json_is_rejected(client: TestClient, body: bytes) -> None:
    headers = {"Content-Type": "application/json"}
    check_error(client.post(f"{API}/explain", content=body, headers=headers), 400, "must be")


@pytest.mark.parametrize("method", ["PUT", "DELETE", "PATCH", "TRACE", "GET"])
def test_other_methods_are_rejected(client: TestClient, method: str) -> None:
    check_error(client.request(method, f"{API}/explain"), 405)


def test_mistakes_are_one_sentence(client: TestClient) -> None:
    check_error(client.post(f"{API}/explain", json={"text": "refuse"}), 400, "found another")
    check_error(client.post(f"{API}/explain", json={"text": "full"}), 503, "Memory is full")


def test_a_bug_is_logged_without_the_text(
    client: TestClient, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.DEBUG):
        check_error(
            client.post(f"{API}/explain", json={"text": "secret bug"}), 500, "this is a bug"
        )
    lines = [record.getMessage() for record in caplog.records if record.name.startswith("dragoman")]
    assert len(lines) == 1
    assert "ValueError at explorer_kit.py" in lines[0]
    assert "secret" not in caplog.text
    assert "Traceback" not in caplog.text


def test_one_request_runs_at_a_time_and_few_wait(
    client: TestClient, predictor: StubPredictor
) -> None:
    predictor.gate.clear()
    with concurrent.futures.ThreadPoolExecutor(40) as pool:
        answers = [
            pool.submit(client.post, f"{API}/explain", json={"text": f"text {n}"})
            for n in range(40)
        ]
        refused = 40 - 1 - model_thread.MAX_WAITING
        while sum(answer.done() for answer in answers) < refused:
            time.sleep(0.005)
        predictor.gate.set()
        found = [answer.result() for answer in answers]
    assert [answer.status_code for answer in found].count(200) == 1 + model_thread.MAX_WAITING
    for answer in found:
        if answer.status_code != 200:
            check_error(answer, 429, "Too many requests")
            assert int(answer.headers["retry-after"]) > 0
    assert predictor.most_running == 1
    explain(client, "afterwards")


def test_a_request_has_a_time_limit(
    client: TestClient, predictor: StubPredictor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(application, "REQUEST_SECONDS", 0.05)
    monkeypatch.setattr(application, "GRACE_SECONDS", 0.05)
    predictor.gate.clear()
    answer = client.post(f"{API}/explain", json={"text": "slow"})
    check_error(answer, 503, "did not finish in time")
    assert int(answer.headers["retry-after"]) > 0
    monkeypatch.undo()
    predictor.gate.set()
    explain(client, "afterwards")


def test_other_requests_run_between_two_effects(
    client: TestClient, predictor: StubPredictor
) -> None:
    digest = explain(client)["digest"]
    predictor.num_heads = 2000
    with client.stream("POST", f"{API}/e/{digest}/effects") as answer:
        assert answer.status_code == 200
        explain(client, "meanwhile")


def test_streams_of_effects_are_bounded(
    client: TestClient, predictor: StubPredictor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(application, "MAX_STREAMS", 0)
    digest = explain(client)["digest"]
    check_error(client.post(f"{API}/e/{digest}/effects"), 429, "computed already")
    monkeypatch.undo()
    for _ in range(2 * application.MAX_STREAMS):  # a finished stream is forgotten
        assert client.post(f"{API}/e/{digest}/effects").status_code == 200


def test_rejected_streams_of_effects_are_forgotten(
    client: TestClient, session: ExplorerSession
) -> None:
    stored = make_explanation("ein Mann")
    stored = dataclasses.replace(stored, model={**stored.model, "digest": "another"})
    foreign = session.open(stored).digest
    for _ in range(2 * application.MAX_STREAMS):
        check_error(client.post(f"{API}/e/{foreign}/effects"), 400, "of another model")
    own = explain(client)["digest"]
    assert client.post(f"{API}/e/{own}/effects").status_code == 200


def test_old_explanations_are_forgotten(client: TestClient, session: ExplorerSession) -> None:
    digests = [explain(client, f"word {n}")["digest"] for n in range(66)]
    assert len(session.cache) == 64
    check_error(client.get(f"{API}/e/{digests[0]}"), 404, "explain the text again")
    assert client.get(f"{API}/e/{digests[2]}").status_code == 200


def test_a_stored_explanation_needs_no_model(session: ExplorerSession, client: TestClient) -> None:
    from dragoman.explain.explanation import Explanation

    stored = Explanation.from_dict(explain(client))
    alone = ExplorerSession()
    alone.open(stored)
    with TestClient(build_app(alone, port=8023), base_url=BASE) as other:
        found = other.get(f"{API}/session").json()
        assert found["explanation"] == stored.digest
        assert found["can_explain"] is False
        assert found["model"]["name"] == "stub"
        assert other.get(f"{API}/e/{stored.digest}").json()["digest"] == stored.digest
        for path, body in (
            ("explain", {"text": "a"}),
            (f"e/{stored.digest}/branch", {"step": 0, "token": 1}),
            (f"e/{stored.digest}/off", {"heads": []}),
            (f"e/{stored.digest}/attribute", {"method": "occlusion"}),
            (f"e/{stored.digest}/effects", {}),
        ):
            check_error(other.post(f"{API}/{path}", json=body), 400, "without its model")
    alone.close()


def test_effects_that_have_begun_go_on_while_the_queue_is_full(session: ExplorerSession) -> None:
    session.worker.close()
    session.worker = ModelWorker(max_waiting=0)
    entry = session.explain(ExplainRequest(text="ein Mann"))
    gate = threading.Event()
    blocking = session.worker.submit(lambda: gate.wait(30), Cancellation())
    with pytest.raises(RequestError, match="Too many requests"):
        session.worker.submit(lambda: None, Cancellation())

    async def first_line() -> bytes | None:
        line = asyncio.ensure_future(application.EffectsStream(session, entry).next_line())
        await asyncio.sleep(0)
        gate.set()
        return await line

    assert json.loads(asyncio.run(first_line()) or b"")["head"] == "x0.0"
    assert blocking.result(30)

"""The guard before the explorer: which requests reach the application, and with which headers."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

import pytest

from dragoman.explore.request_security import SECURITY_HEADERS, RequestGuard, is_loopback

OWN, OTHER = b"127.0.0.1:8023", b"evil.example:8023"
Headers = list[tuple[bytes, bytes]]


class StubApplication:
    """Answers every request with 200, and records the types of the scopes that reach it."""

    def __init__(self, headers: Headers | None = None) -> None:
        self.headers, self.scopes = headers or [], list[str]()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.scopes.append(scope["type"])
        await send({"type": "http.response.start", "status": 200, "headers": self.headers})
        await send({"type": "http.response.body", "body": b""})


def respond(
    headers: Headers, *, method: str = "GET", host: str = "127.0.0.1", app: Any = None
) -> dict[str, Any]:
    """Return the start of the response to a request."""
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {"type": "http", "method": method, "headers": headers}
    guard = RequestGuard(app or StubApplication(), host=host, port=8023)
    asyncio.run(guard(scope, None, send))  # type: ignore[arg-type]
    return sent[0]


def status(headers: Headers, **options: Any) -> int:
    return respond(headers, **options)["status"]


@pytest.mark.parametrize("hosts", [[OWN, OTHER], [OTHER, OWN], [OWN, OWN], []])
def test_a_request_must_have_one_host(hosts: list[bytes]) -> None:
    assert status([(b"host", OWN)]) == 200
    assert status([(b"Host" if at else b"host", host) for at, host in enumerate(hosts)]) == 403


@pytest.mark.parametrize(
    ("name", "good", "bad"),
    [
        (b"origin", b"http://" + OWN, b"http://" + OTHER),
        (b"sec-fetch-site", b"same-origin", b"cross-site"),
    ],
)
def test_a_post_must_not_have_two_origins(name: bytes, good: bytes, bad: bytes) -> None:
    assert status([(b"host", OWN), (name, good)], method="POST") == 200
    for values in ([good, bad], [bad, good], [good, good]):
        headers = [(b"host", OWN), *((name, value) for value in values)]
        assert status(headers, method="POST") == 403


@pytest.mark.parametrize("method", ["POST", "PUT", "PATCH", "DELETE", "OPTIONS"])
def test_only_reading_is_allowed_to_other_sites(method: str) -> None:
    headers = [(b"host", OWN), (b"origin", b"http://" + OTHER)]
    assert status(headers, method=method) == 403
    assert [status(headers, method=reading) for reading in ("GET", "HEAD")] == [200, 200]


def test_a_request_that_the_user_typed_is_accepted() -> None:
    assert status([(b"host", OWN), (b"sec-fetch-site", b"none")], method="POST") == 200


def test_a_bound_name_and_the_name_of_the_machine_are_accepted() -> None:
    machine = socket.gethostname().encode()
    for name, expected in ((b"box.lan", 200), (b"BOX.LAN", 200), (machine, 200), (b"lan", 403)):
        assert status([(b"host", name + b":8023")], host="Box.lan") == expected
    assert status([(b"host", b"box.lan:8023")]) == 403  # bound to the loopback address


def test_security_headers_replace_those_of_the_application() -> None:
    own = [(b"Content-Security-Policy", b"default-src *"), (b"etag", b"1")]
    found = respond([(b"host", OWN)], app=StubApplication(own))["headers"]
    assert found == [(b"etag", b"1"), *SECURITY_HEADERS]


def test_web_sockets_do_not_reach_the_application() -> None:
    app = StubApplication()
    guard = RequestGuard(app, host="127.0.0.1", port=8023)

    async def ignore(message: Any) -> None:
        pass

    for kind in ("websocket", "lifespan"):
        asyncio.run(guard({"type": kind, "headers": []}, None, ignore))  # type: ignore[arg-type]
    assert app.scopes == ["lifespan"]


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        ("127.0.0.1", True),
        ("127.0.0.2", True),  # all of 127/8 is the loopback network
        ("::1", True),
        ("[::1]", True),
        ("LocalHost", True),
        ("0.0.0.0", False),
        ("::", False),
        ("10.0.0.7", False),
        ("localhost.example", False),
    ],
)
def test_loopback_addresses(host: str, expected: bool) -> None:
    assert is_loopback(host) == expected


@pytest.mark.parametrize(("port", "accepted"), [(80, 200), (8023, 403)])
@pytest.mark.parametrize("host", [b"[::1]", b"localhost", b"127.0.0.1"])
def test_a_host_without_a_port_is_that_of_port_80(host: bytes, port: int, accepted: int) -> None:
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {"type": "http", "method": "GET", "headers": [(b"host", host)]}
    guard = RequestGuard(StubApplication(), host="127.0.0.1", port=port)
    asyncio.run(guard(scope, None, send))  # type: ignore[arg-type]
    assert sent[0]["status"] == accepted

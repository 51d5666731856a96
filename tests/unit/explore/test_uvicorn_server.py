"""The explorer's server on a real socket: addresses, slow clients, clients that leave, and
its end.
"""

from __future__ import annotations

import http.client
import json
import socket
import threading
import time
from collections.abc import Iterator

import pytest
from explorer_kit import StubPredictor

from dragoman.errors import ConfigError
from dragoman.explore import routes as application
from dragoman.explore import uvicorn_server as serving
from dragoman.explore.explorer_session import ExplorerSession
from dragoman.explore.model_thread import MAX_WAITING
from dragoman.explore.uvicorn_server import bind, make_server, page_url, quiet_logs

API = "/explore/api"


class RunningServer:
    """A server of a stub in a thread of its own."""

    def __init__(self) -> None:
        self.predictor = StubPredictor()
        self.session = ExplorerSession(self.predictor)
        self.socket = bind("127.0.0.1", 0)
        self.port = self.socket.getsockname()[1]
        started = threading.Event()
        quiet_logs()
        self.server = make_server(self.session, self.socket, started=started.set)
        self.thread = threading.Thread(target=self.server.run, kwargs={"sockets": [self.socket]})
        self.thread.start()
        assert started.wait(30)

    def post(self, path: str, body: object) -> tuple[int, bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
        connection.request(
            "POST", path, json.dumps(body), headers={"Content-Type": "application/json"}
        )
        answer = connection.getresponse()
        content = answer.read()
        connection.close()
        return answer.status, content

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout=30)

    def stop(self) -> None:
        self.predictor.gate.set()
        self.server.should_exit = True
        self.thread.join(30)
        assert not self.thread.is_alive()
        self.socket.close()


@pytest.fixture
def running(monkeypatch: pytest.MonkeyPatch) -> Iterator[RunningServer]:
    monkeypatch.setattr(serving, "HEADER_SECONDS", 0.3)
    monkeypatch.setattr(application, "BODY_SECONDS", 0.3)
    server = RunningServer()
    yield server
    server.stop()


def read_to_end(connection: socket.socket) -> bytes:
    """Read until the server closes the connection."""
    received = b""
    with connection:
        while True:
            try:
                part = connection.recv(65536)
            except ConnectionResetError:
                return received
            if not part:
                return received
            received += part


def request_head(running: RunningServer, path: str, length: int) -> bytes:
    return (
        f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1:{running.port}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {length}\r\n\r\n"
    ).encode()


def test_an_address_is_printed_for_people() -> None:
    for host, shown in (("127.0.0.1", "http://127.0.0.1:"), ("0.0.0.0", "http://127.0.0.1:")):
        with bind(host, 0) as bound:
            assert page_url(bound) == f"{shown}{bound.getsockname()[1]}/explore/"


def test_a_port_in_use_is_rejected_in_one_line() -> None:
    with bind("127.0.0.1", 0) as bound:
        port = bound.getsockname()[1]
        with pytest.raises(ConfigError, match=f"found {port} in use on 127.0.0.1; choose another"):
            bind("127.0.0.1", port)


@pytest.mark.parametrize("host", ["no.such.host.invalid", "192.0.2.7"])
def test_an_address_of_another_machine_is_rejected(host: str) -> None:
    with pytest.raises(ConfigError, match="--host must be an address of this machine"):
        bind(host, 0)


def test_requests_are_answered(running: RunningServer) -> None:
    status, content = running.post(f"{API}/explain", {"text": "ein Mann"})
    assert (status, json.loads(content)["target"]["text"]) == (200, "EIN MANN")


def test_a_silent_client_is_disconnected(running: RunningServer) -> None:
    assert read_to_end(running.connect()) == b""


def test_headers_that_trickle_are_disconnected(running: RunningServer) -> None:
    connection = running.connect()
    done = threading.Event()

    def trickle() -> None:
        for byte in b"GET /explore/ HTTP/1.1\r\nHost: 127.0.0.1\r\nX: " + b"y" * 10_000:
            try:
                connection.send(bytes([byte]))
            except OSError:
                return
            if done.wait(0.02):
                return

    sender = threading.Thread(target=trickle)
    sender.start()
    assert read_to_end(connection) == b""
    done.set()
    sender.join(30)


def test_long_headers_are_disconnected(running: RunningServer) -> None:
    connection = running.connect()
    connection.sendall(b"GET /explore/ HTTP/1.1\r\nHost: 127.0.0.1\r\n")
    try:
        for _ in range(100):
            connection.sendall(b"X: " + b"y" * 10_000)
    except OSError:
        pass  # it was closed while we wrote
    assert b"200 OK" not in read_to_end(connection)


def test_long_headers_are_disconnected_before_their_time_is_over(
    running: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serving, "HEADER_SECONDS", 60.0)
    connection = running.connect()
    connection.settimeout(10)
    connection.sendall(b"GET /explore/ HTTP/1.1\r\nX: ")
    try:
        for _ in range(9):
            connection.sendall(b"y" * 4096)
    except OSError:
        pass  # it was closed while we wrote
    assert read_to_end(connection) == b""


def test_a_second_request_has_as_much_time_for_its_headers(running: RunningServer) -> None:
    connection = running.connect()
    connection.settimeout(10)
    head = f"GET {API}/session HTTP/1.1\r\nHost: 127.0.0.1:{running.port}\r\n".encode()
    connection.sendall(head + b"\r\n")
    received = connection.recv(65536)
    assert received.startswith(b"HTTP/1.1 200 OK")
    connection.sendall(head)  # and no end
    assert b"HTTP/1.1" not in read_to_end(connection)


def test_a_body_that_trickles_is_rejected(running: RunningServer) -> None:
    connection = running.connect()
    connection.sendall(request_head(running, f"{API}/explain", 50) + b'{"te')
    answer = read_to_end(connection)
    assert answer.startswith(b"HTTP/1.1 408")
    assert b"must arrive in time" in answer
    assert b"\r\nconnection: close\r\n" in answer.lower()  # the rest of the body is not read
    assert not running.predictor.calls


def test_a_body_that_never_ends_is_cut(running: RunningServer) -> None:
    connection = running.connect()
    connection.sendall(
        f"POST {API}/explain HTTP/1.1\r\nHost: 127.0.0.1:{running.port}\r\n"
        "Content-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n".encode()
    )
    try:
        for _ in range(5000):
            connection.sendall(b"1000\r\n" + b" " * 4096 + b"\r\n")
    except OSError:
        connection.close()  # the server closed it after its answer, while we wrote
        return
    assert b" 413 " in read_to_end(connection)[:20]


@pytest.mark.parametrize(
    "raw", [b"\x16\x03\x01\x02\x00\x01", b"GET\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n", b"\x00" * 100]
)
def test_what_is_not_http_is_disconnected(
    running: RunningServer, raw: bytes, capfd: pytest.CaptureFixture[str]
) -> None:
    connection = running.connect()
    connection.sendall(raw)
    assert b"200 OK" not in read_to_end(connection)
    assert running.post(f"{API}/explain", {"text": "a"})[0] == 200
    assert "Traceback" not in capfd.readouterr().err


def test_client_that_leaves_frees_its_queue_slot(running: RunningServer) -> None:
    running.predictor.gate.clear()
    body = json.dumps({"text": "left"}).encode()
    pending = running.session.worker._pending
    for number in range(2 * MAX_WAITING):
        connection = running.connect()
        connection.sendall(request_head(running, f"{API}/explain", len(body)) + body)
        while len(pending) < 1 + bool(number) or not running.predictor.calls:
            time.sleep(0.005)
        connection.close()
        while len(pending) > 1:  # the first one runs on: a stub has no layers at which to stop
            time.sleep(0.005)
    running.predictor.gate.set()
    assert running.post(f"{API}/explain", {"text": "stays"})[0] == 200
    assert [text for text, _ in running.predictor.calls] == ["left", "stays"]


def test_effects_stop_when_the_client_leaves(running: RunningServer) -> None:
    _, content = running.post(f"{API}/explain", {"text": "ein Mann"})
    digest = json.loads(content)["digest"]
    running.predictor.num_heads = 10**9
    connection = running.connect()
    connection.sendall(request_head(running, f"{API}/e/{digest}/effects", 2) + b"{}")
    received = b""
    while b'"x0.3"' not in received:
        received += connection.recv(65536)
    connection.close()
    count = -1
    while running.predictor.heads_done != count:  # until it has stopped
        count = running.predictor.heads_done
        time.sleep(0.2)
    for _ in range(5):  # its queue slot is free again
        assert running.post(f"{API}/explain", {"text": "stays"})[0] == 200


def test_the_server_stops_while_the_model_runs(running: RunningServer) -> None:
    """Stopping does not wait for effects of which there are many more."""
    _, content = running.post(f"{API}/explain", {"text": "ein Mann"})
    running.predictor.num_heads = 10**9
    connection = running.connect()
    path = f"{API}/e/{json.loads(content)['digest']}/effects"
    connection.sendall(request_head(running, path, 2) + b"{}")
    assert connection.recv(100)
    running.stop()
    connection.close()

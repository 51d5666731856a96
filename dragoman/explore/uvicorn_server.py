"""Serving the explorer with uvicorn on one address, with deadlines for slow clients."""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
from collections.abc import Callable
from typing import Any

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from dragoman.errors import ConfigError
from dragoman.explore.explorer_session import ExplorerSession
from dragoman.explore.routes import build_app

HEADER_SECONDS = 10.0  # for the headers of a request to arrive
MAX_HEADER_BYTES = 32 * 1024
MAX_CONNECTIONS = 256
KEEP_ALIVE_SECONDS = 5
SHUTDOWN_SECONDS = 2


def bind(host: str, port: int) -> socket.socket:
    """Return a socket that is bound; raise ConfigError if the address is not free."""
    try:
        [(family, kind, protocol, _, address), *_] = socket.getaddrinfo(
            host.strip("[]"), port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
        bound = socket.socket(family, kind, protocol)
    except OSError as error:
        raise _address_error(host, error) from error
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
        bound.listen()
    except OSError as error:
        bound.close()
        if error.errno == errno.EADDRINUSE:
            raise ConfigError(
                [
                    f"--port must be free; found {port} in use on {host}; choose another, or "
                    "--port 0 for any free one"
                ]
            ) from error
        if error.errno == errno.EACCES:
            raise ConfigError(
                [
                    f"--port must be one that you may use; found {port}, which needs more rights; "
                    "choose one above 1023"
                ]
            ) from error
        raise _address_error(host, error) from error
    return bound


def _address_error(host: str, error: OSError) -> ConfigError:
    reason = error.strerror or type(error).__name__
    return ConfigError(
        [f"--host must be an address of this machine; found {host!r} ({reason}); leave it out"]
    )


def page_url(bound: socket.socket) -> str:
    """Return the address of the page behind a bound socket."""
    host, port = bound.getsockname()[:2]
    if host in ("0.0.0.0", "::"):
        host = "127.0.0.1" if host == "0.0.0.0" else "::1"
    name = f"[{host}]" if ":" in host else host
    return f"http://{name}:{port}/explore/"


def serve(
    session: ExplorerSession,
    bound: socket.socket,
    *,
    host: str = "127.0.0.1",
    started: Callable[[], None] = lambda: None,
) -> None:
    """Serve a session until SIGINT or SIGTERM, then close it; call `started` once it answers."""
    quiet_logs()
    server = make_server(session, bound, host=host, started=started)
    try:
        server.run(sockets=[bound])
    finally:
        session.close()
        bound.close()


def make_server(
    session: ExplorerSession,
    bound: socket.socket,
    *,
    host: str = "127.0.0.1",
    started: Callable[[], None] = lambda: None,
) -> uvicorn.Server:
    """Return the server of a session, which is not running yet."""
    config = uvicorn.Config(
        build_app(session, host=host, port=bound.getsockname()[1]),
        http=DeadlineProtocol,
        ws="none",
        loop="asyncio",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        date_header=True,
        proxy_headers=False,
        limit_concurrency=MAX_CONNECTIONS,
        timeout_keep_alive=KEEP_ALIVE_SECONDS,
        timeout_graceful_shutdown=SHUTDOWN_SECONDS,
    )
    return ExplorerServer(config, session, started)


def quiet_logs() -> None:
    """Keep uvicorn's own lines, which quote requests, out of the terminal."""
    for name in ("uvicorn", "uvicorn.error", "uvicorn.access", "asyncio"):
        logger = logging.getLogger(name)
        logger.addHandler(logging.NullHandler())
        logger.propagate = False


class ExplorerServer(uvicorn.Server):
    """A server that signals when it is ready, and cancels running jobs before it stops."""

    def __init__(
        self, config: uvicorn.Config, session: ExplorerSession, started: Callable[[], None]
    ) -> None:
        super().__init__(config)
        self._session, self._started = session, started

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start to listen."""
        await super().startup(sockets=sockets)
        if self.started:
            self._started()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Cancel running work, so that its connections end, and stop."""
        self._session.close()
        await super().shutdown(sockets=sockets)


class DeadlineProtocol(HttpToolsProtocol):
    """HTTP with a time limit and a size limit for the headers of each request.

    uvicorn itself waits forever for a client that sends its headers byte by byte, or nothing. The
    body has its own limits in the application, and the time between requests is the keep-alive
    time.
    """

    _header_timer: asyncio.TimerHandle | None = None
    _header_bytes = 0

    def connection_made(self, transport: Any) -> None:
        """Wait for the first request's headers for a limited time."""
        super().connection_made(transport)
        self._start_timer()

    def data_received(self, data: bytes) -> None:
        """Read a part of a request."""
        reads_headers = self.cycle is None or self.cycle.response_complete
        if reads_headers:
            if self._header_timer is None:
                self._start_timer()
            self._header_bytes += len(data)
        super().data_received(data)
        if self._header_timer is not None and self._header_bytes > MAX_HEADER_BYTES:
            self._close()

    def on_headers_complete(self) -> None:
        """Start the request: its headers arrived in time."""
        self._stop_timer()
        super().on_headers_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the timer."""
        self._stop_timer()
        super().connection_lost(exc)

    def _start_timer(self) -> None:
        self._header_bytes = 0
        self._header_timer = self.loop.call_later(HEADER_SECONDS, self._close)

    def _stop_timer(self) -> None:
        if self._header_timer is not None:
            self._header_timer.cancel()
            self._header_timer = None

    def _close(self) -> None:
        self._stop_timer()
        if not self.transport.is_closing():
            self.transport.close()

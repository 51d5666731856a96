"""Security of the served explorer: checks of Host and Origin, security headers, error responses.

The page has no accounts, so it must not be usable from elsewhere: names other than this machine's
are rejected (DNS rebinding), requests of other sites are rejected (Origin), nothing may be embedded
or read across origins, and scripts come from this server only. No text is logged.
"""

from __future__ import annotations

import ipaddress
import logging
import socket

from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from dragoman.explore.model_thread import WorkCancelledError
from dragoman.explore.request_parsing import RequestError

logger = logging.getLogger(__name__)

CONTENT_SECURITY_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'"
)
SECURITY_HEADERS = (
    (b"content-security-policy", CONTENT_SECURITY_POLICY.encode()),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-opener-policy", b"same-origin"),
    (b"cross-origin-resource-policy", b"same-origin"),
)


LOOPBACK_NAMES = ("127.0.0.1", "localhost", "[::1]")


BUG_SENTENCE = "The explorer failed here; this is a bug, please report it."


class RequestGuard:
    """The outermost layer: checks Host and Origin, adds headers, and answers what went wrong."""

    def __init__(self, app: ASGIApp, *, host: str, port: int) -> None:
        self._app, self._port = app, port
        self._names = set(LOOPBACK_NAMES)
        # An address literal cannot be rebound, so any is accepted where others may connect.
        self._accepts_addresses = not is_loopback(host)
        if self._accepts_addresses:
            self._names |= {host.lower(), socket.gethostname().lower()}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] != "http":
            if scope["type"] == "lifespan":
                await self._app(scope, receive, send)
            return
        started = False

        async def send_guarded(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                own = {name for name, _ in SECURITY_HEADERS}
                kept = [pair for pair in message.get("headers", ()) if pair[0].lower() not in own]
                message = {**message, "headers": [*kept, *SECURITY_HEADERS]}
            await send(message)

        try:
            rejection = self._rejection(scope)
            if rejection is not None:
                await error_response(rejection)(scope, receive, send_guarded)
            else:
                await self._app(scope, receive, send_guarded)
        except (ClientDisconnect, WorkCancelledError):
            return  # the client is gone
        except Exception as error:
            logger.error("%s", describe_bug(error))
            if not started:
                bug = RequestError(500, BUG_SENTENCE)
                await error_response(bug)(scope, receive, send_guarded)

    def _rejection(self, scope: Scope) -> RequestError | None:
        """Return why a request is rejected, or None."""
        headers = _single_headers(scope)
        host = headers.get(b"host")
        if host is None or not self._is_own_host(host):
            return RequestError(
                403, "The Host must be this server's address; open the address that it printed."
            )
        if scope["method"] in ("GET", "HEAD"):
            return None
        origin = headers.get(b"origin", f"http://{host}")
        if origin != f"http://{host}" or headers.get(b"sec-fetch-site", "same-origin") not in (
            "same-origin",
            "none",
        ):
            return RequestError(403, "Requests must come from the explorer's own page.")
        return None

    def _is_own_host(self, host: str) -> bool:
        name, separator, port = host.lower().rpartition(":")
        if not separator or "]" in port:
            name, port = host.lower(), "80"
        if port != str(self._port):
            return False
        return name in self._names or (self._accepts_addresses and _is_address(name))


def is_loopback(host: str) -> bool:
    """Whether only this machine can connect to a host that is bound."""
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name[1:-1] if name.startswith("[") else name)
    except ValueError:
        return False
    return True


def _single_headers(scope: Scope) -> dict[bytes, str]:
    """Return the headers; a name that occurs twice is rejected by an impossible value."""
    found: dict[bytes, str] = {}
    for name, value in scope["headers"]:
        key = name.lower()
        found[key] = "," if key in found else value.decode("latin-1")
    return found


def describe_bug(error: BaseException) -> str:
    """Return the type of an error and where it was raised; its message may quote a text."""
    trace, place = error.__traceback__, "unknown"
    while trace is not None:
        code = trace.tb_frame.f_code
        place = f"{code.co_filename.rpartition('/')[2]}:{trace.tb_lineno}"
        trace = trace.tb_next
    return f"the explorer failed: {type(error).__name__} at {place}; this is a bug"


def error_response(error: RequestError) -> Response:
    """Return an error as JSON with its status."""
    headers = {"cache-control": "no-store"}
    if error.retry_after is not None:
        headers["retry-after"] = str(error.retry_after)
    if error.status in (403, 408, 413):
        headers["connection"] = "close"  # the rest of the body is not read
    return JSONResponse({"error": error.sentence}, error.status, headers=headers)

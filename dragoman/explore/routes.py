"""Routes of the explorer as a Starlette application; `request_security.py` checks every request.

One request costs a bounded amount of memory and time. No text is logged.
"""

from __future__ import annotations

import asyncio
import contextvars
import hashlib
import json
import logging
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from importlib import resources
from typing import Any, NamedTuple, TypeVar

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import RedirectResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from dragoman.explore.explorer_session import ExplorerSession, StoredExplanation
from dragoman.explore.model_thread import (
    REQUEST_SECONDS,
    Cancellation,
    WorkCancelledError,
    timeout_error,
)
from dragoman.explore.request_parsing import (
    MAX_BODY_BYTES,
    RequestError,
    read_explain_request,
    read_json,
    read_region,
)
from dragoman.explore.request_security import (
    BUG_SENTENCE,
    RequestGuard,
    describe_bug,
    error_response,
)

logger = logging.getLogger(__name__)

BODY_SECONDS = 10.0  # for a whole body to arrive
GRACE_SECONDS = 1.0  # for work to stop by itself after its deadline, at the next layer
EFFECTS_SECONDS = 300.0  # of all heads together
MAX_STREAMS = 4  # effects that are computed at the same time
_DIGEST = re.compile(r"[0-9a-f]{64}")

ResultT = TypeVar("ResultT")


class StaticFile(NamedTuple):
    """A file of the page with its type and digest."""

    content: bytes
    media_type: str
    etag: str


def build_app(session: ExplorerSession, *, host: str = "127.0.0.1", port: int = 80) -> ASGIApp:
    """Return the application of a session that is served at this address."""
    routes = Routes(session)
    api = "/explore/api"
    explanation = f"{api}/e/{{digest}}"

    def route(
        path: str, endpoint: Callable[[Request], Awaitable[Response]], *methods: str
    ) -> Route:
        return Route(path, endpoint, methods=list(methods or ("GET",)))

    app = Starlette(
        routes=[
            route("/", _redirect),
            route("/explore", _redirect),
            route("/favicon.ico", _no_icon),
            route("/explore/", routes.index),
            route("/explore/static/{name:path}", routes.static),
            route(f"{api}/session", routes.session),
            route(f"{api}/explain", routes.explain, "POST"),
            route(explanation, routes.explanation),
            route(f"{explanation}/tensor/{{name}}", routes.tensor),
            route(f"{explanation}/branch", routes.branch, "POST"),
            route(f"{explanation}/off", routes.off, "POST"),
            route(f"{explanation}/attribute", routes.attribute, "POST"),
            route(f"{explanation}/effects", routes.effects, "POST"),
        ],
        exception_handlers={
            RequestError: _answer_request_error,
            HTTPException: _answer_http_error,
            Exception: _answer_bug,
        },
    )
    app.router.redirect_slashes = False
    return RequestGuard(app, host=host, port=port)


class Routes:
    """What each route answers."""

    def __init__(self, session: ExplorerSession) -> None:
        self._session = session
        self._files = dict(read_static_files())
        self._streams = 0

    async def index(self, request: Request) -> Response:
        """Return the page."""
        return _file_response(request, self._files["index.html"])

    async def static(self, request: Request) -> Response:
        """Return a file of the page by its name in the table; a request never becomes a path."""
        found = self._files.get(request.path_params["name"])
        if found is None:
            raise RequestError(404, "There is no such file.")
        return _file_response(request, found)

    async def session(self, request: Request) -> Response:
        """Return the model, the examples and the limits."""
        return _json_response(self._session.describe())

    async def explain(self, request: Request) -> Response:
        """Explain a text."""
        asked = read_explain_request(await _read_body(request))
        entry = await self._run(request, lambda: self._session.explain(asked))
        return _explanation_response(entry)

    async def explanation(self, request: Request) -> Response:
        """Return an explanation of this session."""
        entry = self._entry(request)
        etag = f'"{entry.digest}"'
        if _has_etag(request, etag):
            return Response(status_code=304, headers={"etag": etag})
        return _explanation_response(entry)

    async def tensor(self, request: Request) -> Response:
        """Return a region of a tensor as float32, little endian."""
        region = read_region(request.query_params)
        entry = self._entry(request)
        array = self._session.region(entry.digest, request.path_params["name"], region)
        shape = ",".join(map(str, array.shape))
        headers = {"x-shape": shape, "cache-control": "no-store"}
        return Response(array.tobytes(), headers=headers, media_type="application/octet-stream")

    async def branch(self, request: Request) -> Response:
        """Explain the text again with another token at a step."""
        entry, body = self._entry(request), await _read_body(request)
        found = await self._run(request, lambda: self._session.branch(entry, body))
        return _explanation_response(found)

    async def off(self, request: Request) -> Response:
        """Switch heads off."""
        entry, body = self._entry(request), await _read_body(request)
        return _json_response(await self._run(request, lambda: self._session.ablate(entry, body)))

    async def attribute(self, request: Request) -> Response:
        """Attribute the output to the input by another method."""
        entry, body = self._entry(request), await _read_body(request)
        return _json_response(
            await self._run(request, lambda: self._session.attribute(entry, body))
        )

    async def effects(self, request: Request) -> Response:
        """Stream the exact effect of every head, a line of JSON each."""
        entry = self._entry(request)
        await _read_body(request, may_be_empty=True)
        if self._streams >= MAX_STREAMS:
            raise RequestError(429, "Effects are being computed already.", retry_after=5)
        self._streams += 1
        stream = EffectsStream(self._session, entry)
        try:
            # The first line is awaited here, so that a rejection has its status.
            first = await _until_disconnect(request, stream.next_line(), stream.cancellation)
        except BaseException:
            self._close(stream)
            raise
        return ClosingResponse(
            stream.lines(first),
            media_type="application/x-ndjson",
            headers={"cache-control": "no-store"},
            close=lambda: self._close(stream),
        )

    def _close(self, stream: EffectsStream) -> None:
        stream.cancellation.cancel()
        self._streams -= 1

    def _entry(self, request: Request) -> StoredExplanation:
        digest = request.path_params["digest"]
        if not _DIGEST.fullmatch(digest):
            raise RequestError(404, "An explanation is named by its SHA-256; found another name.")
        return self._session.cache.get(digest)

    async def _run(self, request: Request, function: Callable[[], ResultT]) -> ResultT:
        """Run a function in the model's thread, as long as there is time and a client."""
        cancellation = Cancellation(REQUEST_SECONDS)
        future = asyncio.wrap_future(self._session.worker.submit(function, cancellation))
        return await _until_disconnect(request, future, cancellation)


class EffectsStream:
    """The exact effects of all heads as lines of JSON; each head is a separate job.

    Other requests run in between. The context keeps the generator's context variables from them.
    """

    def __init__(self, session: ExplorerSession, entry: StoredExplanation) -> None:
        self.cancellation = Cancellation(EFFECTS_SECONDS)
        self._effects, self._worker = session.effects(entry), session.worker
        self._context = contextvars.copy_context()

    async def next_line(self) -> bytes | None:
        """Return the next line, or None after the last."""
        future = self._worker.submit(
            lambda: next(self._effects, None),
            self.cancellation,
            context=self._context,
            is_bounded=False,
        )
        found = await asyncio.wrap_future(future)
        return (
            None if found is None else _dump({"head": found[0], "exact": float(found[1])}) + b"\n"
        )

    async def lines(self, line: bytes | None) -> AsyncIterator[bytes]:
        """Yield the lines from the first on; an error is the last line."""
        try:
            while line is not None:
                yield line
                line = await self.next_line()
        except RequestError as error:
            yield _dump({"error": error.sentence}) + b"\n"
        except WorkCancelledError:
            return
        except Exception as error:
            logger.error("%s", describe_bug(error))
            yield _dump({"error": BUG_SENTENCE}) + b"\n"


class ClosingResponse(StreamingResponse):
    """A streamed response that runs a function at its end, also if the client left."""

    def __init__(self, content: Any, *, close: Callable[[], None], **options: Any) -> None:
        super().__init__(content, **options)
        self._close = close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the response, then close."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._close()


async def _until_disconnect(
    request: Request, work: Awaitable[ResultT], cancellation: Cancellation
) -> ResultT:
    """Return the result of work; cancel it if the client leaves or its time is over."""
    running = asyncio.ensure_future(work)
    watch = asyncio.ensure_future(_wait_for_disconnect(request))
    seconds = cancellation.seconds_left() + GRACE_SECONDS
    try:
        await asyncio.wait({running, watch}, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        if running.done():
            return running.result()
        cancellation.cancel()
        running.cancel()
        if watch.done():
            raise ClientDisconnect
        raise timeout_error()
    except asyncio.CancelledError:
        cancellation.cancel()
        running.cancel()
        raise
    finally:
        watch.cancel()


async def _wait_for_disconnect(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _read_body(request: Request, *, may_be_empty: bool = False) -> dict[str, Any]:
    """Return the JSON object of a body, of bounded size and time."""
    content_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if request.headers.get("content-encoding", "identity").lower() != "identity":
        raise RequestError(400, "The body must not be compressed; found a Content-Encoding.")
    length = request.headers.get("content-length", "0")
    if not length.isascii() or not length.isdigit():
        raise RequestError(400, "Content-Length must be a number; found something else.")
    if int(length) > MAX_BODY_BYTES:
        raise _body_error()
    body = bytearray()
    try:
        async with asyncio.timeout(BODY_SECONDS):
            async for chunk in request.stream():
                body += chunk
                if len(body) > MAX_BODY_BYTES:
                    raise _body_error()
    except TimeoutError:
        raise RequestError(408, "The body must arrive in time; found it too slow.") from None
    if may_be_empty and not body:
        return {}
    # A form of another site cannot send this type without being asked by the browser first.
    if content_type != "application/json":
        raise RequestError(400, "The Content-Type must be application/json.")
    return read_json(bytes(body))


def _body_error() -> RequestError:
    return RequestError(413, f"A request must have at most {MAX_BODY_BYTES:,} bytes.")


def read_static_files() -> Iterator[tuple[str, StaticFile]]:
    """Yield what the page consists of by its path under static/, index.html included."""
    types = {".js": "text/javascript", ".css": "text/css", ".html": "text/html"}

    def walk(folder: Any, prefix: str) -> Iterator[tuple[str, StaticFile]]:
        for each in sorted(folder.iterdir(), key=lambda found: str(found.name)):
            name = f"{prefix}{each.name}"
            if each.is_dir():
                yield from walk(each, f"{name}/")
                continue
            kind = types.get(name[name.rfind(".") :])
            if kind is None:  # licences
                continue
            content = each.read_bytes()
            etag = f'"{hashlib.sha256(content).hexdigest()}"'
            yield name, StaticFile(content, f"{kind}; charset=utf-8", etag)

    yield from walk(resources.files("dragoman.explore") / "static", "")


def _dump(value: Any) -> bytes:
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()


def _json_response(value: Any) -> Response:
    return Response(
        _dump(value), media_type="application/json", headers={"cache-control": "no-store"}
    )


def _explanation_response(entry: StoredExplanation) -> Response:
    headers = {"etag": f'"{entry.digest}"', "cache-control": "no-cache"}
    return Response(entry.json, media_type="application/json", headers=headers)


def _file_response(request: Request, file: StaticFile) -> Response:
    headers = {"etag": file.etag, "cache-control": "no-cache"}
    if _has_etag(request, file.etag):
        return Response(status_code=304, headers=headers)
    return Response(file.content, headers={**headers, "content-type": file.media_type})


def _has_etag(request: Request, etag: str) -> bool:
    """Whether the client has this version already."""
    known = request.headers.get("if-none-match", "")
    return known.strip() == "*" or etag in [
        each.strip().removeprefix("W/") for each in known.split(",")
    ]


async def _answer_request_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestError), f"found {type(error).__name__}"
    return error_response(error)


async def _answer_http_error(request: Request, error: Exception) -> Response:
    """Answer an unknown path or method as every other error is answered."""
    assert isinstance(error, HTTPException), f"found {type(error).__name__}"
    sentences = {404: "There is nothing at this address.", 405: "This method is not allowed here."}
    sentence = sentences.get(error.status_code, "The request cannot be answered.")
    response = error_response(RequestError(error.status_code, sentence))
    response.headers.update(error.headers or {})
    return response


async def _answer_bug(request: Request, error: Exception) -> Response:
    return error_response(RequestError(500, BUG_SENTENCE))


async def _redirect(request: Request) -> Response:
    return RedirectResponse("/explore/", 307)


async def _no_icon(request: Request) -> Response:
    return Response(status_code=204)

"""The explorer as it is served, with a small real model behind it."""

from __future__ import annotations

import json
import threading
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

from translator_kit import CONFIG, TEXT, write_random_bundle

from dragoman.explore.explorer_session import ExplorerSession
from dragoman.explore.uvicorn_server import bind, make_server, page_url, quiet_logs
from dragoman.text.sentencepiece_tokenizer import train_tokenizers

SENTENCES = ("Ein Mann geht.", "Eine Frau steht!", "Zwei Kinder spielen?", "Ein Kind steht.")


def write_model(path: Path) -> Path:
    """Write a translation model with random weights."""
    return write_random_bundle(path, train_tokenizers(TEXT, TEXT, CONFIG.text))


class ServedExplorer:
    """A server in a thread of its own; `call` asks it as a script would, without a browser."""

    def __init__(self, session: ExplorerSession, path: Path) -> None:
        self.session, self.path = session, path
        quiet_logs()
        self._socket = bind("127.0.0.1", 0)
        self.url = page_url(self._socket)
        started = threading.Event()
        self._server = make_server(session, self._socket, started=started.set)
        self._thread = threading.Thread(target=self._server.run, kwargs={"sockets": [self._socket]})
        self._thread.start()
        assert started.wait(60)

    def call(self, path: str, body: Any = None) -> Any:
        """Return the answer of a route: JSON, or the lines of several."""
        status, content = self.ask(path, body)
        assert status == 200, content
        if path.endswith("/effects"):
            return [json.loads(line) for line in content.splitlines()]
        return json.loads(content)

    def ask(self, path: str, body: Any = None) -> tuple[int, bytes]:
        """Return the status and the content of an answer."""
        data = None if body is None else json.dumps(body).encode()
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(f"{self.url}api/{path}", data, headers)
        try:
            with urllib.request.urlopen(request, timeout=120) as answer:
                return answer.status, answer.read()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read()

    def close(self) -> None:
        """Stop the server."""
        self._server.should_exit = True
        self._thread.join(60)
        self._socket.close()

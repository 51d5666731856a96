"""`dragoman explore`: the explorer page of a model, served to this machine or as one file."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dragoman.cli.explain import add_branches_and_ablations, check_ablations, check_task
from dragoman.cli.options import (
    AblationsOption,
    BeamOption,
    BranchesOption,
    DeviceOption,
    LengthPenaltyOption,
    QuietOption,
    ToOption,
    check_model,
    default_model,
)
from dragoman.cli.terminal_output import print_note, print_result
from dragoman.errors import ConfigError, DataError

if TYPE_CHECKING:
    from dragoman.explain.explanation import Explanation

PORT = 8023
LOOPBACK = "127.0.0.1"
MAX_EXPLANATION_BYTES = 256 << 20  # of a stored explanation
_PACKAGES = ("starlette", "uvicorn", "httptools")  # of the extra `web`


def _check_model_or_none(context: typer.Context, path: Path | None) -> Path | None:
    if path is not None and " " in str(path) and not path.exists():  # explain takes a text there
        raise ConfigError(
            [f"MODEL must be a model directory; found {str(path)!r}; if it is a text, add --text"]
        )
    return None if path is None else check_model(context, path)


def explore(
    model: Annotated[
        Path | None,
        typer.Argument(
            metavar="MODEL",
            help="Model directory, of any task; by default the built-in translator.",
            show_default=False,
            callback=_check_model_or_none,
        ),
    ] = None,
    text: Annotated[
        str | None, typer.Argument(metavar="TEXT", help="Text to start with.", show_default=False)
    ] = None,
    text_option: Annotated[
        str | None, typer.Option("--text", help="Text to start with.", show_default=False)
    ] = None,
    json: Annotated[
        Path | None,
        typer.Option(
            "--json",
            metavar="FILE",
            help="Start with an explanation that `dragoman explain --json` wrote; needs no model.",
            show_default=False,
        ),
    ] = None,
    html: Annotated[
        Path | None,
        typer.Option(
            "--html",
            metavar="FILE",
            help="Write the page with this explanation as one self-contained file, instead of "
            "serving it.",
            show_default=False,
        ),
    ] = None,
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="Port to serve at; 0 for any free one.")
    ] = PORT,
    host: Annotated[
        str,
        typer.Option(
            help="Address to serve at. Another than this machine's own lets everyone in that "
            "network use the model and read what others explain."
        ),
    ] = LOOPBACK,
    open_: Annotated[
        bool | None,
        typer.Option(
            "--open/--no-open",
            help="Open the page in a browser; by default if there is a desktop.",
            show_default=False,
        ),
    ] = None,
    to: ToOption = None,
    beam: BeamOption = None,
    length_penalty: LengthPenaltyOption = None,
    branches: BranchesOption = 0,
    ablations: AblationsOption = "",
    device: DeviceOption = "auto",
    quiet: QuietOption = False,
) -> None:
    """Explore how a model came to its output, on a page that opens in a browser.

    The page is served to this machine only, until Ctrl-C; nothing is fetched from elsewhere and
    nothing is stored. With --html it is one file that opens from disk.
    """
    chosen = _choose_text(text, text_option)
    if model is None and json is None:
        model = default_model()
    _check_what(chosen, json, html)
    _check_branches_and_ablations(model, html, branches, ablations)
    if to is not None:
        _check_translator(model, to)
    if html is not None:
        from dragoman.storage.user_output_files import check_output_file

        check_output_file("--html", html, inputs=[each for each in (json, model) if each])
        explanation = (
            read_explanation(json)
            if json is not None
            else _explain_text(model, chosen, to, beam, length_penalty, branches, ablations, device)
        )
        _write_html(html, explanation)
        return
    require_web_extra()

    from dragoman.explore.request_parsing import MAX_BEAM, ExplainRequest, RequestError

    if beam is not None and beam > MAX_BEAM:
        raise ConfigError([f"--beam of the page is at most {MAX_BEAM}; found {beam}; lower it"])

    from dragoman.explore.request_security import is_loopback
    from dragoman.explore.uvicorn_server import bind, page_url, serve

    stored = None if json is None else read_explanation(json)
    with bind(host, port) as bound:  # before the model is loaded, which takes longer
        if not is_loopback(host):
            print_note(
                f"warning: serving at {host}: everyone who can reach it can use the model and read "
                "what others explain, without a password and unencrypted"
            )

        from dragoman.explore.explorer_session import (
            ExplorerSession,  # imports torch with the model
        )

        session = (
            ExplorerSession()
            if model is None
            else ExplorerSession.load(model, device=device, target_language=to)
        )
        if stored is not None:
            session.open(stored)
        elif chosen is not None or session.examples:  # a page without a text shows nothing
            text = session.examples[0] if chosen is None else chosen
            request = ExplainRequest(text=text, beam=beam, length_penalty=length_penalty)
            try:
                session.first = session.explain(request)
            except RequestError as error:
                if chosen is not None:
                    session.close()
                    raise ConfigError([error.sentence.rstrip(".")]) from error
        url = page_url(bound)

        def started() -> None:
            print_result(url)
            print_note("serving the page; press Ctrl-C to stop")
            if open_ or (open_ is None and has_desktop()):
                open_in_browser(url)

        serve(session, bound, host=host, started=started)


def _choose_text(argument: str | None, option: str | None) -> str | None:
    if argument is not None and option is not None:
        raise ConfigError(
            [
                "a text and --text exclude each other; "
                f"found {argument!r:.60} and {option!r:.60}; keep one"
            ]
        )
    chosen = argument if option is None else option
    if chosen is not None and not chosen.strip():
        raise ConfigError([f"a text to start with must hold words; found {chosen!r:.60}"])
    return chosen


def _check_translator(model: Path | None, to: str) -> None:
    """Raise ConfigError for --to without a translation model."""
    from dragoman.bundle.format import read_task

    task = "" if model is None else read_task(model)
    if task != "translate":
        found = f"a model of the task {task:.40}" if task else "no model"
        raise ConfigError([f"--to {to:.20} is for translation models; found {found}; leave it out"])


def _check_what(text: str | None, json: Path | None, html: Path | None) -> None:
    """Raise ConfigError unless the arguments name one thing to show."""
    if text is not None and json is not None:
        raise ConfigError(
            [f"a text and --json exclude each other; found {text!r:.60} and {json}; keep one"]
        )
    if html is not None and text is None and json is None:
        raise ConfigError(
            [
                "--html needs a text to explain, or --json with a stored explanation; found "
                'neither; write: dragoman explore MODEL --html out.html "text"'
            ]
        )


def _check_branches_and_ablations(
    model: Path | None, html: Path | None, branches: int, ablations: str
) -> None:
    """Raise ConfigError unless a file with its model's answers to them is written."""
    check_ablations(ablations)
    for option, value in (("--branches", branches), ("--ablations", ablations)):
        if value and (html is None or model is None):
            raise ConfigError(
                [
                    f"{option} needs --html and a model; found {option} {value!s:.40} without; "
                    "a served page computes on request"
                ]
            )
    if branches and model is not None:
        check_task(model, {"branches": branches})


def require_web_extra() -> None:
    """Raise ConfigError unless the packages of the server are installed."""
    for name in _PACKAGES:
        if importlib.util.find_spec(name) is None:
            raise ConfigError(
                [
                    f"serving the page needs the package {name}; found none; pip install "
                    "'dragoman[web]', or write the page as one file with --html"
                ]
            )


def _write_html(path: Path, explanation: Explanation) -> None:
    """Write the page as one self-contained file."""
    from dragoman.explore.html_export import export_html

    export_html(explanation, path, title=f"{explanation.text:.60} – Dragoman explorer")
    print_note(f"written to {path}")


def _explain_text(
    model: Path | None,
    text: str | None,
    to: str | None,
    beam: int | None,
    length_penalty: float | None,
    branches: int,
    ablations: str,
    device: str,
) -> Explanation:
    assert model is not None, "either a model or --json was given"
    assert text is not None, "either a text or --json was given"

    from dragoman.inference.predictors.catalogue import load  # imports torch

    predictor = load(model, device=device)
    given = {"beam": beam, "length_penalty": length_penalty, "target_language": to}
    options = {name: value for name, value in given.items() if value is not None}
    if hasattr(predictor, "read_arguments"):
        [text] = predictor.read_arguments([text])
    explanation: Explanation = predictor.explain(text, **options)
    return add_branches_and_ablations(predictor, explanation, branches, ablations).with_path(
        model, share=True
    )


def read_explanation(path: Path) -> Explanation:
    """Return a stored explanation; raise DataError for anything else."""
    from dragoman.data.compressed_input_streams import open_input_file
    from dragoman.explain.explanation import Explanation

    with open_input_file(path) as file:
        content = file.read(MAX_EXPLANATION_BYTES + 1)
    if len(content) > MAX_EXPLANATION_BYTES:
        raise DataError(
            f"{path} must be one explanation",
            found=f"more than {MAX_EXPLANATION_BYTES >> 20} MiB",
            fix="write it with dragoman explain --json",
        )
    lines = content.splitlines()
    if len(lines) > 1 and all(line.startswith(b"{") for line in lines):
        raise DataError(
            f"{path} must hold one explanation",
            found=f"{len(lines)} lines, each with one",
            fix="keep one line of it",
        )
    try:
        return Explanation.from_json(content)
    except DataError as error:
        raise DataError(f"{path}: {error.must}", found=error.found, fix=error.fix) from error


def has_desktop() -> bool:
    """Whether a browser would open in a window, not in the terminal or on another machine."""
    if os.environ.get("SSH_CONNECTION") or not sys.stdout.isatty():
        return False
    has_display = os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY")
    return sys.platform in ("darwin", "win32") or bool(has_display)


def open_in_browser(url: str) -> None:
    """Open an address in the browser, without waiting for it."""
    import threading
    import webbrowser

    threading.Thread(target=webbrowser.open, args=(url,), daemon=True).start()

"""The `dragoman` command: subcommands, error reporting and exit codes."""

from __future__ import annotations

import copy
import errno
import inspect
import logging
import os
import re
import shlex
import sys
import traceback
from collections.abc import Sequence
from typing import Annotated, Any

import typer

from dragoman._version import __version__
from dragoman.cli import (
    augment,
    average,
    compare_by_bootstrap,
    data_check_and_clean,
    demo,
    doctor,
    evaluate,
    explain,
    explore,
    export,
    generate,
    import_huggingface_model,
    info,
    plot,
    predict,
    recipes,
    score_log_probabilities,
    settings_reference,
    train,
    translate,
    tune_hyperparameters,
    verify_model_checksums,
)
from dragoman.cli.terminal_output import print_error, print_note, show_notes
from dragoman.errors import ConfigError, DragomanError, StoppedError, escape_unprintable
from dragoman.runtime.out_of_memory import is_out_of_memory

INTERRUPTED = 130  # a shell's exit code after Ctrl-C
_GIVEN_ONCE = ("model", "prompt", "regex")  # options of which a second value is an error
PIPE_CLOSED = 141  # a shell's exit code after SIGPIPE
OUT_OF_MEMORY = 71  # EX_OSERR

# typer does not export the parent of BadParameter, and vendors its own click since 0.20.
_UsageError: type[BaseException] = typer.BadParameter.__bases__[0]

# Newer typers report a value as pydantic does.
_VALUE_ERROR = re.compile(r"Invalid value for '([^']+)'.*?: Input should be (.+)")
_VALUE_RULES = {
    "greater than or equal to": "at least",
    "less than or equal to": "at most",
    "a valid integer.*": "a whole number",
    "a valid number.*": "a number",
}

# What help shows for a value by its type; older typers name the types text, integer and float.
_METAVARS = {
    "path": "PATH",
    "str": "TEXT",
    "text": "TEXT",
    "int": "N",
    "integer": "N",
    "float": "X",
}

HELP = (
    "Neural machine translation and other text models on PyTorch: train, translate, predict, "
    "evaluate, export and inspect models."
)

app = typer.Typer(
    name="dragoman",
    help=HELP,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for _module in (  # the first word of a module is its command
    train,
    tune_hyperparameters,
    translate,
    augment,
    predict,
    generate,
    score_log_probabilities,
    evaluate,
    compare_by_bootstrap,
    explain,
    plot,
    explore,
    info,
    export,
    average,
    verify_model_checksums,
    doctor,
    settings_reference,
    demo,
):
    app.command()(getattr(_module, _module.__name__.rpartition(".")[2].partition("_")[0]))
app.command("import")(import_huggingface_model.import_)
app.add_typer(data_check_and_clean.app)
app.add_typer(recipes.app)


@app.callback(invoke_without_command=True, help=HELP)
def common(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Show the version and exit.")] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
) -> None:
    """Handle the options of `dragoman` itself; subcommands follow."""
    if version:
        print(f"dragoman {__version__}")
        raise typer.Exit
    if context.invoked_subcommand is None:
        print(context.get_help())
        raise typer.Exit


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code; an error is one line on stderr."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    debug = _pop_debug_flag(arguments)
    _log_to_stderr()
    show_notes(True)
    try:
        command = build_command(_keep_named_command(app, arguments))
        result = command(arguments, prog_name="dragoman", standalone_mode=False)
        sys.stdout.flush()
    except BaseException as error:
        result = _report_error(error, arguments)
        if debug and not isinstance(error, SystemExit):
            traceback.print_exc()
    if result == INTERRUPTED:  # newer typers return it for Ctrl-C, older ones raise
        print_note("stopped")
    return result if isinstance(result, int) else 0


def _pop_debug_flag(arguments: list[str]) -> bool:
    """Remove --debug from the arguments, wherever it was typed, and return whether it was there."""
    end = arguments.index("--") if "--" in arguments else len(arguments)
    if "--debug" in arguments[:end]:
        arguments.remove("--debug")
        return True
    return bool(os.environ.get("DRAGOMAN_DEBUG"))


def _report_error(error: BaseException, arguments: Sequence[str]) -> int:
    """Print the error to stderr and return its exit code."""
    if isinstance(error, StoppedError) and not error.found:  # requested by the user: not an error
        print_note(str(error))
        return error.exit_code
    if isinstance(error, DragomanError):
        print_error(str(error))
        return error.exit_code
    if isinstance(error, _UsageError):
        return _report_usage_error(error, arguments)
    if isinstance(error, (KeyboardInterrupt, typer.Abort)):
        return INTERRUPTED
    # typer turns a closed pipe into SystemExit(1).
    if any(
        isinstance(each, OSError) and each.errno == errno.EPIPE
        for each in (error, error.__context__)
    ):
        # The interpreter flushes stdout at exit, which would raise again on the closed pipe.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return PIPE_CLOSED
    if isinstance(error, SystemExit):
        return error.code if isinstance(error.code, int) else int(bool(error.code))
    if isinstance(error, OSError):
        return _report_os_error(error)
    if is_out_of_memory(error):
        found = next(iter(str(error).splitlines()), type(error).__name__)[:120]
        fix = "lower --batch-size, train.batch_tokens or the size of the model"
        print_error(f"the model and its batch must fit into memory; found it full ({found}); {fix}")
        return OUT_OF_MEMORY
    traceback.print_exception(error)
    print_error(f"this is a bug in dragoman {__version__}; please report it with the lines above")
    return 1


def _report_usage_error(error: BaseException, arguments: Sequence[str]) -> int:
    """Print a usage error in one line, with the value found and the command whose help applies."""
    message = " ".join(str(getattr(error, "format_message", error.__str__)()).split()).rstrip(".")
    message = _reword_value_error(message)
    context = getattr(error, "ctx", None)
    if hint := _suggest_for_option(getattr(error, "option_name", None) or "", context):
        message = f"No such option: {getattr(error, 'option_name', '')}; {hint}"
    typed = next(
        (
            _option_value(option, arguments)
            for option in getattr(getattr(error, "param", None), "opts", ())
            if option in message
        ),
        None,
    )
    found = f"; found {typed!r}" if typed is not None and repr(typed) not in message else ""
    see = f"see {context.command_path if context is not None else 'dragoman'} --help"
    print_error(
        f"{message} S{see[1:]}"
        if message.endswith("?") and not found
        else f"{message}{found}; {see}"
    )
    return 2


def _suggest_for_option(option: str, context: Any) -> str:
    """Return a suggestion for an option of another toolkit: ours, or the setting; or ""."""
    from dragoman.config.root_config import find_settings
    from dragoman.config.setting_aliases import OPTION_BY_SYNONYM

    section, _, name = option.lstrip("-").replace("-", "_").rpartition(".")
    command = getattr(context, "command", None)
    known = {each for param in getattr(command, "params", ()) for each in param.opts}
    settings = find_settings(name, section) if name else []
    meant = [f"--{each.rpartition('.')[2].replace('_', '-')}" for each in settings]
    for ours in (OPTION_BY_SYNONYM.get(name, ""), *meant):
        if ours in known - {option}:
            return f"did you mean {ours}?"
    if settings and getattr(context, "info_name", "") in ("train", "tune"):
        first = settings[0].partition(" or ")[0]
        return f"it is a setting: --set {first}=VALUE"
    return ""


def _reword_value_error(message: str) -> str:
    """Return typer's message about an invalid value in the form of our own errors."""
    found = _VALUE_ERROR.fullmatch(message)
    if found is None:
        return message
    rule = found[2]
    for theirs, ours in _VALUE_RULES.items():
        rule = re.sub(theirs, ours, rule)
    return f"{found[1]} must be {rule}"


def _option_value(option: str, arguments: Sequence[str]) -> str | None:
    """Return the value typed last after an option, or None: a later value replaces an earlier."""
    value: str | None = None
    for argument, following in zip(arguments, [*arguments[1:], ""], strict=True):
        if argument == option or argument.startswith(f"{option}="):
            value = following if argument == option else argument.partition("=")[2]
    return value


def _report_os_error(error: OSError) -> int:
    """Print an OSError in one line and return the exit code of its kind."""
    place = f" ({error.filename})" if error.filename else ""
    found = f"{error.strerror or error}{place}"
    if isinstance(error, PermissionError):
        print_error(
            f"files must be readable and writable here; found {found}; change the permissions or "
            "choose another path"
        )
        return 77
    print_error(
        f"reading and writing must succeed; found {found}; check the disk and the path, then run "
        "the same command again"
    )
    return 74


def _log_to_stderr() -> None:
    """Log the library's messages to stderr, one per line; other loggers are left alone."""
    logger = logging.getLogger("dragoman")
    if not any(isinstance(handler, _StderrHandler) for handler in logger.handlers):
        logger.addHandler(_StderrHandler())
    logger.setLevel(logging.INFO)
    logger.propagate = False


class _StderrHandler(logging.Handler):
    """Write warnings as `dragoman: warning: ...` and other messages unchanged to stderr."""

    def emit(self, record: logging.LogRecord) -> None:
        """Write one record."""
        if record.levelno < logging.WARNING:
            print(escape_unprintable(record.getMessage(), lines=True), file=sys.stderr, flush=True)
        else:
            print_note(f"{record.levelname.lower()}: {record.getMessage()}")


def _keep_named_command(app: typer.Typer, arguments: Sequence[str]) -> typer.Typer:
    """Return the app with the command that the arguments start with alone, if they name one.

    Building all commands takes typer several times as long as building one.
    """
    named = [
        each
        for each in app.registered_commands
        if (each.name or getattr(each.callback, "__name__", None)) == next(iter(arguments), "")
    ]
    if not named:
        return app
    kept = copy.copy(app)
    kept.registered_commands, kept.registered_groups = named, []
    return kept


def build_command(app: typer.Typer) -> Any:
    """Return the command of an app with its help texts reformatted."""
    command = typer.main.get_command(app)
    _reformat_help(command)
    for each in [command, *getattr(command, "commands", {}).values()]:
        _reject_repetition(each)
    for each in getattr(command, "commands", {}).get("train", command).params:
        if each.name in train.TRIPLE_OPTIONS:
            _take_triples(each)
    return command


def _reject_repetition(command: Any) -> None:
    """Make a second --model, --prompt or --regex an error, where one is taken.

    Of other options the last one counts, so that those of a script or an alias can be overridden.
    """
    make_parser = command.make_parser

    def make_strict_parser(context: Any) -> Any:
        parser = make_parser(context)
        parse = parser.parse_args

        def parse_args(args: list[str]) -> Any:
            found = parse(args)
            for each in command.params:
                if each.name in _GIVEN_ONCE and not each.multiple and found[2].count(each) > 1:
                    context.fail(f"{each.opts[0]} is given at most once here; leave out the others")
            return found

        parser.parse_args = parse_args
        return parser

    command.make_parser = make_strict_parser


def _take_triples(option: Any) -> None:
    """Make a repeatable option take three values each time; the command gets all in one list.

    typer declares options of several values, and repeatable ones, but not both at once.
    """

    def join(context: Any, triples: Sequence[Sequence[str]] | None) -> list[str]:
        for triple in triples or ():
            if any(each.startswith("--") for each in triple) and not context.resilient_parsing:
                name = option.opts[0]
                raise ConfigError(
                    [
                        f"{name} needs languages and two files; found {name} {shlex.join(triple)}; "
                        f"write {name} de-en FILE.de FILE.en, or pass one file by --pairs"
                    ]
                )
        return [part for triple in triples or () for part in triple]

    option.nargs = 3
    option.process_value = join


def _option_metavar(option: Any, context: Any) -> str | None:
    """Return what help shows for an option's value; None for typer's own word."""
    if getattr(option, "is_flag", False):
        return ""  # newer typers write <bool>, as if a flag took a value
    newer = getattr(option, "display_type_rich", None)  # <int range>, <list[Path]>
    shown = newer(ctx=context) if newer else option.type.name
    words = re.findall(r"[a-z]+", str(shown).lower().replace("list[", ""))
    return _METAVARS.get(words[0]) if words else None


def _reformat_help(command: Any) -> None:
    """Reformat the help of a command and of its subcommands."""
    if command.help:
        # typer keeps line breaks after the first paragraph; rejoin them, so that the terminal
        # wraps.
        command.help = "\n\n".join(
            " ".join(each.split()) for each in inspect.cleandoc(command.help).split("\n\n")
        )
    params = command.get_params

    def plain_params(context: Any) -> list[Any]:
        found: list[Any] = params(context)
        for each in found:
            if each.param_type_name == "argument":
                each.display_type_rich = lambda ctx: ""  # newer typers write <path> after MODEL
            elif each.metavar is None:
                each.metavar = _option_metavar(each, context)
        return found

    command.get_params = plain_params
    for each in getattr(command, "commands", {}).values():
        _reformat_help(each)

"""Seeded generator of hostile settings: texts for `--set`, and files for `--config`."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

ESCAPES = "\x1b]0;owned\x07\x1b[31m\x9b31m\u202eevil\u2066\r"
_ALIASES = "a: &a [x, x, x]\n" + "\n".join(
    f"{chr(98 + n)}: &{chr(98 + n)} [*{chr(97 + n)}, *{chr(97 + n)}]" for n in range(20)
)

# YAML scalars that parse to another type than they look like, or to one no reader expects.
TEXTS = [
    "2001-99-99", "2001-12-14", "2001-12-14t21:59:43.10-05:00", "9999-99-99 99:99:99", "0b_", "0b",
    "0x", "0x_", "0o_", "0_", "_", "1_000", "9" * 5000, "-" + "9" * 5000, "0x" + "f" * 5000,
    "1e" + "9" * 400, "1e400", "-1e400", "1e-400", ".nan", "-.inf", ".inf", "nan", "inf",
    "[" * 100, "[" * 100_000, "{" * 100_000, "[" * 500 + "]" * 500, "{a: " * 500 + "1" + "}" * 500,
    "(" * 100_000, "!!python/object/apply:os.system ['touch owned']", "!!python/name:os.system",
    "!!binary not-base64!", "!!binary aGk=", "!!set {a, b}", "!!omap [a: 1, a: 2]",
    "!!pairs [a: 1]", "!!timestamp x", "!!int x", "!!float x", "!!bool x", "!!null x", "!!int ''",
    "!!float ''", "!!map x", "!!seq x", "!!str [a]", "!unknown x", "!<tag:yaml.org,2002:int> 5x",
    "&a [*a]", "*a", "&a x", "<<: 1", "{<<: {a: 1}}", "{<<: [1]}", "{<<: [{a: 1}, {a: 2}]}",
    "{[1]: 2}", "{{a: 1}: 2}", "{1: 2}", "{a: 1, a: 2}", "{null: 1}", "? x", "? [a]\n: b",
    "- - - -", "%YAML 9.9", "%TAG ! x", "--- a\n--- b", "...", "--- ", "| ", ">", "|9", "'", '"',
    '"\\x"', '"\\ud800"', '"\\uZZZZ"', '"\\U00110000"', "@", "`", "%", "#", ",", ":", "- ", "?",
    "\t", " ", "\n", "\ufeff", "\u2028", "\x00", "a\x00b", "\x07", ESCAPES, "\ud800", "\udcff",
    "\U0010ffff", "\uffff", "a" * 1_000_000, " " * 200_000, "true", "yes", "on", "off", "~",
    "null", "1:30:59", "1:99999999999999999999", "190:20:30.15", "99:" * 50_000 + "1",
    "1" + ":1" * 300, "0." + "0" * 5000 + "1", "+1", "--1", "1.5", "-0", "-0.0", "٣", "²", "1٣",
    "½", "[1, [2]]", "[null]", "[true]", "[1.5]", "{}", "[]", "[[]]", "[{}]",
    "[transformer, {a: 1}]", "transformer*" + "9" * 5000, "transformer*-1", "transformer*٣",
    "transformer*²", "transformer" + " " * 200_000 + "!", "transformer(" + " " * 200_000 + "*",
    "lstm(layers=1000)*1000", "[lstm(layers=1000)*1000]", "transformer" + "(" * 100_000,
    "[" + "transformer(, " * 20_000 + "]", "transformer(heads=" + "9" * 5000 + ")",
    "transformer(heads=nan)", "transformer(heads=1e999)", "transformer(dropout=nan)",
    "transformer(" + "a=1," * 30_000 + ")", "transformer*1_0", "transformer*0x10",
    "../../etc/passwd", "/dev/zero", "/dev/stdin", "con", "$HOME", "~root",
]  # fmt: skip
PATHS = [
    "model.width", "model.encoder", "model.decoder", "model.dropout", "model.norm",
    "model.tie_embeddings", "model.scale_embeddings", "text.vocab_size", "text.tokenizer",
    "text.shared_vocab", "text.character_coverage", "data.src", "data.src_lang", "data.src_field",
    "data.cache_dir", "train.steps", "train.learning_rate", "train.seed", "train.precision",
    "train.device", "train.compile", "train.time_budget", "train.threads", "decode.beam",
    "decode.length_penalty",
]  # fmt: skip
WHOLE = [
    "", "model", "model.", ".width=1", "=", "==", "model.width", "model.width=", "=1",
    "model..width=1", "model.width.x=1", "model width=1", " model.width = 16 ", "MODEL.WIDTH=16",
    "model.__class__=1", "model.__init__=1", "__class__.x=1", "recipe=x", "recipe.x=1",
    f"{ESCAPES}.x=1", f"model.{ESCAPES}=1", "\ud800.x=1", "model.\udcff=1", "x" * 100_000 + ".y=1",
    "model." + "x" * 100_000 + "=1", "." * 100_000 + "=1", "model.encoder.0=self",
    "model={width: 16}", "train=null",
]  # fmt: skip
_MANY = "".join(f"  unknown{number}: 1\n" for number in range(30_000))
FILES: dict[str, bytes] = {
    "empty": b"",
    "only a comment": b"# nothing\n",
    "a list": b"- a\n- b\n",
    "a number": b"5\n",
    "a date": b"2001-99-99\n",
    "UTF-16": "model:\n  width: 16\n".encode("utf-16"),
    "UTF-32": "model:\n  width: 16\n".encode("utf-32"),
    "UTF-16 without a mark": "model:\n  width: 16\n".encode("utf-16-le"),
    "Latin-1": "data:\n  src: café\n".encode("latin-1"),
    "a byte order mark": b"\xef\xbb\xbfmodel:\n  width: 16\n",
    "NUL bytes": b"model:\x00\n  width: 16\n",
    "tabs": b"model:\n\twidth: 16\n",
    "an alias": b"a: &a [1]\nb: *a\n",
    "many aliases": _ALIASES.encode(),
    "an anchor in itself": b"a: &a [*a]\n",
    "a merge key": b"model:\n  <<: {width: 16}\n",
    "a merge of a number": b"model:\n  <<: 5\n",
    "a tag": b"model: !!python/object/apply:os.system ['touch owned']\n",
    "a key twice": b"model:\n  width: 16\n  width: 32\n",
    "a section twice": b"model:\n  width: 16\nmodel:\n  width: 32\n",
    "a key that is a number": b"5:\n  width: 16\n",
    "a key that is a list": b"? [a, b]\n: 1\n",
    "a key that is a date": b"model:\n  2001-99-99: 1\n",
    "a key that is null": b"~: 1\n",
    "a setting that is a list": b"model:\n  - width\n",
    "30,000 unknown settings": b"model:\n" + _MANY.encode(),
    "30,000 unknown sections": _MANY.encode().replace(b"  ", b""),
    "a section of a long name": b"x" * 500_000 + b": 1\n",
    "deep brackets": b"model: " + b"[" * 300_000 + b"\n",
    "deep indentation": b"".join(b" " * n + b"a:\n" for n in range(1000)),
    "deep dashes": b"- " * 300_000 + b"x\n",
    "a long line": b"model: {width: " + b"1" * 900_000 + b"}\n",
    "more than it may have": b"# \n" * 600_000,
    "noise": bytes(range(256)) * 20,
    "several documents": b"model:\n  width: 16\n---\nmodel:\n  width: 32\n",
    "a directive": b"%YAML 9.9\n---\nmodel:\n  width: 16\n",
    "escapes": f"{json.dumps(ESCAPES)}: 1\n".encode(),
    "an escape in a recipe": f"recipe: {json.dumps(ESCAPES)}\n".encode(),
    "a recipe that is a list": b"recipe: [tiny]\n",
    "a recipe that is an object": b"recipe: {a: 1}\n",
    "a recipe that is a date": b"recipe: 2001-12-14\n",
    "surrogates": b'data:\n  src: "\\ud800"\n',
    "a JSON file": b'{"model": {"width": 16}}',
    "JSON with a million brackets": b'{"a":' * 100_000,
    "a literal": b"model: |\n" + b"  x\n" * 100_000,
    "a question": b"? " * 100_000,
    "quotes": b'model: "' + b"x\n" * 100_000,
}
PLACES = (
    "missing",
    "a pipe",
    "a folder",
    "an endless device",
    "a terminal",
    "a link to itself",
    "a link to a pipe",
    "a terabyte",
    "NUL",
)


class Case(NamedTuple):
    """One hostile input, and the command that reads it."""

    name: str
    prepare: Callable[[Path], None]
    command: Callable[[Path], list[str]]


def generate(count: int, seed: int) -> Iterator[Case]:
    """Yield `count` cases: all handwritten ones if they fit, then random texts."""
    cases = [*_files(), *(_override(text) for text in WHOLE)]
    rng = random.Random(f"settings {seed}")
    cases += [_override(f"{rng.choice(PATHS)}={text}") for text in TEXTS]
    cases += [
        _file(
            f"{text!r:.40} in a file", f"model:\n  width: {text}\n".encode("utf-8", "surrogatepass")
        )
        for text in TEXTS
    ]
    rng.shuffle(cases)
    yield from cases[:count]
    for _ in range(count - len(cases)):
        value = rng.choice(TEXTS) if rng.random() < 0.3 else _chance(rng)
        yield (
            _override(f"{rng.choice(PATHS)}={value}")
            if rng.random() < 0.7
            else _file("by chance", _chance(rng).encode("utf-8", "replace"))
        )


def _chance(rng: random.Random) -> str:
    """Put words of YAML together at random."""
    words = [
        "[",
        "]",
        "{",
        "}",
        ":",
        ": ",
        "-",
        "- ",
        ",",
        "&a ",
        "*a",
        "!!int ",
        "!!",
        "|",
        ">",
        "'",
        '"',
        "#",
        "%",
        "@",
        "\n",
        "\n  ",
        "\t",
    ]
    words += [
        "model",
        "width",
        "transformer",
        "(",
        ")",
        "*",
        "=",
        "1",
        "0",
        "9" * 30,
        "1e9",
        ".",
        "_",
        "0x",
        "0b",
        "0o",
        "~",
        "true",
        "<<",
        "?",
        "2001-12-14",
    ]
    words += ["\x00", "\x1b", "\x85", "\u202e", "\ud800", "é", "\U0001f600"]
    return "".join(rng.choice(words) for _ in range(rng.randint(1, 12)))


def _train(case_dir: Path, *more: str) -> list[str]:
    return [
        "train",
        "--out",
        str(case_dir / "target"),
        "--src",
        "missing.src",
        "--tgt",
        "missing.tgt",
        *more,
    ]


def _override(text: str) -> Case:
    return Case(
        f"--set {text!r:.60}",
        lambda case_dir: None,
        lambda case_dir: _train(case_dir, "--set", text),
    )


def _file(name: str, data: bytes) -> Case:
    def prepare(case_dir: Path) -> None:
        (case_dir / "config.yaml").write_bytes(data)

    return Case(
        f"--config: {name}",
        prepare,
        lambda case_dir: _train(case_dir, "--config", str(case_dir / "config.yaml")),
    )


def _files() -> Iterator[Case]:
    for name, data in FILES.items():
        yield _file(name, data)
    for what in PLACES:
        yield Case(
            f"--config: {what}",
            lambda case_dir, what=what: _put(case_dir / "config.yaml", what),
            _config_command(what),
        )


def _config_command(what: str) -> Callable[[Path], list[str]]:
    name = "con\0fig.yaml" if what == "NUL" else "config.yaml"
    return lambda case_dir: _train(case_dir, "--config", str(case_dir / name))


def _put(path: Path, what: str) -> None:
    """Put something that is no file of settings in its place."""
    if what in ("a pipe", "a link to a pipe"):
        os.mkfifo(path if what == "a pipe" else path.parent / "outside" / "pipe")
    if what == "a link to a pipe":
        path.symlink_to(path.parent / "outside" / "pipe")
    elif what == "a folder":
        path.mkdir()
    elif what == "a terabyte":
        path.touch()
        os.truncate(path, 1 << 40)
    elif what in ("an endless device", "a terminal", "a link to itself"):
        path.symlink_to(
            {
                "an endless device": "/dev/zero",
                "a terminal": "/dev/tty",
                "a link to itself": path.name,
            }[what]
        )

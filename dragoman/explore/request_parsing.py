"""Parsing of the explorer's requests: every value has a type, a range and a sentence.

`RequestGuard` in `request_security.py` checks Host and Origin.

What arrives over HTTP is untrusted. A request becomes one of the dataclasses below or a
`RequestError`, whose sentence is the answer; nothing else of it reaches a model.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

from dragoman.errors import escape_unprintable

MAX_BODY_BYTES = 128 * 1024
MAX_TEXT_CHARS = 4_000
MAX_TOKENS = 512  # of a source or a forced prefix: attention is quadratic in it
MAX_BEAM = 16
MAX_HEADS = 512  # in one list of heads to switch off
MAX_LENGTH_PENALTY = 5.0
MAX_STEP = 4_096
METHODS = (
    "attention_x_gradient",
    "input_x_gradient",
    "integrated_gradients",
    "value_zeroing",
    "occlusion",
)
REGION_CELLS = 4_000_000  # float32 values of one tensor region: 16 MB

_MAX_ID = 2**31 - 1
# A head (x3.2), or another part that can be switched off (memory, words, seed.1).
_HEAD = re.compile(r"[a-z][a-z0-9_]{0,31}(\.\d{1,4})?")
_RANGE = re.compile(r"(\d{1,7})-(\d{1,7})")
_FORBIDDEN = re.compile("[\x00\ud800-\udfff]")


class RequestError(Exception):
    """A request that is rejected: an HTTP status and one sentence."""

    def __init__(self, status: int, sentence: str, *, retry_after: int | None = None) -> None:
        super().__init__(sentence)
        self.status = status
        self.sentence = escape_unprintable(sentence, most=600)
        self.retry_after = retry_after  # seconds, of the header Retry-After


@dataclass(frozen=True, kw_only=True, slots=True)
class ExplainRequest:
    """A text to explain and how to decode it; None is the model's own setting."""

    text: str
    beam: int | None = None
    length_penalty: float | None = None
    prefix: str = ""
    prefix_ids: tuple[int, ...] = ()
    reference: str | None = None
    off: tuple[str, ...] = ()
    target_language: str | None = None

    def options(self) -> dict[str, Any]:
        """Return the options of `explain` that differ from the model's own settings."""
        given = {
            "beam": self.beam,
            "length_penalty": self.length_penalty,
            "prefix": self.prefix or None,
            "prefix_ids": list(self.prefix_ids) or None,
            "reference": self.reference,
            "off": list(self.off) or None,
            "target_language": self.target_language,
        }
        return {name: value for name, value in given.items() if value is not None}


@dataclass(frozen=True, slots=True)
class Region:
    """A part of a tensor: one head or all, and ranges of queries and keys, ends included."""

    head: int | None
    queries: tuple[int, int] | None
    keys: tuple[int, int] | None


def read_json(body: bytes) -> dict[str, Any]:
    """Return the JSON object of a body; raise RequestError for anything else."""

    def reject_constant(name: str) -> None:
        raise ValueError(name)

    try:
        value = json.loads(body.decode("utf-8"), parse_constant=reject_constant)
    except (ValueError, RecursionError):  # UnicodeDecodeError is a ValueError
        raise RequestError(400, "The body must be JSON in UTF-8; found something else.") from None
    if not isinstance(value, dict):
        raise RequestError(
            400, f"The body must be a JSON object; found {_type_name(value)}; write {{…}}."
        )
    return value


def read_explain_request(body: Mapping[str, Any]) -> ExplainRequest:
    """Return a checked request of `explain`."""
    _reject_unknown(body, set(ExplainRequest.__dataclass_fields__))
    text = _read_text(body, "text")
    if not text.strip():
        raise RequestError(400, "The text must hold at least one character; found none.")
    request = ExplainRequest(
        text=text,
        beam=_optional(body, "beam", lambda name: _read_int(body, name, 1, MAX_BEAM)),
        length_penalty=_optional(body, "length_penalty", lambda name: _read_penalty(body, name)),
        prefix=_optional(body, "prefix", lambda name: _read_text(body, name)) or "",
        prefix_ids=_optional(body, "prefix_ids", lambda name: _read_ids(body, name)) or (),
        reference=_optional(body, "reference", lambda name: _read_text(body, name)) or None,
        off=_optional(body, "off", lambda name: _read_heads(body, name)) or (),
        target_language=_optional(body, "target_language", lambda name: _read_text(body, name))
        or None,
    )
    if request.prefix and request.prefix_ids:
        raise RequestError(400, "prefix and prefix_ids exclude each other; found both; keep one.")
    return request


def read_branch_request(body: Mapping[str, Any], *, num_steps: int) -> tuple[int, int]:
    """Return the step and the token id of a branch."""
    _reject_unknown(body, {"step", "token"})
    if num_steps < 1:
        raise RequestError(400, "This explanation has no decoding step from which to branch.")
    return _read_int(body, "step", 0, num_steps - 1), _read_int(body, "token", 0, _MAX_ID)


def read_off_request(
    body: Mapping[str, Any], *, sites: Mapping[str, int], switches: Collection[str] = ()
) -> list[str]:
    """Return what to switch off: heads, or other parts that are listed in `switches`.

    `sites` has the number of heads of each site.
    """
    _reject_unknown(body, {"heads"})
    heads = list(_read_heads(body, "heads"))
    for head in heads:
        site, _, number = head.rpartition(".")
        if head in switches or (number.isdigit() and int(number) < sites.get(site, 0)):
            continue
        known = f"{site}.0 to {site}.{sites[site] - 1}" if sites.get(site) else ""
        known = known or ", ".join([*sites, *switches][:12]) or "no attention"
        raise RequestError(
            400, f"heads must be heads of this model; found {head!r}; it has {known}."
        )
    return heads


def read_attribute_request(
    body: Mapping[str, Any], *, num_steps: int = 0
) -> tuple[str, int | None]:
    """Return the attribution method, and the step of the one token that is attributed or None."""
    _reject_unknown(body, {"method", "step"})
    method = body.get("method")
    if not isinstance(method, str) or method not in METHODS:
        found = repr(method) if isinstance(method, str) else _type_name(method)
        raise RequestError(400, f"method must be one of {', '.join(METHODS)}; found {found:.60}.")
    return method, _read_int(body, "step", 0, num_steps - 1) if "step" in body else None


def read_region(query: Mapping[str, str]) -> Region:
    """Return the region that a query string names: `h=2&q=0-63&k=0-63`."""
    _reject_unknown(query, {"h", "q", "k"})
    head = query.get("h")
    if head is not None and not re.fullmatch(r"\d{1,4}", head):
        raise RequestError(400, f"h must be the number of a head; found {head!r:.40}.")
    return Region(
        None if head is None else int(head),
        *(None if query.get(name) is None else _read_range(name, query[name]) for name in "qk"),
    )


def _read_range(name: str, written: str) -> tuple[int, int]:
    found = _RANGE.fullmatch(written)
    if not found or int(found[1]) > int(found[2]):
        raise RequestError(400, f"{name} must be a range such as 0-63; found {written!r:.40}.")
    return int(found[1]), int(found[2])


def _reject_unknown(body: Mapping[str, Any], known: set[str]) -> None:
    for name in body:
        if name not in known:
            raise RequestError(
                400, f"Fields must be among {', '.join(sorted(known))}; found {name!r:.60}."
            )


def _optional(body: Mapping[str, Any], name: str, read: Callable[[str], Any]) -> Any:
    """Return a value, or None where it is left out or null."""
    return None if body.get(name) is None else read(name)


def _read_text(body: Mapping[str, Any], name: str) -> str:
    value = body.get(name)
    if not isinstance(value, str):
        raise RequestError(400, f"{name} must be a string; found {_type_name(value)}.")
    if len(value) > MAX_TEXT_CHARS:
        raise RequestError(
            413,
            f"{name} must have at most {MAX_TEXT_CHARS:,} characters; found {len(value):,}; "
            "explain a part of it.",
        )
    if _FORBIDDEN.search(value):
        raise RequestError(
            400, f"{name} must be Unicode text; found a NUL or half of a surrogate pair."
        )
    return value


def _read_int(body: Mapping[str, Any], name: str, low: int, high: int) -> int:
    value = body.get(name)
    if type(value) is not int or not low <= value <= high:
        found = str(value) if type(value) is int else _type_name(value)
        raise RequestError(
            400, f"{name} must be an integer from {low} to {high}; found {found:.40}."
        )
    return value


def _read_penalty(body: Mapping[str, Any], name: str) -> float:
    value = body.get(name)
    if type(value) not in (int, float) or not (
        math.isfinite(value) and 0 <= value <= MAX_LENGTH_PENALTY  # type: ignore[arg-type, operator]
    ):
        found = str(value) if type(value) in (int, float) else _type_name(value)
        raise RequestError(
            400, f"{name} must be a number from 0 to {MAX_LENGTH_PENALTY:g}; found {found:.40}."
        )
    return float(value)  # type: ignore[arg-type]


def _read_ids(body: Mapping[str, Any], name: str) -> tuple[int, ...]:
    value = body.get(name)
    if (
        not isinstance(value, list)
        or len(value) > MAX_TOKENS
        or not all(type(each) is int and 0 <= each <= _MAX_ID for each in value)
    ):
        raise RequestError(400, f"{name} must be a list of at most {MAX_TOKENS} token ids.")
    return tuple(value)


def _read_heads(body: Mapping[str, Any], name: str) -> tuple[str, ...]:
    value = body.get(name)
    if not isinstance(value, list) or len(value) > MAX_HEADS:
        raise RequestError(400, f"{name} must be a list of at most {MAX_HEADS} heads.")
    for each in value:
        if not isinstance(each, str) or not _HEAD.fullmatch(each):
            found = repr(each) if isinstance(each, str) else _type_name(each)
            raise RequestError(400, f"{name} must be heads such as x3.2; found {found:.40}.")
    return tuple(dict.fromkeys(value))


def _type_name(value: object) -> str:
    """Return the name of a value's JSON type."""
    if value is None:
        return "nothing"
    if isinstance(value, bool):
        return "true or false"
    names = {dict: "an object", list: "a list", str: "a string", int: "a number", float: "a number"}
    return names.get(type(value), "another type")

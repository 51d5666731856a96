"""Tag schemes: spans by conlleval's rules, conversion, detection and legal sequences."""

from __future__ import annotations

import itertools
import random

import pytest

from dragoman.text.tag_schemes import (
    SchemeDetector,
    Span,
    allowed_pairs,
    convert_tags,
    find_spans,
    write_tags,
)


def random_spans(draw: random.Random, length: int) -> list[Span]:
    """Draw spans that do not overlap."""
    spans, position = [], 0
    while position < length:
        end = min(length, position + draw.randint(1, 3))
        if draw.random() < 0.6:
            spans.append(Span(position, end, draw.choice(["NP", "VP"])))
        position = end
    return spans


@pytest.mark.parametrize(
    ("tags", "spans"),
    [
        ("B-NP I-NP O B-VP", [(0, 2, "NP"), (3, 4, "VP")]),
        ("I-NP I-NP O", [(0, 2, "NP")]),  # I after the start begins a chunk
        ("O I-NP I-VP", [(1, 2, "NP"), (2, 3, "VP")]),  # a change of type does
        ("B-NP B-NP I-NP", [(0, 1, "NP"), (1, 3, "NP")]),
        ("B-NP I-VP I-VP B-VP", [(0, 1, "NP"), (1, 3, "VP"), (3, 4, "VP")]),
        ("S-NP E-NP", [(0, 1, "NP"), (1, 2, "NP")]),
        ("B-NP I-NP E-NP I-NP", [(0, 3, "NP"), (3, 4, "NP")]),
        ("B M E S B E", [(0, 3, ""), (3, 4, ""), (4, 6, "")]),
        ("B-A-B I-A-B", [(0, 2, "A-B")]),  # the type is all after the first hyphen
        ("O O", []),
        ("", []),
    ],
)
def test_spans_by_hand(tags: str, spans: list[tuple[int, int, str]]) -> None:
    assert find_spans(tags.split()) == spans


def test_spans_survive_every_scheme() -> None:
    draw = random.Random(0)
    for _ in range(200):
        spans = random_spans(draw, 12)
        for scheme in ("iob1", "iob2", "iobes"):
            tags = write_tags(spans, 12, scheme)
            assert find_spans(tags) == spans, scheme
            for other in ("iob1", "iob2", "iobes"):
                assert convert_tags(convert_tags(tags, other), scheme) == tags


def test_schemes_written_by_hand() -> None:
    spans = [Span(0, 2, "NP"), Span(2, 3, "NP"), Span(4, 7, "VP")]
    assert " ".join(write_tags(spans, 7, "iob1")) == "I-NP I-NP B-NP O I-VP I-VP I-VP"
    assert " ".join(write_tags(spans, 7, "iob2")) == "B-NP I-NP B-NP O B-VP I-VP I-VP"
    assert " ".join(write_tags(spans, 7, "iobes")) == "B-NP E-NP S-NP O B-VP I-VP E-VP"
    apart = [Span(0, 2, "NP"), Span(2, 4, "VP"), Span(4, 5, "NP")]
    assert " ".join(write_tags(apart, 5, "iob1")) == "I-NP I-NP I-VP I-VP I-NP"
    words = [Span(0, 1, ""), Span(1, 4, "")]
    assert "".join(write_tags(words, 4, "bmes")) == "SBME"


@pytest.mark.parametrize(
    ("sentences", "scheme"),
    [
        (["B-NP I-NP O", "O"], "iob2"),
        (["I-NP I-NP O"], "iob1"),
        (["I-NP B-NP O"], "iob1"),
        (["B-NP E-NP", "O I-NP"], "iobes"),
        (["B-NP L-NP U-NP"], "iobes"),
        (["B E S", "B M E"], "bmes"),
        (["NOUN VERB"], "plain"),
        (["B-NP NOUN"], "plain"),
        (["B I O"], "plain"),
        (["O O"], "plain"),
        (["B- O"], "plain"),
        ([], "plain"),
    ],
)
def test_detection(sentences: list[str], scheme: str) -> None:
    detector = SchemeDetector()
    for sentence in sentences:
        detector.add(sentence.split())
    assert detector.scheme() == scheme


@pytest.mark.parametrize("scheme", ["iobes", "bmes"])
def test_allowed_sequences_are_those_that_need_no_repair(scheme: str) -> None:
    """A sequence is allowed exactly if writing its spans gives the same tags."""
    labels = {
        "iobes": ["O", "B-X", "I-X", "E-X", "S-X", "B-Y", "E-Y"],
        "bmes": ["B", "M", "E", "S"],
    }[scheme]
    start, follow, end = allowed_pairs(labels)
    for sequence in itertools.product(range(len(labels)), repeat=3):
        allowed = (
            start[sequence[0]]
            and end[sequence[-1]]
            and all(follow[a][b] for a, b in itertools.pairwise(sequence))
        )
        tags = [labels[each] for each in sequence]
        assert allowed == (convert_tags(tags, scheme) == tags), tags

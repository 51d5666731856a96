"""Guarantees of the translator: one line out per line in, in order; every truncation or retry is
noted.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from confidence_kit import CALIBRATION, add_calibration
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from translator_kit import (
    CONFIG,
    TEXT,
    CopyModel,
    CopyState,
    build_copying_translator,
)

from dragoman.data.inference_batches import group_by_length, pad_batch, pad_sources
from dragoman.errors import DataError
from dragoman.inference import TranslationOptions, Translator
from dragoman.inference.long_line_segments import Segment, split_lines, target_gap
from dragoman.inference.single_batch_translator import Repetition, find_repetition
from dragoman.inference.translation_result import truncate_repr
from dragoman.models.factory import build_model
from dragoman.text.sentencepiece_tokenizer import Tokenizers, train_tokenizers
from dragoman.text.special_tokens import EOS, PAD


def test_text_goes_through_unchanged(tokenizers: Tokenizers) -> None:
    lines = [*TEXT[:5], "", "   ", "a", "!", "7", "🙂", "\t", "weiße Größe", "x" * 30]
    assert build_copying_translator(tokenizers).translate(lines) == [line.strip() for line in lines]


@settings(max_examples=25, deadline=None)
@given(
    lines=st.lists(st.text(st.sampled_from("ab \u4f60.7"), max_size=12), max_size=90),
    batch_size=st.sampled_from([None, 1, 3, 64]),
    buffer_size=st.sampled_from([1, 7, 2048]),
)
def test_order_and_number_of_lines_are_kept(
    tokenizers: Tokenizers, lines: list[str], batch_size: int | None, buffer_size: int
) -> None:
    """Whatever the batches and buffers (fairseq#2036, #4684, #1059, tensorflow/nmt#277;
    marian-dev#365).
    """
    found = build_copying_translator(tokenizers).translate(
        lines, batch_size=batch_size, buffer_size=buffer_size
    )
    assert found == [line.strip() for line in lines]


def test_a_calibration_adds_a_confidence_and_changes_nothing_else(
    bundle: Path, translator: Translator, tmp_path: Path
) -> None:
    lines = ["Ein Mann geht.", "", "Zwei Kinder spielen? " * 6, "0123456789"]
    calibrated = Translator.load(add_calibration(bundle, tmp_path / "m"), device="cpu")
    assert calibrated.translate(lines) == translator.translate(lines)
    for options in ({}, {"beam": 2, "nbest": 2}, {"beam": 1, "prefix": "Ein"}):
        found = list(calibrated.stream(lines, **options))
        plain = list(translator.stream(lines, **options))
        assert [each.confidence for each in plain] == [None] * 4
        for each in (found[0], *found[2:]):
            assert each.confidence == CALIBRATION.confidence(
                tokens=each.tokens, log_probs=each.log_probs, src_tokens=each.src_tokens
            )
        assert found[1].confidence is None
        assert [replace(each, confidence=None) for each in found] == plain
    for options in ({"sample": True, "seed": 1}, {"mbr": "chrf", "samples": 2, "seed": 1}):
        found = list(calibrated.stream(lines, **options))
        assert [each.confidence for each in found] == [None] * 4, "it is calibrated for searches"
    [unscored] = calibrated.stream(lines[:1], beam=1, return_scores=False)
    assert unscored.log_probs == []
    assert unscored.confidence is None


def test_empty_lines_never_reach_the_model(tokenizers: Tokenizers) -> None:
    translator = build_copying_translator(tokenizers)
    found = list(translator.stream(["", " ", "\u3000"]))
    assert [(each.text, each.notes) for each in found] == [("", ())] * 3
    assert translator.model.batches == []


def test_empty_output_is_retried_once_and_noted(tokenizers: Tokenizers) -> None:
    """A short line must not vanish (OpenNMT-py#2039)."""
    [found, blank] = build_copying_translator(tokenizers, silent=True).stream(["7", ""])
    assert found.text.strip()
    assert any("first output was empty" in note for note in found.notes)
    assert (blank.text, blank.notes) == ("", ())


def test_an_output_that_reaches_its_limit_is_noted(tokenizers: Tokenizers) -> None:
    """The limit depends on the line, and reaching it is noted (sockeye#907, LibreTranslate#46)."""
    translator = build_copying_translator(
        tokenizers,
        CONFIG.replace(decode={"max_length_ratio": 2.0, "max_length_extra": 5}),
        stutter=True,
    )
    short, long = translator.stream(["7", "0123456789"])
    num_tokens = len(translator.tokenizers.src.encode("0123456789"))
    assert len(long.tokens) == 2 * num_tokens + 5
    assert any(f"stopped at {2 * num_tokens + 5} tokens" in note for note in long.notes)
    [alone] = translator.stream(["7"])
    assert alone == short


def test_repetitive_output_is_noted(tokenizers: Tokenizers) -> None:
    """Endless repetition does not pass for a translation (LibreTranslate#46, #183,
    argos-translate#428, EasyNMT#38).
    """
    [found] = build_copying_translator(tokenizers, stutter=True).stream(["Zwei Kinder"])
    assert any("repeats itself" in note for note in found.notes)
    [found] = build_copying_translator(tokenizers).stream(
        ["7 " * 15]
    )  # what the source repeats may be repeated
    assert not found.notes


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        ([], None),
        (list(range(40)), None),
        ([5] * 4, None),
        ([9, 8, *[5] * 12], Repetition((5,), 12)),
        ([1, *[5, 6, 7] * 5, 5, 9], Repetition((5, 6, 7), 5)),
        ([*[5, 6] * 4, 1], None),
        ([5, 6] * 5, None),
        ([5, 6] * 6, Repetition((5, 6), 6)),
        ([5] * 11, None),
        (list(range(8)) * 5, Repetition(tuple(range(8)), 5)),
        (list(range(8)) * 4 + list(range(7)), None),
        (list(range(9)) * 6, None),
    ],
)
def test_repetitions_are_found_with_their_pattern(
    tokens: list[int], expected: Repetition | None
) -> None:
    assert find_repetition(tokens) == expected


def test_learned_positions_bound_source_and_output(tokenizers: Tokenizers) -> None:
    """No index past the table, and nothing truncated (transformers#11958)."""
    config = CONFIG.replace(
        model={"positions": "learned", "max_positions": 20},
        decode={"max_length_ratio": 9.0, "max_length_extra": 90},
    )
    torch.manual_seed(0)
    model = build_model(
        config.model, src_vocab_size=len(tokenizers.src), tgt_vocab_size=len(tokenizers.tgt)
    ).eval()
    for found in Translator(model, tokenizers, config).stream(
        ["Ein Mann geht. " * 8, "ab"], beam=2, prefix="Eine"
    ):
        assert found.text
    translator = build_copying_translator(tokenizers, config)
    text = "Ein Mann geht. Eine Frau steht! 0123456789 Zwei Kinder spielen?"
    assert translator.translate([text]) == [text]
    assert max(width for _, width in translator.model.batches) <= 20


def test_a_line_is_cut_where_it_has_one_token_too_many(tokenizers: Tokenizers) -> None:
    text = "0123456789 ab, 0123456789 ab. Zwei Kinder 7"
    count = len(tokenizers.src.encode(text))
    [whole] = split_lines([text], tokenizers.src, longest=count)
    assert [part.text for part in whole.segments] == [text]
    assert not whole.notes
    [cut] = split_lines([text], tokenizers.src, longest=count - 1)
    assert len(cut.segments) == 2
    assert (
        "".join(
            part + gap
            for part, gap in zip([part.text for part in cut.segments], [*cut.gaps, ""], strict=True)
        )
        == text
    )
    assert cut.notes == [
        f"{count:,} tokens are more than the {count - 1:,} that the model was trained on: "
        "translated in 2 segments"
    ]


@pytest.mark.parametrize(("lines", "threads"), [(1, 1), (511, 1), (512, 2), (5000, 3)])
def test_lines_are_encoded_by_a_thread_for_every_512_of_them(
    monkeypatch: pytest.MonkeyPatch, lines: int, threads: int
) -> None:
    used: list[int] = []

    class Counting:
        unknown_ids = frozenset[int]()

        def encode_batch(self, texts: list[str], *, threads: int) -> list[list[int]]:
            used.append(threads)
            return [[7] for _ in texts]

    monkeypatch.setattr(os, "cpu_count", lambda: 3)
    tokenizer: Any = Counting()
    assert len(split_lines(["a"] * lines, tokenizer, longest=9)) == lines
    assert used == [threads]


def test_a_part_may_have_as_many_tokens_as_the_limit(tokenizers: Tokenizers) -> None:
    """A word without any break is cut into parts that are as long as may be, at the limit and not
    one below.
    """
    text = "\u2460" * 25  # a character of three bytes, each a token
    one, two = (len(tokenizers.src.encode("\u2460" * count)) for count in (1, 2))
    longest = one + 6 * (two - one)  # of seven characters
    [line] = split_lines([text], tokenizers.src, longest=longest)
    assert [len(part.src) for part in line.segments] == [
        longest,
        longest,
        longest,
        one + 3 * (two - one),
    ]
    [line] = split_lines([text], tokenizers.src, longest=longest - 1)
    assert [len(part.text) for part in line.segments] == [6, 6, 6, 6, 1]


@pytest.mark.parametrize("spare", [0, -1])
def test_learned_positions_hold_a_source_and_its_end_and_no_more(
    tokenizers: Tokenizers, spare: int
) -> None:
    text = "0123456789 ab 7"
    count = len(tokenizers.src.encode(text))
    config = CONFIG.replace(model={"positions": "learned", "max_positions": count + 1 + spare})
    assert config.data.max_length > count
    translator = build_copying_translator(tokenizers, config, stutter=True)
    [found] = translator.stream([text])
    assert (sum(rows for rows, _ in translator.model.batches) == 1) is (spare == 0)
    assert ("segments" in " ".join(found.notes)) is (spare < 0)
    if spare == 0:
        assert len(found.tokens) == count  # of an output too, the last position is for its end


def test_the_length_limit_leaves_space_for_a_forced_prefix(tokenizers: Tokenizers) -> None:
    """The prefix is forced on the first part of a line, and the limit counts what the model itself
    may write beside it.
    """
    config = CONFIG.replace(decode={"max_length_ratio": 2.0, "max_length_extra": 5})
    prefix = tokenizers.tgt.encode("Eine Frau")
    for text in ("7", "0123456789"):
        count = len(tokenizers.src.encode(text))
        [found] = build_copying_translator(tokenizers, config, stutter=True).stream(
            [text], prefix="Eine Frau"
        )
        assert len(found.tokens) == 2 * count + 5 + len(prefix)
        assert list(found.tokens)[: len(prefix)] == tokenizers.tgt.tokens(prefix)
    [found] = build_copying_translator(tokenizers).stream(
        [" ".join(["Ein Mann geht."] * 12)], prefix="Eine Frau"
    )
    assert found.text.startswith("Eine Frau")
    assert found.text.count("Eine Frau") == 1


def test_only_a_forced_prefix_may_repeat_itself(tokenizers: Tokenizers) -> None:
    """It is forced on the first segment, and those after it may repeat nothing."""
    options = TranslationOptions(no_repeat_ngram_size=1, prefix_ids=[300, 300, 301])
    segments = [Segment(0, 0, "ab", [5, 6]), Segment(0, 1, "ab", [5, 6])]
    batches = build_copying_translator(tokenizers)._batch_translator
    request = batches.build_request(segments, options, options.strategy(CONFIG.decode))
    assert request.prefixes == [[300, 300, 301], []]
    first, second = request.constraints
    assert first.allowed((300, 300), 9).all()
    assert not first.allowed((300, 300, 301), 9)[[300, 301]].any()
    assert not second.allowed((300,), 9)[300]


def test_a_line_stays_one_line_for_any_output(tokenizers: Tokenizers) -> None:
    """Lines in = lines out, even when the model spells a line break in bytes (marian-dev#365,
    #667).
    """
    [found] = build_copying_translator(tokenizers).stream(["ab\u000bcd\rx"])
    assert "\r" not in found.text
    assert "\n" not in found.text


def test_a_text_of_several_lines_comes_back_in_as_many(tokenizers: Tokenizers) -> None:
    [found] = build_copying_translator(tokenizers).translate(
        ["Ein Mann geht.\n\n  Eine Frau steht!\nab"]
    )
    assert found == "Ein Mann geht.\n\nEine Frau steht!\nab"


def test_long_lines_are_split_and_joined_and_noted(tokenizers: Tokenizers) -> None:
    """Never cut, never dropped (marian-dev#365, transformers#11958, rust-bert#153, Opus-MT#60)."""
    text = " ".join(["Ein Mann geht.", "Eine Frau steht!", "Zwei Kinder spielen?"] * 12)
    translator = build_copying_translator(tokenizers)
    before, found, after = translator.stream(["ab", text, "7"])
    assert (before.text, after.text) == ("ab", "7")
    assert found.text == text
    assert any("segments" in note and "40" in note for note in found.notes)
    assert max(width for _, width in translator.model.batches) <= CONFIG.data.max_length + 1


def test_a_setting_splits_short_lines_into_sentences_too(tokenizers: Tokenizers) -> None:
    """But not a line with a forced prefix, or for models that are without it."""
    lines = ["Ein Mann. Eine Frau!  Ein Kind", "Ein Mann z.B. geht.", ""]
    one_by_one = CONFIG.replace(decode={"split_sentences": True})
    for config, options, batches in (
        (CONFIG, {}, [2]),
        (one_by_one, {}, [4]),
        (one_by_one, {"prefix": "Ein Mann"}, [2]),
    ):
        translator = build_copying_translator(tokenizers, config)
        found = list(translator.stream(lines, **options))
        assert [each.text for each in found] == lines
        assert not any(each.notes for each in found)
        rows = sum(count for count, _ in translator.model.batches)
        assert [rows] == batches


def test_a_split_line_has_all_that_a_line_has(translator: Translator) -> None:
    """Scores are added, n-best lists joined rank by rank, and alignments joined block-
    diagonally.
    """
    text = " ".join(["Ein Mann geht.", "Eine Frau steht!"] * 6)
    [found] = translator.stream([text], beam=3, nbest=2, alignment=True)
    assert found.alignment.shape == (len(found.tokens), len(found.src_tokens))
    np.testing.assert_allclose(found.alignment.sum(axis=1), 1.0, atol=1e-5)
    assert found.src_tokens.count("</s>") > 1  # one for each part
    assert len(found.alternatives) == 2
    assert found.alternatives[0].text == found.text
    assert found.score == pytest.approx(found.alternatives[0].score)
    assert sum(found.log_probs) < 0


def test_a_batch_that_does_not_fit_in_memory_is_halved(
    tokenizers: Tokenizers, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Nothing is dropped, and one sentence that does not fit alone is an error
    (OpenNMT-py#1161).
    """
    translator = build_copying_translator(tokenizers)
    encode = translator.model.encode

    def tight(src: Tensor, mask: Tensor | None) -> Tensor:
        if src.shape[0] > 2 or src.shape[1] > 20:
            raise torch.OutOfMemoryError("out of memory")
        return encode(src, mask)

    monkeypatch.setattr(translator.model, "encode", tight)
    lines = [f"ab {number}" for number in range(9)]
    assert translator.translate(lines) == lines
    assert caplog.text.count("out of memory with a batch of 9 sentences") == 1
    with pytest.raises(torch.OutOfMemoryError):
        translator.translate(["x" * 35])


class EarlyEndingModel(CopyModel):
    """Copies, but ends at once if the source begins with one of some tokens; runs out of memory
    above two sentences.
    """

    def __init__(self, vocabulary: int, quiet: set[int]) -> None:
        super().__init__(vocabulary)
        self.quiet = torch.tensor(sorted(quiet))

    def encode(self, src: Tensor, mask: Tensor | None) -> Tensor:
        if src.shape[0] > 2:
            raise torch.OutOfMemoryError("out of memory")
        return super().encode(src, mask)

    def step(self, tokens: Tensor, state: CopyState) -> tuple[Tensor, CopyState]:
        logits, after = super().step(tokens, state)
        if state.written == 0:
            logits[torch.isin(state.src[:, 0], self.quiet), EOS] = 30.0
        return logits, after


@pytest.mark.parametrize("quiet", [{0}, {4}, {2, 3}, {1, 4}, {0, 1, 2, 3, 4}])
def test_halves_of_a_batch_remember_which_outputs_were_empty(
    tokenizers: Tokenizers, quiet: set[int]
) -> None:
    lines = ["Ein Mann", "Zwei", "0123", "spielen", "steht"]
    first = [tokenizers.src.encode(line)[0] for line in lines]
    assert len(set(first)) == len(lines)
    model: Any = EarlyEndingModel(len(tokenizers.tgt), {first[at] for at in quiet})
    found = list(
        Translator(model, tokenizers, CONFIG.replace(decode={"beam": 1})).stream(
            lines, batch_size=5
        )
    )
    assert [each.text for each in found] == lines
    assert {
        at
        for at, each in enumerate(found)
        if any("first output was empty" in note for note in each.notes)
    } == quiet


def test_text_without_any_break_is_split_too(tokenizers: Tokenizers) -> None:
    translator = build_copying_translator(tokenizers)
    for text in ("ab" * 400, "你好" * 200, "a b " * 300):
        [found] = translator.stream([text])
        assert found.text.replace(" ", "") == text.replace(" ", "")


@pytest.mark.parametrize(
    ("source", "before", "gap", "after", "expected"),
    [
        ("Hallo.", "Hello.", " ", "World.", " "),
        ("你好。", "Hello.", "", "World.", " "),
        ("Hello.", "你好。", " ", "世界。", ""),
        ("你好。", "你好。", "", "世界。", ""),
        ("Hello.", "你好。", " ", "World.", " "),
        ("Hello.", "Hello.", " ", "世界。", " "),
        ("Donaudampf", "steam", "", "boat", ""),
        ("A.", "A.", "\n", "B", "\n"),
    ],
)
def test_sentences_are_joined_as_their_script_does(
    source: str, before: str, gap: str, after: str, expected: str
) -> None:
    """A Chinese source has no spaces between sentences; its English translation must
    (mosesdecoder#190).
    """
    assert target_gap(source, before, gap, after) == expected


def test_streaming_hands_on_before_the_input_ends(tokenizers: Tokenizers) -> None:
    read = []

    def lines() -> Iterator[str]:
        for number in range(1000):
            read.append(number)
            yield f"a {number}"

    found = build_copying_translator(tokenizers).stream(lines())
    next(found)
    assert len(read) < 100
    one = build_copying_translator(tokenizers).stream(lines(), buffer_size=1)
    read.clear()
    next(one)
    next(one)
    assert len(read) == 2


def test_inference_mode_does_not_leak_to_the_caller(translator: Translator) -> None:
    found = translator.stream(["Ein Mann", "Eine Frau"])
    next(found)
    assert not torch.is_inference_mode_enabled()
    assert torch.ones(1, requires_grad=True).mul(2).requires_grad


def test_a_model_that_a_search_loads_can_take_gradients(bundle: Path) -> None:
    translator = Translator.load(bundle, device="cpu", engine="native")
    translator.translate(["Ein Mann"])
    assert not any(weight.is_inference() for weight in translator.model.parameters())


def test_one_text_instead_of_a_list_is_rejected(translator: Translator) -> None:
    with pytest.raises(DataError, match="found one text, 'Guten Morgen"):
        translator.translate("Guten Morgen.")


@pytest.mark.parametrize(
    ("texts", "found"),
    [
        (None, "found None"),
        (7, r"found 7 \(int\)"),
        (b"abc", r"found b'abc' \(bytes\)"),
        ({"a": 1}, r"\(dict\)"),
        (Path("in.txt"), "or an open text file"),
        (["a", None], "text 2 must be a text; found None"),
        ([b"abc"], r"text 1 must be a text; found b'abc' \(bytes\)"),
    ],
)
def test_input_that_is_not_a_list_of_texts_is_rejected(
    translator: Translator, texts: Any, found: str
) -> None:
    with pytest.raises(DataError, match=found):
        translator.translate(texts)


def test_texts_may_come_from_any_iterable(tokenizers: Tokenizers) -> None:
    assert build_copying_translator(tokenizers).translate(text for text in ("12", "", "7")) == [
        "12",
        "",
        "7",
    ]
    assert build_copying_translator(tokenizers).translate([]) == []
    with pytest.raises(DataError, match="text 1 must be a text; found None"):
        build_copying_translator(tokenizers).explain(None)  # type: ignore[arg-type]


def test_control_characters_of_a_model_never_reach_a_terminal(tokenizers: Tokenizers) -> None:
    """A half-trained model may write any byte, the one that begins a terminal's commands too."""
    [found] = build_copying_translator(tokenizers).translate(["a\x1b[2Jb\x07c\td"])
    assert found == "a [2Jb c\td"


def test_a_note_on_many_parts_is_reported_once(tokenizers: Tokenizers) -> None:
    [found] = build_copying_translator(tokenizers, silent=True).stream(["0123456789. " * 40])
    assert len(found.notes) == len(set(found.notes)) <= 3
    assert any(note.endswith(" segments)") for note in found.notes)


def test_unknown_characters_are_counted(tokenizers: Tokenizers) -> None:
    """Unknown characters in the source are reported (OpenNMT-py#2602, #2020)."""
    config = CONFIG.replace(
        text={"tokenizer": "characters", "byte_fallback": False, "vocab_size": 30}
    )
    plain = train_tokenizers(["abc def"] * 20, ["abc def"] * 20, config.text)
    [found] = build_copying_translator(plain, config).stream(["abc ж def"])
    assert any("1 of its tokens is unknown" in note for note in found.notes)


def test_texts_of_a_repr_are_cut_past_sixty_characters() -> None:
    assert truncate_repr("a" * 60) == repr("a" * 60)
    assert truncate_repr("a" * 61) == repr("a" * 59) + "…"


@pytest.mark.parametrize(
    ("src_lang", "tgt_lang", "shown"),
    [("de", "en", "de to en, recipe"), ("de", "", "(recipe"), ("", "en", "(recipe")],
)
def test_repr_shows_languages_if_both_are_known(
    tokenizers: Tokenizers, src_lang: str, tgt_lang: str, shown: str
) -> None:
    config = CONFIG.replace(data={"src_lang": src_lang, "tgt_lang": tgt_lang})
    assert shown in repr(build_copying_translator(tokenizers, config))


def test_packing_masks_by_length() -> None:
    """A mask comes from lengths, never from values (Kyubyong/transformer#33)."""
    ids, mask = pad_batch([[5, PAD, 6], [7]])
    assert ids.tolist() == [[5, PAD, 6], [7, PAD, PAD]]
    assert mask.tolist() == [[True, True, True], [True, False, False]]
    assert pad_batch([[5], [6]]).mask is None
    assert pad_sources([[5], [6, 7]]).ids.tolist() == [[5, EOS, PAD], [6, 7, EOS]]


@given(
    lengths=st.lists(st.integers(1, 60), max_size=80),
    batch_tokens=st.integers(1, 300),
    rows_per_sentence=st.integers(1, 5),
)
def test_batches_hold_every_row_once_within_the_budget(
    lengths: list[int], batch_tokens: int, rows_per_sentence: int
) -> None:
    groups = group_by_length(
        lengths, batch_tokens=batch_tokens, rows_per_sentence=rows_per_sentence
    )
    assert sorted(row for group in groups for row in group) == list(range(len(lengths)))
    for group in groups:
        assert (
            len(group) == 1
            or len(group) * rows_per_sentence * max(lengths[row] for row in group) <= batch_tokens
        )


def test_the_three_lines_of_the_readme_work(bundle: Path) -> None:
    from dragoman import Translator as Public

    assert len(Public.load(bundle).translate(["Guten Morgen."])) == 1

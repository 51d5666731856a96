"""Tokenizers: lossless, deterministic, and with clear errors."""

from __future__ import annotations

import json
import lzma
import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dragoman.config.root_config import TextConfig
from dragoman.errors import BundleError, DataError, DiskError, StoppedError
from dragoman.runtime import signals
from dragoman.runtime.counter_rng import splitmix64_outputs
from dragoman.text import sentencepiece_trainer
from dragoman.text.sentencepiece_tokenizer import (
    Tokenizer,
    Tokenizers,
    load_tokenizers,
    normalize,
    save_tokenizers,
    train_tokenizers,
)
from dragoman.text.sentencepiece_trainer import sample_lines
from dragoman.text.special_tokens import BOS, EOS, PAD, UNK

DATA = Path(
    os.environ.get("DRAGOMAN_DATA", Path(__file__).resolve().parents[4] / "shared" / "data")
)
GERMAN = [
    "Ein Hund läuft durch den Schnee.",
    "Zwei Männer reden auf der Straße.",
    "Eine Frau liest ein Buch im Park.",
] * 20
ENGLISH = [
    "A dog runs through the snow.",
    "Two men are talking in the street.",
    "A woman reads a book in the park.",
] * 20


def small(**changes: object) -> TextConfig:
    return TextConfig(**{"vocab_size": 330, "character_coverage": 1.0, **changes})  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.train(GERMAN + ENGLISH, small())


@pytest.mark.parametrize("kind", ["bpe", "unigram", "characters"])
def test_every_kind_keeps_text_it_has_never_seen(kind: str) -> None:
    made = Tokenizer.train(GERMAN + ENGLISH, small(tokenizer=kind))
    for text in [
        "Ein Hund.",
        "  two  spaces ",
        "中文 🙂 naïve",
        "tab\there",
        "a\u2028b\x85c\x0c",
        "\u200b",
        "İıſß",
        "ab",
    ]:
        assert made.decode(made.encode(text)) == text
    assert made.algorithm == kind


@settings(max_examples=200, deadline=None)
@given(text=st.text(alphabet=st.characters(exclude_categories=("Cs",)), max_size=40))
def test_round_trip_of_any_text(text: str) -> None:
    made = _cached(normalization="none")
    assert made.decode(made.encode(text)) == text


_made: dict[str, Tokenizer] = {}


def _cached(normalization: str) -> Tokenizer:
    if normalization not in _made:
        _made[normalization] = Tokenizer.train(GERMAN + ENGLISH, small(normalization=normalization))
    return _made[normalization]


@pytest.mark.parametrize("text", ["", "a", ".", "7", "🙂", " ", "?!"])
def test_edge_cases_are_kept(tokenizer: Tokenizer, text: str) -> None:
    """One character, only punctuation, only digits, an emoji: none may vanish (OpenNMT-py#2039)."""
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert bool(tokenizer.encode(text)) == bool(text)


@pytest.mark.parametrize(
    "text", ["\u2581", "a\u2581b \u2581", "\U0010fffd", "\U0010fffd1\u2581\U0010fffd0"]
)
def test_the_visible_space_of_sentencepiece_is_text_like_any_other(
    tokenizer: Tokenizer, text: str
) -> None:
    assert tokenizer.decode(tokenizer.encode(text)) == text


@pytest.mark.parametrize("text", ["<s>", "</s>", "<pad>", "<unk>", "<0x41>", "<s> a </s>"])
def test_text_that_looks_like_special_tokens_is_text(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text)
    assert not {PAD, BOS, EOS, UNK} & set(ids)
    assert tokenizer.decode(ids) == text


def test_special_tokens_have_fixed_ids_and_no_text(tokenizer: Tokenizer) -> None:
    assert tokenizer.tokens([PAD, BOS, EOS, UNK]) == ["<pad>", "<s>", "</s>", "<unk>"]
    ids = tokenizer.encode("Ein Hund.")
    assert tokenizer.decode([BOS, *ids, EOS, PAD, PAD]) == "Ein Hund."


def test_tokens_of_ids(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("Ein 中")
    subwords = tokenizer.tokens(ids)
    assert subwords[-3:] == ["<0xE4>", "<0xB8>", "<0xAD>"]
    assert "".join(subwords[:-3]).replace("\u2581", " ") == " Ein "


def test_without_byte_fallback_the_unseen_is_unknown() -> None:
    made = Tokenizer.train(
        GERMAN, TextConfig(vocab_size=80, character_coverage=1.0, byte_fallback=False)
    )
    assert UNK in made.encode("Ein 中 Hund")
    assert UNK not in made.encode("Ein Hund")


def test_characters_outside_of_the_vocabulary_are_counted(tokenizer: Tokenizer) -> None:
    for text, expected in (("", 0.0), ("   ", 0.0), ("a", 0.0), ("ж", 1.0), ("你好 a", 2 / 3)):
        assert tokenizer.unknown_fraction(tokenizer.encode(text)) == pytest.approx(expected), text


def test_batches_equal_single_texts(tokenizer: Tokenizer) -> None:
    texts = ["Ein Hund.", "", "中", "Two men"]
    assert tokenizer.encode_batch(texts) == [tokenizer.encode(text) for text in texts]
    rows = tokenizer.encode_batch(texts)
    assert tokenizer.decode_batch(rows) == texts
    assert tokenizer.encode_batch([]) == []


def test_equal_characters_are_normalized_equally() -> None:
    composed, apart = "Ma\u0308nner é", "Männer e\u0301"
    assert _cached("nfc").encode(composed) == _cached("nfc").encode(apart)
    assert _cached("none").encode(composed) != _cached("none").encode(apart)
    assert _cached("nfkc").encode("ﬁne ２") == _cached("nfkc").encode("fine 2")
    assert _cached("nfc").decode(_cached("nfc").encode("ﬁne ２")) == "ﬁne ２"


@pytest.mark.parametrize("form", ["none", "nfc", "nfkc"])
@given(text=st.text(max_size=30))
def test_normalising_twice_changes_nothing_more(form: str, text: str) -> None:
    once = normalize(text, form)
    assert normalize(once, form) == once


def test_unknown_form_suggests_the_nearest() -> None:
    with pytest.raises(DataError, match=r"found 'nfcc'; did you mean nfc\?"):
        normalize("ä", "nfcc")


def test_training_is_deterministic() -> None:
    """The same corpus must give the same ids, or tokenized data and models disagree."""
    for kind in ("bpe", "unigram", "characters"):
        first, second = (Tokenizer.train(GERMAN + ENGLISH, small(tokenizer=kind)) for _ in range(2))
        assert first.digest == second.digest
        assert first.model == second.model


def test_digest_covers_all_that_decides_the_ids(tokenizer: Tokenizer) -> None:
    other_form = Tokenizer(tokenizer.model, algorithm="bpe", normalization="none")
    other_text = Tokenizer.train(GERMAN, small(vocab_size=320))
    assert len({tokenizer.digest, other_form.digest, other_text.digest}) == 3


@pytest.mark.parametrize("kind", ["bpe", "unigram"])
def test_too_large_a_vocabulary_suggests_the_largest_that_works(kind: str) -> None:
    with pytest.raises(DataError) as caught:
        Tokenizer.train(GERMAN + ENGLISH, small(tokenizer=kind, vocab_size=8000))
    message = str(caught.value)
    assert "found 8000" in message
    largest = int(message.split("--set text.vocab_size=")[1].split(",")[0])
    assert f"at most {largest}" in message
    assert (
        len(Tokenizer.train(GERMAN + ENGLISH, small(tokenizer=kind, vocab_size=largest))) == largest
    )
    with pytest.raises(DataError, match=f"found {largest + 1}"):
        Tokenizer.train(GERMAN + ENGLISH, small(tokenizer=kind, vocab_size=largest + 1))


def test_too_small_a_vocabulary_reports_how_large_it_must_be() -> None:
    with pytest.raises(
        DataError, match=r"at least \d+ to cover this corpus's characters; found 270"
    ):
        Tokenizer.train(GERMAN + ENGLISH, small(vocab_size=270))


def test_byte_fallback_needs_256_tokens() -> None:
    with pytest.raises(
        DataError, match=r"at least 261 with text\.byte_fallback.*; found 100; raise it"
    ):
        Tokenizer.train(GERMAN, small(tokenizer="characters", vocab_size=100))
    assert len(Tokenizer.train(GERMAN, small(tokenizer="characters", vocab_size=261))) == 261


def test_blank_text_is_an_error() -> None:
    with pytest.raises(DataError, match="found 2 lines, all blank"):
        Tokenizer.train(["", "  "], small())


def test_characters_take_as_many_as_there_are() -> None:
    made = Tokenizer.train(
        ["abcabc", "cab"], TextConfig(tokenizer="characters", vocab_size=8000, byte_fallback=False)
    )
    assert len(made) == 4 + 4  # special ones, a, b, c and the space
    assert len(made.encode("abc")) == 4


def test_long_lines_are_trained_on() -> None:
    """SentencePiece silently skips lines over 4,192 bytes; ours must not."""
    long_line = " ".join(["zebra"] * 20_000)
    made = Tokenizer.train([long_line, *GERMAN], small())
    assert made.tokens(made.encode("zebra")) == ["\u2581zebra"]


def test_a_very_long_word_does_not_break_training() -> None:
    made = Tokenizer.train(["中文" * 50_000, *GERMAN], small())
    assert made.decode(made.encode("中文" * 10)) == "中文" * 10


def test_lines_with_the_trainers_unknown_mark_are_kept() -> None:
    made = Tokenizer.train([f"\u2585 quokka {i}" for i in range(50)] + GERMAN, small())
    assert "\u2581quokka" in made.tokens(made.encode("quokka"))


BYTES = 1 << 20


def test_sample_is_even_and_always_the_same() -> None:
    lines = [str(i) for i in range(10_000)]
    chosen = sample_lines(iter(lines), 1000, BYTES).lines
    assert chosen == sample_lines(iter(lines), 1000, BYTES).lines
    assert len(chosen) == len(set(chosen)) == 1000
    numbers = [int(line) for line in chosen]
    assert numbers == sorted(numbers)
    tenths = [sum(1000 * k <= n < 1000 * (k + 1) for n in numbers) for k in range(10)]
    assert min(tenths) > 60
    assert list(sample_lines(lines, 20_000, BYTES).texts()) == lines


@pytest.mark.parametrize(
    ("most_lines", "most_bytes"), [(1000, BYTES), (10**9, 20_000), (300, 20_000), (10**9, 1)]
)
def test_sample_is_bounded_in_lines_and_bytes(most_lines: int, most_bytes: int) -> None:
    """Two million pairs took 1.7 GiB, most of it for the sample and the trainer."""
    lines = [f"{i:05d} {'ü' * (i % 30)}" for i in range(10_000)]
    found = sample_lines(iter(lines), most_lines, most_bytes)
    assert found.seen == 10_000
    assert found.bytes == sum(map(len, found.lines))
    assert 1 <= len(found.lines) <= most_lines
    assert found.bytes <= most_bytes or len(found.lines) == 1
    # By definition: the lowest ranks, as many as fit, independent of the buffer.
    order = sorted(range(10_000), key=splitmix64_outputs(0, np.arange(10_000)).tolist().__getitem__)
    sizes = np.cumsum([len(lines[i].encode()) for i in order])
    fitting = min(most_lines, max(1, int((sizes <= most_bytes).sum())))
    assert list(found.texts()) == [lines[i] for i in sorted(order[:fitting])]


def test_the_sample_is_bounded(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    handed: list[str] = []
    train = sentencepiece_trainer._run_trainer
    monkeypatch.setattr(
        sentencepiece_trainer,
        "_run_trainer",
        lambda lines, options: train(handed.extend(lines) or handed, options),
    )
    monkeypatch.setattr(sentencepiece_trainer, "MAX_SAMPLE_BYTES", {"bpe": 2000})
    with caplog.at_level("INFO", logger="dragoman"):
        Tokenizer.train(
            (f"{word} {i}" for i in range(4000) for word in ("quokka", "wombat")), small()
        )
    assert 1900 <= sum(len(line.encode()) for line in handed) <= 2000
    assert "(0.0 MiB), sampled evenly from 8,000" in caplog.text
    assert sum("quokka" in line for line in handed) > len(handed) / 3


def test_bounds_keep_training_below_a_gibibyte() -> None:
    """Memory per sample byte (bench/data_preparation.py --train): 5 with BPE, 25 with unigram."""
    assert 5 * sentencepiece_trainer.MAX_SAMPLE_BYTES["bpe"] <= 400 << 20
    assert 25 * sentencepiece_trainer.MAX_SAMPLE_BYTES["unigram"] <= 400 << 20


def test_the_subprocess_trains_the_same_model(monkeypatch: pytest.MonkeyPatch) -> None:
    here = Tokenizer.train(GERMAN + ENGLISH, small())
    monkeypatch.setattr(sentencepiece_trainer, "_MAX_IN_PROCESS_BYTES", 0)
    assert Tokenizer.train(GERMAN + ENGLISH, small()).digest == here.digest
    with pytest.raises(
        DataError,
        match=r"text\.vocab_size must be at most \d+, all that this corpus allows; found 30000",
    ):
        Tokenizer.train(GERMAN, small(vocab_size=30_000))


def test_a_stop_request_ends_the_training_subprocess(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sentencepiece_trainer, "_MAX_IN_PROCESS_BYTES", 0)
    try:
        signals.request_stop("SIGTERM")
        with pytest.raises(StoppedError, match="SIGTERM"):
            Tokenizer.train(GERMAN + ENGLISH, small())
    finally:
        signals.uninstall_handlers()


def test_a_killed_training_subprocess_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sentencepiece_trainer, "_MAX_IN_PROCESS_BYTES", 0)
    monkeypatch.setattr(sentencepiece_trainer.sys, "executable", "/bin/false")
    with pytest.raises(DiskError, match=r"must not be killed; found one that ended with code 1"):
        Tokenizer.train(GERMAN + ENGLISH, small())


def test_more_text_than_the_sample_is_sampled_evenly() -> None:
    lines = ["aaaa bbbb"] * 500 + ["zzzz yyyy"] * 500
    made = Tokenizer.train(lines, TextConfig(vocab_size=280, sample_lines=100))
    assert {"\u2581aaaa", "\u2581zzzz"} <= {made.tokens([i])[0] for i in range(len(made))}


def test_a_lone_surrogate_is_named(tokenizer: Tokenizer) -> None:
    with pytest.raises(DataError, match=r"U\+D83D, a lone surrogate, at position 3"):
        tokenizer.encode("ab\ud83d")


def test_tokenizers_of_a_shared_vocabulary_are_one_object() -> None:
    """One object owns the ids, so no vocabulary can disagree (OpenNMT-py#2020, #1954, #1979)."""
    pair = train_tokenizers(GERMAN, ENGLISH, small())
    assert pair.src is pair.tgt
    assert pair.shared_vocab


def test_separate_tokenizers_know_their_side_only() -> None:
    pair = train_tokenizers(GERMAN, ENGLISH, small(shared_vocab=False, vocab_size=320))
    assert not pair.shared_vocab
    assert "ß" in {pair.src.tokens([i])[0] for i in range(len(pair.src))}
    assert "ß" not in {pair.tgt.tokens([i])[0] for i in range(len(pair.tgt))}


@pytest.mark.parametrize("joint", [True, False])
def test_saved_and_loaded_is_the_same(tmp_path: Path, joint: bool) -> None:
    pair = train_tokenizers(
        GERMAN, ENGLISH, small(shared_vocab=joint, vocab_size=320, normalization="nfkc")
    )
    save_tokenizers(pair, tmp_path / "text")
    loaded = load_tokenizers(tmp_path / "text")
    assert loaded.shared_vocab == joint
    assert [each.digest for each in loaded] == [each.digest for each in pair]
    assert loaded.src.encode("Straße ﬁ") == pair.src.encode("Straße ﬁ")
    names = {path.name for path in (tmp_path / "text").iterdir()}
    assert names == (
        {"shared.model", "text.json"} if joint else {"source.model", "target.model", "text.json"}
    )


def _saved(folder: Path, tokenizer: Tokenizer) -> Path:
    save_tokenizers(Tokenizers(tokenizer, tokenizer), folder)
    return folder


def test_missing_parts_are_named(tmp_path: Path, tokenizer: Tokenizer) -> None:
    with pytest.raises(BundleError, match=r"text\.json: No such file"):
        load_tokenizers(tmp_path)
    folder = _saved(tmp_path / "text", tokenizer)
    (folder / "shared.model").unlink()
    with pytest.raises(BundleError, match=r"source\.model: No such file"):
        load_tokenizers(folder)


@pytest.mark.parametrize(
    ("content", "found"),
    [
        ("{", "text.json: Expecting property name"),
        ("[]", r"text.json: \[\]"),
        ('{"format": 1, "kind": "words", "normalisation": "nfc"}', "'words'"),
        ('{"format": 1, "kind": "bpe", "normalisation": "nfd"}', "'nfd'"),
        ('{"format": 9, "kind": "bpe", "normalisation": "nfc"}', "format 9"),
        ("[" * 100_000, "text.json"),
    ],
)
def test_invalid_text_json_is_named(
    tmp_path: Path, tokenizer: Tokenizer, content: str, found: str
) -> None:
    folder = _saved(tmp_path / "text", tokenizer)
    (folder / "text.json").write_text(content)
    with pytest.raises(BundleError, match=found):
        load_tokenizers(folder)


def test_a_file_that_is_no_model_is_rejected(tmp_path: Path, tokenizer: Tokenizer) -> None:
    folder = _saved(tmp_path / "text", tokenizer)
    (folder / "shared.model").write_bytes(b"not a model")
    with pytest.raises(BundleError, match="found 11 bytes of another format"):
        load_tokenizers(folder)


def test_models_with_other_special_ids_are_rejected() -> None:
    import io

    import sentencepiece

    writer = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(GERMAN), model_writer=writer, vocab_size=45, minloglevel=2
    )
    with pytest.raises(BundleError, match=r"found \(-1, 1, 2, 0\)"):
        Tokenizer(writer.getvalue(), algorithm="unigram", normalization="nfc")


def test_text_json_describes_the_models(tmp_path: Path, tokenizer: Tokenizer) -> None:
    folder = _saved(tmp_path / "text", tokenizer)
    assert json.loads((folder / "text.json").read_text()) == {
        "format": 1,
        "kind": "bpe",
        "normalisation": "nfc",
    }


@pytest.mark.skipif(
    not (DATA / "multi30k").is_dir(), reason=f"no corpora at {DATA} (set DRAGOMAN_DATA)"
)
def test_multi30k_round_trip_and_no_unknown() -> None:
    """A vocabulary built from the training text knows it all (OpenNMT-py#2602, marian#297)."""
    lines = [
        line
        for name in ("train.de.xz", "train.en.xz")
        for line in read_lines(DATA / "multi30k" / name)
    ]
    made = Tokenizer.train(lines, TextConfig(vocab_size=4000, normalization="none"))
    rows = made.encode_batch(lines)
    assert made.decode_batch(rows) == lines
    assert not any(UNK in row for row in rows)


def read_lines(path: Path) -> list[str]:
    with lzma.open(path) as file:
        return file.read().decode().split("\n")[:-1]

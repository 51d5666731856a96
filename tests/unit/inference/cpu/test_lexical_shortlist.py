"""Shortlists: counts equal a plain loop, and a sentence uses its own list in any batch."""

from __future__ import annotations

import itertools
import logging
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from model_kit import build_perturbed_transformer

from dragoman.config import Config
from dragoman.data.inference_batches import pad_sources
from dragoman.data.parallel_corpus import ParallelFiles
from dragoman.decoding.beam_search import BeamSearch
from dragoman.decoding.constraint_automaton import CompiledConstraints
from dragoman.decoding.greedy import GreedySearch
from dragoman.decoding.output_constraint_definitions import Require
from dragoman.decoding.token_surface_forms import TokenCharacters
from dragoman.errors import ConfigError, DataError
from dragoman.inference import NativeEngine, SearchRequest, dragoman_model_engine
from dragoman.inference.cpu import lexical_shortlist
from dragoman.inference.cpu.cpp_kernel_library_loader import load_kernel_library
from dragoman.inference.cpu.cpp_transformer import CppTransformer
from dragoman.inference.cpu.cpu_engine_conversion import FLOAT32, INT8, PRECISIONS, convert_model
from dragoman.inference.cpu.lexical_shortlist import Shortlist, build_shortlist
from dragoman.inference.engine_selection import open_engines
from dragoman.models.encoder_decoder import EncoderDecoder
from dragoman.text.sentencepiece_tokenizer import Tokenizers, train_tokenizers
from dragoman.text.special_tokens import EOS, SPECIAL_TOKENS

VOCABULARY = 60
SOURCES = [[5, 6, 7, 8, 9], [9, 8], [11, 12, 13, 4, 5, 6, 7], [20], [21, 22, 23, 24, 25]]
needs_kernels = pytest.mark.skipif(load_kernel_library() is None, reason="no C++ compiler")


def drawn(count: int = 60) -> list[tuple[list[int], list[int]]]:
    chance = np.random.default_rng(0)
    return [
        (chance.integers(4, 30, 5).tolist(), chance.integers(4, VOCABULARY, 6).tolist())
        for _ in range(count)
    ]


def counted(**more: Any) -> Shortlist:
    given = {
        "src_vocab_size": 30,
        "tgt_vocab_size": VOCABULARY,
        "shared_vocab": False,
        "common_tokens": 3,
        "each": 4,
    }
    return Shortlist.count(drawn(), **{**given, **more})


def make(**settings: Any) -> EncoderDecoder:
    shape = {"encoder": ["transformer*1"], "tie_embeddings": "target"}
    return build_perturbed_transformer(30, VOCABULARY, **(shape | settings))


def request(numbers: Any = range(5), **more: Any) -> SearchRequest:
    sources = [SOURCES[number] for number in numbers]
    many = len(sources)
    given = {
        "sources": sources,
        "limits": [24] * many,
        "prefixes": [[]] * many,
        "strategy": BeamSearch(3),
        "sample_ids": list(numbers),
    }
    return SearchRequest(**{**given, **more})


@pytest.mark.parametrize("at_once", [1, 100, 1 << 22])
def test_counts_equal_a_plain_loop(at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lexical_shortlist, "_MAX_PENDING", at_once)
    found = counted()
    both, left, right = Counter[tuple[int, int]](), Counter[int](), Counter[int]()
    for src, tgt in drawn():
        left.update(set(src))
        right.update(set(tgt))
        both.update(itertools.product(set(src), set(tgt)))
    frequent = sorted(right, key=lambda src_token: (-right[src_token], src_token))[:3]
    assert found.common_tokens.tolist() == sorted({*frequent, *range(len(SPECIAL_TOKENS))})
    for src_token in range(30):
        ties = {
            tgt: 2 * both[src_token, tgt] / (left[src_token] + right[tgt])
            for tgt in range(VOCABULARY)
            if both[src_token, tgt]
        }
        best = sorted(ties, key=lambda tgt: (-ties[tgt], tgt))[:4]
        assert (
            found.token_lists[
                found.list_starts[src_token] : found.list_starts[src_token + 1]
            ].tolist()
            == best
        )
    assert found.allowed_tokens([5, 6, 5]).tolist() == sorted(
        {*found.common_tokens.tolist(), *_list(found, 5), *_list(found, 6)}
    )


def _list(found: Shortlist, src_token: int) -> list[int]:
    return found.token_lists[
        found.list_starts[src_token] : found.list_starts[src_token + 1]
    ].tolist()


def test_a_shared_vocabulary_lists_each_token_for_itself() -> None:
    found = counted(shared_vocab=True)
    assert all(src_token in _list(found, src_token) for src_token in range(30))
    assert EOS in found.allowed_tokens([])


def test_a_hundred_common_tokens_and_fifty_of_each_source_token_are_listed() -> None:
    """The most frequent of each, and those that occur with a source token most often."""
    pairs = [([5], list(range(10, 10 + last))) for last in range(1, 201)]
    found = Shortlist.count(pairs, src_vocab_size=6, tgt_vocab_size=300, shared_vocab=False)
    assert _list(found, 5) == list(range(10, 60))
    assert found.common_tokens.tolist() == [*range(len(SPECIAL_TOKENS)), *range(10, 110)]


def test_pairs_with_more_than_256_tokens_on_a_side_are_not_counted() -> None:
    tokenizers: Any = CharacterTokenizers(CharacterTokenizer(), CharacterTokenizer())
    for length, expected in ((256, [5, 6]), (257, [6])):
        for first, second in (("a" * length, "a"), ("a", "a" * length)):
            pairs = [SimpleNamespace(src=first, tgt=second), SimpleNamespace(src="b", tgt="b")]
            corpus: Any = SimpleNamespace(pairs=lambda pairs=pairs: iter(pairs))
            found = build_shortlist(corpus, tokenizers)
            assert sorted(found.token_lists.tolist()) == expected


class CharacterTokenizer:
    """Writes "a" as 5 and "b" as 6."""

    def __len__(self) -> int:
        return 8

    def encode_batch(self, texts: list[str]) -> list[list[int]]:
        return [[5 + "ab".index(char) for char in text] for text in texts]


class CharacterTokenizers(NamedTuple):
    src: CharacterTokenizer
    tgt: CharacterTokenizer
    shared_vocab = False


def test_no_pairs_are_no_shortlist() -> None:
    with pytest.raises(DataError, match="found none that hold tokens"):
        Shortlist.count([([], [])], src_vocab_size=5, tgt_vocab_size=5, shared_vocab=False)


def test_texts_are_tokenized_and_counted(tmp_path: Path) -> None:
    lines = {"src": ["a b c", "b c d", "c d e"] * 20, "tgt": ["A B C", "B C D", "C D E"] * 20}
    for side, texts in lines.items():
        (tmp_path / side).write_text("\n".join(texts) + "\n", "utf-8")
    text = Config().replace(text={"vocab_size": 268, "shared_vocab": False}).text
    sides = [train_tokenizers(texts, texts, text).src for texts in lines.values()]
    tokenizers = Tokenizers(*sides)
    found = build_shortlist(ParallelFiles(tmp_path / "src", tmp_path / "tgt"), tokenizers)
    pairs = [
        (tokenizers.src.encode(src), tokenizers.tgt.encode(tgt))
        for src, tgt in zip(*lines.values(), strict=True)
    ]
    expected = Shortlist.count(
        pairs,
        src_vocab_size=len(tokenizers.src),
        tgt_vocab_size=len(tokenizers.tgt),
        shared_vocab=False,
    )
    assert found.token_lists.tolist() == expected.token_lists.tolist()
    assert set(pairs[0][1]) <= set(found.allowed_tokens(pairs[0][0]).tolist())


@needs_kernels
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("settings", [{}, {"embedding_width": 9}], ids=["", "narrow"])
def test_listed_tokens_have_bit_exact_scores_and_others_none(
    precision: str, settings: dict[str, Any]
) -> None:
    form = convert_model(make(**settings), precision).model
    if not isinstance(form, CppTransformer):
        pytest.skip(f"this processor has no compiled {precision}")
    short = counted()
    allowed_tokens = [short.allowed_tokens(source) for source in SOURCES]
    with torch.inference_mode():
        memory = form.encode(*pad_sources(SOURCES))
        all_, some = (
            form.start(memory),
            form.start(form.restrict_to_shortlist(memory, allowed_tokens)),
        )
        rows, tokens = torch.tensor([4, 1, 2]), torch.tensor([7, 8, 9, 10, 11])
        (_, all_), (_, some) = form.step(tokens, all_), form.step(tokens, some)
        all_, some = (
            each.keep(rows).reorder(torch.arange(3).repeat_interleave(2)) for each in (all_, some)
        )
        (full, _), (found, _) = (form.step(torch.arange(4, 10), each) for each in (all_, some))
    for row in range(6):
        token_lists = allowed_tokens[int(rows[row // 2])]
        assert torch.equal(found[row, token_lists], full[row, token_lists])
        assert np.flatnonzero(np.isfinite(found[row].numpy())).tolist() == token_lists.tolist()


@needs_kernels
@pytest.mark.parametrize("strategy", [GreedySearch(), BeamSearch(3)], ids=["greedy", "beam"])
@pytest.mark.parametrize("precision", [FLOAT32, INT8])
def test_a_sentence_keeps_to_its_own_list_in_every_batch(strategy: Any, precision: str) -> None:
    model, short = make(), counted()
    engine = NativeEngine(lambda: model, precision=precision, shortlist=short)
    together = engine.generate(request(strategy=strategy))
    for number, source in enumerate(SOURCES):
        [alone] = engine.generate(request([number], strategy=strategy))
        assert alone == together[number]
        assert set(alone[0].tokens) <= set(short.allowed_tokens(source).tolist())


@needs_kernels
def test_a_list_of_everything_changes_nothing_and_a_prefix_may_be_unlisted() -> None:
    model = make()
    everything = Shortlist(
        np.arange(VOCABULARY), np.zeros(31, dtype=np.int64), np.empty(0, dtype=np.int64), VOCABULARY
    )
    assert NativeEngine(lambda: model, shortlist=everything).generate(request()) == NativeEngine(
        lambda: model
    ).generate(request())
    short = counted()
    unlisted = [
        next(each for each in range(4, VOCABULARY) if each not in short.allowed_tokens(source))
        for source in SOURCES
    ]
    found = (
        NativeEngine(lambda: model, shortlist=short)
        .single_worker()
        .generate(request(prefixes=[[each] for each in unlisted]))
    )
    assert [each[0].tokens[0] for each in found] == unlisted


@needs_kernels
@pytest.mark.parametrize("strategy", [GreedySearch(), BeamSearch(3)], ids=["greedy", "beam"])
def test_a_required_word_need_not_be_listed(strategy: Any) -> None:
    model, short = make(), counted()
    words = [None] * len(SPECIAL_TOKENS) + [chr(0x4E00 + token) for token in range(4, VOCABULARY)]
    constraints, required = [], []
    for source in SOURCES:
        listed = short.allowed_tokens(source)
        token = next(each for each in range(4, VOCABULARY) if each not in listed)
        compiled = CompiledConstraints([Require([str(words[token])])], TokenCharacters(words))
        constraints.append(compiled.bind(""))
        required.append(token)
    search = request(strategy=strategy, constraints=constraints)
    found = NativeEngine(lambda: model, shortlist=short).generate(search)
    assert all(token in row[0].tokens for token, row in zip(required, found, strict=True))
    assert found == NativeEngine(lambda: model).generate(search)


def test_model_without_shortlist_support_warns_once(caplog: pytest.LogCaptureFixture) -> None:
    model = make(activation="swiglu")
    dragoman_model_engine._warn_shortlist_unused.cache_clear()
    engine = NativeEngine(lambda: model, shortlist=counted())
    with caplog.at_level(logging.WARNING, logger="dragoman"):
        assert (
            engine.generate(request())
            == engine.generate(request())
            == NativeEngine(lambda: model).generate(request())
        )
    assert caplog.text.count("the shortlist is not used, and all tokens are scored") == 1


def test_a_gpu_scores_all_tokens() -> None:
    bundle: Any = None
    with pytest.raises(ConfigError, match="a shortlist needs a CPU; found the device cuda"):
        open_engines(
            bundle,
            torch.device("cuda"),
            precision=FLOAT32,
            shortlist=ParallelFiles(Path("src"), Path("tgt")),
        )

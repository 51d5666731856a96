"""Vocabulary extension: more tokens for a trained tokenizer, learnt from new text.

Tokens are appended, so existing tokens keep their ids. First come characters that the vocabulary
lacks, then byte-pair encoding (Sennrich et al. 2016) continues from the tokenizer: the most
frequent pair of adjacent tokens becomes a token. A new token ranks behind all others: a text is
segmented as before, and then adjacent tokens are merged.
"""

from __future__ import annotations

import functools
import heapq
import itertools
import struct
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import sentencepiece

from dragoman.config.root_config import TextConfig
from dragoman.text.bpe_dropout import SPACE_MARK
from dragoman.text.sentencepiece_tokenizer import (
    Tokenizer,
    Tokenizers,
    escape_space_marks,
    normalize,
)
from dragoman.text.sentencepiece_trainer import MAX_SAMPLE_BYTES, sample_lines
from dragoman.text.special_tokens import SPECIAL_TOKENS, UNK

MIN_PAIR_COUNT = 2  # a pair that occurs once teaches nothing
MAX_TOKEN_CHARACTERS = 16  # SentencePiece's own limit
# Added to the log-probabilities of a unigram token's parts: enough for float32 to prefer it
# to them, too little to prefer another segmentation.
UNIGRAM_BONUS = 1e-3
# Appended to a serialized model, this overrides normalizer_spec.add_dummy_prefix by false.
_WITHOUT_PREFIX = b"\x1a\x02\x18\x00"
_EAST_ASIAN = {"HIRAGANA", "KATAKANA", "KATAKANA-HIRAGANA"}  # SentencePiece counts them as Han


class AddedToken(NamedTuple):
    """A token and its SentencePiece score."""

    token: str
    score: float


def extend_tokenizers(
    tokenizers: Tokenizers,
    src_lines: Iterable[str],
    tgt_lines: Iterable[str],
    most: int,
    config: TextConfig,
) -> Tokenizers:
    """Return the tokenizers with up to `most` more tokens in each vocabulary."""
    if tokenizers.shared_vocab:
        both = (line for pair in zip(src_lines, tgt_lines, strict=True) for line in pair)
        shared = extend_tokenizer(tokenizers.src, both, most, config)
        return Tokenizers(shared, shared)
    return Tokenizers(
        extend_tokenizer(tokenizers.src, src_lines, most, config),
        extend_tokenizer(tokenizers.tgt, tgt_lines, most, config),
    )


def extend_tokenizer(
    tokenizer: Tokenizer, lines: Iterable[str], most: int, config: TextConfig
) -> Tokenizer:
    """Return a tokenizer with up to `most` more tokens, learnt from lines of text; deterministic.

    A vocabulary of characters gets characters only.
    """
    prepared = (escape_space_marks(normalize(line, tokenizer.normalization)) for line in lines)
    sample = sample_lines(prepared, config.sample_lines, MAX_SAMPLE_BYTES[tokenizer.algorithm])
    words = Counter(word for line in sample.texts() for word in line.split(" ") if word)
    tokens, scores = _tokens_with_scores(tokenizer)
    lowest = min(scores.values(), default=0.0)
    rank = _ranks(lowest)
    is_bpe = tokenizer.algorithm == "bpe"
    added = [
        AddedToken(character, next(rank) if is_bpe else lowest)
        for character in _new_characters(words, set(scores), config.character_coverage)[:most]
    ]
    extended = _append(tokenizer, added)
    if tokenizer.algorithm != "characters":
        scores |= dict(added)
        pairs = learn_pairs(_segment(extended, words), most - len(added), known=set(tokens))
        for left, right in pairs:
            score = next(rank) if is_bpe else scores[left] + scores[right] + UNIGRAM_BONUS
            scores[left + right] = score
            added.append(AddedToken(left + right, score))
    return _append(tokenizer, added)


def original_tokenizers(tokenizers: Tokenizers, src_size: int, tgt_size: int) -> Tokenizers:
    """Return the tokenizers as they were with these vocabulary sizes, before their extension."""
    src = _without_added(tokenizers.src, src_size)
    return Tokenizers(
        src, src if tokenizers.shared_vocab else _without_added(tokenizers.tgt, tgt_size)
    )


def segment_added_tokens(extended: Tokenizer, original: Tokenizer) -> list[list[int]]:
    """Return the original ids that each added token was segmented into, in order of the ids."""
    exact = sentencepiece.SentencePieceProcessor(model_proto=original.model + _WITHOUT_PREFIX)
    added = extended.tokens(range(len(original), len(extended)))
    rows: list[list[int]] = exact.encode([token.replace(SPACE_MARK, " ") for token in added])
    return [row or [UNK] for row in rows]


def learn_pairs(
    words: Mapping[tuple[str, ...], int], most: int, known: Iterable[str] = ()
) -> list[tuple[str, str]]:
    """Return up to `most` pairs of tokens to join, the most frequent first.

    `words` are segmented words with their counts. A pair that makes a `known` token, crosses
    scripts or has too many characters is not joined; equally frequent ones are in the order of
    their text.
    """
    known = set(known)
    segmented = [list(word) for word in words]
    counts_of_words = list(words.values())
    counts: Counter[tuple[str, str]] = Counter()
    where: defaultdict[tuple[str, str], set[int]] = defaultdict(set)
    for index, word in enumerate(segmented):
        for pair in itertools.pairwise(word):
            counts[pair] += counts_of_words[index]
            where[pair].add(index)
    heap = [(-count, pair) for pair, count in counts.items() if _can_join(*pair)]
    heapq.heapify(heap)
    found = list[tuple[str, str]]()
    while heap and len(found) < most:
        count, pair = heapq.heappop(heap)
        if -count != counts[pair]:  # counted before some of its tokens were joined
            if counts[pair] >= MIN_PAIR_COUNT:
                heapq.heappush(heap, (-counts[pair], pair))
            continue
        if -count < MIN_PAIR_COUNT:
            break
        if "".join(pair) in known:
            continue
        found.append(pair)
        known.add("".join(pair))
        changed = set[tuple[str, str]]()
        for index in where.pop(pair):
            word, joined = segmented[index], _join(segmented[index], pair)
            for old in itertools.pairwise(word):
                counts[old] -= counts_of_words[index]
            for new in itertools.pairwise(joined):
                counts[new] += counts_of_words[index]
                where[new].add(index)
                changed.add(new)
            segmented[index] = joined
        for new in changed:
            if _can_join(*new):
                heapq.heappush(heap, (-counts[new], new))
    return found


def _join(word: Sequence[str], pair: tuple[str, str]) -> list[str]:
    """Return the tokens of a word with every occurrence of a pair joined, from the left."""
    joined, position = list[str](), 0
    while position < len(word):
        width = 2 if tuple(word[position : position + 2]) == pair else 1
        joined.append("".join(word[position : position + width]))
        position += width
    return joined


def _can_join(left: str, right: str) -> bool:
    """Whether two adjacent tokens may be merged: SentencePiece's rules in training."""
    if len(left) + len(right) > MAX_TOKEN_CHARACTERS:
        return False
    scripts = {_script(char) for char in left + right if char != SPACE_MARK} - {""}
    return len(scripts) < 2


@functools.lru_cache(1 << 16)
def _script(character: str) -> str:
    """Return the script of a letter, from its Unicode name; empty for marks, which join any."""
    category = unicodedata.category(character)
    if category.startswith("M"):
        return ""
    if not category.startswith("L"):
        return "number" if category.startswith("N") else "punctuation"
    name = unicodedata.name(character, "").split(" ")[0]
    return "CJK" if name in _EAST_ASIAN else name


def _new_characters(words: Mapping[str, int], known: set[str], coverage: float) -> list[str]:
    """Return the characters of words that are unknown, the most frequent first.

    Those that are rarer than the fraction 1 - coverage of all characters stay unknown.
    """
    counts: Counter[str] = Counter()
    for word, count in words.items():
        for char in word:
            counts[char] += count
    total, covered, found = sum(counts.values()), 0, list[str]()
    for char, count in sorted(counts.items(), key=lambda item: (-item[1], item[0])):
        if covered >= coverage * total:
            break
        covered += count
        if char not in known and unicodedata.category(char)[0] not in "CZ":
            found.append(char)
    return found


def _segment(tokenizer: Tokenizer, words: Mapping[str, int]) -> dict[tuple[str, ...], int]:
    """Return words as their tokens, with counts; unknown characters and bytes end a word."""
    tokens, scores = _tokens_with_scores(tokenizer)
    found: Counter[tuple[str, ...]] = Counter()
    for ids, count in zip(tokenizer.encode_batch(list(words)), words.values(), strict=True):
        part: list[str] = []
        for token in (tokens[each] for each in ids):
            if token in scores:
                part.append(token)
            else:
                found[tuple(part)] += count
                part = []
        found[tuple(part)] += count
    return {word: count for word, count in found.items() if len(word) > 1}


def _tokens_with_scores(tokenizer: Tokenizer) -> tuple[list[str], dict[str, float]]:
    """Return all tokens by id, and the scores of those that text is made of."""
    sp = sentencepiece.SentencePieceProcessor(model_proto=tokenizer.model)
    tokens = tokenizer.tokens(range(len(tokenizer)))
    scores = {
        tokens[number]: sp.get_score(number)
        for number in range(len(SPECIAL_TOKENS), len(tokens))
        if not (sp.is_byte(number) or sp.is_control(number))
    }
    return tokens, scores


def _ranks(lowest: float) -> Iterator[float]:
    """Yield scores below the lowest of BPE, which are ranks."""
    while True:
        lowest -= 1.0
        yield lowest


def _append(tokenizer: Tokenizer, added: Iterable[AddedToken]) -> Tokenizer:
    """Return a tokenizer with more tokens.

    Protocol buffers concatenate repeated fields, here `pieces`, of what is appended to a message.
    """
    return Tokenizer(
        tokenizer.model + b"".join(_serialize(each) for each in added),
        algorithm=tokenizer.algorithm,
        normalization=tokenizer.normalization,
    )


def _without_added(tokenizer: Tokenizer, size: int) -> Tokenizer:
    """Return a tokenizer with its first `size` tokens, of which the others were appended."""
    sp = sentencepiece.SentencePieceProcessor(model_proto=tokenizer.model)
    added = b"".join(
        _serialize(AddedToken(sp.id_to_piece(number), sp.get_score(number)))
        for number in range(size, len(tokenizer))
    )
    assert tokenizer.model.endswith(added), "added tokens are at the end of the model"
    return Tokenizer(
        tokenizer.model[: len(tokenizer.model) - len(added)],
        algorithm=tokenizer.algorithm,
        normalization=tokenizer.normalization,
    )


def _serialize(added: AddedToken) -> bytes:
    """Return field 1 of SentencePiece's ModelProto: a message with piece and score."""
    token = added.token.encode()
    piece = b"\x0a" + bytes([len(token)]) + token + b"\x15" + struct.pack("<f", added.score)
    return b"\x0a" + bytes([len(piece)]) + piece  # at most 16 characters: lengths below 128

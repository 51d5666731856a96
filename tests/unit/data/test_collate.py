"""Batches: token ids and padding, masks from lengths, and taking rows."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from dragoman.config.root_config import DataConfig, TextConfig
from dragoman.data.batch_plan import BatchPlan
from dragoman.data.bucket_shapes import BatchShape
from dragoman.data.collate import Batch, collate, make_batch
from dragoman.data.parallel_corpus import ParallelFiles, build_corpus
from dragoman.data.token_store import TokenStore
from dragoman.errors import DataError
from dragoman.text.sentencepiece_tokenizer import Tokenizers, train_tokenizers
from dragoman.text.special_tokens import BOS, EOS, PAD

GERMAN = [
    "Ein Hund läuft durch den Schnee.",
    "Zwei Männer reden.",
    "Eine Frau liest ein Buch im Park.",
    "Ja.",
]
ENGLISH = [
    "A dog runs through the snow.",
    "Two men are talking.",
    "A woman reads a book in the park.",
    "Yes.",
]


@pytest.fixture(scope="module")
def tokenizers() -> Tokenizers:
    return train_tokenizers(
        GERMAN * 20, ENGLISH * 20, TextConfig(vocab_size=330, character_coverage=1.0)
    )


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory, tokenizers: Tokenizers) -> TokenStore:
    folder = tmp_path_factory.mktemp("store")
    (folder / "x.de").write_text("".join(f"{line}\n" for line in GERMAN), encoding="utf-8")
    (folder / "x.en").write_text("".join(f"{line}\n" for line in ENGLISH), encoding="utf-8")
    return TokenStore.prepare(
        ParallelFiles(folder / "x.de", folder / "x.en"),
        tokenizers,
        folder=folder,
        data=DataConfig(),
    )


def two_rows() -> Batch:
    return make_batch([[5, 6, 7], [8]], [[9], [10, 11]])


def test_layout_of_a_batch() -> None:
    batch = two_rows()
    assert batch.src.tolist() == [[5, 6, 7, EOS], [8, EOS, PAD, PAD]]
    assert batch.tgt_in.tolist() == [[BOS, 9, PAD], [BOS, 10, 11]]
    assert batch.tgt_out.tolist() == [[9, EOS, PAD], [10, 11, EOS]]
    assert batch.src_lengths.tolist() == [4, 2]
    assert batch.tgt_lengths.tolist() == [2, 3]
    assert batch.src.dtype == batch.tgt_in.dtype == torch.long
    assert batch.examples.tolist() == [0, 1]
    assert len(batch) == 2


def test_masks_come_from_lengths_not_from_values() -> None:
    """A mask computed from values masks nothing once they change (Kyubyong/transformer#33, #3,
    #69)."""
    batch = make_batch([[PAD, 6], [8]], [[PAD], [10, PAD]])
    assert batch.src_mask is not None
    assert batch.src_mask.tolist() == [[True, True, True], [True, True, False]]
    assert batch.tgt_mask is not None
    assert batch.tgt_mask.tolist() == [[True, True, False], [True, True, True]]
    assert batch.src_mask.dtype == torch.bool


def test_no_mask_where_nothing_is_padded() -> None:
    batch = make_batch([[5, 6], [7, 8]], [[9], [10]])
    assert batch.src_mask is None
    assert batch.tgt_mask is None
    padded = make_batch([[5, 6], [7, 8]], [[9], [10]], shapes=[BatchShape(5, 2)])
    assert padded.src_mask is not None
    assert padded.tgt_mask is None


def test_tokens_and_padded_tokens() -> None:
    batch = two_rows()
    assert batch.tokens == 4 + 2 + 2 + 3
    assert batch.padded_tokens == 2 * 4 + 2 * 3


def test_batches_are_padded_to_the_smallest_shape_that_holds_them() -> None:
    shapes = [BatchShape(2, 2), BatchShape(6, 4), BatchShape(9, 9)]
    batch = make_batch([[5, 6, 7], [8]], [[9], [10, 11]], shapes=shapes)
    assert batch.src.shape == (2, 6)
    assert batch.tgt_in.shape == batch.tgt_out.shape == (2, 4)
    assert batch.tokens == two_rows().tokens
    assert make_batch([[1] * 30], [[1]], shapes=shapes).src.shape == (1, 32)


@pytest.mark.parametrize("index", [slice(1, 3), [1, 2], np.array([1, 2]), torch.tensor([1, 2])])
def test_rows_are_the_same_rows(index) -> None:
    batch = make_batch(
        [[5], [6, 7], [8], [9, 9]], [[5], [6], [7, 7], [8]], examples=np.array([40, 41, 42, 43])
    )
    part = batch.rows(index)
    assert part.src.tolist() == batch.src.tolist()[1:3]
    assert part.tgt_in.tolist() == batch.tgt_in.tolist()[1:3]
    assert part.tgt_out.tolist() == batch.tgt_out.tolist()[1:3]
    assert part.src_lengths.tolist() == batch.src_lengths.tolist()[1:3]
    assert part.examples.tolist() == [41, 42]
    assert part.tokens == 3 + 2 + 2 + 3
    assert part.src_mask is not None
    assert part.src_mask.tolist() == [[True, True, True], [True, True, False]]


def test_rows_of_all_ranks_make_the_batch_again() -> None:
    batch = make_batch([[5], [6, 7], [8], [9, 9], [4]], [[5], [6], [7, 7], [8], [4]])
    for world in (1, 2, 3):
        parts = [batch.rows(slice(rank, None, world)) for rank in range(world)]
        assert sorted(np.concatenate([part.examples for part in parts]).tolist()) == list(range(5))
        assert sum(part.tokens for part in parts) == batch.tokens


def test_rows_may_be_none() -> None:
    part = two_rows().rows([])
    assert len(part) == 0
    assert part.src.shape == (0, 4)


def test_moving_keeps_everything() -> None:
    batch = two_rows()
    moved = batch.to("cpu")
    assert moved.src.tolist() == batch.src.tolist()
    assert moved.tokens == batch.tokens
    assert moved.to(torch.device("meta")).src.device.type == "meta"


def test_collating_fetches_the_requested_pairs(store: TokenStore, tokenizers: Tokenizers) -> None:
    batch = collate(store, np.array([2, 0]))
    assert batch.examples.tolist() == [2, 0]
    for row, number in enumerate((2, 0)):
        length = int(batch.src_lengths[row])
        assert tokenizers.src.decode(batch.src[row, :length].tolist()) == GERMAN[number]
        assert batch.src[row, length - 1] == EOS
        assert tokenizers.tgt.decode(batch.tgt_out[row].tolist()) == ENGLISH[number]


def test_collating_equals_padding_pair_by_pair(store: TokenStore) -> None:
    examples = np.array([1, 0, 2])
    fetched = collate(store, examples, shapes=[BatchShape(40, 50)])
    pairs = [store.pair(int(each)) for each in examples]
    padded = make_batch(
        [src for src, _ in pairs],
        [tgt for _, tgt in pairs],
        examples=examples,
        shapes=[BatchShape(40, 50)],
    )
    for name in ("src", "src_lengths", "tgt_in", "tgt_out", "tgt_lengths"):
        assert torch.equal(getattr(fetched, name), getattr(padded, name)), name
    assert (fetched.sizes == padded.sizes).all()


def test_a_plans_batch_has_the_plans_shape(store: TokenStore) -> None:
    plan = BatchPlan(store.src_lengths, store.tgt_lengths, batch_tokens=40, seed=0)
    for examples in plan.epoch(0):
        batch = collate(store, examples, shapes=plan.shapes)
        assert tuple(plan.shape(examples)) == (batch.src.shape[1], batch.tgt_in.shape[1])


def test_other_rows_change_only_the_padding(store: TokenStore) -> None:
    """Each row has the same tokens alone and in a batch, sampled or not."""
    for options in ({}, {"dropout": 0.3, "seed": 5}):
        both = collate(
            store,
            np.array([1, 2]),
            tokenizers=None if not options else tokenizers_of(store),
            **options,
        )
        alone = collate(
            store,
            np.array([2]),
            tokenizers=None if not options else tokenizers_of(store),
            **options,
        )
        length = int(alone.src_lengths[0])
        assert int(both.src_lengths[1]) == length
        assert both.src[1, :length].tolist() == alone.src[0, :length].tolist()


_known: dict[Path, Tokenizers] = {}


def tokenizers_of(store: TokenStore) -> Tokenizers:
    if store.folder not in _known:
        _known[store.folder] = train_tokenizers(
            GERMAN * 20, ENGLISH * 20, TextConfig(vocab_size=330, character_coverage=1.0)
        )
    return _known[store.folder]


def test_sampling_is_a_pure_function_of_seed_and_pair(
    store: TokenStore, tokenizers: Tokenizers
) -> None:
    examples = np.arange(4)
    first = collate(store, examples, tokenizers=tokenizers, dropout=0.3, seed=1)
    again = collate(store, examples, tokenizers=tokenizers, dropout=0.3, seed=1)
    other = collate(store, examples, tokenizers=tokenizers, dropout=0.3, seed=2)
    assert torch.equal(first.src, again.src)
    assert first.src.tolist() != other.src.tolist()
    for row in range(4):
        assert tokenizers.src.decode(first.src[row].tolist()) == GERMAN[row]
        assert tokenizers.tgt.decode(first.tgt_out[row].tolist()) == ENGLISH[row]
    assert first.tokens > collate(store, examples).tokens


@pytest.mark.parametrize("dropout", [0.0, 0.3, 0.9])
@pytest.mark.parametrize("shapes", [[], [BatchShape(4, 4)], [BatchShape(9, 400)]])
def test_sampled_sentences_and_padding_stay_within_the_limit(
    store: TokenStore, tokenizers: Tokenizers, shapes: list[BatchShape], dropout: float
) -> None:
    """Learned positions end at `data.max_length` and EOS; dropout and rounding must not exceed
    them."""
    limit = int(max(store.src_lengths.max(), store.tgt_lengths.max()))
    assert (limit + 1) % 8  # or rounding up would not show
    grew = False
    for seed in range(5):
        batch = collate(
            store,
            np.arange(4),
            shapes=shapes,
            tokenizers=tokenizers,
            dropout=dropout,
            seed=seed,
            max_length=limit,
        )
        assert batch.src.shape[1] <= limit + 1
        assert batch.tgt_in.shape[1] <= limit + 1
        assert int(batch.sizes.max()) <= limit + 1
        grew |= batch.tokens > collate(store, np.arange(4)).tokens
        for row in range(4):
            assert tokenizers.src.decode(batch.src[row].tolist()) == GERMAN[row]
            assert tokenizers.tgt.decode(batch.tgt_out[row].tolist()) == ENGLISH[row]
    assert grew == (dropout > 0)  # sentences below the limit are still sampled


def test_without_dropout_the_stored_tokens_are_used(
    store: TokenStore, tokenizers: Tokenizers
) -> None:
    plain, zero = (
        collate(store, np.arange(4)),
        collate(store, np.arange(4), tokenizers=tokenizers, dropout=0.0, seed=9),
    )
    assert torch.equal(plain.src, zero.src)


def test_sources_begin_with_the_tag_of_their_target(tmp_path: Path) -> None:
    """In the store, in batches, and in those with BPE-dropout; targets have none."""
    made = train_tokenizers(
        GERMAN * 20,
        ENGLISH * 20,
        TextConfig(vocab_size=340, character_coverage=1.0),
        languages=["de", "en"],
    )
    (tmp_path / "x.de").write_text("\n".join([*GERMAN, "", "<2en>"]) + "\n", encoding="utf-8")
    (tmp_path / "x.en").write_text("\n".join([*ENGLISH, "No.", "<2en>"]) + "\n", encoding="utf-8")
    data = DataConfig(
        src=str(tmp_path / "x.de"),
        tgt=str(tmp_path / "x.en"),
        languages=("de-en",),
        directions=("en-de", "de-en"),
    )
    store = TokenStore.prepare(build_corpus(data, "train"), made, folder=tmp_path, data=data)
    assert len(store) == 10  # 5 pairs with text, in both directions
    examples = store.direction_examples()
    assert {name: len(own) for name, own in examples.items()} == {"en-de": 5, "de-en": 5}
    for name, texts in (("de-en", (GERMAN, ENGLISH)), ("en-de", (ENGLISH, GERMAN))):
        tag = made.src.tag_ids[name[-2:]]
        for number, index in enumerate(examples[name]):
            src, tgt = (side.tolist() for side in store.pair(int(index)))
            assert src[0] == tag
            assert not set(src[1:] + tgt) & set(made.src.tag_ids.values())
            sides = [side[number] if number < 4 else "<2en>" for side in texts]
            assert [made.src.decode(src), made.tgt.decode(tgt)] == sides
            assert made.src.tagged(name[-2:]).encode(sides[0]) == src
        for dropout in (0.0, 0.5):
            batch = collate(store, examples[name], tokenizers=made, dropout=dropout, seed=3)
            assert batch.src[:, 0].eq(tag).all()
            assert not batch.tgt_out.eq(tag).any()


def test_a_language_without_a_tag_is_an_error(tokenizers: Tokenizers) -> None:
    with pytest.raises(DataError, match="found 'fr'; the languages are none"):
        tokenizers.src.tagged("fr")

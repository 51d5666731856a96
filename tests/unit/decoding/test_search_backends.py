"""The fast search backends, C++ and GPU, against the reference backend: the same hypotheses."""

from __future__ import annotations

import hashlib
import itertools
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as some
from kernel_kit import needs_gpu
from torch import Tensor

from dragoman.config import ModelConfig
from dragoman.data.inference_batches import pad_sources
from dragoman.decoding.beam_search import BeamSearch
from dragoman.decoding.beam_step import BeamState
from dragoman.decoding.greedy import GreedySearch
from dragoman.decoding.length_penalty import WuLengthPenalty
from dragoman.decoding.no_repeat_ngram import NoRepeatNgram
from dragoman.decoding.search_interface import SearchBackend, search
from dragoman.errors import DivergedError
from dragoman.inference.cpu.cpp_kernel_library_loader import load_kernel_library
from dragoman.inference.cpu.cpp_transformer import CppSearchBackend
from dragoman.inference.cuda.cuda_backend import EagerSearchBackend
from dragoman.models.factory import build_model
from dragoman.text.special_tokens import EOS


def backends() -> list[SearchBackend]:
    """The fast backends of a CPU and of a GPU; both run on the CPU."""
    library = load_kernel_library()
    return [EagerSearchBackend(), *([] if library is None else [CppSearchBackend(library)])]


@dataclass(frozen=True)
class HashState:
    """A source number a sentence and all tokens so far a row."""

    sources: Tensor
    history: Tensor

    @property
    def device(self) -> torch.device:
        return self.sources.device

    @property
    def beams_per_sentence(self) -> int:
        return len(self.history) // len(self.sources)

    def reorder(self, rows: Tensor) -> HashState:
        return HashState(self.sources, self.history[rows])

    def keep(self, sentences: Tensor) -> HashState:
        rows = (
            sentences[:, None] * self.beams_per_sentence + torch.arange(self.beams_per_sentence)
        ).flatten()
        return HashState(self.sources[sentences], self.history[rows])


class HashModel:
    """Logits from a hash of everything before; coarse ones, so that many are equal."""

    def __init__(self, *, end: float = 0.0, coarse: bool = False, vocabulary: int = 9) -> None:
        self.end, self.coarse, self.vocabulary, self.rows = end, coarse, vocabulary, 0

    def start(self, memory: Tensor) -> HashState:
        return HashState(memory, torch.empty(len(memory), 0, dtype=torch.long))

    def step(self, tokens: Tensor, state: HashState) -> tuple[Tensor, HashState]:
        self.rows += len(tokens)
        history = torch.cat([state.history, tokens[:, None]], dim=1)
        sources = state.sources.repeat_interleave(state.beams_per_sentence).tolist()
        rows = [
            self.logits(source, words)
            for source, words in zip(sources, history.tolist(), strict=True)
        ]
        return torch.tensor(rows), HashState(state.sources, history)

    def logits(self, source: int, history: list[int]) -> list[float]:
        digest = hashlib.sha256(repr((source, history)).encode()).digest()
        values = [
            digest[at] // 64 * 1.0 if self.coarse else digest[at] / 40.0
            for at in range(self.vocabulary)
        ]
        values[EOS] += self.end
        return values


def compare_backends(
    model: Any,
    memory: Any,
    limits: list[int],
    *,
    size: int,
    nbest: int,
    alpha: float = 0.6,
    within: float = 2e-6,
    **options: Any,
) -> None:
    """Search with the reference backend and with each fast one, and compare everything."""
    strategy = BeamSearch(size=size, nbest=nbest, penalty=WuLengthPenalty(alpha))
    expected = search(model, memory, limits=limits, strategy=strategy, **options)
    for backend in backends():
        found = search(model, memory, limits=limits, strategy=strategy, backend=backend, **options)
        assert [[h.tokens for h in row] for row in found] == [
            [h.tokens for h in row] for row in expected
        ]
        for row, other in zip(found, expected, strict=True):
            for one, two in zip(row, other, strict=True):
                assert one.finished == two.finished
                assert one.score == pytest.approx(two.score, abs=within)
                assert one.log_probs == pytest.approx(two.log_probs, abs=within)


@given(data=some.data())
def test_backends_return_the_hypotheses_of_the_reference(data: Any) -> None:
    count = data.draw(some.integers(1, 6))
    size = data.draw(some.integers(1, 5))
    compare_backends(
        HashModel(end=data.draw(some.sampled_from([-2.0, 0.0, 2.0, 4.0]))),
        torch.arange(count) + data.draw(some.integers(0, 50)),
        [data.draw(some.integers(1, 11)) for _ in range(count)],
        size=size,
        nbest=data.draw(some.integers(1, size)),
        alpha=data.draw(some.sampled_from([0.0, 0.6, 1.5])),
        min_length=data.draw(some.integers(0, 3)),
    )


def test_prefixes_are_forced_row_by_row() -> None:
    compare_backends(
        HashModel(end=1.0),
        torch.arange(3),
        [6, 2, 7],
        size=3,
        nbest=2,
        prefixes=[[4, 5], [6, 7, 8], []],
    )


def test_equal_candidates_go_to_the_lower_token() -> None:
    """In bfloat16 many logits are equal, and `topk` may take any of them."""
    compare_backends(
        HashModel(coarse=True, vocabulary=7), torch.arange(4), [4, 5, 3, 6], size=3, nbest=3
    )


def test_ties_of_several_parents_go_to_the_lower_token_then_to_the_better_parent() -> None:
    model = HashModel(vocabulary=7)
    model.logits = lambda source, history: [0.0] * 7  # type: ignore[method-assign]  # three tokens, equally probable
    for size, backend in itertools.product((3, 4, 5, 9), backends()):
        strategy = BeamSearch(size=size, nbest=size, penalty=WuLengthPenalty(0.0))
        [found] = search(
            model, torch.arange(1), limits=[2], strategy=strategy, min_length=2, backend=backend
        )
        assert [h.tokens for h in found] == [
            [first, second] for second in (4, 5, 6) for first in (4, 5, 6)
        ][:size]


@pytest.mark.parametrize("limit", [1, 2, 3, 4])
def test_limits_are_reached_exactly_with_and_without_a_prefix(limit: int) -> None:
    for backend in backends():
        found = search(
            HashModel(end=-1000.0),
            torch.arange(2),
            limits=[limit] * 2,
            strategy=BeamSearch(size=2),
            prefixes=[[], [4, 5]],
            backend=backend,
        )
        assert [len(row[0].tokens) for row in found] == [limit, max(limit, 2)]


def test_a_beam_wider_than_the_vocabulary_works() -> None:
    compare_backends(HashModel(vocabulary=6), torch.arange(2), [3, 4], size=9, nbest=2)


def test_reset_pads_the_batch_with_sentences_that_are_not_alive() -> None:
    beam_state = BeamState(
        sentences=5, steps=4, size=2, nbest=1, penalty=WuLengthPenalty(), device=torch.device("cpu")
    )
    beams = beam_state.reset(np.array([3, 2]), beams_per_sentence=2, rows=4)
    assert beams.alive.tolist() == [True, True, False, False]
    assert beams.sentences.tolist() == [0, 1, 2, 3]
    assert beams.log_prob_sums.tolist() == [[0.0, -float("inf")]] * 4
    assert beam_state.limits.tolist() == [3, 2, 0, 0, 0, 0]


@pytest.mark.parametrize("sync_every_steps", [1, 2])
def test_finished_sentences_leave_the_batch(sync_every_steps: int) -> None:
    backend = EagerSearchBackend()
    backend.sync_every_steps = sync_every_steps
    model = HashModel(end=-9.0)  # continues to the limit
    limits = [2] * 9 + [30]
    search(model, torch.arange(10), limits=limits, strategy=BeamSearch(size=2), backend=backend)
    assert model.rows < 10 * 2 * 8 + 2 * 31, "nine of ten sentences must not be computed to the end"


def test_empty_beam_slots_leave_the_batch() -> None:
    model = HashModel(end=5.0)
    search(model, torch.arange(4), limits=[30] * 4, strategy=BeamSearch(size=4, nbest=4))
    full = 4 * 4 * 31
    assert model.rows < full / 4, "finished hypotheses must not be computed on"


def test_nan_outputs_raise_diverged_error() -> None:
    class Broken(HashModel):
        def logits(self, source: int, history: list[int]) -> list[float]:
            return [float("nan")] * self.vocabulary

    for backend in (SearchBackend(), *backends()):
        with pytest.raises(DivergedError, match="NaN at output position"):
            search(Broken(), torch.arange(2), limits=[5, 5], strategy=BeamSearch(), backend=backend)


class SeldomReadBackend(SearchBackend):
    """The reference, with a host that reads the beam state every fourth step."""

    sync_every_steps = 4


def test_continuations_of_a_finished_sentence_are_ignored() -> None:
    """It stays in the batch until the host reads the beam state; a NaN there is not an error."""

    class Ending(HashModel):
        def logits(self, source: int, history: list[int]) -> list[float]:
            if source == 0:
                return (
                    [float("nan")] * 9
                    if len(history) > 1
                    else [9.0 * (at == EOS) for at in range(9)]
                )
            return super().logits(source, history)

    strategy = BeamSearch(size=2, penalty=WuLengthPenalty(0.0))
    options = {"limits": [9, 9], "strategy": strategy}
    expected = search(Ending(end=-3.0), torch.arange(2), **options)
    found = search(Ending(end=-3.0), torch.arange(2), backend=SeldomReadBackend(), **options)
    assert found == expected
    assert found[0][0].tokens == []


@pytest.mark.parametrize("size", [1, 3])
def test_constrained_beams_do_not_depend_on_when_the_host_reads(size: int) -> None:
    found = [
        search(
            HashModel(),
            torch.arange(6),
            limits=[3, 9, 5, 1, 7, 8],
            strategy=BeamSearch(size=size, nbest=size),
            constraints=[NoRepeatNgram(2, 9)] * 6,
            backend=backend,
        )
        for backend in (SearchBackend(), SeldomReadBackend())
    ]
    assert found[0] == found[1]


def test_a_beam_state_is_as_new_after_a_reset() -> None:
    used, fresh = (
        BeamState(
            sentences=3,
            steps=5,
            size=2,
            nbest=1,
            penalty=WuLengthPenalty(),
            device=torch.device("cpu"),
        )
        for _ in range(2)
    )
    beams = used.reset(np.array([4, 1, 2]), beams_per_sentence=1)
    for token in (EOS, 5, 6):
        log_probs = torch.tensor([[-0.5, -1.0], [-0.6, -float("inf")], [float("nan"), -1.0]])
        rows = beams.tokens.size(1)
        ids = torch.tensor([[token, 7]] * 3).repeat_interleave(rows, 0)
        beams, _ = used.advance(beams, log_probs.repeat_interleave(rows, 0), ids)
    assert not used.all_finite
    assert used.truncated.isfinite().any()
    assert used.finished[..., 0].isfinite().any()
    for state in (used, fresh):
        state.reset(np.array([3, 2]), beams_per_sentence=1)
    for name in ("step", "all_finite", "limits", "active_beams", "truncated"):
        assert torch.equal(getattr(used, name), getattr(fresh, name)), name
    assert torch.equal(used.finished[..., 0], fresh.finished[..., 0])


SOURCES = [[5, 6, 7, 8], [9], [4, 10, 4], [11, 11, 6, 5, 4, 8, 9], [7, 7]]
MODELS: dict[str, dict[str, Any]] = {
    "transformer": {"encoder": ("transformer*2",), "decoder": ("transformer*2",)},
    "recurrent": {
        "encoder": ("bigru",),
        "decoder": ("gru(attention=additive, decoder=bahdanau)",),
        "positions": "none",
    },
    "convolutional": {"encoder": ("conv",), "decoder": ("conv*2",), "positions": "learned"},
    "monotonic": {
        "encoder": ("lstm",),
        "decoder": ("lstm(attention=monotonic)", "transformer"),
        "positions": "none",
    },
}


def models(name: str, device: str = "cpu") -> tuple[Any, Any]:
    torch.manual_seed(5)
    model = build_model(
        ModelConfig(width=16, heads=2, ffn_width=32, **MODELS[name]),
        src_vocab_size=12,
        tgt_vocab_size=12,
    ).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(2.0)  # so that beams are reordered
        model.to(device)
        return model, model.encode(*pad_sources(SOURCES, device))


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("size", [1, 4])
def test_decoder_states_of_every_family_follow_the_beams(name: str, size: int) -> None:
    model, memory = models(name)
    compare_backends(
        model, memory, [6, 9, 3, 12, 1], size=size, nbest=size, within=1e-5
    )  # matmuls round differently if finished rows stay


@needs_gpu
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(
    "strategy", [GreedySearch(), BeamSearch(size=4, nbest=2)], ids=["greedy", "beam"]
)
def test_a_gpu_finds_the_same_as_a_cpu(name: str, strategy: Any) -> None:
    found = []
    for device in ("cpu", "cuda"):
        model, memory = models(name, device)
        found.append(
            search(
                model,
                memory,
                limits=[6, 9, 3, 12, 1],
                strategy=strategy,
                backend=EagerSearchBackend() if device == "cuda" else SearchBackend(),
            )
        )
    assert [[h.tokens for h in row] for row in found[0]] == [
        [h.tokens for h in row] for row in found[1]
    ]

"""The engine interface, and the fallback to the native engine."""

from __future__ import annotations

import copy
import logging
import subprocess
import threading
import time
from collections.abc import Iterator

import pytest
import torch

from dragoman.config import Config
from dragoman.decoding.beam_search import BeamSearch
from dragoman.decoding.greedy import GreedySearch
from dragoman.decoding.hypothesis import Hypothesis
from dragoman.decoding.sampling import Sampling
from dragoman.decoding.search_interface import SearchStrategy
from dragoman.errors import BundleError
from dragoman.inference import NativeEngine, SearchRequest, Translator, untrusted_engine_trial
from dragoman.models.factory import build_model
from dragoman.runtime.thread_pool_map import map_in_threads
from dragoman.text.sentencepiece_tokenizer import Tokenizers, train_tokenizers

LINES = [
    "ein mann geht",
    "eine frau geht schnell",
    "",
    "zwei hunde",
    "ein hund und ein mann sehen eine frau",
]


@pytest.fixture(scope="module")
def config() -> Config:
    model = {
        "encoder": ["transformer"],
        "decoder": ["transformer"],
        "width": 16,
        "heads": 2,
        "ffn_width": 32,
        "dropout": 0.0,
    }
    return Config().replace(
        model=model,
        text={"vocab_size": 300},
        decode={"beam": 1, "max_length_extra": 6, "max_length_ratio": 1.0},
    )


@pytest.fixture(scope="module")
def tokenizers(config: Config) -> Tokenizers:
    return train_tokenizers(LINES * 3, [line.upper() for line in LINES] * 3, config.text)


@pytest.fixture(scope="module")
def native(config: Config, tokenizers: Tokenizers) -> NativeEngine:
    torch.manual_seed(0)
    model = build_model(
        config.model, src_vocab_size=len(tokenizers.src), tgt_vocab_size=len(tokenizers.tgt)
    ).eval()
    return NativeEngine(lambda: model)


class Echo:
    """An engine that repeats its source, slower for the longer ones, and cannot sample."""

    name = "echo"
    workers = client_threads = 3
    batch_tokens = 48

    def __init__(self, together: int = 1) -> None:
        self.requests: list[SearchRequest] = []
        self.together = threading.Barrier(together)

    def unsupported_reason(self, strategy: SearchStrategy, longest: int = 0) -> str:
        if isinstance(strategy, Sampling):
            return "cannot sample"
        return f"ends at 12 pieces, not {longest}" if longest > 40 else ""

    def generate(self, request: SearchRequest) -> list[list[Hypothesis]]:
        self.requests.append(request)
        if len(self.requests) <= self.together.parties:
            self.together.wait(timeout=60)  # barrier: no thread continues before all have arrived
        time.sleep(0.001 * max(map(len, request.sources)))
        return [
            [Hypothesis(list(source), [0.0] * (len(source) + 1), 0.0, True)]
            for source in request.sources
        ]


def test_batches_go_to_several_threads_and_lines_come_back_in_order(
    native: NativeEngine, tokenizers: Tokenizers, config: Config
) -> None:
    echo = Echo(together=3)
    assert Translator(native, tokenizers, config, engine=echo).translate(LINES * 8) == LINES * 8
    sizes = [
        (len(request.sources), 1 + max(map(len, request.sources))) for request in echo.requests
    ]
    assert max(rows for rows, _ in sizes) > 1
    assert all(rows == 1 or rows * longest <= echo.batch_tokens for rows, longest in sizes)


def test_scores_are_requested_only_where_they_are_returned(
    native: NativeEngine, tokenizers: Tokenizers, config: Config
) -> None:
    echo = Echo()
    translator = Translator(native, tokenizers, config, engine=echo)
    translator.translate(["ein mann"])
    list(translator.stream(["ein mann"]))
    assert [request.return_scores for request in echo.requests] == [False, True]


def test_unsupported_options_fall_back_to_the_native_engine_and_are_reported_once(
    native: NativeEngine, tokenizers: Tokenizers, config: Config, caplog: pytest.LogCaptureFixture
) -> None:
    echo = Echo()
    translator, alone = (
        Translator(native, tokenizers, config, engine=echo),
        Translator(native, tokenizers, config),
    )
    with caplog.at_level(logging.INFO, logger="dragoman"):
        for _ in range(2):
            assert translator.translate(LINES, sample=True, seed=3) == alone.translate(
                LINES, sample=True, seed=3
            )
            assert translator.translate(["ein mann"], prefix="frau " * 60) == alone.translate(
                ["ein mann"], prefix="frau " * 60
            )
            assert (
                translator.explain("ein mann").translation == alone.explain("ein mann").translation
            )
    assert not echo.requests
    messages = [
        record.getMessage()
        for record in caplog.records
        if record.getMessage().startswith("the engine")
    ]
    assert len(messages) == 3
    assert "the engine echo cannot sample: the native engine is used" in messages


class FailingEngine(Echo):
    """Raises an error for every batch of more than some sentences."""

    workers = client_threads = 1

    def __init__(self, error: Exception, *, fits: int = 0) -> None:
        super().__init__()
        self.error, self.fits, self.calls = error, fits, 0

    def generate(self, request: SearchRequest) -> list[list[Hypothesis]]:
        self.calls += 1
        if len(request.sources) > self.fits:
            raise self.error
        return super().generate(request)


def test_an_engine_that_fails_is_replaced_for_good(
    native: NativeEngine, tokenizers: Tokenizers, config: Config, caplog: pytest.LogCaptureFixture
) -> None:
    failing = FailingEngine(RuntimeError("broken\nin detail"))
    translator = Translator(native, tokenizers, config, engine=failing)
    expected = Translator(native, tokenizers, config).translate(LINES)
    for _ in range(2):
        assert translator.translate(LINES) == expected
        assert translator.engine is native
    assert failing.calls == 1
    assert caplog.text.count("the engine echo failed (broken): the native engine is used") == 1


def test_an_engine_without_memory_for_a_batch_is_kept(
    native: NativeEngine, tokenizers: Tokenizers, config: Config
) -> None:
    tight = FailingEngine(torch.OutOfMemoryError("out of memory"), fits=1)
    translator = Translator(native, tokenizers, config, engine=tight)
    assert translator.translate(LINES) == LINES
    assert translator.engine is tight


def test_beams_of_more_than_32_and_models_in_training_run_as_they_are(
    native: NativeEngine,
) -> None:
    model = copy.deepcopy(native.model)
    engine = NativeEngine(lambda: model)
    assert engine.inference_model(BeamSearch(32)).model is not model
    assert engine.inference_model(BeamSearch(33)).model is model
    model.train()
    assert engine.inference_model(BeamSearch(4)).model is model


def test_a_native_engine_loads_its_model_when_it_is_needed(
    native: NativeEngine, tokenizers: Tokenizers, config: Config
) -> None:
    loaded = []

    def load() -> torch.nn.Module:
        loaded.append(1)
        return native.model

    translator = Translator(NativeEngine(load), tokenizers, config, engine=Echo())  # type: ignore[arg-type]
    translator.translate(["ein mann"])
    assert not loaded
    assert next(translator.stream(["ein mann"], alignment=True)).alignment is not None
    assert translator.model is native.model
    assert loaded == [1]


def test_longest_counts_prefixes_sources_and_an_end() -> None:
    request = SearchRequest(
        sources=[[5, 6], [7]],
        limits=[3, 1],
        prefixes=[[], [8] * 9],
        strategy=GreedySearch(),
        sample_ids=[0, 1],
    )
    assert request.longest == 10


@pytest.mark.parametrize(("workers", "run_ahead"), [(1, False), (1, True), (4, False)])
def test_spread_keeps_the_order_of_results_and_errors(workers: int, run_ahead: bool) -> None:
    def work(item: int) -> int:
        time.sleep(0.002 * (item % 3))
        if item == 6:
            raise ValueError("six")
        return item * item

    results = map_in_threads(work, range(12), workers, run_ahead=run_ahead)
    assert [next(results) for _ in range(6)] == [0, 1, 4, 9, 16, 25]
    with pytest.raises(ValueError, match="six"):
        next(results)


def test_one_worker_starts_the_next_item_before_the_last_is_consumed() -> None:
    second = threading.Event()
    results = map_in_threads(
        lambda item: second.set() if item else None, range(3), 1, run_ahead=True
    )
    next(results)
    assert second.wait(10)


@pytest.mark.parametrize("workers", [1, 3])
def test_spread_returns_results_before_a_failing_item(workers: int) -> None:
    """A line that is no text must not swallow the translations of those before it."""

    def items() -> Iterator[int]:
        yield from range(5)
        raise ValueError("no sixth")

    results = map_in_threads(lambda item: item + 1, items(), workers)
    assert [next(results) for _ in range(5)] == [1, 2, 3, 4, 5]
    with pytest.raises(ValueError, match="no sixth"):
        next(results)


def test_one_item_needs_no_thread() -> None:
    assert list(map_in_threads(lambda item: threading.current_thread(), [1], 4)) == [
        threading.current_thread()
    ]


def test_two_items_run_in_two_threads_at_once() -> None:
    both = threading.Barrier(2, timeout=30)

    def work(item: int) -> int:
        both.wait()  # broken if one item is run after the other
        return item

    assert list(map_in_threads(work, [1, 2], 2)) == [1, 2]


def test_spread_does_not_run_ahead_of_its_consumer() -> None:
    begun = []
    results = map_in_threads(lambda item: begun.append(item), range(100), 2)
    next(results)
    results.close()  # type: ignore[attr-defined]
    assert len(begun) <= 4


@pytest.mark.parametrize(
    ("code", "stderr", "found"),
    [
        (1, b"", "exit code 1"),
        (1, b"a warning\nValueError: not a model\n", "ValueError: not a model"),
        (-11, b"a warning\n", "a crash with SIGSEGV"),
    ],
)
def test_a_failed_trial_reports_how_it_ended(
    code: int, stderr: bytes, found: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = subprocess.CompletedProcess([], code, b"", stderr)
    monkeypatch.setattr(untrusted_engine_trial.subprocess, "run", lambda *_, **__: done)
    with pytest.raises(BundleError, match=f"found {found}; use --engine native"):
        untrusted_engine_trial.run_in_child("os:getpid", [], label="it", bytes=0)


def test_address_space_of_a_trial_grows_with_the_files_of_the_engine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    commands = list[list[str]]()

    def run(command: list[str], **_: object) -> subprocess.CompletedProcess[bytes]:
        commands.append(command)
        return subprocess.CompletedProcess(command, 0, b"", b"")

    monkeypatch.setattr(untrusted_engine_trial.subprocess, "run", run)
    for size in (0, 3 << 30):
        untrusted_engine_trial.run_in_child("os:getpid", ["model"], label="it", bytes=size)
    limits = [int(command[-2]) for command in commands]
    assert limits[1] - limits[0] == 4 * (3 << 30)
    assert [command[-1] for command in commands] == ["model", "model"]

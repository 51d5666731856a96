"""Engine benchmark: measured once, cached and logged; and invalid precisions."""

from __future__ import annotations

import json
import logging
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from kernel_kit import cache_with_kernels

from dragoman.bundle import Bundle, write_bundle
from dragoman.config import Config
from dragoman.data.parallel_corpus import ParallelFiles
from dragoman.decoding.beam_search import BeamSearch
from dragoman.decoding.greedy import GreedySearch
from dragoman.decoding.hypothesis import Hypothesis
from dragoman.errors import ConfigError
from dragoman.inference import NativeEngine, SearchRequest, Translator, engine_throughput
from dragoman.inference import engine_selection as opening_module
from dragoman.inference.cpu.cpu_engine_conversion import INT8, convert_model
from dragoman.inference.engine_selection import describe_engine, open_engines
from dragoman.inference.engine_throughput import (
    list_engines,
    measure_throughput,
    select_fastest_engine,
)
from dragoman.models.factory import build_model
from dragoman.text.sentencepiece_tokenizer import train_tokenizers

LINES = ["ein mann geht", "eine frau geht schnell", "zwei hunde"]


class SlowEngine:
    """A slow engine that counts its calls."""

    workers = client_threads = 1
    batch_tokens = None

    def __init__(self, name: str, seconds: float) -> None:
        self.name, self.seconds, self.num_requests = name, seconds, 0

    def unsupported_reason(self, strategy: Any, longest: int = 0) -> str:
        return ""

    def generate(self, request: SearchRequest) -> list[list[Hypothesis]]:
        self.num_requests += 1
        time.sleep(self.seconds)
        return [[Hypothesis(list(source), [], 0.0, True)] for source in request.sources]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    shape = {
        "encoder": ["transformer"],
        "decoder": ["transformer"],
        "width": 16,
        "heads": 2,
        "ffn_width": 32,
    }
    config = Config().replace(
        model=shape,
        text={"vocab_size": 300},
        decode={"beam": 1, "max_length_extra": 6, "max_length_ratio": 1.0},
    )
    tokenizers = train_tokenizers(LINES * 5, [line.upper() for line in LINES] * 5, config.text)
    torch.manual_seed(0)
    model = build_model(
        config.model, src_vocab_size=len(tokenizers.src), tgt_vocab_size=len(tokenizers.tgt)
    ).eval()
    out = tmp_path_factory.mktemp("measuring") / "model"
    write_bundle(
        out, config=config, tokenizers=tokenizers, weights=model.state_dict(), golden=LINES
    )
    return out


def test_the_quickest_is_measured_once_and_remembered(path: Path, tmp_path: Path) -> None:
    bundle = Bundle.load(path)
    for expected in (False, True):
        engines = {"slow": SlowEngine("slow", 0.05), "quick": SlowEngine("quick", 0.001)}
        choice = select_fastest_engine(engines, bundle, GreedySearch(), cache=tmp_path)
        assert choice is not None
        assert (choice.name, choice.from_cache) == ("quick", expected)
        assert choice.rates["quick"] > 2 * choice.rates["slow"]
        assert bool(engines["slow"].num_requests) is not expected
    another = {"slow": SlowEngine("slow", 0.001), "other": SlowEngine("other", 0.001)}
    again = select_fastest_engine(another, bundle, GreedySearch(), cache=tmp_path)
    assert again is not None
    assert not again.from_cache


def test_each_search_and_precision_is_measured_for_itself(path: Path, tmp_path: Path) -> None:
    bundle = Bundle.load(path)
    num_requests: list[tuple[Any, str]] = [
        (GreedySearch(), "float32"),
        (BeamSearch(4), "float32"),
        (BeamSearch(5), "float32"),
        (BeamSearch(5), "int8"),
    ]
    for expected in (False, True):
        for strategy, precision in num_requests:
            choice = select_fastest_engine(
                {"one": SlowEngine("one", 0.0)},
                bundle,
                strategy,
                precision=precision,
                cache=tmp_path,
            )
            assert choice is not None
            assert choice.from_cache is expected


def test_another_model_or_number_of_threads_is_measured_again(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bundle = Bundle.load(path)

    def is_cached(*names: str) -> bool:
        engines = {name: SlowEngine(name, 0.0) for name in names}
        choice = select_fastest_engine(engines, bundle, GreedySearch(), cache=tmp_path)
        assert choice is not None
        assert set(choice.rates) == set(names)
        return choice.from_cache

    assert [is_cached("one", "two"), is_cached("two", "one")] == [False, True]
    with monkeypatch.context() as patch:
        patch.setattr(torch, "get_num_threads", lambda: 77)
        assert not is_cached("one", "two")
    with monkeypatch.context() as patch:
        patch.setattr(engine_throughput, "model_digest", lambda bundle: "another")
        assert not is_cached("one", "two")
    assert is_cached("one", "two")
    assert not is_cached("one")


def test_a_warm_up_is_not_measured() -> None:
    engine = SlowEngine("one", 0.0)
    measure_throughput(engine, [[5, 6]], GreedySearch(), seconds=0.0)
    assert engine.num_requests == 2


def test_the_native_engine_is_listed_with_its_highest_throughput(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DRAGOMAN_CACHE", str(cache_with_kernels(tmp_path / "cache")))
    rates = {"native (1 x 2 threads)": 20.0, "native (2 x 1 thread)": 50.0, "other (2)": 40.0}
    names = {SlowEngine(name, 0.0): name for name in rates}
    monkeypatch.setattr(
        engine_throughput, "measure_throughput", lambda engine, *_: rates[names[engine]]
    )
    bundle = Bundle.load(path)
    engines = {name: engine for engine, name in names.items()}
    choice = select_fastest_engine(engines, bundle, GreedySearch())
    assert choice is not None
    assert choice.name == "native (2 x 1 thread)"
    [native] = list_engines(bundle, GreedySearch())
    assert (native.name, native.rate, native.chosen) == ("native", 50.0, True)


def test_a_shortlist_leaves_out_exported_engines(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests: list[str] = []
    monkeypatch.setattr(
        opening_module,
        "choose_engine",
        lambda bundle, requested, *_: requests.append(requested),
    )
    for side in ("src", "tgt"):
        (tmp_path / side).write_text("\n".join(LINES) + "\n", "utf-8")
    native, engine = open_engines(
        Bundle.load(path),
        torch.device("cpu"),
        shortlist=ParallelFiles(tmp_path / "src", tmp_path / "tgt"),
    )
    assert requests == ["native"]
    assert engine is native
    assert native.shortlist is not None


@pytest.mark.parametrize("content", ["", "[1]", "{broken", "\xff"])
def test_damaged_cache_entry_is_measured_again(path: Path, tmp_path: Path, content: str) -> None:
    (tmp_path / "engines.json").write_bytes(content.encode("latin-1"))
    choice = select_fastest_engine(
        {"one": SlowEngine("one", 0.0)}, Bundle.load(path), GreedySearch(), cache=tmp_path
    )
    assert choice is not None
    assert not choice.from_cache
    assert json.loads((tmp_path / "engines.json").read_text("utf-8"))


def test_unwritable_cache_costs_only_time(path: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way", "utf-8")
    choice = select_fastest_engine(
        {"one": SlowEngine("one", 0.0)},
        Bundle.load(path),
        GreedySearch(),
        cache=tmp_path / "file" / "below",
    )
    assert choice is not None


def test_all_workers_are_measured_together() -> None:
    engine = SlowEngine("two", 0.02)
    engine.workers = engine.client_threads = 2  # type: ignore[misc]
    assert measure_throughput(engine, [[5, 6]], GreedySearch(), seconds=0.05) > measure_throughput(
        SlowEngine("one", 0.02), [[5, 6]], GreedySearch(), seconds=0.05
    )


def test_auto_takes_and_names_the_quickest(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("DRAGOMAN_CACHE", str(cache_with_kernels(tmp_path / "cache")))
    bundle, cpu = Bundle.load(path), torch.device("cpu")
    other = SlowEngine("exported", 10.0)
    monkeypatch.setattr(opening_module, "choose_engine", lambda *_: other)
    assert open_engines(bundle, cpu).engine is other, (
        "without a measurement the exported engine is chosen"
    )
    other.seconds = 0.3
    with caplog.at_level(logging.INFO, logger="dragoman"):
        native, engine = open_engines(bundle, cpu, benchmark_strategy=GreedySearch())
        open_engines(bundle, cpu, benchmark_strategy=GreedySearch())
    assert engine is native
    [message] = [
        record.getMessage() for record in caplog.records if "fastest" in record.getMessage()
    ]
    assert message.startswith("native (")
    assert "is the fastest here; sentences per second: native (" in message
    assert "exported (1 x " in message


def test_description_states_how_work_is_divided(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    assert describe_engine(NativeEngine(lambda: None, workers=4)) == "native (4 x 1 thread)"  # type: ignore[arg-type,return-value]
    assert (
        describe_engine(NativeEngine(lambda: None, precision="int8"))
        == "native-int8 (1 x 4 threads)"
    )  # type: ignore[arg-type,return-value]


def test_one_worker_is_calibrated_on_the_same_sentences(path: Path) -> None:
    model = Bundle.load(path).model
    if convert_model(model, INT8).unsupported_reason:
        pytest.skip("this processor has no int8")

    def scores(engine: NativeEngine) -> list[float]:
        request = SearchRequest(
            sources=[[5, 6, 7], [8]],
            limits=[8, 8],
            prefixes=[[], []],
            strategy=GreedySearch(),
            sample_ids=[0, 1],
        )
        return [row[0].score for row in engine.generate(request)]

    sentences = [([5] * 40, [6] * 40)]
    engine = NativeEngine(lambda: model, precision=INT8, workers=2, pairs=lambda: sentences)
    assert scores(engine) != scores(NativeEngine(lambda: model, precision=INT8))
    assert scores(engine.single_worker()) == scores(engine)


def test_a_translator_in_int8_translates(path: Path) -> None:
    translator = Translator.load(path, device="cpu", precision="int8")
    assert translator.engine.name == "native-int8"
    assert len(translator.translate(LINES)) == len(LINES)
    assert translator.translate(LINES, batch_size=1) == translator.translate(LINES, batch_size=3)


def test_a_precision_must_be_known_and_there(path: Path) -> None:
    with pytest.raises(
        ConfigError, match="must be one of float32, int8, float16, bfloat16; found 'int4'"
    ):
        Translator.load(path, device="cpu", precision="int4")
    with pytest.raises(ConfigError, match="runs on a CPU; found the device cuda"):
        open_engines(Bundle.load(path), torch.device("cuda"), precision="int8")

"""One model in many threads: translate, explain, record and edit equal a single thread."""

from __future__ import annotations

import asyncio
import contextvars
import functools
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from dragoman.attention import edit, find_attentions, heads_off, record
from dragoman.config import Config, read_config
from dragoman.inference import NativeEngine, Translator
from dragoman.models.encoder_decoder import EncoderDecoder
from dragoman.models.factory import build_model
from dragoman.text.sentencepiece_tokenizer import Tokenizers, train_tokenizers

THREADS = 8
LINES = [
    "das haus ist alt",
    "ein hund",
    "a",
    "hund und haus und hund",
    "zwei alte hunde",
    "das ist ein haus",
]
SIZES = [
    "model.width=16",
    "model.heads=4",
    "model.ffn_width=32",
    "text.vocab_size=290",
    "decode.max_length_ratio=1.0",
    "decode.max_length_extra=3",
]
MODELS = {
    "transformer": ["model.encoder=[transformer*2]", "model.decoder=[transformer*2]"],
    "alibi": [
        "model.encoder=[transformer*2]",
        "model.decoder=[transformer*2]",
        "model.positions=alibi",
    ],
    "grouped": [
        "model.encoder=[transformer*2]",
        "model.decoder=[transformer*2]",
        "model.kv_heads=2",
    ],
    "gru": ["model.encoder=[bigru]", "model.decoder=[gru(attention=additive)]"],
    "lstm": [
        "model.encoder=[bilstm]",
        "model.decoder=[lstm(attention=general,input_feeding=true,layers=2)]",
    ],
    "conv": ["model.encoder=[conv*2]", "model.decoder=[conv*2]"],
    "reformer": ["model.encoder=[reformer(layers=2)]", "model.decoder=[reformer(layers=2)]"],
    "plain": ["model.encoder=[lstm]", "model.decoder=[lstm]"],
}


BATCH = tuple(
    torch.randint(4, 280, size, generator=torch.Generator().manual_seed(1))
    for size in ((2, 6), (2, 5))
)  # source, target


@functools.cache
def tokenizers() -> Tokenizers:
    """Learn the tokenizer that all of them share."""
    return train_tokenizers(
        LINES * 9, [line.upper() for line in LINES] * 9, read_config(overrides=SIZES).text
    )


@functools.cache
def translator(name: str, workers: int = 2) -> Translator:
    """Build a translator with random weights whose engine has workers of its own."""
    config: Config = read_config(overrides=[*SIZES, *MODELS[name]])
    torch.manual_seed(7)
    made = build_model(
        config.model, src_vocab_size=len(tokenizers().src), tgt_vocab_size=len(tokenizers().tgt)
    ).eval()
    for weight in made.requires_grad_(False).parameters():
        weight.mul_(2.0 if weight.dim() > 1 else 1.0)  # so that outputs differ
    return Translator(NativeEngine(lambda: made, workers=workers), tokenizers(), config)


def model_of(name: str) -> EncoderDecoder:
    """Get the model that all threads share."""
    return translator(name).model


def in_threads(work: Callable[[int], Any], count: int = THREADS) -> list[Any]:
    """Do something in so many threads that start together."""
    barrier = threading.Barrier(count)

    def started(number: int) -> Any:
        barrier.wait(60)
        return work(number)

    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(started, range(count)))


def ask(name: str, number: int) -> dict[str, Any]:
    """Run one kind of call; return its results as arrays by name."""
    own, kind = translator(name), number % 4
    lines = LINES[number % 3 :]
    if kind == 0:
        return {"texts": own.translate(lines, beam=1 + number % 2, batch_size=2)}
    if kind == 1:  # what --json asks for
        found = list(own.stream(lines, alignment=True, batch_size=2))
        return {f"{at}": each.alignment for at, each in enumerate(found)} | {
            "texts": [each.text for each in found]
        }
    if kind == 2:
        explained = own.explain(lines[0])
        return {
            **explained.attentions,
            "alignment": explained.alignment,
            "texts": [explained.translation],
        }
    with torch.inference_mode(), record(own.model) as notes:
        own.model(*BATCH)
    return {
        f"{path} {at}": note.weights.numpy()
        for path in notes
        for at, note in enumerate(notes.calls(path))
    }


def differences(found: dict[str, Any], expected: dict[str, Any]) -> list[str]:
    """Name what differs: nothing, to the last bit, but in a pass of one's own, which rounds as its
    number of torch's threads has it.
    """
    wrong = sorted(found.keys() ^ expected.keys())
    for name in found.keys() & expected.keys():
        one, other = found[name], expected[name]
        if not isinstance(other, np.ndarray):
            same = one == other
        else:
            same = (
                np.array_equal(one, other)
                if "texts" in found
                else np.allclose(one, other, atol=1e-5, rtol=0)
            )
        wrong += [] if same else [name]
    return wrong


def require_the_same_in_threads(name: str, calls: int) -> None:
    """Compare calls of all kinds from many threads with the same from one."""
    expected = [ask(name, number) for number in range(12)]
    found = in_threads(
        lambda thread: [
            differences(ask(name, at), expected[at])
            for at in ((thread + call) % 12 for call in range(calls))
        ]
    )
    assert [wrong for each in found for wrong in each if wrong] == []
    assert all(module.hooks is None for module in find_attentions(model_of(name)).values())


@pytest.mark.parametrize("name", MODELS)
def test_calls_of_all_kinds_from_eight_threads_equal_those_of_one(name: str) -> None:
    require_the_same_in_threads(name, calls=4)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["transformer", "gru", "grouped"])
def test_two_hundred_calls_from_each_of_eight_threads_equal_those_of_one(name: str) -> None:
    require_the_same_in_threads(name, calls=200)


def first_only(weights: Tensor) -> Tensor:
    """Attend to the first position alone."""
    return torch.zeros_like(weights).index_fill_(-1, torch.tensor([0]), 1.0)


@pytest.mark.parametrize("name", ["grouped", "gru", "conv"])
def test_edits_of_one_thread_are_not_seen_by_others(name: str) -> None:
    """Half of the threads edit, the others record the same attentions; all nest both."""
    model, paths = (
        model_of(name),
        [path for path in find_attentions(model_of(name)) if path.startswith("decoder")],
    )

    @torch.no_grad()
    def work(number: int) -> list[Any]:
        found = []
        for _ in range(20):
            with (
                edit(model, dict.fromkeys(paths, first_only)) if number % 2 else record(model),
                record(model, paths[-1:]) as notes,
            ):
                logits = model(*BATCH)
            found.append((logits, len(notes.calls(paths[-1])), notes[paths[-1]].weights))
        return found

    expected = [work(number)[0] for number in range(2)]
    assert not torch.allclose(expected[0][0], expected[1][0])
    for number, found in enumerate(in_threads(work)):
        for logits, calls, weights in found:
            torch.testing.assert_close(logits, expected[number % 2][0])
            torch.testing.assert_close(weights, expected[number % 2][2])
            assert calls == 1


def test_an_error_in_one_thread_leaves_the_others_recording() -> None:
    model = model_of("transformer")

    def work(number: int) -> int:
        for _ in range(20):
            try:
                with (
                    record(model) as notes,
                    edit(model, {"decoder.0.cross": heads_off([9 if number % 2 else 0])}),
                ):
                    model(*BATCH)  # there is no ninth head
            except Exception:
                assert number % 2
            else:
                assert len(notes) == len(find_attentions(model))
            assert all(module.hooks is None for module in find_attentions(model).values())
        return number

    assert in_threads(work) == list(range(THREADS))


def test_threads_and_contexts_started_within_a_block() -> None:
    """A plain thread records nothing; one that runs in a copy of the context is part of the call,
    until the block ends.
    """
    model, heard = model_of("transformer"), []
    done = threading.Event()

    def late() -> None:
        done.wait(60)
        model(*BATCH)

    with record(model) as notes:
        plain = threading.Thread(target=lambda: model(*BATCH))
        plain.start()
        plain.join()
        assert len(notes) == 0
        context = contextvars.copy_context()
        copied = threading.Thread(target=context.run, args=(lambda: model(*BATCH),))
        copied.start()
        copied.join()
        heard.append(len(notes.calls("decoder.0.cross")))
        outliving = threading.Thread(target=contextvars.copy_context().run, args=(late,))
        outliving.start()
    done.set()
    outliving.join()
    heard.append(len(notes.calls("decoder.0.cross")))
    assert heard == [1, 1]


def test_generators_may_end_in_any_order_and_in_another_thread() -> None:
    model = model_of("transformer")

    def recording() -> Iterator[int]:
        with record(model, ["decoder.0.cross"]) as notes:
            while True:
                yield len(notes.calls("decoder.0.cross")) if notes else 0

    first, second, third = recording(), recording(), recording()
    assert [next(each) for each in (first, second, third)] == [0, 0, 0]
    model(*BATCH)
    assert [next(each) for each in (first, second, third)] == [1, 1, 1]
    first.close()
    model(*BATCH)
    assert [next(each) for each in (second, third)] == [2, 2]
    closer = threading.Thread(target=third.close)
    closer.start()
    closer.join()
    model(*BATCH)
    assert next(second) == 3
    second.close()
    assert find_attentions(model)["decoder.0.cross"].hooks is None


def test_tasks_of_one_event_loop_record_apart() -> None:
    model = model_of("transformer")

    async def task(off: int) -> Tensor:
        with edit(model, {"decoder.1.cross": heads_off([off])}), record(model) as notes:
            for _ in range(3):
                await asyncio.sleep(0)
                model(*BATCH)
        assert len(notes.calls("decoder.1.cross")) == 3
        return notes["decoder.1.cross"].weights

    async def both() -> list[Tensor]:
        return list(await asyncio.gather(task(0), task(1)))

    zero, one = asyncio.run(both())
    assert not zero[:, 0].any()
    assert zero[:, 1].any()
    assert not one[:, 1].any()
    assert one[:, 0].any()


@pytest.mark.parametrize("name", ["transformer", "gru"])
def test_a_translator_that_is_edited_or_recorded_does_so_for_all_its_work(name: str) -> None:
    """The engine's workers are other threads: whoever records gets every step, and whoever edits an
    edited translation.
    """
    path = "decoder.1.cross" if name == "transformer" else "decoder.0.cross"
    few = {"beam": 1, "batch_size": 1}
    with edit(translator(name, 1).model, {path: first_only}):
        expected = translator(name, 1).translate(LINES, **few)
    with edit(model_of(name), {path: first_only}):
        assert translator(name).translate(LINES, **few) == expected
    assert (
        translator(name).translate(LINES, **few)
        == translator(name, 1).translate(LINES, **few)
        != expected
    )
    with record(model_of(name), [path]) as notes:
        found = list(translator(name).stream(LINES, **few))
    steps = len(notes.calls(path))
    assert steps >= sum(len(each.tokens) for each in found)


def test_model_is_loaded_once_from_many_threads() -> None:
    config = read_config(overrides=[*SIZES, *MODELS["transformer"]])
    loaded: list[EncoderDecoder] = []

    def load() -> EncoderDecoder:
        made = build_model(config.model, src_vocab_size=290, tgt_vocab_size=290).eval()
        loaded.append(made)
        return made

    native = NativeEngine(load)
    assert len({id(each) for each in in_threads(lambda _: native.model)}) == len(loaded) == 1

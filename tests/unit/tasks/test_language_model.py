"""Language modeling: streams and segments, carried states, perplexity, resume."""

from __future__ import annotations

import dataclasses
import itertools
import math
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from language_kit import MODELS, config_of, lines_of, records_of, task_of, trainer_of
from torch.nn import functional as F
from training_kit import FakeCUDAGraphRunner, assert_same_run

from dragoman.checkpoint.run_directory import RunDirectory
from dragoman.config import Config
from dragoman.data.batch_plan import Cursor
from dragoman.data.labeled_records import Record
from dragoman.data.language_model_segment_plan import SegmentPlan
from dragoman.errors import BundleError, ConfigError, DataError
from dragoman.models.language_model import NeuralLanguageModel
from dragoman.tasks.language_model import LanguageTask, SegmentBatch, build_stream
from dragoman.text.special_tokens import BOS, EOS, UNK
from dragoman.training.bf16_mixed_precision import choose_precision
from dragoman.training.progress_display import QuietProgress
from dragoman.training.task_protocol import Loss

CPU = torch.device("cpu")


def evaluate(task: LanguageTask, model: torch.nn.Module, lines: list[str]) -> dict[str, float]:
    store = task.encode(records_of(lines))
    return task.evaluate(
        model.eval(),
        store,
        device=CPU,
        precision=choose_precision("float32", CPU),
        progress=QuietProgress(),
    )


def batches_of(task: LanguageTask, lines: list[str], epoch: int = 0) -> list[SegmentBatch]:
    store = task.encode(records_of(lines))
    plan = task.plan(store, batch_tokens=task.config.train.batch_tokens, seed=7)
    return [
        task.collate(store, plan.batch(Cursor(epoch, number)))
        for number in range(plan.batches(epoch))
    ]


def test_a_stream_has_eos_after_each_line_and_bos_before_each_document() -> None:
    config = config_of("transformer")
    task = task_of(config, ["a b", "", "c <unk>"])
    records = [
        *records_of(["a b", "", "c zzz"], "one.txt"),
        *records_of(["b"], "two.txt"),
        Record(Path("books.jsonl"), 1, {"text": "a\nb"}),
        Record(Path("books.jsonl"), 2, {"text": "c"}),
    ]
    store = task.encode(records)
    a, b, c = (task.text.vocabulary.id(word) for word in "abc")
    stream = build_stream(store)
    assert stream.targets.tolist() == [
        *(a, b, EOS, EOS, c, UNK, EOS),
        *(b, EOS),
        *(a, EOS, b, EOS),
        *(c, EOS),
    ]
    assert stream.starts.tolist() == [0, 7, 9, 13]
    expected = [BOS, *stream.targets[:-1].tolist()]
    for start in stream.starts:
        expected[start] = BOS
    assert stream.inputs.tolist() == expected
    assert store.values["bytes"].tolist() == [4, 1, 6, 2, 3, 1]


def test_the_unknown_word_and_the_line_end_are_scored_types() -> None:
    """WikiText-2: its 33,278 types include <unk> and <eos>; padding and BOS are two more ids."""
    task = task_of(config_of("transformer"), ["a <unk> b", "b"])
    assert len(task.text) == 4 + 2  # <pad>, <s>, </s> for <eos>, <unk>; a and b


@pytest.mark.parametrize("name", ["transformer_xl", "lstm"])
def test_carried_segments_continue_their_rows(name: str) -> None:
    task, lines = task_of(config_of(name), lines_of(40)), lines_of(40)
    batches = batches_of(task, lines)
    tokens = len(build_stream(task.encode(records_of(lines))).targets)
    assert sum(batch.tokens for batch in batches) > tokens - len(batches[0])
    for before, after in itertools.pairwise(batches):
        real = after.inputs[:, 0] != BOS
        assert torch.equal(after.inputs[real, 0], before.targets[real, -1])
        assert torch.equal(after.streams, before.streams)
        assert torch.equal(after.segments, before.segments + 1)
        assert after.parity != before.parity
        assert before.graph_key != after.graph_key
    again, later = batches_of(task, lines), batches_of(task, lines, epoch=1)
    assert all(torch.equal(a.targets, b.targets) for a, b in zip(batches, again, strict=True))
    assert not torch.equal(batches[0].targets, later[0].targets)


def test_segments_are_shuffled_when_nothing_is_carried() -> None:
    task, lines = task_of(config_of("transformer"), lines_of(40)), lines_of(40)
    batches = batches_of(task, lines)
    rows = torch.cat([batch.targets for batch in batches])
    stream = build_stream(task.encode(records_of(lines)))
    assert len(rows) == len(stream.targets) // 8
    doubled = np.concatenate([stream.targets, stream.targets]).tolist()
    text = " ".join(map(str, doubled))
    assert all(" ".join(map(str, row.tolist())) in text for row in rows)


def test_each_epoch_shuffles_the_segments_anew() -> None:
    """The order depends on the epoch alone, so that a resumed run continues it."""
    options = {"segment": 8, "batch_tokens": 64, "seed": 7, "carried": False}

    def starts(plan: SegmentPlan, epoch: int) -> list[int]:
        batches = [plan.batch(Cursor(epoch, number)) for number in range(plan.batches(epoch))]
        found = np.concatenate([plan.locate(batch).starts for batch in batches])
        return (found - found.min()).tolist()

    plan = SegmentPlan(803, **options)
    orders = [starts(plan, epoch) for epoch in range(3)]
    assert all(sorted(order) == [*range(0, 800, 8)] for order in orders)
    assert orders[0] != orders[1] != orders[2] != orders[0]
    resumed = SegmentPlan(803, **options)
    assert starts(resumed, 2) == orders[2]
    assert starts(plan, 0) == orders[0]


@pytest.mark.parametrize("name", ["transformer_xl", "lstm"])
def test_a_batch_computed_again_or_in_parts_gives_the_same(name: str) -> None:
    config = config_of(name, model={"dropout": 0.0}, language={"input_dropout": 0.0})
    if name == "lstm":
        config = config.replace(model={"decoder": ("lstm*2",)})
    task, lines = task_of(config, lines_of(40)), lines_of(40)
    batches = batches_of(task, lines)
    torch.manual_seed(1)
    model = task.build_model().double()
    with torch.no_grad():
        task.loss(model, batches[0])
        once = task.loss(model, batches[1])
        again = task.loss(model, batches[1])
        state = {name: tensor.clone() for name, tensor in task.carried_state().items()}
        parts = [task.loss(model, batches[1].rows(slice(*part))) for part in ((0, 2), (2, None))]
        assert float(once.nll) == float(again.nll)
        assert float(sum(part.nll for part in parts)) == pytest.approx(float(once.nll), rel=1e-9)
        for key, tensor in task.carried_state().items():
            torch.testing.assert_close(tensor, state[key])


def test_the_memory_equals_the_context_of_a_longer_segment() -> None:
    """Two segments with a memory score as one of twice the length; a short memory does not."""
    lines, total = lines_of(60), dict[tuple[int, int], float]()
    for segment, memory in ((8, 64), (16, 64), (8, 2)):
        config = config_of(
            "transformer_xl",
            model={"dropout": 0.0},
            language={"segment": segment, "memory": memory, "input_dropout": 0.0},
        )
        task = task_of(config.replace(language={"eval_memory": 0, "clamp_distance": 0}), lines)
        store = task.encode(records_of(lines))
        plan = task.plan(store, batch_tokens=segment, seed=7)
        torch.manual_seed(1)
        model = task.build_model().double()
        with torch.no_grad():
            losses = [
                task.loss(model, task.collate(store, plan.batch(Cursor(0, number))))
                for number in range(16 // segment)
            ]
        total[segment, memory] = float(sum(loss.nll for loss in losses))
    assert total[8, 64] == pytest.approx(total[16, 64], rel=1e-9)
    assert total[8, 2] != pytest.approx(total[16, 64], rel=1e-4)


def hand_nll(task: LanguageTask, model: Any, lines: list[str]) -> float:
    """Sum -log p of all tokens with logits of the whole document at once."""
    stream = build_stream(task.encode(records_of(lines)))
    inputs = torch.from_numpy(stream.inputs.astype(np.int64))[None]
    targets = torch.from_numpy(stream.targets.astype(np.int64))
    with torch.no_grad():
        logits = model(inputs)[0].double()
    return float(F.cross_entropy(logits, targets, reduction="sum"))


@pytest.mark.parametrize("name", ["transformer_xl", "lstm"])
@pytest.mark.parametrize("rows", [1, 0])
def test_perplexity_equals_a_hand_computation(name: str, rows: int) -> None:
    lines = lines_of(12)
    language: dict[str, Any] = {"eval_rows": rows}
    if name == "transformer_xl":
        language |= {"memory": 200, "eval_memory": 200, "clamp_distance": 0}
    task = task_of(config_of(name, language=language), lines)
    torch.manual_seed(1)
    model = task.build_model().eval()
    metrics = evaluate(task, model, lines)
    tokens = len(build_stream(task.encode(records_of(lines))).targets)
    loss = hand_nll(task, model, lines) / tokens
    # An LSTM's parallel parts begin after a warm-up, not with the whole document before them.
    tolerance = 1e-5 if rows == 1 or name == "transformer_xl" else 1e-2
    assert metrics["loss"] == pytest.approx(loss, rel=tolerance)
    assert metrics["perplexity"] == pytest.approx(math.exp(metrics["loss"]), rel=1e-9)
    assert "bits_per_byte" not in metrics  # <unk> is not text


def test_parallel_parts_of_a_document_are_scored_after_a_warm_up() -> None:
    lines = lines_of(40)
    task = task_of(config_of("transformer_xl", language={"memory": 4, "eval_memory": 4}), lines)
    stream = build_stream(task.encode(records_of(lines)))
    spans = list(task.scorer(task.build_model(), torch.device("cpu"))._spans(stream))
    assert len(spans) > 3
    assert [each.scored for each in spans[1:]] == [each.end for each in spans[:-1]]
    assert (spans[0].begin, spans[0].scored, spans[-1].end) == (0, 0, len(stream.targets))
    warmup = 8  # a segment, which is longer than the memory
    assert all(each.scored - each.begin == warmup for each in spans[1:])


def test_evaluation_may_have_a_longer_or_shorter_memory_than_training() -> None:
    lines, loss = lines_of(12), dict[tuple[int, int], float]()
    for memory, eval_memory in ((16, 0), (16, 16), (16, 2), (2, 0), (2, 16)):
        language = {"memory": memory, "eval_memory": eval_memory, "clamp_distance": 0}
        task = task_of(config_of("transformer_xl", language=language), lines)
        torch.manual_seed(1)
        metrics = evaluate(task, task.build_model().eval(), lines)
        loss[memory, eval_memory] = metrics["loss"]
        assert f"memory:{eval_memory or memory}|" in task.scores(metrics)[0].signature
    assert loss[16, 0] == loss[16, 16] == loss[2, 16]
    assert loss[2, 0] == loss[16, 2] != pytest.approx(loss[16, 16], rel=1e-4)


@pytest.mark.parametrize(("clamp", "is_clamped"), [(3, True), (0, False)])
def test_tokens_beyond_the_clamp_distance_attend_without_their_order(
    clamp: int, is_clamped: bool
) -> None:
    """The last of 8 tokens is at a distance of 3 or more to the first 5, which one layer attends
    to as a set then, also where evaluation has a longer memory than training.
    """
    language = {"segment": 4, "memory": 2, "eval_memory": 8, "clamp_distance": clamp}
    config = config_of("transformer_xl", model={"decoder": ("transformer",)}, language=language)
    torch.manual_seed(1)
    model = task_of(config, lines_of(20)).build_model().double().eval()

    def last_logits(ids: list[int]) -> torch.Tensor:
        state = model.start(1, memory=config.language.resolved_eval_memory)
        with torch.no_grad():
            for part in torch.tensor([ids]).split(4, dim=1):
                logits, state = model.extend(part, state)
        return logits[0, -1]

    found = last_logits([4, 5, 6, 7, 8, 9, 10, 11])
    reordered = last_logits([8, 7, 6, 5, 4, 9, 10, 11])
    assert torch.allclose(found, reordered, rtol=0, atol=1e-12) == is_clamped
    assert not torch.allclose(found, last_logits([4, 5, 6, 7, 8, 10, 9, 11]), rtol=0, atol=1e-6)


def test_overlapping_windows_give_every_token_its_context() -> None:
    lines = lines_of(12)
    task = task_of(config_of("transformer", language={"eval_stride": 3}), lines)
    torch.manual_seed(1)
    model = task.build_model().eval()
    stream = build_stream(task.encode(records_of(lines)))
    inputs = torch.from_numpy(stream.inputs.astype(np.int64))
    targets = torch.from_numpy(stream.targets.astype(np.int64))
    nll, seen, position = 0.0, 0, 0
    while position < len(targets):
        stop = min(8, len(targets)) if not position else min(position + 3, len(targets))
        begin = max(0, stop - 8)
        with torch.no_grad():
            logits = model(inputs[None, begin:stop])[0]
        part = F.cross_entropy(logits, targets[begin:stop], reduction="none")
        nll += float(part[position - begin :].sum())
        seen += stop - position
        position = stop
    assert seen == len(targets)
    assert evaluate(task, model, lines)["loss"] == pytest.approx(nll / seen, rel=1e-5)
    # The score that prediction returns for the same document.
    assert task.scorer(model, CPU).documents([stream.targets]) == pytest.approx([nll], rel=1e-5)


def test_bits_per_byte_of_a_uniform_model_is_its_entropy() -> None:
    config = config_of("transformer_xl", text={"tokenizer": "bytes"})
    task = LanguageTask(config, LanguageTask.fit_text(config, lambda: iter(())))
    model = task.build_model().eval()
    with torch.no_grad():
        model.embedding.weight.zero_()
    metrics = evaluate(task, model, ["héllo", "wörld"])
    assert metrics["bits_per_byte"] == pytest.approx(math.log2(260), rel=1e-5)
    assert metrics["perplexity"] == pytest.approx(260, rel=1e-4)


def test_documents_are_scored_apart() -> None:
    task = task_of(config_of("lstm"), lines_of(20))
    torch.manual_seed(1)
    model = task.build_model().eval()
    rows = [task.text.encode(line) for line in lines_of(3)]
    scorer = task.scorer(model, CPU)
    together = scorer.documents([*rows, np.zeros(0, np.int32)])
    assert together[3] == 0.0
    assert together[:3] == pytest.approx([scorer.documents([row])[0] for row in rows], rel=1e-5)


@pytest.mark.parametrize("name", ["transformer_xl", "lstm", "transformer"])
def test_resuming_mid_epoch_is_bit_identical(name: str, tmp_path: Path) -> None:
    config, lines = config_of(name), lines_of(60)
    whole = trainer_of(tmp_path / "whole", config, lines)
    with whole._run:
        whole.fit()
    # A run that was killed after step 8, in the middle of an epoch.
    shutil.copytree(tmp_path / "whole", tmp_path / "killed")
    for step in RunDirectory(tmp_path / "killed").steps():
        if step > 8:
            shutil.rmtree(tmp_path / "killed" / f"step-{step:08d}")
    resumed = trainer_of(tmp_path / "killed", config, lines)
    with resumed._run:
        resumed.fit(resume=True)
    assert resumed.state.epoch < 2
    assert_same_run(tmp_path / "whole", tmp_path / "killed")
    newest = [RunDirectory(tmp_path / part).latest() for part in ("whole", "killed")]
    carried = [each.load_carried() for each in newest if each is not None]
    assert carried[0].keys() == carried[1].keys()
    assert bool(carried[0]) == (name != "transformer")
    assert all(torch.equal(carried[0][key], carried[1][key]) for key in carried[0])


@pytest.mark.parametrize("name", MODELS)
def test_every_kind_of_model_learns(name: str, tmp_path: Path) -> None:
    config = config_of(
        name,
        model={"dropout": 0.0},
        train={"steps": 60, "batch_tokens": 256, "checkpoint_every": 1000, "learning_rate": 1e-2},
    )
    lines = lines_of(200)
    trainer = trainer_of(tmp_path / "run", config, lines)
    task = trainer._step.task
    assert isinstance(task, LanguageTask)
    before = evaluate(task, trainer.model, lines_of(50, seed=1))
    with trainer._run:
        trainer.fit()
    after = evaluate(task, trainer.model, lines_of(50, seed=1))
    # Words are uniform over 8 alone, and nearly known given the one before.
    assert after["perplexity"] < 0.6 * before["perplexity"]
    assert after["perplexity"] < 5.5


def test_activation_penalties_equal_their_definition() -> None:
    config = config_of("lstm", language={"activation_penalty": 2.0, "temporal_penalty": 1.0})
    config = config.replace(model={"decoder": ("lstm",), "dropout": 0.0})
    config = config.replace(language={"input_dropout": 0.0})
    task, lines = task_of(config, lines_of(20)), lines_of(20)
    batch = batches_of(task, lines)[0]
    torch.manual_seed(1)
    model = task.build_model()
    loss: Loss = task.loss(model, batch)
    hidden = model.decode(batch.inputs)
    change = hidden[:, 1:] - hidden[:, :-1]
    penalty = 2.0 * hidden.pow(2).mean() + change.pow(2).mean()
    torch.testing.assert_close(loss.total, loss.nll + batch.tokens * penalty)
    # A row's last segment may have a single token, from which nothing changes to the next.
    last = dataclasses.replace(batch, inputs=batch.inputs[:, :1], targets=batch.targets[:, :1])
    assert torch.isfinite(task.loss(model, last).total)


def test_activations_are_penalized_after_dropout_and_their_changes_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    penalties = {"activation_penalty": 2.0, "temporal_penalty": 1.0}
    config = config_of("lstm", language={"output_dropout": 0.5, **penalties})
    task, lines = task_of(config, lines_of(20)), lines_of(20)
    batch = batches_of(task, lines)[0]
    torch.manual_seed(1)
    model = task.build_model().train()
    decode, seen = model.decode_segment, []

    def watched(*arguments: Any, **options: Any) -> Any:
        seen.append(decode(*arguments, **options))
        return seen[-1]

    monkeypatch.setattr(model, "decode_segment", watched)
    loss: Loss = task.loss(model, batch)
    [found] = seen
    assert (found.hidden == 0).float().mean() > 0.2
    change = found.raw[:, 1:] - found.raw[:, :-1]
    penalty = 2.0 * found.hidden.pow(2).mean() + change.pow(2).mean()
    torch.testing.assert_close(loss.total, loss.nll + batch.tokens * penalty)


def test_golden_outputs_are_log_probabilities() -> None:
    task = task_of(config_of("lstm"), lines_of(20))
    torch.manual_seed(1)
    model = task.build_model().eval()
    inputs = task.golden_inputs(records_of(["", "a b c", "d"]))
    assert inputs == ["a b c", "d"]
    outputs = task.golden_outputs(model, inputs)
    assert outputs[0]["tokens"] == 4
    assert outputs[0]["log_prob"] == pytest.approx(-hand_nll(task, model, ["a b c"]), rel=1e-5)
    with pytest.raises(TypeError, match="must be text"):
        task.golden_outputs(model, [3])


@pytest.mark.parametrize("tokenizer", ["words", "bytes", "bpe"])
def test_text_files_restore_the_text(tokenizer: str) -> None:
    changes = {"tokenizer": tokenizer, "vocab_size": 300}
    config = config_of("lstm", text=changes)
    task = task_of(config, ["the cat sat on the mat", "a dog ran", "the café"] * 20)
    again = LanguageTask.load_text(config, task.text_files())
    for text in ("the cat\nran\n", "the cafe\u0301\n"):  # a letter and its accent apart
        assert again.encode(text).tolist() == task.text.encode(text).tolist()
    assert len(again) == len(task.text)
    if tokenizer != "bytes":
        with pytest.raises(BundleError, match="no files"):
            LanguageTask.load_text(config, {})


def test_too_little_text_is_an_error() -> None:
    task = task_of(config_of("lstm"), ["a"])
    store = task.encode([])
    with pytest.raises(DataError, match="at least 2 tokens of text; found 0"):
        task.plan(store, batch_tokens=32, seed=1)


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("transformer", {"language": {"memory": 8}}, "found model.positions=sinusoidal; set model"),
        ("lstm", {"language": {"memory": 8}}, "found language.memory=8 with model.decoder=[lstm"),
        ("lstm", {"model": {"positions": "sinusoidal"}}, "set model.positions=none"),
        ("transformer", {"language": {"eval_memory": 8}}, "found language.eval_memory=8"),
        ("transformer", {"language": {"eval_stride": 9}}, "found 9 and 8; lower it"),
        ("transformer", {"language": {"clamp_distance": 9}}, "language.clamp_distance needs"),
        ("transformer_xl", {"model": {"layer_drop": 0.1}}, "found model.layer_drop=0.1"),
        (
            "transformer",
            {"model": {"positions": "learned", "max_positions": 8}, "language": {"segment": 9}},
            "found 9 and 8; raise model.max_positions",
        ),
    ],
)
def test_settings_that_contradict_each_other(
    name: str, changes: dict[str, dict[str, Any]], message: str
) -> None:
    config: Config = config_of(name).replace(**changes)
    assert any(message in problem for problem in config.problems()), config.problems()


@pytest.mark.parametrize("name", ["transformer_xl", "lstm"])
def test_replayed_graphs_continue_the_streams(name: str) -> None:
    """A graph belongs to one parity of segments; replays give what eager passes give."""
    config = config_of(name, model={"dropout": 0.0}, language={"input_dropout": 0.0})
    if name == "lstm":
        config = config.replace(model={"decoder": ("lstm*2",)})
    lines, losses = lines_of(60), list[list[float]]()
    for runner in (None, FakeCUDAGraphRunner):
        task = task_of(config, lines)
        torch.manual_seed(1)
        model = task.build_model().train()

        def compute(batch: Any, task: Any = task, model: Any = model) -> Loss:
            loss: Loss = task.loss(model, batch)
            loss.total.backward()  # type: ignore[no-untyped-call]
            return loss

        step = compute if runner is None else runner(compute, list(model.parameters()), CPU)
        batches = batches_of(task, lines)[:9]
        losses.append([float(step(batch).nll) for batch in batches])
        if runner is not None:
            assert step.is_enabled
            assert len(step._graphs) == 2  # one for each parity
    assert losses[1] == pytest.approx(losses[0], rel=1e-6)


def test_a_memory_beats_none_where_the_answer_lies_in_an_earlier_segment(tmp_path: Path) -> None:
    """Each segment of 8 words repeats the one before it; without a memory it is noise."""
    generator = np.random.default_rng(0)
    words: list[str] = []
    while len(words) < 4000:
        block = [str(each) for each in generator.integers(0, 8, 8)]
        words += [*block, *block]
    lines = [" ".join(words[start : start + 15]) for start in range(0, len(words), 15)]
    found = {}
    for memory in (0, 16):
        language = {"memory": memory, "eval_memory": 0, "clamp_distance": 0, "input_dropout": 0.0}
        train = {"steps": 250, "batch_tokens": 256, "checkpoint_every": 999, "learning_rate": 1e-2}
        config = config_of("transformer_xl", model={"dropout": 0.0}, language=language, train=train)
        trainer = trainer_of(tmp_path / str(memory), config, lines)
        with trainer._run:
            trainer.fit()
        task = trainer._step.task
        assert isinstance(task, LanguageTask)
        found[memory] = evaluate(task, trainer.model, lines)["perplexity"]
    assert found[16] < 0.8 * found[0]


@pytest.mark.parametrize("name", ["transformer_xl", "lstm"])
def test_a_segment_that_overflows_costs_one_step(tmp_path: Path, name: str) -> None:
    """What it leaves to the next segment is not carried, or no step of the epoch were finite."""
    config = config_of(name, train={"steps": 8, "checkpoint_every": 999})
    trainer = trainer_of(tmp_path, config, lines_of(60))
    calls = itertools.count(1)

    def overflow(_: torch.nn.Module, inputs: tuple[Any, ...], output: torch.Tensor) -> torch.Tensor:
        return output * float("inf") if next(calls) == 3 else output

    model = trainer.model
    assert isinstance(model, NeuralLanguageModel)
    model.embedding.register_forward_hook(overflow)
    with trainer._run:
        trainer.fit()
    assert trainer.state.divergence.total_skips == 1
    assert trainer.state.applied_steps == 7


@pytest.mark.parametrize(("name", "carries"), [("transformer_xl", True), ("transformer", False)])
def test_carried_states_need_one_process(
    name: str, carries: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    task = task_of(config_of(name), lines_of(20))
    store = task.encode(records_of(lines_of(20)))
    monkeypatch.setattr("dragoman.tasks.language_model._is_distributed", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 4)
    if carries:
        with pytest.raises(ConfigError, match="trains in one process; found 4; start it without"):
            task.plan(store, batch_tokens=32, seed=1)
    else:
        assert task.plan(store, batch_tokens=32, seed=1).batches(0) > 1

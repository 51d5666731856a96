"""The progress display of training, with a fake clock."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from dragoman.training.progress_display import (
    LiveProgress,
    Meter,
    PlainProgress,
    QuietProgress,
    TrainingMeter,
    format_duration,
    format_validation,
    join_fitting_fields,
    open_progress,
)


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def record(update: int, *, nll: float = 2.0, tokens: int = 1000) -> dict:
    return {
        "step": update,
        "loss": nll + 0.1,
        "nll": nll,
        "lr": 1e-3,
        "grad_norm": 1.0,
        "tokens": tokens,
        "padding": 0.05,
        "seconds": 0.1,
    }


def test_meter_has_count_rate_and_eta() -> None:
    clock = Clock()
    meter = Meter(1000, clock=clock)
    assert meter.eta is None
    for _ in range(10):
        clock.now += 1
        meter.advance(20)
    assert (meter.done, meter.seconds) == (200, 10)
    assert meter.rate == pytest.approx(20)
    assert meter.eta == pytest.approx(40)


def test_rate_covers_the_last_seconds() -> None:
    """After a slow start the estimate must not stay wrong for an hour."""
    clock = Clock()
    meter = Meter(None, clock=clock)
    for _ in range(100):
        clock.now += 1
        meter.advance(1)
    for _ in range(60):
        clock.now += 1
        meter.advance(50)
    assert meter.rate == pytest.approx(50, rel=0.1)
    assert len(meter._marks) < 300


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.4, "0 s"), (59, "59 s"), (60, "1 min 00 s"), (185.2, "3 min 05 s"), (7810, "2 h 10 min")],
)
def test_durations_are_formatted_for_reading(seconds, text) -> None:
    assert format_duration(seconds) == text


def test_training_line_has_loss_throughput_padding_eta_and_best() -> None:
    """ETA and regular lines (OpenNMT-py#1397, OpenNMT/OpenNMT#75, LibreTranslate/Locomotive#35)."""
    clock, stream = Clock(), io.StringIO()
    with PlainProgress(stream, clock=clock).training(steps=1000) as view:
        for update in range(1, 101):
            clock.now += 0.125
            view.update(record(update))
        view.show_validation(
            {"loss": 1.5, "perplexity": 4.48, "bleu": 31.25, "exact": 0.125},
            {"loss": 1.5, "bleu": 31.25, "step": 100},
        )
        clock.now += 6
        view.update(record(101))
    lines = stream.getvalue().splitlines()
    assert lines[0].startswith("step 16 of 1,000 · loss 2.000 · 8,000 tokens/s")
    assert "tokens/s · padding 5.0 % · ETA 2 min 03 s" in lines[0]
    assert (
        lines[-2]
        == "validation at step 100: loss 1.500 · perplexity 4.480 · BLEU 31.2 · 12 % exact "
        "· best so far"
    )
    assert "best at step 100: loss 1.500" in lines[-1]
    assert len(lines) <= 5


@pytest.mark.parametrize(
    ("metric", "shown"),
    [("loss", "loss 1.500"), ("bleu", "BLEU 31.2"), ("accuracy", "accuracy 0.875"), ("f1", "")],
)
def test_the_best_validation_is_shown_by_the_metric_that_chose_it(metric: str, shown: str) -> None:
    clock, stream = Clock(), io.StringIO()
    best = {"loss": 1.5, "bleu": 31.2, "accuracy": 0.875, "step": 100}
    with PlainProgress(stream, clock=clock).training(steps=1000) as view:
        view.show_validation(best, best, best_metric=metric)
        clock.now += 6
        view.update(record(101))
    suffix = f"best at step 100{shown and f': {shown}'}"
    assert suffix in stream.getvalue().splitlines()[-1].split(" · ")


def test_only_long_phases_show_count_rate_and_eta() -> None:
    """ "Is it frozen?" (facebookresearch/fairseq#2603)."""
    clock, stream = Clock(), io.StringIO()
    progress = PlainProgress(stream, clock=clock)
    with progress.phase("preparing", 29000, "pairs") as phase:
        clock.now += 1
        phase.advance(29000)
    assert stream.getvalue() == ""
    with progress.phase("preparing", 29000, "pairs") as phase:
        for _ in range(8):
            clock.now += 1
            phase.advance(1000)
    assert stream.getvalue().splitlines() == [
        "preparing: 2,000 of 29,000 pairs, 1,000 pairs/s, ETA 27 s",
        "preparing: 7,000 of 29,000 pairs, 1,000 pairs/s, ETA 22 s",
        "preparing: 8,000 pairs in 8 s",
    ]


def test_a_phase_of_unknown_length_has_no_estimate() -> None:
    clock, stream = Clock(), io.StringIO()
    with PlainProgress(stream, clock=clock).phase("reading") as phase:
        clock.now += 3
        phase.advance(6)
    assert stream.getvalue().splitlines()[0] == "reading: 6, 2 items/s"


def test_a_skipped_step_does_not_affect_the_displayed_loss() -> None:
    meter = TrainingMeter(steps=10, clock=Clock())
    meter.update(record(1, nll=2.0))
    meter.update(record(2) | {"nll": float("nan"), "skipped": True})
    meter.update({"step": 3, "lr": 0.1, "excluded": True})
    assert meter.loss == 2.0
    assert meter.steps.done == 3


def test_a_resumed_run_counts_from_where_it_was() -> None:
    clock, stream = Clock(), io.StringIO()
    with PlainProgress(stream, clock=clock).training(steps=100, done=90) as view:
        clock.now += 5
        view.update(record(91))
        view.set_max_steps(96)
        clock.now += 5
        view.update(record(92))
    assert stream.getvalue().splitlines()[0].startswith("step 91 of 100")
    assert stream.getvalue().splitlines()[1].startswith("step 92 of 96")
    assert "ETA 20 s" in stream.getvalue().splitlines()[1]


def test_the_live_display_draws_and_leaves_only_notes() -> None:
    stream = io.StringIO()
    progress = LiveProgress(Console(file=stream, force_terminal=True, width=140))
    progress.note("training on 2 CPU cores")
    with progress.training(steps=50) as view:
        for update in range(1, 11):
            view.update(record(update))
        with progress.phase("validating", 4, "batches") as phase:
            phase.advance(4)
        view.show_validation({"loss": 1.25}, {"loss": 1.25, "step": 10})
        progress._rich_progress.refresh()
    text = stream.getvalue()
    assert "training on 2 CPU cores" in text
    assert "loss 2.000" in text
    assert "of 50" in text
    assert "validation at step 10: loss 1.250 · best so far" in text
    assert progress._rich_progress is None


def test_the_live_display_breaks_no_command() -> None:
    """A line end in a command that is copied would run half of it."""
    stream = io.StringIO()
    progress = LiveProgress(Console(file=stream, force_terminal=True, width=40))
    command = 'try: dragoman translate -m /home/someone/models/german-english "…"'
    with progress.phase("validating", 4, "batches"):
        progress.note(command)
        progress.note("the words of a long note are broken where the terminal ends")
    assert command in stream.getvalue()
    assert "are broken \nwhere" in stream.getvalue()


def test_the_display_fits_the_stream() -> None:
    assert isinstance(open_progress(io.StringIO()), PlainProgress)
    assert isinstance(open_progress(io.StringIO(), live=True), LiveProgress)


def test_quiet_progress_prints_nothing() -> None:
    progress = QuietProgress()
    with progress.training(steps=3) as view, progress.phase("x", 3) as phase:
        view.update(record(1))
        view.show_validation({}, {})
        view.set_max_steps(3)
        phase.advance()
    progress.note("nothing")


def test_validation_line_marks_only_the_best() -> None:
    assert (
        format_validation(20, {"loss": 2.0}, {"loss": 1.0, "step": 10})
        == "validation at step 20: loss 2.000"
    )
    assert (
        format_validation(20, {"loss_de-en": 2.0, "bleu_de-en": 31.24}, {})
        == "validation at step 20: de-en loss 2.000 · de-en BLEU 31.2"
    )


@pytest.mark.parametrize("width", [40, 50, 60, 72, 80, 100, 140])
@pytest.mark.parametrize("best", [{}, {"step": 12_000, "loss": 1.125}])
def test_narrow_terminal_keeps_bar_and_eta(
    width: int, best: dict[str, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """At 80 columns the metrics pushed both off the line."""
    monkeypatch.setattr(Meter, "eta", 3 * 3600 + 25 * 60)
    monkeypatch.setattr(Meter, "rate", 11_899.0)
    progress = LiveProgress(Console(file=io.StringIO(), force_terminal=True, width=width))
    with progress.training(steps=100_000, done=12_345) as view:
        if best:
            view.show_validation({"loss": 1.5}, best)
        view.update({"step": 12_346, "nll": 4.123, "padding": 0.051, "tokens": 20_000})
        drawn = progress._rich_progress
        assert drawn is not None
        written = io.StringIO()
        Console(file=written, width=width).print(drawn.get_renderable())
        line = written.getvalue().rstrip("\n")
    assert "\n" not in line, "one line"
    assert len(line) <= width
    assert line.startswith("training ")
    assert line.rstrip().endswith("ETA 3 h 25 min")
    bar = 20 if width >= 80 else 10
    assert line[9] == "━", "without colours only what is done is drawn"
    assert line[9 + bar] == " "
    assert line[9 + bar + 1] != " "
    assert ("12,346 of 100,000" in line) == (width >= 60)
    assert ("loss 4.123" in line) == (width >= 72)
    assert ("padding" in line) == (width >= 140 and not best)


def test_narrow_terminal_keeps_at_least_one_field() -> None:
    fields = [(1, "12,346 of 100,000 pairs"), (0, "ETA 45 s")]
    assert join_fitting_fields(fields, 40) == "12,346 of 100,000 pairs · ETA 45 s"
    assert join_fitting_fields(fields, 20) == "ETA 45 s"
    assert join_fitting_fields(fields, 2) == "ETA 45 s"

"""The figures of `dragoman plot`: what each needs of a model and its data, and how it is drawn."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dragoman.cli.command_progress_bar import progress, track
from dragoman.cli.terminal_output import format_count, print_note

if TYPE_CHECKING:
    from dragoman.explain.calibration_and_output_distribution import TokenStatistics

ENTROPY_SENTENCES = 16
MAX_SENTENCES = 2_000  # of a test set that is translated


@dataclass(kw_only=True, eq=False)
class PlottedModel:
    """A model with the data its figures are drawn from, each loaded when it is first needed."""

    path: Path
    label: str  # its name in the figures
    test: Path | None  # sentences or labelled examples; the validation data if there are none
    ref: Path | None
    sentences: int | None
    target_language: str | None  # of a model of several directions
    beam: int | None
    tgt_lang: str  # of the references, for the tokenizer of BLEU
    tokenize: str
    device: str

    @property
    def is_finished(self) -> bool:
        """Whether there is a model, not only a run."""
        return (self.path / "manifest.json").exists()

    @functools.cached_property
    def predictor(self) -> Any:
        """The loaded model."""
        from dragoman.inference.predictors.catalogue import load

        options = {"target_language": self.target_language} if self.target_language else {}
        return load(self.path, device=self.device, **options)

    @property
    def task(self) -> str:
        """The name of the task."""
        from dragoman.bundle.format import read_task

        return read_task(self.path)

    @functools.cached_property
    def pairs(self) -> tuple[list[str], list[str]] | None:
        """Sources and references: the test set, or the validation data of the training."""
        from dragoman.evaluate.translation_metrics import check_aligned, read_sentences

        data = self.predictor.config.data
        paths = [self.test, self.ref]
        if self.test is None:
            paths = [self._find_file(each) for each in (data.valid_src, data.valid_tgt)]
        if paths[0] is None or paths[1] is None:
            return None
        sources, references = read_sentences(paths[0]), read_sentences(paths[1])
        check_aligned(sources, references)
        most = self.sentences or MAX_SENTENCES
        if self.test is None:
            print_note(f"{self.label}: validation data {paths[0]} and {paths[1]}")
        return sources[:most], references[:most]

    @functools.cached_property
    def store(self) -> Any:
        """Labelled examples of a model of another task; None if there are none."""
        from dragoman.data.labeled_records import open_records
        from dragoman.inference.non_translation_evaluation import check_examples

        task = self.predictor.task
        file = self.test or self._find_file(task.config.data.valid)
        if file is None:
            return task.generate("test") if task.is_generated(task.config) else None
        if self.test is None:
            print_note(f"{self.label}: validation data {file}")
        store = task.encode(open_records(task.config, [file])())
        check_examples(store, [file])
        return store

    def _find_file(self, setting: str | tuple[str, ...]) -> Path | None:
        """Return a file that a setting names, if it is still there."""
        name = setting if isinstance(setting, str) else (setting[0] if setting else "")
        if not name:
            return None
        for folder in (Path(), self.path.parent):
            if (folder / name).is_file():
                return folder / name
        return None

    @functools.cached_property
    def translations(self) -> list[str]:
        """The translations of the sources."""
        assert self.pairs is not None, "called before the sentence pairs were loaded"
        options = {"return_scores": False} | ({} if self.beam is None else {"beam": self.beam})
        sources = self.pairs[0]
        with progress(f"translating ({self.label})", len(sources), "lines") as bar:
            stream = self.predictor.stream(sources, **options)
            return [each.text for each in track(stream, bar)]

    @functools.cached_property
    def tokens(self) -> TokenStatistics | None:
        """Token distributions by teacher forcing; None without references or for labels."""
        from dragoman.explain.calibration_and_output_distribution import measure_pairs, measure_text

        if self.task != "translate":
            predictor = self.predictor
            if self.task != "language" or self.store is None:
                return None
            return measure_text(predictor.task, predictor.model, self.store)
        if self.pairs is None:
            return None
        sources, references = self.pairs
        sides = (
            self.predictor.encode_sources(sources),
            self.predictor.tokenizers.tgt.encode_batch([text.strip() for text in references]),
        )
        longest = int(self.predictor.config.data.max_length)
        kept = [
            (src, tgt)
            for src, tgt in zip(*sides, strict=True)
            if tgt and max(len(src), len(tgt)) < longest
        ]
        with progress(f"scoring ({self.label})"):
            return measure_pairs(self.predictor.model, kept)

    def examples(self) -> list[Any]:
        """Return inputs for explanations: the test set's, or those that the bundle recorded."""
        most = self.sentences or ENTROPY_SENTENCES
        if self.task == "translate" and self.pairs is not None:
            return [text for text in self.pairs[0] if text.strip()][:most]
        if self.task != "translate" and self.test is not None:
            from dragoman.data.labeled_records import read_records

            records = read_records([self.test], fields=self.predictor.config.record_fields)
            return [
                self.predictor.read_record(record)
                for record, _ in zip(records, range(most), strict=False)
            ]
        golden = json.loads((self.path / "golden.json").read_text(encoding="utf-8"))
        cases = [case["input"] for case in golden["cases"]][:most]
        if self.task == "translate":
            return cases
        from dragoman.data.labeled_records import Record

        return [
            self.predictor.read_record(Record(self.path / "golden.json", number, case))
            if isinstance(case, dict)
            else case
            for number, case in enumerate(cases, 1)
        ]


# Each function draws one figure, or returns in a sentence why there is nothing to draw.

_NEEDS_REFERENCES = "it needs sentences with references: pass --test and --ref"


def _draw_curves(models: Sequence[PlottedModel], path: Path) -> str | None:
    """Draw the training curves of all models that have a log."""
    from dragoman.explain.training_plots import RunLog, read_log, save_curves

    runs = []
    for model in models:
        steps, validations = read_log(model.path / "training" / "log.jsonl")
        if len(steps) < 2:
            print_note(f"{model.label} has no training log with two steps: its curves are left out")
        else:
            runs.append(RunLog(model.label, steps, validations))
    if not runs:
        return "training/log.jsonl has fewer than two steps, or is not there"
    save_curves(path, runs)
    return None


def _draw_positions(models: Sequence[PlottedModel], path: Path) -> str | None:
    """Draw the position encodings of one model."""
    from dragoman.explain.position_encoding_analysis import (
        describe_missing,
        find_positions,
        save_positions,
    )

    [model] = models
    if not model.is_finished:
        return "the run has not written a model yet"
    parts = find_positions(model.predictor.model)
    if not parts:
        return describe_missing(model.predictor.model)
    left_out = save_positions(path, parts)
    if left_out:
        print_note(f"{format_count(left_out, 'further layer')} of {model.label} not drawn")
    return None


def _draw_length(models: Sequence[PlottedModel], path: Path) -> str | None:
    """Draw BLEU by source length of all models."""
    from dragoman.evaluate.bleu_by_length import score_by_length
    from dragoman.evaluate.translation_metrics import build_metrics
    from dragoman.explain.evaluation_plots import save_length_scores

    scored = []
    for model in models:
        if not model.is_finished or model.task != "translate":
            return _name_model("BLEU is of translation models", model, models)
        if model.pairs is None:
            return _name_model(_NEEDS_REFERENCES, model, models)
        sources, references = model.pairs
        metrics = build_metrics(
            tokenize=model.tokenize,
            tgt_lang=model.tgt_lang
            or model.target_language
            or model.predictor.config.data.tgt_lang,
            references=references,
        )
        found = score_by_length(sources, model.translations, references, metrics.bleu)
        scored.append((model.label, found))
        print_note(f"{model.label}: BLEU {found.signature}")
    save_length_scores(path, scored)
    return None


def _draw_entropy(models: Sequence[PlottedModel], path: Path) -> str | None:
    """Draw the entropy of every head of one model."""
    from dragoman.explain.evaluation_plots import measure_entropies, save_entropies

    [model] = models
    if not model.is_finished:
        return "the run has not written a model yet"
    examples = model.examples()
    with progress("explaining", len(examples), "sentences") as bar:
        found = track((model.predictor.explain(each) for each in examples), bar)
        sites = measure_entropies(found)
    if not sites:
        return "this model has no attention"
    save_entropies(path, sites, sentences=len(examples))
    return None


def _draw_calibration(models: Sequence[PlottedModel], path: Path) -> str | None:
    """Draw the reliability diagram of all models."""
    from dragoman.explain.calibration_and_output_distribution import measure_predictions
    from dragoman.explain.evaluation_plots import Calibration, save_calibration

    runs = []
    for model in models:
        if not model.is_finished:
            return _name_model("the run has not written a model yet", model, models)
        if model.task in ("translate", "language"):
            tokens = model.tokens
            if tokens is None or not len(tokens.right):
                reason = _NEEDS_REFERENCES if model.task == "translate" else _needs_test(model)
                return _name_model(reason, model, models)
            runs.append(Calibration(model.label, tokens.confidence, tokens.right, "tokens"))
            continue
        if model.store is None:
            return _name_model(_needs_test(model), model, models)
        predictor = model.predictor
        found = measure_predictions(predictor.task, predictor.model, model.store)
        if found is None or not len(found.right):
            reason = f"models of the task {model.task} predict no probabilities"
            return _name_model(reason, model, models)
        runs.append(Calibration(model.label, *found))
    if len({run.what for run in runs}) > 1:
        return "models of different tasks predict different things: draw them one by one"
    save_calibration(path, runs)
    for run in runs:
        print_note(
            f"{run.label}: expected calibration error {100 * run.error:.2f} % over "
            f"{format_count(len(run.right), run.what[:-1])}"
        )
    return None


def _name_model(reason: str, model: PlottedModel, models: Sequence[PlottedModel]) -> str:
    """Return the reason of one model, with its name if there are several."""
    return f"{model.label}: {reason}" if len(models) > 1 else reason


def _needs_test(model: PlottedModel) -> str:
    """Return why a model of another task has nothing to measure."""
    if model.store is not None:
        return "a model that fills masks does not predict the next token"
    return f"it needs labelled examples of the task {model.task}: pass --test"


def _draw_distribution(models: Sequence[PlottedModel], path: Path) -> str | None:
    """Draw the mean output distribution of all models."""
    from dragoman.explain.evaluation_plots import save_distribution

    runs = []
    for model in models:
        if not model.is_finished:
            return _name_model("the run has not written a model yet", model, models)
        if model.task not in ("translate", "language"):
            return _name_model("it is of models that predict tokens", model, models)
        if model.tokens is None or not len(model.tokens.right):
            reason = _NEEDS_REFERENCES if model.task == "translate" else _needs_test(model)
            return _name_model(reason, model, models)
        smoothing = float(model.predictor.config.train.label_smoothing)
        runs.append((model.label, model.tokens, smoothing))
    save_distribution(path, runs)
    return None


FIGURES: dict[str, Callable[[Sequence[PlottedModel], Path], str | None]] = {
    "curves": _draw_curves,
    "positions": _draw_positions,
    "length": _draw_length,
    "entropy": _draw_entropy,
    "calibration": _draw_calibration,
    "distribution": _draw_distribution,
}

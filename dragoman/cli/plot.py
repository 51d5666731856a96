"""`dragoman plot`: figures of trained models and of their training, ready for a paper."""

from __future__ import annotations

import functools
import json as json_format
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dragoman.cli.options import (
    BeamOption,
    DeviceOption,
    TargetLanguageOption,
    TokenizeOption,
    ToOption,
    check_run,
    check_text,
)
from dragoman.cli.printing import format_count, print_note, print_result
from dragoman.cli.progress import progress, track
from dragoman.errors import ConfigError, suggest_name

if TYPE_CHECKING:
    from dragoman.explain.calibration_statistics import TokenStatistics

FIGURES = {
    "curves": "loss, metrics and learning rate of the training",
    "positions": "position encodings, relative biases, reach of convolutions",
    "length": "BLEU by source length, with bootstrap intervals",
    "entropy": "entropy of every attention head",
    "calibration": "reliability diagram with the expected calibration error",
    "distribution": "mean output distribution beside the target of label smoothing",
}
FORMATS = ("png", "svg", "pdf")
ENTROPY_SENTENCES = 16
MAX_SENTENCES = 2_000  # of a test set that is translated
Draw = Callable[["Sequence[PlottedModel]", Path], "str | None"]


def check_runs(context: typer.Context, paths: list[Path]) -> list[Path]:
    """Raise BundleError unless every path has a model or a training run in it."""
    if not context.resilient_parsing:
        for path in paths:
            check_run(context, path)
    return paths


def plot(
    models: Annotated[
        list[Path],
        typer.Argument(
            metavar="MODEL...",
            help="Model or run directories; several are drawn side by side.",
            show_default=False,
            callback=check_runs,
        ),
    ],
    what: Annotated[
        list[str] | None,
        typer.Option(
            "--what",
            metavar="FIGURE",
            help=f"{', '.join(FIGURES)} or all, the default. May be repeated.",
            show_default=False,
        ),
    ] = None,
    out: Annotated[
        Path,
        typer.Option(
            "--out",
            "-o",
            metavar="PATH",
            help="File of one figure, or directory of several; created if its parent exists.",
        ),
    ] = Path("plots"),
    format_: Annotated[
        str | None,
        typer.Option(
            "--format",
            metavar="FORMAT",
            help="png, svg or pdf; by default the suffix of --out, or png.",
            show_default=False,
        ),
    ] = None,
    label: Annotated[
        list[str] | None,
        typer.Option(help="Name of a model in the figures, in their order. May be repeated."),
    ] = None,
    test: Annotated[
        Path | None,
        typer.Option(
            "--test",
            metavar="FILE",
            help="Source sentences, or the labelled test file of another task; by default the "
            "validation data of the training, if its files are still there.",
            show_default=False,
            callback=check_text,
        ),
    ] = None,
    ref: Annotated[
        Path | None,
        typer.Option(
            help="Reference translations of --test.", show_default=False, callback=check_text
        ),
    ] = None,
    sentences: Annotated[
        int | None,
        typer.Option(
            min=1,
            help=f"Sentences that are used; by default {ENTROPY_SENTENCES} for the entropy, at "
            f"most {MAX_SENTENCES:,} otherwise.",
            show_default=False,
        ),
    ] = None,
    to: ToOption = None,
    beam: BeamOption = None,
    tgt_lang: TargetLanguageOption = "",
    tokenize: TokenizeOption = "",
    device: DeviceOption = "auto",
) -> None:
    """Draw figures of models and of their training as PNG, SVG or PDF.

    Figures are sized for papers with two columns, text stays text, and colors are safe for
    color blindness. What a model does not have is stated; with --what all it is left out.
    """
    chosen = _parse_what(what or ["all"])
    files = _plan_files(chosen, out, format_, models)
    labels = _make_labels(models, label or [])
    if (test is None) != (ref is None) and _is_translator(models[0]):
        raise ConfigError(
            [
                "--test and --ref belong together for a translation model; found "
                f"{'--test' if ref is None else '--ref'} alone; pass both"
            ]
        )
    if to and not all(map(_is_translator, models)):
        raise ConfigError(
            [f"--to is for finished translators; found --to {to} and another model; leave it out"]
        )
    held = [
        PlottedModel(path, name, test, ref, sentences, device, beam, to, tgt_lang, tokenize)
        for path, name in zip(models, labels, strict=True)
    ]
    if chosen != ["curves"]:  # those need no model
        for model in held:
            if model.is_finished:
                _ = model.predictor  # a damaged model is an error before anything is written
    if not out.suffix or len(chosen) > 1:
        out.mkdir(exist_ok=True)
    written, reasons = list[Path](), list[str]()
    for name in chosen:
        for group, path in _split_models(name, held, files[name]):
            reason = _DRAW[name](group, path)
            if reason is None:
                written.append(path)
                print_result(str(path))
            else:
                of = f" of {group[0].label}" if len(group) < len(held) else ""
                reasons.append(f"no figure of {name}{of}: {reason}")
    if not written:
        raise ConfigError(
            [
                f"a figure must have something to show; found {'; '.join(reasons)}; "
                "see dragoman plot --help"
            ]
        )
    for each in dict.fromkeys(reasons):
        print_note(each)


def _parse_what(names: Sequence[str]) -> list[str]:
    """Return the names of the figures to draw; raise ConfigError for any other."""
    for name in names:
        if name != "all" and name not in FIGURES:
            raise ConfigError(
                [
                    f"--what must be {', '.join(FIGURES)} or all; found {name!r:.40}; "
                    f"{suggest_name(name, [*FIGURES, 'all'], listed=True)}"
                ]
            )
    return list(FIGURES) if "all" in names else list(dict.fromkeys(names))


def _plan_files(
    chosen: Sequence[str], out: Path, format_: str | None, models: Sequence[Path]
) -> dict[str, Path]:
    """Return the file of each figure; raise ConfigError for one that cannot be written."""
    from dragoman.storage.output_files import check_output_file

    if format_ is not None and format_ not in FORMATS:
        raise ConfigError([f"--format must be png, svg or pdf; found {format_!r}; choose one"])
    suffix = out.suffix.lower().lstrip(".")
    if out.is_dir() or not suffix:
        if not out.parent.is_dir():
            raise ConfigError(
                [f"--out must be in an existing directory; found no {out.parent}; make it first"]
            )
        if out.exists() and not out.is_dir():
            raise ConfigError(
                [f"--out must be a directory or end in .png, .svg or .pdf; found the file {out}"]
            )
        files = {name: out / f"{name}.{format_ or 'png'}" for name in chosen}
        for path in files.values() if out.is_dir() else [out]:
            check_output_file("--out", path, inputs=models)
        return files
    if suffix not in FORMATS:
        raise ConfigError([f"--out must end in .png, .svg or .pdf; found {out}; rename it"])
    if format_ is not None and format_ != suffix:
        raise ConfigError(
            [f"--format and --out must agree; found {format_} and {out}; leave out --format"]
        )
    if len(chosen) > 1:
        raise ConfigError(
            [
                f"--out must be a directory for several figures; found the file {out} for "
                f"{len(chosen)}; name a directory, or one figure with --what"
            ]
        )
    check_output_file("--out", out, inputs=models)
    return {chosen[0]: out}


def _make_labels(models: Sequence[Path], labels: Sequence[str]) -> list[str]:
    """Return the names of the models in the figures: as given, or of their directories."""
    if labels and len(labels) != len(models):
        raise ConfigError(
            [
                f"--label must be given once for each model; found {len(labels)} for "
                f"{len(models)}; pass all or none"
            ]
        )
    if labels:
        return list(labels)
    names = [path.resolve().name for path in models]
    if len(set(names)) < len(names):
        names = [f"{path.resolve().parent.name}/{path.resolve().name}" for path in models]
    return names


def _is_translator(path: Path) -> bool:
    """Whether a path is a finished translation model."""
    from dragoman.bundle.format import read_task

    return (path / "manifest.json").exists() and read_task(path) == "translate"


def _split_models(
    name: str, held: Sequence[PlottedModel], path: Path
) -> list[tuple[Sequence[PlottedModel], Path]]:
    """Return the groups of models that share a figure, each with its file."""
    if len(held) == 1 or name not in ("positions", "entropy"):
        return [(held, path)]
    return [
        ([model], path.with_name(f"{path.stem}-{number}{path.suffix}"))
        for number, model in enumerate(held, 1)
    ]


class PlottedModel:
    """A model with the data its figures are drawn from, each loaded when it is first needed."""

    def __init__(
        self,
        path: Path,
        label: str,
        test: Path | None,
        ref: Path | None,
        sentences: int | None,
        device: str,
        beam: int | None,
        to: str | None,
        tgt_lang: str,
        tokenize: str,
    ) -> None:
        self.path, self.label = path, label
        self._test, self._ref, self._sentences = test, ref, sentences
        self._device, self._beam = device, beam
        self._to, self._tgt_lang, self.tokenize = to, tgt_lang, tokenize

    @property
    def is_finished(self) -> bool:
        """Whether there is a model, not only a run."""
        return (self.path / "manifest.json").exists()

    @functools.cached_property
    def predictor(self) -> Any:
        """The loaded model."""
        from dragoman.inference.predictors.catalogue import load

        options = {"target_language": self._to} if self._to else {}
        return load(self.path, device=self._device, **options)

    @property
    def task(self) -> str:
        """The name of the task."""
        from dragoman.bundle.format import read_task

        return read_task(self.path)

    @property
    def tgt_lang(self) -> str:
        """The target language, as given or of the model."""
        return self._tgt_lang or self._to or str(self.predictor.config.data.tgt_lang)

    @functools.cached_property
    def pairs(self) -> tuple[list[str], list[str]] | None:
        """Sources and references: the test set, or the validation data of the training."""
        from dragoman.evaluate.metrics import check_aligned, read_sentences

        data = self.predictor.config.data
        paths = [self._test, self._ref]
        if self._test is None:
            paths = [self._find_file(each) for each in (data.valid_src, data.valid_tgt)]
        if paths[0] is None or paths[1] is None:
            return None
        sources, references = read_sentences(paths[0]), read_sentences(paths[1])
        check_aligned(sources, references)
        most = self._sentences or MAX_SENTENCES
        if self._test is None:
            print_note(f"{self.label}: validation data {paths[0]} and {paths[1]}")
        return sources[:most], references[:most]

    @functools.cached_property
    def store(self) -> Any:
        """Labelled examples of a model of another task; None if there are none."""
        from dragoman.data.labeled_records import open_records
        from dragoman.inference.non_translation_evaluation import check_examples

        task = self.predictor.task
        file = self._test or self._find_file(task.config.data.valid)
        if file is None:
            return task.generate("test") if task.is_generated(task.config) else None
        if self._test is None:
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
        options = {"return_scores": False} | ({} if self._beam is None else {"beam": self._beam})
        sources = self.pairs[0]
        with progress(f"translating ({self.label})", len(sources), "lines") as bar:
            stream = self.predictor.stream(sources, **options)
            return [each.text for each in track(stream, bar)]

    @functools.cached_property
    def tokens(self) -> TokenStatistics | None:
        """Token distributions by teacher forcing; None without references or for labels."""
        from dragoman.explain.calibration_statistics import measure_pairs, measure_text

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
        most = self._sentences or ENTROPY_SENTENCES
        if self.task == "translate" and self.pairs is not None:
            return [text for text in self.pairs[0] if text.strip()][:most]
        if self.task != "translate" and self._test is not None:
            from dragoman.data.labeled_records import read_records

            records = read_records([self._test], fields=self.predictor.config.record_fields)
            return [
                self.predictor.read_record(record)
                for record, _ in zip(records, range(most), strict=False)
            ]
        golden = json_format.loads((self.path / "golden.json").read_text(encoding="utf-8"))
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


# Figures: each function draws one, or returns in a sentence why there is nothing to draw.


_NEEDS_REFERENCES = "it needs sentences with references: pass --test and --ref"


def _draw_curves(models: Sequence[PlottedModel], path: Path) -> str | None:
    """Draw the training curves of all models that have a log."""
    from dragoman.explain.training_figures import RunLog, read_log, save_curves

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
    from dragoman.evaluate.metrics import build_metrics
    from dragoman.explain.evaluation_figures import save_length_scores

    scored = []
    for model in models:
        if not model.is_finished or model.task != "translate":
            return _name_model("BLEU is of translation models", model, models)
        if model.pairs is None:
            return _name_model(_NEEDS_REFERENCES, model, models)
        sources, references = model.pairs
        metrics = build_metrics(
            tokenize=model.tokenize, tgt_lang=model.tgt_lang, references=references
        )
        found = score_by_length(sources, model.translations, references, metrics.bleu)
        scored.append((model.label, found))
        print_note(f"{model.label}: BLEU {found.signature}")
    save_length_scores(path, scored)
    return None


def _draw_entropy(models: Sequence[PlottedModel], path: Path) -> str | None:
    """Draw the entropy of every head of one model."""
    from dragoman.explain.evaluation_figures import measure_entropies, save_entropies

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
    from dragoman.explain.calibration_statistics import measure_predictions
    from dragoman.explain.evaluation_figures import Calibration, save_calibration

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
    from dragoman.explain.evaluation_figures import save_distribution

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


_DRAW: dict[str, Draw] = {
    "curves": _draw_curves,
    "positions": _draw_positions,
    "length": _draw_length,
    "entropy": _draw_entropy,
    "calibration": _draw_calibration,
    "distribution": _draw_distribution,
}

"""`dragoman evaluate`: score a model on a test set, by sacreBLEU or its task's metrics."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from dragoman.cli.command_progress_bar import progress, track
from dragoman.cli.options import (
    BatchSizeOption,
    BeamOption,
    DefaultBundleArgument,
    DeviceOption,
    EngineOption,
    FromOption,
    JsonOption,
    LengthPenaltyOption,
    LowercaseOption,
    QuietOption,
    TargetLanguageOption,
    TokenizeOption,
    ToOption,
)
from dragoman.cli.terminal_output import print_json, print_note, print_result, print_table
from dragoman.cli.translate import warn_of_other_languages
from dragoman.errors import ConfigError
from dragoman.storage.user_output_files import check_output_file, open_output

MAX_TABLE_ROWS = 100  # classes that are printed


def evaluate(
    model: DefaultBundleArgument,
    test: Annotated[
        list[Path] | None,
        typer.Option(
            "--test",
            metavar="FILE",
            help="Labelled test file of a model of another task than translation. May be repeated.",
            show_default=False,
        ),
    ] = None,
    src: Annotated[
        Path | None,
        typer.Option(help="Source sentences of the test set of a translator.", show_default=False),
    ] = None,
    ref: Annotated[
        Path | None,
        typer.Option(help="Reference translations, not tokenized.", show_default=False),
    ] = None,
    to: ToOption = None,
    from_: FromOption = None,
    tgt_lang: TargetLanguageOption = "",
    lowercase: LowercaseOption = False,
    tokenize: TokenizeOption = "",
    beam: BeamOption = None,
    length_penalty: LengthPenaltyOption = None,
    batch_size: BatchSizeOption = None,
    hyp: Annotated[
        Path | None, typer.Option(help="Also write translations or predictions to this file.")
    ] = None,
    set_: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="NAME=VALUE",
            help="Change a setting of the model's task or of data. May be repeated.",
        ),
    ] = None,
    json: JsonOption = False,
    quiet: QuietOption = False,
    device: DeviceOption = "auto",
    engine: EngineOption = "auto",
) -> None:
    """Score a model on a test set: BLEU, chrF and TER, or the metrics of its task.

    A translator needs --src and --ref, and its scores are sacreBLEU's; a model of another
    task needs --test. Scores come with their signatures and the throughput.
    """
    from dragoman.bundle.format import read_task

    if read_task(model) != "translate":
        translation = {"--src": src, "--ref": ref, "--beam": beam, "--tokenize": tokenize}
        translation |= {"--to": to, "--from": from_, "--tgt-lang": tgt_lang}
        translation |= {"--lowercase": lowercase, "--length-penalty": length_penalty is not None}
        _evaluate_task(
            model,
            test or [],
            hyp=hyp,
            overrides=set_ or [],
            wrong=[name for name, value in translation.items() if value],
            json=json,
            device=device,
        )
        return
    if src is None or ref is None or test or set_:
        missing = " and ".join(
            name for name, value in (("--src", src), ("--ref", ref)) if value is None
        )
        found = f"no {missing}" if missing else "--test" if test else "--set"
        raise ConfigError(
            [
                "a translator is evaluated on --src and --ref; found "
                f"{found}; see dragoman evaluate --help"
            ]
        )
    from dragoman.evaluate.translation_metrics import (
        check_aligned,
        check_tokenizer,
        read_sentences,
        score_translations,
    )

    check_tokenizer(tokenize)  # raise now, not after an hour of translating
    if hyp:
        check_output_file("--hyp", hyp, inputs=[src, ref, model])
    sources, references = read_sentences(src), read_sentences(ref)
    check_aligned(sources, references)

    # Imported here, so that errors in the files are reported before torch is imported.
    from dragoman.inference import Translator

    translator = Translator.load(model, device=device, engine=engine)
    options: dict[str, Any] = {
        "beam": beam,
        "length_penalty": length_penalty,
        "batch_size": batch_size,
        "return_scores": False,
        "target_language": to,
        "source_language": from_,
    }
    warn_of_other_languages(translator, sources, src, source_language=from_, target_language=to)
    started = time.monotonic()
    given = {name: value for name, value in options.items() if value is not None}
    with progress("translating", len(sources), "lines") as bar:
        translations = list(track(translator.stream(sources, **given), bar))
    seconds = time.monotonic() - started
    texts = [each.text for each in translations]
    if hyp:
        with open_output(hyp) as file:
            file.writelines(f"{text}\n" for text in texts)
    languages = {each.target_language for each in translations}
    # That of the model, or of the direction if all sentences have the same.
    detected = languages.pop() if len(languages) == 1 else ""
    language = tgt_lang or detected or translator.config.data.tgt_lang
    with progress("scoring"):
        scores = score_translations(
            texts, references, lowercase=lowercase, tokenize=tokenize, tgt_lang=language
        )
    tokens = sum(len(each.tokens) for each in translations)
    speed = {
        "seconds": round(seconds, 3),
        "sentences_per_second": round(len(texts) / seconds, 2),
        "tokens_per_second": round(tokens / seconds, 1),
    }
    if json:
        print_json({"model": str(model), **scores.to_dict(), "speed": speed})
        return
    print_table(
        ["metric", "score", "signature"],
        [(each.name, f"{each.value:.2f}", each.signature) for each in scores],
        right=["score"],
    )
    print_result(
        f"{len(texts):,} sentences in {seconds:.1f} s: {len(texts) / seconds:.1f} sentences/s, "
        f"{tokens / seconds:.0f} tokens/s"
    )
    for sentence in scores.notes:
        print_note(sentence)


def _evaluate_task(
    model: Path,
    files: list[Path],
    *,
    hyp: Path | None,
    overrides: list[str],
    wrong: list[str],
    json: bool,
    device: str,
) -> None:
    """Score a model of another task and print its metrics."""
    from dragoman.bundle.format import read_command, read_task
    from dragoman.data.compressed_input_streams import open_input_file
    from dragoman.training.progress_display import open_progress

    if wrong:
        raise ConfigError(
            [
                f"{wrong[0]} is for translators; found it for a model of the task "
                f"{read_task(model)}; leave it out"
            ]
        )
    for path in files:
        open_input_file(path).close()
    if hyp:
        task = read_task(model)
        if not files or read_command(model) != "predict":
            found_instead = "no --test" if not files else f"a model of the task {task}"
            raise ConfigError(
                [f"--hyp writes the predictions of --test; found {found_instead}; leave it out"]
            )
        check_output_file("--hyp", hyp, inputs=[*files, model])

    # Imported here, so that errors in the arguments are reported before torch is imported.
    from dragoman.inference.non_translation_evaluation import evaluate_task

    found = evaluate_task(
        model, files, device=device, overrides=overrides, progress=open_progress(sys.stderr)
    )
    if hyp:
        _write_predictions(model, files, hyp, device, overrides)
    if json:
        print_json({"model": str(model), **found.to_dict()})
        return
    print_table(
        ["metric", "score", "signature"],
        [
            (
                each.name,
                f"{each.value:.4f}" if abs(each.value) < 10 else f"{each.value:.2f}",
                each.signature,
            )
            for each in found.scores
        ],
        right=["score"],
    )
    if found.rows:
        columns = list(found.rows[0])
        print_table(
            columns,
            [[_format_cell(row[name]) for name in columns] for row in found.rows[:MAX_TABLE_ROWS]],
            right=columns[1:],
        )
        if len(found.rows) > MAX_TABLE_ROWS:
            print_note(f"{len(found.rows) - MAX_TABLE_ROWS:,} more rows with --json")
    print_result(
        f"{found.examples:,} {found.unit} in {found.seconds:.1f} s: "
        f"{found.examples / max(found.seconds, 1e-9):,.1f} {found.unit}/s"
    )
    for reason, count in found.skipped.items():
        print_note(f"skipped {count:,} {reason}")


def _format_cell(value: str | float) -> str:
    """Return a cell of a table: fractions with four decimals."""
    return f"{value:.4f}" if isinstance(value, float) else str(value)


def _write_predictions(
    model: Path, files: list[Path], hyp: Path, device: str, overrides: list[str]
) -> None:
    """Write a line for each example of the test files, by the settings of the evaluation."""
    from dragoman.data.labeled_records import open_records
    from dragoman.inference.non_translation_evaluation import override_model
    from dragoman.inference.predictors.catalogue import load

    predictor = load(model, device=device)
    if overrides:
        task, changed = override_model(predictor.task, predictor.model, overrides)
        predictor = type(predictor)(changed, task)
    records = open_records(predictor.config, files)()
    inputs = (predictor.read_record(record) for record in records)
    with open_output(hyp) as file, progress("predicting", None, "lines") as bar:
        for prediction in track(predictor.stream(inputs), bar):
            file.write(f"{prediction.to_line()}\n")

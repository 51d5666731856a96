"""`dragoman evaluate`: translate a test set and score it."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated, Any

import typer

from dragoman.cli.options import (
    BatchSizeOption,
    BeamOption,
    BundleArgument,
    DeviceOption,
    EngineOption,
    JsonOption,
    LengthPenaltyOption,
    LowercaseOption,
    TargetLanguageOption,
    TokenizeOption,
)
from dragoman.cli.progress import advancing, progress
from dragoman.cli.show import as_json, note, result, table
from dragoman.files.outputs import check_output_file, open_output


def evaluate(
    model: BundleArgument,
    src: Annotated[Path, typer.Option(help="Source sentences of the test set.", show_default=False)],
    ref: Annotated[Path, typer.Option(help="Reference translations, as they were written.", show_default=False)],
    tgt_lang: TargetLanguageOption = "",
    lowercase: LowercaseOption = False,
    tokenize: TokenizeOption = "",
    beam: BeamOption = None,
    length_penalty: LengthPenaltyOption = None,
    batch_size: BatchSizeOption = None,
    hyp: Annotated[Path | None, typer.Option(help="Also write the translations to this file.")] = None,
    json: JsonOption = False,
    device: DeviceOption = "auto",
    engine: EngineOption = "auto",
) -> None:
    """Score a model on a test set: BLEU, chrF and TER by sacreBLEU with their signatures, and the speed."""
    from dragoman.evaluate.files import read_text
    from dragoman.evaluate.scoring import check_aligned, check_tokenizer, score

    check_tokenizer(tokenize)  # mistakes are told now, not after an hour of translating
    if hyp:
        check_output_file("--hyp", hyp, inputs=[src, ref])
    sources, references = read_text(src), read_text(ref)
    check_aligned(sources, references)

    from dragoman.translator import Translator  # here, so that a mistake in the texts is found before torch is imported

    translator = Translator.load(model, device=device, engine=engine)
    options: dict[str, Any] = {"beam": beam, "length_penalty": length_penalty, "batch_size": batch_size, "scored": False}
    started = time.monotonic()
    given = {name: value for name, value in options.items() if value is not None}
    with progress("translating", len(sources), "lines") as bar:
        translations = list(advancing(translator.stream(sources, **given), bar))
    seconds = time.monotonic() - started
    texts = [each.text for each in translations]
    if hyp:
        with open_output(hyp) as file:
            file.writelines(f"{text}\n" for text in texts)
    language = tgt_lang or translator.config.data.tgt_lang
    with progress("scoring"):
        scores = score(texts, references, lowercase=lowercase, tokenize=tokenize, tgt_lang=language)
    pieces = sum(len(each.pieces) for each in translations)
    speed = {
        "seconds": round(seconds, 3),
        "sentences_per_second": round(len(texts) / seconds, 2),
        "pieces_per_second": round(pieces / seconds, 1),
    }
    if json:
        as_json({"model": str(model), **scores.as_dict(), "speed": speed})
        return
    table(["metric", "score", "signature"], [(each.name, f"{each.value:.2f}", each.signature) for each in scores], right=["score"])
    result(f"{len(texts):,} sentences in {seconds:.1f} s: {len(texts) / seconds:.1f} sentences/s, {pieces / seconds:.0f} pieces/s")
    for sentence in scores.notes:
        note(sentence)

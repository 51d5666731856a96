"""`dragoman evaluate`: translate a test set and score it with sacreBLEU."""

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
from dragoman.cli.output import print_json, print_note, print_result, print_table
from dragoman.cli.progress import progress, track
from dragoman.storage.output_files import check_output_file, open_output


def evaluate(
    model: BundleArgument,
    src: Annotated[
        Path, typer.Option(help="Source sentences of the test set.", show_default=False)
    ],
    ref: Annotated[
        Path, typer.Option(help="Reference translations, not tokenized.", show_default=False)
    ],
    tgt_lang: TargetLanguageOption = "",
    lowercase: LowercaseOption = False,
    tokenize: TokenizeOption = "",
    beam: BeamOption = None,
    length_penalty: LengthPenaltyOption = None,
    batch_size: BatchSizeOption = None,
    hyp: Annotated[
        Path | None, typer.Option(help="Also write the translations to this file.")
    ] = None,
    json: JsonOption = False,
    device: DeviceOption = "auto",
    engine: EngineOption = "auto",
) -> None:
    """Score a model on a test set with BLEU, chrF and TER.

    Scores are sacreBLEU's, with their signatures; the throughput is printed as well.
    """
    from dragoman.evaluate.metrics import (
        check_aligned,
        check_tokenizer,
        read_sentences,
        score_translations,
    )

    check_tokenizer(tokenize)  # raise now, not after an hour of translating
    if hyp:
        check_output_file("--hyp", hyp, inputs=[src, ref])
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
    }
    started = time.monotonic()
    given = {name: value for name, value in options.items() if value is not None}
    with progress("translating", len(sources), "lines") as bar:
        translations = list(track(translator.stream(sources, **given), bar))
    seconds = time.monotonic() - started
    texts = [each.text for each in translations]
    if hyp:
        with open_output(hyp) as file:
            file.writelines(f"{text}\n" for text in texts)
    language = tgt_lang or translator.config.data.tgt_lang
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

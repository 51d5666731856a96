"""Rows of bench/quality.py: models, their corpora, and their baselines."""

from __future__ import annotations

from string import Formatter
from typing import NamedTuple

SEEDS = (1, 2, 3)
DEV = "dev"  # part of a corpus
PART = 40_000  # pairs of the rows on back-translation


class CorpusFiles(NamedTuple):
    """A parallel corpus in one direction; its files are FOLDER/PART.LANGUAGE.xz."""

    folder: str
    source: str
    target: str
    tests: tuple[str, ...] = ("test",)

    def file(self, part: str, language: str) -> str:
        """Return the path of a file below the data folder."""
        return f"{self.folder}/{part}.{language}.xz"

    @property
    def is_multi30k(self) -> bool:
        """Whether the literature scores it lower-cased and tokenised."""
        return self.folder == "multi30k"


_M30K_TESTS = ("test_2016_flickr", "test_2017_flickr")
CORPORA = {
    "m30k_deen": CorpusFiles("multi30k", "de", "en", _M30K_TESTS),
    "m30k_ende": CorpusFiles("multi30k", "en", "de", _M30K_TESTS),
    "m30k_enfr": CorpusFiles("multi30k", "en", "fr", _M30K_TESTS),
    "tatoeba_deen": CorpusFiles("tatoeba_ende", "de", "en"),
    "tatoeba_ende": CorpusFiles("tatoeba_ende", "en", "de"),
    "tatoeba_fren": CorpusFiles("tatoeba_enfr", "fr", "en"),
    "l10n_enzh": CorpusFiles("l10n_enzh", "en", "zh"),
}


class QualityRow(NamedTuple):
    """One line of a table.

    In arguments {files} stands for the training and validation files, {pair} for the same as a
    multilingual corpus, {source} and {target} for the languages, {train} for the training files
    without the languages that end their names, {part} and {rest} likewise for their first PART
    pairs and the others, {valid} for the validation files as options, {out} for the model
    directory, {results} for the folder of results, {data} for that of the corpora, and the name of
    another row for its model with the same seed, or with seed 2 for {name__2}.
    """

    name: str
    corpus: str  # of CORPORA
    train: str = ""  # arguments of `dragoman train`; empty for a row that only translates
    baseline: str = ""  # row that the paired bootstrap compares it with
    augment: str = ""  # arguments of `dragoman augment`, before training
    models: str = ""  # arguments of `dragoman translate` that name models of other rows
    translate: str = "--beam 5"
    program: str = ""  # Python program that trains and translates instead, with its arguments
    seeds: tuple[int, ...] = SEEDS
    about: str = ""

    def needs(self, seed: int) -> dict[str, tuple[str, int]]:
        """Return row and seed of the models that its arguments name, by field."""
        parsed = Formatter().parse(f"{self.train} {self.augment} {self.models} {self.program}")
        found = {}
        for field in {field for _, field, _, _ in parsed if field}:
            name, _, number = field.partition("__")
            if name in NAMES:
                found[field] = (name, int(number or seed))
        return found


class QualityRun(NamedTuple):
    """A row with one seed."""

    row: QualityRow
    seed: int

    @property
    def key(self) -> str:
        """Name of the run's files."""
        return f"{self.row.name}-{self.seed}"


_COMMON = ("model.dropout=0.3", "train.validate_every=400", "train.checkpoint_every=400")


def _set(*settings: str) -> str:
    """Return settings as arguments of `dragoman train`."""
    return " ".join(f"--set {each}" for each in settings)


def _ablation(corpus: str, *size: str, epochs: int) -> list[QualityRow]:
    """Return the rows of an ablation: each method on top of dropout and EMA.

    All train on the same number of sentence pairs: equal epochs, not equal time.
    """
    common = (*_COMMON, *size)
    name, recipe = f"ab_{corpus}", f"--recipe small {_set(*common)}"
    base = f"{{files}} {recipe} {_set(f'train.epochs={epochs}')}"
    without_ema = f"{base} {_set('train.ema_decay=0')}"
    average = _set(
        "train.average_checkpoints=5",
        "train.keep_checkpoints=5",
        "train.checkpoint_every=100",
        "train.final_checkpoint=last",
    )
    # Both directions are twice as many pairs: half of all pairs in both, then half in one.
    both = f"{{pair}} --both-directions {recipe} {_set(f'train.epochs={epochs / 4:g}')}"
    tuned = _set(
        *(each for each in common if not each.startswith("text.")),
        f"train.epochs={epochs / 2:g}",
        "train.optimizer=adamw",
        "train.learning_rate=0.001",
        "train.ema_decay=0.999",
    )
    rows = {
        "plain": (f"{without_ema} {_set('model.dropout=0')}", "", "no dropout"),
        "dropout": (without_ema, "plain", "dropout 0.3"),
        "average": (f"{without_ema} {average}", "dropout", "dropout, average of 5 checkpoints"),
        "ema": (base, "dropout", "dropout, EMA 0.999"),
        "simcut": (f"{base} {_set('train.simcut=3')}", "ema", "EMA, SimCut 3"),
        "rdrop": (f"{base} {_set('train.r_drop=5')}", "ema", "EMA, R-Drop 5"),
        "bpe_dropout": (f"{base} {_set('text.bpe_dropout=0.1')}", "ema", "EMA, BPE-dropout 0.1"),
        "muon": (
            f"{base} {_set('train.optimizer=muon', 'train.momentum=0.95')}",
            "ema",
            "EMA, Muon",
        ),
        "both": (both, "", "both directions, the first half of the next row"),
        "bidirectional": (
            f"{{pair}} --init-from {{{name}_both}} {tuned}",
            "ema",
            "EMA, both directions, then one",
        ),
    }
    return [
        QualityRow(
            f"{name}_{method}",
            corpus,
            train,
            f"{name}_{baseline}" if baseline else "",
            translate="--beam 5 --to {target}" if method == "both" else "--beam 5",
            about=about,
        )
        for method, (train, baseline, about) in rows.items()
    ]


_DEFAULT = "{files} --budget 4m"
# Published results: R-Drop was best on the development set of Multi30k German to English.
_LONG = _set(
    "model.dropout=0.3",
    "train.batch_tokens=5500",
    "train.r_drop=5",
    "train.ema_decay=0.9995",
    "train.best_metric=bleu",
    "train.validate_sentences=500",
    "train.validate_every=600",
    "train.checkpoint_every=600",
)


def _published(target: str, directions: tuple[str, ...]) -> list[QualityRow]:
    """Return the rows of the long training of English and another language, both directions."""
    both = f"m30k_{target}_both"
    small = "--recipe small --set text.vocab_size={}"
    tuned = _set("train.optimizer=adamw", "train.learning_rate=0.001", "train.epochs=80")
    rows = [
        QualityRow(
            both,
            f"m30k_en{target}",
            f"{{pair}} --both-directions {small.format(8000)} {_LONG} --set train.epochs=60",
            translate="--beam 5 --to {target}",
            about="both directions, R-Drop, 60 epochs",
        )
    ]
    for name in directions:
        rows += [
            QualityRow(
                f"{name}_best",
                name,
                f"{{pair}} --init-from {{{both}}} {_LONG} {tuned}",
                name,
                about="both directions with R-Drop, then 80 epochs in one",
            ),
            QualityRow(
                f"{name}_rdrop",
                name,
                f"{{files}} {small.format(5500)} {_LONG} --set train.epochs=150",
                name,
                about="R-Drop, 150 epochs",
            ),
        ]
    return rows


_SYNTHETIC = "--src {out}.synthetic.{source} --tgt {out}.synthetic.{target}"
_PART = "--src {part}.{source} --tgt {part}.{target} {valid} --recipe small " + _set(
    *_COMMON, "text.vocab_size=8000", "train.batch_tokens=8000"
)
_SMALL_M30K = "--recipe small " + _set(*_COMMON, "text.vocab_size=6000", "train.batch_tokens=6000")
ROWS = (
    # What `dragoman train --budget 4m` reaches with nothing else set.
    QualityRow("m30k_deen", "m30k_deen", _DEFAULT, about="--budget 4m"),
    QualityRow("m30k_ende", "m30k_ende", _DEFAULT, about="--budget 4m"),
    QualityRow("m30k_enfr", "m30k_enfr", _DEFAULT, about="--budget 4m"),
    QualityRow("tatoeba_deen", "tatoeba_deen", _DEFAULT, about="--budget 4m"),
    QualityRow("tatoeba_fren", "tatoeba_fren", _DEFAULT, about="--budget 4m"),
    QualityRow("l10n_enzh", "l10n_enzh", "{files} --budget 10m", seeds=(1,), about="--budget 10m"),
    *_published("de", ("m30k_ende", "m30k_deen")),
    *_published("fr", ("m30k_enfr",)),
    *_ablation("m30k_ende", "text.vocab_size=6000", "train.batch_tokens=6000", epochs=40),
    *_ablation("tatoeba_deen", "text.vocab_size=8000", "train.batch_tokens=16000", epochs=20),
    # Hugging Face's training of the same size, on the same data, for the same time.
    QualityRow(
        "m30k_deen_hf",
        "m30k_deen",
        baseline="m30k_deen",
        program="{root}/bench/hf_quality.py --data {data} --corpus m30k_deen --model {m30k_deen} "
        "--record {results}/m30k_deen-{seed}.json",
        about="Hugging Face Seq2SeqTrainer, Marian",
    ),
    # Decoding with the models of other rows.
    QualityRow(
        "m30k_ende_mbr_chrf",
        "m30k_ende",
        baseline="m30k_ende",
        models="-m {m30k_ende}",
        translate="--mbr chrf --samples 64 --seed 1",
        about="minimum Bayes risk, chrF, 64 samples",
    ),
    QualityRow(
        "m30k_ende_mbr_bleu",
        "m30k_ende",
        baseline="m30k_ende",
        models="-m {m30k_ende}",
        translate="--mbr bleu --beam 16",
        about="minimum Bayes risk, BLEU, beam of 16",
    ),
    QualityRow(
        "m30k_ende_ensemble",
        "m30k_ende",
        baseline="m30k_ende",
        models="-m {m30k_ende__1} -m {m30k_ende__2} -m {m30k_ende__3}",
        seeds=(1,),
        about="ensemble of the three seeds",
    ),
    QualityRow(
        "m30k_deen_confidence",
        "m30k_deen",
        models="-m {m30k_deen}",
        translate="--json",
        about="confidence of each translation",
    ),
    QualityRow(
        "tatoeba_deen_confidence",
        "tatoeba_deen",
        models="-m {tatoeba_deen}",
        translate="--json",
        about="confidence of each translation",
    ),
    # Synthetic pairs; all rows of a comparison train on as many pairs.
    QualityRow(
        "part_deen", "tatoeba_deen", f"{_PART} {_set('train.epochs=40')}", about="40,000 pairs"
    ),
    QualityRow(
        "part_ende", "tatoeba_ende", f"{_PART} {_set('train.epochs=40')}", about="40,000 pairs"
    ),
    QualityRow(
        "part_deen_back",
        "tatoeba_deen",
        f"{_PART} {_SYNTHETIC} {_set('train.epochs=10')}",
        "part_deen",
        augment="-m {part_ende} --method back-translation --beam 5 --input {rest}.{target} "
        "--output-src {out}.synthetic.{source} --output-tgt {out}.synthetic.{target}",
        about="40,000 pairs, 119,227 back-translations",
    ),
    QualityRow(
        "m30k_ende_distilled",
        "m30k_ende",
        f"{{files}} {_SYNTHETIC} {_SMALL_M30K} {_set('train.epochs=20')}",
        "ab_m30k_ende_ema",
        augment="-m {ab_m30k_ende_simcut} --method distillation --beam 5 "
        "--input {train}.{source}.xz --output-src {out}.synthetic.{source} "
        "--output-tgt {out}.synthetic.{target}",
        about="self-distillation: SimCut's translations of the training data beside it",
    ),
)
NAMES = {row.name for row in ROWS}


def find_row(name: str) -> QualityRow:
    """Return a row by its name."""
    return next(row for row in ROWS if row.name == name)

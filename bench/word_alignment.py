"""Measure how often each attribution method names the source word that an output word translates.

    python bench/word_alignment.py build/word_alignment --data DIR [--sentences 60]
    python bench/word_alignment.py build/word_alignment --only grammar lexicon

Small models are trained first, unless the folder has them: five minutes at most on one core each.
The truth needs no aligner: a word of the output counts if it occurs there once, and exactly one
source word can have it as its translation by the dataset's dictionary.

| dataset     | text                                                 | model                      |
| ----------- | ---------------------------------------------------- | -------------------------- |
| grammar     | generated German and English, with changed word order | Transformer, 3 layers     |
| grammar-rnn | the same                                             | Bahdanau et al. (2015)     |
| lexicon     | words of an invented language, clauses reversed      | Transformer, 2 layers      |
| multi30k    | image captions, German to English (--data)           | Transformer, 3 layers      |

It prints the fraction of right words for each method: those for whose first token the source token
with the largest absolute number, the end of sentence left out, is one of the word's translation.
`--model FOLDER` takes a German-English model of your own instead, on the captions.
"""

from __future__ import annotations

import argparse
import json
import lzma
import os
import random
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

import dragoman
from dragoman.config import read_config
from dragoman.explain.explanation import Explanation, TokenizedText
from dragoman.recipes.recipe_miniature import mini
from dragoman.runs.training_run import train

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tools"))

import explorer_fixtures as fixtures

Pairs = list[tuple[str, str]]
TOO_SLOW = ("integrated_gradients",)  # twenty times the time of the others
_SHAPE = ("model.width=128", "model.heads=4", "model.ffn_width=512")
_LAYERS = ("model.encoder=[transformer*{0}]", "model.decoder=[transformer*{0}]")


class AlignmentDataset(NamedTuple):
    """A corpus, its dictionary and the model that learns it."""

    pairs: Callable[[Path | None], Pairs]  # of the directory of corpora
    translations: Callable[[], dict[str, set[str]]]  # of an output word, the source words
    recipe: str
    steps: int
    settings: tuple[str, ...]


def grammar_pairs(_: Path | None = None) -> Pairs:
    """Return German sentences with their translations."""
    return list(fixtures.make_sentences(random.Random(1), 12_000))


def grammar_dictionary() -> dict[str, set[str]]:
    """Return the German forms of English content words, from the tables of the grammar."""
    found: dict[str, set[str]] = {}

    def add(english: str, *german: str) -> None:
        found.setdefault(english, set()).update(each.lower() for each in german)

    for _, one, many, english, english_many in fixtures._PEOPLE:
        add(english, one)
        add(english_many, many)
    for _, german, english in fixtures._THINGS:
        add(english, german)
    for stem, english in fixtures._ADJECTIVES:
        add(english, *(stem + ending for ending in ("e", "er", "es", "en")))
    for he, they, infinitive, participle, *english_forms in fixtures._VERBS:
        for form, sources in zip(
            english_forms, ((he,), (they, infinitive), (participle,)), strict=True
        ):
            add(form.split()[0], *sources)
    for german, english in fixtures._PLACES:
        add(english.split()[-1], german.split()[-1])
    for german, english in (*fixtures._TIMES, *fixtures._COUNTS):
        add(english, german)
    return found


def lexicon_words() -> list[tuple[str, str]]:
    """Return 240 words of an invented language with their translations."""
    draw = random.Random(3)
    words = set[str]()
    while len(words) < 480:
        words.add("".join(draw.choice("bdfgklmnprst") + draw.choice("aeiou") for _ in range(3)))
    ordered = sorted(words)
    draw.shuffle(ordered)
    return list(zip(ordered[:240], ordered[240:], strict=True))


def lexicon_pairs(_: Path | None = None) -> Pairs:
    """Return sentences of two clauses; the translation reverses the words of each clause."""
    draw, words = random.Random(4), lexicon_words()
    found: Pairs = []
    for _ in range(20_000):
        clauses = [draw.choices(words, k=draw.randint(2, 4)) for _ in range(2)]
        source = ", ".join(" ".join(one for one, _ in clause) for clause in clauses)
        target = ", ".join(" ".join(other for _, other in clause[::-1]) for clause in clauses)
        found.append((f"{source}.", f"{target}."))
    return found


def lexicon_dictionary() -> dict[str, set[str]]:
    """Return the source word of each word."""
    return {target: {source} for source, target in lexicon_words()}


def caption_pairs(data: Path | None) -> Pairs:
    """Return the German and English captions of Multi30k's training set."""
    return list(zip(*(_read_lines(data, "train", lang) for lang in ("de", "en")), strict=True))


def _read_lines(data: Path | None, part: str, lang: str) -> list[str]:
    assert data is not None, "multi30k needs --data"
    path = data / "multi30k" / f"{part}.{lang}.xz"
    if not path.is_file():
        raise SystemExit(f"multi30k must be in --data; found no {path}; or leave it out")
    return lzma.open(path, "rt", encoding="utf-8").read().splitlines()


# Words that have one translation in captions, whatever stands around them.
CAPTION_WORDS = {
    "man": "mann", "woman": "frau", "boy": "junge", "dog": "hund", "dogs": "hunde",
    "child": "kind", "children": "kinder", "men": "männer", "women": "frauen",
    "two": "zwei", "three": "drei", "four": "vier", "five": "fünf", "group": "gruppe",
    "red": "rot rote roten rotes roter rotem", "water": "wasser", "street": "straße",
    "blue": "blau blaue blauen blaues blauer blauem", "snow": "schnee", "ball": "ball",
    "white": "weiß weiße weißen weißes weißer weißem", "beach": "strand", "grass": "gras",
    "black": "schwarz schwarze schwarzen schwarzes schwarzer schwarzem", "hat": "hut",
    "green": "grün grüne grünen grünes grüner grünem", "bench": "bank", "car": "auto",
    "yellow": "gelb gelbe gelben gelbes gelber gelbem", "camera": "kamera", "city": "stadt",
    "horse": "pferd", "bicycle": "fahrrad", "bike": "fahrrad", "guitar": "gitarre",
    "football": "fußball", "baby": "baby", "tree": "baum", "dress": "kleid", "girl": "mädchen",
    "shirt": "hemd shirt t-shirt", "jacket": "jacke", "table": "tisch", "house": "haus",
    "young": "junge junger junges jungen", "old": "alter alte alten altes alt",
    "brown": "braun braune brauner braunes braunen braunem", "microphone": "mikrofon",
    "book": "buch", "window": "fenster", "mountain": "berg", "rock": "felsen", "wall": "wand mauer",
}  # fmt: skip


def caption_dictionary() -> dict[str, set[str]]:
    """Return the German forms of some English words."""
    return {english: set(german.split()) for english, german in CAPTION_WORDS.items()}


DATASETS = {
    "grammar": AlignmentDataset(
        grammar_pairs,
        grammar_dictionary,
        "tiny",
        400,
        (
            *_SHAPE,
            *(each.format(3) for each in _LAYERS),
            "text.vocab_size=620",
            "train.batch_tokens=400",
        ),
    ),
    "grammar-rnn": AlignmentDataset(
        grammar_pairs,
        grammar_dictionary,
        "bahdanau2015",
        350,
        ("text.vocab_size=620", "train.batch_tokens=400"),
    ),
    "lexicon": AlignmentDataset(
        lexicon_pairs,
        lexicon_dictionary,
        "tiny",
        900,
        (
            *_SHAPE,
            *(each.format(2) for each in _LAYERS),
            "text.vocab_size=400",
            "train.batch_tokens=1000",
        ),
    ),
    "multi30k": AlignmentDataset(
        caption_pairs,
        caption_dictionary,
        "tiny",
        1100,
        (
            *_SHAPE,
            *(each.format(3) for each in _LAYERS),
            "text.vocab_size=4000",
            "train.batch_tokens=1500",
        ),
    ),
}


def build(name: str, folder: Path, corpora: Path | None) -> Path:
    """Train a dataset's model into `folder/name` unless it is there; return its directory."""
    dataset, out = DATASETS[name], folder / name
    if (out / "manifest.json").is_file():
        return out
    data = fixtures.write_parallel(folder / "data" / name, dataset.pairs(corpora))
    transformer = ("model.tie_embeddings=all", "train.learning_rate=3e-3")
    overrides = [
        "text.tokenizer=bpe",
        "text.character_coverage=1.0",
        *(transformer if dataset.recipe == "tiny" else ()),
        *dataset.settings,
        *data,
        f"train.steps={dataset.steps}",
        f"train.warmup_steps={dataset.steps // 8}",
        f"train.validate_every={dataset.steps}",
        f"train.checkpoint_every={dataset.steps}",
        "train.target_exact=0",
        "train.final_checkpoint=last",
        "train.average_checkpoints=1",
        "train.ema_decay=0",
        "train.schedule=cosine",
        "train.threads=1",
        "train.device=cpu",
        "train.precision=float32",
        "train.compile=off",
    ]
    train(read_config(recipe=dataset.recipe, overrides=overrides, scale=mini), out)
    return out


def measure(model: Path, dataset: AlignmentDataset, texts: list[str]) -> dict[str, Any]:
    """Return for each method the fraction of words whose translation it names, and its seconds."""
    translator = dragoman.load(model, device="cpu")
    assert isinstance(translator, dragoman.Translator)
    dictionary = dataset.translations()
    right: dict[str, list[bool]] = {}
    seconds: dict[str, float] = {}
    for text in texts:
        explanation = translator.explain(text, beam=4, attribution=None)
        words = list(aligned_words(explanation, dictionary))
        if not words:
            continue
        is_word = np.array([not token.special for token in explanation.source.tokens])
        methods = [each for each in explanation.model["attributions"] if each not in TOO_SLOW]
        for name in ("mean cross-attention", *methods):
            begin = time.process_time()
            if name == "mean cross-attention":
                values = explanation.alignment
            else:
                found, arrays = translator.attribute(explanation, name)
                values = arrays[found.source]
            seconds[name] = seconds.get(name, 0.0) + time.process_time() - begin
            for row, first, end in words:
                strongest = int(np.where(is_word, np.abs(values[row]), -1.0).argmax())
                right.setdefault(name, []).append(first <= strongest < end)
    [words_measured] = {len(each) for each in right.values()}
    return {
        "words": words_measured,
        "right": {name: round(sum(each) / len(each), 3) for name, each in right.items()},
        "seconds": {name: round(each, 2) for name, each in seconds.items()},
    }


def aligned_words(
    explanation: Explanation, dictionary: Mapping[str, set[str]]
) -> Iterator[tuple[int, int, int]]:
    """Yield the first token of each output word, with the range of its translation's tokens."""
    sources, targets = _words(explanation.source), _words(explanation.target)
    for word, (first, _) in targets:
        translations = [at for source, at in sources if source in dictionary.get(word, ())]
        if len(translations) == 1 and sum(other == word for other, _ in targets) == 1:
            yield first, *translations[0]


def _words(text: TokenizedText) -> list[tuple[str, tuple[int, int]]]:
    """Return the words of a text in lower case, without punctuation, with their tokens' ranges."""
    found = []
    for first, end in text.words:
        word = "".join(token.text for token in text.tokens[first:end] if not token.special)
        found.append((word.strip(" .,\"'()").lower(), (first, end)))
    return found


def main() -> None:
    """Train, measure and print a table, and one line of JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("folder", type=Path, help="where the models are or go")
    parser.add_argument(
        "--data",
        type=Path,
        default=os.environ.get("DRAGOMAN_DATA"),
        metavar="DIR",
        help="directory of multi30k/; default: DRAGOMAN_DATA",
    )
    parser.add_argument("--only", nargs="+", choices=sorted(DATASETS), help="some of the datasets")
    parser.add_argument("--model", type=Path, help="a German-English model to measure instead")
    parser.add_argument("--sentences", type=int, default=60)
    chosen = parser.parse_args()
    names = ["multi30k"] if chosen.model else chosen.only or list(DATASETS)
    if "multi30k" in names and chosen.data is None:
        parser.error(
            "--data DIR is required for multi30k; found none; pass it, set DRAGOMAN_DATA, or "
            "leave multi30k out with --only"
        )
    torch.set_num_threads(1)
    results = {}
    for name in names:
        model = chosen.model or build(name, chosen.folder, chosen.data)
        if name == "multi30k":
            texts = _read_lines(chosen.data, "dev", "de")
        else:
            valid = chosen.folder / "data" / name / "valid.de"
            texts = valid.read_text(encoding="utf-8").splitlines()
        found = results[name] = measure(model, DATASETS[name], texts[: chosen.sentences])
        print(f"{name}: {found['words']} words")
        for method, fraction in found["right"].items():
            print(f"  {method:22} {fraction:6.1%} {found['seconds'][method]:8.2f} s", flush=True)
    print(json.dumps({"bench": "word_alignment", "results": results}))


if __name__ == "__main__":
    main()

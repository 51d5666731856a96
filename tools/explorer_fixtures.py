"""Train small models of every family on generated data, and write explanations of examples.

For browser tests and screenshots of the explorer page. Data comes from small grammars, so that
models learn them within seconds on one CPU core: a translator of German sentences into English
with their changes of word order, reviews, tagged sentences, sentence pairs, running text, sets.

    python tools/explorer_fixtures.py build/explorer            # all, in about two minutes
    python tools/explorer_fixtures.py build/explorer --only translator han
    python tools/explorer_fixtures.py build/explorer --tiny     # a few steps each, for tests

Each model is a directory `FOLDER/NAME`, which every command of `dragoman` takes; its explanations
are `FOLDER/NAME.0.json`, `FOLDER/NAME.1.json` and so on. What exists is reused.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

TINY_STEPS = 4


class Fixture(NamedTuple):
    """One model: its recipe in miniature, changes to it, its data and the inputs to explain."""

    recipe: str
    steps: int  # enough to learn the generated data
    settings: tuple[str, ...]
    corpus: Callable[[random.Random, int], Iterator[Any]]  # yields examples
    write: Callable[[Path, list[Any]], tuple[str, ...]]  # writes them; returns settings of the data
    examples: int  # in the training set
    inputs: tuple[Any, ...]  # to explain
    options: dict[str, Any] = {}  # of the explanations  # noqa: RUF012


# German and English, with agreement, verb-final participles and inverted main clauses.

_PEOPLE = (
    ("m", "Mann", "Männer", "man", "men"),
    ("m", "Hund", "Hunde", "dog", "dogs"),
    ("m", "Junge", "Jungen", "boy", "boys"),
    ("f", "Frau", "Frauen", "woman", "women"),
    ("f", "Katze", "Katzen", "cat", "cats"),
    ("f", "Malerin", "Malerinnen", "painter", "painters"),
    ("n", "Kind", "Kinder", "child", "children"),
    ("n", "Mädchen", "Mädchen", "girl", "girls"),
)
_THINGS = (
    ("m", "Ball", "ball"),
    ("m", "Apfel", "apple"),
    ("m", "Brief", "letter"),
    ("f", "Gitarre", "guitar"),
    ("f", "Zeitung", "newspaper"),
    ("f", "Blume", "flower"),
    ("n", "Buch", "book"),
    ("n", "Fahrrad", "bicycle"),
    ("n", "Lied", "song"),
)
_VERBS = (  # er, sie (plural), infinitive and participle; he, they and participle
    ("sieht", "sehen", "sehen", "gesehen", "sees", "see", "seen"),
    ("kauft", "kaufen", "kaufen", "gekauft", "buys", "buy", "bought"),
    ("findet", "finden", "finden", "gefunden", "finds", "find", "found"),
    ("trägt", "tragen", "tragen", "getragen", "carries", "carry", "carried"),
    ("malt", "malen", "malen", "gemalt", "paints", "paint", "painted"),
    ("sucht", "suchen", "suchen", "gesucht", "looks for", "look for", "looked for"),
)
_ADJECTIVES = (
    ("klein", "small"),
    ("alt", "old"),
    ("jung", "young"),
    ("groß", "big"),
    ("neu", "new"),
    ("rot", "red"),
)
_PLACES = (
    ("im Garten", "in the garden"),
    ("am Fluss", "by the river"),
    ("auf der Straße", "on the street"),
    ("in der Küche", "in the kitchen"),
    ("vor dem Haus", "in front of the house"),
)
_TIMES = (("heute", "today"), ("morgen", "tomorrow"), ("oft", "often"), ("jetzt", "now"))
_COUNTS = (("zwei", "two"), ("drei", "three"), ("viele", "many"))
_ARTICLES = {"m": ("ein", "der"), "f": ("eine", "die"), "n": ("ein", "das")}
_OBJECT_ARTICLES = {"m": "einen", "f": "eine", "n": "ein"}
_ENDINGS = {"m": "er", "f": "e", "n": "es"}  # after "ein"
_OBJECT_ENDINGS = {"m": "en", "f": "e", "n": "es"}


def make_sentences(draw: random.Random, count: int) -> Iterator[tuple[str, str]]:
    """Yield German sentences with their English translations."""
    for _ in range(count):
        german, english = _clause(draw)
        yield german[0].upper() + german[1:] + ".", english[0].upper() + english[1:] + "."


def make_monotone(draw: random.Random, count: int) -> Iterator[tuple[str, str]]:
    """Yield sentences whose words have the same order in both languages."""
    for _ in range(count):
        plural = draw.random() < 0.4
        subject = _plural_phrase(draw) if plural else _singular_phrase(draw)
        verb, thing = draw.choice(_VERBS), _object_phrase(draw)
        german = f"{subject[0]} {verb[1 if plural else 0]} {thing[0]}."
        english = f"{subject[1]} {verb[5 if plural else 4]} {thing[1]}."
        yield german[0].upper() + german[1:], english[0].upper() + english[1:]


def _clause(draw: random.Random) -> tuple[str, str]:
    """Return a main clause in both languages."""
    plural = draw.random() < 0.4
    subject = _plural_phrase(draw) if plural else _singular_phrase(draw)
    thing = _object_phrase(draw)
    verb = draw.choice(_VERBS)
    place = draw.choice(_PLACES) if draw.random() < 0.6 else ("", "")
    when = draw.choice(_TIMES) if draw.random() < 0.5 else ("", "")
    form = draw.choice(("present", "present", "modal", "perfect"))
    if form == "present":
        finite, rest = verb[1 if plural else 0], ""
        predicate = verb[5 if plural else 4]
    elif form == "modal":
        finite, rest = "können" if plural else "kann", verb[2]
        predicate = f"can {verb[5]}"
    else:
        finite, rest = "haben" if plural else "hat", verb[3]
        predicate = f"{'have' if plural else 'has'} {verb[6]}"
    if when[0] and draw.random() < 0.5:  # the verb stays second
        german = [when[0], finite, subject[0], place[0], thing[0], rest]
        english = [when[1], subject[1], predicate, thing[1], place[1]]
    else:
        german = [subject[0], finite, when[0], place[0], thing[0], rest]
        english = [subject[1], predicate, thing[1], place[1], when[1]]
    return " ".join(filter(None, german)), " ".join(filter(None, english))


def _singular_phrase(draw: random.Random) -> tuple[str, str]:
    """Return a subject in the singular, with an article and perhaps an adjective."""
    gender, german, _, english, _ = draw.choice(_PEOPLE)
    definite = draw.random() < 0.5
    article = _ARTICLES[gender][definite]
    if draw.random() < 0.5:
        stem, adjective = draw.choice(_ADJECTIVES)
        german = f"{stem}{'e' if definite else _ENDINGS[gender]} {german}"
        english = f"{adjective} {english}"
    return f"{article} {german}", f"{'the' if definite else _indefinite(english)} {english}"


def _plural_phrase(draw: random.Random) -> tuple[str, str]:
    """Return a subject in the plural, with a number and perhaps an adjective."""
    _, _, german, _, english = draw.choice(_PEOPLE)
    count = draw.choice(_COUNTS)
    if draw.random() < 0.5:
        stem, adjective = draw.choice(_ADJECTIVES)
        german, english = f"{stem}e {german}", f"{adjective} {english}"
    return f"{count[0]} {german}", f"{count[1]} {english}"


def _object_phrase(draw: random.Random) -> tuple[str, str]:
    """Return an object with its article and perhaps an adjective."""
    gender, german, english = draw.choice(_THINGS)
    if draw.random() < 0.5:
        stem, adjective = draw.choice(_ADJECTIVES)
        german = f"{stem}{_OBJECT_ENDINGS[gender]} {german}"
        english = f"{adjective} {english}"
    return f"{_OBJECT_ARTICLES[gender]} {german}", f"{_indefinite(english)} {english}"


def _indefinite(word: str) -> str:
    """Return the article of an English phrase."""
    return "an" if word[0] in "aeiou" else "a"


def write_parallel(folder: Path, examples: list[tuple[str, str]]) -> tuple[str, ...]:
    """Write sentence pairs as aligned files."""
    held = max(1, len(examples) // 40)
    for part, rows in (("valid", examples[:held]), ("train", examples[held:])):
        for side, lang in enumerate(("de", "en")):
            _write_lines(folder / f"{part}.{lang}", [row[side] for row in rows])
    return (
        f"data.src='{folder / 'train.de'}'",
        f"data.tgt='{folder / 'train.en'}'",
        f"data.valid_src='{folder / 'valid.de'}'",
        f"data.valid_tgt='{folder / 'valid.en'}'",
        "data.src_lang=de",
        "data.tgt_lang=en",
    )


# Reviews of several sentences, of which one decides.

_PRAISE = ("wonderful", "moving", "brilliant", "charming")
_BLAME = ("boring", "dull", "awful", "tedious")
_TOPICS = ("story", "film", "acting", "music", "camera", "ending")
_PLAIN = (
    "It was shown in a small cinema.",
    "Two men walk along a river.",
    "The film is based on a book.",
    "I saw it with a friend on Sunday.",
    "It takes about two hours.",
)


def make_reviews(draw: random.Random, count: int) -> Iterator[dict[str, Any]]:
    """Yield reviews with their label; the sentences around the judgement are neutral."""
    for _ in range(count):
        good = draw.random() < 0.5
        word = draw.choice(_PRAISE if good else _BLAME)
        sentences = draw.sample(_PLAIN, draw.randint(1, 3))
        very = draw.choice(("", "very ", "really "))
        judgement = f"The {draw.choice(_TOPICS)} is {very}{word}."
        if draw.random() < 0.3:  # negated: the word alone does not decide
            judgement, good = judgement.replace(" is ", " is not "), not good
        sentences.insert(draw.randint(0, len(sentences)), judgement)
        yield {"text": " ".join(sentences), "label": "positive" if good else "negative"}


def make_topics(draw: random.Random, count: int) -> Iterator[dict[str, Any]]:
    """Yield short news with any number of topics."""
    words = {
        "grain": ("wheat", "corn", "barley"),
        "money": ("bank", "interest rate", "currency"),
        "oil": ("crude", "barrels", "refinery"),
        "ships": ("port", "vessel", "cargo"),
    }
    fillers = ("prices rose today", "officials said", "a report showed", "traders expect more")
    for _ in range(count):
        labels = draw.sample(sorted(words), draw.choice((0, 1, 1, 2)))
        parts = [draw.choice(fillers) for _ in range(2)]
        parts += [f"the {draw.choice(words[label])} was mentioned" for label in labels]
        draw.shuffle(parts)
        yield {"text": ", ".join(parts) + ".", "label": sorted(labels)}


# Tagged sentences, pairs and sets.

_NAMES = ("Anna", "Bert", "Carla", "Emil", "Nadia", "Omar")
_SURNAMES = ("Meier", "Schulz", "Novak")
_TOWNS = ("Bonn", "Celle", "Dessau", "Lyon", "Porto")


def make_tagged(draw: random.Random, count: int) -> Iterator[dict[str, Any]]:
    """Yield sentences with entities of one or two tokens."""
    for _ in range(count):
        name = [draw.choice(_NAMES), *draw.sample(_SURNAMES, draw.randint(0, 1))]
        words = [(word, f"{'I' if at else 'B'}-PER") for at, word in enumerate(name)]
        verb = draw.choice(("lives", "works", "stays", "met"))
        if verb == "met":
            words += [("met", "O"), (draw.choice(_NAMES), "B-PER")]
        else:
            words.append((verb, "O"))
        town = draw.choice(_TOWNS)
        words += [(draw.choice(("in", "near")), "O"), (town, "B-LOC")]
        if draw.random() < 0.3:
            words[-1:] = [("New", "B-LOC"), (town, "I-LOC")]
        if draw.random() < 0.5:
            words += [(draw.choice(("every", "last")), "O"), (draw.choice(("year", "May")), "O")]
        words.append((".", "O"))
        yield {"tokens": [word for word, _ in words], "tags": [tag for _, tag in words]}


def make_pairs(draw: random.Random, count: int) -> Iterator[dict[str, Any]]:
    """Yield a sentence with one that follows from it, contradicts it or has other content."""
    who = ("a man", "a woman", "a child", "a dog")
    doing = (("sleeping", "awake"), ("running", "standing still"), ("laughing", "crying"))
    where = ("in the garden", "on the street", "at home")
    for _ in range(count):
        subject, (verb, opposite), place = draw.choice(who), draw.choice(doing), draw.choice(where)
        first = f"{subject} is {verb} {place}"
        label = draw.choice(("entailment", "contradiction", "neutral"))
        second = {
            "entailment": f"{subject} is {verb}",
            "contradiction": f"{subject} is {opposite}",
            "neutral": f"{subject} has {draw.choice(('a hat', 'a ball', 'a brother'))}",
        }[label]
        yield {"first": first, "second": second, "label": label}


def make_sets(draw: random.Random, count: int) -> Iterator[dict[str, Any]]:
    """Yield sets of numbers with their maximum."""
    for _ in range(count):
        numbers = [round(draw.uniform(0, 100), 1) for _ in range(draw.randint(2, 9))]
        yield {"set": numbers, "target": max(numbers)}


def make_english(draw: random.Random, count: int) -> Iterator[str]:
    """Yield lines of English in which a later sentence refers to an earlier one."""
    for _ in range(count):
        (_, first), (_, second) = make_sentences(draw, 2)
        yield f"{first} {second} Again, {first[0].lower()}{first[1:]}"


def write_records(folder: Path, examples: list[dict[str, Any]]) -> tuple[str, ...]:
    """Write examples as JSONL."""
    held = max(1, len(examples) // 20)
    for part, rows in (("valid", examples[:held]), ("train", examples[held:])):
        lines = [json.dumps(row, ensure_ascii=False) for row in rows]
        _write_lines(folder / f"{part}.jsonl", lines)
    return (
        f"data.train=['{folder / 'train.jsonl'}']",
        f"data.valid=['{folder / 'valid.jsonl'}']",
    )


def write_text(folder: Path, examples: list[str]) -> tuple[str, ...]:
    """Write lines of text."""
    held = max(1, len(examples) // 20)
    _write_lines(folder / "valid.txt", examples[:held])
    _write_lines(folder / "train.txt", examples[held:])
    return f"data.train=['{folder / 'train.txt'}']", f"data.valid=['{folder / 'valid.txt'}']"


def _write_lines(path: Path, lines: Sequence[str]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8", newline="\n")


_GERMAN = (
    "Zwei kleine Kinder haben heute im Garten einen alten Ball gefunden.",
    "Jetzt kann die junge Malerin vor dem Haus eine rote Blume malen.",
)
_SUBWORDS = ("text.tokenizer=bpe", "text.vocab_size=620", "text.character_coverage=1.0")


def _translator(recipe: str, steps: int, *settings: str) -> Fixture:
    """Return a translator of the German sentences."""
    return Fixture(
        recipe,
        steps,
        (*_SUBWORDS, "train.batch_tokens=400", "train.target_exact=0", *settings),
        make_sentences,
        write_parallel,
        12_000,
        _GERMAN,
    )


FIXTURES: dict[str, Fixture] = {
    "translator": _translator(
        "tiny",
        400,
        "model.width=128",
        "model.heads=4",
        "model.ffn_width=512",
        "model.encoder=[transformer*3]",
        "model.decoder=[transformer*3]",
        "model.tie_embeddings=all",
        "train.learning_rate=3e-3",
    ),
    "rnn": _translator("bahdanau2015", 350),
    "monotonic": _translator("chiu2018", 500, "text.vocab_size=520")._replace(
        corpus=make_monotone,
        inputs=(
            "Zwei kleine Kinder tragen einen alten Ball.",
            "Die junge Malerin malt eine rote Blume.",
        ),
    ),
    "convs2s": _translator("gehring2017", 350),
    "han": Fixture(
        "yang2016",
        240,
        ("train.batch_tokens=2048",),
        make_reviews,
        write_records,
        2_000,
        (
            "It takes about two hours. The acting is really wonderful. Two men walk along a river.",
            "The music is not very charming. I saw it with a friend on Sunday.",
        ),
    ),
    "labels": Fixture(
        "mullenbach2018",
        150,
        ("train.batch_tokens=2048", "classify.multi_label=on"),
        make_topics,
        write_records,
        2_000,
        ("Prices rose today, the wheat was mentioned, the cargo was mentioned, officials said.",),
    ),
    "tagger": Fixture(
        "vaswani2017_tagger",
        150,
        ("train.batch_tokens=1024",),
        make_tagged,
        write_records,
        2_000,
        ("Anna Meier met Omar near New Porto last May.",),
    ),
    "pairs": Fixture(
        "chen2017",
        100,
        ("train.batch_tokens=1024",),
        make_pairs,
        write_records,
        2_000,
        (("A man is sleeping in the garden", "A man is awake"),),
    ),
    "language": Fixture(
        "dai2019_lm",
        500,
        (
            "language.segment=16",
            "language.memory=16",
            "language.eval_memory=32",
            "train.batch_tokens=512",
        ),
        make_english,
        write_text,
        2_000,
        (
            "Two small children have found an old ball in the garden today. A man sees the red "
            "flower by the river. Again, two small",
        ),
        {"max_tokens": 8},
    ),
    "sets": Fixture(
        "lee2019_isab",
        200,
        ("sets.seeds=2", "train.batch_tokens=1024"),
        make_sets,
        write_records,
        4_000,
        ([12.5, 71.0, 3.2, 98.4, 55.5, 40.1],),
    ),
}


def build(name: str, folder: Path, *, tiny: bool = False, seed: int = 1) -> Path:
    """Train a fixture's model into `folder/name` unless it is there; return its directory."""
    from dragoman.config import read_config
    from dragoman.recipes.recipe_miniature import mini
    from dragoman.runs.training_run import train

    fixture, out = FIXTURES[name], folder / name
    if (out / "manifest.json").is_file():
        return out
    examples = min(fixture.examples, 600) if tiny else fixture.examples
    data = fixture.write(
        folder / "data" / name, list(fixture.corpus(random.Random(seed), examples))
    )
    steps = TINY_STEPS if tiny else fixture.steps
    overrides = [
        *fixture.settings,
        *data,
        f"train.steps={steps}",
        f"train.warmup_steps={max(1, steps // 8)}",
        f"train.validate_every={steps}",
        f"train.checkpoint_every={steps}",
        "train.keep_checkpoints=1",
        "train.final_checkpoint=last",
        "train.average_checkpoints=1",
        "train.ema_decay=0",
        "train.schedule=cosine",
        "train.threads=1",
        "train.device=cpu",
        "train.precision=float32",
        "train.compile=off",
        f"train.seed={seed}",
    ]
    config = read_config(recipe=fixture.recipe, overrides=overrides, scale=mini)
    train(config, out)
    return out


def explain(name: str, folder: Path) -> list[Path]:
    """Write the explanations of a fixture's inputs as JSON; return the files."""
    import dragoman

    predictor: Any = dragoman.load(folder / name, device="cpu")
    files = []
    for number, each in enumerate(FIXTURES[name].inputs):
        path = folder / f"{name}.{number}.json"
        if not path.is_file():
            found = predictor.explain(each, **FIXTURES[name].options)
            path.write_text(found.to_json(), encoding="utf-8")
        files.append(path)
    return files


def main() -> None:
    """Build the fixtures that were asked for."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("folder", type=Path, help="where the models and explanations go")
    parser.add_argument("--only", nargs="+", choices=sorted(FIXTURES), help="some of them")
    parser.add_argument("--tiny", action="store_true", help=f"train for {TINY_STEPS} steps only")
    parser.add_argument("--models", action="store_true", help="write no explanations")
    given = parser.parse_args()
    for name in given.only or FIXTURES:
        start = time.process_time()
        build(name, given.folder, tiny=given.tiny)
        files = [] if given.models else explain(name, given.folder)
        sizes = ", ".join(f"{path.name} {path.stat().st_size // 1000} kB" for path in files)
        print(f"{name}: {time.process_time() - start:.1f} s CPU; {sizes}", flush=True)


if __name__ == "__main__":
    sys.exit(main())

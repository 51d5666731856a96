"""Corpora: pairs from two files or one, column detection, and errors with the line."""

from __future__ import annotations

import gzip
import json
import lzma
import os
from pathlib import Path

import pytest

from dragoman.config.root_config import DataConfig
from dragoman.data.parallel_corpus import (
    BadPair,
    Corpus,
    LineCountError,
    ParallelFiles,
    SentencePair,
    TabularCorpus,
    build_corpus,
)
from dragoman.data.tabular_files import ColumnSelection
from dragoman.errors import ConfigError, DataError

DATA = Path(
    os.environ.get("DRAGOMAN_DATA", Path(__file__).resolve().parents[4] / "shared" / "data")
)
needs_data = pytest.mark.skipif(
    not (DATA / "multi30k").is_dir(), reason=f"no corpora at {DATA} (set DRAGOMAN_DATA)"
)
PAIRS = [("ein Hund", "a dog"), ("zwei Männer", "two men"), ("Haus", "house")]


def pair_of_files(folder: Path, src: bytes, tgt: bytes, **options: object) -> ParallelFiles:
    (folder / "x.de").write_bytes(src)
    (folder / "x.en").write_bytes(tgt)
    return ParallelFiles(folder / "x.de", folder / "x.en", **options)  # type: ignore[arg-type]


def pairs_file(
    folder: Path, name: str, content: str, wanted: ColumnSelection | None = None, **options: object
) -> TabularCorpus:
    data = content.encode()
    path = folder / name
    path.write_bytes(
        gzip.compress(data)
        if name.endswith(".gz")
        else lzma.compress(data)
        if name.endswith(".xz")
        else data
    )
    return TabularCorpus(path, wanted, **options)  # type: ignore[arg-type]


def sides(corpus: Corpus) -> list[tuple[str, str]]:
    return [(pair.src, pair.tgt) for pair in corpus.pairs()]


def test_two_files_are_read_in_step(tmp_path: Path) -> None:
    corpus = pair_of_files(tmp_path, b"ein Hund\nzwei\n", b"a dog\ntwo\n")
    assert list(corpus.pairs()) == [
        SentencePair(1, "ein Hund", "a dog"),
        SentencePair(2, "zwei", "two"),
    ]
    assert list(corpus.src_texts()) == ["ein Hund", "zwei"]
    assert list(corpus.tgt_texts()) == ["a dog", "two"]
    assert corpus.files == [tmp_path / "x.de", tmp_path / "x.en"]
    assert corpus.fraction_read() == 1.0


@pytest.mark.parametrize(("src", "tgt"), [(5, 3), (3, 5), (1, 0), (0, 1), (700, 2)])
def test_unequal_counts_give_both_numbers(tmp_path: Path, src: int, tgt: int) -> None:
    """The counts of both files are reported (OpenNMT-py#2488, stefan-it/nmt-en-vi#6)."""
    corpus = pair_of_files(tmp_path, b"x\n" * src, b"y\n" * tgt)
    with pytest.raises(
        LineCountError,
        match=f"must have equally many lines; found {src} and {tgt}; see dragoman data check",
    ) as caught:
        list(corpus.pairs())
    assert caught.value.counts == (src, tgt)
    assert caught.value.exit_code == 2


def test_empty_lines_are_pairs_like_any_other(tmp_path: Path) -> None:
    """Blank lines are not removed on one side only."""
    assert sides(pair_of_files(tmp_path, b"a\n\nc\n", b"x\ny\n\n")) == [
        ("a", "x"),
        ("", "y"),
        ("c", ""),
    ]


def test_a_bad_line_is_an_error_or_skips_its_pair(tmp_path: Path) -> None:
    src, tgt = b"a\n\xff\nc\nd\n", b"x\ny\nz\x00\nw\n"
    with pytest.raises(DataError, match=r"x\.de line 2 must be UTF-8; found byte 0xFF"):
        list(pair_of_files(tmp_path, src, tgt).pairs())
    corpus = pair_of_files(tmp_path, src, tgt, on_bad_line="skip")
    assert list(corpus.pairs()) == [SentencePair(1, "a", "x"), SentencePair(4, "d", "w")]
    bad = [record for record in corpus.records() if isinstance(record, BadPair)]
    assert [(each.number, each.line.file.name) for each in bad] == [(2, "x.de"), (3, "x.en")]


def test_overlong_lines_are_left_out_even_when_bad_ones_stop(tmp_path: Path) -> None:
    """One very long line does not end a run (OpenNMT-py#1161, fairseq#1191)."""
    corpus = pair_of_files(
        tmp_path, b"a\n" + b"b" * 5000 + b"\nc\n", b"x\ny\nz\n", max_line_bytes=100
    )
    assert sides(corpus) == [("a", "x"), ("c", "z")]


@pytest.mark.parametrize("name", ["x.tsv", "x.tab", "x.tsv.gz", "x.TSV", "x.tsv.xz"])
def test_tsv_without_header(tmp_path: Path, name: str) -> None:
    assert sides(pairs_file(tmp_path, name, "".join(f"{a}\t{b}\n" for a, b in PAIRS))) == PAIRS


def test_quotes_mean_nothing_in_tsv(tmp_path: Path) -> None:
    assert sides(pairs_file(tmp_path, "x.tsv", '"a\tb"\n')) == [('"a', 'b"')]


@pytest.mark.parametrize(
    "header",
    [
        "src\ttgt",
        "source\ttarget",
        "Source\tTarget",
        "source_text\ttarget_text",
        "input\toutput",
        "src\ttranslation",
        "de\ten",
        "DE\tpt_BR",
        "English\tFrench",
        "german\ten",
    ],
)
def test_usual_headers_are_recognised(tmp_path: Path, header: str) -> None:
    assert sides(pairs_file(tmp_path, "x.tsv", f"{header}\nein\tone\n")) == [("ein", "one")]


@pytest.mark.parametrize("row", ["de\tde", "ja\tyes", "de\ten\tok", "ist\tis", "English\tanglais"])
def test_short_words_are_not_taken_for_language_codes(tmp_path: Path, row: str) -> None:
    first = tuple(row.split("\t")[:2])
    assert sides(pairs_file(tmp_path, "x.tsv", f"{row}\n{row}\n"))[0] == first


def test_languages_name_columns(tmp_path: Path) -> None:
    content = "id\ten\tde\n1\tone\teins\n"
    assert sides(
        pairs_file(tmp_path, "x.tsv", content, ColumnSelection(src_lang="de", tgt_lang="en"))
    ) == [("eins", "one")]
    assert sides(
        pairs_file(tmp_path, "x.tsv", content, ColumnSelection(src_lang="en", tgt_lang="de"))
    ) == [("one", "eins")]


def test_languages_name_columns_in_english(tmp_path: Path) -> None:
    content = "English\tGerman\none\teins\n"
    assert sides(
        pairs_file(tmp_path, "x.tsv", content, ColumnSelection(src_lang="de", tgt_lang="en"))
    ) == [("eins", "one")]
    assert sides(pairs_file(tmp_path, "x.tsv", content, ColumnSelection(tgt_lang="en-GB"))) == [
        ("eins", "one")
    ]
    wrong = ColumnSelection(src_lang="fr")
    with pytest.raises(DataError, match=r"found English, German; .*--src-lang en --tgt-lang de"):
        sides(pairs_file(tmp_path, "x.tsv", content, wrong))


def test_languages_take_precedence_over_usual_names(tmp_path: Path) -> None:
    """A column "source" may name the origin of a text."""
    content = "source\tde\ten\ttarget\nTatoeba\teins\tone\tlearners\n"
    assert sides(
        pairs_file(tmp_path, "x.tsv", content, ColumnSelection(src_lang="de", tgt_lang="en"))
    ) == [("eins", "one")]


def test_the_most_usual_name_is_taken(tmp_path: Path) -> None:
    content = "original\tsrc\ttgt\ttranslation\nEins!\teins\tone\tOne!\n"
    assert sides(pairs_file(tmp_path, "x.tsv", content, ColumnSelection())) == [("eins", "one")]


@pytest.mark.parametrize(
    ("src_field", "tgt_field", "expected"),
    [
        ("3", "1", ("c", "a")),
        ("german", "english", ("b", "c")),
        ("german", "3", ("b", "c")),
        ("2", "number", ("b", "a")),
    ],
)
def test_columns_can_be_named(
    tmp_path: Path, src_field: str, tgt_field: str, expected: tuple[str, str]
) -> None:
    corpus = pairs_file(
        tmp_path, "x.csv", "number,german,english\na,b,c\n", ColumnSelection(src_field, tgt_field)
    )
    assert sides(corpus)[-1] == expected


def test_unknown_column_suggests_the_nearest(tmp_path: Path) -> None:
    corpus = pairs_file(
        tmp_path, "x.csv", "number,german,english\na,b,c\n", ColumnSelection("germann", "english")
    )
    with pytest.raises(
        DataError,
        match=r"must be called germann; found number, german, english; did you mean german\?",
    ):
        sides(corpus)


def test_column_number_out_of_range(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="must be from 1 to 2; found 4"):
        sides(pairs_file(tmp_path, "x.tsv", "a\tb\n", ColumnSelection("1", "4")))


def test_one_column_is_not_a_pair(tmp_path: Path) -> None:
    with pytest.raises(
        DataError,
        match=r"x\.tsv line 1 must have two columns or more; found 1; write one pair per line with "
        r"a tab",
    ):
        sides(pairs_file(tmp_path, "x.tsv", "just text\n"))


@pytest.mark.parametrize("name", ["x.tsv", "x.csv"])
def test_rows_must_have_the_same_width(tmp_path: Path, name: str) -> None:
    mark = "\t" if name == "x.tsv" else ","
    content = f"a{mark}b\nc\nd{mark}e{mark}f\n"
    with pytest.raises(DataError, match="line 2 must have 2 columns; found 1; repair the row"):
        sides(pairs_file(tmp_path, name, content))
    corpus = pairs_file(tmp_path, name, content, on_bad_line="skip")
    assert sides(corpus) == [("a", "b")]
    assert [record.number for record in corpus.records() if isinstance(record, BadPair)] == [2, 3]


def test_csv_fields_may_be_quoted(tmp_path: Path) -> None:
    content = 'src,tgt\n"Ja, ""gut""","Yes, ""good"""\nzwei,two\n'
    assert sides(pairs_file(tmp_path, "x.csv", content)) == [
        ('Ja, "gut"', 'Yes, "good"'),
        ("zwei", "two"),
    ]


def test_csv_line_breaks_inside_quotes_become_spaces_and_numbers_stay_right(tmp_path: Path) -> None:
    corpus = pairs_file(tmp_path, "x.csv", 'src,tgt\n"eins\nzwei","one\r\ntwo"\ndrei,three\n')
    assert list(corpus.pairs()) == [
        SentencePair(2, "eins zwei", "one two"),
        SentencePair(5, "drei", "three"),
    ]


def test_csv_of_a_european_spreadsheet(tmp_path: Path) -> None:
    assert sides(pairs_file(tmp_path, "x.csv", "src;tgt\neins;one\n")) == [("eins", "one")]


@pytest.mark.parametrize(
    ("content", "found"),
    [
        ('a,b\nc,"d\n', "line 2 must be a row of CSV; found unexpected end of data"),
        ('a,b\n"c"d,e\n', "line 2 must be a row of CSV"),
        (
            'a,b\n"' + "x\n" * 80_000,
            "line 2 must be a row of CSV; found field larger than field limit",
        ),
    ],
)
def test_broken_csv_names_where_the_row_began(tmp_path: Path, content: str, found: str) -> None:
    with pytest.raises(DataError) as caught:
        sides(pairs_file(tmp_path, "x.csv", content))
    assert found in str(caught.value)


def test_csv_continues_after_bad_lines(tmp_path: Path) -> None:
    path = tmp_path / "x.csv"
    path.write_bytes(b"a,b\n\xff,c\nd,e\n")
    corpus = TabularCorpus(path, on_bad_line="skip")
    assert sides(corpus) == [("a", "b"), ("d", "e")]
    with pytest.raises(DataError, match=r"x\.csv line 2 must be UTF-8"):
        sides(TabularCorpus(path))


def test_csv_whose_first_line_is_bad_and_csv_without_lines(tmp_path: Path) -> None:
    path = tmp_path / "x.csv"
    path.write_bytes(b"\xff,c\nd,e\n")
    with pytest.raises(DataError, match="line 1 must be UTF-8"):
        sides(TabularCorpus(path))
    path.write_bytes(b"")
    assert sides(TabularCorpus(path)) == []
    assert list(TabularCorpus(path).raw_records()) == []


def test_raw_csv_is_written_as_it_was_read(tmp_path: Path) -> None:
    """A cleaned file had commas for semicolons after a bad line, and broken rows for line ends."""
    path = tmp_path / "x.csv"
    path.write_bytes(b'\xff;c\n\xff\nd;e\nf;"g\nh"\n')
    corpus = TabularCorpus(path, on_bad_line="skip")
    assert sides(corpus) == [("d", "e"), ("f", "g h")]
    assert list(corpus.raw_records()) == [(3, "d;e"), (4, 'f;"g\nh"')]


@pytest.mark.parametrize("name", ["x.jsonl", "x.ndjson", "x.jsonl.gz"])
def test_jsonl(tmp_path: Path, name: str) -> None:
    content = "".join(json.dumps({"id": 1, "src": a, "tgt": b}) + "\n" for a, b in PAIRS)
    assert sides(pairs_file(tmp_path, name, content)) == PAIRS


def test_jsonl_with_languages_and_nested_translation(tmp_path: Path) -> None:
    content = (
        '{"translation": {"de": "eins", "en": "one"}}\n{"translation": {"en": "two", "de": '
        '"zwei"}}\n'
    )
    wanted = ColumnSelection(src_lang="de", tgt_lang="en")
    assert sides(pairs_file(tmp_path, "x.jsonl", content, wanted)) == [
        ("eins", "one"),
        ("zwei", "two"),
    ]


def test_one_known_side_of_two_is_enough(tmp_path: Path) -> None:
    content = '{"de": "eins", "en": "one"}\n'
    assert sides(pairs_file(tmp_path, "x.jsonl", content, ColumnSelection(tgt_lang="en"))) == [
        ("eins", "one")
    ]
    assert sides(pairs_file(tmp_path, "x.jsonl", content, ColumnSelection(src_field="en"))) == [
        ("one", "eins")
    ]


def test_one_column_is_not_both_sides(tmp_path: Path) -> None:
    wanted = ColumnSelection(src_field="de", tgt_field="de")
    corpus = pairs_file(tmp_path, "x.jsonl", '{"de": "eins", "en": "one"}\n', wanted)
    with pytest.raises(DataError, match=r"must be known; found de, en"):
        sides(corpus)


@pytest.mark.parametrize(
    ("names", "fix"),
    [
        (("de", "en"), "--src-lang de --tgt-lang en"),
        (
            ("left", "right"),
            "--src-field left --tgt-field right, in training --set data.src_field=",
        ),
    ],
)
def test_ambiguous_columns_must_be_named(tmp_path: Path, names: tuple[str, str], fix: str) -> None:
    """By options that every command with --pairs has."""
    line = json.dumps(dict(zip(names, ("eins", "one"), strict=True)))
    corpus = pairs_file(tmp_path, "x.jsonl", f"{line}\n")
    with pytest.raises(
        DataError, match=f"must be known; found {', '.join(names)}; name them: {fix}"
    ):
        sides(corpus)


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("{", "line 2 must be a JSON object; found { (expecting property name"),
        ("[1, 2]", "line 2 must be a JSON object; found [1, 2]"),
        ('"text"', 'found "text"'),
        ('{"src": "a"}', "must have text in src and tgt; found src='a' and tgt=None"),
        ('{"src": "a", "tgt": 3}', "tgt=3"),
        (
            '{"src": "\\ud800", "tgt": "b"}',
            "must be valid Unicode; found U+D800, a lone surrogate",
        ),
        ('{"src": "a\\u0000", "tgt": "b"}', "must be valid Unicode; found U+0000, a NUL"),
        ("[" * 40_000, "line 2 must be a JSON object"),
    ],
)
def test_bad_records_are_named(tmp_path: Path, line: str, found: str) -> None:
    content = '{"src": "a", "tgt": "b"}\n' + line + '\n{"src": "c", "tgt": "d"}\n'
    with pytest.raises(DataError) as caught:
        sides(pairs_file(tmp_path, "x.jsonl", content))
    assert found in str(caught.value)
    assert sides(pairs_file(tmp_path, "x.jsonl", content, on_bad_line="skip")) == [
        ("a", "b"),
        ("c", "d"),
    ]


def test_blank_records_are_empty_pairs(tmp_path: Path) -> None:
    assert sides(pairs_file(tmp_path, "x.jsonl", '{"src": "a", "tgt": "b"}\n\n')) == [
        ("a", "b"),
        ("", ""),
    ]
    assert sides(pairs_file(tmp_path, "y.csv", "a,b\n\nc,d\n")) == [
        ("a", "b"),
        ("", ""),
        ("c", "d"),
    ]


def test_a_bad_jsonl_line_is_passed_on(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_bytes(b'{"src": "a", "tgt": "b"}\n{"src": "\xff"}\n')
    with pytest.raises(DataError, match="line 2 must be UTF-8"):
        sides(TabularCorpus(path))


@pytest.mark.parametrize("name", ["x.txt", "x", "x.gz", "x.xlsx"])
def test_files_of_unknown_kind_are_rejected(tmp_path: Path, name: str) -> None:
    with pytest.raises(
        DataError, match=f"must be .tsv, .csv or .jsonl, .*; found {name}; rename it"
    ):
        TabularCorpus(tmp_path / name)


def test_layout_distinguishes_readings(tmp_path: Path) -> None:
    layouts = [
        ParallelFiles(tmp_path / "a", tmp_path / "b").layout(),
        TabularCorpus(tmp_path / "a.tsv").layout(),
        TabularCorpus(tmp_path / "a.csv").layout(),
        TabularCorpus(tmp_path / "a.tsv", ColumnSelection("2", "1")).layout(),
    ]
    assert all(one != other for at, one in enumerate(layouts) for other in layouts[at + 1 :])


def test_corrected_languages_are_another_corpus(tmp_path: Path) -> None:
    """Else the cached store of the wrong direction would be used again."""
    pair_of_files(tmp_path, b"eins\n", b"one\n")
    files = {"src": str(tmp_path / "x.de"), "tgt": str(tmp_path / "x.en")}
    wrong, right = (
        build_corpus(DataConfig(**files, languages=(given,), directions=("de-en",)), "train")
        for given in ("en-de", "de-en")
    )
    assert list(wrong.pairs()) == [SentencePair(1, "one", "eins", "de-en")]
    assert list(right.pairs()) == [SentencePair(1, "eins", "one", "de-en")]
    assert wrong.layout() != right.layout()


def test_corpora_from_a_configuration() -> None:
    config = DataConfig(
        src="a.de",
        tgt="a.en",
        valid_pairs="v.tsv",
        src_field="2",
        tgt_field="1",
        max_line_bytes=99,
        on_bad_line="skip",
    )
    train, valid = build_corpus(config, "train"), build_corpus(config, "valid")
    assert train.files == [Path("a.de"), Path("a.en")]
    assert isinstance(valid, TabularCorpus)
    assert valid.wanted == ColumnSelection("2", "1")
    assert (valid.max_line_bytes, valid.on_bad_line) == (99, "skip")


def test_validation_files_have_languages_of_their_own(tmp_path: Path) -> None:
    (tmp_path / "v.tsv").write_text("hello\thallo\n")
    path = str(tmp_path / "v.tsv")
    config = DataConfig(
        pairs=path,
        languages=("de-en",),
        valid_pairs=path,
        valid_languages=("en-de",),
        directions=("de-en", "en-de"),
    )
    assert [pair[1:] for pair in build_corpus(config, "valid").pairs()] == [
        ("hello", "hallo", "en-de"),
        ("hallo", "hello", "de-en"),
    ]
    assert [pair.direction for pair in build_corpus(config, "train").pairs()] == ["de-en", "en-de"]


@pytest.mark.parametrize(
    ("part", "flag"),
    [("train", "--src FILE --tgt FILE"), ("valid", "--valid-src FILE --valid-tgt FILE")],
)
def test_configuration_without_files_names_the_missing_options(part: str, flag: str) -> None:
    with pytest.raises(ConfigError, match=f"must name files; found none; pass {flag}"):
        build_corpus(DataConfig(), part)


@needs_data
def test_multi30k_has_its_lines() -> None:
    corpus = ParallelFiles(DATA / "multi30k" / "train.de.xz", DATA / "multi30k" / "train.en.xz")
    pairs = list(corpus.pairs())
    assert len(pairs) == 29_000
    assert pairs[0].tgt.startswith("Two young, White males")


@needs_data
@pytest.mark.parametrize(("side", "line"), [("src", 350), ("tgt", 350), ("src", 1900)])
def test_the_line_of_a_missing_line_is_found(tmp_path: Path, side: str, line: int) -> None:
    """Unequal counts are reported with the first suspicious line (code-docstring-corpus#12)."""
    corpus = ParallelFiles(DATA / "multi30k" / "train.de.xz", DATA / "multi30k" / "train.en.xz")
    pairs = list(corpus.pairs())[:2200]
    src, tgt = [pair.src for pair in pairs], [pair.tgt for pair in pairs]
    del (src if side == "src" else tgt)[line]
    cut = pair_of_files(
        tmp_path,
        "".join(f"{each}\n" for each in src).encode(),
        "".join(f"{each}\n" for each in tgt).encode(),
    )
    with pytest.raises(LineCountError, match="a line may be missing or added near line") as caught:
        list(cut.pairs())
    assert caught.value.misalignment is not None
    assert abs(caught.value.misalignment.line - line) <= 10
    assert caught.value.misalignment.shift == (1 if side == "src" else -1)


def test_semicolons_are_seen_behind_quoted_commas(tmp_path: Path) -> None:
    corpus = pairs_file(tmp_path, "p.csv", '"Ja, ein Hund";"Yes, a dog"\n"Haus";"house"\n')
    assert sides(corpus) == [("Ja, ein Hund", "Yes, a dog"), ("Haus", "house")]


def test_one_column_cannot_be_both_sides(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"must be two; found 2 for both"):
        sides(pairs_file(tmp_path, "p.tsv", "a\tb\n", ColumnSelection("2", "2")))


def test_a_named_column_in_a_file_without_names(tmp_path: Path) -> None:
    """The first row is a sentence and not a header: it is quoted, but not all of it."""
    with pytest.raises(
        DataError,
        match=r"found Ein sehr langer Satz, der kein…, b; name a column by its name",
    ) as caught:
        sides(
            pairs_file(
                tmp_path,
                "p.tsv",
                "Ein sehr langer Satz, der keine Überschrift ist, bei weitem nicht.\tb\n",
                ColumnSelection("foo"),
            )
        )
    assert len(str(caught.value)) < 400


def test_a_broken_link_is_not_suggested_for_itself(tmp_path: Path) -> None:
    (tmp_path / "pairs.tsv").symlink_to("elsewhere.tsv")
    with pytest.raises(DataError, match=r"found a link to elsewhere.tsv, which does not exist"):
        sides(TabularCorpus(tmp_path / "pairs.tsv"))


def test_a_file_name_with_glob_characters(tmp_path: Path) -> None:
    (tmp_path / "x1.tsv").touch()
    with pytest.raises(DataError, match="check the path"):
        sides(TabularCorpus(tmp_path / "x[0-9].tsv"))


def test_a_warning_names_the_columns_used_of_many_unnamed(tmp_path, caplog):
    """Sentence numbers must not silently be read as sentences."""
    path = tmp_path / "pairs.tsv"
    path.write_text("1\tGuten Tag\t2\tGood day\n")
    with caplog.at_level("WARNING", logger="dragoman"):
        assert [(pair.src, pair.tgt) for pair in TabularCorpus(path).pairs()] == [
            ("1", "Guten Tag")
        ]
    assert "pairs.tsv has 4 columns without names" in caplog.text


def test_nothing_is_read_of_empty_files(tmp_path: Path) -> None:
    for side in ("de", "en"):
        (tmp_path / f"x.{side}").write_bytes(b"")
    corpus = ParallelFiles(tmp_path / "x.de", tmp_path / "x.en")
    assert list(corpus.pairs()) == []
    assert corpus.fraction_read() == 0.0

"""CoNLL and CoNLL-U files: sentences, names of columns, and errors with their lines."""

from __future__ import annotations

from pathlib import Path

import pytest

from dragoman.config.root_config import Config
from dragoman.data.labeled_records import find_field, open_records, read_records
from dragoman.errors import DataError

SKIPPING = Config().replace(data={"on_bad_line": "skip"})


def write(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


def row(number: str, form: str, upos: str = "NOUN", xpos: str = "NN") -> str:
    """Return a line of CoNLL-U."""
    return "\t".join([number, form, form.lower(), upos, xpos, "_", "0", "root", "_", "_"])


def test_conll_sentences_end_at_empty_lines_and_document_starts(tmp_path: Path) -> None:
    text = (
        "-DOCSTART- -X- O\n\nHe PRP B-NP\nruns VBZ B-VP\n\n\n\nYes UH O\n-DOCSTART- -X- O\nNo UH O"
    )
    first, second, third = read_records([write(tmp_path / "a.conll", text)])
    assert first.number == 3
    assert first.fields == {
        "tokens": ["He", "runs"],
        "pos": ["PRP", "VBZ"],
        "tags": ["B-NP", "B-VP"],
        "1": ["He", "runs"],
        "2": ["PRP", "VBZ"],
        "3": ["B-NP", "B-VP"],
    }
    assert (second.number, second.fields["tokens"]) == (8, ["Yes"])
    assert (third.number, third.fields["tokens"]) == (10, ["No"])


def test_conll_of_two_columns_and_of_one(tmp_path: Path) -> None:
    (two,) = read_records([write(tmp_path / "a.conll", "He\tO\n")])
    assert set(two.fields) == {"tokens", "tags", "1", "2"}
    (one,) = read_records([write(tmp_path / "b.conll", "He\n")])
    assert set(one.fields) == {"tokens", "1"}
    assert list(read_records([write(tmp_path / "c.conll", "\n\n")])) == []


@pytest.mark.parametrize("name", ["a.conll", "a.iob", "a.bio", "A.CONLL"])
def test_files_of_tokens_are_known_by_their_names(tmp_path: Path, name: str) -> None:
    (record,) = read_records([write(tmp_path / name, "He PRP O\nran VBD O\n")])
    assert record.fields["tokens"] == ["He", "ran"]
    assert record.fields["pos"] == ["PRP", "VBD"]


def test_conll_comments_are_left_out_but_a_token_is_not(tmp_path: Path) -> None:
    text = "# sent_id = 1\n# He ran\nHe PRP O\nran VBD O\n\n# # O\n1 CD O\n"
    first, second = read_records([write(tmp_path / "a.conll", text)])
    assert (first.number, first.fields["tokens"]) == (3, ["He", "ran"])
    assert second.fields["tokens"] == ["#", "1"]


def test_a_conll_line_with_other_columns_is_named(tmp_path: Path) -> None:
    path = write(tmp_path / "a.conll", "Yes UH O\n\nHe PRP O\nruns VBZ\nfast RB O\n\nNo UH O\n")
    with pytest.raises(DataError, match=r"a\.conll line 4 must have 3 columns, as line 3.*found 2"):
        list(read_records([path]))
    found = [record.fields["tokens"] for record in open_records(SKIPPING, [path])()]
    assert found == [["Yes"], ["No"]]  # the whole sentence is left out


def test_a_conll_sentence_with_other_columns_than_the_first_is_named(tmp_path: Path) -> None:
    text = "He PRP O\nran VBD O\n\n# newdoc\n\nParis NNP\n\nNo UH O\n"
    path = write(tmp_path / "a.conll", text)
    with pytest.raises(DataError, match=r"a.conll line 6 must have 3 columns, as line 1; found 2;"):
        list(read_records([path]))
    kept = [each.fields["tokens"] for each in open_records(SKIPPING, [path])()]
    assert kept == [["He", "ran"], ["No"]]


def test_a_column_has_one_number(tmp_path: Path) -> None:
    (record,) = read_records([write(tmp_path / "a.conll", "He PRP O\n")])
    assert find_field(record, "3", setting="tag.tag_field") == "3"
    with pytest.raises(DataError, match=r"line 1 must have the field '4' of tag.tag_field"):
        find_field(record, "4", setting="tag.tag_field")
    (record,) = read_records([write(tmp_path / "b.conll", "He\n")])
    with pytest.raises(DataError, match="must have a tag field, such as 'tags'; found only tokens"):
        find_field(record, "", ("tags",), setting="tag.tag_field", used=("tokens",))


def test_conllu_leaves_out_ranges_and_empty_nodes(tmp_path: Path) -> None:
    lines = [
        "# newdoc id = d",
        "# sent_id = d-1",
        "# text = don't go",
        row("1-2", "don't", "_", "_"),
        row("1", "do", "AUX", "VB"),
        row("2", "n't", "PART", "RB"),
        row("2.1", "gone", "VERB", "VBN"),
        row("3", "go", "VERB", "VB"),
        "",
        row("1", "Yes", "INTJ", "UH"),
        "",
    ]
    first, second = read_records([write(tmp_path / "a.conllu", "\n".join(lines))])
    assert first.number == 5
    assert first.fields["id"] == "d-1"
    assert first.fields["tokens"] == ["do", "n't", "go"]
    assert first.fields["upos"] == ["AUX", "PART", "VERB"]
    assert first.fields["xpos"] == ["VB", "RB", "VB"]
    assert first.fields["feats"] == ["_", "_", "_"]
    assert second.fields["tokens"] == ["Yes"]
    assert "id" not in second.fields


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("1\tHe\tPRON", "line 2 must have 10 columns separated by tabs; found 3"),
        (row("x", "He"), "line 2 must have an ID such as 1, 1-2 or 1.1 in column 1; found x"),
        (row("1", "He", ""), "must have a value or _ in every column; found nothing in column 4"),
    ],
)
def test_a_bad_conllu_line_is_named(tmp_path: Path, line: str, message: str) -> None:
    path = write(tmp_path / "a.conllu", f"# text = He\n{line}\n\n{row('1', 'Yes')}\n")
    with pytest.raises(DataError) as caught:
        list(read_records([path]))
    assert message in str(caught.value)
    assert [record.fields["tokens"] for record in open_records(SKIPPING, [path])()] == [["Yes"]]

"""Records of labelled files: formats, columns, and errors that name line and field."""

from __future__ import annotations

import gzip
import json

import pytest

from dragoman.config.root_config import Config
from dragoman.data.labeled_records import (
    Record,
    find_field,
    find_label_field,
    find_pair_fields,
    find_text_field,
    open_records,
    read_records,
    record_format,
)
from dragoman.errors import DataError


def write(path, text):
    path.write_text(text, encoding="utf-8")
    return path


def test_jsonl_records_have_their_line_numbers(tmp_path):
    file = write(
        tmp_path / "a.jsonl", '{"text": "one", "label": 1}\n\n{"text": "two", "label": 0}\n'
    )
    records = list(read_records([file]))
    assert [record.number for record in records] == [1, 3]
    assert records[1].text("text") == "two"
    assert records[1].label("label") == "0"


def test_compressed_files_are_read(tmp_path):
    path = tmp_path / "a.jsonl.gz"
    path.write_bytes(gzip.compress(b'{"text": "one"}\n'))
    assert [record.text("text") for record in read_records([path])] == ["one"]
    assert record_format(path) == ".jsonl"


@pytest.mark.parametrize("mark", [",", "\t"])
def test_empty_lines_of_a_table_are_left_out(tmp_path, mark):
    text = "\ntext,label\n\none,pos\n\n".replace(",", mark)
    [record] = read_records([write(tmp_path / ("a.csv" if mark == "," else "a.tsv"), text)])
    assert (record.number, record.fields) == (4, {"text": "one", "label": "pos"})


def test_csv_has_quotes_and_a_header(tmp_path):
    file = write(tmp_path / "a.csv", 'text,label\n"one, two",pos\nthree,neg\n')
    records = list(read_records([file]))
    assert [dict(record.fields) for record in records] == [
        {"text": "one, two", "label": "pos"},
        {"text": "three", "label": "neg"},
    ]


def test_tsv_without_a_header_has_numbered_columns(tmp_path):
    file = write(tmp_path / "a.tsv", "good film\tpos\nbad film\tneg\n")
    records = list(read_records([file]))
    assert records[0].fields == {"1": "good film", "2": "pos"}
    assert find_field(records[0], "2", (), setting="data.label_field") == "2"


def test_plain_text_is_one_record_a_line(tmp_path):
    file = write(tmp_path / "a.txt", "one\n\nthree\n")
    assert [record.text("text") for record in read_records([file])] == ["one", "", "three"]


def test_several_files_are_read_in_order(tmp_path):
    files = [write(tmp_path / f"{name}.txt", f"{name}\n") for name in "ab"]
    assert [record.text("text") for record in read_records(files)] == ["a", "b"]


@pytest.mark.parametrize(
    ("name", "content", "found"),
    [
        ("a.jsonl", '{"text": "x"}\n{"text": \n', "line 2 must be a JSON object"),
        ("a.jsonl", "[1, 2]\n", "line 1 must be a JSON object; found [1, 2]"),
        ("a.csv", "text,label\none,pos,more\n", "line 2 must have 2 columns"),
    ],
)
def test_bad_lines_are_named_or_skipped(tmp_path, name, content, found):
    file = write(tmp_path / name, content)
    with pytest.raises(DataError) as error:
        list(read_records([file]))
    assert found in str(error.value)
    assert str(file) in str(error.value)
    skipping = Config().replace(data={"on_bad_line": "skip"})
    assert all(isinstance(record, Record) for record in open_records(skipping, [file])())


def test_wrong_encoding_names_the_line(tmp_path):
    file = tmp_path / "a.jsonl"
    file.write_bytes(b'{"text": "ok"}\n{"text": "caf\xe9"}\n')
    with pytest.raises(DataError, match="line 2 must be UTF-8"):
        list(read_records([file]))


def test_a_missing_file_is_an_error(tmp_path):
    with pytest.raises(DataError, match=r"nothing\.jsonl"):
        list(read_records([tmp_path / "nothing.jsonl"]))


def record_of(tmp_path, **fields):
    file = write(tmp_path / "a.jsonl", json.dumps(fields) + "\n")
    return next(read_records([file]))


def test_missing_and_wrong_fields_are_named(tmp_path):
    record = record_of(tmp_path, text=["a"], label={"x": 1}, flag=True, none=None)
    with pytest.raises(DataError, match=r"line 1 must have a field 'lable'; found text, label"):
        record.value("lable")
    with pytest.raises(DataError, match=r"must have text in 'text'; found \[\"a\"\]"):
        record.text("text")
    with pytest.raises(
        DataError, match=r"a label or a list of labels in 'label'; found {\"x\": 1}"
    ):
        record.labels("label")
    with pytest.raises(DataError, match="must have text in 'flag'; found true"):
        record.text("flag")
    with pytest.raises(DataError, match="must have a label or a number in 'none'; found null"):
        record.label("none")
    assert record.labels("text") == record.tokens("text") == ["a"]


def test_labels_are_texts_numbers_or_booleans(tmp_path):
    record = record_of(tmp_path, one=True, list=[False, 2, "x"], nan=float("nan"))
    assert (record.label("one"), record.labels("list")) == ("true", ["false", "2", "x"])
    with pytest.raises(DataError, match="must have a label or a number in 'nan'; found NaN"):
        record.label("nan")


def test_fields_are_found_by_setting_or_usual_name(tmp_path):
    record = record_of(tmp_path, id=3, review="good", sentiment="pos")
    assert find_text_field(record, "") == "review"
    assert find_label_field(record, "") == "sentiment"
    assert find_text_field(record, "id") == "id"
    with pytest.raises(
        DataError, match=r"must have the field 'revue' of data.text_field; found id"
    ):
        find_text_field(record, "revue")
    unknown = record_of(tmp_path, first="good", second="pos")
    with pytest.raises(DataError, match=r"field of data.text_field must be known .* found first"):
        find_text_field(unknown, "")


@pytest.mark.parametrize(
    ("row", "is_header"),
    [
        ("text,label", True),
        ("text,", False),
        ("label,text,", True),
        (",text,label", True),
        (",text,good", False),
        (",,text,label", False),
        ("one,two", False),
        ("good,good", False),
        ("first,two", False),
        ("sentence_A,sentence_B", True),
    ],
)
def test_a_header_names_every_column_once(tmp_path, row, is_header):
    more = ",x" * (row.count(",") - 1)
    path = write(tmp_path / "x.csv", f"{row}\nfirst,1{more}\nsecond,2{more}\n")
    assert len(list(read_records([path]))) == (2 if is_header else 3)


def test_a_column_without_a_name_has_its_number(tmp_path):
    path = write(tmp_path / "x.csv", ",text,label\n7,first,1\n")
    (record,) = read_records([path])
    assert record.fields == {"1": "7", "text": "first", "label": "1"}
    assert find_field(record, "2", (), setting="data.text_field") == "text"


def test_a_header_may_have_the_names_of_the_settings(tmp_path):
    path = write(tmp_path / "x.csv", "comment,stars\nfirst,1\nsecond,2\n")
    config = Config(task="classify").replace(data={"text_field": "comment", "label_field": "2"})
    assert [each.fields for each in open_records(config, [path])()] == [
        {"comment": "first", "stars": "1"},
        {"comment": "second", "stars": "2"},
    ]
    numbered = write(tmp_path / "y.csv", "first,2\nsecond,1\n")
    assert len(list(read_records([numbered], fields=["1", "2"]))) == 2


def test_the_first_of_several_spellings_of_a_name_is_taken(tmp_path):
    path = write(tmp_path / "a.jsonl", '{"Text": "first", "TEXT": "second"}\n')
    (record,) = read_records([path])
    assert find_field(record, "", setting="data.text_field") == "Text"


def test_a_repeated_column_is_an_error(tmp_path):
    path = write(tmp_path / "x.csv", "text,Text,label\nfirst,second,1\n")
    with pytest.raises(DataError, match=r"line 1 must name each column once; found column text tw"):
        next(read_records([path]))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"text": 5}', "line 1 must have text in 'text'; found 5; write it as a JSON string"),
        ('{"text": null}', "line 1 must have text in 'text'; found null"),
        ('{"text": "a", "text": "b"}', "line 1 must have each field once; found 'text' twice"),
        (r'{"text": "a \ud800 b"}', "line 1 must be valid Unicode; found U+D800, a lone surrogate"),
        (r'{"text": ["a", {"b": "\uDCE9"}]}', "must be valid Unicode; found U+DCE9"),
        ("no JSON", "must be a JSON object; found no JSON (expecting value at character 1); write"),
        ("[" * 100_000, "(values nested too deeply); write"),
    ],
)
def test_a_field_that_is_no_text_is_an_error(tmp_path, line, message):
    file = write(tmp_path / "a.jsonl", f"{line}\n")
    with pytest.raises(DataError) as error:
        next(read_records([file])).text("text")
    assert message in str(error.value)
    assert "column" not in str(error.value)


def test_escaped_characters_beyond_the_first_plane_are_text(tmp_path):
    file = write(tmp_path / "a.jsonl", r'{"text": "\ud83d\ude00"}' + "\n")
    assert next(read_records([file])).text("text") == "\N{GRINNING FACE}"


def test_an_object_without_fields_is_no_empty_line(tmp_path):
    file = write(tmp_path / "a.jsonl", '{"text": "a"}\n\n{}\n')
    first, second = read_records([file])
    assert first.text("text") == "a"
    with pytest.raises(DataError, match=r"line 3 must have a field 'text'; found no fields; name"):
        second.text("text")


def test_used_fields_are_not_suggested(tmp_path):
    only_text = record_of(tmp_path, text="good")
    with pytest.raises(DataError, match=r"must have a label field, such as 'label'; found only te"):
        find_label_field(only_text, "")
    several = record_of(tmp_path, text="good", stars=3)
    with pytest.raises(DataError, match=r"name it: --set data\.label_field=stars$"):
        find_label_field(several, "")
    labelled = record_of(tmp_path, label="pos", film="good")
    with pytest.raises(DataError, match=r"name it: --text-field film$"):
        find_text_field(labelled, "", setting="--text-field")


def test_columns_without_names_are_shown_by_their_values(tmp_path):
    record = next(read_records([write(tmp_path / "x.csv", "foo,bar\na good film,pos\n")]))
    with pytest.raises(
        DataError,
        match=r"found columns without names, with foo, bar in line 1; call it text in the first "
        r"row; without such a row, name it: --text-field 1$",
    ):
        find_text_field(record, "", setting="--text-field")


def test_the_fields_of_a_pair_are_named_together(tmp_path):
    options = ("--text-field", "--text-field")
    record = record_of(tmp_path, one="a", two="b", label="no")
    with pytest.raises(DataError, match=r"name them: --text-field one --text-field two$"):
        find_pair_fields(record, "", "", settings=options)
    with pytest.raises(DataError, match=r"name them: --set pairs\.first_field=one --set pairs\.s"):
        find_pair_fields(record, "one", "")
    assert find_pair_fields(record, "two", "1") == ("two", "one")
    assert find_pair_fields(record_of(tmp_path, b="x", premise="y"), "", "") == ("premise", "b")
    with pytest.raises(DataError, match="found text, label; give each record two sentences"):
        find_pair_fields(record_of(tmp_path, text="a", label="no"), "", "")


def test_only_training_advises_to_skip_a_bad_line(tmp_path):
    file = tmp_path / "a.txt"
    file.write_bytes(b"caf\xe9\n")
    with pytest.raises(DataError, match=r"a\.txt\.utf8, or leave it out with --set data\.on_bad"):
        list(open_records(Config(), [file])())
    with pytest.raises(DataError) as error:
        list(read_records([file]))
    assert "data.on_bad_line" not in str(error.value)

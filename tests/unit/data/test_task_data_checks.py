"""Checks of labelled files: each finding with its lines, on a file that has one of each."""

from __future__ import annotations

import pytest

from dragoman.data.labeled_records import read_records, read_rows
from dragoman.data.task_data_checks import check_labels
from dragoman.errors import DataError

LINES = [
    '{"text": "A good film.", "label": "pos"}',  # 1
    '{"text": "A bad film.", "label": "neg"}',  # 2
    '{"text": "a GOOD film", "label": "pos"}',  # 3 duplicate
    '{"text": "A bad film!", "label": "pos"}',  # 4 contradiction
    '{"text": "  ", "label": "neg"}',  # 5 empty
    '{"text": "So-so", "label": "meh"}',  # 6 rare
    '{"text": "!!!", "label": "neg"}',  # 7
    '{"text": "???", "label": "pos"}',  # 8: no letters, yet another text than line 7
    '{"text": "No label", "label": " "}',  # 9
    "not json",  # 10
    '{"text": "Held out text", "label": "neg"}',  # 11
]


def write(path, lines):
    path.write_text("\n".join(lines) + "\n")
    return path


def lines_by_code(report):
    return {each.code: each.lines for each in report.findings}


def test_every_check_names_its_lines(tmp_path):
    train = write(tmp_path / "train.jsonl", LINES)
    valid = write(tmp_path / "valid.jsonl", ['{"text": "held OUT, text", "label": "neg"}'])
    report = check_labels(read_rows([train]), held_out=read_records([valid]))
    assert lines_by_code(report) == {
        "broken": [10],
        "empty": [5],
        "no-label": [9],
        "duplicate": [3],
        "contradiction": [4],
        "rare-label": [6, 9],
        "few-labels": [],
        "leak": [11],
    }
    assert report.examples == 10
    assert report.labels == {"neg": 4, "pos": 4, " ": 1, "meh": 1}
    assert not report.multi_label
    assert report.mean_words == pytest.approx((3 + 3 + 3 + 3 + 0 + 1 + 1 + 1 + 2 + 3) / 10)
    assert all(bool(each.advice) == bool(each.count) for each in report.findings)


def test_a_clean_file_has_no_findings_and_leakage_needs_a_second_file(tmp_path):
    train = write(tmp_path / "train.csv", ["text,label", "one,a", "two,b", "three,a", "four,b"])
    report = check_labels(read_rows([train]))
    assert all(each.ok for each in report.findings)
    assert "leak" not in lines_by_code(report)


def test_several_labels_and_several_files(tmp_path):
    one = write(tmp_path / "one.jsonl", ['{"text": "a", "labels": ["x", "y"]}'] * 2)
    two = write(
        tmp_path / "two.jsonl",
        ['{"text": "a", "labels": ["y", "x"]}', '{"text": "a", "labels": []}'],
    )
    report = check_labels(read_rows([one, two]))
    assert report.multi_label
    assert report.labels == {"x": 3, "y": 3}
    few = write(
        tmp_path / "few.jsonl", ['{"text": "b", "labels": ["x"]}', '{"text": "c", "labels": []}']
    )
    assert check_labels(read_rows([few])).multi_label
    assert lines_by_code(report)["duplicate"] == [2, "two.jsonl:1"]
    assert lines_by_code(report)["contradiction"] == ["two.jsonl:2"]


@pytest.mark.parametrize(
    ("task", "labels", "lines"),
    [
        ("classify", ['"x"', '"x"'], [1, 2]),
        ("classify", ['"x"', '"y"'], []),
        ("classify", ["[]", "[]"], [1, 2]),
        ("classify", ["[]", '["x"]'], []),
        ("classify", ['["x"]', '["x"]'], []),  # a multi-label model of one label
        ("pairs", ['"x"', '"x"'], [1, 2]),
        ("pairs", ['"x"', '"y"'], []),
    ],
)
def test_too_few_labels_to_train(tmp_path, task, labels, lines):
    rows = [
        f'{{"text": "t{each}", "a": "a{each}", "b": "b", "label": {label}}}'
        for each, label in enumerate(labels)
    ]
    report = check_labels(read_rows([write(tmp_path / "t.jsonl", rows)]), task=task)
    assert lines_by_code(report)["few-labels"] == lines


def test_tags_are_compared_as_sequences(tmp_path):
    rows = [
        '{"tokens": ["a", "b"], "tags": ["X", "Y"]}',
        '{"tokens": ["a", "b"], "tags": ["Y", "X"]}',  # 2: the same set, another sequence
        '{"tokens": ["a", "b"], "tags": ["X", "Y"]}',  # 3
        '{"tokens": ["a", "b", "!"], "tags": ["X", "Y", "."]}',  # 4: another sentence
        '{"tokens": ["a", "b"], "tags": ["X"]}',  # 5
        '{"tokens": ["c"]}',  # 6
    ]
    report = check_labels(read_rows([write(tmp_path / "t.jsonl", rows)]), task="tag")
    found = lines_by_code(report)
    assert found["contradiction"] == [2]
    assert found["duplicate"] == [3]
    assert found["broken"] == [5, 6]
    assert found["rare-label"] == [4]
    assert report.labels == {"X": 4, "Y": 4, ".": 1}
    assert not report.multi_label


def test_texts_for_word_segmentation_have_tags_by_their_spaces(tmp_path):
    rows = ["我 喜欢 你", "我 喜 欢 你", "", "你 喜欢 我", "我 喜欢 你"]
    found = {}
    for name, lines in {
        "t.txt": rows,
        "t.jsonl": [f'{{"text": "{row}"}}' for row in rows],
        "both.jsonl": [f'{{"tokens": ["x"], "tags": ["X"], "line": "{row}"}}' for row in rows],
    }.items():
        path = write(tmp_path / name, lines)
        field = "line" if name == "both.jsonl" else ""
        report = check_labels(
            read_rows([path], fields=[field]),
            held_out=read_records([write(tmp_path / f"valid-{name}", lines[3:4])]),
            task="tag",
            text_field=field,
        )
        found[name] = (report.labels, lines_by_code(report))
    labels, lines = found["t.txt"]
    assert labels == {"S": 10, "B": 3, "E": 3}
    assert (lines["contradiction"], lines["duplicate"]) == ([2], [5])
    assert (lines["empty"], lines["broken"], lines["leak"]) == ([3], [], [4])
    assert found["t.jsonl"] == found["both.jsonl"] == found["t.txt"]


def test_a_text_among_tokens_is_not_for_word_segmentation(tmp_path):
    rows = ['{"tokens": ["a"], "tags": ["X"]}', '{"text": "a b"}']
    report = check_labels(read_rows([write(tmp_path / "t.jsonl", rows)]), task="tag")
    assert lines_by_code(report)["broken"] == [2]


def test_pairs_are_two_texts(tmp_path):
    rows = ["a,b,label", "x y,z,yes", "x,y z,no", "X Y,z,no", "x y,Z,yes", "p,q,no"]
    held_out = write(tmp_path / "v.csv", ["a,b,label", "p,q,no"])
    report = check_labels(
        read_rows([write(tmp_path / "t.csv", rows)]),
        held_out=read_records([held_out]),
        task="pairs",
    )
    found = lines_by_code(report)
    assert found["leak"] == [6]
    assert found["contradiction"] == [4]
    assert found["duplicate"] == [5]
    assert report.mean_words == pytest.approx((3 + 3 + 3 + 3 + 2) / 5)


def test_pairs_with_scores_need_no_label(tmp_path):
    rows = ["sentence_A\tsentence_B\trelatedness", "x\ty\t4.5", "x\tz\t7", "p\tq\thigh"]
    report = check_labels(read_rows([write(tmp_path / "t.tsv", rows)]), task="pairs")
    found = lines_by_code(report)
    assert (found["few-labels"], found["score-range"], found["broken"]) == ([], [3], [4])
    assert "pairs.max_score, 1 and 5 by default" in report.findings[-1].advice
    with pytest.raises(DataError, match="must have a label field, such as 'label'; found only a"):
        check_labels(read_rows([write(tmp_path / "u.csv", ["a,b", "x,y"])]), task="pairs")


def test_labels_of_pairs_have_their_own_usual_names(tmp_path):
    rows = [f'{{"premise": "x", "hypothesis": "y", "gold_label": "{each}"}}' for each in "yn"]
    report = check_labels(read_rows([write(tmp_path / "t.jsonl", rows)]), task="pairs")
    assert report.labels == {"n": 1, "y": 1}


@pytest.mark.parametrize("task", ["classify", "pairs"])
def test_labels_may_be_booleans(tmp_path, task):
    rows = [
        '{"text": "a", "a": "a", "b": "b", "label": true}',
        '{"text": "c", "a": "c", "b": "d", "label": false}',
    ]
    report = check_labels(read_rows([write(tmp_path / "t.jsonl", rows)]), task=task)
    assert report.labels == {"false": 1, "true": 1}


def test_a_bad_first_record_is_an_error(tmp_path):
    path = write(tmp_path / "t.jsonl", ['{"tokens": ["a", "b"], "tags": ["X"]}'])
    with pytest.raises(
        DataError, match=r"t.jsonl line 1 must have a tag for each token; found 2 tokens and 1 tags"
    ):
        check_labels(read_rows([path]), task="tag")


def test_the_columns_can_be_named(tmp_path):
    path = write(tmp_path / "t.tsv", ["text\tcoarse\tfine", "a b\tX\tXY", "c d\tY\tYZ"])
    assert check_labels(read_rows([path])).labels == {"X": 1, "Y": 1}
    assert check_labels(read_rows([path]), label_field="fine").labels == {"XY": 1, "YZ": 1}
    with pytest.raises(
        DataError, match=r"t.tsv line 2 must have the field 'size'.*found text, coarse"
    ):
        check_labels(read_rows([path]), label_field="size")


def test_texts_of_a_language_model_have_no_labels(tmp_path):
    """Empty and short lines recur in any text."""
    long = "one two three four five six seven eight"
    title = "= The title of a book ="
    path = write(tmp_path / "t.txt", [title, "", long, title, "", long])
    held_out = write(tmp_path / "v.txt", [title, long])
    report = check_labels(read_rows([path]), held_out=read_records([held_out]), task="language")
    assert lines_by_code(report) == {"broken": [], "duplicate": [6], "leak": [3, 6]}
    assert report.labels == {}
    assert not report.multi_label


def test_equal_sets_with_two_targets_contradict(tmp_path):
    rows = [
        '{"set": [1, 2], "target": 2}',
        '{"set": [2, 1], "target": 3}',
        '{"set": [2, 1], "target": 2}',
        '{"set": 5, "target": 3}',
        '{"set": [-1, 2], "target": 2}',
    ]
    report = check_labels(read_rows([write(tmp_path / "t.jsonl", rows)]), task="sets")
    found = lines_by_code(report)
    assert {code: lines for code, lines in found.items() if lines} == {
        "broken": [4],
        "duplicate": [3],
        "contradiction": [2],
    }
    assert report.labels == {}


def test_sets_above_the_largest_size_are_reported(tmp_path):
    rows = [f'{{"set": {list(range(size))}, "target": {size}}}' for size in (1000, 1001, 0, 2)]
    report = check_labels(read_rows([write(tmp_path / "t.jsonl", rows)]), task="sets")
    found = lines_by_code(report)
    assert (found["large"], found["empty"], found["broken"]) == ([2], [3], [])
    assert "sets.max_size, 1,000 by default" in report.findings[2].advice


def test_targets_of_sets_are_labels_if_the_first_one_is(tmp_path):
    rows = ['{"set": [1], "target": true}', '{"set": [2], "target": "x"}'] * 2
    report = check_labels(read_rows([write(tmp_path / "t.jsonl", rows)]), task="sets")
    assert {each.code for each in report.findings if not each.ok} == {"duplicate"}
    assert report.labels == {"true": 2, "x": 2}
    one = check_labels(read_rows([write(tmp_path / "one.jsonl", rows[:1])]), task="sets")
    assert lines_by_code(one)["few-labels"] == [1]


@pytest.mark.parametrize(
    ("task", "good", "bad"),
    [
        ("sets", '{"set": [1, 2.5], "target": 2}', '{"set": ["3"], "target": 2}'),
        ("sets", '{"set": [[1, 2]], "target": 2}', '{"set": [[1, 2], [3]], "target": 2}'),
        ("sets", '{"set": [-1], "target": 2}', '{"set": [NaN], "target": 2}'),
        ("sets", '{"set": [1], "target": 2}', '{"set": [null, 1], "target": 2}'),
        ("sets", '{"set": [1], "target": 2}', '{"set": [1e39], "target": 2}'),
        ("sets", '{"set": [1], "target": 2}', '{"set": [2], "target": NaN}'),
        ("sets", '{"set": [1], "target": 2}', '{"set": [2], "target": 1e39}'),
        ("sets", '{"set": [1], "target": 2}', '{"set": [2], "target": "many"}'),
        ("sets", '{"set": [1], "target": 2}', '{"set": [2], "target": true}'),
        ("sets", '{"set": [1], "target": 2}', '{"set": [[2, 3]], "target": 2}'),
        ("tag", '{"tokens": ["a"], "tags": ["X"]}', '{"tokens": [""], "tags": ["X"]}'),
        ("tag", '{"tokens": ["a"], "tags": ["X"]}', '{"tokens": "a b", "tags": ["X"]}'),
    ],
)
def test_records_that_training_rejects_are_reported_as_broken(tmp_path, task, good, bad):
    report = check_labels(read_rows([write(tmp_path / "t.jsonl", [good, bad])]), task=task)
    assert lines_by_code(report)["broken"] == [2]
    assert report.examples == 1


def test_progress_is_reported_every_ten_thousand_records(tmp_path):
    row = '{"text": "%d", "label": "%s"}'
    train = write(tmp_path / "train.jsonl", [row % (n, "ab"[n % 2]) for n in range(20_001)])
    seen = []
    report = check_labels(read_rows([train]), progress=seen.append)
    assert (report.examples, seen) == (20_001, [10_000, 20_000, 20_001])
    assert check_labels(read_rows([train])) == report


def test_a_bad_line_comes_before_missing_fields(tmp_path):
    path = tmp_path / "a.txt"
    path.write_bytes(b"caf\xe9 good\nfilm\n")
    with pytest.raises(DataError, match="line 1 must be UTF-8"):
        check_labels(read_rows([path]))
    path.write_text("film\n")
    with pytest.raises(DataError, match="must have a label field, such as 'label'; found only tex"):
        check_labels(read_rows([path]))
    path = write(tmp_path / "b.jsonl", [r'{"text": "\ud800", "label": "pos"}'])
    with pytest.raises(DataError, match="line 1 must be valid Unicode"):
        check_labels(read_rows([path]))


def test_tokens_are_not_suggested_as_tags(tmp_path):
    path = write(tmp_path / "a.jsonl", ['{"tokens": ["a"]}'])
    with pytest.raises(DataError, match="must have a label field, such as 'tags'; found only tok"):
        check_labels(read_rows([path]), task="tag")

"""Bytes and lines of text files: line ends, rejected input, and errors with the line."""

from __future__ import annotations

import gzip
import lzma
import os
import zlib
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dragoman.data.compressed_input_streams import DecompressionLimits, FileStream, file_sha256
from dragoman.data.text_lines import (
    BadLine,
    NumberedLine,
    detect_utf16,
    guess_encoding,
    read_line_blocks,
    read_lines,
)
from dragoman.errors import CorruptError, DataError, PermissionDeniedError


def texts(path: Path, **options: int) -> list[str]:
    return [line.text for line in read_lines(path, **options)]


def everything(
    path: Path, max_line_bytes: int = 65_536, limits: DecompressionLimits | None = None
) -> list[str | BadLine]:
    return [
        line
        for block in read_line_blocks(FileStream(path, limits), max_line_bytes)
        for line in block
    ]


def written(path: Path, data: bytes) -> Path:
    path.write_bytes(data)
    return path


@pytest.mark.parametrize(
    ("data", "lines"),
    [
        (b"", []),
        (b"a\n", ["a"]),
        (b"a\nb", ["a", "b"]),
        (b"a\n\n", ["a", ""]),
        (b"\n\n\n", ["", "", ""]),
        (b"a\r\nb\r\n", ["a", "b"]),
        (b"a\rb\n", ["a\rb"]),
        (b"a\r\r\n", ["a\r"]),
        (b"\xef\xbb\xbfa\nb\n", ["a", "b"]),
        (b"a\n\xef\xbb\xbfb\n", ["a", "\ufeffb"]),
        ("a\u2028b\u2029c\x85d\x0be\x0cf\x1cg\n".encode(), ["a\u2028b\u2029c\x85d\x0be\x0cf\x1cg"]),
    ],
)
def test_only_lf_ends_a_line(tmp_path: Path, data: bytes, lines: list[str]) -> None:
    """Other Unicode line breaks are content, so numbers agree with `wc -l` (code-docstring-
    corpus#12)."""
    assert texts(written(tmp_path / "x.txt", data)) == lines
    assert texts(written(tmp_path / "x.txt.gz", gzip.compress(data))) == lines
    assert texts(written(tmp_path / "x.txt.xz", lzma.compress(data))) == lines


@settings(max_examples=60, deadline=None)
@given(
    lines=st.lists(
        st.text(
            alphabet=st.characters(exclude_characters="\n\r\0\ufeff", exclude_categories=("Cs",)),
            max_size=60,
        ),
        max_size=30,
    )
)
def test_lines_are_read_back_for_any_chunks(
    tmp_path_factory: pytest.TempPathFactory, lines: list[str]
) -> None:
    import dragoman.data.compressed_input_streams as streams

    path = tmp_path_factory.mktemp("lines") / "x.txt"
    path.write_bytes("".join(f"{line}\n" for line in lines).encode())
    before = streams._CHUNK
    try:
        for chunk in (3, 7, 64):
            streams._CHUNK = chunk
            if detect_utf16(path.read_bytes()[:chunk]):
                continue
            assert texts(path) == lines
    finally:
        streams._CHUNK = before


def test_lines_have_numbers_from_one(tmp_path: Path) -> None:
    assert list(read_lines(written(tmp_path / "x", b"a\nb\n"))) == [
        NumberedLine(1, "a"),
        NumberedLine(2, "b"),
    ]


@pytest.mark.parametrize(
    ("bad", "found"),
    [
        (b"caf\xe9 au lait", "byte 0xE9 at byte 4"),
        (b"ab\x80", "byte 0x80 at byte 3"),
        (b"\xc0\x80", "byte 0xC0"),
        (b"\xed\xa0\x80", "byte 0xED"),
        (b"\xf4\x90\x80\x80", "byte 0xF4"),
        (b"\xe4\xb8", "byte 0xE4 at byte 1"),
        (b"a\x00b", "a NUL byte at byte 2"),
    ],
)
def test_bad_lines_are_named(tmp_path: Path, bad: bytes, found: str) -> None:
    path = written(tmp_path / "x.txt", b"good\n" + bad + b"\nmore\n")
    with pytest.raises(DataError) as caught:
        texts(path)
    assert f"{path} line 2 must be" in str(caught.value)
    assert found in str(caught.value)
    lines = everything(path)
    assert [lines[0], lines[2]] == ["good", "more"]
    assert isinstance(lines[1], BadLine)
    assert lines[1].kind == "invalid"


@pytest.mark.parametrize(
    ("text", "encoding", "name"),
    [
        ("für Männer und Frauen", "cp1252", "CP1252"),
        ("Grüße", "latin-1", "CP1252"),
        ("Où est passé l'été dernier ?", "latin-1", "CP1252"),
        ("今天天气很好，我们去公园吧", "gbk", "GBK"),
        ("他说：“你好”", "gb18030", "GBK"),
        ("Привет, как у тебя дела сегодня", "cp1251", "CP1251"),
        ("для VIP-клиентов", "cp1251", "CP1251"),
    ],
)
def test_other_encodings_are_recognised_and_the_command_is_given(
    tmp_path: Path, text: str, encoding: str, name: str
) -> None:
    """GBK and cp1252 input is reported with its encoding (OpenNMT-py#1879, tensorflow/nmt#240)."""
    assert guess_encoding(text.encode(encoding)) == name
    path = written(tmp_path / "x.txt", b"ok\n" + text.encode(encoding) + b"\n")
    with pytest.raises(
        DataError,
        match=f"line 2 must be UTF-8; found byte .* it looks like {name}; .*iconv -f {name} -t",
    ):
        texts(path)


def test_nothing_is_guessed_from_ascii() -> None:
    assert guess_encoding(b"plain") == ""
    assert guess_encoding(b"\x81\x8d") in ("", "GBK")


@pytest.mark.parametrize(
    ("encoding", "name"),
    [
        ("utf-16", "UTF-16"),
        ("utf-16-le", "UTF-16LE"),
        ("utf-16-be", "UTF-16BE"),
        ("utf-32", "UTF-32"),
    ],
)
def test_utf16_is_recognised_by_its_first_bytes(tmp_path: Path, encoding: str, name: str) -> None:
    path = written(tmp_path / "x.txt", "Ein Hund läuft.\nZwei.\n".encode(encoding))
    with pytest.raises(
        DataError, match=f"line 1 must be UTF-8.*found {name}; convert it: iconv -f {name} "
    ):
        texts(path)


@pytest.mark.parametrize("size", [100, 1000, 700_000])
@pytest.mark.parametrize("end", [b"\n", b""])
def test_an_overlong_line_is_reported_with_its_length(
    tmp_path: Path, size: int, end: bytes
) -> None:
    path = written(tmp_path / "x.txt", b"one\n" + b"y" * size + (b"\nthree" if end else b"") + end)
    lines = everything(path, max_line_bytes=64)
    assert lines[0] == "one"
    bad = lines[1]
    assert isinstance(bad, BadLine)
    assert (bad.kind, bad.number, bad.found) == ("overlong", 2, f"{size} bytes")
    assert lines[2:] == (["three"] if end else [])
    with pytest.raises(
        DataError,
        match=f"line 2 must have at most 64 bytes; found {size} bytes; put a line break between",
    ):
        texts(path, max_line_bytes=64)


@pytest.mark.parametrize("size", [100, 700_000])
def test_bad_lines_after_an_overlong_one_have_their_numbers(tmp_path: Path, size: int) -> None:
    data = b"one\n" + b"y" * size + b"\nthree\ncaf\xe9\nfive\n\0\nseven"
    lines = everything(written(tmp_path / "x.txt", data), max_line_bytes=64)
    bad = [line.number for line in lines if isinstance(line, BadLine)]
    assert bad == [2, 4, 6]
    assert [each for each in lines if isinstance(each, str)] == ["one", "three", "five", "seven"]


def test_a_line_of_exactly_the_limit_is_read(tmp_path: Path) -> None:
    path = written(tmp_path / "x.txt", b"y" * 64 + b"\r\n" + b"z" * 65 + b"\n")
    lines = everything(path, max_line_bytes=64)
    assert lines[0] == "y" * 64
    assert isinstance(lines[1], BadLine)


@pytest.mark.parametrize("packing", ["gz", "xz"])
def test_several_members_and_padding_are_one_text(tmp_path: Path, packing: str) -> None:
    pack = gzip.compress if packing == "gz" else lzma.compress
    path = written(tmp_path / f"x.{packing}", pack(b"a\nb") + pack(b"c\n") + b"\0" * 8)
    assert texts(path) == ["a", "bc"]


@pytest.mark.parametrize("packing", ["gz", "xz"])
@pytest.mark.parametrize("fraction", [0.3, 0.9, 0.999])
def test_a_truncated_archive_is_an_error_not_a_shorter_corpus(
    tmp_path: Path, packing: str, fraction: float
) -> None:
    pack = gzip.compress if packing == "gz" else lzma.compress
    whole = pack(b"".join(b"%d\n" % (i * i) for i in range(20_000)))
    cut = whole[: int(len(whole) * fraction)]
    path = written(tmp_path / f"x.{packing}", cut)
    with pytest.raises(
        DataError, match=f"must be a whole .* file; found an end after {len(cut)} bytes"
    ):
        texts(path)


@pytest.mark.parametrize("packing", ["gz", "xz"])
def test_a_damaged_archive_is_named(tmp_path: Path, packing: str) -> None:
    pack = gzip.compress if packing == "gz" else lzma.compress
    whole = bytearray(pack(b"".join(b"%d\n" % (i * i) for i in range(20_000))))
    whole[len(whole) // 2] ^= 0x10
    path = written(tmp_path / f"x.{packing}", bytes(whole))
    with pytest.raises(
        DataError,
        match=rf"x\.{packing} must be a valid .* file; found .* near byte \d+ of {len(whole)}",
    ):
        texts(path)


def test_something_after_the_archive_is_an_error(tmp_path: Path) -> None:
    path = written(tmp_path / "x.gz", gzip.compress(b"a\n", mtime=0) + b"garbage")
    with pytest.raises(DataError, match="must be a valid gzip file"):
        texts(path)


@pytest.mark.parametrize(
    ("name", "data", "found"),
    [
        ("x.txt", gzip.compress(b"a\n", mtime=0), "found gzip data; rename it to end in .gz"),
        (
            "x.gz",
            lzma.compress(b"a\n"),
            "must be gzip, by its name; found xz data; rename it to end in .xz",
        ),
        ("x.gz", b"plain text\n", "found no gzip data; rename it without .gz"),
        ("x.txt", b"BZh91AY", "found bzip2 data; unpack it first"),
        ("x.tsv", b"\x28\xb5\x2f\xfd1234", "found zstd data"),
        ("x.csv", b"PK\x03\x04rest", "found zip data"),
        ("x.xz", b"", "found an empty file"),
    ],
)
def test_name_and_contents_must_agree(tmp_path: Path, name: str, data: bytes, found: str) -> None:
    with pytest.raises(DataError) as caught:
        texts(written(tmp_path / name, data))
    assert found in str(caught.value)


def test_an_archive_that_expands_without_limit_is_an_error(tmp_path: Path) -> None:
    limits = DecompressionLimits(window_bytes=1 << 20)
    path = written(tmp_path / "x.gz", gzip.compress(b"a\n" * (8 << 20)))
    with pytest.raises(
        DataError,
        match=r"more than 200 times its size.*; found [\d,]+ bytes out of [\d,]+; unpack it",
    ):
        everything(path, limits=limits)
    honest = written(tmp_path / "y.gz", gzip.compress(os.urandom(3 << 20).hex().encode()))
    assert len(everything(honest, max_line_bytes=1 << 30, limits=limits)) == 1


def test_every_window_of_an_archive_has_its_own_ratio(tmp_path: Path) -> None:
    """What is hard to compress at the beginning does not hide what expands after it."""
    content = os.urandom(1 << 20).hex().encode() + b"a\n" * (4 << 20)
    path = written(tmp_path / "x.gz", gzip.compress(content))
    with pytest.raises(DataError, match="more than 20 times its size"):
        everything(
            path,
            max_line_bytes=1 << 30,
            limits=DecompressionLimits(ratio=20, window_bytes=3 << 20),
        )


def test_usual_limits_allow_any_text() -> None:
    limits = DecompressionLimits()
    assert (limits.total_bytes, limits.ratio, limits.window_bytes) == (2**40, 200, 64 * 2**20)


def test_the_end_of_a_name_in_capitals_is_a_compression_too(tmp_path: Path) -> None:
    assert texts(written(tmp_path / "X.TXT.GZ", gzip.compress(b"a\n"))) == ["a"]


def test_the_largest_usual_dictionary_of_xz_is_accepted(tmp_path: Path) -> None:
    filters = [{"id": lzma.FILTER_LZMA2, "preset": 0, "dict_size": 64 << 20}]  # as of xz -9
    with lzma.open(tmp_path / "x.xz", "wb", filters=filters) as file:
        file.write(b"a\n")
    assert texts(tmp_path / "x.xz") == ["a"]


def test_the_total_is_capped(tmp_path: Path) -> None:
    path = written(tmp_path / "x.gz", gzip.compress(os.urandom(1 << 20).hex().encode()))
    with pytest.raises(DataError, match=r"more than 100000 bytes; found \d+ and more"):
        everything(path, limits=DecompressionLimits(total_bytes=100_000, window_bytes=65_536))


def test_an_xz_header_that_asks_for_much_memory_is_rejected(tmp_path: Path) -> None:
    filters = [{"id": lzma.FILTER_LZMA2, "preset": 6, "dict_size": 512 << 20}]
    with lzma.open(tmp_path / "x.xz", "wb", filters=filters) as file:
        file.write(b"a\n")
    with pytest.raises(DataError, match="Memory usage limit"):
        texts(tmp_path / "x.xz")


def test_missing_files_suggest_similar_names(tmp_path: Path) -> None:
    written(tmp_path / "train.de.xz", b"")
    with pytest.raises(
        DataError,
        match=r"train\.de must exist; found no such file .*; did you mean train\.de\.xz\?",
    ):
        texts(tmp_path / "train.de")
    with pytest.raises(DataError, match="check the path"):
        texts(tmp_path / "no" / "such" / "file")


def test_directories_and_pipes_are_rejected(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="must be a plain file; found a directory"):
        texts(tmp_path)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(DataError, match="found a pipe or device"):
        texts(tmp_path / "pipe")


@pytest.mark.skipif(os.geteuid() == 0, reason="the superuser may read anything")
def test_unreadable_files_exit_77(tmp_path: Path) -> None:
    path = written(tmp_path / "x", b"a\n")
    path.chmod(0)
    with pytest.raises(PermissionDeniedError, match="chmod"):
        texts(path)


def test_no_permission_has_its_own_exit_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def raise_permission_error(*_: object) -> int:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "open", raise_permission_error)
    with pytest.raises(
        PermissionDeniedError, match="must be readable; found Permission denied; chmod"
    ) as caught:
        texts(tmp_path / "x")
    assert caught.value.exit_code == 77


@pytest.mark.parametrize("change", ["grow", "shrink", "rewrite"])
def test_a_file_that_changes_while_it_is_read_is_noticed(tmp_path: Path, change: str) -> None:
    path = written(tmp_path / "x.txt", b"line\n" * 200_000)
    lines = read_lines(path)
    next(lines)
    if change == "grow":
        with path.open("ab") as file:
            file.write(b"more\n")
    elif change == "shrink":
        os.truncate(path, 900_000)
    else:
        before = path.stat()
        with path.open("r+b") as file:
            file.write(b"text\n" * 200_000)
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns + 1_000_000))
    found = "another modification time" if change == "rewrite" else "1000000 bytes at first"
    with pytest.raises(
        CorruptError, match=f"must stay as it is while it is read; found {found}"
    ) as caught:
        list(lines)
    assert caught.value.exit_code == 65


def test_the_digest_is_that_of_the_bytes_on_the_disk(tmp_path: Path) -> None:
    path = written(tmp_path / "x.gz", gzip.compress(b"a\nb\n"))
    stream = FileStream(path)
    assert b"".join(stream.chunks()) == b"a\nb\n"
    assert stream.digest == file_sha256(path)
    assert stream.position == stream.size == path.stat().st_size


def test_gzip_without_a_checksum_error_is_checked(tmp_path: Path) -> None:
    data = bytearray(gzip.compress(b"hello\n"))
    data[-8] ^= 1  # the CRC
    with pytest.raises(DataError, match="incorrect data check"):
        texts(written(tmp_path / "x.gz", bytes(data)))
    assert zlib.crc32(b"hello\n")


def test_eight_bytes_are_enough_to_detect_utf16() -> None:
    for encoding, name in (("utf-16-le", "UTF-16LE"), ("utf-16-be", "UTF-16BE")):
        assert detect_utf16("text".encode(encoding)) == name
        assert detect_utf16("tex".encode(encoding)) == ""
        assert detect_utf16("te\u4e2dt".encode(encoding)) == name  # two thirds are zero
        assert detect_utf16("t\u4e2d\u4e2dt".encode(encoding)) == ""


def test_files_of_a_like_name_are_suggested_in_order(tmp_path: Path) -> None:
    for name in ("b.de.xz", "b.de.gz", "b.en", "a.de", "b.tsv", "b.1", "b.2"):
        written(tmp_path / name, b"")
    with pytest.raises(DataError, match=r"did you mean b\.1, b\.2, b\.de\.gz, b\.de\.xz, b\.en\?"):
        texts(tmp_path / "b.de")

"""The store: the corpus's own pieces, made once, found again at once, never trusted blindly."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from dragoman.config.tree import DataConfig, TextConfig
from dragoman.data import preparing
from dragoman.data.corpus import Corpus, Pair, PairedFiles, PairsFile
from dragoman.data.preparing import Progress, StoreReport
from dragoman.data.store import Store, cache_folder, store_key
from dragoman.data.streams import file_digest
from dragoman.data.workers import Block, encode_blocks, encode_texts
from dragoman.errors import CorruptError, DataError, DiskError, ForbiddenError
from dragoman.text.specials import PAD
from dragoman.text.tokenizer import Tokenizers, train_tokenizers

GERMAN = ["Ein Hund läuft durch den Schnee.", "Zwei Männer reden auf der Straße.", "Eine Frau liest ein Buch im Park."]
ENGLISH = ["A dog runs through the snow.", "Two men are talking in the street.", "A woman reads a book in the park."]


@pytest.fixture(scope="module")
def tokenizers() -> Tokenizers:
    return train_tokenizers(GERMAN * 20, ENGLISH * 20, TextConfig(vocabulary=330, coverage=1.0))


def corpus_of(folder: Path, src: list[str], tgt: list[str], **options: object) -> PairedFiles:
    (folder / "x.de").write_text("".join(f"{line}\n" for line in src), encoding="utf-8")
    (folder / "x.en").write_text("".join(f"{line}\n" for line in tgt), encoding="utf-8")
    return PairedFiles(folder / "x.de", folder / "x.en", **options)  # type: ignore[arg-type]


def prepared(corpus: Corpus, tokenizers: Tokenizers, folder: Path, **options: object) -> Store:
    data = DataConfig(max_length=options.pop("max_length", 200))  # type: ignore[arg-type]
    return Store.prepare(corpus, tokenizers, folder=folder, data=data, **options)  # type: ignore[arg-type]


def test_the_store_holds_the_corpus(tmp_path: Path, tokenizers: Tokenizers) -> None:
    store = prepared(corpus_of(tmp_path, GERMAN, ENGLISH), tokenizers, tmp_path / "cache")
    assert len(store) == 3
    for index in range(3):
        src, tgt = store.pair(index)
        assert src.tolist() == tokenizers.src.encode(GERMAN[index])
        assert tokenizers.tgt.decode(tgt.tolist()) == ENGLISH[index]
        assert (store.src_lengths[index], store.tgt_lengths[index]) == (len(src), len(tgt))
    assert store.numbers.tolist() == [1, 2, 3]
    assert src.dtype == np.uint16
    assert store.report == StoreReport(read=3, pairs=3, src_pieces=int(store.src_lengths.sum()), tgt_pieces=int(store.tgt_lengths.sum()))
    store.verify()


def test_pairs_outside_are_refused(tmp_path: Path, tokenizers: Tokenizers) -> None:
    store = prepared(corpus_of(tmp_path, GERMAN, ENGLISH), tokenizers, tmp_path / "cache")
    for index in (-1, 3):
        with pytest.raises(IndexError, match=f"pairs 0 to 2; found {index}"):
            store.pair(index)
        with pytest.raises(IndexError, match=f"pairs 0 to 2; found {min(index, 1)} to {max(index, 1)}"):
            store.table("src", np.array([1, index]), 99)


def test_several_pairs_are_fetched_as_the_rows_of_a_table(tmp_path: Path, tokenizers: Tokenizers) -> None:
    store = prepared(corpus_of(tmp_path, GERMAN, ENGLISH), tokenizers, tmp_path / "cache")
    wanted = np.array([2, 0, 2])
    width = int(store.tgt_lengths.max()) + 2
    rows = store.table("tgt", wanted, width)
    assert rows.shape == (3, width)
    for row, index in zip(rows, wanted, strict=True):
        ids = store.pair(int(index))[1].tolist()
        assert row.tolist() == ids + [PAD] * (width - len(ids))
    assert store.table("src", np.zeros(0, np.int64), 4).shape == (0, 4)


def test_a_second_run_reads_nothing(tmp_path: Path, tokenizers: Tokenizers, monkeypatch: pytest.MonkeyPatch) -> None:
    """No half hour of loading at each start (fairseq#1267, #2829)."""
    corpus = corpus_of(tmp_path, GERMAN, ENGLISH)
    first = prepared(corpus, tokenizers, tmp_path / "cache")
    monkeypatch.setattr(PairedFiles, "records", lambda self: pytest.fail("the corpus was read again"))
    second = prepared(corpus, tokenizers, tmp_path / "cache")
    assert second.digest == first.digest
    assert second.pair(1)[0].tolist() == first.pair(1)[0].tolist()
    assert second.report == first.report


def test_everything_that_decides_the_contents_is_in_the_key(tmp_path: Path, tokenizers: Tokenizers) -> None:
    other = train_tokenizers(GERMAN * 20, ENGLISH * 20, TextConfig(vocabulary=320, coverage=1.0))
    corpus = corpus_of(tmp_path, GERMAN, ENGLISH)
    lenient = PairedFiles(*corpus.files, on_bad_line="skip")
    shorter = PairedFiles(*corpus.files, max_line_bytes=100)
    data = DataConfig()

    def key(corpus: Corpus, digests: list[str], tokenizers: Tokenizers, data: DataConfig) -> str:
        return store_key(corpus, digests, tokenizers, data)

    keys = [
        key(corpus, ["a", "b"], tokenizers, data),
        key(corpus, ["b", "a"], tokenizers, data),
        key(corpus, ["a", "b"], other, data),
        key(corpus, ["a", "b"], Tokenizers(tokenizers.src, other.tgt), data),
        key(corpus, ["a", "b"], tokenizers, DataConfig(max_length=100)),
        key(lenient, ["a", "b"], tokenizers, data),
        key(shorter, ["a", "b"], tokenizers, data),
        key(PairsFile(tmp_path / "x.tsv"), ["a", "b"], tokenizers, data),
    ]
    assert len(set(keys)) == len(keys)
    assert key(corpus, ["a", "b"], tokenizers, DataConfig(src="elsewhere", cache="x")) == keys[0]


def test_an_edit_that_keeps_size_and_time_is_noticed(tmp_path: Path, tokenizers: Tokenizers) -> None:
    corpus = corpus_of(tmp_path, GERMAN, ENGLISH)
    first = prepared(corpus, tokenizers, tmp_path / "cache")
    stat = corpus.src.stat()
    corpus.src.write_text(corpus.src.read_text(encoding="utf-8").replace("Hund", "Huhn"), encoding="utf-8")
    os.utime(corpus.src, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    second = prepared(corpus, tokenizers, tmp_path / "cache")
    assert second.digest != first.digest
    assert "Huhn" in tokenizers.src.decode(second.pair(0)[0].tolist())


def test_what_is_set_aside_is_counted_and_named(tmp_path: Path, tokenizers: Tokenizers) -> None:
    """Long and empty pairs are set aside with a report, never in silence (OpenNMT-py#1161)."""
    src = [GERMAN[0], "", "x" * 300, GERMAN[1], "  ", GERMAN[2]]
    tgt = [ENGLISH[0], "empty", "too long", ENGLISH[1], "blank", "y" * 5000]
    corpus = corpus_of(tmp_path, src, tgt, max_line_bytes=4000)
    store = prepared(corpus, tokenizers, tmp_path / "cache", max_length=60)
    assert store.numbers.tolist() == [1, 4]
    assert store.report.set_aside == {"with an empty side": 2, "with an overlong line": 1, "over 60 pieces": 1}
    assert store.report.lines == {"with an empty side": [2, 5], "with an overlong line": [6], "over 60 pieces": [3]}
    sentence = store.report.sentence()
    assert "2 of 6 pairs kept; set aside: " in sentence
    assert "2 with an empty side (lines 2, 5)" in sentence
    assert "1 over 60 pieces (line 3)" in sentence


def test_bad_lines_stop_or_are_counted(tmp_path: Path, tokenizers: Tokenizers) -> None:
    corpus = corpus_of(tmp_path, GERMAN, ENGLISH)
    corpus.src.write_bytes(b"gut\n\xff\xfe bad\nauch\n")
    with pytest.raises(DataError, match=r"x\.de line 2 must be UTF-8"):
        prepared(corpus, tokenizers, tmp_path / "cache")
    corpus.on_bad_line = "skip"
    store = prepared(corpus, tokenizers, tmp_path / "cache")
    assert store.numbers.tolist() == [1, 3]
    assert store.report.set_aside == {"with a bad line": 1}


def test_many_named_lines_are_shortened() -> None:
    report = StoreReport(read=9, pairs=0)
    for number in range(1, 10):
        report.put_aside("odd", number)
    assert report.sentence() == "0 of 9 pairs kept; set aside: 9 odd (lines 1, 2, 3, 4, 5 …)"
    assert StoreReport(src_pieces=60, tgt_pieces=40, unknown=3).unknown_share() == 0.03
    assert StoreReport().unknown_share() == 0


def test_a_corpus_without_a_usable_pair_is_an_error(tmp_path: Path, tokenizers: Tokenizers) -> None:
    with pytest.raises(DataError, match=r"must hold a pair that can be used; found 0 of 2 pairs kept; set aside: 2 with an empty side"):
        prepared(corpus_of(tmp_path, ["", "a"], ["b", ""]), tokenizers, tmp_path / "cache")
    with pytest.raises(DataError, match="found 0 of 0 pairs kept"):
        prepared(corpus_of(tmp_path, [], []), tokenizers, tmp_path / "cache")
    assert not list((tmp_path / "cache").iterdir())


def test_unknown_pieces_are_counted(tmp_path: Path) -> None:
    """A vocabulary that does not fit shows before training (OpenNMT-py#2602)."""
    made = train_tokenizers(GERMAN * 9, ENGLISH * 9, TextConfig(vocabulary=90, byte_fallback=False, coverage=1.0))
    store = prepared(corpus_of(tmp_path, ["日 本"], ["x y"]), made, tmp_path / "cache")
    assert store.report.unknown == 4
    assert store.report.unknown_share() > 0.3


def test_separate_vocabularies_are_kept_apart(tmp_path: Path) -> None:
    made = train_tokenizers(GERMAN * 20, ENGLISH * 20, TextConfig(vocabulary=310, coverage=1.0, joint=False))
    store = prepared(corpus_of(tmp_path, GERMAN, ENGLISH), made, tmp_path / "cache")
    assert store.pair(0)[1].tolist() == made.tgt.encode(ENGLISH[0])
    assert made.tgt.encode(ENGLISH[0]) != made.src.encode(ENGLISH[0])


def many(folder: Path, count: int) -> PairedFiles:
    return corpus_of(folder, [f"{GERMAN[i % 3]} {i}" for i in range(count)], [f"{ENGLISH[i % 3]} {i}" for i in range(count)])


def test_all_workers_give_what_one_gives(tmp_path: Path, tokenizers: Tokenizers, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preparing, "BLOCK", 100)
    corpus = many(tmp_path, 1234)
    one = prepared(corpus, tokenizers, tmp_path / "one", workers=1)
    three = prepared(corpus, tokenizers, tmp_path / "three", workers=3)
    hashes = [{path.name: file_digest(path) for path in store.folder.iterdir()} for store in (one, three)]
    assert hashes[0] == hashes[1]
    assert len(one) == 1234


def test_workers_do_not_run_the_callers_script_again(tmp_path: Path) -> None:
    """A script without a main guard must not start itself in every worker."""
    script = tmp_path / "script.py"
    script.write_text(
        f"""
import sys
print("started", flush=True)
from pathlib import Path
from dragoman.config.tree import DataConfig, TextConfig
from dragoman.data.corpus import PairedFiles
from dragoman.data.store import Store
from dragoman.text.tokenizer import train_tokenizers
here = Path({str(tmp_path)!r})
corpus = PairedFiles(here / "x.de", here / "x.en")
made = train_tokenizers(corpus.src_texts(), corpus.tgt_texts(), TextConfig(vocabulary=330, coverage=1.0))
print(len(Store.prepare(corpus, made, folder=here / "cache", data=DataConfig(), workers=2)))
"""
    )
    many(tmp_path, 50)
    root = Path(__file__).resolve().parents[2]
    run = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(root)}, check=True
    )
    assert run.stdout.split() == ["started", "50"]


def test_a_worker_that_dies_is_an_error_not_a_hang(tokenizers: Tokenizers, monkeypatch: pytest.MonkeyPatch) -> None:
    from dragoman.data import workers

    real = workers._Worker.send

    def send_and_kill(self: workers._Worker, block: Block) -> None:
        real(self, block)
        self._process.kill()
        self._process.wait()

    monkeypatch.setattr(workers._Worker, "send", send_and_kill)
    blocks = [Block([1], ["Ein Hund"] * 1, ["a dog"]) for _ in range(4)]
    with pytest.raises(DiskError, match="must live; found one that ended with signal 9"):
        list(encode_blocks(blocks, tokenizers, 2))


def test_encoding_keeps_any_text_through_the_pipes(tokenizers: Tokenizers) -> None:
    texts = ["", "a\nb", "日本\u2028x", "🙂", "x" * 3000]
    blocks = [Block(list(range(5)), texts, texts[::-1])] * 3
    for block, src, tgt in encode_blocks(blocks, tokenizers, 2):
        assert src.ids.tolist() == encode_texts(tokenizers.src, block.src).ids.tolist()
        assert tgt.lengths.tolist() == [len(row) for row in tokenizers.tgt.encode_batch(texts[::-1])]


def test_progress_is_told(tmp_path: Path, tokenizers: Tokenizers, monkeypatch: pytest.MonkeyPatch) -> None:
    """Preparing shows how far it is (fairseq#2603)."""
    monkeypatch.setattr(preparing, "BLOCK", 100)
    told: list[Progress] = []
    prepared(many(tmp_path, 450), tokenizers, tmp_path / "cache", progress=told.append, workers=1)
    assert [each.pairs for each in told][-1] == 450
    assert len(told) == 5
    assert told[-1].share == 1.0
    assert all(each.seconds >= 0 for each in told)


def test_wide_ids_where_the_vocabulary_is_large(tmp_path: Path, tokenizers: Tokenizers) -> None:
    class Large(type(tokenizers.src)):  # type: ignore[misc]
        def __len__(self) -> int:
            return 70_000

    large = Large(tokenizers.src.model, kind="bpe", normalisation="nfc")
    store = prepared(corpus_of(tmp_path, GERMAN, ENGLISH), Tokenizers(large, large), tmp_path / "cache")
    assert store.pair(0)[0].dtype == np.uint32
    assert store.pair(0)[0].tolist() == tokenizers.src.encode(GERMAN[0])


@pytest.mark.parametrize("name", ["src.bin", "tgt.bin", "src.offsets", "tgt.lengths", "numbers"])
def test_a_cut_file_is_noticed_at_opening_and_made_anew(
    tmp_path: Path, tokenizers: Tokenizers, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    corpus = corpus_of(tmp_path, GERMAN, ENGLISH)
    store = prepared(corpus, tokenizers, tmp_path / "cache")
    size = (store.folder / name).stat().st_size
    os.truncate(store.folder / name, size - 1)
    with pytest.raises(CorruptError, match=f"{name} must have {size} bytes; found {size - 1} bytes; delete"):
        Store.open(store.folder)
    again = prepared(corpus, tokenizers, tmp_path / "cache")
    again.verify()
    assert "is made anew" in caplog.text
    assert len(list((tmp_path / "cache").glob("*.damaged-*"))) == 1


@pytest.mark.parametrize("name", ["src.bin", "tgt.bin", "src.lengths", "tgt.offsets"])
def test_a_flipped_bit_is_noticed_before_it_is_used(tmp_path: Path, tokenizers: Tokenizers, name: str) -> None:
    store = prepared(corpus_of(tmp_path, GERMAN, ENGLISH), tokenizers, tmp_path / "cache")
    path = store.folder / name
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 4
    path.write_bytes(bytes(data))
    with pytest.raises(CorruptError, match=f"{name} must be as it was written; found SHA-256 ") as caught:
        Store.open(store.folder).pair(0)
    assert caught.value.exit_code == 65


def test_a_missing_file_and_an_edited_manifest_are_noticed(tmp_path: Path, tokenizers: Tokenizers) -> None:
    store = prepared(corpus_of(tmp_path, GERMAN, ENGLISH), tokenizers, tmp_path / "cache")
    copy = tmp_path / "copy"
    shutil.copytree(store.folder, copy)
    (copy / "tgt.bin").unlink()
    with pytest.raises(CorruptError, match=r"tgt\.bin must have .*; found no such file"):
        Store.open(copy)
    manifest = json.loads((store.folder / "manifest.json").read_text())
    manifest["report"]["pairs"] = 2
    (store.folder / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(CorruptError, match=r"manifest\.json"):
        Store.open(store.folder)


def test_a_folder_without_a_manifest_is_no_store(tmp_path: Path) -> None:
    with pytest.raises(CorruptError, match=r"manifest\.json.*No such file"):
        Store.open(tmp_path)


def test_a_corpus_that_changes_between_hashing_and_reading_is_refused(tmp_path: Path, tokenizers: Tokenizers) -> None:
    corpus = corpus_of(tmp_path, GERMAN, ENGLISH)
    real = corpus.records

    def edited():
        corpus.src.write_text("".join(f"{line}!\n" for line in GERMAN), encoding="utf-8")
        return real()

    corpus.records = edited  # type: ignore[method-assign]
    with pytest.raises(CorruptError, match=r"x\.de must stay as it is while it is prepared; found SHA-256 \w+… before and \w+… after"):
        prepared(corpus, tokenizers, tmp_path / "cache")
    assert not list((tmp_path / "cache").iterdir())


def test_a_corpus_that_stops_reading_early_is_still_checked(tmp_path: Path, tokenizers: Tokenizers) -> None:
    class Half(PairedFiles):
        def records(self):
            for record in super().records():
                if record.number > 2:
                    return
                yield record

    corpus = corpus_of(tmp_path, GERMAN, ENGLISH)
    assert len(prepared(Half(*corpus.files), tokenizers, tmp_path / "cache")) == 2


def test_what_a_dead_process_left_is_removed(tmp_path: Path, tokenizers: Tokenizers) -> None:
    cache = tmp_path / "cache"
    dead = subprocess.run(
        [sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, text=True, check=True
    ).stdout.strip()
    mine = preparing._host()
    for host, pid in ((mine, dead), (mine, str(os.getpid())), ("00000000", dead)):
        leftover = cache / f".tmp-store-0a1b-{host}-{pid}-00ff"
        leftover.mkdir(parents=True)
        (leftover / "src.bin").write_bytes(b"half")
    prepared(corpus_of(tmp_path, GERMAN, ENGLISH), tokenizers, cache)
    left = {path.name for path in cache.iterdir() if path.name.startswith(".tmp")}
    assert left == {f".tmp-store-0a1b-{mine}-{os.getpid()}-00ff", f".tmp-store-0a1b-00000000-{dead}-00ff"}


def test_two_processes_may_make_the_same_store(tmp_path: Path, tokenizers: Tokenizers, monkeypatch: pytest.MonkeyPatch) -> None:
    corpus = corpus_of(tmp_path, GERMAN, ENGLISH)
    real = preparing.publish_directory

    def beaten(temporary: Path, final: Path) -> None:
        shutil.copytree(temporary, final)
        real(temporary, final)

    monkeypatch.setattr(preparing, "publish_directory", beaten)
    store = prepared(corpus, tokenizers, tmp_path / "cache")
    assert len(store) == 3
    assert [path.name for path in (tmp_path / "cache").iterdir()] == [store.folder.name]


def test_a_full_disk_leaves_nothing_behind(tmp_path: Path, tokenizers: Tokenizers, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(preparing, "write_manifest", full)
    with pytest.raises(DiskError, match=r"must have room.*found No space left on device") as caught:
        prepared(corpus_of(tmp_path, GERMAN, ENGLISH), tokenizers, tmp_path / "cache")
    assert caught.value.exit_code == 74
    assert not list((tmp_path / "cache").iterdir())


def test_a_cache_that_may_not_be_written_exits_77(tmp_path: Path, tokenizers: Tokenizers, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    corpus = corpus_of(tmp_path, GERMAN, ENGLISH)
    monkeypatch.setattr(Path, "mkdir", refuse)
    with pytest.raises(ForbiddenError, match="Permission denied"):
        prepared(corpus, tokenizers, tmp_path / "cache")


def test_data_is_read_and_prepared_without_torch() -> None:
    """Looking at a corpus must not wait for torch to load."""
    code = "import sys, dragoman.data.store, dragoman.data.plan, dragoman.data.checks; print('torch' in sys.modules)"
    root = str(Path(__file__).resolve().parents[2])
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env={**os.environ, "PYTHONPATH": root}, check=True)
    assert run.stdout.strip() == "False"


def test_where_prepared_data_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    assert cache_folder(DataConfig(cache="/there")) == Path("/there")
    monkeypatch.setenv("DRAGOMAN_CACHE", "/mine")
    assert cache_folder(DataConfig()) == Path("/mine")
    monkeypatch.delenv("DRAGOMAN_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    assert cache_folder(DataConfig()) == Path("/xdg/dragoman")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_folder(DataConfig()) == Path.home() / ".cache" / "dragoman"


def test_memory_stays_flat_while_preparing(tmp_path: Path, tokenizers: Tokenizers, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten times the corpus must not take ten times the memory (fairseq#2588, #2589)."""
    import tracemalloc

    class Endless(Corpus):
        def __init__(self, count: int) -> None:
            super().__init__()
            self.count = count

        @property
        def files(self) -> list[Path]:
            return []

        def layout(self) -> dict[str, object]:
            return {"count": self.count}

        def records(self):
            for number in range(1, self.count + 1):
                yield Pair(number, "ein Hund " * 5, "a dog " * 5)

    monkeypatch.setattr(preparing, "BLOCK", 500)
    peaks = []
    for count in (1000, 8000):
        tracemalloc.start()
        prepared(Endless(count), tokenizers, tmp_path / "cache", workers=1)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] < 1.5 * peaks[0] + 2_000_000

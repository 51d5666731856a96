"""The benches run at their smallest sizes and print what scripts read; what they compare is
fair.
"""

from __future__ import annotations

import importlib
import json
import sys
import time
import warnings
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from dragoman.explain.explanation import Explanation, Token, TokenizedText
from dragoman.text.sentencepiece_tokenizer import train_tokenizers

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def bench(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT))
    return lambda name: importlib.import_module(f"bench.{name}")


def run(module: ModuleType, monkeypatch, capsys, *options: str) -> dict[str, Any]:
    """Run a benchmark with command-line arguments, and parse its last line."""
    monkeypatch.setattr(sys, "argv", [f"bench/{module.__name__}.py", *options])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # transformers gives advice
        module.main()
    return json.loads(capsys.readouterr().out.strip().splitlines()[-1])


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    sys.path.insert(0, str(ROOT))
    try:
        drawn = importlib.import_module("bench.synthetic_corpus")
    finally:
        sys.path.remove(str(ROOT))
    return drawn.synthetic_corpus(tmp_path_factory.mktemp("synthetic_corpus"), 600, vocabulary=512)


# What is timed


def test_drawn_sentences_are_as_long_as_real_ones(bench, corpus):
    drawn = bench("synthetic_corpus")
    logarithms = np.log(
        np.stack([corpus.store.src_lengths, corpus.store.tgt_lengths]).astype(float) + 1
    )
    assert len(corpus.store) == 600
    assert len(corpus.tokenizers.tgt) == 512
    assert logarithms.mean(axis=1) == pytest.approx(drawn.MEANS, abs=0.06)
    assert logarithms.std(axis=1) == pytest.approx(drawn.DEVIATIONS, abs=0.04)
    assert np.corrcoef(logarithms)[0, 1] == pytest.approx(drawn.CORRELATION, abs=0.06)


def test_rounds_repeat_full_batches_and_count_real_tokens(bench, corpus):
    plan = bench("synthetic_corpus").BenchmarkPlan(
        corpus.store, batch_tokens=256, max_shapes=3, steps=5, rounds=2
    )
    order = [
        plan.batch(bench("synthetic_corpus").Cursor(0, index)) for index in range(plan.batches(0))
    ]
    warmup_batches = len(plan.warmup_batches)
    assert [batch.tolist() for batch in order[warmup_batches : warmup_batches + 5]] == [
        batch.tolist() for batch in order[warmup_batches + 5 :]
    ]
    assert {plan.shape(batch) for batch in order[:warmup_batches]} == {
        plan.shape(batch) for batch in plan.timed
    }
    batches = [plan.collate(batch) for batch in plan.timed]
    assert all(
        len(batch) == max(1, 256 // max(batch.src.shape[1], batch.tgt_in.shape[1]))
        for batch in batches
    )
    assert plan.tokens() == sum(batch.tokens for batch in batches)
    assert plan.padding() == pytest.approx(
        1 - sum(batch.tokens for batch in batches) / sum(batch.padded_tokens for batch in batches)
    )


@pytest.mark.parametrize("name", ["torch.nn.Transformer", "Hugging Face Marian"])
def test_peers_are_sound_models(bench, corpus, name):
    peers, sizes = bench("peers"), bench("train_gpu")
    torch.manual_seed(0)
    plan = bench("synthetic_corpus").BenchmarkPlan(
        corpus.store, batch_tokens=128, max_shapes=2, steps=1
    )
    batch = plan.collate(plan.timed[0])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        peer = peers.PEERS[name](sizes.model_config("tiny"), 2, 512).eval()
        src_mask = torch.arange(batch.src.shape[1]) < batch.src_lengths[:, None]
        with torch.no_grad():
            before = peer(batch.src, src_mask, batch.tgt_in)
            later, padded = batch.tgt_in.clone(), batch.src.clone()
            later[:, 3:] = 7
            padded[~src_mask] = 9
            after = peer(padded, src_mask, later)
        torch.testing.assert_close(
            after[:, :3], before[:, :3], atol=1e-4, rtol=1e-4
        )  # neither padding nor the future is seen
        assert not torch.allclose(after[:, 4:], before[:, 4:], atol=1e-2)
        step = peers.PeerStep(peer, torch.device("cpu"), torch.float32, compiled=False)
        losses = [float(step(batch)) for _ in range(4)]
    assert losses[-1] < losses[0]


def test_peers_and_ours_are_of_one_size(bench):
    peers, sizes = bench("peers"), bench("train_gpu")
    build = importlib.import_module("dragoman.models.factory").build_model
    model = sizes.model_config("tiny")
    ours = sum(
        each.numel() for each in build(model, src_vocab_size=512, tgt_vocab_size=512).parameters()
    )
    for kind in peers.PEERS.values():
        theirs = sum(
            each.numel() for each in kind(model, 2, 512).parameters() if each.requires_grad
        )
        assert theirs == pytest.approx(ours, rel=0.01)


# Hugging Face's trainer


@pytest.fixture
def seq2seq(bench):
    pytest.importorskip("transformers")
    return bench("hf_trainer")


def trainer_on(bench, corpus, folder: Path, *, sentences: int) -> tuple[Any, Any, Any]:
    """Put the trainer together on a CPU, in float32, with its pairs and their order."""
    pytest.importorskip("accelerate", reason="Hugging Face's trainer needs accelerate")
    module = bench("hf_trainer")
    torch.manual_seed(1)
    model = bench("peers").build_marian(bench("train_gpu").model_config("tiny"), 2, 512)
    data = module.PairDataset(corpus.store, 4 * 3 * sentences)
    settings = module.arguments(
        folder, sentences=sentences, steps=6, half=False, cpu=True, compiled=False
    )
    return (*module.build_hf_trainer(model, data, settings, given_lengths=True), data)


def test_its_pairs_are_the_stores_with_their_ends(seq2seq, corpus):
    data = seq2seq.PairDataset(corpus.store, 1500)
    assert len(data) == len(data.sizes) == 1500
    for index in (0, 599, 600, 1499):
        src, tgt = corpus.store.pair(index % 600)
        assert data[index]["input_ids"].tolist() == [*src.tolist(), 2]
        assert data[index]["labels"].tolist() == [*tgt.tolist(), 2]
        assert data.sizes[index].tolist() == [len(src) + 1, len(tgt) + 1]


def test_its_batches_are_padded_as_its_own_collator_pads(bench, seq2seq, corpus):
    transformers, tokenizers = (
        pytest.importorskip("transformers"),
        pytest.importorskip("tokenizers"),
    )
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"<pad>": 0, "a": 1}, unk_token="a"))
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = bench("peers").build_marian(bench("train_gpu").model_config("tiny"), 2, 512)
        data = seq2seq.PairDataset(corpus.store, 9)
        pairs = [data[index] for index in range(9)]
        theirs = transformers.DataCollatorForSeq2Seq(tokenizer, model=model)(
            [
                {name: ids.tolist() for name, ids in pair.items()}
                | {"attention_mask": [1] * len(pair["input_ids"])}
                for pair in pairs
            ]
        )
    ours = seq2seq.PaddingCollator(model)(pairs)
    assert set(ours) == set(theirs)
    for name, table in ours.items():
        torch.testing.assert_close(table, theirs[name])
    ready = bench("synthetic_corpus").collate(
        corpus.store, np.arange(9)
    )  # and the model reads what it reads in our batches
    assert torch.equal(ours["input_ids"], ready.src)
    assert torch.equal(ours["decoder_input_ids"][ready.tgt_mask], ready.tgt_in[ready.tgt_mask])


def test_its_loss_is_label_smoothed_cross_entropy(bench, corpus, tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer, _, data = trainer_on(bench, corpus, tmp_path, sentences=4)
        batch = trainer.data_collator([data[index] for index in range(4)])
        trainer.model.eval()
        with torch.no_grad():
            logits = trainer.model(
                **{name: table for name, table in batch.items() if name != "labels"}
            ).logits
            wanted = torch.nn.functional.cross_entropy(
                logits.flatten(0, 1),
                batch["labels"].flatten(),
                ignore_index=-100,
                label_smoothing=bench("peers").SMOOTHING,
            )
            found = trainer.compute_loss(
                trainer.model, dict(batch), num_items_in_batch=(batch["labels"] != -100).sum()
            )
    torch.testing.assert_close(found, wanted)


def test_its_tokens_are_counted_from_its_order(bench, corpus, tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer, sampler, data = trainer_on(bench, corpus, tmp_path, sentences=10)
        batches = list(trainer.get_train_dataloader())
    assert len(batches) == 12
    tokens = [
        int(batch["attention_mask"].sum() + (batch["labels"] != -100).sum()) for batch in batches
    ]
    slots = [batch["input_ids"].numel() + batch["labels"].numel() for batch in batches]
    for first, last in ((0, 3), (3, 6), (0, 12)):
        counted = bench("hf_trainer").count(data, sampler.order, 10, first, last)
        assert counted == (sum(tokens[first:last]), sum(slots[first:last]))
    longest = [int(max(batch["input_ids"].shape[1], batch["labels"].shape[1])) for batch in batches]
    assert longest[3:6] == sorted(longest[3:6], reverse=True)  # a round is one sorting


def test_its_batches_have_our_padded_size_and_fit_into_memory(seq2seq, corpus):
    longer = np.maximum(corpus.store.src_lengths, corpus.store.tgt_lengths).astype(int) + 1
    free = seq2seq.sentences_per_batch(corpus.store, padded_tokens=2560, vocabulary=512)
    assert free == pytest.approx(2560 / longer.mean(), abs=1)
    worst = (int(corpus.store.tgt_lengths.max()) + 1) * 512 * 16
    assert (
        seq2seq.sentences_per_batch(
            corpus.store, padded_tokens=2560, vocabulary=512, max_bytes=10.5 * worst
        )
        == 10
    )
    assert (
        seq2seq.sentences_per_batch(corpus.store, padded_tokens=2560, vocabulary=512, max_bytes=1.0)
        == 1
    )


def test_time_limit_is_raised_until_it_is_handled(bench, monkeypatch):
    module = bench("timing_helpers")
    monkeypatch.setattr(module, "ALARM_INTERVAL", 0.05)
    heard = []

    def stubborn() -> None:
        try:
            time.sleep(60)
        except module.OutOfTimeError as error:
            heard.append(error)
        time.sleep(60)

    with pytest.raises(module.OutOfTimeError, match=r"more than 0\.05 s"), module.time_limit(0.05):
        stubborn()
    assert len(heard) == 1


# The commands


def test_prepare(bench, monkeypatch, capsys, tmp_path):
    options = (
        "--pairs",
        "300",
        "--vocabulary",
        "400",
        "--repeats",
        "1",
        "--cores",
        "0",
        "1",
        "2",
        "--folder",
        str(tmp_path),
    )
    found = run(bench("data_preparation"), monkeypatch, capsys, *options)
    assert found["alike"]
    assert [row["tokens"] for row in found["rows"]] == [found["rows"][0]["tokens"]] * 3
    assert all(row["MiB"] > 10 and row["tokens_cpu_s"] > 0 for row in found["rows"])


def test_train_gpu(bench, monkeypatch, capsys):
    ways = ("eager", "Hugging Face Marian", "torch.nn.Transformer")
    found = run(
        bench("train_gpu"),
        monkeypatch,
        capsys,
        "--device",
        "cpu",
        "--size",
        "tiny",
        "--steps",
        "2",
        "--only",
        *ways,
    )
    assert [row["system"] for row in found["rows"]] == list(ways)
    assert all(row["tokens_s"] >= row["slowest"] > 0 for row in found["rows"])
    assert 0 <= found["rows"][0]["data_wait"] < 1
    assert 0 < found["padding"] < 1


def test_consistency_step(bench, monkeypatch, capsys):
    tiny = ("--only", "tiny", "--modes", "eager", "--vocabulary", "512")
    short = ("--steps", "2", "--rounds", "1", "--repeats", "1", "--shapes", "2")
    found = run(bench("consistency_step"), monkeypatch, capsys, "--device", "cpu", *tiny, *short)
    assert [row["method"] for row in found["rows"]] == ["plain", "simcut", "r_drop"]
    assert all(row["tokens_s"] > 0 for row in found["rows"])


def test_unseen_names(bench, monkeypatch, capsys):
    """A translator that copies every second word, and misspells the others by a letter."""
    module = bench("unseen_names")

    class Copier:
        @staticmethod
        def stream(texts: list[str], **languages: str) -> list[SimpleNamespace]:
            assert languages == {"source_language": "en", "target_language": "de"}
            forms = [form.split("{}") for form in module.SENTENCES["en"]]
            words = [
                text.removeprefix(forms[index % 3][0]).removesuffix(forms[index % 3][1])
                for index, text in enumerate(texts)
            ]
            outputs = [word if index % 2 else word[:-1] for index, word in enumerate(words)]
            return [SimpleNamespace(text=text, confidence=0.25) for text in outputs]

    monkeypatch.setattr(module.Translator, "load", lambda path: Copier())
    found = run(module, monkeypatch, capsys, "m", "--from=en", "--to=de", "--count=4")
    assert list(found["rows"]) == list(module.KINDS)
    for row in found["rows"].values():
        assert row["copied"] + row["close"] == 1.0
        assert abs(row["copied"] - 0.5) < 0.2
        assert row["confidence"] == 0.25
        assert row["sentences"] % 3 == 0
    assert module.edit_distance("kitten", "sitting") == 3


def test_train_gpu_with_hugging_faces_trainer(bench, monkeypatch, capsys):
    pytest.importorskip("accelerate", reason="Hugging Face's trainer needs accelerate")
    ways = ("Hugging Face Trainer", "Hugging Face Trainer, by length")
    options = (
        "--device",
        "cpu",
        "--size",
        "tiny",
        "--steps",
        "5",
        "--precision",
        "float32",
        "--only",
        *ways,
    )
    rows = run(bench("train_gpu"), monkeypatch, capsys, *options)["rows"]
    assert [row["system"] for row in rows] == list(ways)
    for row in rows:
        assert row["tokens_s"] >= row["slowest"] > 0
        assert row["losses"] == sorted(row["losses"], reverse=True)
        assert len(row["losses"]) == 3
        assert 0 < row["padding"] < 0.5
        assert 10 < row["sentences"] < 20
    assert rows[1]["padding"] < rows[0]["padding"], "the targets' lengths are known too"


def test_train_gpu_reports_systems_that_fail_or_exceed_the_limit(bench, monkeypatch, capsys):
    module = bench("train_gpu")

    def missing(*_: Any) -> None:
        raise ModuleNotFoundError("no transformers here")

    monkeypatch.setitem(module.PEERS, "Hugging Face Marian", missing)
    monkeypatch.setitem(module.PEERS, "torch.nn.Transformer", lambda *_: time.sleep(60))
    ours = {"ours": True, "tokens_s": 1.0, "slowest": 1.0, "warm_up_s": 1.0, "MiB": None}
    monkeypatch.setattr(module, "time_ours", lambda way, *_: {"system": way, **ours})
    monkeypatch.setattr(module, "build_marian", missing)  # would import transformers
    ways = (
        "Hugging Face Marian",
        "torch.nn.Transformer",
        "eager",
        "Hugging Face Trainer, compiled",
    )
    options = (
        "--device",
        "cpu",
        "--size",
        "tiny",
        "--steps",
        "1",
        "--seconds",
        "2",
        "--only",
        *ways,
    )
    found = run(module, monkeypatch, capsys, *options)
    assert [row["system"] for row in found["rows"]] == list(ways)
    assert found["rows"][0]["error"] == "ModuleNotFoundError: no transformers here"
    assert found["rows"][1]["error"].startswith("OutOfTimeError: more than")
    assert found["rows"][2]["tokens_s"] == 1.0
    assert found["rows"][3]["error"] == "ModuleNotFoundError: no transformers here"


def test_train_gpu_labels_the_origin_of_batches(bench, capsys):
    module = bench("train_gpu")
    row = {"tokens_s": 2.0, "slowest": 1.0, "warm_up_s": 1.0, "MiB": None}
    own = {"system": "Hugging Face Trainer", "padding": 0.125, "sentences": 1534}
    rows = [
        {"system": "cuda_graphs", "ours": True},
        {"system": "Hugging Face Marian", "on_our_batches": True},
        own,
    ]
    rows = [row | each for each in rows]
    for each in rows:
        module.show(each)
    module.report([rows[0] | {"tokens_s": 6.0}, *rows[1:]])
    printed = capsys.readouterr().out
    assert "ours, cuda_graphs, against:" in printed
    assert "Hugging Face Marian, on our batches" in printed
    assert "1,534 sentences per batch, 12.5% padding" in printed
    assert printed.count("3.00 times") == 2
    assert "torch.nn.Transformer, compiled" in set(module.SYSTEMS) - set(module.DEFAULT_SYSTEMS)


def test_decode_gpu(bench, monkeypatch, capsys):
    options = (
        "--device",
        "cpu",
        "--size",
        "tiny",
        "--sentences",
        "4",
        "--train-steps",
        "2",
        "--batches",
        "0",
        "--peer-batches",
        "4",
    )
    found = run(
        bench("decode_gpu"),
        monkeypatch,
        capsys,
        *options,
        "--beams",
        "1",
        "--dtypes",
        "float32",
        "--rounds",
        "1",
    )
    assert [row["system"] for row in found["rows"]] == ["ours", "ours, ids", "transformers"]
    assert [row["system"] for row in found["results"]] == ["ours", "ours, ids", "transformers"]
    assert ["ratio_to_best" in row for row in found["results"]] == [True, True, False]
    assert all(row["same_outputs"] == 1.0 for row in found["results"])
    assert found["rows"][0]["equal_to_batch_1"] == 1.0


def test_decode_gpu_reports_a_failing_system_and_continues(bench, monkeypatch, capsys):
    def fail(*_: Any) -> None:
        raise KeyError("no such model")

    module = bench("decode_gpu")
    monkeypatch.setattr(bench("gpu_systems").OurTranslator, "__call__", fail)
    monkeypatch.setattr(bench("gpu_systems").TransformersPeer, "__init__", fail)
    options = (
        "--device",
        "cpu",
        "--size",
        "tiny",
        "--sentences",
        "4",
        "--train-steps",
        "2",
        "--batches",
        "0",
        "--peer-batches",
        "4",
    )
    found = run(
        module,
        monkeypatch,
        capsys,
        *options,
        "--beams",
        "1",
        "--dtypes",
        "float32",
        "--rounds",
        "1",
    )
    assert ["no such model" in row.get("error", "") for row in found["rows"]] == [True, False, True]
    assert found["results"] == []


def test_train_cpu(bench, monkeypatch, capsys):
    module = bench("train_cpu")
    sizes = {
        "size": "tiny",
        "steps": 1,
        "rounds": 1,
        "shapes": 2,
        "threads": 1,
        "batch_tokens": 128,
        "vocabulary": 300,
        "pairs": 200,
    }

    def inside(way, precision, options):  # without a process for each
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return module.time_one(way, precision, options)

    monkeypatch.setattr(module, "run_one", inside)
    threads = torch.get_num_threads()
    given = [
        word
        for name, value in sizes.items()
        for word in (f"--{name.replace('_', '-')}", str(value))
    ]
    found = run(module, monkeypatch, capsys, *given, "--precisions", "float32")
    torch.set_num_threads(threads)
    assert [row["system"] for row in found["rows"]] == [
        "ours",
        "Hugging Face Marian",
        "torch.nn.Transformer",
    ]
    assert {ratio["against"] for ratio in found["ratios"]} == {
        "Hugging Face Marian",
        "torch.nn.Transformer",
    }
    assert all(row["tokens_cpu_s"] > 0 and row["MiB"] > 50 for row in found["rows"])


def test_train_cpu_names_the_failed_system(bench, monkeypatch):
    module = bench("train_cpu")
    monkeypatch.setattr(sys, "argv", ["bench/train_cpu.py", "--pairs", "0"])
    monkeypatch.setattr(module, "__file__", str(ROOT / "bench" / "nowhere.py"))
    row = module.run_one("ours", "float32", module.parse_arguments())
    assert "nowhere.py" in row["error"]


def test_a_toolkit_without_cpu_time_is_compared_by_wall_time(bench, capsys):
    ours = {"system": "ours", "precision": "float32", "tokens_s": 30.0, "tokens_cpu_s": 20.0}
    theirs = {"system": "OpenNMT-py", "precision": "float32", "tokens_s": 10.0}
    broken = {"system": "torch.nn.Transformer", "precision": "float32", "error": "none"}
    assert bench("train_cpu").compare([ours, theirs, broken]) == [
        {"against": "OpenNMT-py", "precision": "float32", "clock": 3.0, "cpu": None}
    ]
    assert "3.00 times by wall time\n" in capsys.readouterr().out


def test_publish(bench, monkeypatch, capsys, tmp_path):
    found = run(
        bench("checkpoint_write"),
        monkeypatch,
        capsys,
        "--megabytes",
        "2",
        "--repeats",
        "1",
        "--folder",
        str(tmp_path),
    )
    assert found["bench"] == "checkpoint_write"
    assert found["bytes"] > 1_000_000


def test_words_are_aligned_by_a_dictionary(bench):
    def text(*words: str) -> TokenizedText:
        tokens = [Token(at, f" {word}", (0, 0)) for at, word in enumerate(words)]
        return TokenizedText("", tokens=tokens, words=[(at, at + 1) for at in range(len(words))])

    found = Explanation(
        model={},
        request={},
        source=text("Der", "Mann", "sieht", "rote", "und", "rote", "Hunde."),
        target=text("The", "man", "sees", "red", "and", "red", "dogs."),
    )
    dictionary = {"man": {"mann"}, "red": {"rote"}, "dogs": {"hunde"}, "and": {"oder"}}
    aligned = list(bench("word_alignment").aligned_words(found, dictionary))
    assert aligned == [(1, 1, 2), (6, 6, 7)]  # "red" is ambiguous, "and" has no translation


@pytest.mark.slow  # it compiles
def test_lsh(bench, monkeypatch, capsys):
    found = run(
        bench("lsh"), monkeypatch, capsys, "--device", "cpu", "--lengths", "64", "--repeats", "1"
    )
    assert {row["system"] for row in found["attention"]} >= {"LSH", "full, fused"}


def test_the_couplet_bench_scores_a_model(bench, monkeypatch, capsys, tmp_path):
    kit = importlib.import_module("translator_kit")
    lines = ["春风又绿江南岸", "处处山，家家水", "云开见日"] * 4
    answers = ["明月何时照我还", "人人笑，户户歌", "雨过天晴"] * 4
    for name, texts in (("first", lines), ("second", answers)):
        (tmp_path / name).write_text("".join(f"{text}\n" for text in texts), encoding="utf-8")
    config = kit.CONFIG.replace(text={"tokenizer": "characters"})
    tokenizers = train_tokenizers(lines, answers, config.text)
    model = kit.write_random_bundle(tmp_path / "model", tokenizers)
    files = ["--src", str(tmp_path / "first"), "--ref", str(tmp_path / "second")]
    row = run(bench("couplets"), monkeypatch, capsys, str(model), *files, "--show", "3")
    assert row["constrained"]["any_violation"] == 0
    assert row["constrained"]["equal_length"] == 1.0
    assert row["free"]["lines"] == 12
    assert row["perplexity"] > 1
    pad = bench("couplets").pad
    assert pad("春风", 6) == "春风  "
    assert pad("春风又绿江南岸", 7) == "春风又…"


def test_evaluation_with_reused_states_is_compared_with_a_sliding_window(
    bench, monkeypatch, capsys
) -> None:
    sizes = ("--layers", "1", "--width", "16", "--heads", "2", "--rows", "2", "--repeats", "1")
    printed = run(
        bench("xl_evaluation"), monkeypatch, capsys, "--device", "cpu", "--context", "8", *sizes
    )
    assert [each["rows"] for each in printed["results"]] == [1, 2]
    assert all(each["ratio"] > 0 for each in printed["results"])


def test_the_cost_of_an_explanation_is_timed_by_part(bench, monkeypatch, capsys):
    line = run(
        bench("explain_cost"),
        monkeypatch,
        capsys,
        *("--tokens", "6", "--beam", "2", "--layers", "1", "--width", "16", "--heads", "2"),
        *("--vocab-size", "600", "--repeats", "1"),
    )
    assert line["bench"] == "explain_cost"
    assert {"beam search", "steps", "the whole", "JSON"} <= set(line["seconds"])
    assert line["bytes"] > 1000

"""Other toolkits are installed once and configured for the same model; a failure is one line. Stubs
replace them here.
"""

from __future__ import annotations

import argparse
import importlib
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

ROOT = Path(__file__).resolve().parents[3]
NAMES = ("OpenNMT-py", "eole", "JoeyNMT")


@pytest.fixture
def bench(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT))
    return lambda name: importlib.import_module(f"bench.{name}")


# Installing


@pytest.fixture
def commands(bench, monkeypatch, tmp_path):
    """Collect what would be run, without running it; those that hold a word of `failing` fail."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    run = SimpleNamespace(all=[], failing="", stderr="")

    def instead(command, **settings):
        run.all.append(command)
        if "venv" in command:
            Path(command[-1]).mkdir(parents=True)
        failed = bool(run.failing) and run.failing in command
        return subprocess.CompletedProcess(command, int(failed), "", run.stderr if failed else "")

    monkeypatch.setattr(bench("toolkit_environments").subprocess, "run", instead)
    return run


@pytest.mark.parametrize("name", NAMES)
def test_a_toolkit_is_installed_once_after_our_torch(bench, commands, tmp_path, capsys, name):
    toolkits = bench("toolkit_environments")
    python = toolkits.toolkit_python(name, "2.13.0+cpu")
    assert python.is_relative_to(tmp_path / "dragoman" / "bench")
    making, torch, *others = commands.all
    assert "venv" in making
    assert torch[-1] == "torch==2.13.0"
    assert all(each[0] == str(python) for each in (torch, *others))
    assert any(
        word.endswith(f"=={toolkits.TOOLKITS[name].release}") for each in others for word in each
    )
    assert name in capsys.readouterr().err
    before = len(commands.all)
    assert toolkits.toolkit_python(name, "2.13.0+cpu") == python
    assert len(commands.all) == before
    assert toolkits.toolkit_python(name, "2.12.0") != python  # another torch, another environment


def test_toolkit_that_requires_an_old_torch_is_installed_without_dependencies(bench, commands):
    bench("toolkit_environments").toolkit_python("OpenNMT-py", "2.13.0")
    assert commands.all[-1][-2:] == ["--no-deps", "OpenNMT-py==3.5.1"]


def test_a_failed_installation_is_a_line_and_is_tried_again(bench, commands):
    toolkits = bench("toolkit_environments")
    commands.failing, commands.stderr = (
        "torch==2.13.0",
        "WARNING: Retrying\nERROR: No matching distribution found for torch\n",
    )
    for _ in range(2):
        with pytest.raises(
            toolkits.InstallError,
            match=r"^eole could not be installed: No matching distribution found for torch$",
        ):
            toolkits.toolkit_python("eole", "2.13.0")
    commands.failing = ""
    assert toolkits.toolkit_python("eole", "2.13.0").name == "python"


def test_a_failure_without_a_reason_reports_it(bench, commands):
    commands.failing = "venv"
    with pytest.raises(
        bench("toolkit_environments").InstallError,
        match="JoeyNMT could not be installed: pip gave no reason",
    ):
        bench("toolkit_environments").toolkit_python("JoeyNMT", "2.13.0")


# Training


def job(bench, folder: Path):
    return bench("toolkit_configs").TrainingJob(
        width=48, heads=6, ffn_width=96, layers=3, folder=folder, batch_tokens=77, steps=8
    )


@pytest.mark.parametrize("name", NAMES)
def test_all_toolkits_train_the_same_model(bench, tmp_path, name):
    settings = bench("toolkit_configs")
    command = settings.TOOLKIT_CONFIGS[name].command(Path("python"), job(bench, tmp_path), name)
    task = json.loads(Path(command[-1]).read_text(encoding="utf-8"))
    flat = {}

    def walk(part):
        for key, value in part.items():
            if isinstance(value, dict):
                walk(value)
            else:
                flat.setdefault(key, []).append(value)

    walk(task)
    words = {
        "OpenNMT-py": ("enc_layers", "transformer_ff"),
        "eole": ("layers", "transformer_ff"),
        "JoeyNMT": ("num_layers", "ff_size"),
    }
    assert set(flat["hidden_size"]) == {48}
    assert set(flat[words[name][0]]) == {3}
    assert set(flat[words[name][1]]) == {96}
    assert set(flat.get("heads", []) + flat.get("num_heads", [])) == {6}
    assert flat["batch_size"] == [77]
    assert flat["label_smoothing"] == [0.1]
    assert set(flat.get("train_steps", []) + flat.get("updates", [])) == {8}


def test_texts_are_cut_at_spaces_and_tokens_are_listed(bench, tmp_path):
    job(bench, tmp_path).write(["a", "b"], [["a", "b"], ["b"]], [["b"], ["a"]])
    assert (tmp_path / "train.src").read_text() == "a b\nb\n"
    assert (tmp_path / "train.tgt").read_text() == "b\na\n"
    assert (tmp_path / "vocabulary").read_text() == "a\t1\nb\t1\n"
    assert (tmp_path / "tokens").read_text() == "a\nb\n"


LOGS = {
    "OpenNMT-py": (
        "Step  2/ 6; acc: 0.0; bsz: 1739/1812/110; 117/122 tok/s;  30 sec;\nStep  4/ 6; bsz: "
        "1/2/3; 164/172 tok/s; 50 sec;"
    ),
    "eole": (
        "Step  2/ 4; sents: 25; bsz: 222/ 234/12; 324/342 tok/s; 1 sec;\nStep  4/ 4; bsz:  "
        "222/ 238/16; 8631/9232 tok/s;  1 sec;"
    ),
    "JoeyNMT": (
        "Step: 2, Batch Acc: 0.005479, Tokens per Sec:     2739, Lr: 0.000001\nStep: 4, "
        "Tokens per Sec:      300, Lr: 0.1"
    ),
}


def test_rates_are_read_from_logs(bench):
    wordings = bench("toolkit_configs").TOOLKIT_CONFIGS
    found = {name: wordings[name].rates(log) for name, log in LOGS.items()}
    assert found == {"OpenNMT-py": [239, 336], "eole": [666, 17863], "JoeyNMT": [2739, 300]}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    sys.path.insert(0, str(ROOT))
    try:
        drawn = importlib.import_module("bench.synthetic_corpus")
    finally:
        sys.path.remove(str(ROOT))
    return drawn.synthetic_corpus(tmp_path_factory.mktemp("synthetic_corpus"), 60, vocabulary=300)


@pytest.fixture
def timed(bench, corpus, monkeypatch, tmp_path):
    """Time a toolkit whose command is a line of Python."""
    module, model = bench("toolkit_training"), bench("train_gpu").model_config("tiny")
    monkeypatch.setattr(module, "toolkit_python", lambda name, version: Path(sys.executable))
    options = argparse.Namespace(
        batch_tokens=256, steps=2, rounds=1, pairs=60, vocabulary=300, shapes=2, threads=1
    )

    def time(name: str, line: str):
        toolkit_config = module.TOOLKIT_CONFIGS[name]._replace(arguments=("-c", line))
        monkeypatch.setitem(module.TOOLKIT_CONFIGS, name, toolkit_config)
        return module.time_toolkit(name, corpus, model, 2, options, tmp_path)

    return time


@pytest.mark.parametrize("name", ["OpenNMT-py", "eole"])
def test_a_toolkit_is_timed_by_its_own_reports_after_the_first(timed, name):
    row = timed(name, f"print({LOGS[name]!r})")
    last = {"OpenNMT-py": 336, "eole": 17863}[name]
    assert (row["tokens_s"], row["slowest"]) == (last, last)
    assert row["MiB"] > 1
    assert row["version"]


def test_a_log_of_one_side_counts_for_both(timed, corpus):
    row = timed("JoeyNMT", f"print({LOGS['JoeyNMT']!r})")
    src, tgt = (sum(len(text) + 1 for text in texts) for texts in (corpus.src, corpus.tgt))
    assert row["tokens_s"] == pytest.approx(300 * (src + tgt) / tgt)


def test_a_command_that_fails_is_a_line(timed):
    assert (
        timed("eole", "raise SystemExit('no such option: heads')")["error"]
        == "no such option: heads"
    )
    assert timed("eole", "")["error"] == "it logged no throughput"


def test_a_toolkit_that_cannot_be_installed_is_a_line(timed, bench, monkeypatch):
    module = bench("toolkit_training")

    def fail(name, version):
        raise bench("toolkit_environments").InstallError("eole could not be installed: no network")

    monkeypatch.setattr(module, "toolkit_python", fail)
    assert timed("eole", "")["error"] == "eole could not be installed: no network"


def test_sentences_are_written_in_the_order_of_our_batches(bench, corpus, tmp_path):
    write_corpus = bench("toolkit_training").write_corpus(corpus, job(bench, tmp_path), 300, 2)
    found = [line.split() for line in (tmp_path / "train.src").read_text().splitlines()]
    assert sorted(found) == sorted(list(text) for text in corpus.src)
    assert 0.4 < write_corpus < 0.6
    assert len((tmp_path / "tokens").read_text().splitlines()) == 295


def test_train_cpu_continues_after_a_toolkit_that_failed(bench, monkeypatch, capsys):
    module = bench("train_cpu")
    ours = {
        "system": "ours",
        "precision": "float32",
        "tokens_s": 30.0,
        "slowest": 20.0,
        "tokens_cpu_s": 20.0,
        "MiB": 9.0,
        "padding": 0.1,
    }

    def toolkit(name, *rest):
        row = {"system": name, "precision": "float32"}
        return row | (
            {"error": "no network"}
            if name == "eole"
            else {"tokens_s": 10.0, "slowest": 9.0, "MiB": 7.0}
        )

    monkeypatch.setattr(module, "run_one", lambda *rest: ours)
    monkeypatch.setattr(module, "time_toolkit", toolkit)
    given = [
        "--only",
        "ours",
        "--peers",
        "all",
        "--pairs",
        "60",
        "--vocabulary",
        "300",
        "--precisions",
        "float32",
    ]
    monkeypatch.setattr(sys, "argv", ["bench/train_cpu.py", *given])
    module.main()
    output = capsys.readouterr().out
    found = json.loads(output.splitlines()[-1])
    assert [row["system"] for row in found["rows"]] == ["ours", *NAMES]
    assert {ratio["against"]: ratio["clock"] for ratio in found["ratios"]} == {
        "OpenNMT-py": 3.0,
        "JoeyNMT": 3.0,
    }
    assert "eole                     float32   failed: no network" in output


# Translating: what runs inside a toolkit's own interpreter


def test_a_model_is_made_by_the_toolkits_command_once(bench, monkeypatch, tmp_path):
    translators = bench("toolkit_translators")
    shape = {"width": 8, "heads": 2, "ffn_width": 16, "layers": 1}
    translation_job = translators.TranslationJob(shape, 100, 1, tmp_path)
    toolkit_config = translators.TOOLKIT_CONFIGS["eole"]._replace(
        arguments=("-c", "import sys; open(sys.argv[1] + '.saved', 'x')")
    )
    monkeypatch.setitem(translators.TOOLKIT_CONFIGS, "eole", toolkit_config)
    folder = translators.train_toolkit_model("eole", translation_job)
    assert (folder / "eole.yaml.saved").exists()
    assert len((folder / "tokens").read_text().splitlines()) == 100 - translators.SPECIALS
    assert (
        translators.train_toolkit_model("eole", translation_job) == folder
    )  # a second time it would fail
    monkeypatch.setitem(
        translators.TOOLKIT_CONFIGS,
        "JoeyNMT",
        toolkit_config._replace(arguments=("-c", "raise SystemExit('no space')")),
    )
    with pytest.raises(RuntimeError, match="no space"):
        translators.train_toolkit_model("JoeyNMT", translation_job)


def test_batches_are_padded_with_or_without_an_end(bench):
    translators = bench("toolkit_translators")
    ids, lengths = translators.pad_batch([[7, 8, 9], [5]], end=False)
    assert ids.tolist() == [[7, 8, 9], [5, translators.PAD, translators.PAD]]
    assert lengths.tolist() == [3, 1]
    ids, lengths = translators.pad_batch([[7, 8, 9], [5]], end=True)
    assert ids.tolist() == [
        [7, 8, 9, translators.END],
        [5, translators.END, translators.PAD, translators.PAD],
    ]
    assert lengths.tolist() == [4, 2]

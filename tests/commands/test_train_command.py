"""`dragoman train`: training, resuming, dry runs and errors."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from dragoman.checkpoint.run_directory import RunDirectory
from dragoman.cli.app import main
from dragoman.config import Config
from dragoman.runs.output_directory_and_resume_checks import OutputDirectory

QUICK = {
    "train.steps": "4", "train.warmup_steps": "1", "train.checkpoint_every": "2",
    "train.validate_every": "2", "train.threads": "1",
    "train.keep_checkpoints": "3", "model.width": "16", "model.heads": "2",
    "model.ffn_width": "32", "text.vocab_size": "340",
}  # fmt: skip
Train = Callable[..., int]


@pytest.fixture
def train(corpus: Path, tmp_path: Path) -> Train:
    """Train on the small corpus with small settings; later options replace earlier ones."""

    def run(
        *options: str,
        out: str = "my-model",
        data: bool = True,
        quick: bool = True,
        recipe: str = "tiny",
    ) -> int:
        files = (
            [
                f"--{option}={corpus / file}"
                for option, file in (("src", "train.de"), ("tgt", "train.en"))
            ]
            if data
            else []
        )
        settings = [f"--set={path}={value}" for path, value in QUICK.items()] if quick else []
        named = [f"--recipe={recipe}"] if recipe else []
        cache = [f"--set=data.cache_dir={tmp_path / 'cache'}"] if quick else []
        return main(
            ["train", *files, *named, *settings, *cache, "--out", str(tmp_path / out), *options]
        )

    return run


def errors(capsys: pytest.CaptureFixture[str]) -> list[str]:
    """Return the lines of stderr."""
    return capsys.readouterr().err.splitlines()


def test_two_files_become_a_model(
    train: Train, corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """None of four peers gets from nothing to a translated sentence at the first try."""
    assert (
        train(
            f"--valid-src={corpus / 'dev.de'}",
            f"--valid-tgt={corpus / 'dev.en'}",
            "--src-lang=de",
            "--tgt-lang=en",
        )
        == 0
    )
    captured = capsys.readouterr()
    assert captured.out == "", "a training run's notes are no result"
    assert "parameters" in captured.err
    assert "my-model (" in captured.err
    model = tmp_path / "my-model"
    assert {"card.md", "config.json", "weights.safetensors", "golden.json", "manifest.json"} <= {
        each.name for each in model.iterdir()
    }
    assert main(["translate", "-m", str(model), "Guten Morgen."]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 1
    assert main(["info", str(model)]) == 0
    assert "de to en" in capsys.readouterr().out
    assert main(["verify", str(model)]) == 0


@pytest.mark.parametrize("ending", ["tsv", "csv", "jsonl"])
def test_one_file_of_pairs(ending: str, train: Train, corpus: Path, tmp_path: Path) -> None:
    sides = [
        (corpus / f"train.{language}").read_text(encoding="utf-8").splitlines()
        for language in ("de", "en")
    ]
    rows = list(zip(*sides, strict=True))
    written = {
        "tsv": "".join(f"{s}\t{t}\n" for s, t in rows),
        "csv": "source,target\n" + "".join(f'"{s}","{t}"\n' for s, t in rows),
        "jsonl": "".join(json.dumps({"source": s, "target": t}) + "\n" for s, t in rows),
    }
    path = tmp_path / f"pairs.{ending}"
    path.write_text(written[ending], encoding="utf-8")
    assert train("--pairs", str(path), "--set=train.steps=2", data=False) == 0


def test_the_same_command_again_reports_that_nothing_is_left(
    train: Train, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Resuming "does nothing": the step count is absolute (OpenNMT-py#1364, #886)."""
    assert train("--set=train.steps=2") == 0
    capsys.readouterr()
    assert train("--set=train.steps=2") == 0
    messages = errors(capsys)
    assert any("nothing to do" in line and "all 2 steps done" in line for line in messages)
    assert any("--set train.steps=4" in line for line in messages)
    assert (
        main(["train", "--out", str(tmp_path / "my-model"), "--resume", "--set", "train.steps=4"])
        == 0
    )
    assert "my-model (" in capsys.readouterr().err
    assert (
        max(int(each.name[5:]) for each in (tmp_path / "my-model" / "training").glob("step-*")) == 4
    )


def test_resume_needs_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--out", str(tmp_path / "nothing"), "--resume"]) == 2
    (line,) = errors(capsys)
    assert f"found no run in {tmp_path / 'nothing'}; leave out --resume to start one" in line
    assert not (tmp_path / "nothing").exists()


def test_resume_starts_nothing(
    train: Train, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`--resume` where there was no run started a new one."""
    (tmp_path / "my-model").mkdir()
    assert train("--resume") == 2
    (line,) = errors(capsys)
    assert "my-model; leave out --resume to start one" in line
    assert not list((tmp_path / "my-model").iterdir())
    training = tmp_path / "my-model" / "training"
    training.mkdir()
    (training / "run.json").write_text('{"run_id": "a process was killed while it prepared"}')
    assert main(["train", "--out", str(tmp_path / "my-model"), "--resume"]) == 2
    assert ": it was stopped during data preparation; leave out --resume" in errors(capsys)[-1]
    assert train("--resume", "--set=train.steps=1") == 0, "the same command again starts it"


def test_several_corpora_one_after_the_other(
    train: Train, corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`--src A --src B` silently dropped A."""
    more = [f"--src={corpus / 'dev.de'}", f"--tgt={corpus / 'dev.en'}"]
    assert train(*more, "--set=train.steps=1") == 0
    messages = errors(capsys)
    assert f"corpus 1 of 2: {corpus / 'train.de'}, {corpus / 'train.en'}: 60 pairs" in messages
    assert f"corpus 2 of 2: {corpus / 'dev.de'}, {corpus / 'dev.en'}: 6 pairs" in messages
    config = json.loads((tmp_path / "my-model" / "training" / "config.json").read_text())
    assert [Path(name).name for name in config["data"]["src"]] == ["train.de", "dev.de"]
    assert train(more[0], out="other") == 2
    assert "must name equally many files; found 2 (" in errors(capsys)[-1]
    bad = tmp_path / "bad.en"
    bad.write_bytes(b"\xff\n" * 6)
    assert train(more[0], f"--tgt={bad}", out="other") == 2
    assert f"{bad} line 1 must be UTF-8" in errors(capsys)[-1]


def test_a_stop_is_no_error(
    train: Train,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Ctrl-C ended with an error that explained what training is."""
    from dragoman.runtime import signals

    signals.uninstall_handlers()
    try:
        signals.request_stop("SIGINT")
        assert train() == 75
    finally:
        signals.uninstall_handlers()
    assert (
        errors(capsys)[-1]
        == "dragoman: stopped by SIGINT while preparing, before training; run the same command "
        "again"
    )


def test_settings_that_define_the_run_may_not_change(
    train: Train, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train("--set=train.steps=2") == 0
    capsys.readouterr()
    assert train("--set=model.width=32", "--resume") == 2
    (line,) = errors(capsys)
    assert "model.width cannot change in the run" in line
    assert "found 32 instead of 16" in line


@pytest.mark.parametrize(
    "options",
    [
        ["--resume"],
        ["--train", "labels.jsonl"],
        ["--train", "labels.jsonl", "--resume"],
        ["--recipe", "kim2014", "--train", "labels.jsonl"],
    ],
)
def test_the_task_of_a_run_may_not_change(
    options: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output_dir = OutputDirectory(tmp_path / "my-model")
    output_dir.training.mkdir(parents=True)
    output_dir.write(Config(), Config(), [])
    task = [] if "--recipe" in options else ["--task", "classify"]
    assert main(["train", "--out", str(output_dir.path), *task, *options]) == 2
    (line,) = errors(capsys)
    assert f"the task cannot change in the run in {output_dir.path}; found classify" in line
    assert "instead of translate; choose another --out" in line


def test_a_dry_run_writes_nothing_and_reports_an_estimate(
    train: Train, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train("--dry-run") == 0
    err = capsys.readouterr().err
    assert "nothing was trained" in err
    assert "memory" in err
    assert "4 steps" in err
    assert "prepared data is cached" in err
    assert str(tmp_path / "cache" / "store-") in err
    assert not (tmp_path / "my-model").exists()


def test_averaging_its_checkpoints(
    train: Train, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The average is of the weights, not of their EMA, which would reach too far back."""
    assert train("--set=train.ema_decay=0.9") == 0
    capsys.readouterr()
    assert (
        main(
            [
                "average",
                str(tmp_path / "my-model"),
                "--last",
                "2",
                "--out",
                str(tmp_path / "averaged"),
            ]
        )
        == 0
    )
    assert "the average of steps 4, 2" in capsys.readouterr().out
    run = RunDirectory(tmp_path / "my-model" / "training")
    saved = [run.open_step(step) for step in (2, 4)]
    assert all(checkpoint.load_ema() for checkpoint in saved)
    first, last = (checkpoint.load_weights() for checkpoint in saved)
    averaged = load_file(tmp_path / "averaged" / "weights.safetensors")
    assert json.loads((tmp_path / "averaged" / "manifest.json").read_text())["steps"] == 4
    assert averaged.keys() == first.keys()
    for name, weight in averaged.items():
        torch.testing.assert_close(weight, (first[name] + last[name]) / 2)
    assert main(["translate", "-m", str(tmp_path / "averaged"), "Guten Morgen."]) == 0
    capsys.readouterr()
    assert (
        main(
            ["average", str(tmp_path / "my-model"), "--last", "9", "--out", str(tmp_path / "more")]
        )
        == 2
    )
    assert "found 2 in" in capsys.readouterr().err
    assert main(["average", str(tmp_path), "--out", str(tmp_path / "more")]) == 2
    assert "must hold the run" in capsys.readouterr().err


def test_a_run_without_its_text_is_continued_by_resume(
    train: Train, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A command of two words must not end in sixteen problems."""
    assert train("--set=train.steps=1", out="a model") == 0
    assert f"dragoman translate -m '{tmp_path / 'a model'}'" in capsys.readouterr().err, (
        "ready to be copied"
    )
    assert main(["train", "--out", str(tmp_path / "a model")]) == 2
    (line,) = errors(capsys)
    assert "add --resume to resume it" in line


def test_a_settings_file(train: Train, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(
        "recipe: tiny\nmodel:\n  widht: 16\ntrain:\n  steps: many\nsteps: 3\n", encoding="utf-8"
    )
    assert train("--config", str(path), quick=False, recipe="") == 2
    lines = errors(capsys)
    assert lines[0].endswith("3 problems in the configuration:")
    text = "\n".join(lines)
    assert "there is no setting model.widht; did you mean model.width?" in text
    assert "train.steps must be" in text
    assert "found 'many'" in text
    assert "did you mean train.steps?" in text, (
        "a key at the wrong level is answered with where it belongs"
    )


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--set=model.width=100", "--set=model.heads=8"], "found 8 and 100; try model.heads=5"),
        (["--set=model.widht=100"], "there is no setting model.widht; did you mean model.width?"),
        (["--set=model.width=wide"], "found 'wide'"),
        (["--set=width"], "found 'width'"),
        (["--set=text.vocab_size=100"], "found 100"),
        (["--recipe=vaswani"], "there is no recipe named 'vaswani'"),
        (["--budget=soon"], "found 'soon'"),
        (["--tgt=nowhere.en"], "nowhere.en"),
        (["--pairs=p.tsv"], "keep one form"),
        (["--device=tpu"], "found 'tpu'"),
        (["--config=nowhere.yaml"], "nowhere.yaml"),
    ],
)
def test_user_error_is_one_line_and_nothing_is_written(
    options: list[str], words: str, train: Train, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train(*options) == 2
    (line,) = [line for line in errors(capsys) if line.startswith("dragoman: error")]
    assert words in line
    assert not (tmp_path / "my-model" / "manifest.json").exists()


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "must"),
        (b"one line\n", "found 1 and 60"),
        ("Grüße\n".encode("latin1") * 60, "line 1 must be UTF-8"),
        (b"nul\x00byte\n" * 60, "found a NUL byte"),
        ("text\n".encode("utf-16") * 60, "must be UTF-8"),
    ],
)
def test_a_bad_file_is_named_with_its_problem(
    content: bytes,
    words: str,
    train: Train,
    corpus: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Wrong encodings and counts are explained (OpenNMT-py#1879, code-docstring-corpus#12)."""
    path = tmp_path / "bad.de"
    path.write_bytes(content)
    assert train("--src", str(path), "--tgt", str(corpus / "train.en"), data=False) == 2
    (line,) = [line for line in errors(capsys) if line.startswith("dragoman: error")]
    assert words in line
    assert "bad.de" in line


def test_a_vocabulary_larger_than_the_text_allows(
    train: Train, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train("--set=text.vocab_size=30000") == 2
    (line,) = [line for line in errors(capsys) if line.startswith("dragoman: error")]
    assert "text.vocab_size" in line
    assert "30000" in line.replace(",", "")


def test_no_text_at_all(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--out", str(tmp_path / "m")]) == 2
    (line,) = errors(capsys)
    assert "found neither --src and --tgt nor --pairs" in line


def test_a_directory_with_other_things_in_it_is_left_alone(
    train: Train, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "my-model"
    folder.mkdir()
    (folder / "thesis.tex").write_text("everything")
    assert train() == 2
    (line,) = [line for line in errors(capsys) if line.startswith("dragoman: error")]
    assert "thesis.tex" in line
    assert [each.name for each in folder.iterdir()] == ["thesis.tex"]


def test_with_nothing_named_a_model_is_fitted_and_the_choice_explained(
    train: Train, corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Defaults are sized to the data: 10 k lines must not get 61 M weights (eole's quickstart)."""
    settings = [
        "--set=train.threads=1",
        "--set=train.steps=2",
        f"--set=data.cache_dir={tmp_path / 'cache'}",
    ]
    assert train(*settings, "--dry-run", quick=False, recipe="") == 0
    err = capsys.readouterr().err
    assert "corpus: 58 sentence pairs" in err, "two of sixty are held out for validation"
    assert "vocabulary size: " in err
    assert "size: width 128" in err


def test_a_miniature_of_a_recipe(train: Train, tmp_path: Path) -> None:
    """Precedence: --set, then the miniature, then the recipe."""
    options = [
        "--mini",
        "--set=train.steps=2",
        "--set=train.threads=1",
        f"--set=data.cache_dir={tmp_path / 'cache'}",
    ]
    assert train(*options, quick=False, recipe="bahdanau2015") == 0
    config = json.loads((tmp_path / "my-model" / "config.json").read_text())
    assert (config["recipe"], config["text"]["tokenizer"], config["model"]["width"]) == (
        "bahdanau2015",
        "characters",
        64,
    )
    assert config["train"]["steps"] == 2


def test_a_miniature_needs_a_recipe(train: Train, capsys: pytest.CaptureFixture[str]) -> None:
    assert train("--mini", recipe="") == 2
    assert "found no --recipe; add one of `dragoman recipes`" in errors(capsys)[-1]

"""`dragoman evaluate` and `dragoman compare`: scores, signatures and significance."""

from __future__ import annotations

import io
import json
import shutil
import sys
from pathlib import Path

import pytest
import sacrebleu

from dragoman.cli.app import main
from dragoman.cli.compare_by_bootstrap import short_names


@pytest.fixture
def files(tmp_path: Path) -> dict[str, Path]:
    """Write a reference and two systems' outputs."""
    references = [
        f"The {animal} number {n} sleeps on the old mat."
        for n, animal in enumerate(["cat", "dog", "bird"] * 10)
    ]
    texts = {
        "ref": references,
        "good": references,
        "bad": [line.replace("sleeps on", "is lying at") for line in references],
    }
    for name, lines in texts.items():
        (tmp_path / name).write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return {name: tmp_path / name for name in texts}


def evaluate(bundle: Path, src: Path, ref: Path, *options: str) -> int:
    """Run `dragoman evaluate` on a test set; return its exit code."""
    return main(["evaluate", str(bundle), "--src", str(src), "--ref", str(ref), *options])


def compare(files: dict[str, Path], *options: str) -> int:
    """Run `dragoman compare` on both systems; return its exit code."""
    systems = [str(files["bad"]), str(files["good"])]
    return main(["compare", "--ref", str(files["ref"]), *systems, *options])


def test_scores_with_signatures_and_speed(
    bundle: Path, corpus: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """sacreBLEU on detokenized text with its signature (fairseq#2593, #3245, #5064)."""
    assert evaluate(bundle, corpus / "dev.de", corpus / "dev.en") == 0
    out = capsys.readouterr().out
    assert f"nrefs:1|case:mixed|eff:no|tok:13a|smooth:exp|version:{sacrebleu.__version__}" in out
    assert all(name in out for name in ("BLEU", "chrF2", "TER", "sentences/s"))


def test_json_and_kept_translations(
    bundle: Path, corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kept = tmp_path / "out.txt"
    options = [
        "--src",
        str(corpus / "dev.de"),
        "--ref",
        str(corpus / "dev.en"),
        "--hyp",
        str(kept),
        "--lowercase",
        "--tokenize",
        "intl",
    ]
    assert main(["evaluate", str(bundle), *options, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    lines = kept.read_text(encoding="utf-8").split("\n")[:-1]
    references = (corpus / "dev.en").read_text(encoding="utf-8").split("\n")[:-1]
    assert len(lines) == found["sentences"] == len(references)
    expected = sacrebleu.corpus_bleu(lines, [references], lowercase=True, tokenize="intl").score
    assert found["scores"]["BLEU"]["score"] == pytest.approx(expected)
    assert "case:lc" in found["scores"]["BLEU"]["signature"]
    assert found["speed"]["sentences_per_second"] > 0


def test_a_set_of_unequal_files_is_reported_before_translating(
    bundle: Path, corpus: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert evaluate(bundle, corpus / "dev.de", corpus / "train.en") == 2
    err = capsys.readouterr().err
    assert "found 6 and 60" in err
    assert len(err.splitlines()) == 1


@pytest.mark.parametrize("option", ["--src", "--ref"])
def test_a_file_that_is_not_there(
    option: str, bundle: Path, corpus: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = {
        "--src": str(corpus / "dev.de"),
        "--ref": str(corpus / "dev.en"),
        option: "nowhere.txt",
    }
    assert main(["evaluate", str(bundle), *(part for pair in paths.items() for part in pair)]) == 2
    err = capsys.readouterr().err
    assert "nowhere.txt" in err
    assert len(err.splitlines()) == 1


def test_an_unknown_tokenizer_before_any_work(
    bundle: Path, corpus: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert evaluate(bundle, corpus / "dev.de", corpus / "dev.en", "--tokenize", "13b") == 2
    assert "found '13b'; did you mean 13a?" in capsys.readouterr().err


def test_compare_reports_significance_and_changed_sentences(
    files: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    assert compare(files, "--samples", "100", "--show", "2") == 0
    out = capsys.readouterr().out
    assert "baseline" in out
    assert "significant" in out
    assert "bs:100" in out
    assert out.count("\nline ") == 2
    assert "is lying at" in out


def test_compare_as_json(files: dict[str, Path], capsys: pytest.CaptureFixture[str]) -> None:
    assert compare(files, "--samples", "50", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert {each["metric"] for each in found["results"]} == {"BLEU", "chrF2", "TER"}
    assert len(found["moved"]) == 10


def test_compare_translates_with_models(
    bundle: Path, corpus: Path, files: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    reference, source = corpus / "dev.en", corpus / "dev.de"
    assert (
        main(
            [
                "compare",
                "--ref",
                str(reference),
                "--src",
                str(source),
                str(bundle),
                str(reference),
                "--samples",
                "50",
            ]
        )
        == 0
    )
    assert "100.00" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("names", "words"),
    [
        (["bad"], "found 1; name at least two"),
        (["bad", "bad"], "each system must be named once"),
        (["bad", "nowhere"], "nowhere"),
    ],
)
def test_incomparable_inputs(
    names: list[str], words: str, files: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    paths = [str(files.get(name, Path("nowhere"))) for name in names]
    assert main(["compare", "--ref", str(files["ref"]), *paths]) == 2
    err = capsys.readouterr().err
    assert words in err
    assert len(err.splitlines()) == 1


def test_a_model_without_a_source(
    bundle: Path, files: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["compare", "--ref", str(files["ref"]), str(bundle), str(files["good"])]) == 2
    assert "needs --src to translate" in capsys.readouterr().err


@pytest.fixture
def chinese(tmp_path: Path, corpus: Path) -> Path:
    """Write Chinese references for the sources of the small corpus."""
    lines = [
        "早上好。",
        "一只狗在雪地里跑。",
        "两个男人在说话。",
        "这是一座房子。",
        "一个女人在看书。",
        "孩子们在公园里玩。",
    ]
    (tmp_path / "dev.zh").write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return tmp_path / "dev.zh"


@pytest.mark.parametrize(
    ("options", "tokenizer", "words"),
    [
        (
            ["--tgt-lang", "und"],
            "zh",
            "BLEU tokenizer zh: the references are written in Chinese script",
        ),
        (["--tgt-lang", "zh-TW"], "zh", "BLEU tokenizer zh: the target language is zh-TW"),
        (
            ["--tgt-lang", "de"],
            "13a",
            "the target language is de, but the references are written in Chinese script",
        ),
    ],
)
def test_the_tokenizer_is_chosen_and_reported(
    options: list[str],
    tokenizer: str,
    words: str,
    bundle: Path,
    corpus: Path,
    chinese: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert evaluate(bundle, corpus / "dev.de", chinese, *options) == 0
    captured = capsys.readouterr()
    assert f"tok:{tokenizer}|" in captured.out
    assert words in captured.err
    assert (
        main(
            [
                "compare",
                "--ref",
                str(chinese),
                str(chinese),
                str(corpus / "dev.en"),
                "--samples",
                "50",
                *options,
            ]
        )
        == 0
    )
    captured = capsys.readouterr()
    assert f"tok:{tokenizer}|" in captured.out
    assert words in captured.err


def test_outputs_are_checked_before_any_work(
    corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Translations were lost when --hyp named a folder that was not there."""
    files = ["--src", str(corpus / "dev.de"), "--ref", str(corpus / "dev.en")]
    model = tmp_path / "damaged-model"
    model.mkdir()
    (model / "manifest.json").write_text("no JSON")
    (model / "config.json").write_text("{}")
    for hyp, words in (
        (
            tmp_path / "missing" / "out.txt",
            f"--hyp must be in an existing directory; found no {tmp_path / 'missing'}",
        ),
        (corpus / "dev.en", "--hyp must not be a file that the command reads"),
        (tmp_path, f"--hyp must name a file; found the directory {tmp_path}"),
    ):
        assert main(["evaluate", str(model), *files, "--hyp", str(hyp)]) == 2
        err = capsys.readouterr().err
        assert words in err
        assert len(err.splitlines()) == 1


@pytest.mark.parametrize(
    "command",
    [
        ["average", "{model}"],
        ["demo"],
        ["import", "{model}"],
        ["export", "{model}", "--to", "onnx"],
    ],
)
def test_a_directory_below_a_file_is_reported_before_any_work(
    command: list[str], bundle: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("x")
    arguments = [each.format(model=bundle) for each in command]
    assert main([*arguments, "--out", str(tmp_path / "file" / "model")]) == 2
    err = capsys.readouterr().err
    assert f"must be in a directory; found a file at {tmp_path / 'file'}" in err
    assert len(err.splitlines()) == 1


def test_compare_opens_every_system_before_it_translates(
    bundle: Path,
    corpus: Path,
    files: dict[str, Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    damaged = Path(shutil.copytree(bundle, tmp_path / "damaged"))
    (damaged / "weights.safetensors").write_bytes(b"no weights")
    options = ["--ref", str(corpus / "dev.en"), "--src", str(corpus / "dev.de"), "--samples", "50"]
    for second, code, words in (
        (damaged, 65, "weights.safetensors"),
        (tmp_path / "nowhere", 2, "nowhere must exist"),
        (files["good"], 2, "must have as many lines as the reference; found 30 and 6"),
    ):
        assert main(["compare", *options, str(bundle), str(second)]) == code
        err = capsys.readouterr().err
        assert words in err
        assert "translating" not in err, "nothing was translated in vain"
    assert main(["compare", *options, str(bundle)]) == 2
    assert "found 1; name at least two" in capsys.readouterr().err
    assert main(["compare", *options, "--by", "ter", str(bundle), str(corpus / "dev.en")]) == 2
    assert "--by must be chrf or bleu; found 'ter'" in capsys.readouterr().err


def test_compare_names_the_systems(
    bundle: Path, corpus: Path, files: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--ref", str(files["ref"]), "--samples", "50", "--show", "1"]
    assert main(["compare", *options, str(files["bad"]), str(files["good"])]) == 0
    out = capsys.readouterr().out
    assert "from bad to good" in out
    assert "\n  bad        The" in out
    assert "\n  good       The" in out
    assert main(["compare", *options, "--json", str(files["bad"]), str(files["good"])]) == 0
    assert {each["system"] for each in json.loads(capsys.readouterr().out)["results"]} == {
        str(files["bad"]),
        str(files["good"]),
    }


@pytest.mark.parametrize(
    ("paths", "names"),
    [
        (["runs/a", "runs/b"], ["a", "b"]),
        (["a/model", "b/model"], ["a/model", "b/model"]),
        (["x/a/m", "y/a/m", "m"], ["x/a/m", "y/a/m", "m"]),
    ],
)
def test_short_names_distinguish_systems(paths: list[str], names: list[str]) -> None:
    assert short_names([Path(path) for path in paths]) == names


def test_evaluate_shows_progress_on_a_terminal_alone(
    bundle: Path, corpus: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setattr("dragoman.cli.command_progress_bar.DELAY_SECONDS", 0.0)
    screen = Terminal()
    arguments = [
        "evaluate",
        str(bundle),
        "--src",
        str(corpus / "dev.de"),
        "--ref",
        str(corpus / "dev.en"),
        "--json",
    ]
    assert main(arguments) == 0
    captured = capsys.readouterr()
    assert "translating" not in captured.err
    monkeypatch.setattr(sys, "stderr", screen)
    assert main(arguments) == 0
    assert json.loads(capsys.readouterr().out)["scores"] == json.loads(captured.out)["scores"]
    assert "translating" in screen.getvalue()

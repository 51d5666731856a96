"""Models of several directions: training, translating, scoring, explaining, fine-tuning."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path

import numpy as np
import pytest

from dragoman.bundle import Bundle
from dragoman.cli.app import main
from dragoman.explain.calibration_and_output_distribution import measure_pairs
from dragoman.inference import Translator
from dragoman.text.sentencepiece_tokenizer import load_tokenizers

SETTINGS = {
    "train.steps": "120", "train.warmup_steps": "20", "train.checkpoint_every": "60",
    "train.validate_every": "60", "train.threads": "1", "train.batch_tokens": "600",
    "train.learning_rate": "0.01", "model.width": "32", "model.heads": "2",
    "model.ffn_width": "64", "model.encoder": "[transformer*1]",
    "model.decoder": "[transformer*1]", "model.dropout": "0", "text.tokenizer": "characters",
    "train.precision": "float32",
}  # fmt: skip
LETTERS = "abcdefgh"


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write three languages: aa in small letters, bb the same in capitals, cc as digits."""
    folder, draw = tmp_path_factory.mktemp("languages"), random.Random(5)
    digits = str.maketrans(LETTERS, "12345678")
    for name, count in (("train", 400), ("dev", 12)):
        words = ["".join(draw.choices(LETTERS, k=draw.randint(2, 4))) for _ in range(count)]
        texts = {
            "aa": words,
            "bb": [word.upper() for word in words],
            "cc": [word.translate(digits) for word in words],
        }
        for language, lines in texts.items():
            (folder / f"{name}.{language}").write_text("\n".join(lines) + "\n")
    return folder


def train(corpus: Path, out: Path, *options: str, valid: bool = True) -> int:
    cache = f"data.cache_dir={out.parent / 'cache'}"
    settings = [f"--set={path}={value}" for path, value in SETTINGS.items()]
    pairs = [
        argument
        for languages in ("aa-bb", "aa-cc")
        for option, name in (("--pair", "train"), ("--valid-pair", "dev"))
        if valid or option == "--pair"
        for argument in (
            option,
            languages,
            *(str(corpus / f"{name}.{each}") for each in languages.split("-")),
        )
    ]
    return main(
        [
            *("train", "--out", str(out), "--recipe", "tiny", *settings, "--set", cache),
            *([] if "--init-from" in options else pairs),
            *options,
        ]
    )


@pytest.fixture(scope="module")
def model(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train four directions."""
    out = tmp_path_factory.mktemp("multilingual") / "model"
    assert train(corpus, out, "--both-directions") == 0
    return out


def scripts(texts: list[str]) -> list[str]:
    """Return the language of each text, by its characters: a short training writes wrong words."""
    known = {"aa": LETTERS, "bb": LETTERS.upper(), "cc": "12345678"}
    return [
        next((name for name, letters in known.items() if text and not set(text) - set(letters)), "")
        for text in texts
    ]


def output(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = main(list(arguments))
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_the_tag_decides_the_target_language(model: Path) -> None:
    translator = Translator.load(model, device="cpu")
    words = ["abc", "fed", "hh", "gab"]
    assert translator.directions == ["aa-bb", "bb-aa", "aa-cc", "cc-aa"]
    for language in ("bb", "cc"):
        found = translator.translate(words, target_language=language)
        assert scripts(found) == [language] * 4
    # Backwards there is one target language, and each source is identified.
    assert scripts(translator.translate(["ABC", "654"])) == ["aa", "aa"]
    assert translator.identify_languages(["FED", "712", "hab"]) == ["bb", "cc", "aa"]
    assert "aa-bb, bb-aa, aa-cc, cc-aa" in repr(translator)


def test_engines_read_the_tag(model: Path) -> None:
    words = ["abc", "fed"]
    for options in ({"engine": "native"}, {"precision": "int8"}, {"target_language": "cc"}):
        translator = Translator.load(model, device="cpu", **options)
        found = translator.translate(words, source_language="aa", target_language="bb")
        assert scripts(found) == ["bb", "bb"]


def test_every_segment_of_a_long_line_begins_with_the_tag(model: Path) -> None:
    translator = Translator.load(model, device="cpu")
    [found] = translator.stream(["abc\nfed"], target_language="bb")
    assert scripts(found.text.split("\n")) == ["bb", "bb"]
    assert [token for token in found.src_tokens if token.startswith("<2")] == ["<2bb>"] * 2
    assert (found.source_language, found.target_language) == ("aa", "bb")


def test_the_directory_has_directions_tags_and_an_identifier(model: Path) -> None:
    bundle = Bundle.load(model)
    assert bundle.manifest["directions"] == ["aa-bb", "bb-aa", "aa-cc", "cc-aa"]
    assert bundle.tokenizers.src.tag_ids == {"aa": 4, "bb": 5, "cc": 6}
    assert bundle.identifier is not None
    assert (model / "text" / "language_id.npy").stat().st_size < 60_000
    assert {case["target_language"] for case in bundle.golden["cases"]} == {"aa", "bb", "cc"}
    assert all(case["src"][0] in (4, 5, 6) for case in bundle.golden["cases"])
    card = (model / "card.md").read_text()
    assert "Multilingual translator: aa-bb, bb-aa, aa-cc, cc-aa" in card
    assert "validation set aa-cc, all 12 pairs" in card
    assert "pairs by direction" in card


def test_training_reports_the_pairs_of_each_direction(
    corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train(corpus, tmp_path / "model", "--dry-run") == 0
    lines = capsys.readouterr().err.splitlines()
    assert "pairs of each direction: aa-bb 400, aa-cc 400" in lines
    assert "validation pairs of each direction: aa-bb 12, aa-cc 12" in lines


def test_validation_reports_each_direction_and_the_mean(model: Path) -> None:
    lines = (model / "training" / "log.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    [*_, last] = [each for each in records if each.get("event") == "validation"]
    losses = [last[f"loss_{name}"] for name in ("aa-bb", "bb-aa", "aa-cc", "cc-aa")]
    assert last["loss"] == pytest.approx(np.mean(losses))
    assert last["bleu"] == pytest.approx(
        np.mean([last[f"bleu_{name}"] for name in ("aa-bb", "bb-aa", "aa-cc", "cc-aa")])
    )


def test_translate_names_and_detects_languages(
    model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, _ = output(capsys, "translate", "-m", str(model), "--to", "cc", "--json", "abc")
    found = json.loads(out)
    assert code == 0
    assert scripts([found["text"]]) == ["cc"]
    assert (found["source_language"], found["target_language"]) == ("aa", "cc")
    code, out, _ = output(capsys, "translate", "-m", str(model), "--from", "bb", "ABC")
    assert (code, scripts([out.strip()])) == (0, ["aa"])


@pytest.mark.parametrize(
    ("lines", "direction", "found"),
    [
        (["FEDCBA", "HGFEDC", "abc"], ("--to", "bb"), "warning: 2 of the first 3 lines of"),
        (["FEDCBA", "HGFEDC"], ("--from", "aa", "--to", "bb"), "warning: 2 of the first 2 lines"),
        (["你好"], ("--to", "bb"), "warning: 1 of the first 1 line of"),
        (["876543", "1357"], ("--to", "bb"), "warning: 2 of the first 2 lines"),
        (["FEDCBA", "abc", "", "hgf"], ("--to", "bb"), ""),
    ],
)
def test_augment_warns_of_text_in_the_wrong_language(
    model: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    lines: list[str],
    direction: tuple[str, ...],
    found: str,
) -> None:
    text = tmp_path / "text"
    text.write_text("\n".join(lines) + "\n", encoding="utf-8")
    outputs = ["--output-src", str(tmp_path / "s"), "--output-tgt", str(tmp_path / "t")]
    code, _, err = output(
        capsys, "augment", "-m", str(model), "--method", "forward-translation",
        "--input", str(text), *direction, *outputs,
    )  # fmt: skip
    assert code == 0
    assert ("warning" in err) == bool(found)
    assert found in err


def test_a_note_names_the_first_line_that_is_in_the_target_language(
    model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["translate", "-m", str(model), "--to", "bb"]
    lines = ["abc", "FEDCBA", "", "HGFEDC"]
    code, out, err = output(capsys, *command, *lines)
    notes = [line for line in err.splitlines() if "target language" in line]
    assert code == 0
    assert notes == [
        "dragoman: line 2 seems to be in bb, the target language; such lines are translated as if "
        "they were in aa: --to names another target, --from the source"
    ]
    assert output(capsys, *command, "--from", "aa", *lines)[:2] == (0, out), "the same output"
    for quiet in (["--quiet", *lines], ["--from", "aa", *lines], ["abc", "hgf"]):
        assert "target language" not in output(capsys, *command, *quiet)[2]
    _, out, err = output(capsys, *command, "--json", "FEDCBA")
    assert "line 1 seems to be in bb" in err
    found = json.loads(out)
    assert "other_language" not in found
    assert not any("target language" in note for note in found["notes"])


def test_a_note_names_the_first_line_that_has_no_direction_to_the_target(
    model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _, _, err = output(capsys, "translate", "-m", str(model), "--to", "bb", "abc", "6543", "8765")
    assert [line for line in err.splitlines() if "seems to be" in line] == [
        "dragoman: line 2 seems to be in cc, which the model does not translate into bb; such "
        "lines are translated as if they were in aa: --to names another target, --from the source"
    ]


def test_score_and_evaluate_warn_of_text_in_the_wrong_language(
    model: Path, corpus: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for source, is_wrong in (("aa", False), ("bb", True), ("cc", True)):
        files = [str(corpus / f"dev.{name}") for name in (source, "bb")]
        for command in (
            ["evaluate", str(model), "--src", files[0], "--ref", files[1]],
            ["score", "-m", str(model), "--src", files[0], "--tgt", files[1]],
        ):
            code, _, err = output(capsys, *command, "--to", "bb", "--quiet")
            assert code == 0
            assert (f"of the first 12 lines of {files[0]} are in another language" in err) is (
                is_wrong
            )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["abc"], "which the model translates into bb and cc; add --to bb or --to cc"),
        (["--to", "zz", "abc"], "its directions are aa-bb, bb-aa, aa-cc, cc-aa"),
        (["--to", "cc", "--from", "bb", "ABC"], "found --from 'bb' and --to 'cc'"),
    ],
)
def test_directions_that_it_does_not_have_are_listed(
    model: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    code, out, err = output(capsys, "translate", "-m", str(model), *arguments)
    assert (code, out) == (2, "")
    assert message in err


def test_a_model_of_one_direction_has_no_other(
    bundle: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, _, err = output(capsys, "translate", "-m", str(bundle), "--to", "fr", "Hund")
    assert code == 2
    assert "found 'fr' for a model of de-en only; leave it out" in err
    code, out, _ = output(
        capsys, "translate", "-m", str(bundle), "--to", "en", "--from", "de", "--json", "Hund"
    )
    assert code == 0
    assert "source_language" not in json.loads(out)


def test_score_evaluate_explain_and_doctor(
    model: Path, corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = {name: str(corpus / f"dev.{name}") for name in ("aa", "bb", "cc")}
    scores = {}
    for to in ("bb", "cc"):
        code, out, _ = output(
            capsys,
            *("score", "-m", str(model), "--src", files["aa"], "--tgt", files["bb"], "--to", to),
        )
        assert code == 0
        scores[to] = sum(map(float, out.split()))
    assert scores["bb"] > scores["cc"] + 50  # the target is bb
    code, out, _ = output(
        capsys,
        *("evaluate", str(model), "--src", files["aa"], "--ref", files["cc"], "--to", "cc"),
        "--json",
    )
    assert code == 0
    assert '"chrF2"' in out
    code, out, _ = output(capsys, "explain", "-m", str(model), "--to", "cc", "--json", "abc")
    assert code == 0
    found = json.loads(out)
    assert found["request"]["source_lang"] == "aa"
    assert found["request"]["target_lang"] == "cc"
    first = found["source"]["tokens"][0]
    assert (first["text"], first["special"], first["span"]) == ("<2cc>", True, [0, 0])
    code, out, _ = output(capsys, "doctor", str(model))
    assert code == 0
    assert "FAIL" not in out


def test_branches_and_ablations_keep_the_direction(model: Path) -> None:
    translator = Translator.load(model, device="cpu")
    explanation = translator.explain("abc", target_language="cc")
    assert scripts([explanation.target.text]) == ["cc"]
    ablation = translator.ablate(explanation, [f"{explanation.sites[0].id}.0"])
    assert set(ablation.target.text) <= set("12345678")
    branch = translator.branch(explanation, 1, explanation.target.tokens[0].id)
    assert branch.source.tokens[0].text == "<2cc>"


def test_one_direction_is_tuned_further(
    model: Path, corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Bidirectional pre-training: a model of both directions, then one of them."""
    out = tmp_path / "tuned"
    arguments = ["--init-from", str(model), "--pair", "aa-bb"]
    arguments += [str(corpus / "train.aa"), str(corpus / "train.bb"), "--set", "train.steps=2"]
    assert main(["train", "--out", str(out), *arguments]) == 0
    tuned = Bundle.load(out)
    assert tuned.config.data.directions == ("aa-bb",)
    assert tuned.identifier is None
    assert tuned.tokenizers.src.tag_ids == {"aa": 4, "bb": 5, "cc": 6}
    capsys.readouterr()
    code, text, _ = output(capsys, "translate", "-m", str(out), "abc")
    assert (code, scripts([text.strip()])) == (0, ["bb"])
    # A language that the vocabulary has no tag for.
    arguments[3] = "aa-zz"
    assert main(["train", "--out", str(tmp_path / "other"), *arguments]) == 2
    assert "found 'zz'; the languages are aa, bb, cc" in capsys.readouterr().err


@pytest.mark.parametrize("pairs", [True, False])
def test_one_direction_is_tuned_on_files_of_two_languages(
    model: Path, corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], pairs: bool
) -> None:
    sides = [(corpus / f"train.{language}").read_text().splitlines() for language in ("aa", "bb")]
    memory = tmp_path / "memory.tsv"
    memory.write_text("".join(f"{a}\t{b}\n" for a, b in zip(*sides, strict=True)))
    files = [f"--pairs={memory}", f"--valid-pairs={memory}"]
    if not pairs:
        files = [f"--src={corpus / 'train.aa'}", f"--tgt={corpus / 'train.bb'}"]
    arguments = ["train", "--init-from", str(model), *files, "--set", "train.steps=1"]
    assert main([*arguments, "--out", str(tmp_path / "unnamed")]) == 2
    assert "or with --init-from --src-lang de --tgt-lang en" in capsys.readouterr().err
    out = tmp_path / "tuned"
    languages = ["--src-lang", "aa", "--tgt-lang", "bb"]
    assert main([*arguments, *languages, "--out", str(out)]) == 0
    assert Bundle.load(out).config.data.directions == ("aa-bb",)
    assert main([*arguments, *languages, "--out", str(out)]) == 0  # finished: the same command


def test_a_run_is_resumed_with_its_identifier(
    corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "model"
    short = (
        "--set=train.steps=2",
        "--set=train.validate_every=2",
        "--set=train.checkpoint_every=2",
    )
    assert train(corpus, out, "--both-directions", *short, valid=False) == 0
    assert "held out, at most 1,000 of each file" in capsys.readouterr().err
    before = (out / "text" / "language_id.npy").read_bytes()
    shutil.rmtree(out / "training" / "text")
    assert main(["train", "--out", str(out), "--resume", "--set", "train.steps=4"]) == 0
    assert (out / "text" / "language_id.npy").read_bytes() == before
    averaged = tmp_path / "averaged"
    assert main(["average", str(out), "--last", "2", "--out", str(averaged)]) == 0
    assert (averaged / "text" / "language_id.npy").read_bytes() == before
    assert Translator.load(averaged, device="cpu").translate([""], target_language="cc") == [""]


def test_held_out_pairs_are_trained_on_in_no_direction(corpus: Path, tmp_path: Path) -> None:
    from dragoman.config import read_config
    from dragoman.runs.translation_data_preparation import open_corpora

    config = read_config(
        overrides=[
            f"data.src={corpus / 'train.aa'}",
            f"data.tgt={corpus / 'train.bb'}",
            "data.languages=[aa-bb]",
            "data.directions=[aa-bb, bb-aa]",
            "text.language_tags=true",
        ]
    )
    corpora = open_corpora(config.data)
    assert corpora.valid is not None
    lines = {"train": set[int](), "valid": set[int]()}
    for part, corpus_part in (("train", corpora.train), ("valid", corpora.valid)):
        pairs = list(corpus_part.pairs())
        assert {pair.direction for pair in pairs} == {"aa-bb", "bb-aa"}
        for pair in pairs:
            start = (
                0
                if pair.direction == "aa-bb"
                else max(each.number for each in pairs if each.direction == "aa-bb")
            )
            lines[part].add(pair.number - start)
            small, capital = sorted((pair.src, pair.tgt), reverse=True)
            assert small.upper() == capital
    assert not lines["train"] & lines["valid"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--both-directions"], "--both-directions goes with --pair; found it alone"),
        (["--pair", "aa-bb", "x", "--both-directions"], "found --pair aa-bb x --both-directions"),
        (["--valid-pair", "aa-bb", "x", "y"], "--valid-pair goes with --pair; found it alone"),
        (["--pair", "aabb", "x", "y"], "joined by a hyphen, such as de-en; found 'aabb'"),
        (["--pair", "aa-aa", "x", "y"], "two different languages"),
        (["--pair", "aa-bb", "x", "y", "--src", "z"], "found --src too; pass every file by --pair"),
        (["--pair", "aa-bb", "x"], "--pair"),
    ],
)
def test_invalid_arguments_are_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    code, _, err = output(capsys, "train", "--out", str(tmp_path / "m"), *arguments)
    assert code == 2
    assert message in err
    assert "Traceback" not in err


def test_text_like_a_tag_is_text(model: Path) -> None:
    tokenizer = load_tokenizers(model / "text").src
    assert not set(tokenizer.encode("<2bb> abc")) & set(tokenizer.tag_ids.values())
    assert tokenizer.tagged("bb").encode("abc") == [5, *tokenizer.encode("abc")]
    assert tokenizer.decode([5, *tokenizer.encode("abc")]) == "abc"


@pytest.mark.parametrize("kind", ["ctranslate2", "onnx", "huggingface"])
def test_exports_read_the_tag(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str
) -> None:
    pytest.importorskip({"huggingface": "transformers", "onnx": "onnxscript"}.get(kind, kind))
    code, out, _ = output(
        capsys, "export", str(model), "--to", kind, "--out", str(tmp_path / kind), "--json"
    )
    assert code == 0
    parity = json.loads(out)["parity"]
    assert parity["equal"] == parity["sentences"]
    readme = (tmp_path / kind / "README.md").read_text()
    assert (">>bb<<" if kind == "huggingface" else "<2bb>") in readme


def test_export_measures_bleu_in_the_language_of_the_references(
    corpus: Path, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It measured them against translations into the first direction's target language."""
    files = ["--src", str(corpus / "dev.aa"), "--ref", str(corpus / "dev.cc")]
    export = ["export", str(model), "--to", "dragoman", "--out", str(tmp_path / "out"), *files]
    code, _, err = output(capsys, *export)
    assert code == 2
    assert "need --tgt-lang; found none; choose bb or aa or cc" in err
    code, _, err = output(capsys, *export, "--tgt-lang", "dd")
    assert code == 2
    assert "found 'dd'; choose bb or aa or cc" in err
    assert not (tmp_path / "out").exists()
    code, out, _ = output(capsys, *export, "--tgt-lang", "cc", "--json")
    assert code == 0
    _, evaluated, _ = output(capsys, "evaluate", str(model), *files, "--to", "cc", "--json")
    bleu = json.loads(evaluated)["scores"]["BLEU"]["score"]
    assert json.loads(out)["parity"]["bleu_native"] == pytest.approx(bleu)


def test_compare_chooses_the_direction_of_its_models(
    corpus: Path, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = ["--src", str(corpus / "dev.aa"), "--ref", str(corpus / "dev.cc")]
    reversed_ = tmp_path / "reversed.cc"
    lines = (corpus / "dev.cc").read_text().splitlines()
    reversed_.write_text("".join(f"{line}\n" for line in reversed(lines)))
    compare = ["compare", *files, str(model), str(reversed_), "--json"]
    code, _, err = output(capsys, *compare)
    assert code == 2
    assert "add --to bb or --to cc" in err
    code, out, _ = output(capsys, *compare, "--to", "cc")
    assert code == 0
    _, evaluated, _ = output(capsys, "evaluate", str(model), *files, "--to", "cc", "--json")
    bleu = json.loads(evaluated)["scores"]["BLEU"]["score"]
    assert json.loads(out)["results"][0]["value"] == pytest.approx(bleu)
    code, _, err = output(capsys, *compare, "--to", "cc", "--from", "bb")
    assert code == 2
    assert "found --from 'bb' and --to 'cc'" in err
    code, _, err = output(
        capsys, "compare", *files, str(reversed_), str(corpus / "dev.bb"), "--to", "cc"
    )
    assert code == 2
    assert "found --to cc and no model" in err


def test_plots_read_the_tag(
    corpus: Path, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The calibration was that of sources without the tag of their target language."""
    pytest.importorskip("matplotlib")
    translator = Translator.load(model, device="cpu", target_language="cc")
    sources, references = (
        (corpus / f"dev.{each}").read_text().splitlines() for each in ("aa", "cc")
    )
    tag = translator.tokenizers.src.tag_ids["cc"]
    assert [row[0] for row in translator.encode_sources(sources)] == [tag] * len(sources)
    scores = translator.score(sources, references)
    pairs = zip(
        translator.encode_sources(sources),
        translator.tokenizers.tgt.encode_batch(references),
        strict=True,
    )
    measured = measure_pairs(translator.model, list(pairs))
    log_prob = sum(each.log_prob for each in scores)
    assert np.log(measured.reference).sum() == pytest.approx(log_prob, abs=1e-3)
    files = ["--test", str(corpus / "dev.aa"), "--ref", str(corpus / "dev.cc")]
    plot = ["plot", str(model), "--what", "calibration", "--out", str(tmp_path / "a.svg"), *files]
    code, _, err = output(capsys, *plot)
    assert code == 2
    assert "add --to bb or --to cc" in err
    assert output(capsys, *plot, "--to", "cc")[0] == 0
    accuracy = f"accuracy {100 * measured.right.mean():.1f} %"
    assert accuracy in (tmp_path / "a.svg").read_text(encoding="utf-8")


def test_the_page_has_a_target_language(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "page.html"
    arguments = ("explore", str(model), "--text", "abc", "--html", str(page))
    assert main([*arguments, "--to", "cc"]) == 0
    assert page.exists()
    page.unlink()
    capsys.readouterr()
    assert main([*arguments]) == 2
    assert "add --to bb" in capsys.readouterr().err
    stored = tmp_path / "stored.json"
    stored.write_text("{}")
    assert main(["explore", "--json", str(stored), "--html", str(page), "--to", "cc"]) == 2
    assert "--to cc is for translation models; found no model" in capsys.readouterr().err

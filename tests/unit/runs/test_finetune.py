"""Fine-tuning: a run that starts from a finished model, ours or an imported one."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from kernel_kit import cache_with_kernels
from run_kit import flip_byte

from dragoman import Translator
from dragoman.bundle import Bundle, write_bundle
from dragoman.cli.app import main
from dragoman.config import Config, read_config
from dragoman.data.tokenizer_workers import TextBlock, encode_blocks
from dragoman.errors import BundleError, ConfigError, CorruptError
from dragoman.exchange.export import export_bundle
from dragoman.models.factory import build_model
from dragoman.runs import finetune
from dragoman.runs.finetune import finetune_config
from dragoman.runs.output_directory_and_resume_checks import OutputDirectory
from dragoman.runs.training_run import train
from dragoman.runs.translation_data_preparation import prepare_data
from dragoman.text.imported_tokenizer import ImportedTokenizer
from dragoman.text.sentencepiece_tokenizer import Tokenizer, Tokenizers, train_tokenizers
from dragoman.text.special_tokens import SPECIAL_TOKENS
from dragoman.training.progress_display import QuietProgress

SETTINGS = [
    "model.width=32", "model.heads=2", "model.ffn_width=64", "model.encoder=transformer",
    "model.decoder=transformer", "model.dropout=0",
    "text.tokenizer=characters", "text.byte_fallback=false", "text.vocab_size=40",
    "train.batch_tokens=200", "data.src_lang=de",
]  # fmt: skip
QUICK = [
    "train.device=cpu",
    "train.precision=float32",
    "train.validate_sentences=2",
    "train.batch_tokens=200",
]


class CapturedNotes(QuietProgress):
    """Keeps the notes."""

    def __init__(self) -> None:
        self.notes: list[str] = []

    def note(self, text: str) -> None:
        self.notes.append(text)


@pytest.fixture
def corpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Words, and the same words backwards, in two files."""
    monkeypatch.setenv("DRAGOMAN_CACHE", str(cache_with_kernels(tmp_path / "cache")))
    draw = random.Random(3)
    words = ["".join(draw.choices("abcdefgh", k=draw.randint(3, 6))) for _ in range(150)]
    (tmp_path / "a.src").write_text("\n".join(words) + "\n")
    (tmp_path / "a.tgt").write_text("\n".join(word[::-1] for word in words) + "\n")
    return tmp_path


@pytest.fixture
def model(corpus: Path) -> Path:
    """Write a model with a tokenizer of its own and random weights."""
    config = read_config(recipe="tiny", overrides=SETTINGS)
    lines = [
        line for side in ("src", "tgt") for line in (corpus / f"a.{side}").read_text().splitlines()
    ]
    tokenizers = train_tokenizers(lines, ["xyz " + line for line in lines], config.text)
    torch.manual_seed(5)
    built = build_model(
        config.model, src_vocab_size=len(tokenizers.src), tgt_vocab_size=len(tokenizers.tgt)
    )
    write_bundle(
        corpus / "base",
        config=config,
        tokenizers=tokenizers,
        weights=built.state_dict(),
        golden=["abc"],
    )
    return corpus / "base"


def settings(corpus: Path, model: Path, *more: str) -> Config:
    files = [f"data.{side}={corpus / f'a.{side}'}" for side in ("src", "tgt")]
    return read_config(base=finetune_config(model), overrides=[*files, *QUICK, *more])


def weights(path: Path) -> dict[str, torch.Tensor]:
    return dict(Bundle.load(path).model.state_dict())


def test_a_model_in_int8_is_fine_tuned_from_its_float32_weights(corpus: Path, model: Path) -> None:
    small = export_bundle(model, corpus / "small", quantization="int8").path
    chosen = settings(corpus, small, "train.steps=1", "train.learning_rate=0", "train.ema_decay=0")
    out = train(chosen, corpus / "new")
    before, after = weights(small), weights(out)
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert "quantization" not in Bundle.load(out).manifest


def test_no_learning_leaves_the_model_as_it_was(corpus: Path, model: Path) -> None:
    out = train(
        settings(corpus, model, "train.steps=1", "train.learning_rate=0", "train.ema_decay=0"),
        corpus / "new",
    )
    before, after = weights(model), weights(out)
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    texts = ["abc", "hgfe", "dabba"]
    assert Translator.load(out, device="cpu").translate(texts) == Translator.load(
        model, device="cpu"
    ).translate(texts)
    assert Bundle.load(out).tokenizers.src.digest == Bundle.load(model).tokenizers.src.digest


def test_training_improves_on_the_new_text_and_the_schedule_is_reported(
    corpus: Path, model: Path
) -> None:
    captured = CapturedNotes()
    out = train(settings(corpus, model), corpus / "new", progress=captured)
    config = OutputDirectory(out).config()
    assert (config.train.schedule, config.train.learning_rate) == ("linear", round(0.05 / 32, 7))
    assert config.train.warmup_steps < config.train.steps / 10
    assert config.train.steps == 100, "ten epochs are fewer steps than the least"
    losses = [
        record["loss"]
        for record in map(json.loads, (out / "training" / "log.jsonl").read_text().splitlines())
        if record.get("event") == "validation"
    ]
    assert losses[-1] < losses[0]
    assert any(
        note.startswith("fine-tuning base@") and "weights and vocabulary of" in note
        for note in captured.notes
    )
    assert any(
        note.startswith("schedule: linear, peak learning rate 0.0016") and "warm-up" in note
        for note in captured.notes
    )


def test_the_requested_epochs_are_trained(corpus: Path, model: Path) -> None:
    captured = CapturedNotes()
    out = train(
        settings(corpus, model, "train.epochs=3", "train.batch_tokens=800"),
        corpus / "new",
        progress=captured,
    )
    assert any(", 3.0 epochs, " in note for note in captured.notes)
    last = json.loads((out / "training" / "log.jsonl").read_text().splitlines()[-1])
    assert last["step"] == OutputDirectory(out).config().train.steps < 100


def test_the_finished_model_names_its_origin_but_no_folder(corpus: Path, model: Path) -> None:
    out = train(settings(corpus, model, "train.steps=1"), corpus / "new")
    recorded = json.loads((out / "config.json").read_text())["train"]["init_from"]
    digest = json.loads((model / "manifest.json").read_text())["files"]["weights.safetensors"][
        "sha256"
    ]
    assert recorded == f"base@{digest[:12]}"
    assert f"| fine-tuned from | {recorded} |" in (out / "card.md").read_text()
    assert str(corpus) not in (out / "card.md").read_text() + (out / "config.json").read_text()
    assert Translator.load(out, device="cpu").translate(["abc"])


def test_a_run_resumes_without_the_model(
    corpus: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = settings(corpus, model, "train.steps=4", "train.checkpoint_every=2")
    whole = train(config, corpus / "whole")

    def killed(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr("dragoman.training.trainer.Trainer.fit", killed)
        with pytest.raises(KeyboardInterrupt):
            train(config, corpus / "parts")
    copy = corpus / "parts" / "training" / "init.safetensors"
    assert copy.read_bytes() == (model / "weights.safetensors").read_bytes()
    shutil.rmtree(model)
    content = copy.read_bytes()
    flip_byte(copy)
    with pytest.raises(
        CorruptError, match=r"init\.safetensors must not change after the start of the run"
    ):
        train(None, corpus / "parts", resume=True)
    copy.write_bytes(content)
    parts = train(config, corpus / "parts")  # the same again, though the model is gone
    assert (parts / "weights.safetensors").read_bytes() == (
        whole / "weights.safetensors"
    ).read_bytes()


@pytest.mark.parametrize(
    ("override", "words"),
    [
        (
            "model.width=64",
            r"model\.width must be that of --init-from; found 64 where base@\w+ has 32",
        ),
        (
            "text.vocab_size=90",
            r"text\.vocab_size must be that of --init-from; found 90 where base@\w+ has 40; leave "
            r"it out",
        ),
        (
            "text.normalization=none",
            r"text\.normalization must be that of --init-from; found 'none' where",
        ),
        (
            "model.positions=learned",
            r"model\.positions must be that of --init-from; found 'learned'",
        ),
    ],
)
def test_another_architecture_or_tokenizer_is_rejected(
    corpus: Path, model: Path, override: str, words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        train(settings(corpus, model, override), corpus / "new")
    assert not (corpus / "new").exists()
    train(
        settings(corpus, model, "model.dropout=0.3", "train.steps=1"), corpus / "new", dry_run=True
    )


def command(corpus: Path, model: Path, *more: str) -> int:
    files = [f"--{side}={corpus / f'a.{side}'}" for side in ("src", "tgt")]
    quick = [f"--set={each}" for each in QUICK]
    return main(
        ["train", *files, *quick, "--out", str(corpus / "new"), "--init-from", str(model), *more]
    )


def test_the_command(corpus: Path, model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command(corpus, model, "--recipe=tiny") == 2
    assert "found --init-from " in (err := capsys.readouterr().err)
    assert "and the recipe tiny; leave one out" in err
    assert command(corpus, model, "--set=model.heads=4") == 2
    assert "model.heads must be that of --init-from; found 4" in capsys.readouterr().err
    assert command(corpus, corpus / "nothing") == 2
    assert f"found nothing at {corpus / 'nothing'}" in capsys.readouterr().err
    assert not (corpus / "new").exists()
    assert command(corpus, model, "--budget=20m") == 0
    assert "epochs" in capsys.readouterr().err
    shutil.rmtree(model)
    assert command(corpus, model, "--budget=20m") == 0, "the same command again"
    assert "nothing to do" in capsys.readouterr().err
    assert command(corpus, corpus / "another", "--budget=20m") == 2
    assert "train.init_from cannot change in the run" in capsys.readouterr().err


def test_damaged_model_is_a_one_line_error(corpus: Path, model: Path) -> None:
    flip_byte(model / "weights.safetensors")
    with pytest.raises(CorruptError, match=r"weights\.safetensors"):
        finetune_config(model)
    (model / "manifest.json").unlink()
    with pytest.raises(BundleError, match="half-written"):
        finetune_config(model)


@pytest.fixture
def imported(corpus: Path) -> Path:
    """Write a model like an imported Marian one: two SentencePiece models, one vocabulary."""
    lines = [
        line for side in ("src", "tgt") for line in (corpus / f"a.{side}").read_text().splitlines()
    ]
    text = read_config(
        overrides=["text.tokenizer=unigram", "text.vocab_size=40", "text.byte_fallback=false"]
    ).text
    spm = Tokenizer.train(lines, text)
    vocabulary = [
        *SPECIAL_TOKENS,
        *(spm.tokens([number])[0] for number in reversed(range(len(SPECIAL_TOKENS), len(spm)))),
    ]
    tokenizers = Tokenizers(
        ImportedTokenizer(spm.model, vocabulary), ImportedTokenizer(spm.model, vocabulary)
    )
    config = Config().replace(
        text={
            "tokenizer": "unigram", "vocab_size": len(vocabulary), "shared_vocab": True,
            "byte_fallback": False, "normalization": "none",
        },
        data={"max_length": 100},
        model={
            "encoder": ("transformer(heads=2, ffn_width=64)*1",),
            "decoder": ("transformer(heads=2, ffn_width=64)*1",), "width": 32, "heads": 2,
            "ffn_width": 64, "positions": "sinusoidal_halves", "residual": "post_norm",
            "output_bias": True,
        },
    )  # fmt: skip
    torch.manual_seed(5)
    built = build_model(
        config.model, src_vocab_size=len(vocabulary), tgt_vocab_size=len(vocabulary)
    )
    write_bundle(
        corpus / "opus",
        config=config,
        tokenizers=tokenizers,
        weights=built.state_dict(),
        golden=["abc"],
    )
    return corpus / "opus"


def test_an_imported_model_is_fine_tuned_too(corpus: Path, imported: Path) -> None:
    out = train(settings(corpus, imported, "train.steps=3"), corpus / "new")
    tokenizers = Bundle.load(out).tokenizers
    assert isinstance(tokenizers.src, ImportedTokenizer)
    assert tokenizers.src.digest == Bundle.load(imported).tokenizers.src.digest
    assert Translator.load(out, device="cpu").translate(["abc"])


def test_workers_cut_text_as_an_imported_tokenizer_does(imported: Path) -> None:
    """They made an ordinary tokenizer of it, with other numbers for the tokens."""
    tokenizers = Bundle.load(imported).tokenizers
    block = TextBlock([1, 2], ["abc", "hgf"], ["cba", "fgh"])
    ((_, src, tgt),) = encode_blocks([block], tokenizers, 2)
    assert src.ids.tolist() == [
        each for row in tokenizers.src.encode_batch(block.src) for each in row
    ]
    assert tgt.ids.tolist() == [
        each for row in tokenizers.tgt.encode_batch(block.tgt) for each in row
    ]


# Vocabulary extension


@pytest.fixture
def greek(corpus: Path) -> Path:
    """Write a corpus of old words and Greek ones, translated by turning them round."""
    words = (corpus / "a.src").read_text().splitlines()[:60]
    words += ["καλη", "μερα", "λαμα", "κλαμε"] * 15
    for side, step in (("src", 1), ("tgt", -1)):
        text = "".join(word[::step] + "\n" for word in words)
        (corpus / f"greek.{side}").write_text(text)
    return corpus


@pytest.fixture
def bpe_model(corpus: Path) -> Path:
    """Write a model with BPE, two vocabularies, an untied output projection and its bias."""
    own = ["text.tokenizer=bpe", "text.shared_vocab=false", "model.tie_embeddings=none"]
    config = read_config(recipe="tiny", overrides=[*SETTINGS, *own, "model.output_bias=true"])
    src, tgt = ((corpus / f"a.{side}").read_text().splitlines() for side in ("src", "tgt"))
    tokenizers = train_tokenizers(src, tgt, config.text)
    torch.manual_seed(5)
    built = build_model(config.model, src_vocab_size=40, tgt_vocab_size=40)
    with torch.no_grad():
        built.output.bias.normal_()
    write_bundle(
        corpus / "bpe",
        config=config,
        tokenizers=tokenizers,
        weights=built.state_dict(),
        golden=["abc"],
    )
    return corpus / "bpe"


def extend(corpus: Path, model: Path, name: str, *more: str) -> Path:
    files = [f"data.{side}={corpus / f'greek.{side}'}" for side in ("src", "tgt")]
    chosen = settings(corpus, model, *files, "train.extend_vocabulary=15", *more)
    return train(chosen, corpus / name)


@pytest.mark.parametrize("kind", ["model", "bpe_model"])
def test_an_extended_model_reads_old_text_as_before(
    greek: Path, kind: str, request: pytest.FixtureRequest
) -> None:
    """Without a training step: ids, rows and logits of old tokens are those of before."""
    path = request.getfixturevalue(kind)
    still = ("train.steps=1", "train.learning_rate=0", "train.ema_decay=0")
    before, after = Bundle.load(path), Bundle.load(extend(greek, path, "new", *still))
    texts = ["abc", "hgfe", "dabba"]
    for old, new in zip(before.tokenizers, after.tokenizers, strict=True):
        assert new.tokens(range(len(old))) == old.tokens(range(len(old)))
        assert 3 in old.encode("καλη")
        assert 3 not in new.encode("καλη")
        added = new.tokens(range(len(old), len(new)))
        assert all(len(token) == 1 for token in added) == (kind == "model")  # characters, or words
    for text in texts:
        rows = [
            (bundle.tokenizers.src.encode(text), bundle.tokenizers.tgt.encode(text[::-1]))
            for bundle in (before, after)
        ]
        assert kind == "bpe_model" or rows[0] == rows[1]
        src, tgt = (torch.tensor([[*ids, 2]]) for ids in rows[0])
        with torch.no_grad():
            expected, found = before.model(src, tgt), after.model(src, tgt)
        assert found.size(2) > expected.size(2)
        torch.testing.assert_close(found[..., : expected.size(2)], expected)
    config = OutputDirectory(greek / "new").config()
    pairs = zip(before.tokenizers, after.tokenizers, strict=True)
    sizes = [len(new) - len(old) for old, new in pairs]
    assert config.train.extend_vocabulary == max(sizes)
    assert config.text.vocab_size == max(map(len, after.tokenizers))
    assert f"| tokens added | {max(sizes)}, learnt from" in (greek / "new" / "card.md").read_text()


def test_rows_of_added_tokens_are_the_means_of_their_parts(greek: Path, bpe_model: Path) -> None:
    still = ("train.steps=1", "train.learning_rate=0", "train.ema_decay=0")
    out = extend(greek, bpe_model, "new", *still)
    before, after = weights(bpe_model), weights(out)
    bundles = Bundle.load(bpe_model), Bundle.load(out)
    for side, names in (
        ("src", ["embeddings.src.weight"]),
        ("tgt", ["embeddings.tgt.weight", "output.weight", "output.bias"]),
    ):
        old, new = (getattr(bundle.tokenizers, side) for bundle in bundles)
        for number, token in enumerate(new.tokens(range(len(old), len(new))), len(old)):
            if not token.startswith("▁"):
                continue  # a text begins with a space
            parts = old.encode(token[1:]) or [3]
            for name in names:
                expected = before[name][parts].mean(dim=0)
                torch.testing.assert_close(after[name][number], expected)


def test_an_extended_run_resumes_and_is_fine_tuned_again(
    greek: Path, model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    steps = ("train.steps=4", "train.checkpoint_every=2")
    whole = extend(greek, model, "whole", *steps)

    def killed(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr("dragoman.training.trainer.Trainer.fit", killed)
        with pytest.raises(KeyboardInterrupt):
            extend(greek, model, "parts", *steps)
    shutil.move(model, greek / "elsewhere")
    parts = train(None, greek / "parts", resume=True)
    assert (parts / "weights.safetensors").read_bytes() == (
        whole / "weights.safetensors"
    ).read_bytes()
    # The same command again, though fewer tokens were found than it allows.
    same = ["--src", str(greek / "greek.src"), "--tgt", str(greek / "greek.tgt")]
    same += [f"--set={each}" for each in (*QUICK, *steps)]
    same += ["--init-from", str(model), "--extend-vocabulary", "15", "--out", str(parts)]
    assert main(["train", *same]) == 0, capsys.readouterr().err
    again = train(settings(greek, whole, "train.steps=1"), greek / "again")
    assert len(Bundle.load(again).tokenizers.src) == len(Bundle.load(whole).tokenizers.src)
    assert OutputDirectory(again).config().train.extend_vocabulary == 0
    assert Translator.load(again, device="cpu").translate(["καλη"])


@pytest.mark.parametrize(
    ("more", "is_warned"), [((), True), (("train.extend_vocabulary=9",), False)]
)
def test_a_script_that_the_vocabulary_lacks_is_reported(
    greek: Path, model: Path, more: tuple[str, ...], is_warned: bool
) -> None:
    captured = CapturedNotes()
    (greek / "only.src").write_text("καλη μερα\n" * 60)
    files = [f"data.{side}={greek / 'only.src'}" for side in ("src", "tgt")]
    chosen = settings(greek, model, *files, *more)
    (greek / "new").mkdir()
    prepare_data(chosen, greek / "new/text", captured, given=Bundle.load(model).tokenizers)
    found = [note for note in captured.notes if "--extend-vocabulary adds tokens" in note]
    assert len(found) == 2 * is_warned
    for note, side in zip(found, ("source", "target"), strict=False):
        assert f" % of the {side} tokens are single bytes or unknown" in note


def test_models_that_cannot_be_extended_are_rejected(
    corpus: Path, imported: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ConfigError, match=r"found an imported one in opus@\w+; leave it out"):
        train(settings(corpus, imported, "train.extend_vocabulary=5"), corpus / "new")
    assert not (corpus / "new").exists()
    files = ["--src", str(corpus / "a.src"), "--tgt", str(corpus / "a.tgt")]
    assert main(["train", *files, "--out", str(corpus / "new"), "--extend-vocabulary", "9"]) == 2
    assert "found 9 without a model; add --init-from MODEL" in capsys.readouterr().err
    other = ["--task", "classify", "--train", str(corpus / "a.src"), "--init-from", "a"]
    assert main(["train", *other, "--out", str(corpus / "new"), "--extend-vocabulary", "9"]) == 2
    assert "fine-tunes a translation model; found task classify" in capsys.readouterr().err


def test_fine_tuning_starts_from_the_models_settings_with_a_short_schedule(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pretrained = read_config(recipe="small").replace(
        text={"bpe_dropout": 0.1},
        data={"src": "a", "tgt": "b", "direction_temperature": 5.0, "max_length": 77},
        train={"label_smoothing": 0.2, "learning_rate": 9.0, "steps": 5},
        decode={"beam": 9},
    )
    origin = finetune.PretrainedModel("m@1", pretrained, cast(Any, None), Path("w"))
    monkeypatch.setattr(finetune, "open_pretrained", lambda path: origin)
    found = finetune.finetune_config("m")
    train = found.train
    assert finetune.FINETUNE_EPOCHS == 10
    assert (train.init_from, train.schedule, train.warmup_steps) == ("m", "linear", 100)
    assert train.learning_rate == pytest.approx(0.05 / 256, rel=1e-3)
    assert (train.label_smoothing, train.max_grad_norm) == (0.2, 1.0)
    assert (train.checkpoint_every, train.validate_every) == (100, 100)
    assert train.steps == Config().train.steps
    assert (found.model, found.decode.beam) == (pretrained.model, 9)
    assert found.text == pretrained.replace(text={"bpe_dropout": 0.0}).text
    assert (found.data.src, found.data.tgt, found.data.max_length) == ("", "", 77)
    assert found.data.direction_temperature == 1.0


@pytest.mark.parametrize(
    ("section", "name", "value", "is_free"),
    [
        ("model", "dropout", 0.45, True),
        ("model", "attention_dropout", 0.45, True),
        ("model", "ffn_dropout", 0.45, True),
        ("model", "layer_drop", 0.45, True),
        ("text", "bpe_dropout", 0.45, True),
        ("text", "sample_lines", 123, True),
        ("model", "width", 64, False),
        ("model", "residual", "post_norm", False),
        ("text", "vocab_size", 99, False),
    ],
)
def test_only_regularization_may_differ_from_the_pretrained_model(
    section: str, name: str, value: Any, is_free: bool
) -> None:
    pretrained = read_config(recipe="small")
    origin = finetune.PretrainedModel("m@1", pretrained, cast(Any, None), Path("w"))
    changed = pretrained.replace(**{section: {name: value}})
    assert changed != pretrained
    if is_free:
        finetune.require_same_model(changed, origin)
        return
    with pytest.raises(ConfigError, match=rf"{section}\.{name} must be that of --init-from"):
        finetune.require_same_model(changed, origin)

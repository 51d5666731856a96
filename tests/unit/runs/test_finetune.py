"""Fine-tuning: a run that starts from a finished model, ours or an imported one."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path

import pytest
import torch
from kernel_kit import cache_with_kernels
from run_kit import flip

from dragoman import Translator
from dragoman.bundle import Bundle, write_bundle
from dragoman.cli.app import main
from dragoman.config import Config, read_config
from dragoman.data.tokenizer_workers import TextBlock, encode_blocks
from dragoman.errors import BundleError, ConfigError, CorruptError
from dragoman.exchange.export import export_bundle
from dragoman.models.factory import build_model
from dragoman.runs.finetune import finetune_config
from dragoman.runs.output_directory import OutputDirectory
from dragoman.runs.training_run import train
from dragoman.text.imported_tokenizer import ImportedTokenizer
from dragoman.text.special_tokens import SPECIAL_TOKENS
from dragoman.text.tokenizer import Tokenizer, Tokenizers, train_tokenizers
from dragoman.training.progress import QuietProgress

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


class Told(QuietProgress):
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


def test_training_improves_on_the_new_text_and_the_schedule_is_told(
    corpus: Path, model: Path
) -> None:
    told = Told()
    out = train(settings(corpus, model), corpus / "new", progress=told)
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
        for note in told.notes
    )
    assert any(
        note.startswith("schedule: linear, peak learning rate 0.0016") and "warm-up" in note
        for note in told.notes
    )


def test_epochs_are_those_that_were_asked_for(corpus: Path, model: Path) -> None:
    told = Told()
    out = train(settings(corpus, model, "train.epochs=3"), corpus / "new", progress=told)
    assert any(", 3.0 epochs, " in note for note in told.notes)
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
    flip(copy)
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
            "model.positions=learned",
            r"model\.positions must be that of --init-from; found 'learned'",
        ),
    ],
)
def test_another_architecture_or_tokenizer_is_refused(
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


def test_a_damaged_model_costs_a_line(corpus: Path, model: Path) -> None:
    flip(model / "weights.safetensors")
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
    pieces = [
        *SPECIAL_TOKENS,
        *(spm.tokens([number])[0] for number in reversed(range(len(SPECIAL_TOKENS), len(spm)))),
    ]
    tokenizers = Tokenizers(
        ImportedTokenizer(spm.model, pieces), ImportedTokenizer(spm.model, pieces)
    )
    config = Config().replace(
        text={
            "tokenizer": "unigram", "vocab_size": len(pieces), "shared_vocab": True,
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
    built = build_model(config.model, src_vocab_size=len(pieces), tgt_vocab_size=len(pieces))
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

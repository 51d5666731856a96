"""Import of Hugging Face's Marian: a directory as OPUS-MT has them, with random weights, must
translate as it did.
"""

from __future__ import annotations

import io
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
import torch
from safetensors.torch import load_file, save_file

from dragoman.attention.absolute_position_encodings import SinusoidalHalvesPositions
from dragoman.bundle import Bundle
from dragoman.errors import BundleError, CorruptError, DataError, DragomanError
from dragoman.exchange import huggingface_import
from dragoman.exchange.huggingface_directory_reader import read_directory
from dragoman.exchange.huggingface_import import import_marian
from dragoman.exchange.huggingface_runner import TransformersRunner, quiet_transformers
from dragoman.inference import Translator
from dragoman.storage.checksum_verification import verify_directory
from dragoman.text.imported_tokenizer import ImportedTokenizer
from dragoman.text.sentencepiece_tokenizer import Tokenizers, load_tokenizers, save_tokenizers
from dragoman.text.special_tokens import SPECIAL_TOKENS, UNK

transformers = pytest.importorskip("transformers")

LINES = [
    "ein Mann geht",
    "eine Frau geht schnell",
    "zwei Hunde",
    "ein Hund und ein Mann sehen eine Frau",
    "der Hund",
    "Ein Mann, eine Frau.",
]


def learn(lines: list[str], pieces: int) -> bytes:
    """Train a SentencePiece model as OPUS does: unigram, its own normalizer, its own ids, no
    padding token.
    """
    writer = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines * 20),
        model_writer=writer,
        vocab_size=pieces,
        model_type="unigram",
        hard_vocab_limit=False,
        minloglevel=2,
    )
    return writer.getvalue()


@pytest.fixture(scope="module")
def spm() -> tuple[bytes, bytes]:
    return learn(LINES, 60), learn([line.upper() for line in LINES], 55)


def spelt(model: bytes) -> list[str]:
    """List a model's ordinary pieces."""
    processor = sentencepiece.SentencePieceProcessor(model_proto=model)
    return [processor.id_to_piece(each) for each in range(3, processor.get_piece_size())]


@pytest.fixture
def make(tmp_path: Path, spm: tuple[bytes, bytes]) -> Callable[..., Path]:
    """Return a function that writes a Marian directory."""

    def write(
        name: str = "opus", *, separate: bool = False, lose: int = 2, **settings: Any
    ) -> Path:
        directory = tmp_path / name
        src, tgt = spelt(spm[0]), spelt(spm[1])
        union = list(dict.fromkeys([">>eng<<", *src, *tgt]))[
            : -lose or None
        ]  # the last pieces are unknown
        lists = [src, tgt] if separate else [union]
        vocabularies = [
            {piece: number for number, piece in enumerate(["</s>", "<unk>", *pieces, "<pad>"])}
            for pieces in lists
        ]
        sizes = [len(each) for each in vocabularies]
        last = sizes[-1] - 1
        torch.manual_seed(4)
        config = transformers.MarianConfig(
            vocab_size=sizes[0],
            decoder_vocab_size=sizes[-1],
            share_encoder_decoder_embeddings=not separate,
            d_model=32,
            encoder_layers=2,
            decoder_layers=1,
            encoder_attention_heads=4,
            decoder_attention_heads=2,
            encoder_ffn_dim=48,
            decoder_ffn_dim=64,
            max_position_embeddings=256,
            pad_token_id=last,
            eos_token_id=0,
            forced_eos_token_id=0,
            **{
                "activation_function": "swish",
                "scale_embedding": True,
                "decoder_start_token_id": last,
                **settings,
            },
        )
        model = transformers.MarianMTModel(config).eval()
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for weight in model.parameters():
                if weight.requires_grad:
                    weight.add_(torch.randn(weight.shape, generator=generator) * 0.2)
            for table in (model.model.encoder.embed_tokens, model.model.decoder.embed_tokens):
                table.weight[-1] = 0
            model.final_logits_bias.normal_(generator=generator)
            model.final_logits_bias[
                0, [1, last]
            ] = -9.0  # neither unknown nor padding is written, as in a trained model
            model.final_logits_bias[0, 0] += 0.5
        model.generation_config.bad_words_ids = [[last]]
        with quiet_transformers():
            model.save_pretrained(directory)
        for number, each in enumerate(("source.spm", "target.spm")):
            (directory / each).write_bytes(spm[number])
        for each, vocabulary in zip(
            ("vocab.json", "target_vocab.json"), vocabularies, strict=False
        ):
            (directory / each).write_text(
                json.dumps(vocabulary, ensure_ascii=False), encoding="utf-8"
            )
        tokenizer = {"tokenizer_class": "MarianTokenizer", "separate_vocabs": separate}
        (directory / "tokenizer_config.json").write_text(json.dumps(tokenizer))
        return directory

    return write


TEXTS = [*LINES, ">>eng<< zwei Hunde", "Ärger  mit ﬁ Zeichen", "eine sehr lange Frau " * 5]


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({}, id="as OPUS-MT"),
        pytest.param(
            {"activation_function": "relu", "scale_embedding": False}, id="other settings"
        ),
        pytest.param({"separate": True, "lose": 0}, id="two vocabularies"),
        pytest.param({"tie_word_embeddings": False}, id="an output of its own"),
        pytest.param({"decoder_start_token_id": 0}, id="a decoder that starts from </s>"),
    ],
)
def test_a_marian_directory_becomes_a_bundle_that_computes_the_same(
    make: Callable[..., Path], settings: dict[str, Any], tmp_path: Path
) -> None:
    directory = make(**settings)
    made = import_marian(directory, tmp_path / "mine", texts=TEXTS, src_lang="de", tgt_lang="en")
    assert made.parity is not None
    assert (made.parity.equal, made.parity.sentences) == (len(TEXTS), len(TEXTS))
    assert made.parity.difference < 2e-4
    theirs = TransformersRunner(directory)
    translator = Translator.load(made.path)
    assert len(set(translator.translate(LINES, beam=1))) > 2, "outputs that depend on their source"
    for text in TEXTS:
        ours = Bundle.load(made.path).tokenizers.src
        assert ours.tokens(ours.encode(text)) == [
            piece if piece in theirs.tokenizer.encoder else "<unk>"
            for piece in theirs.tokenizer.tokenize(text)
        ]
    assert all(check.ok for check in verify_directory(made.path))
    assert translator.config.data.tgt_lang == "en"


def test_bos_has_zero_probability(make: Callable[..., Path], tmp_path: Path) -> None:
    bundle = Bundle.load(import_marian(make(), tmp_path / "mine").path)
    src = torch.tensor([[*bundle.tokenizers.src.encode(LINES[0]), 2]])
    log_probs = bundle.model(src, torch.tensor([[1]])).log_softmax(-1)
    assert float(log_probs[0, 0, 1].exp()) == 0.0
    assert bundle.tokenizers.src.tokens(range(4)) == list(SPECIAL_TOKENS)


def test_imported_model_is_exported_to_ctranslate2_and_hugging_face(
    make: Callable[..., Path], tmp_path: Path
) -> None:
    pytest.importorskip("ctranslate2")
    from dragoman.exchange.export import export_ctranslate2, export_hugging_face

    mine = import_marian(make(), tmp_path / "mine", texts=LINES).path
    assert (
        export_ctranslate2(mine, quantization="float32", texts=LINES).parity.equal_fraction == 1.0
    )
    back = export_hugging_face(mine, tmp_path / "back", texts=LINES)
    assert back.parity.equal_fraction == 1.0
    again = import_marian(back.path, tmp_path / "again", texts=LINES)
    assert again.parity is not None
    assert again.parity.equal_fraction == 1.0


def test_settings_are_those_of_the_directory(make: Callable[..., Path], tmp_path: Path) -> None:
    directory = make(num_beams=6, dropout=0.3)
    change("generation_config.json", "num_beams", 6)(directory)
    bundle = Bundle.load(import_marian(directory, tmp_path / "mine", texts=[*LINES, *LINES]).path)
    config = bundle.config
    assert (config.decode.beam, config.decode.length_penalty) == (6, 1.0)
    assert config.data.max_length == 256 - 12
    assert (config.data.src_lang, config.data.tgt_lang) == ("", "")
    assert (config.model.dropout, config.model.scale_embeddings) == (0.3, True)
    assert (config.model.residual, config.model.norm_epsilon) == ("post_norm", 1e-5)
    assert [case["input"] for case in bundle.golden_cases] == [*LINES, *LINES][:8]


def test_stored_positions_must_be_sinusoidal(make: Callable[..., Path], tmp_path: Path) -> None:
    directory = make()
    weights = load_file(directory / "model.safetensors")
    table = SinusoidalHalvesPositions(width=32).vectors(0, 256)
    assert table is not None
    for off, kept in ((0.0, True), (0.02, False)):
        stored = weights | {"model.encoder.embed_positions.weight": table + off}
        save_file(stored, directory / "model.safetensors", metadata={"format": "pt"})
        source = read_directory(directory)
        if kept:
            assert "model.encoder.embed_positions.weight" in source.weights()
        else:
            with pytest.raises(
                BundleError, match=r"sinusoidal positions .*found others, 0\.02 off"
            ):
                source.weights()


def lose(name: str) -> Callable[[Path], None]:
    return lambda directory: (directory / name).unlink()


def pickled(directory: Path) -> None:
    (directory / "model.safetensors").rename(directory / "pytorch_model.bin")


def change(name: str, key: str, value: Any) -> Callable[[Path], None]:
    def write(directory: Path) -> None:
        content = json.loads((directory / name).read_text())
        content[key] = value
        (directory / name).write_text(json.dumps(content))

    return write


@pytest.mark.parametrize(
    ("of_generation", "of_config", "beam"), [(3, 7, 3), (None, 7, 7), (3, None, 3), (None, None, 4)]
)
def test_beam_size_is_that_of_generation(
    make: Callable[..., Path], of_generation: int | None, of_config: int | None, beam: int
) -> None:
    directory = make()
    change("generation_config.json", "num_beams", of_generation)(directory)
    change("config.json", "num_beams", of_config)(directory)
    assert read_directory(directory).beam == beam


def without_end(directory: Path) -> None:
    content = json.loads((directory / "vocab.json").read_text())
    del content["</s>"]
    (directory / "vocab.json").write_text(json.dumps(content))


def cut_weights(directory: Path) -> None:
    data = (directory / "model.safetensors").read_bytes()
    (directory / "model.safetensors").write_bytes(data[: len(data) // 2])


@pytest.mark.parametrize(
    ("damage", "kind", "message"),
    [
        (shutil.rmtree, BundleError, "no directory at"),
        (lose("config.json"), BundleError, "no config.json in"),
        (
            lose("source.spm"),
            BundleError,
            r"source\.spm must be a file that can be read; found no such file",
        ),
        (
            lose("vocab.json"),
            BundleError,
            r"vocab\.json must be a file that can be read; found no such file",
        ),
        (lose("model.safetensors"), BundleError, "found none"),
        (
            pickled,
            BundleError,
            r"only 'pytorch_model\.bin', a pickle .*from transformers import AutoModelForSeq2SeqLM",
        ),
        (change("config.json", "model_type", "bart"), BundleError, "model_type 'bart'"),
        (
            change("config.json", "activation_function", "tanh"),
            BundleError,
            "activation_function 'tanh'",
        ),
        (
            change("config.json", "normalize_before", True),
            BundleError,
            "normalize_before True where marian has False",
        ),
        (
            change("config.json", "d_model", 64),
            BundleError,
            r"is \[96, 64\]|is \[192, 64\]|found \[",
        ),
        (
            change("config.json", "encoder_layers", 3),
            BundleError,
            "found no model.encoder.layers.2",
        ),
        (change("vocab.json", "mehr", 10_000), BundleError, "found 10000 for 'mehr'"),
        (without_end, BundleError, "found no </s>"),
        (change("vocab.json", "mehr", 2), BundleError, "a unique id; found one id twice"),
        (change("config.json", "pad_token_id", 2), BundleError, "by which pad_token_id is 2"),
        (change("config.json", "eos_token_id", 2), BundleError, "by which eos_token_id is 2"),
        (change("generation_config.json", "num_beams", 257), BundleError, "found 257"),
        (change("config.json", "dropout", 1), BundleError, "dropout 1 that is no number"),
        (change("config.json", "decoder_attention_heads", 3), BundleError, "not divide d_model 32"),
        (cut_weights, CorruptError, r"model\.safetensors"),
    ],
)
def test_invalid_marian_directory_is_rejected(
    make: Callable[..., Path],
    damage: Callable[[Path], None],
    kind: type[DragomanError],
    message: str,
    tmp_path: Path,
) -> None:
    directory = make()
    damage(directory)
    with pytest.raises(kind, match=message):
        import_marian(directory, tmp_path / "mine")
    assert not (tmp_path / "mine").exists()


def test_existing_path_is_rejected(make: Callable[..., Path], tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    with pytest.raises(BundleError, match="an empty directory at"):
        import_marian(make(), tmp_path / "mine")


def test_without_transformers_nothing_is_compared(
    make: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(huggingface_import, "is_installed", lambda _: False)
    assert import_marian(make(), tmp_path / "mine").parity is None


def test_imported_tokenizer_satisfies_the_tokenizer_contract(
    spm: tuple[bytes, bytes], tmp_path: Path
) -> None:
    tokenizer = ImportedTokenizer(spm[0], [*SPECIAL_TOKENS, *spelt(spm[0])[:-1]])
    assert tokenizer.decode(tokenizer.encode(LINES[3])) == LINES[3]
    assert UNK in tokenizer.encode("Ω")
    assert tokenizer.encode("") == []
    assert tokenizer.decode([]) == ""
    save_tokenizers(Tokenizers(tokenizer, tokenizer), tmp_path / "joint")
    save_tokenizers(
        Tokenizers(tokenizer, ImportedTokenizer(spm[1], [*SPECIAL_TOKENS, *spelt(spm[1])])),
        tmp_path / "two",
    )
    loaded = load_tokenizers(tmp_path / "two")
    assert loaded.src.digest == tokenizer.digest != loaded.tgt.digest
    pieces = [tokenizer.tokens([each])[0] for each in range(len(tokenizer))]
    swapped = [*pieces[:-2], pieces[-1], pieces[-2]]
    assert ImportedTokenizer(spm[0], pieces).digest == tokenizer.digest
    assert (
        len(
            {
                tokenizer.digest,
                ImportedTokenizer(spm[0], swapped).digest,
                ImportedTokenizer(spm[1], pieces).digest,
            }
        )
        == 3
    )
    assert loaded.src.encode(LINES[0]) == tokenizer.encode(LINES[0])
    with pytest.raises(DataError, match="found an imported one"):
        tokenizer.encode_with_dropout("ein", dropout=0.1, generator=lambda: 0.5)
    with pytest.raises(DataError, match=r"U\+D800"):
        tokenizer.encode("\ud800")


@pytest.mark.parametrize(
    ("pieces", "found"),
    [
        (["<s>", "<pad>", "</s>", "<unk>", "a"], "'<s>', '<pad>'"),
        ([*SPECIAL_TOKENS, "a", "a"], "a token twice"),
    ],
)
def test_a_list_of_tokens_must_be_one(
    spm: tuple[bytes, bytes], pieces: list[str], found: str, tmp_path: Path
) -> None:
    with pytest.raises(BundleError, match=found):
        ImportedTokenizer(spm[0], pieces)
    with pytest.raises(BundleError, match="found 3 bytes"):
        ImportedTokenizer(b"abc", [*SPECIAL_TOKENS])
    (tmp_path / "source.pieces.json").write_text("[1]")
    with pytest.raises(BundleError, match=r"must be a list of tokens; found \[1\]"):
        ImportedTokenizer.read(tmp_path, "source", spm[0], "unigram")

"""What a translation run builds from its prepared data."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from dragoman.config import read_config
from dragoman.data.batch_plan import Cursor
from dragoman.inference import Translator
from dragoman.runs.translation_data_preparation import prepare_data
from dragoman.runs.translation_training_builder import TranslationBuilder
from dragoman.text.special_tokens import UNK
from dragoman.training.progress_display import QuietProgress

SETTINGS = [
    "model.width=16", "model.heads=2", "model.ffn_width=32", "model.encoder=transformer",
    "model.decoder=transformer", "text.tokenizer=characters", "text.byte_fallback=false",
    "text.vocab_size=40", "text.language_tags=true", "data.directions=[de-en, de-fr]",
    "data.languages=[de-en, de-fr]", "train.device=cpu", "train.word_dropout=0.9",
]  # fmt: skip


def test_validation_translates_each_direction_by_greedy_search(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for language in ("de", "en", "fr"):
        (tmp_path / language).write_text("abcd\nbcda\ncdab\ndabc\n" * 3)
    src, tgt = ([str(tmp_path / each) for each in names] for names in (("de", "de"), ("en", "fr")))
    files = [f"data.src={src}", f"data.tgt={tgt}", f"data.cache_dir={tmp_path / 'cache'}"]
    files += [f"data.valid_src={src}", f"data.valid_tgt={tgt}"]
    files += ["data.valid_languages=[de-en, de-fr]", "train.validate_sentences=4"]
    config = read_config(recipe="tiny", overrides=[*SETTINGS, *files])
    prepared = prepare_data(config, tmp_path / "run" / "text", QuietProgress())
    builder = TranslationBuilder(
        config, prepared, device=torch.device("cpu"), progress=QuietProgress()
    )
    found: list[tuple[int, dict[str, object]]] = []

    def translate(_: Translator, texts: list[str], **options: object) -> list[str]:
        found.append((len(texts), options))
        return texts

    monkeypatch.setattr(Translator, "translate", translate)
    assert builder.validator is not None
    builder.validator(builder.build_model().eval())
    languages = [{"source_language": "de", "target_language": each} for each in ("en", "fr")]
    assert found == [(2, {"beam": 1, **each}) for each in languages]


def test_word_dropout_leaves_the_language_tags_of_a_multilingual_corpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for language in ("de", "en", "fr"):
        (tmp_path / language).write_text("abcd\nbcda\ncdab\ndabc\n" * 3)
    src, tgt = ([str(tmp_path / each) for each in names] for names in (("de", "de"), ("en", "fr")))
    files = [f"data.src={src}", f"data.tgt={tgt}", f"data.cache_dir={tmp_path / 'cache'}"]
    config = read_config(recipe="tiny", overrides=[*SETTINGS, *files])
    prepared = prepare_data(config, tmp_path / "run" / "text", QuietProgress())
    builder = TranslationBuilder(
        config, prepared, device=torch.device("cpu"), progress=QuietProgress()
    )
    model = builder.build_model().train()
    batch = builder.collate_function()(builder.plan.batch(Cursor(0, 0)), seed=1)
    read: list[Tensor] = []
    embed = model.embed_source

    def watched(ids: Tensor) -> Tensor:
        read.append(ids)
        return embed(ids)

    monkeypatch.setattr(model, "embed_source", watched)
    builder.task.loss(model, batch)
    [dropped] = read
    tags = {prepared.tokenizers.src.tag_ids[language] for language in ("en", "fr")}
    assert set(batch.src[:, 0].tolist()) == tags
    assert torch.equal(dropped[:, 0], batch.src[:, 0])
    assert dropped[:, 1:].eq(UNK).any()

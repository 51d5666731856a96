"""What the exports to other programs need of a model."""

from __future__ import annotations

import pytest
import torch
from exchange_kit import build_exportable_model

from dragoman.errors import ConfigError
from dragoman.exchange.transformer_export_spec import (
    embedding_table,
    output_matrix,
    read_transformer_structure,
    require_two_stacks,
)


@pytest.mark.parametrize("check", [read_transformer_structure, require_two_stacks])
def test_a_prefix_lm_is_rejected_by_name(check) -> None:
    model, _, _ = build_exportable_model(
        architecture="prefix_lm", encoder=(), decoder=("transformer*2",)
    )
    with pytest.raises(ConfigError, match=r"encoder and a decoder; found .*prefix_lm"):
        check(model, "CTranslate2")


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"scale_embeddings": False},
        {"tie_embeddings": "none"},
        {"embedding_width": 16},
        {"embedding_width": 16, "tie_embeddings": "target"},
        {"embedding_width": 16, "fix_norm": True},
    ],
)
def test_a_table_times_its_scale_equals_the_embedding(settings) -> None:
    model, tokenizers, _ = build_exportable_model(**settings)
    for side, vocabulary in (("src", tokenizers.src), ("tgt", tokenizers.tgt)):
        table, scale = embedding_table(model, side)
        embedding = model.embeddings["shared" if "shared" in model.embeddings else side]
        with torch.inference_mode():
            expected = embedding(torch.arange(len(vocabulary)))
        torch.testing.assert_close(table * scale, expected)
    hidden = torch.randn(3, 32, generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        expected = model.project(model.output(hidden))
        torch.testing.assert_close(hidden @ output_matrix(model).T, expected)

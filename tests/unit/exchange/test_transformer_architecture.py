"""What the exports to other programs need of a model."""

from __future__ import annotations

import pytest
from exchange_kit import build_exportable_model

from dragoman.errors import ConfigError
from dragoman.exchange.transformer_architecture import read_transformer_spec, require_two_stacks


@pytest.mark.parametrize("check", [read_transformer_spec, require_two_stacks])
def test_a_prefix_lm_is_rejected_by_name(check) -> None:
    model, _, _ = build_exportable_model(
        architecture="prefix_lm", encoder=(), decoder=("transformer*2",)
    )
    with pytest.raises(ConfigError, match=r"encoder and a decoder; found .*prefix_lm"):
        check(model, "CTranslate2")

"""Contracts of every norm in training: a norm keeps its contract, or is exempt and really breaks
it.
"""

from __future__ import annotations

import pytest
import torch

from dragoman.layers.norm_and_activation_catalogue import NORMS

CONTRACT = "batch independence in training"


@pytest.mark.parametrize("name", NORMS)
def test_other_rows_change_nothing_in_training(name: str) -> None:
    torch.manual_seed(0)
    norm = NORMS.load(name)(8, 1e-5).double().train()
    x = torch.randn(4, 5, 8, dtype=torch.float64)
    alone, together = norm(x[:2]), norm(x)[:2]
    if CONTRACT in (NORMS[name].exempt or {}):
        assert (alone - together).abs().max() > 1e-3
        norm.eval()  # the weaker promise: it holds once trained
        alone, together = norm(x[:2]), norm(x)[:2]
    torch.testing.assert_close(alone, together)

from __future__ import annotations

import contextlib

import pytest
import torch
from torch import nn

from dragoman.training.ema import EMA


def test_ema_follows_its_equation() -> None:
    model = nn.Linear(1, 1, bias=False)
    nn.init.constant_(model.weight, 0.0)
    average = EMA(model, decay=0.5)
    expected = 0.0
    for update, value in enumerate((1.0, 3.0, -2.0, 8.0, 8.0, 8.0, 8.0, 8.0, 8.0, 8.0), start=1):
        nn.init.constant_(model.weight, value)
        average.update(update)
        decay = min(0.5, (1 + update) / (10 + update))
        expected = decay * expected + (1 - decay) * value
        assert average.state_dict()["weight"].item() == pytest.approx(expected, rel=1e-6)


def test_the_decay_warms_up() -> None:
    average = EMA(nn.Linear(1, 1), decay=0.999)
    assert average.decay_at(1) == pytest.approx(2 / 11)
    assert average.decay_at(90) == pytest.approx(0.91)
    assert average.decay_at(1_000_000) == 0.999


def test_averaged_weights_restores_the_weights() -> None:
    model = nn.Linear(3, 3)
    average = EMA(model, decay=0.9)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    nn.init.ones_(model.weight)
    with average.averaged_weights():
        assert torch.equal(model.weight, before[0])
    assert torch.equal(model.weight, torch.ones(3, 3))
    assert model.weight.requires_grad


def test_a_failing_validation_leaves_the_weights_as_they_were() -> None:
    model = nn.Linear(3, 3)
    average = EMA(model, decay=0.9)
    nn.init.ones_(model.weight)
    with contextlib.suppress(ZeroDivisionError), average.averaged_weights():
        _ = 1 / 0
    assert torch.equal(model.weight, torch.ones(3, 3))


def test_state_round_trip() -> None:
    model = nn.Linear(3, 3)
    average = EMA(model, decay=0.9)
    nn.init.ones_(model.weight)
    average.update(1)
    other = EMA(nn.Linear(3, 3), decay=0.9)
    other.load_state_dict(average.state_dict())
    assert all(
        torch.equal(value, average.state_dict()[name]) for name, value in other.state_dict().items()
    )

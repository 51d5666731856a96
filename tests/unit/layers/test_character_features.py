"""Character features: definitions, padding and gradients."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from dragoman.layers.character_features import CHARACTER_ENCODERS, CharacterCNN, CharacterLSTM

NAMES = sorted(CHARACTER_ENCODERS)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("kernel_size", [1, 3, 4])
def test_padding_and_other_words_change_nothing(name: str, kernel_size: int) -> None:
    torch.manual_seed(0)
    encoder = CHARACTER_ENCODERS[name](5, 6, kernel_size=kernel_size)
    characters = torch.randn(4, 7, 5)
    lengths = torch.tensor([7, 3, 1, 0])  # the last is a padding word
    mask = torch.arange(7) < lengths.unsqueeze(1)
    features = encoder(characters, mask)
    assert features.shape == (4, 6)
    assert features.abs().max() < 100  # the padding word's too, which layers may multiply
    changed = torch.where(mask.unsqueeze(2), characters, 9.0)
    torch.testing.assert_close(encoder(changed, mask)[:3], features[:3])
    for row, length in enumerate([7, 3, 1]):
        alone = encoder(characters[row : row + 1, :length], mask[row : row + 1, :length])
        torch.testing.assert_close(alone[0], features[row])


@pytest.mark.parametrize("name", NAMES)
def test_every_parameter_and_character_gets_a_gradient(name: str) -> None:
    torch.manual_seed(0)
    encoder = CHARACTER_ENCODERS[name](5, 64, kernel_size=3)
    characters = torch.randn(2, 4, 5, requires_grad=True)
    mask = torch.arange(4) < torch.tensor([[4], [2]])
    encoder(characters, mask).square().sum().backward()
    for parameter in encoder.parameters():
        assert parameter.grad is not None
        assert parameter.grad.abs().sum() > 0
    assert characters.grad is not None
    assert torch.equal(characters.grad.abs().sum(dim=2) > 0, mask)


def test_the_convolution_is_a_wide_one_with_a_maximum_over_time() -> None:
    torch.manual_seed(0)
    encoder = CharacterCNN(5, 6, kernel_size=3)
    word = torch.randn(1, 4, 5)
    weight = encoder.filters.weight.view(6, 3, 5).transpose(1, 2)  # (F, E, kernel)
    expected = F.conv1d(word.transpose(1, 2), weight, encoder.filters.bias, padding=2).amax(dim=2)
    torch.testing.assert_close(encoder(word, torch.ones(1, 4, dtype=torch.bool)), expected)


def test_the_lstm_ends_are_those_of_torch() -> None:
    torch.manual_seed(0)
    encoder = CharacterLSTM(5, 6, kernel_size=0)
    theirs = nn.LSTM(5, 3, batch_first=True, bidirectional=True)
    for suffix, side in (("", encoder.rnn.forward_rnn), ("_reverse", encoder.rnn.backward_rnn)):
        for name, weight in side.module.named_parameters():
            getattr(theirs, name + suffix).data = weight.data
    word = torch.randn(1, 4, 5)
    _, (last, _) = theirs(word)
    ours = encoder(word, torch.ones(1, 4, dtype=torch.bool))
    torch.testing.assert_close(ours[0], torch.cat([last[0, 0], last[1, 0]]))

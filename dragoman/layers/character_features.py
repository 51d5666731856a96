"""Features of a word from its characters, for taggers: a bidirectional LSTM or a convolution.

Both map characters (N, C) with a mask (N, C), True at real characters, to features (N, F). A word
of only padding has features of its own, which no real token reads.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dragoman.layers.rnn import LSTM, BidirectionalRNN, last_bidirectional_states


class CharacterEncoder(nn.Module):
    """Base class: character embeddings (N, C, E) to the features of each word (N, F)."""

    def __init__(self, width: int, features: int, *, kernel_size: int) -> None:
        super().__init__()

    def forward(self, characters: Tensor, mask: Tensor) -> Tensor:
        """Return the features (N, F) of embedded characters (N, C, E) with their mask (N, C)."""
        raise NotImplementedError


class CharacterLSTM(CharacterEncoder):
    """The last states of a forward and a backward LSTM: Lample et al. (2016), section 4.1."""

    def __init__(self, width: int, features: int, *, kernel_size: int) -> None:
        super().__init__(width, features, kernel_size=kernel_size)
        self.rnn = BidirectionalRNN(LSTM(width, features // 2), LSTM(width, features // 2))

    def forward(self, characters: Tensor, mask: Tensor) -> Tensor:
        """Return both last states, concatenated."""
        return last_bidirectional_states(self.rnn(characters, mask), mask)


class CharacterCNN(CharacterEncoder):
    """A convolution and the maximum over a word's characters: Ma and Hovy (2016), section 2.1.

    As there, words are padded at both ends, so that a filter sees where a word begins and ends.
    """

    def __init__(self, width: int, features: int, *, kernel_size: int) -> None:
        super().__init__(width, features, kernel_size=kernel_size)
        self.kernel_size = kernel_size
        self.filters = nn.Linear(kernel_size * width, features)

    def forward(self, characters: Tensor, mask: Tensor) -> Tensor:
        """Return the largest value of each filter over the windows that touch a character."""
        reach = self.kernel_size - 1
        padded = F.pad(characters * mask.unsqueeze(2), (0, 0, reach, reach))  # (N, C + 2 reach, E)
        windows = padded.unfold(1, self.kernel_size, 1).transpose(2, 3)  # (N, C + reach, kernel, E)
        values = self.filters(windows.flatten(2))  # (N, C + reach, F)
        # A real word has a first character; padding words get a finite value like this too.
        real = torch.cat([torch.ones_like(mask[:, :1]), mask[:, 1:]], dim=1)
        reached = F.pad(real, (0, reach))  # window w ends at character w
        touched = torch.stack([reached.roll(back, dims=1) for back in range(reach + 1)]).any(dim=0)
        lowest = torch.finfo(values.dtype).min
        return values.masked_fill(~touched.unsqueeze(2), lowest).amax(dim=1)


# By the values of tag.characters.
CHARACTER_ENCODERS: dict[str, type[CharacterEncoder]] = {
    "lstm": CharacterLSTM,
    "cnn": CharacterCNN,
}

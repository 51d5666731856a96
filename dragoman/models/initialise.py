"""First values, chosen so that the paper's post-norm model trains with the paper's schedule.

- A matrix gets Xavier-uniform values: bound sqrt(6 / (inputs + outputs)). Matrices stored as one (query, key and value)
  are filled as one, which makes each smaller by the root of two; fairseq found this to train post-norm stacks better.
- An embedding gets N(0, 1 / D). Times sqrt(D) on the way in, its numbers are of size one, as are the positions'; on the way
  out, where it is the projection, logits start with variance one. N(0, 1) instead would give them variance D.
- Biases start at nought, norms at the identity.
"""

from __future__ import annotations

from torch import nn

from dragoman.attention.multihead import CrossAttention


def initialise(model: nn.Module) -> None:
    """Fill the weights of a model, in the order of its modules: the same values after the same `torch.manual_seed`."""
    for module in model.modules():
        if isinstance(module, nn.Linear):
            nn.init.xavier_uniform_(module.weight)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
    for module in model.modules():
        if isinstance(module, CrossAttention):
            # As in self-attention: queries as small as keys and values.
            nn.init.xavier_uniform_(module.query.weight, gain=2**-0.5)
            nn.init.xavier_uniform_(module.key_value.weight, gain=0.75**0.5)

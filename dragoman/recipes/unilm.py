"""One stack under a prefix mask: Dong et al. (2019), "UniLM"."""

from __future__ import annotations

from dragoman.config import Config
from dragoman.recipes.transformer import small


def dong2019() -> Config:
    """The sequence-to-sequence mask, trained from scratch at the size of `small`.

    The paper pre-trains BERT-large with three masks and fine-tunes with this one; all that differs
    from `small` here is the architecture, so that the two can be compared.
    """
    return small().replace(
        model={
            "architecture": "prefix_lm",  # section 2.3, the sequence-to-sequence language model
            "encoder": (),  # figure 1: one Transformer for source and target
            # nine layers without cross-attention have 0.96 of the weights of 4 + 4 with it
            "decoder": ("transformer*9",),
        },
    )

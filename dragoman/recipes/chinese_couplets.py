"""Chinese couplets and verse: the second line for a first, character by character.

A Transformer (Vaswani et al. 2017) with pre-norm (Xiong et al. 2020). Its sizes are those of
published models for small corpora; `docs/couplets.md` has the commands and what they reached.
"""

from __future__ import annotations

from dragoman.config import Config, DataConfig, DecodeConfig, ModelConfig, TextConfig, TrainConfig


def couplets() -> Config:
    """A model of characters for tens to hundreds of thousands of short verses."""
    return Config(
        text=TextConfig(
            tokenizer="characters",  # a line of verse is counted in characters
            vocab_size=12_000,  # an upper bound: every character that occurs
            # a rare character would be three bytes, which no constraint can place as one
            character_coverage=1.0,
            shared_vocab=True,  # both lines are of one language
        ),
        data=DataConfig(max_length=100),  # the longest couplets have about 60 characters per line
        model=ModelConfig(
            encoder=("transformer*6",),  # Vaswani et al., section 3.1: N = 6
            decoder=("transformer*6",),  # section 3.1: N = 6
            width=256,  # half of the base model's: a line has seven characters
            heads=4,  # heads of 64, as in the base model (section 3.2.2)
            ffn_width=1024,  # four times the width, as in the base model (section 3.3)
            residual="pre_norm",  # trains at a high learning rate with little warm-up
            tie_embeddings="all",  # section 3.4: most parameters are embeddings of characters
            dropout=0.2,  # between the base and the big model's: small data overfits
        ),
        train=TrainConfig(
            steps=3000,  # about ten epochs of 270,000 verses, or sixty of 34,000 couplets
            batch_tokens=8000,  # about 800 lines of seven characters
            optimizer="adamw",  # decoupled weight decay (Loshchilov and Hutter 2019)
            learning_rate=1.5e-3,  # twice the base model's peak, which pre-norm allows
            schedule="linear",  # decay to zero gives most of the gain of checkpoint averaging
            warmup_steps=300,  # a tenth of the run
            max_grad_norm=1.0,  # limits the effect of a bad batch
            label_smoothing=0.0,  # couplets are judged by perplexity, which smoothing raises
            ema_decay=0.998,  # averages about the last five hundred steps
            checkpoint_every=250,  # a dozen of a run
            validate_every=250,  # with the checkpoints
        ),
        decode=DecodeConfig(
            beam=4,  # section 6.1: beam size 4
            length_penalty=0.0,  # lines are of one length, which leaves nothing to correct
            max_length_ratio=1.0,  # the first line's length ...
            max_length_extra=10,  # ... and a margin for a model that misses it
        ),
    )

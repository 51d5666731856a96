"""The Transformer: Vaswani et al. (2017), "Attention Is All You Need", and two small variants.

Section and table numbers are the paper's.
"""

from __future__ import annotations

from dragoman.config import Config, DataConfig, DecodeConfig, ModelConfig, TextConfig, TrainConfig


def vaswani2017_base() -> Config:
    """The base model of table 3."""
    return Config(
        text=TextConfig(
            tokenizer="bpe",  # section 5.1: byte-pair encoding
            vocab_size=37_000,  # section 5.1: about 37,000 tokens for English-German
            shared_vocab=True,  # section 5.1: a shared source-target vocabulary
        ),
        # not in the paper: its released code trains on sentences of up to 256 tokens
        data=DataConfig(max_length=256),
        model=ModelConfig(
            encoder=("transformer*6",),  # section 3.1: N = 6 identical layers
            decoder=("transformer*6",),  # section 3.1: N = 6
            width=512,  # section 3.1: d_model = 512
            heads=8,  # section 3.2.2: h = 8, so d_k = d_v = 64
            ffn_width=2048,  # section 3.3: d_ff = 2048
            activation="relu",  # section 3.3, equation 2
            norm="layer",  # section 3.1: layer normalization
            norm_epsilon=1e-6,  # not in the paper: as in its released code
            residual="post_norm",  # section 3.1: LayerNorm(x + Sublayer(x))
            positions="sinusoidal",  # section 3.5
            # section 3.4: one matrix for both embeddings and the output projection
            tie_embeddings="all",
            scale_embeddings=True,  # section 3.4: embeddings times sqrt(d_model)
            attention_bias=False,  # section 3.2.2: projections W without a bias
            output_bias=False,  # section 3.4: the projection is the embedding matrix
            # section 5.4: P_drop = 0.1, on every sub-layer's output and on the embeddings
            dropout=0.1,
            attention_dropout=0.0,  # section 5.4 names no other dropout
            ffn_dropout=0.0,  # section 5.4 names no other dropout
        ),
        train=TrainConfig(
            steps=100_000,  # section 5.2: 100,000 steps
            # section 5.1: about 25,000 source and 25,000 target tokens per batch
            batch_tokens=25_000,
            optimizer="adam",  # section 5.3
            beta1=0.9,  # section 5.3
            beta2=0.98,  # section 5.3
            epsilon=1e-9,  # section 5.3
            schedule="noam",  # section 5.3, equation 3
            # section 5.3: the factor before equation 3, whose peak is 512^-0.5 * 4000^-0.5 = 7e-4
            learning_rate=1.0,
            warmup_steps=4000,  # section 5.3: warmup_steps = 4000
            label_smoothing=0.1,  # section 5.4: epsilon_ls = 0.1
            average_checkpoints=5,  # section 6.1: the last 5 checkpoints
            keep_checkpoints=5,  # as many as are averaged
            final_checkpoint="last",  # section 6.1: the average of the last, not of the best
            # section 6.1: every 10 minutes, at 0.4 seconds per step (section 5.2)
            checkpoint_every=1500,
            validate_every=1500,  # with the checkpoints
        ),
        decode=DecodeConfig(
            beam=4,  # section 6.1: beam size 4
            length_penalty=0.6,  # section 6.1: alpha = 0.6
            max_length_ratio=1.0,  # section 6.1: at most the input's length ...
            max_length_extra=50,  # ... plus 50
        ),
    )


def vaswani2017_big() -> Config:
    """The big model of table 3."""
    return vaswani2017_base().replace(
        model={
            "width": 1024,  # table 3: d_model = 1024
            "heads": 16,  # table 3: h = 16
            "ffn_width": 4096,  # table 3: d_ff = 4096
            "dropout": 0.3,  # table 3: P_drop = 0.3 (0.1 for English-French, section 6.1)
        },
        train={
            "steps": 300_000,  # section 5.2: 300,000 steps
            "average_checkpoints": 20,  # section 6.1: the last 20 checkpoints
            "keep_checkpoints": 20,  # as many as are averaged
            # section 6.1: every 10 minutes, at 1 second per step (section 5.2)
            "checkpoint_every": 600,
            "validate_every": 600,  # with the checkpoints
        },
    )


def small() -> Config:
    """A model for tens to hundreds of thousands of sentence pairs."""
    return Config(
        # a small corpus has few examples of rare tokens
        text=TextConfig(vocab_size=8000),
        model=ModelConfig(
            encoder=("transformer*4",),  # two thirds of the base model's depth
            decoder=("transformer*4",),  # the same
            width=256,  # half of the base model's: on small data smaller models score higher
            heads=4,  # heads of 64, as in the base model (section 3.2.2)
            ffn_width=1024,  # four times the width, as in the base model (section 3.3)
            # trains at a high learning rate with little warm-up (Xiong et al. 2020)
            residual="pre_norm",
            dropout=0.2,  # between the base and the big model's: small data overfits
        ),
        train=TrainConfig(
            steps=10_000,  # about 50 epochs of 30,000 pairs
            batch_tokens=6000,  # about a hundred steps per epoch on small data
            # decoupled weight decay (Loshchilov and Hutter 2019)
            optimizer="adamw",
            learning_rate=2e-3,  # pre-norm trains at three times the base model's peak
            schedule="linear",  # decay to zero gives most of the gain of checkpoint averaging
            warmup_steps=400,  # enough for pre-norm
            max_grad_norm=1.0,  # limits the effect of a bad batch
            label_smoothing=0.1,  # section 5.4
            ema_decay=0.999,  # averages about the last thousand steps
            checkpoint_every=500,  # a few minutes
            validate_every=500,  # with the checkpoints
        ),
        # a larger beam is cheap at this size
        decode=DecodeConfig(beam=5, length_penalty=1.0),
    )


def tiny() -> Config:
    """A model that two CPU cores train in ten minutes."""
    return small().replace(
        text={"vocab_size": 4000},  # the embedding is a third of the parameters
        model={
            "encoder": ("transformer*2",),  # depth costs time
            "decoder": ("transformer*2",),  # the same
            "width": 128,  # the width that published Multi30k models settled on
            "heads": 4,  # heads of 32
            "ffn_width": 512,  # four times the width
            "dropout": 0.1,  # few epochs, so little overfitting
        },
        train={
            "steps": 2000,  # ten minutes on two cores
            "batch_tokens": 2500,  # more steps per epoch
            "learning_rate": 4e-3,  # small models train at high rates
            "warmup_steps": 200,  # a tenth of the run
            "checkpoint_every": 200,  # about a minute
            "validate_every": 200,  # with the checkpoints
        },
    )

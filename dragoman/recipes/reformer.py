"""The Reformer: Kitaev, Kaiser and Levskaya (2020), "Reformer: The Efficient Transformer".

"Released" is the authors' code, google/trax: trax/supervised/configs/reformer_wmt_ende.gin for translation, reformer_enwik8.gin and
reformer_copy.gin for hashing, trax/models/reformer/reformer.py for the layers. The paper's text was not at hand, so
no section is cited. Where this differs from the released settings, the line says so.
"""

from __future__ import annotations

from dragoman.config import Config, DataConfig, DecodeConfig, ModelConfig, TextConfig, TrainConfig


def kitaev2020_wmt() -> Config:
    """The paper's translation model: a base Transformer made of reversible layers; sentences are too short to hash."""
    return Config(
        text=TextConfig(
            tokenizer="bpe",  # released: tensor2tensor's 32k subwords; byte-pair encoding is ours
            vocab_size=32_000,  # released: translate_ende_wmt32k
            shared_vocab=True,  # released: one vocabulary of 33,300
        ),
        data=DataConfig(max_length=256),  # released: wmt_preprocess.max_length
        model=ModelConfig(
            encoder=(
                "reformer(layers=6, attention=full)",
            ),  # released: 6 layers; the paper translates without hashing
            decoder=("reformer(layers=6, attention=full)",),  # released: 6 layers
            width=512,  # released: d_model
            heads=8,  # released: n_heads
            ffn_width=2048,  # released: d_ff
            activation="relu",  # released: ff_activation
            norm="layer",  # released: layer normalisation before each half of a layer
            norm_epsilon=1e-6,  # released: trax's own
            residual="pre_norm",  # reversible layers have their norms inside; released: at the start of each half
            positions="sinusoidal",  # released: PositionalEncoding, without axial shapes
            max_positions=2048,  # released: max_len
            tie_embeddings="all",  # not the released code's, which has an output matrix of its own: as in the Transformer's paper
            scale_embeddings=True,  # not the released code's: goes with tying
            dropout=0.1,  # released: dropout
            ffn_dropout=0.1,  # released: ff_dropout
        ),
        train=TrainConfig(
            steps=100_000,  # the paper's first row, BLEU 27.6; released: 500,000 for 28.0
            batch_tokens=25_000,  # released: 256 sentences a device; here the Transformer's paper
            optimizer="adam",  # released
            beta1=0.9,  # released: b1
            beta2=0.98,  # released: b2
            epsilon=1e-9,  # released: eps
            schedule="noam",  # released: constant * linear_warmup * rsqrt_decay
            learning_rate=2.0,  # released: 0.088, which is twice the root of 1 / 512
            warmup_steps=8000,  # released: warmup_steps
            label_smoothing=0.1,  # not in the released settings: as in the Transformer's paper
            checkpoint_every=1000,  # released: eval_frequency
            validate_every=1000,  # with the checkpoints
        ),
        decode=DecodeConfig(
            beam=4, length_penalty=0.6
        ),  # not in the released settings: as in the Transformer's paper
    )


def kitaev2020() -> Config:
    """The whole Reformer, for documents of some two thousand pieces: `kitaev2020_wmt`, but for the lines below."""
    blocks = "reformer(layers=6, rounds=4, buckets=64, window=64, ffn_chunks=4)"
    return kitaev2020_wmt().replace(
        data={
            "max_length": 2048
        },  # not the paper's, which hashes sequences up to 65,536 long: what documents take
        model={
            # Four rounds: of the paper's duplication task, the fewest that lose next to nothing. Two times 2048 / 64 buckets: the paper's
            # rule for 2048 pieces in windows of 64 (released: chunks of 16 to 256). The released model hashes in encoders alone.
            "encoder": (
                blocks,
            ),  # see above; four chunks keep the feed-forward layers as narrow as the rest
            "decoder": (blocks,),  # the same
        },
        train={
            "batch_tokens": 16_384,  # not the paper's: eight documents
        },
        decode={
            "max_length_ratio": 1.5
        },  # not the paper's: documents differ less in length than sentences
    )

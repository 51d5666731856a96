"""Language models: Transformer-XL, AWD-LSTM, the plain Transformer and the Reformer.

"Released" is the authors' code: kimiyoung/transformer-xl, salesforce/awd-lstm-lm and google/trax.
The sizes for WikiText-2 are those of published replications of Transformer-XL on it; the paper has
WikiText-103. Values without a remark are ours.
"""

from __future__ import annotations

from dragoman.config import Config, ModelConfig, TextConfig, TrainConfig
from dragoman.config.language_model import LanguageConfig


def dai2019_lm() -> Config:
    """Transformer-XL on words, in the size for WikiText-2.

    Dai et al. (2019), "Transformer-XL: Attentive Language Models Beyond a Fixed-Length Context".
    """
    return Config(
        task="language",
        text=TextConfig(
            tokenizer="words",  # WikiText is tokenized; all of its types are scored
            vocab_size=300_000,  # an upper bound: WikiText-2 has 33,278 types
            normalization="none",  # the text as it is
        ),
        model=ModelConfig(
            decoder=("transformer*10",),  # the paper: 16, for WikiText-103
            width=400,  # replications on WikiText-2; the paper: 410
            heads=10,  # the paper
            ffn_width=900,  # replications; the paper: 2,100
            activation="relu",  # the paper
            residual="pre_norm",  # released: pre_lnorm is off; post-norm needs a longer warm-up
            positions="transformer_xl",  # the paper, section 3.3
            tie_embeddings="all",  # released: tied
            scale_embeddings=True,  # released: emb_scale
            attention_bias=False,  # released
            output_bias=True,  # released
            dropout=0.2,  # replications: inner dropout
            attention_dropout=0.1,  # replications: 0.2 (dropatt)
            ffn_dropout=0.2,  # as the inner dropout; released: dropout after the activation too
        ),
        language=LanguageConfig(
            segment=128,  # the paper: 150; matrices of a multiple of 64 are faster
            memory=128,  # as long as a segment, as in the paper
            clamp_distance=255,  # the farthest of training
            embedding_dropout=0.0,  # replications: 0.3, in post-norm layers
            input_dropout=0.6,  # replications: 0.7, locked
            output_dropout=0.5,  # replications, locked
            locked_dropout=True,  # replications, after Merity et al. (2018)
        ),
        train=TrainConfig(
            steps=50_000,  # 196 epochs; replications: 125,000 batches of 4,800 tokens, 287 epochs
            batch_tokens=8_192,  # 64 rows of 128
            optimizer="adamw",  # the paper: Adam
            # released: 0.999, with which a rare word moves by three times the learning rate
            beta2=0.99,
            epsilon=1e-8,  # torch's default, as released
            # replications: 3.5e-4 for half the batch. Adam at 6e-4 with embedding dropout of 0.2
            # diverged after 8,000 steps; which of the three changes matters is not known.
            learning_rate=4e-4,
            weight_decay=0.05,
            schedule="cosine",  # released
            warmup_steps=3_000,  # replications
            max_grad_norm=0.25,  # released: clip
            label_smoothing=0.0,  # perplexity is the metric
            checkpoint_every=5_000,
            validate_every=2_500,
        ),
    )


def dai2019_bytes() -> Config:
    """Transformer-XL on bytes, for books: memory four times as long in evaluation as in training.

    Dai et al. (2019). The paper's enwik8 model has 12 layers of this width.
    """
    return Config(
        task="language",
        text=TextConfig(tokenizer="bytes", normalization="none"),  # the paper's enwik8: bytes
        model=ModelConfig(
            decoder=("transformer*8",),  # 12 in the paper
            width=512,  # the paper
            heads=8,  # the paper
            ffn_width=2048,  # the paper
            activation="relu",  # the paper
            residual="pre_norm",  # released: pre_lnorm is off; post-norm needs a longer warm-up
            positions="transformer_xl",  # the paper, section 3.3
            tie_embeddings="all",
            attention_bias=False,  # released
            output_bias=True,  # released
            dropout=0.1,  # the paper: released enwik8 settings
            ffn_dropout=0.1,  # released: dropout after the activation too
            attention_dropout=0.0,  # released: dropatt
        ),
        language=LanguageConfig(
            segment=512,  # released
            memory=512,  # released
            eval_memory=2_048,  # four times the training memory; the paper: 2,100 to 3,800
            clamp_distance=1_023,  # the farthest of training; released: 820
            input_dropout=0.1,  # released
            output_dropout=0.1,  # released: dropout after the last layer
        ),
        train=TrainConfig(
            steps=40_000,
            batch_tokens=16_384,  # 32 rows of 512; released: 22
            optimizer="adam",  # the paper
            beta2=0.999,  # torch's default, as released
            epsilon=1e-8,  # torch's default, as released
            learning_rate=5e-4,  # released: 2.5e-4 over 400,000 steps; ours has far fewer
            schedule="cosine",  # released
            warmup_steps=1_000,
            max_grad_norm=0.25,  # released: clip
            label_smoothing=0.0,  # bits per byte are the metric
            checkpoint_every=5_000,
            validate_every=5_000,  # scoring some megabytes takes as long as hundreds of steps
        ),
    )


def merity2018() -> Config:
    """AWD-LSTM on words: weight drop, locked dropouts, tied embeddings, averaged weights.

    Merity, Keskar and Socher (2018), "Regularizing and Optimizing LSTM Language Models".
    """
    layer = "residual_connection=false, weight_dropout=0.5, locked_dropout=true"
    return Config(
        task="language",
        text=TextConfig(
            tokenizer="words",  # WikiText is tokenized; all of its types are scored
            vocab_size=300_000,  # an upper bound: WikiText-2 has 33,278 types
            normalization="none",  # the text as it is
        ),
        model=ModelConfig(
            # the paper: 3 layers; weight drop 0.5; dropout 0.2 between layers (released, for
            # WikiText-2). The last layer's is language.output_dropout.
            decoder=(f"lstm({layer}, dropout=0.2)*2", f"lstm({layer}, dropout=0.0)"),
            # the paper: 1,150, and 400 in the last layer. A multiple of 64 is faster, and the last
            # layer is as wide as the others, before a projection to the embeddings.
            width=1_152,
            embedding_width=400,  # the paper
            residual="post_norm",  # not used: the blocks have no residual connection
            positions="none",  # a recurrence needs none
            tie_embeddings="all",  # the paper
            scale_embeddings=False,  # released
            output_bias=True,  # released
            dropout=0.2,
        ),
        language=LanguageConfig(
            segment=70,  # the paper: back-propagation through 70 steps, on average
            embedding_dropout=0.1,  # the paper
            input_dropout=0.65,  # released, for WikiText-2
            output_dropout=0.4,  # the paper
            locked_dropout=True,  # the paper: variational dropout
            activation_penalty=2.0,  # the paper: alpha
            temporal_penalty=1.0,  # the paper: beta
        ),
        train=TrainConfig(
            steps=50_000,  # 134 epochs of WikiText-2; released: 750
            batch_tokens=5_600,  # the paper: 80 rows of 70
            # the paper: NT-ASGD, averaged SGD at a rate of 30. AdamW with one cycle needs far fewer
            # epochs (Gugger and Howard 2018), and the EMA takes the place of averaging.
            optimizer="adamw",
            beta1=0.8,  # Gugger and Howard (2018): momentum of one cycle
            beta2=0.99,  # the same
            epsilon=1e-8,
            learning_rate=3e-3,  # the same: 5e-3 at the peak
            schedule="cosine",
            warmup_steps=2_000,
            weight_decay=0.03,  # the same: 0.1 (Gugger and Howard); ours has an EMA
            ema_decay=0.999,
            max_grad_norm=0.25,  # the paper: clip
            label_smoothing=0.0,  # perplexity is the metric
            checkpoint_every=5_000,
            validate_every=2_500,
        ),
    )


def vaswani2017_lm() -> Config:
    """Plain causal Transformer on words, as large as dai2019_lm and scored with equal context.

    Vaswani et al. (2017), the decoder without cross-attention, as the vanilla model that Dai et al.
    (2019) compare with.
    """
    return dai2019_lm().replace(
        model={
            "positions": "sinusoidal",  # Vaswani et al.
            "attention_bias": True,  # Vaswani et al.
        },
        language={
            "segment": 256,  # segment and memory of dai2019_lm
            "memory": 0,  # fixed-length context
            "clamp_distance": 0,  # there are no relative distances
            "eval_stride": 128,  # context of 128 to 255 tokens, as with a memory of 128
        },
    )


def vaswani2017_bytes() -> Config:
    """Plain causal Transformer on bytes, as large as dai2019_bytes."""
    return dai2019_bytes().replace(
        model={
            "positions": "sinusoidal",  # Vaswani et al.
            "attention_bias": True,  # Vaswani et al.
        },
        language={
            "segment": 1_024,  # segment and memory of dai2019_bytes
            "memory": 0,  # fixed-length context
            "eval_memory": 0,
            "clamp_distance": 0,
            "eval_stride": 512,  # context of 512 to 1,023 bytes
        },
    )


def radford2018() -> Config:
    """GPT: a plain causal Transformer on subwords.

    Radford et al. (2018), "Improving Language Understanding by Generative Pre-Training".
    """
    return Config(
        task="language",
        text=TextConfig(tokenizer="bpe", vocab_size=16_000),  # the paper: 40,000 BPE merges
        model=ModelConfig(
            decoder=("transformer*12",),  # the paper
            width=768,  # the paper
            heads=12,  # the paper
            ffn_width=3_072,  # the paper
            activation="gelu",  # the paper
            residual="post_norm",  # the paper; GPT-2 moved the norm
            positions="learned",  # the paper
            max_positions=512,  # the paper
            tie_embeddings="all",  # released
            scale_embeddings=False,  # released
            dropout=0.1,  # the paper
            attention_dropout=0.1,  # the paper
        ),
        language=LanguageConfig(
            segment=512,  # the paper
            input_dropout=0.1,  # the paper
        ),
        train=TrainConfig(
            steps=100_000,
            batch_tokens=32_768,  # the paper: 64 sequences of 512
            optimizer="adamw",  # the paper: Adam with decoupled weight decay
            beta2=0.999,
            epsilon=1e-8,
            learning_rate=2.5e-4,  # the paper
            schedule="cosine",  # the paper
            warmup_steps=2_000,  # the paper
            weight_decay=0.01,  # the paper
            max_grad_norm=1.0,  # released
            label_smoothing=0.0,
            checkpoint_every=5_000,
            validate_every=2_500,
        ),
    )


def kitaev2020_lm() -> Config:
    """Reformer on bytes: LSH attention over segments of 4,096 bytes, reversible layers.

    Kitaev, Kaiser and Levskaya (2020), "Reformer: The Efficient Transformer", whose enwik8
    segments have 65,536 bytes.
    """
    return Config(
        task="language",
        text=TextConfig(tokenizer="bytes", normalization="none"),  # released: enwik8 bytes
        model=ModelConfig(
            # 4 rounds: the paper's compromise; 128 buckets: twice the length by the window.
            decoder=("reformer(layers=6, rounds=4, buckets=128, window=64, ffn_chunks=4)",),
            width=512,  # released: 1,024
            heads=8,  # released
            ffn_width=2_048,  # released: 4,096
            residual="pre_norm",  # reversible layers are pre-norm
            positions="sinusoidal",  # released: axial positions, for far longer segments
            max_positions=4_096,
            tie_embeddings="all",
            dropout=0.1,  # released: 0.2
        ),
        language=LanguageConfig(segment=4_096, input_dropout=0.1, eval_stride=2_048),
        train=TrainConfig(
            steps=40_000,
            batch_tokens=16_384,  # 4 segments
            optimizer="adam",
            beta2=0.98,
            epsilon=1e-9,  # released
            learning_rate=5e-4,
            schedule="cosine",
            warmup_steps=1_000,
            max_grad_norm=1.0,
            label_smoothing=0.0,
            checkpoint_every=5_000,
            validate_every=5_000,
        ),
    )

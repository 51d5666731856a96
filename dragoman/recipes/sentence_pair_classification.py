"""Models of sentence pairs, from scratch: no pre-trained vectors.

Settings that differ from the paper are marked. In all: one width for embeddings and states, words
in lower case, small widths and few epochs for a few thousand pairs (the papers train on half a
million of SNLI), and a second loss for a score where the records have one (Tai et al. 2015).
"""

from __future__ import annotations

from dragoman.config import Config, DataConfig, ModelConfig, TextConfig, TrainConfig
from dragoman.config.sentence_pair_classification import PairsConfig


def chen2017() -> Config:
    """ESIM: BiLSTM, co-attention, comparison, a second BiLSTM, mean and max pooling."""
    return Config(
        task="pairs",
        text=_words(),
        data=DataConfig(max_length=100),
        pairs=PairsConfig(
            interaction="co_attention",  # the paper, section 3.2
            composition=("bilstm(residual_connection=false)",),  # the paper, section 3.3
            pooling="mean_max",  # the paper, equations 18 and 19
            classifier_width=128,  # the paper: one hidden layer with tanh, of the model's width
            match_features=True,  # not in the paper: stands in for pre-trained vectors
        ),
        # The paper: a BiLSTM. Here it has a residual connection and a norm, so that words are
        # aligned by their embeddings too; vectors learned from so few pairs are aligned vaguely
        # otherwise.
        model=_pair_model(encoder=("bilstm",)),
        train=_pair_training(),
    )


def parikh2016() -> Config:
    """Decomposable attention: words are aligned, compared and summed, without their order."""
    return Config(
        task="pairs",
        text=_words(),
        data=DataConfig(max_length=100),
        pairs=PairsConfig(
            interaction="decomposable",  # the paper, sections 3.1 and 3.2
            pooling="sum",  # the paper, section 3.3
            classifier_width=128,  # the paper: the width of all layers, 200
            match_features=True,  # not in the paper: stands in for pre-trained vectors
        ),
        # The paper projects embeddings by a matrix; here a feed-forward network around which they
        # have a residual connection.
        model=_pair_model(encoder=("ffn",)),
        train=_pair_training(),
    )


def conneau2017() -> Config:
    """InferSent: BiLSTM and max pooling of each sentence alone, without attention."""
    return Config(
        task="pairs",
        text=_words(),
        data=DataConfig(max_length=100),
        pairs=PairsConfig(
            interaction="none",  # the paper: sentence encoders
            pooling="max",  # the paper: BiLSTM-max is the best encoder
            classifier_width=512,  # the paper: one hidden layer of 512
        ),
        model=_pair_model(encoder=("bilstm(residual_connection=false)",)),
        train=_pair_training(),
    )


def rocktaschel2016() -> Config:
    """Both sentences as one sequence: a Transformer attends from every word to every other."""
    return Config(
        task="pairs",
        text=_words(),
        data=DataConfig(max_length=100),
        pairs=PairsConfig(
            # The paper reads the second sentence by an LSTM that starts from the first's last
            # state, and attends back; here self-attention over both, with an embedding of the
            # sentence.
            interaction="sequence",
            pooling="mean_max",  # the paper: the last state
            classifier_width=128,
            match_features=True,  # not in the paper: stands in for pre-trained vectors
            swap=True,  # of the score only
        ),
        model=_pair_model(
            encoder=("transformer*2",), dropout=0.1, positions="sinusoidal", residual="pre_norm"
        ),
        train=_pair_training(learning_rate=2e-3),
    )


def _words() -> TextConfig:
    """Return the settings of the vocabulary."""
    return TextConfig(tokenizer="words", lowercase=True, vocab_size=30_000)


def _pair_model(
    *,
    encoder: tuple[str, ...],
    dropout: float = 0.2,
    positions: str = "none",
    residual: str = "post_norm",
) -> ModelConfig:
    """Return the settings that all models of pairs share."""
    return ModelConfig(
        encoder=encoder,
        width=64,  # Parikh et al.: 200; Chen et al.: 300, on a hundred times the pairs
        heads=4,
        ffn_width=128,
        dropout=dropout,  # Parikh et al.: 0.2; Chen et al.: 0.5
        positions=positions,
        residual=residual,
        scale_embeddings=False,
    )


def _pair_training(*, learning_rate: float = 3e-3) -> TrainConfig:
    """Return the settings of training that all models of pairs share."""
    return TrainConfig(
        epochs=12,
        batch_tokens=1024,  # about 64 pairs; Chen et al.: 32
        optimizer="adam",  # Chen et al.: Adam
        learning_rate=learning_rate,  # Chen et al.: 4e-4
        beta2=0.999,  # Chen et al.: 0.999
        epsilon=1e-8,
        schedule="cosine",
        warmup_steps=50,
        max_grad_norm=5.0,
        label_smoothing=0.0,
        ema_decay=0.98,  # averages over 50 steps
        precision="float32",  # small enough, and exact
        compile="off",  # RNN kernels are not compiled
        checkpoint_every=1000,
        validate_every=200,
        best_metric="accuracy",
        final_checkpoint="best",
    )

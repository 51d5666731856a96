"""Taggers: Huang et al. (2015), Lample et al. (2016), Ma and Hovy (2016), Plank et al. (2016).

Settings that differ from the paper are marked. In all: AdamW with a linear decay instead of the
papers' SGD; an exponential moving average of the weights; the joined embeddings are projected to
the encoder's width, which the papers' LSTMs take as they are; spans are trained as IOBES.
Embeddings start at random: pre-trained vectors, which the papers use, are given by tag.vectors.
"""

from __future__ import annotations

from dragoman.config import Config, DataConfig, ModelConfig, TextConfig, TrainConfig
from dragoman.config.tagging import TagConfig

# From no paper: shared by all these recipes, chosen for corpora of some 200,000 tokens.
_DATA = DataConfig(hold_out=10)  # where there is no validation file, as for CoNLL-2000


def _train(**changes: object) -> TrainConfig:
    """Return the optimization that all these recipes share; none of it is a paper's."""
    values: dict[str, object] = {
        "epochs": 30.0,  # the papers: 50 to 100 of SGD
        "batch_tokens": 1024,  # about 50 sentences; the papers: 1 to 100
        "optimizer": "adamw",  # the papers: SGD
        "learning_rate": 2e-3,  # twice Adam's default, which the decay allows
        "beta2": 0.99,  # embeddings of rare words have few gradients
        "epsilon": 1e-8,  # Adam's default
        "weight_decay": 1e-4,
        "schedule": "linear",  # to zero
        "warmup_steps": 200,
        "max_grad_norm": 5.0,  # Lample et al. (2016) and Ma and Hovy (2016)
        "label_smoothing": 0.0,  # the papers: none
        "ema_decay": 0.998,  # an average over two or three epochs
        "compile": "off",  # cuDNN's LSTM is not compiled
        "best_metric": "f1",  # of plain tags, the accuracy
        "final_checkpoint": "best",
        "validate_every": 500,
        "checkpoint_every": 500,
    }
    return TrainConfig(**(values | changes))  # type: ignore[arg-type]


def _text() -> TextConfig:
    """Return the word vocabulary that all these recipes share."""
    return TextConfig(
        tokenizer="words",
        vocab_size=200_000,  # all words of the training data
        lowercase=True,  # case is left to characters and features
        min_count=1,  # rare words are trained as <unk> too, by word dropout
    )


def _bilstm(layers: int = 2, *, width: int = 512, dropout: float = 0.5) -> ModelConfig:
    """Return a bidirectional LSTM encoder, with dropout before, between and after its layers."""
    return ModelConfig(
        encoder=(f"bilstm(residual_connection=false)*{layers}",),
        width=width,  # both directions together
        heads=1,
        positions="none",  # an RNN encodes the order
        tie_embeddings="none",
        scale_embeddings=False,
        dropout=dropout,
    )


def lample2016() -> Config:
    """BiLSTM-CRF with character features by a bidirectional LSTM."""
    return Config(
        task="tag",
        text=_text(),
        data=_DATA,
        # The paper: one layer of 100 cells a direction, dropout 0.5 before it. The second layer is
        # that of Reimers and Gurevych (2017), who found two best for chunks and entities.
        model=_bilstm(2, width=512, dropout=0.5),
        train=_train(epochs=40.0),
        tag=TagConfig(
            crf=True,  # section 2.2
            word_width=100,  # section 5: 100 for English
            normalize_digits=True,  # section 5.2: every digit is a zero
            # section 5.1: singletons only, with probability 0.5
            word_dropout=0.25,
            characters="lstm",  # section 4.1
            character_width=50,  # the paper: 25
            character_features=100,  # section 5.1: 25 a direction; here 50
            max_characters=16,  # the paper: all; of longer words here the first and last eight
        ),
    )


def huang2015() -> Config:
    """BiLSTM-CRF on words and spelling features, without a character model."""
    return lample2016().replace(
        tag={
            "characters": "none",  # the paper has spelling features instead
            # section 3.1: case, digits and punctuation as a shape; prefixes and suffixes of two to
            # five letters
            "features": (
                "shape",
                "prefix2",
                "prefix3",
                "prefix4",
                "suffix1",
                "suffix2",
                "suffix3",
                "suffix4",
            ),
            "feature_width": 16,  # the paper: indicators, connected to the output directly
            "word_width": 100,  # the paper: 130 to 50
        },
    )


def ma2016() -> Config:
    """BiLSTM-CRF with character features by a convolution."""
    return lample2016().replace(
        tag={
            "characters": "cnn",  # section 2.1
            "character_width": 30,  # table 1: 30
            "character_features": 100,  # table 1: 30 filters
            "character_kernel": 3,  # table 1: window size 3
            "normalize_digits": False,  # section 4: no preprocessing
        },
    )


def plank2016() -> Config:
    """POS tagging with an auxiliary target: the frequency class of each word."""
    return Config(
        task="tag",
        text=_text(),
        data=_DATA,
        # The paper: one or three layers of 100 a direction, Gaussian noise as the regularization
        model=_bilstm(2, width=512, dropout=0.5),
        train=_train(epochs=30.0),
        tag=TagConfig(
            crf=False,  # the paper: a softmax at each token
            # section 2.3, FREQBIN: int(log(count)) of the word; add fields such as xpos and feats
            auxiliary_fields=("frequency",),
            auxiliary_weight=0.3,  # the paper: the sum of both losses
            word_width=100,  # the paper: 128 (64 for Polyglot vectors)
            word_dropout=0.25,  # the paper: none
            characters="lstm",  # section 2.2: w + c
            character_width=100,  # section 3: 100
            character_features=200,  # section 3: 100 a direction
            max_characters=16,  # the paper: all; of longer words here the first and last eight
        ),
    )


def vaswani2017_tagger() -> Config:
    """Transformer encoder as a tagger, with character features and a CRF."""
    return Config(
        task="tag",
        text=_text(),
        data=_DATA,
        model=ModelConfig(
            encoder=("transformer*4",),  # the paper: 6 layers, of translation
            width=256,  # the paper: 512
            heads=4,  # the paper: 8; heads of 64 as there
            ffn_width=1024,  # four times the width, as in the paper
            residual="pre_norm",  # the paper: post-norm; pre-norm trains at a higher rate
            positions="sinusoidal",  # section 3.5
            tie_embeddings="none",
            scale_embeddings=False,
            dropout=0.3,  # the paper: 0.1, of 4.5 million sentences
            attention_dropout=0.1,
        ),
        train=_train(epochs=40.0, learning_rate=5e-4, beta2=0.98, warmup_steps=1000),
        tag=TagConfig(
            crf=True,  # not in the paper
            word_width=100,
            normalize_digits=True,
            word_dropout=0.25,
            input_dropout=0.2,
            characters="cnn",  # Ma and Hovy (2016): no recurrence, as the encoder
            character_width=50,
            character_features=100,
            max_characters=16,
        ),
    )

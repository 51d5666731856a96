"""Text classifiers, from scratch: no pre-trained vectors unless `classify.vectors` names some.

Settings that differ from the paper are marked. In all: words instead of pre-trained vectors, which
needs more dropout than the papers have; AdamW with a linear decay instead of their SGD, Adadelta
and Adam; an exponential moving average of the weights; and whole texts, not their beginnings.
"""

from __future__ import annotations

from typing import Any

from dragoman.config import Config, DataConfig, ModelConfig, TextConfig, TrainConfig
from dragoman.config.classification import ClassifyConfig

MAX_WORDS = 5000  # whole texts; a longer one is cut
BIGRU = "bigru(residual_connection=false, dropout=0.2)"
BILSTM = "bilstm(residual_connection=false, dropout=0.2)"


def yang2016() -> Config:
    """HAN: word BiGRU, word attention, sentence BiGRU, sentence attention."""
    return Config(
        task="classify",
        text=_words(
            vocab_size=50_000, min_count=5
        ),  # the paper: words with more than 5 occurrences
        data=DataConfig(max_length=MAX_WORDS),
        classify=ClassifyConfig(
            hierarchical=True,
            pooling="attention",  # the paper, equations 5 to 10
            score_width=100,  # the paper: 100
            max_sentence_words=50,  # not in the paper: bounds the padding; longer ones are split
            word_dropout=0.2,  # not in the paper
            sentence_dropout=0.1,  # not in the paper
            dropout=0.5,  # not in the paper
        ),
        # the paper: GRUs of 50 each way, embeddings of 200 from word2vec; here 100 and 200
        model=_model(encoder=(BIGRU,), width=200, dropout=0.5),
        # the paper: batches of 64 documents; here of about as many reviews of 250 words
        train=_training(epochs=8.0, batch_tokens=50_000, ema_decay=0.998),
    )


def kim2014() -> Config:
    """TextCNN: filters of several widths over the words, max-pooled."""
    return Config(
        task="classify",
        text=_words(),
        data=DataConfig(max_length=MAX_WORDS),
        classify=ClassifyConfig(
            pooling="none",  # no encoder besides the filters
            filter_widths=(3, 4, 5),  # the paper: 3, 4, 5
            filters=100,  # the paper: 100 feature maps each
            dropout=0.5,  # the paper: 0.5
            word_dropout=0.2,  # not in the paper, whose vectors are pre-trained
        ),
        model=_model(encoder=(BILSTM,), width=300, dropout=0.3),  # the paper: vectors of 300
        # the paper: batches of 50 sentences, of about 20 words each
        train=_training(epochs=15.0, batch_tokens=1200, weight_decay=0.05, ema_decay=0.995),
    )


def wang2012() -> Config:
    """Naive-Bayes n-grams beside a TextCNN and a BiLSTM, for short texts."""
    return Config(
        task="classify",
        text=_words(),
        data=DataConfig(max_length=MAX_WORDS),
        classify=ClassifyConfig(
            pooling="max",  # not in the paper, which has n-grams alone
            filter_widths=(2, 3, 4, 5),  # not in the paper
            filters=200,  # not in the paper
            ngrams=3,  # the paper: bigrams; trigrams help a little
            ngram_weights="naive_bayes",  # the paper, section 2.3
            ngram_min_count=1,  # the paper: all n-grams
            branch_loss=1.0,  # not in the paper: the n-grams alone fit the training set
            word_dropout=0.3,
            dropout=0.5,
        ),
        model=_model(encoder=(BILSTM,), width=200, dropout=0.4),
        train=_training(epochs=12.0, batch_tokens=1200, weight_decay=0.05, ema_decay=0.995),
    )


def zhou2016() -> Config:
    """BiLSTM with attention pooling."""
    return Config(
        task="classify",
        text=_words(lowercase=False),
        data=DataConfig(max_length=MAX_WORDS),
        classify=ClassifyConfig(
            # The paper: softmax(w^T tanh(H)); here with a matrix inside, as in Yang et al.
            pooling="attention",
            score_width=100,
            dropout=0.5,  # the paper: 0.5 before the output
            word_dropout=0.1,  # not in the paper
        ),
        # the paper: LSTMs of 100 each way, dropout of 0.3 for embeddings and LSTM
        model=_model(encoder=("bilstm(residual_connection=false)",), width=200, dropout=0.3),
        # the paper: batches of 10 sentences
        train=_training(epochs=12.0, batch_tokens=1200, ema_decay=0.995),
    )


def li2002() -> Config:
    """Question types: BiLSTM and filters, with the fine types as a second label."""
    return Config(
        task="classify",
        text=_words(lowercase=False),  # names and numbers indicate the question type
        data=DataConfig(max_length=MAX_WORDS, label_field="coarse"),  # the paper: 6 coarse classes
        classify=ClassifyConfig(
            pooling="max",  # not in the paper, which has a hierarchy of linear classifiers
            filter_widths=(1, 2, 3, 4, 5),  # not in the paper
            filters=100,  # not in the paper
            auxiliary_field="fine",  # the paper: 50 fine classes below the coarse ones
            auxiliary_weight=1.0,
            ngrams=3,  # the paper: words and conjunctions of them, among other features
            ngram_weights="naive_bayes",  # Wang and Manning (2012)
            ngram_min_count=1,
            branch_loss=1.0,
            word_dropout=0.1,
            dropout=0.5,
        ),
        model=_model(encoder=(BILSTM,), width=400, dropout=0.4),
        train=_training(epochs=20.0, batch_tokens=800, weight_decay=0.05, ema_decay=0.995),
    )


def lin2017() -> Config:
    """Structured self-attention: 30 weighted sums of a BiLSTM's states, kept apart."""
    return Config(
        task="classify",
        text=_words(),
        data=DataConfig(max_length=MAX_WORDS),
        classify=ClassifyConfig(
            pooling="structured",
            hops=30,  # the paper: r = 30
            score_width=350,  # the paper: d_a = 350
            overlap_penalty=1.0,  # the paper: coefficient 1 for Yelp, 0.3 for others
            hidden_width=2000,  # the paper: 2000 (3000 for age prediction)
            word_dropout=0.1,  # not in the paper
            dropout=0.5,  # the paper: 0.5
        ),
        # the paper: LSTMs of 300 each way, vectors of 100
        model=_model(encoder=(BILSTM,), width=600, embedding_width=100, dropout=0.3),
        # the paper: batches of 32 reviews
        train=_training(epochs=8.0, batch_tokens=16_000, max_grad_norm=0.5, ema_decay=0.998),
    )


def bai2018() -> Config:
    """TCN: causal dilated convolutions whose reach doubles with each block."""
    return Config(
        task="classify",
        text=_words(vocab_size=30_000),
        data=DataConfig(max_length=MAX_WORDS),
        classify=ClassifyConfig(
            pooling="max",  # the paper: the last position, which is far from most words
            word_dropout=0.2,  # not in the paper
            dropout=0.5,  # not in the paper
        ),
        model=_model(
            # the paper: dilation 2^i at block i; kernel sizes 3 to 8
            encoder=tuple(f"tcn(kernel_size=3, dilation={2**i}, dropout=0.2)" for i in range(6)),
            width=256,
            dropout=0.5,  # the paper: up to 0.5 for word-level models, also of embeddings
        ),
        train=_training(epochs=8.0, batch_tokens=24_000, max_grad_norm=0.5, ema_decay=0.998),
    )


def yu2016() -> Config:
    """Dilated CNN: convolutions to both sides whose reach doubles with each block."""
    return Config(
        task="classify",
        text=_words(vocab_size=30_000),
        data=DataConfig(max_length=MAX_WORDS),
        classify=ClassifyConfig(
            pooling="attention",  # not in the paper, which labels every pixel
            word_dropout=0.2,
            dropout=0.5,
        ),
        model=_model(
            # the paper: 3 x 3 kernels with dilations 1, 1, 2, 4, 8, 16
            encoder=tuple(
                f"conv(kernel_size=3, dilation={each}, activation=relu, dropout=0.2)"
                for each in (1, 2, 4, 8, 16)
            ),
            width=256,
            dropout=0.5,
            residual="pre_norm",
        ),
        train=_training(epochs=8.0, batch_tokens=24_000, max_grad_norm=0.5, ema_decay=0.998),
    )


def vaswani2017_classifier() -> Config:
    """Transformer encoder with attention pooling."""
    return Config(
        task="classify",
        text=_words(vocab_size=30_000),
        data=DataConfig(max_length=1024),  # self-attention over a whole novel would not pay
        classify=ClassifyConfig(
            pooling="attention",  # not in the paper, which translates
            word_dropout=0.2,
            dropout=0.5,
        ),
        model=_model(
            encoder=("transformer*2",),  # the paper: 6; two overfit less without pre-training
            width=256,
            heads=4,
            ffn_width=512,
            positions="sinusoidal",  # the paper, section 3.5
            residual="pre_norm",  # the paper: post-norm, which needs a longer warm-up
            dropout=0.3,
            scale_embeddings=True,  # the paper, section 3.4
        ),
        train=_training(
            epochs=10.0, batch_tokens=24_000, learning_rate=5e-4, warmup_steps=500, ema_decay=0.998
        ),
    )


def johnson2015() -> Config:
    """seq-CNN: filters over one-hot words, beside naive-Bayes n-grams."""
    return Config(
        task="classify",
        text=_words(vocab_size=30_000),  # the paper: the 30,000 most frequent words
        data=DataConfig(max_length=MAX_WORDS),
        classify=ClassifyConfig(
            pooling="none",
            filter_input="one_hot",  # the paper: no embedding layer
            filter_widths=(2, 3),  # the paper: two layers of regions, 2 and 3
            filters=1000,  # the paper: 1,000 neurons each
            dropout=0.5,  # the paper: 0.5 before the output
            # Wang and Manning (2012): the paper's own bag-of-n-grams branch has 20 pooling units
            ngrams=3,
            ngram_weights="naive_bayes",
            ngram_min_count=2,
            branch_loss=1.0,  # not in the paper: the n-grams alone fit the training set
        ),
        model=_model(encoder=(BILSTM,), width=200, dropout=0.0),
        # the paper: SGD with momentum 0.9, the rate divided by ten at 80 % of the epochs
        train=_training(
            epochs=8.0, batch_tokens=40_000, learning_rate=5e-4, weight_decay=0.1, ema_decay=0.998
        ),
    )


def adhikari2019() -> Config:
    """Regularized BiLSTM with max-pooling, for documents with several labels."""
    return Config(
        task="classify",
        text=_words(vocab_size=30_000, min_count=2),
        data=DataConfig(max_length=1000),
        classify=ClassifyConfig(
            pooling="max",  # the paper: max-pooling over time
            tune_threshold="global",  # the paper: 0.5
            embedding_dropout=0.1,  # the paper: embedding dropout 0.1
            word_dropout=0.1,  # not in the paper
            dropout=0.5,  # the paper: 0.5
        ),
        # the paper: one BiLSTM of 512 each way on vectors of 300, weight-dropped by 0.1
        model=_model(
            encoder=("bilstm(residual_connection=false, dropout=0.0)",),
            width=1024,
            embedding_width=300,
            dropout=0.2,
        ),
        train=_reuters_training(),
    )


def mullenbach2018() -> Config:
    """CAML: attention with one query per label, which also reads the labels' names."""
    return adhikari2019().replace(
        classify={
            "pooling": "labels",  # the paper, section 2.2
            "label_names": True,  # the paper: a penalty towards the labels' descriptions
        },
        # the paper: a convolution of width 4 to 10 with 50 filters; here the BiLSTM of adhikari2019
    )


def hu2018() -> Config:
    """Attribute attention for rare classes: attributes are predicted and used for the class."""
    return Config(
        task="classify",
        text=_words(),
        data=DataConfig(max_length=500),  # the paper: documents of up to 500 words
        classify=ClassifyConfig(
            attribute_field="attributes",  # the paper: ten attributes of charges
            attribute_weight=1.0,  # the paper: alpha = 1
            pooling="max",  # the paper: the attribute-free representation
            dropout=0.5,  # the paper: 0.5
        ),
        # the paper: an LSTM of 100 on vectors of 100
        model=_model(encoder=("bilstm(residual_connection=false)",), width=200, dropout=0.2),
        train=_training(epochs=16.0, batch_tokens=10_000),  # the paper: 16 epochs of Adam
    )


def _words(**more: Any) -> TextConfig:
    """Return words in lower case, with a vocabulary that holds all of a small corpus."""
    return TextConfig(**{"tokenizer": "words", "lowercase": True, "vocab_size": 100_000, **more})


def _model(**more: Any) -> ModelConfig:
    """Return a model whose blocks encode the order of the words, with small embeddings."""
    return ModelConfig(**{"positions": "none", "scale_embeddings": False, **more})


def _training(*, epochs: float, batch_tokens: int, **more: Any) -> TrainConfig:
    """Return AdamW with a linear decay; the validation set chooses the epoch."""
    settings: dict[str, Any] = {
        "epochs": epochs,
        "batch_tokens": batch_tokens,
        "optimizer": "adamw",
        "learning_rate": 1e-3,
        "beta2": 0.999,  # Adam's default
        "epsilon": 1e-8,  # Adam's default
        "weight_decay": 0.01,
        "schedule": "linear",
        "warmup_steps": 100,
        "max_grad_norm": 5.0,
        "label_smoothing": 0.0,
        "ema_decay": 0.99,
        "compile": "off",  # recurrences gain nothing, and the runs are short
        # The loss is lowest before the accuracy is highest: docs/log.md.
        "best_metric": "accuracy",
        "final_checkpoint": "best",
    }
    return TrainConfig(**{**settings, **more})


def _reuters_training() -> TrainConfig:
    """Return the training of Reuters-sized corpora with several labels."""
    return _training(
        epochs=30.0,  # the paper: 30 epochs
        batch_tokens=8000,  # the paper: batches of 32 documents
        learning_rate=2e-3,
        ema_decay=0.99,  # the paper: temporal averaging of 0.99
        best_metric="micro_f1",
    )

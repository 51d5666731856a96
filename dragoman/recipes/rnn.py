"""RNN models: Sutskever et al. (2014) without attention; Bahdanau, Luong and Wu et al. with it.

Settings that differ from the paper are marked. In all: subwords instead of words, so there are no
unknown words; one width for embeddings, states and encoder output; initialization as in
`layers/rnn.py`; Adam instead of the papers' Adadelta and SGD.
"""

from __future__ import annotations

from dragoman.config import Config, DataConfig, DecodeConfig, ModelConfig, TextConfig, TrainConfig


def sutskever2014() -> Config:
    """Encoder-decoder without attention: four LSTM layers, the source reversed."""
    return Config(
        text=TextConfig(
            tokenizer="bpe",  # not the paper's whole words, which made rare words unknown
            vocab_size=80_000,  # the paper: 160,000 source and 80,000 target words
            shared_vocab=False,  # the paper: one vocabulary for each language
        ),
        data=DataConfig(max_length=100),  # not in the paper
        model=ModelConfig(
            # section 3.3: the source reversed; section 3.4: 4 layers
            encoder=("lstm(layers=4, reverse=true, residual_connection=false)",),
            # section 2: the decoder starts with the encoder's final states, h and c of each layer
            decoder=("lstm(layers=4, initial_state=encoder, residual_connection=false)",),
            width=1000,  # section 3.4: 1000 cells a layer, embeddings of 1000
            heads=1,  # no attention
            positions="none",  # an RNN encodes the order
            tie_embeddings="none",  # the paper: separate matrices
            scale_embeddings=False,  # the paper: embeddings are not scaled
            output_bias=False,  # not in the paper
            dropout=0.0,  # the paper names none
            attention_dropout=0.0,  # no attention
        ),
        train=TrainConfig(
            steps=700_000,  # section 3.4: 7.5 epochs of 12 million pairs in batches of 128
            batch_tokens=3800,  # section 3.4: 128 sentences, of about 30 words each
            optimizer="adam",  # not the paper's SGD without momentum
            learning_rate=5e-4,  # not the paper's 0.7, which is for SGD
            beta2=0.999,  # Adam's default
            epsilon=1e-8,  # Adam's default
            # section 3.4: constant for 5 epochs, then halved every half epoch; here linear
            schedule="wsd",
            cooldown_fraction=0.33,  # section 3.4: the last 2.5 of 7.5 epochs
            warmup_steps=0,  # none in the paper
            max_grad_norm=5.0,  # section 3.4: gradient norm clipped at 5
            label_smoothing=0.0,  # none in the paper
            compile="off",  # cuDNN's LSTM, which torch.compile does not change
            final_checkpoint="best",  # not in the paper
            checkpoint_every=2000,  # not in the paper
            validate_every=2000,  # not in the paper
        ),
        decode=DecodeConfig(
            beam=12,  # section 3.6: a beam of 12, and 2 for most of the gain
            length_penalty=0.0,  # section 3.2: the most likely translation
        ),
    )


def bahdanau2015() -> Config:
    """RNNsearch-50: bidirectional GRU encoder, GRU decoder with additive attention."""
    return Config(
        text=TextConfig(
            tokenizer="bpe",  # not the paper's whole words, which made rare words unknown
            vocab_size=30_000,  # the paper: the 30,000 most frequent words of each language
            shared_vocab=False,  # the paper: one vocabulary for each language
        ),
        # the paper: RNNsearch-50 is trained on sentences of up to 50 words
        data=DataConfig(max_length=50),
        model=ModelConfig(
            # The paper: one bidirectional GRU layer of 1000 units each way; here 500 each way
            encoder=("bigru(residual_connection=false)",),
            # Query is the previous state, the context is an input of the GRU. Appendix A.2.2:
            # initial state from the last backward state, maxout output.
            decoder=(
                "gru(attention=additive, decoder=bahdanau, initial_state=last_backward, "
                "residual_connection=false)",
            ),
            # the paper: 1000 hidden units, 1000 in the alignment; 620 in embeddings, 500 in maxout
            width=1000,
            heads=1,  # the paper: one alignment
            positions="none",  # an RNN encodes the order
            tie_embeddings="none",  # the paper: E for each side and W_o are separate matrices
            scale_embeddings=False,  # the paper: embeddings are not scaled
            output_bias=False,  # appendix A.2.2: exp(y^T W_o t), without biases
            dropout=0.0,  # the paper names none
            attention_dropout=0.0,  # the paper names none
        ),
        train=TrainConfig(
            steps=288_000,  # the paper: 2.88e5 steps
            batch_tokens=2400,  # the paper: 80 sentences, of about 30 words each
            optimizer="adam",  # not the paper's Adadelta
            # not in the paper: half of Adam's default, which is safe at this width
            learning_rate=5e-4,
            beta2=0.999,  # Adam's default
            epsilon=1e-8,  # Adam's default
            # the paper: Adadelta with rho 0.95 and epsilon 1e-6, without a schedule
            schedule="constant",
            warmup_steps=0,  # none in the paper
            max_grad_norm=1.0,  # the paper: gradient norm clipped at 1
            label_smoothing=0.0,  # the paper: no label smoothing
            # a loop over positions would be recompiled for every length
            compile="off",
            # the paper: RNNsearch-50* is trained until validation stops improving
            final_checkpoint="best",
            checkpoint_every=2000,  # not in the paper
            validate_every=2000,  # not in the paper
        ),
        decode=DecodeConfig(
            beam=10,  # the paper: beam search, whose width is not given
            length_penalty=0.0,  # the paper: highest probability
        ),
    )


def luong2015_general() -> Config:
    """Global attention with the general score and input feeding, four layers."""
    return Config(
        text=TextConfig(
            tokenizer="bpe",  # not the paper's whole words, which made rare words unknown
            vocab_size=50_000,  # the paper: the 50,000 most frequent words of each language
            shared_vocab=False,  # the paper: one vocabulary for each language
        ),
        data=DataConfig(max_length=50),  # the paper: no pairs over 50 words
        model=ModelConfig(
            # the paper: 4 layers, the source reversed
            encoder=("lstm(layers=4, reverse=true, residual_connection=false)",),
            # Input feeding enters the lowest layer. The initial hidden and cell states are
            # projected from the encoder's last state; in the paper they are copied layer by layer.
            decoder=(
                "lstm(layers=4, attention=general, decoder=luong, input_feeding=true, "
                "initial_state=first, initial_cell=true, residual_connection=false)",
            ),
            width=1000,  # the paper: 1000 cells per layer, embeddings of 1000
            heads=1,  # the paper: one alignment
            positions="none",  # an RNN encodes the order
            tie_embeddings="none",  # the paper: embeddings and W_s are separate matrices
            scale_embeddings=False,  # the paper has no scaling
            output_bias=False,  # the paper: softmax(W_s h~)
            dropout=0.2,  # the paper: 0.2, as in Zaremba et al. (2015) on non-recurrent connections
            attention_dropout=0.0,  # the paper names no other dropout
        ),
        train=TrainConfig(
            steps=420_000,  # the paper: 12 epochs with dropout, over 4.5 million pairs
            batch_tokens=3800,  # the paper: 128 sentences, of about 30 words each
            optimizer="adam",  # not the paper's plain SGD
            learning_rate=5e-4,  # not the paper's 1, which is for SGD
            beta2=0.999,  # Adam's default
            epsilon=1e-8,  # Adam's default
            # the paper: constant for 8 epochs, then halved every epoch; here linear
            schedule="wsd",
            cooldown_fraction=0.33,  # the paper: the last 4 of 12 epochs
            warmup_steps=0,  # the paper: none
            max_grad_norm=5.0,  # the paper: gradient norm clipped at 5
            label_smoothing=0.0,  # the paper: no label smoothing
            # a loop over positions would be recompiled for every length
            compile="off",
            final_checkpoint="best",  # not in the paper
            checkpoint_every=2000,  # not in the paper
            validate_every=2000,  # not in the paper
        ),
        decode=DecodeConfig(
            beam=10,  # not in the paper: as in the author's later code, tensorflow/nmt
            length_penalty=0.0,  # not in the paper
        ),
    )


def luong2015_dot() -> Config:
    """`luong2015_general` with the dot score."""
    return _luong("attention=dot")  # the paper's "dot"


def luong2015_concat() -> Config:
    """`luong2015_general` with the concat (additive) score."""
    return _luong("attention=additive")  # the paper's "concat", which did not work well there


def luong2015_location() -> Config:
    """`luong2015_general` with the location score, which reads the decoder state only."""
    return _luong("attention=location")  # the paper's "location"


def luong2015_local_m() -> Config:
    """`luong2015_general` with monotonic local attention (local-m)."""
    return _luong("attention=general, alignment=local_m")  # the paper's "local-m", D = 10


def luong2015_local_p() -> Config:
    """`luong2015_general` with predictive local attention (local-p), the paper's best."""
    return _luong("attention=general, alignment=local_p")  # the paper's "local-p", D = 10


def _luong(attention: str) -> Config:
    """Return `luong2015_general` with other attention options of its decoder."""
    decoder = (
        f"lstm(layers=4, {attention}, decoder=luong, input_feeding=true, initial_state=first, "
        "initial_cell=true, residual_connection=false)"
    )
    return luong2015_general().replace(model={"decoder": (decoder,)})


def wu2016() -> Config:
    """GNMT: eight LSTM layers, residual from the third, one attention fed to all decoder layers.

    "Summary" is that of arXiv 1609.08144 at shortscience.org; "nmt" is Google's later code,
    tensorflow/nmt, with nmt/standard_hparams/wmt16_gnmt_8_layer.json.
    """
    return Config(
        text=TextConfig(
            tokenizer="bpe",  # the paper: wordpieces
            vocab_size=32_000,  # nmt: wmt16.sh makes 32,000 merges
            shared_vocab=True,  # not nmt's, which has share_vocab false
        ),
        data=DataConfig(max_length=50),  # nmt: src_max_len 50
        model=ModelConfig(
            # Summary: 8 layers, the lowest in both directions. nmt: residual connections from the
            # third layer on.
            encoder=(
                "bilstm(residual_connection=false)",
                "lstm(residual_connection=false)",
                "lstm*6",
            ),
            # Summary: additive attention queried by the lowest decoder layer, its context fed to
            # all layers; zero initial state. nmt: normed_bahdanau.
            decoder=(
                "lstm(layers=8, attention=normed_additive, decoder=gnmt, initial_state=zero, "
                "residual_connection=false)",
            ),
            width=1024,  # nmt: num_units 1024
            heads=1,  # one alignment
            residual="no_norm",  # residual connections without norms
            positions="none",  # an RNN encodes the order
            tie_embeddings="none",  # nmt: embeddings and output are separate matrices
            scale_embeddings=False,  # nmt: no scaling
            output_bias=False,  # nmt: the output layer has use_bias=False
            dropout=0.2,  # summary: 0.2 to 0.3, more for small data
            attention_dropout=0.0,  # nmt has none
        ),
        train=TrainConfig(
            steps=340_000,  # nmt: num_train_steps 340000
            batch_tokens=3800,  # summary: 128 sentences, here of about 30 tokens each
            optimizer="adam",  # summary: Adam for 60,000 steps, then SGD; here Adam throughout
            learning_rate=2e-4,  # summary: 2e-4
            beta2=0.999,  # Adam's default
            epsilon=1e-8,  # Adam's default
            # nmt: constant for half of the run, then halved five times; here linear
            schedule="wsd",
            cooldown_fraction=0.5,  # nmt: decay_scheme luong10
            warmup_steps=0,  # none in either
            max_grad_norm=5.0,  # summary: 5
            # none; the paper's second stage, RL with GLEU, is not implemented
            label_smoothing=0.0,
            # a loop over positions would be recompiled for every length
            compile="off",
            final_checkpoint="best",  # not in the paper
            checkpoint_every=2000,  # not in the paper
            validate_every=2000,  # not in the paper
        ),
        decode=DecodeConfig(
            beam=3,  # summary: 3
            # summary: between 0.6 and 0.7, with a coverage penalty, which is not implemented
            length_penalty=0.65,
        ),
    )

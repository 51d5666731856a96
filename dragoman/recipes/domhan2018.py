"""Domhan (2018), "How Much Attention Do You Need?": RNN and CNN become a Transformer step by step.

The paper's tables 3 and 4 add one part of the Transformer at a time to an RNN and to a CNN; table 5
combines different encoders and decoders. "Released" is the author's code, awslabs/sockeye, branch
acl18: its README.md has the architecture of each model and the training command for IWSLT, whose
sizes are used here. Its `rnn` is an LSTM with a zero initial state, its `cnn` a convolution of
kernel size 3, `res` a residual connection, `norm` inside it pre-norm. Three differences: every
residual connection has dropout here, only those of LSTMs there; LSTM states are not normalized;
weights are initialized as in `models/initialization.py`.
"""

from __future__ import annotations

from dragoman.config import Config, DecodeConfig, ModelConfig, TextConfig, TrainConfig

DEPTH = 6  # released: repeat(6, ...)

# Released: birnn, then rnn in an encoder; cnn(..., 3, relu).
RNN = "lstm(initial_state=zero)"
CNN = "conv(attention=none, activation=relu, weight_norm=false)"
CROSS_ATTENTION, CROSS_ATTENTION_1H, FFN = "cross_attention", "cross_attention(heads=1)", "ffn"

# Encoders and decoders of table 5, each as deep as the Transformer's.
ENCODERS = {
    "self": ("transformer*6",),
    "rnn": ("bilstm", FFN, *("lstm", FFN) * (DEPTH - 1)),
    "cnn": ("conv(activation=relu, weight_norm=false)", FFN) * DEPTH,
    "none": (FFN,) * DEPTH,
}
DECODERS = {
    "self": ("transformer*6",),
    "rnn": (RNN, CROSS_ATTENTION, FFN) * DEPTH,
    "cnn": (CNN, CROSS_ATTENTION, FFN) * DEPTH,
    "combined": ("transformer", RNN, CROSS_ATTENTION, FFN, CNN, CROSS_ATTENTION, FFN)
    * (DEPTH // 3),
    "none": (CROSS_ATTENTION, FFN) * DEPTH,
}


def domhan2018_transformer() -> Config:
    """The pre-norm Transformer that tables 3 and 4 arrive at."""
    return Config(
        text=TextConfig(
            tokenizer="bpe",  # not in the released command: as in Vaswani et al. (2017)
            # not in the released command: as in Vaswani et al. (2017), a round number
            vocab_size=32_000,
            shared_vocab=True,  # released: --weight-tying-type=src_trg_softmax needs one vocabulary
        ),
        model=ModelConfig(
            # released: repeat(6, res(norm->mh_dot_self_att)->res(norm->ff->linear))->norm
            encoder=ENCODERS["self"],
            # released: the same with res(norm->mh_dot_att) between the two
            decoder=DECODERS["self"],
            width=256,  # released: NUM_HIDDEN=256
            heads=8,  # not in the released command: as in Vaswani et al. (2017)
            ffn_width=1024,  # released: FF_NUM_HIDDEN=1024
            residual="pre_norm",  # released: res(norm->...), and ->norm at the end
            positions="sinusoidal",  # released: pos->
            tie_embeddings="all",  # released: --weight-tying-type=src_trg_softmax
            output_bias=True,  # not in the released command
            dropout=0.1,  # released: --custom-seq-dropout 0.1
        ),
        train=TrainConfig(
            steps=50_000,  # not the paper's, which stops when validation stops improving
            batch_tokens=8192,  # released: --batch-type=word --batch-size=8192
            optimizer="adam",  # released: --optimizer=adam
            learning_rate=2e-4,  # released: --initial-learning-rate=0.0002
            beta2=0.999,  # Adam's default
            epsilon=1e-8,  # Adam's default
            # released: lowered when validation stops improving; here on a schedule
            schedule="wsd",
            warmup_steps=0,  # released: --learning-rate-warmup=0
            max_grad_norm=0.0,  # released: --gradient-clipping-threshold=-1
            label_smoothing=0.1,  # released: --label-smoothing=0.1
            # released: sockeye.average -n 8, of the best; here of the newest
            average_checkpoints=8,
            keep_checkpoints=8,  # as many as are averaged
            # released: --decode-and-evaluate=500 sentences at each; the interval is not given there
            checkpoint_every=500,
            validate_every=500,  # with the checkpoints
        ),
        decode=DecodeConfig(
            beam=5,  # not checked: Sockeye's default
            length_penalty=1.0,  # not checked: Sockeye's default
        ),
    )


def domhan2018_rnn() -> Config:
    """Table 3, first row: residual LSTMs, one single-head attention, one feed-forward network."""
    return _replace_model(
        encoder=("bilstm", "lstm*5"),  # released: res(birnn->dropout)->repeat(5,res(rnn->dropout))
        decoder=(
            "lstm(initial_state=zero)*6",
            CROSS_ATTENTION_1H,
            FFN,
        ),  # released: repeat(6,res(rnn->dropout))->res(mh_dot_att(heads=1))->res(ff->linear)
        residual="no_norm",  # released: res without norm
        positions="none",  # released: dropout-> instead of pos->
    )


def domhan2018_rnn_mh() -> Config:
    """Table 3: `domhan2018_rnn` with multi-head attention."""
    # released: res(mh_dot_att)
    return domhan2018_rnn().replace(
        model={"decoder": ("lstm(initial_state=zero)*6", CROSS_ATTENTION, FFN)}
    )


def domhan2018_rnn_pos() -> Config:
    """Table 3: `domhan2018_rnn_mh` with position embeddings."""
    return domhan2018_rnn_mh().replace(model={"positions": "sinusoidal"})  # released: pos->


def domhan2018_rnn_norm() -> Config:
    """Table 3: `domhan2018_rnn_pos` with pre-norm."""
    # released: res(norm->...), ->norm
    return domhan2018_rnn_pos().replace(model={"residual": "pre_norm"})


def domhan2018_rnn_multi_att_1h() -> Config:
    """Table 3: `domhan2018_rnn_norm` with single-head attention after every decoder LSTM."""
    # released: mh_dot_att(heads=1) within repeat
    return domhan2018_rnn_norm().replace(
        model={"decoder": (*(RNN, CROSS_ATTENTION_1H) * DEPTH, FFN)}
    )


def domhan2018_rnn_multi_att() -> Config:
    """Table 3: `domhan2018_rnn_norm` with multi-head attention after every decoder LSTM."""
    # released: mh_dot_att within repeat
    return domhan2018_rnn_norm().replace(model={"decoder": (*(RNN, CROSS_ATTENTION) * DEPTH, FFN)})


def domhan2018_rnn_ff() -> Config:
    """Table 3, last row: a feed-forward network after every LSTM; RNN and RNN in table 5."""
    return _combine("rnn", "rnn")


def domhan2018_cnn() -> Config:
    """Table 4, first row, "CNN ReLU": residual convolutions, single-head attention after each."""
    return _replace_model(
        # released: repeat(6,res(cnn($NUM_HIDDEN,3,relu)))
        encoder=("conv(activation=relu, weight_norm=false)*6",),
        decoder=(CNN, CROSS_ATTENTION_1H)
        * DEPTH,  # released: repeat(6,res(cnn($NUM_HIDDEN,3,relu))->res(mh_dot_att(heads=1)))
        residual="no_norm",  # released: res without norm
    )


def domhan2018_cnn_norm() -> Config:
    """Table 4: `domhan2018_cnn` with pre-norm."""
    # released: res(norm->...), ->norm
    return domhan2018_cnn().replace(model={"residual": "pre_norm"})


def domhan2018_cnn_mh() -> Config:
    """Table 4: `domhan2018_cnn_norm` with multi-head attention."""
    # released: mh_dot_att
    return domhan2018_cnn_norm().replace(model={"decoder": (CNN, CROSS_ATTENTION) * DEPTH})


def domhan2018_cnn_ff() -> Config:
    """Table 4, last row: a feed-forward network after every convolution; CNN and CNN in table 5."""
    return _combine("cnn", "cnn")


def domhan2018_self_rnn() -> Config:
    """Table 5: Transformer encoder, LSTM decoder."""
    return _combine("self", "rnn")


def domhan2018_self_cnn() -> Config:
    """Table 5: Transformer encoder, CNN decoder."""
    return _combine("self", "cnn")


def domhan2018_rnn_self() -> Config:
    """Table 5: LSTM encoder, Transformer decoder."""
    return _combine("rnn", "self")


def domhan2018_cnn_self() -> Config:
    """Table 5: CNN encoder, Transformer decoder."""
    return _combine("cnn", "self")


def domhan2018_self_combined() -> Config:
    """Table 5: Transformer encoder; self-attention, LSTMs and convolutions in the decoder."""
    return _combine("self", "combined")


def domhan2018_self_none() -> Config:
    """Table 5: Transformer encoder; a decoder of cross-attention and feed-forward networks only."""
    return _combine("self", "none")


def domhan2018_none_self() -> Config:
    """Not in the paper: an encoder of feed-forward networks only, Transformer decoder."""
    return _combine("none", "self")


def _combine(encoder: str, decoder: str) -> Config:
    """Return the configuration of an encoder and a decoder of table 5."""
    return _replace_model(encoder=ENCODERS[encoder], decoder=DECODERS[decoder])


def _replace_model(**model: object) -> Config:
    """Return the Transformer's configuration with other model settings."""
    return domhan2018_transformer().replace(model=model)

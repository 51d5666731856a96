"""The merging ladder: Domhan (2018), "How Much Attention Do You Need? A Granular Analysis of Neural Machine Translation Architectures".

Rung by rung an RNN and a CNN become a Transformer (the paper's tables 3 and 4), then encoders and decoders are mixed (table 5).
"Released" is the author's code, awslabs/sockeye, branch acl18: its README.md gives each rung's architecture and the training
command of IWSLT, whose sizes are taken here. Its `rnn` is an LSTM that starts from zeros, its `cnn` a convolution over 3
places; `res` goes around a sub-layer, and `norm` inside it is `residual="pre_norm"`. Three things differ: every way around a layer
drops some of its output here, there those of LSTMs alone; states of LSTMs are not normalised; weights start as in `initialise.py`.
"""

from __future__ import annotations

from dragoman.config import Config, DecodeConfig, ModelConfig, TextConfig, TrainConfig

DEPTH = 6  # released: repeat(6, ...)

# What mixes the positions on each side, released: birnn and then rnn in an encoder; cnn(..., 3, relu).
RNN = "lstm(initial_state=zero)"
CNN = "conv(attention=none, activation=relu, weight_norm=false)"
CROSS_ATTENTION, CROSS_ATTENTION_1H, FFN = "cross_attention", "cross_attention(heads=1)", "ffn"

# The encoders and decoders of table 5, each as high as the Transformer's.
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
    """The top of both ladders: the Transformer with its norms inside the ways around."""
    return Config(
        text=TextConfig(
            tokenizer="bpe",  # not in the released command: as in the Transformer's paper
            vocab_size=32_000,  # not in the released command: as in the Transformer's paper, a round number
            shared_vocab=True,  # released: --weight-tying-type=src_trg_softmax needs one vocabulary
        ),
        model=ModelConfig(
            encoder=ENCODERS[
                "self"
            ],  # released: repeat(6, res(norm->mh_dot_self_att)->res(norm->ff->linear))->norm
            decoder=DECODERS[
                "self"
            ],  # released: the same with res(norm->mh_dot_att) between the two
            width=256,  # released: NUM_HIDDEN=256
            heads=8,  # not in the released command: as in the Transformer's paper
            ffn_width=1024,  # released: FF_NUM_HIDDEN=1024
            residual="pre_norm",  # released: res(norm->...), and ->norm at the end
            positions="sinusoidal",  # released: pos->
            tie_embeddings="all",  # released: --weight-tying-type=src_trg_softmax
            output_bias=True,  # not in the released command
            dropout=0.1,  # released: --custom-seq-dropout 0.1
        ),
        train=TrainConfig(
            steps=50_000,  # not the paper's, which stops when validation stands still
            batch_tokens=8192,  # released: --batch-type=word --batch-size=8192
            optimizer="adam",  # released: --optimizer=adam
            learning_rate=2e-4,  # released: --initial-learning-rate=0.0002
            beta2=0.999,  # Adam's default
            epsilon=1e-8,  # Adam's default
            schedule="wsd",  # released: lowered when validation stands still; here the fall is planned
            warmup_steps=0,  # released: --learning-rate-warmup=0
            max_grad_norm=0.0,  # released: --gradient-clipping-threshold=-1
            label_smoothing=0.1,  # released: --label-smoothing=0.1
            average_checkpoints=8,  # released: sockeye.average -n 8, of the best; here of the newest
            keep_checkpoints=8,  # as many as are averaged
            checkpoint_every=500,  # released: --decode-and-evaluate=500 sentences at each; the distance is not told there
            validate_every=500,  # with the checkpoints
        ),
        decode=DecodeConfig(
            beam=5,  # not checked: Sockeye's default
            length_penalty=1.0,  # not checked: Sockeye's default
        ),
    )


def domhan2018_rnn() -> Config:
    """The lowest rung, table 3: residual LSTMs, one attention with one head, one feed-forward layer."""
    return _replace_model(
        encoder=("bilstm", "lstm*5"),  # released: res(birnn->dropout)->repeat(5,res(rnn->dropout))
        decoder=(
            "lstm(initial_state=zero)*6",
            CROSS_ATTENTION_1H,
            FFN,
        ),  # released: repeat(6,res(rnn->dropout))->res(mh_dot_att(heads=1))->res(ff->linear)
        residual="no_norm",  # released: res without norm
        positions="none",  # released: dropout-> in the place of pos->
    )


def domhan2018_rnn_mh() -> Config:
    """One rung up: the one attention gets all heads."""
    return domhan2018_rnn().replace(
        model={"decoder": ("lstm(initial_state=zero)*6", CROSS_ATTENTION, FFN)}
    )  # released: res(mh_dot_att)


def domhan2018_rnn_pos() -> Config:
    """One rung up: positions on both sides."""
    return domhan2018_rnn_mh().replace(model={"positions": "sinusoidal"})  # released: pos->


def domhan2018_rnn_norm() -> Config:
    """One rung up: a norm before every layer and at the end."""
    return domhan2018_rnn_pos().replace(
        model={"residual": "pre_norm"}
    )  # released: res(norm->...), ->norm


def domhan2018_rnn_multi_att_1h() -> Config:
    """A step aside: attention after every LSTM of the decoder, with one head."""
    return domhan2018_rnn_norm().replace(
        model={"decoder": (*(RNN, CROSS_ATTENTION_1H) * DEPTH, FFN)}
    )  # released: mh_dot_att(heads=1) within repeat


def domhan2018_rnn_multi_att() -> Config:
    """One rung up: attention after every LSTM of the decoder, with all heads."""
    return domhan2018_rnn_norm().replace(
        model={"decoder": (*(RNN, CROSS_ATTENTION) * DEPTH, FFN)}
    )  # released: mh_dot_att within repeat


def domhan2018_rnn_ff() -> Config:
    """The top rung of table 3, RNN and RNN in table 5: a feed-forward layer after every LSTM."""
    return _combine("rnn", "rnn")


def domhan2018_cnn() -> Config:
    """The lowest rung of table 4, "CNN ReLU": residual convolutions, attention of one head after each."""
    return _replace_model(
        encoder=(
            "conv(activation=relu, weight_norm=false)*6",
        ),  # released: repeat(6,res(cnn($NUM_HIDDEN,3,relu)))
        decoder=(CNN, CROSS_ATTENTION_1H)
        * DEPTH,  # released: repeat(6,res(cnn($NUM_HIDDEN,3,relu))->res(mh_dot_att(heads=1)))
        residual="no_norm",  # released: res without norm
    )


def domhan2018_cnn_norm() -> Config:
    """One rung up: a norm before every layer and at the end."""
    return domhan2018_cnn().replace(
        model={"residual": "pre_norm"}
    )  # released: res(norm->...), ->norm


def domhan2018_cnn_mh() -> Config:
    """One rung up: every attention gets all heads."""
    return domhan2018_cnn_norm().replace(
        model={"decoder": (CNN, CROSS_ATTENTION) * DEPTH}
    )  # released: mh_dot_att


def domhan2018_cnn_ff() -> Config:
    """The top rung of table 4, CNN and CNN in table 5: a feed-forward layer after every convolution."""
    return _combine("cnn", "cnn")


def domhan2018_self_rnn() -> Config:
    """Table 5: self-attention reads, LSTMs write."""
    return _combine("self", "rnn")


def domhan2018_self_cnn() -> Config:
    """Table 5: self-attention reads, convolutions write."""
    return _combine("self", "cnn")


def domhan2018_rnn_self() -> Config:
    """Table 5: LSTMs read, self-attention writes."""
    return _combine("rnn", "self")


def domhan2018_cnn_self() -> Config:
    """Table 5: convolutions read, self-attention writes."""
    return _combine("cnn", "self")


def domhan2018_self_combined() -> Config:
    """Table 5: self-attention reads; self-attention, LSTMs and convolutions write in turn."""
    return _combine("self", "combined")


def domhan2018_self_none() -> Config:
    """Table 5: self-attention reads; in the decoder a position knows no other, only the source."""
    return _combine("self", "none")


def domhan2018_none_self() -> Config:
    """Not the paper's: an encoder in which no position knows another, for the fourth column of its table."""
    return _combine("none", "self")


def _combine(encoder: str, decoder: str) -> Config:
    """Put an encoder and a decoder of table 5 together."""
    return _replace_model(encoder=ENCODERS[encoder], decoder=DECODERS[decoder])


def _replace_model(**model: object) -> Config:
    """Change the Transformer's model, and nothing of how it is trained."""
    return domhan2018_transformer().replace(model=model)

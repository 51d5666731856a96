"""Recurrent translators: Bahdanau, Cho and Bengio (2015), Luong, Pham and Manning (2015), Wu et al. (2016).

Section, table and equation numbers are each paper's, those of Bahdanau and Luong cited from memory: the numbers of the settings
were compared with other sources, the numbers of the sections were not checked against the papers' text. Where a line differs
from its paper it says so. For all: words are pieces here, so nothing is unknown; one width serves embeddings, states and memory;
first values are those of `layers/recurrent.py`; the papers' optimisers (Adadelta, plain SGD) are not here: Adam is in their place.
"""

from __future__ import annotations

from dragoman.config import Config, DataConfig, DecodeConfig, ModelConfig, TextConfig, TrainConfig


def bahdanau2015() -> Config:
    """RNNsearch-50: the first translator with attention."""
    return Config(
        text=TextConfig(
            kind="bpe",  # not the paper's whole words (section 4.1), of which the rare ones became unknown
            vocabulary=30_000,  # section 4.1: the 30,000 most frequent words of each language
            joint=False,  # section 4.1: a list for each language
        ),
        data=DataConfig(max_length=50),  # section 4.2: RNNsearch-50 is trained on sentences of up to 50 words
        model=ModelConfig(
            # Section 3.2: annotations join the states of both directions; 500 each here, 1000 each in the paper (section 4.2).
            encoder=("bigru(skip=false)",),  # section 3.2 and appendix A.2.1: one bidirectional layer of gated units
            # Section 3.1: the last state asks, the answer enters the gates. Appendix A.1.2: the score; A.2.2: first state, maxout.
            decoder=("gru(attention=additive, query=before, initial=first, skip=false)",),  # section 3.1 and appendix A.2.2
            width=1000,  # section 4.2: 1000 hidden units; appendix B.1: 1000 in the alignment, but 620 in embeddings and 500 in maxout
            heads=1,  # section 3.1: one alignment
            positions="none",  # the order is in the recurrence
            tie="none",  # appendix A.2: E for each side and W_o are matrices of their own
            scale_embeddings=False,  # appendix A.2: E y as it is
            output_bias=False,  # appendix A.2.2: exp(y^T W_o t), biases left out
            dropout=0.0,  # appendix B names none
            attention_dropout=0.0,  # appendix B names none
        ),
        train=TrainConfig(
            steps=288_000,  # appendix B.2, table 2: 2.88e5 updates
            batch_tokens=2400,  # appendix B.2: 80 sentences, of about 30 words each
            optimiser="adam",  # not the paper's Adadelta (appendix B.2)
            learning_rate=5e-4,  # not in the paper: half of Adam's default, which is safe at this width
            beta2=0.999,  # Adam's default
            epsilon=1e-8,  # Adam's default
            schedule="constant",  # appendix B.2: Adadelta with rho 0.95 and epsilon 1e-6, without a schedule
            warmup=0,  # none in the paper
            clip=1.0,  # appendix B.2: gradients at most 1 long
            label_smoothing=0.0,  # appendix B.2: the likelihood itself
            compile="off",  # a loop over positions is compiled anew for every length, and gains less than that takes
            choose="best",  # table 1: RNNsearch-50* is trained until validation stops improving; for the other the paper does not say
            checkpoint_every=2000,  # not in the paper
            validate_every=2000,  # not in the paper
        ),
        decode=DecodeConfig(
            beam=10,  # section 4.2: beam search, of a width that is not told
            length_penalty=0.0,  # section 4.2: the translation of the highest probability
        ),
    )


def luong2015_general() -> Config:
    """Global attention with the general score and input feeding, four layers."""
    return Config(
        text=TextConfig(
            kind="bpe",  # not the paper's whole words (section 4.1), of which the rare ones became unknown
            vocabulary=50_000,  # section 4.1: the 50,000 most frequent words of each language
            joint=False,  # section 4.1: a list for each language
        ),
        data=DataConfig(max_length=50),  # section 4.1: no pairs over 50 words
        model=ModelConfig(
            encoder=("lstm(layers=4, reverse=true, skip=false)",),  # section 4.1: 4 layers; table 1: the source reversed
            # Section 3.1: the new state asks by the general score, equation 8. Section 3.3: input feeding, into the lowest layer.
            # The decoder's first state is made of the encoder's last one; in the paper's figure 1 each layer's is handed on as it is.
            decoder=("lstm(layers=4, attention=general, query=after, feeding=true, initial=first, skip=false)",),  # sections 3.1 and 3.3
            width=1000,  # section 4.1: 1000 cells a layer, embeddings of 1000
            heads=1,  # section 3.1: one alignment
            positions="none",  # the order is in the recurrence
            tie="none",  # section 2: embeddings and W_s are matrices of their own
            scale_embeddings=False,  # section 4.1 names no factor
            output_bias=False,  # equation 6: softmax(W_s h~)
            dropout=0.2,  # section 4.1: 0.2, as in Zaremba et al. (2015) not within the recurrence
            attention_dropout=0.0,  # section 4.1 names no other dropout
        ),
        train=TrainConfig(
            steps=420_000,  # section 4.1: 12 passes with dropout, over 4.5 million pairs
            batch_tokens=3800,  # section 4.1: 128 sentences, of about 30 words each
            optimiser="adam",  # not the paper's plain SGD (section 4.1)
            learning_rate=5e-4,  # not the paper's 1, which is for SGD
            beta2=0.999,  # Adam's default
            epsilon=1e-8,  # Adam's default
            schedule="wsd",  # section 4.1: constant for 8 passes, then halved after every pass; here a straight fall
            cooldown=0.33,  # section 4.1: the last 4 of 12 passes
            warmup=0,  # section 4.1: none
            clip=5.0,  # section 4.1: gradients at most 5 long
            label_smoothing=0.0,  # section 2, equation 4: the likelihood itself
            compile="off",  # a loop over positions is compiled anew for every length, and gains less than that takes
            choose="best",  # not in the paper
            checkpoint_every=2000,  # not in the paper
            validate_every=2000,  # not in the paper
        ),
        decode=DecodeConfig(
            beam=10,  # not in the paper: as in the author's later code, tensorflow/nmt
            length_penalty=0.0,  # not in the paper
        ),
    )


def luong2015_dot() -> Config:
    """The same with the dot product as it is."""
    return _luong("attention=dot")  # equation 8, first row


def luong2015_concat() -> Config:
    """The same with a network of one layer."""
    return _luong("attention=additive")  # equation 8, last row, "concat"; in the paper's table 4 it was not used, for want of success


def luong2015_location() -> Config:
    """The same with weights that depend on the target state alone."""
    return _luong("attention=location")  # equation 9


def luong2015_local_m() -> Config:
    """The same in a window that walks one word a step."""
    return _luong("attention=general, alignment=local_m")  # section 3.2; D = 10, section 4.1


def luong2015_local_p() -> Config:
    """The same in a window whose place is predicted: the paper's best."""
    return _luong("attention=general, alignment=local_p")  # section 3.2; D = 10, section 4.1


def _luong(attention: str) -> Config:
    """Change how the decoder of luong2015_general attends."""
    decoder = f"lstm(layers=4, {attention}, query=after, feeding=true, initial=first, skip=false)"
    return luong2015_general().replace(model={"decoder": (decoder,)})


def wu2016() -> Config:
    """GNMT: eight layers a side, ways around the upper ones, the lowest decoder layer's attention fed to all.

    "Summary" is the one at shortscience.org of arXiv 1609.08144, "nmt" Google's later code, tensorflow/nmt, with
    nmt/standard_hparams/wmt16_gnmt_8_layer.json; the paper's own text was not at hand, so no section is cited.
    """
    return Config(
        text=TextConfig(
            kind="bpe",  # not the paper's word pieces, which are found by another criterion
            vocabulary=32_000,  # nmt: wmt16.sh makes 32,000 merges; the paper has 8,000 to 32,000 pieces (from memory)
            joint=True,  # from memory: one list for both languages; nmt has one for each (share_vocab false)
        ),
        data=DataConfig(max_length=50),  # nmt: src_max_len 50
        model=ModelConfig(
            # Summary: 8 layers, the lowest in both directions. From memory: ways around begin with the third layer from below.
            encoder=("bilstm(skip=false)", "lstm(skip=false)", "lstm*6"),  # see above
            # Summary: the attention is a network with one hidden layer, asked by the lowest decoder layer, fed to all layers; the
            # encoder's state is not passed on. nmt: normed_bahdanau.
            decoder=("lstm(layers=8, attention=normed_additive, query=below, initial=zero, skip=false)",),  # see above
            width=1024,  # nmt: num_units 1024
            heads=1,  # one alignment
            residual="none",  # ways around without norms, which are younger
            positions="none",  # the order is in the recurrence
            tie="none",  # nmt: embeddings and output are matrices of their own
            scale_embeddings=False,  # nmt names no factor
            output_bias=False,  # nmt: the output layer has use_bias=False
            dropout=0.2,  # summary: 0.2 to 0.3, more for small data
            attention_dropout=0.0,  # nmt has none
        ),
        train=TrainConfig(
            steps=340_000,  # nmt: num_train_steps 340000
            batch_tokens=3800,  # summary: 128 sentences, here of about 30 pieces each
            optimiser="adam",  # summary: Adam for 60,000 updates, then plain SGD, which is not here
            learning_rate=2e-4,  # summary: 2e-4
            beta2=0.999,  # Adam's default
            epsilon=1e-8,  # Adam's default
            schedule="wsd",  # nmt: constant for half of the run, then halved five times; here a straight fall
            cooldown=0.5,  # nmt: decay_scheme luong10
            warmup=0,  # none in either
            clip=5.0,  # summary: 5
            label_smoothing=0.0,  # the likelihood itself; the paper's second stage, reinforcement by GLEU, is not here
            compile="off",  # a loop over positions is compiled anew for every length, and gains less than that takes
            choose="best",  # not in the paper
            checkpoint_every=2000,  # not in the paper
            validate_every=2000,  # not in the paper
        ),
        decode=DecodeConfig(
            beam=3,  # summary: 3
            length_penalty=0.65,  # summary: between 0.6 and 0.7, with a coverage penalty that is not here
        ),
    )

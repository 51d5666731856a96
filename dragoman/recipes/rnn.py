"""Recurrent translators: Bahdanau, Cho and Bengio (2015), Luong, Pham and Manning (2015), Wu et al. (2016).

The papers' own texts were not at hand: settings were compared with other sources, and a section is cited where somebody who had the paper
open cites it too, which is Bahdanau's appendix A.2.2. Where a line differs from its paper it says so. For all: words are pieces here,
so nothing is unknown; one width serves embeddings, states and memory; first values are those of `layers/rnn.py`; the papers'
optimisers (Adadelta, plain SGD) are not here: Adam is in their place.
"""

from __future__ import annotations

from dragoman.config import Config, DataConfig, DecodeConfig, ModelConfig, TextConfig, TrainConfig


def bahdanau2015() -> Config:
    """RNNsearch-50: the first translator with attention."""
    return Config(
        text=TextConfig(
            tokenizer="bpe",  # not the paper's whole words, of which the rare ones became unknown
            vocab_size=30_000,  # the paper: the 30,000 most frequent words of each language
            shared_vocab=False,  # the paper: a list for each language
        ),
        data=DataConfig(
            max_length=50
        ),  # the paper: RNNsearch-50 is trained on sentences of up to 50 words
        model=ModelConfig(
            # Annotations join the states of both directions; 500 each here, 1000 each in the paper.
            encoder=(
                "bigru(residual_connection=false)",
            ),  # the paper: one bidirectional layer of gated units
            # The last state asks, the answer enters the gates; appendix A.2.2: the first state from the last backward one, and
            # maxout behind.
            decoder=(
                "gru(attention=additive, decoder=bahdanau, initial_state=last_backward, residual_connection=false)",
            ),  # see above
            width=1000,  # the paper: 1000 hidden units, 1000 in the alignment, but 620 in embeddings and 500 in maxout
            heads=1,  # the paper: one alignment
            positions="none",  # the order is in the recurrence
            tie_embeddings="none",  # the paper: E for each side and W_o are matrices of their own
            scale_embeddings=False,  # the paper: E y as it is
            output_bias=False,  # appendix A.2.2: exp(y^T W_o t), biases left out
            dropout=0.0,  # the paper names none
            attention_dropout=0.0,  # the paper names none
        ),
        train=TrainConfig(
            steps=288_000,  # the paper: 2.88e5 updates
            batch_tokens=2400,  # the paper: 80 sentences, of about 30 words each
            optimizer="adam",  # not the paper's Adadelta
            learning_rate=5e-4,  # not in the paper: half of Adam's default, which is safe at this width
            beta2=0.999,  # Adam's default
            epsilon=1e-8,  # Adam's default
            schedule="constant",  # the paper: Adadelta with rho 0.95 and epsilon 1e-6, without a schedule
            warmup_steps=0,  # none in the paper
            max_grad_norm=1.0,  # the paper: gradients at most 1 long
            label_smoothing=0.0,  # the paper: the likelihood itself
            compile="off",  # a loop over positions is compiled anew for every length, and gains less than that takes
            final_checkpoint="best",  # the paper trains RNNsearch-50* until validation stops improving; of the other it does not say
            checkpoint_every=2000,  # not in the paper
            validate_every=2000,  # not in the paper
        ),
        decode=DecodeConfig(
            beam=10,  # the paper: beam search, of a width that is not told
            length_penalty=0.0,  # the paper: the translation of the highest probability
        ),
    )


def luong2015_general() -> Config:
    """Global attention with the general score and input feeding, four layers."""
    return Config(
        text=TextConfig(
            tokenizer="bpe",  # not the paper's whole words, of which the rare ones became unknown
            vocab_size=50_000,  # the paper: the 50,000 most frequent words of each language
            shared_vocab=False,  # the paper: a list for each language
        ),
        data=DataConfig(max_length=50),  # the paper: no pairs over 50 words
        model=ModelConfig(
            encoder=(
                "lstm(layers=4, reverse=true, residual_connection=false)",
            ),  # the paper: 4 layers, the source reversed
            # The new state asks by the general score; input feeding goes into the lowest layer.
            # The decoder's first hidden and cell states are projected from the encoder's last one; in the paper each layer's are
            # handed on as they are.
            decoder=(
                "lstm(layers=4, attention=general, decoder=luong, input_feeding=true, initial_state=first, initial_cell=true, residual_connection=false)",
            ),  # see above
            width=1000,  # the paper: 1000 cells a layer, embeddings of 1000
            heads=1,  # the paper: one alignment
            positions="none",  # the order is in the recurrence
            tie_embeddings="none",  # the paper: embeddings and W_s are matrices of their own
            scale_embeddings=False,  # the paper names no factor
            output_bias=False,  # the paper: softmax(W_s h~)
            dropout=0.2,  # the paper: 0.2, as in Zaremba et al. (2015) not within the recurrence
            attention_dropout=0.0,  # the paper names no other dropout
        ),
        train=TrainConfig(
            steps=420_000,  # the paper: 12 passes with dropout, over 4.5 million pairs
            batch_tokens=3800,  # the paper: 128 sentences, of about 30 words each
            optimizer="adam",  # not the paper's plain SGD
            learning_rate=5e-4,  # not the paper's 1, which is for SGD
            beta2=0.999,  # Adam's default
            epsilon=1e-8,  # Adam's default
            schedule="wsd",  # the paper: constant for 8 passes, then halved after every pass; here a straight fall
            cooldown_fraction=0.33,  # the paper: the last 4 of 12 passes
            warmup_steps=0,  # the paper: none
            max_grad_norm=5.0,  # the paper: gradients at most 5 long
            label_smoothing=0.0,  # the paper: the likelihood itself
            compile="off",  # a loop over positions is compiled anew for every length, and gains less than that takes
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
    """The same with the dot product as it is."""
    return _luong("attention=dot")  # the paper's "dot"


def luong2015_concat() -> Config:
    """The same with a network of one layer."""
    return _luong("attention=additive")  # the paper's "concat", which had no success there


def luong2015_location() -> Config:
    """The same with weights that depend on the target state alone."""
    return _luong("attention=location")  # the paper's "location"


def luong2015_local_m() -> Config:
    """The same in a window that walks one word a step."""
    return _luong("attention=general, alignment=local_m")  # the paper's "local-m", D = 10


def luong2015_local_p() -> Config:
    """The same in a window whose place is predicted: the paper's best."""
    return _luong("attention=general, alignment=local_p")  # the paper's "local-p", D = 10


def _luong(attention: str) -> Config:
    """Change how the decoder of luong2015_general attends."""
    decoder = f"lstm(layers=4, {attention}, decoder=luong, input_feeding=true, initial_state=first, initial_cell=true, residual_connection=false)"
    return luong2015_general().replace(model={"decoder": (decoder,)})


def wu2016() -> Config:
    """GNMT: eight layers a side, ways around the upper ones, the lowest decoder layer's attention fed to all.

    "Summary" is the one at shortscience.org of arXiv 1609.08144, "nmt" Google's later code, tensorflow/nmt, with
    nmt/standard_hparams/wmt16_gnmt_8_layer.json; the paper's own text was not at hand, so no section is cited.
    """
    return Config(
        text=TextConfig(
            tokenizer="bpe",  # not the paper's word pieces, which are found by another criterion
            vocab_size=32_000,  # nmt: wmt16.sh makes 32,000 merges
            shared_vocab=True,  # not nmt's, which has a list for each language (share_vocab false)
        ),
        data=DataConfig(max_length=50),  # nmt: src_max_len 50
        model=ModelConfig(
            # Summary: 8 layers, the lowest in both directions. nmt: ways around begin with the third layer from below.
            encoder=(
                "bilstm(residual_connection=false)",
                "lstm(residual_connection=false)",
                "lstm*6",
            ),  # see above
            # Summary: the attention is a network with one hidden layer, asked by the lowest decoder layer, fed to all layers; the
            # encoder's state is not passed on. nmt: normed_bahdanau.
            decoder=(
                "lstm(layers=8, attention=normed_additive, decoder=gnmt, initial_state=zero, residual_connection=false)",
            ),  # see above
            width=1024,  # nmt: num_units 1024
            heads=1,  # one alignment
            residual="no_norm",  # ways around without norms, which are younger
            positions="none",  # the order is in the recurrence
            tie_embeddings="none",  # nmt: embeddings and output are matrices of their own
            scale_embeddings=False,  # nmt names no factor
            output_bias=False,  # nmt: the output layer has use_bias=False
            dropout=0.2,  # summary: 0.2 to 0.3, more for small data
            attention_dropout=0.0,  # nmt has none
        ),
        train=TrainConfig(
            steps=340_000,  # nmt: num_train_steps 340000
            batch_tokens=3800,  # summary: 128 sentences, here of about 30 pieces each
            optimizer="adam",  # summary: Adam for 60,000 updates, then plain SGD, which is not here
            learning_rate=2e-4,  # summary: 2e-4
            beta2=0.999,  # Adam's default
            epsilon=1e-8,  # Adam's default
            schedule="wsd",  # nmt: constant for half of the run, then halved five times; here a straight fall
            cooldown_fraction=0.5,  # nmt: decay_scheme luong10
            warmup_steps=0,  # none in either
            max_grad_norm=5.0,  # summary: 5
            label_smoothing=0.0,  # the likelihood itself; the paper's second stage, reinforcement by GLEU, is not here
            compile="off",  # a loop over positions is compiled anew for every length, and gains less than that takes
            final_checkpoint="best",  # not in the paper
            checkpoint_every=2000,  # not in the paper
            validate_every=2000,  # not in the paper
        ),
        decode=DecodeConfig(
            beam=3,  # summary: 3
            length_penalty=0.65,  # summary: between 0.6 and 0.7, with a coverage penalty that is not here
        ),
    )

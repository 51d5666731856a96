"""Recurrent models that read along: Raffel et al. (2017), monotonic alignment; Chorowski et al. (2015), location-aware attention.

Both papers report mostly on speech, which is not an input here: the alignment and the shape of the network are theirs, the
text settings are not. "Released" is Raffel's code, craffel/mad: example_decoder.py. A line that names neither the paper nor
this code is not the paper's, and says so; one that says "the paper" without a section is cited from memory and awaits a check
against its text. Adam stands in the place of Chorowski's Adadelta.
"""

from __future__ import annotations

from dragoman.config import Config, DataConfig, DecodeConfig, ModelConfig, TextConfig, TrainConfig


def raffel2017() -> Config:
    """Monotonic attention: expected alignments in training, one walk along the source afterwards."""
    return Config(
        text=TextConfig(
            kind="bpe",  # not the paper's: pieces leave no word unknown
            vocabulary=8000,  # not the paper's: fit for a hundred thousand pairs
            joint=False,  # not the paper's: a list for each side, which need not be of one script
        ),
        data=DataConfig(max_length=100),  # not the paper's: the loop over positions takes as long as its longest sentence
        model=ModelConfig(
            encoder=("lstm(layers=2, skip=false)",),  # the paper: one direction, so that output may begin before the input ends
            # Section 2.4: the state before the step asks, e = g v/|v| tanh(W s + V h + b) + r. Sections 2.2 to 2.5: expected
            # alignment with noise of deviation 1 in training; the first e > 0 afterwards. r begins at -1; at -4 as released.
            decoder=(
                "lstm(layers=2, attention=normed_additive, alignment=monotonic, query=before, initial=zero, skip=false)",
            ),  # see above
            width=512,  # not the paper's, whose sizes differ from task to task
            heads=1,  # the paper: one alignment
            positions="none",  # the order is in the recurrence
            tie="none",  # not the paper's: a matrix for each side and one for the output
            scale_embeddings=False,  # the paper names no factor
            output_bias=True,  # not the paper's
            dropout=0.2,  # not the paper's: as in luong2015_general
            attention_dropout=0.0,  # the paper names none on weights
        ),
        train=TrainConfig(
            steps=50_000,  # not the paper's
            batch_tokens=4000,  # not the paper's
            optimiser="adam",  # with its defaults; each of the paper's tasks has settings of its own
            learning_rate=1e-3,  # not the paper's: Adam's default
            beta2=0.999,  # Adam's default
            epsilon=1e-8,  # Adam's default
            schedule="wsd",  # not the paper's: constant, then a planned fall
            warmup=0,  # not the paper's: none is needed at this rate
            clip=1.0,  # not the paper's: near p = 1 the expectation is steep
            label_smoothing=0.0,  # not the paper's: the likelihood itself
            compile="off",  # a loop over positions is compiled anew for every length, and gains less than that takes
            choose="best",  # not the paper's
            checkpoint_every=1000,  # not the paper's
            validate_every=1000,  # not the paper's
        ),
        decode=DecodeConfig(
            beam=4,  # not the paper's: greedy is what an online reader needs
            length_penalty=0.6,  # not the paper's
        ),
    )


def chorowski2015() -> Config:
    """Location-aware attention: filters over the last weights tell the score where to go on."""
    return Config(
        text=TextConfig(
            kind="characters",  # not the paper's, which goes from sound to phonemes: long inputs that are read along, as it studies
            vocabulary=500,  # not the paper's: the characters of most alphabets
            joint=False,  # the paper: input and output are of different kinds
        ),
        data=DataConfig(max_length=300),  # not the paper's: a sentence in characters
        model=ModelConfig(
            encoder=("bigru(skip=false)*3",),  # the paper: 3 bidirectional layers of 256 gated units each way
            # Equations 8 and 9: the last state asks, with filters over the last weights in the score. 32 filters over 31
            # places, as in Tacotron 2; the paper's 10 over 201 are for frames of sound. Its smoothing is left out.
            decoder=(
                "gru(attention=additive, alignment=location_sensitive, query=before, initial=first, skip=false)",
            ),  # one layer of gated units
            width=512,  # the paper: 256 each way, joined; its decoder has 256, and one width serves all here
            heads=1,  # the paper: one alignment
            positions="none",  # the order is in the recurrence and in the filters
            tie="none",  # the paper: nothing is shared
            scale_embeddings=False,  # the paper names no factor
            output_bias=False,  # not the paper's: as in bahdanau2015, whose readout it takes over
            dropout=0.1,  # not the paper's weight noise of 0.075, which is not here
            attention_dropout=0.0,  # the paper names none
        ),
        train=TrainConfig(
            steps=50_000,  # not the paper's, which stops early by validation
            batch_tokens=4000,  # not the paper's
            optimiser="adam",  # not the paper's Adadelta
            learning_rate=5e-4,  # not the paper's: half of Adam's default, as in bahdanau2015
            beta2=0.999,  # Adam's default
            epsilon=1e-8,  # Adam's default
            schedule="constant",  # the paper: Adadelta without a schedule
            warmup=0,  # the paper names none
            clip=1.0,  # not the paper's, which bounds the columns' norms by 1 instead
            label_smoothing=0.0,  # the paper: the likelihood itself
            compile="off",  # a loop over positions is compiled anew for every length, and gains less than that takes
            choose="best",  # the paper: the best by validation
            checkpoint_every=1000,  # not the paper's
            validate_every=1000,  # not the paper's
        ),
        decode=DecodeConfig(
            beam=10,  # the paper: a beam of 10
            length_penalty=0.0,  # the paper: the output of the highest probability
        ),
    )

"""Recurrent models with other alignments: reading along, looking at one word, minding what was read.

Raffel et al. (2017), monotonic alignment; Chiu and Raffel (2018), MoChA; Chorowski et al. (2015), location-aware attention; Xu et
al. (2015), hard attention; See, Liu and Manning (2017), coverage.

These papers report mostly on speech, pictures and summaries, which are not an input here or not the task: the alignment and the
shape of the network are theirs, the text settings are not. "Released" is the authors' code: craffel/mad, example_decoder.py, for
Raffel; kelvinxu/arctic-captions, capgen.py, for Xu; abisee/pointer-generator, run_summarization.py, for See. A line that names
neither the paper nor this code is not the paper's, and says so. Raffel's section 2.2 and equations 11 to 14 were compared with the
paper's text; the other papers' texts were not at hand, so no section of theirs is cited. Adam stands in the place of
Chorowski's Adadelta, Xu's RMSprop and See's Adagrad.
"""

from __future__ import annotations

from dragoman.config import Config, DataConfig, DecodeConfig, ModelConfig, TextConfig, TrainConfig


def raffel2017() -> Config:
    """Monotonic attention: expected alignments in training, one walk along the source afterwards."""
    return Config(
        text=TextConfig(
            tokenizer="bpe",  # not the paper's: pieces leave no word unknown
            vocab_size=8000,  # not the paper's: fit for a hundred thousand pairs
            shared_vocab=False,  # not the paper's: a list for each side, which need not be of one script
        ),
        data=DataConfig(
            max_length=100
        ),  # not the paper's: the loop over positions takes as long as its longest sentence
        model=ModelConfig(
            encoder=(
                "lstm(layers=2, residual_connection=false)",
            ),  # the paper: one direction, so that output may begin before the input ends
            # Released: e = g v/|v| tanh(W s + V h + b) + r, asked by the state before the step (equation 11), with noise of deviation 1
            # in training (the paper). Equations 12 to 14: the expected alignment; section 2.2: the first e > 0 afterwards. r begins
            # at -1; "e.g. -4", as released, is for speech.
            decoder=(
                "lstm(layers=2, attention=normed_additive, alignment=monotonic, decoder=bahdanau, initial_state=zero, residual_connection=false)",
            ),  # see above
            width=512,  # not the paper's, whose sizes differ from task to task
            heads=1,  # the paper: one alignment
            positions="none",  # the order is in the recurrence
            tie_embeddings="none",  # not the paper's: a matrix for each side and one for the output
            scale_embeddings=False,  # the paper names no factor
            output_bias=True,  # not the paper's
            dropout=0.2,  # not the paper's: as in luong2015_general
            attention_dropout=0.0,  # the paper names none on weights
        ),
        train=TrainConfig(
            steps=50_000,  # not the paper's
            batch_tokens=4000,  # not the paper's
            optimizer="adam",  # with its defaults; each of the paper's tasks has settings of its own
            learning_rate=1e-3,  # not the paper's: Adam's default
            beta2=0.999,  # Adam's default
            epsilon=1e-8,  # Adam's default
            schedule="wsd",  # not the paper's: constant, then a planned fall
            warmup_steps=0,  # not the paper's: none is needed at this rate
            max_grad_norm=1.0,  # not the paper's: near p = 1 the expectation is steep
            label_smoothing=0.0,  # not the paper's: the likelihood itself
            compile="off",  # a loop over positions is compiled anew for every length, and gains less than that takes
            final_checkpoint="best",  # not the paper's
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
            tokenizer="characters",  # not the paper's, which goes from sound to phonemes: long inputs that are read along, as it studies
            vocab_size=500,  # not the paper's: the characters of most alphabets
            shared_vocab=False,  # the paper: input and output are of different kinds
        ),
        data=DataConfig(max_length=300),  # not the paper's: a sentence in characters
        model=ModelConfig(
            encoder=(
                "bigru(residual_connection=false)*3",
            ),  # the paper: 3 bidirectional layers of 256 gated units each way
            # The paper: the last state asks, with filters over the last weights in the score. 32 filters over 31
            # places, as in Tacotron 2; the paper's 10 over 201 are for frames of sound. Its smoothing is an option of the block,
            # smoothing=true; alignment=location_cumulative filters the sum of all earlier weights, as Tacotron 2 does.
            decoder=(
                "gru(attention=additive, alignment=location_sensitive, decoder=bahdanau, initial_state=first, residual_connection=false)",
            ),  # one layer of gated units
            width=512,  # the paper: 256 each way, joined; its decoder has 256, and one width serves all here
            heads=1,  # the paper: one alignment
            positions="none",  # the order is in the recurrence and in the filters
            tie_embeddings="none",  # the paper: nothing is shared
            scale_embeddings=False,  # the paper names no factor
            output_bias=False,  # not the paper's: as in bahdanau2015, whose readout it takes over
            dropout=0.1,  # not the paper's weight noise of 0.075, which is not here
            attention_dropout=0.0,  # the paper names none
        ),
        train=TrainConfig(
            steps=50_000,  # not the paper's, which stops early by validation
            batch_tokens=4000,  # not the paper's
            optimizer="adam",  # not the paper's Adadelta
            learning_rate=5e-4,  # not the paper's: half of Adam's default, as in bahdanau2015
            beta2=0.999,  # Adam's default
            epsilon=1e-8,  # Adam's default
            schedule="constant",  # the paper: Adadelta without a schedule
            warmup_steps=0,  # the paper names none
            max_grad_norm=1.0,  # not the paper's, which bounds the columns' norms by 1 instead
            label_smoothing=0.0,  # the paper: the likelihood itself
            compile="off",  # a loop over positions is compiled anew for every length, and gains less than that takes
            final_checkpoint="best",  # the paper: the best by validation
            checkpoint_every=1000,  # not the paper's
            validate_every=1000,  # not the paper's
        ),
        decode=DecodeConfig(
            beam=10,  # the paper: a beam of 10
            length_penalty=0.0,  # the paper: the output of the highest probability
        ),
    )


def chiu2018() -> Config:
    """MoChA: raffel2017 with a soft look back over a few words from where the head stops."""
    decoder = "lstm(layers=2, attention=normed_additive, alignment=mocha, chunk_size=4, decoder=bahdanau, initial_state=zero, residual_connection=false)"
    # chunk: the paper takes 2 for speech and 8 for summaries; between them here
    return raffel2017().replace(
        model={"decoder": (decoder,)}
    )  # the rest is raffel2017's, and no more the paper's than there


def xu2015() -> Config:
    """Hard attention trained by reward: one word of the source at a time, drawn in training, the best one afterwards."""
    return Config(
        text=TextConfig(
            tokenizer="bpe",  # not the paper's, which goes from pictures to words
            vocab_size=8000,  # not the paper's: released n_words=10000 are words
            shared_vocab=False,  # the paper: input and output are of different kinds
        ),
        data=DataConfig(max_length=100),  # released: maxlen=100
        model=ModelConfig(
            encoder=(
                "bilstm(residual_connection=false)",
            ),  # not the paper's convolutions: released lstm_encoder, for inputs in a row
            # The paper: the last state asks, a choice is drawn and rewarded by the caption's likelihood, with a moving
            # baseline, entropy (released: 0.002), and in half of the cases the expected weights. First hidden and cell state: two
            # layers with tanh over the mean.
            decoder=(
                "lstm(attention=additive, alignment=reinforce, decoder=bahdanau, initial_state=mean, initial_cell=true, residual_connection=false)",
            ),  # see above
            width=1000,  # released: dim=1000 units; dim_word=100 there, one width serves all here
            heads=1,  # the paper: one alignment
            positions="none",  # the order is in the recurrence
            tie_embeddings="none",  # released: nothing is shared
            scale_embeddings=False,  # released: no factor
            output_bias=True,  # released: ff_logit has a bias
            dropout=0.5,  # the paper: dropout of one half
            attention_dropout=0.0,  # the paper names none
        ),
        train=TrainConfig(
            steps=50_000,  # not the paper's, which stops early by validation (released: patience=10)
            batch_tokens=2000,  # released: batch_size = 16 captions in the defaults; more rows make rewards less noisy
            optimizer="adam",  # released: rmsprop by default; the paper has both, each for a corpus of its own
            learning_rate=5e-4,  # not the paper's: half of Adam's default, as in bahdanau2015
            beta2=0.999,  # Adam's default
            epsilon=1e-8,  # Adam's default
            schedule="constant",  # released: none
            warmup_steps=0,  # released: none
            max_grad_norm=1.0,  # not the paper's: rewards make gradients jump
            label_smoothing=0.0,  # the paper: the likelihood itself, which is the reward too
            compile="off",  # a loop over positions is compiled anew for every length, and gains less than that takes
            cuda_graphs="off",  # a trial before recording would move the baseline, and a resumed run would differ by it
            final_checkpoint="best",  # the paper: early stopping
            checkpoint_every=1000,  # released: saveFreq=1000
            validate_every=1000,  # released: validFreq=1000
        ),
        decode=DecodeConfig(
            beam=4,  # not the paper's
            length_penalty=0.0,  # the paper: the output of the highest probability
        ),
    )


def see2017() -> Config:
    """Coverage in the score and in the loss, so that nothing is said twice; the paper's copying of source words is not here."""
    return Config(
        text=TextConfig(
            tokenizer="bpe",  # not the paper's words: pieces leave no word unknown, which is half of what copying was for
            vocab_size=50_000,  # released: vocab_size=50000
            shared_vocab=True,  # released: one list for articles and summaries
        ),
        data=DataConfig(max_length=400),  # released: max_enc_steps=400
        model=ModelConfig(
            encoder=("bilstm(residual_connection=false)",),  # released: one bidirectional layer
            # The paper: coverage is a term of the score, and attending again costs. Released: cov_loss_wt=1.0, in a short last
            # phase only, for from the start it got in the way of the likelihood; here from the start, and a tenth of that. The new state
            # asks, and the last answer comes in again, as in Luong's feeding. Released: the first states are relu(W [forward;
            # backward]) of the encoder's last hidden and cell states; here both are projected from the hidden ones, under tanh.
            decoder=(
                "lstm(attention=additive, alignment=coverage, coverage_loss_weight=0.1, input_feeding=true, initial_state=last_bidirectional, initial_cell=true, residual_connection=false)",
            ),  # see above
            width=256,  # released: hidden_dim=256; emb_dim=128 there, one width serves all here
            heads=1,  # the paper: one alignment
            positions="none",  # the order is in the recurrence
            tie_embeddings="target",  # not the paper's, which shares the two embeddings but not the output
            scale_embeddings=False,  # released: no factor
            output_bias=True,  # released: the output projection has a bias, v
            dropout=0.0,  # released: none
            attention_dropout=0.0,  # released: none
        ),
        train=TrainConfig(
            steps=230_000,  # the paper: about 230,000 updates, then 3,000 with coverage
            batch_tokens=6400,  # released: batch_size=16, of 400 words each
            optimizer="adam",  # released: Adagrad, which is not here
            learning_rate=1e-3,  # not the paper's 0.15, which is for Adagrad
            beta2=0.999,  # Adam's default
            epsilon=1e-8,  # Adam's default
            schedule="constant",  # released: none
            warmup_steps=0,  # released: none
            max_grad_norm=2.0,  # released: max_grad_norm=2.0
            label_smoothing=0.0,  # the paper: the likelihood itself
            compile="off",  # a loop over positions is compiled anew for every length, and gains less than that takes
            final_checkpoint="best",  # the paper: early stopping by validation
            checkpoint_every=1000,  # not the paper's
            validate_every=1000,  # not the paper's
        ),
        decode=DecodeConfig(
            beam=4,  # released: beam_size=4
            length_penalty=1.0,  # released: beams are sorted by their mean log-probability
        ),
    )

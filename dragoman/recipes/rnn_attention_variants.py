"""RNN models with other alignments: monotonic, MoChA, location-sensitive, hard, coverage.

Raffel et al. (2017), monotonic attention; Chiu and Raffel (2018), MoChA; Chorowski et al. (2015),
location-sensitive attention; Xu et al. (2015), hard attention; See, Liu and Manning (2017),
coverage.

Most of these papers are about speech, image captions or summaries: the alignment and the network
are theirs, the text settings are not. "Released" is the authors' code: craffel/mad,
example_decoder.py, for Raffel; kelvinxu/arctic-captions, capgen.py, for Xu;
abisee/pointer-generator, run_summarization.py, for See. Adam replaces Chorowski's Adadelta, Xu's
RMSprop and See's Adagrad.
"""

from __future__ import annotations

from dragoman.config import Config, DataConfig, DecodeConfig, ModelConfig, TextConfig, TrainConfig


def raffel2017() -> Config:
    """Monotonic attention: expected alignments in training, hard monotonic decoding."""
    return Config(
        text=TextConfig(
            tokenizer="bpe",  # not the paper's: no unknown words
            vocab_size=8000,  # not the paper's: for about 100,000 pairs
            # not the paper's: the two sides may have different scripts
            shared_vocab=False,
        ),
        # not the paper's: the loop over positions is slow for long sentences
        data=DataConfig(max_length=100),
        model=ModelConfig(
            # the paper: unidirectional, for online decoding
            encoder=("lstm(layers=2, residual_connection=false)",),
            # Released: e = g v/|v| tanh(W s + V h + b) + r, with the previous state as query
            # (equation 11) and Gaussian noise in training (the paper). Equations 12 to 14: the
            # expected alignment; section 2.2: the first e > 0 at inference. r is initialized to -1;
            # "e.g. -4", as released, is for speech.
            decoder=(
                "lstm(layers=2, attention=normed_additive, alignment=monotonic, "
                "decoder=bahdanau, initial_state=zero, residual_connection=false)",
            ),
            width=512,  # not the paper's, whose sizes differ from task to task
            heads=1,  # the paper: one alignment
            positions="none",  # an RNN encodes the order
            tie_embeddings="none",  # not the paper's
            scale_embeddings=False,  # the paper has no scaling
            output_bias=True,  # not the paper's
            dropout=0.2,  # not the paper's: as in luong2015_general
            attention_dropout=0.0,  # the paper names none
        ),
        train=TrainConfig(
            steps=50_000,  # not the paper's
            batch_tokens=4000,  # not the paper's
            # with its defaults; the paper's settings depend on the task
            optimizer="adam",
            learning_rate=1e-3,  # not the paper's: Adam's default
            beta2=0.999,  # Adam's default
            epsilon=1e-8,  # Adam's default
            schedule="wsd",  # not the paper's: constant, then linear decay
            warmup_steps=0,  # not the paper's: none is needed at this rate
            max_grad_norm=1.0,  # not the paper's: gradients are large near p = 1
            label_smoothing=0.0,  # not the paper's: no label smoothing
            # a loop over positions would be recompiled for every length
            compile="off",
            final_checkpoint="best",  # not the paper's
            checkpoint_every=1000,  # not the paper's
            validate_every=1000,  # not the paper's
        ),
        decode=DecodeConfig(
            beam=4,  # not the paper's; online decoding is greedy
            length_penalty=0.6,  # not the paper's
        ),
    )


def chorowski2015() -> Config:
    """Location-sensitive attention: convolutions over the previous attention weights."""
    return Config(
        text=TextConfig(
            # the paper's task is speech recognition: long inputs, aligned monotonically
            tokenizer="characters",
            vocab_size=500,  # not the paper's: the characters of most alphabets
            shared_vocab=False,  # the paper: input and output are of different modalities
        ),
        data=DataConfig(max_length=300),  # not the paper's: in characters
        model=ModelConfig(
            # the paper: 3 bidirectional layers of 256 GRUs each way
            encoder=("bigru(residual_connection=false)*3",),
            # Query is the previous state; the score has convolutions over the previous weights. 32
            # filters of width 31, as in Tacotron 2; the paper's 10 of width 201 are for speech
            # frames. Its smoothing is the option smoothing=true; alignment=location_cumulative
            # convolves the sum of all previous weights, as Tacotron 2 does.
            decoder=(
                "gru(attention=additive, alignment=location_sensitive, decoder=bahdanau, "
                "initial_state=first, residual_connection=false)",
            ),
            # the paper: 256 each way in the encoder, 256 in the decoder; here one width for all
            width=512,
            heads=1,  # the paper: one alignment
            positions="none",  # an RNN encodes the order
            tie_embeddings="none",  # the paper: not tied
            scale_embeddings=False,  # the paper has no scaling
            output_bias=False,  # not the paper's: as in bahdanau2015
            dropout=0.1,  # instead of the paper's weight noise of 0.075
            attention_dropout=0.0,  # the paper names none
        ),
        train=TrainConfig(
            steps=50_000,  # not the paper's, which stops early
            batch_tokens=4000,  # not the paper's
            optimizer="adam",  # not the paper's Adadelta
            learning_rate=5e-4,  # not the paper's: half of Adam's default, as in bahdanau2015
            beta2=0.999,  # Adam's default
            epsilon=1e-8,  # Adam's default
            schedule="constant",  # the paper: Adadelta without a schedule
            warmup_steps=0,  # the paper names none
            max_grad_norm=1.0,  # the paper: column norms of the weights at most 1
            label_smoothing=0.0,  # the paper: no label smoothing
            # a loop over positions would be recompiled for every length
            compile="off",
            final_checkpoint="best",  # the paper: the best by validation
            checkpoint_every=1000,  # not the paper's
            validate_every=1000,  # not the paper's
        ),
        decode=DecodeConfig(
            beam=10,  # the paper: a beam of 10
            length_penalty=0.0,  # the paper: highest probability
        ),
    )


def chiu2018() -> Config:
    """MoChA: `raffel2017` with soft attention over a chunk that ends at the chosen position."""
    decoder = (
        "lstm(layers=2, attention=normed_additive, alignment=mocha, chunk_size=4, "
        "decoder=bahdanau, initial_state=zero, residual_connection=false)"
    )
    # Chunk size: 2 for speech and 8 for summaries in the paper. The rest is raffel2017's.
    return raffel2017().replace(model={"decoder": (decoder,)})


def xu2015() -> Config:
    """Hard attention trained with REINFORCE: sampled in training, argmax at inference."""
    return Config(
        text=TextConfig(
            tokenizer="bpe",  # the paper's input is an image
            vocab_size=8000,  # not the paper's: released n_words=10000 are words
            shared_vocab=False,  # the paper: input and output are of different modalities
        ),
        data=DataConfig(max_length=100),  # released: maxlen=100
        model=ModelConfig(
            # released lstm_encoder, for sequences; the paper has a CNN
            encoder=("bilstm(residual_connection=false)",),
            # Query is the previous state; positions are sampled and rewarded with the
            # log-likelihood, with a moving baseline, an entropy term (released: 0.002), and the
            # expected weights in half of the cases. Initial hidden and cell states: linear layers
            # with tanh over the mean.
            decoder=(
                "lstm(attention=additive, alignment=reinforce, decoder=bahdanau, "
                "initial_state=mean, initial_cell=true, residual_connection=false)",
            ),
            width=1000,  # released: dim=1000 units; dim_word=100 there, here one width for all
            heads=1,  # the paper: one alignment
            positions="none",  # an RNN encodes the order
            tie_embeddings="none",  # released: not tied
            scale_embeddings=False,  # released: no scaling
            output_bias=True,  # released: ff_logit has a bias
            dropout=0.5,  # the paper: dropout of one half
            attention_dropout=0.0,  # the paper names none
        ),
        train=TrainConfig(
            # not the paper's, which stops early (released: patience=10)
            steps=50_000,
            # released: batch_size = 16 captions; larger batches reduce the variance of the reward
            batch_tokens=2000,
            # released: rmsprop by default; the paper uses either, depending on the corpus
            optimizer="adam",
            learning_rate=5e-4,  # not the paper's: half of Adam's default, as in bahdanau2015
            beta2=0.999,  # Adam's default
            epsilon=1e-8,  # Adam's default
            schedule="constant",  # released: none
            warmup_steps=0,  # released: none
            max_grad_norm=1.0,  # not the paper's: the gradients have high variance
            label_smoothing=0.0,  # the paper: no label smoothing
            # a loop over positions would be recompiled for every length
            compile="off",
            # the warm-up before capture would update the baseline, so resuming would change results
            cuda_graphs="off",
            final_checkpoint="best",  # the paper: early stopping
            checkpoint_every=1000,  # released: saveFreq=1000
            validate_every=1000,  # released: validFreq=1000
        ),
        decode=DecodeConfig(
            beam=4,  # not the paper's
            length_penalty=0.0,  # the paper: highest probability
        ),
    )


def see2017() -> Config:
    """Coverage attention and coverage loss; the pointer-generator's copying is not implemented."""
    return Config(
        text=TextConfig(
            # the paper: words
            tokenizer="bpe",
            vocab_size=50_000,  # released: vocab_size=50000
            shared_vocab=True,  # released: one vocabulary for articles and summaries
        ),
        data=DataConfig(max_length=400),  # released: max_enc_steps=400
        model=ModelConfig(
            encoder=("bilstm(residual_connection=false)",),  # released: one bidirectional layer
            # Released: coverage loss with cov_loss_wt=1.0 in a short last phase; here 0.1 from the
            # start. Input feeding as in Luong et al. Released: initial states are relu(W [forward;
            # backward]) of the encoder's last hidden and cell states; here both are projected from
            # the hidden ones, with tanh.
            decoder=(
                "lstm(attention=additive, alignment=coverage, coverage_loss_weight=0.1, "
                "input_feeding=true, initial_state=last_bidirectional, initial_cell=true, "
                "residual_connection=false)",
            ),
            width=256,  # released: hidden_dim=256; emb_dim=128 there, here one width for all
            heads=1,  # the paper: one alignment
            positions="none",  # an RNN encodes the order
            # the paper shares the two embeddings but not the output
            tie_embeddings="target",
            scale_embeddings=False,  # released: no scaling
            output_bias=True,  # released: the output projection has a bias, v
            dropout=0.0,  # released: none
            attention_dropout=0.0,  # released: none
        ),
        train=TrainConfig(
            steps=230_000,  # the paper: about 230,000 steps, then 3,000 with coverage
            batch_tokens=6400,  # released: batch_size=16, of 400 words each
            optimizer="adam",  # released: Adagrad
            learning_rate=1e-3,  # not the paper's 0.15, which is for Adagrad
            beta2=0.999,  # Adam's default
            epsilon=1e-8,  # Adam's default
            schedule="constant",  # released: none
            warmup_steps=0,  # released: none
            max_grad_norm=2.0,  # released: max_grad_norm=2.0
            label_smoothing=0.0,  # the paper: no label smoothing
            # a loop over positions would be recompiled for every length
            compile="off",
            final_checkpoint="best",  # the paper: early stopping by validation
            checkpoint_every=1000,  # not the paper's
            validate_every=1000,  # not the paper's
        ),
        decode=DecodeConfig(
            beam=4,  # released: beam_size=4
            length_penalty=1.0,  # released: hypotheses are ranked by mean log-probability
        ),
    )

"""ConvS2S: Gehring et al. (2017), "Convolutional Sequence to Sequence Learning".

The paper's own text was not at hand, so no section is cited. "Released" is the authors' code,
facebookresearch/fairseq: fairseq/models/fconv.py for the model (`fconv_iwslt_de_en`), docs/getting_started.rst for its training
command, examples/translation/README.md for the later one. Where this differs from all of them, the line says so. One width
serves embeddings and convolutions, so the maps between the two, which the released code always has, are left out.
"""

from __future__ import annotations

from dragoman.config import Config, DataConfig, DecodeConfig, ModelConfig, TextConfig, TrainConfig


def gehring2017() -> Config:
    """The released model for IWSLT 2014 German-English, 160,000 pairs."""
    return Config(
        text=TextConfig(
            tokenizer="bpe",  # the paper: byte-pair encoding
            vocab_size=10_000,  # released prepare-iwslt14.sh: 10,000 merges
            shared_vocab=True,  # released prepare-iwslt14.sh: learnt from both sides together
        ),
        data=DataConfig(max_length=175),  # the paper: no sentences over 175 words
        model=ModelConfig(
            encoder=("conv(kernel_size=3)*4",),  # released: [(256, 3)] * 4
            # released: [(256, 3)] * 3, GradMultiply by 1 / (2 * num_attention_layers); the paper: attention in every layer, one g for all
            decoder=("conv(kernel_size=3, layers=3, scale_encoder_grad=true)",),  # see above
            width=256,  # released: embeddings, convolutions and output embedding of 256
            residual="scaled",  # the paper: the sum of input and output times the root of a half
            positions="learned",  # the paper: embeddings of the absolute position
            max_positions=1024,  # released: max_positions=1024
            tie_embeddings="none",  # released: share_input_output_embed=False
            scale_embeddings=False,  # the paper: N(0, 0.1); ours are N(0, 1/16), and larger ones saturate the unscaled dot product
            output_bias=True,  # released: fc3 is a linear layer with a bias
            dropout=0.2,  # released command: --dropout 0.2; on the embeddings and on each convolution's input
            attention_dropout=0.0,  # the paper names none on attention weights
        ),
        train=TrainConfig(
            steps=50_000,  # about 50 passes, as many as the later released command makes before it anneals (--force-anneal 50)
            batch_tokens=4000,  # released command: --max-tokens 4000
            optimizer="adam",  # not the paper's, Nesterov's momentum of 0.99: as in bentrevett/pytorch-seq2seq, part 5
            learning_rate=1e-3,  # Adam's default, as there; the paper's 0.25 is for Nesterov's
            beta2=0.999,  # Adam's default, as there
            epsilon=1e-8,  # Adam's default, as there
            max_grad_norm=0.1,  # the paper: gradients longer than 0.1 are shortened; with 1.0 training now and then explodes
            schedule="wsd",  # the paper: constant until validation stands still, then lowered: here the fall is planned
            warmup_steps=0,  # the paper: none
            label_smoothing=0.1,  # the later released command: --label-smoothing 0.1
            checkpoint_every=1000,  # about a pass
            validate_every=1000,  # the paper: after every pass
        ),
        decode=DecodeConfig(
            beam=5,  # the paper: a beam of 5
            length_penalty=1.0,  # the paper: divided by the length, of which this is the nearest form
        ),
    )

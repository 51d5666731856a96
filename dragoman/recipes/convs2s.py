"""ConvS2S: Gehring et al. (2017), "Convolutional Sequence to Sequence Learning".

"Released" is the authors' code, facebookresearch/fairseq: fairseq/models/fconv.py for the model
(`fconv_iwslt_de_en`), docs/getting_started.rst for its training command,
examples/translation/README.md for a later one. The paper is cited without sections. In
`gehring2017` one width serves embeddings and convolutions, so there are no projections between
them.
"""

from __future__ import annotations

from dragoman.config import Config, DataConfig, DecodeConfig, ModelConfig, TextConfig, TrainConfig


def gehring2017() -> Config:
    """The released model for IWSLT 2014 German-English, 160,000 pairs."""
    return Config(
        text=TextConfig(
            tokenizer="bpe",  # the paper: byte-pair encoding
            vocab_size=10_000,  # released prepare-iwslt14.sh: 10,000 merges
            shared_vocab=True,  # released prepare-iwslt14.sh: learned from both sides
        ),
        data=DataConfig(max_length=175),  # the paper: no sentences over 175 words
        model=ModelConfig(
            encoder=("conv(kernel_size=3)*4",),  # released: [(256, 3)] * 4
            # released: [(256, 3)] * 3, GradMultiply by 1 / (2 * num_attention_layers); the paper:
            # attention in every layer, shared target embeddings
            decoder=("conv(kernel_size=3, layers=3, scale_encoder_grad=true)",),
            width=256,  # released: embeddings, convolutions and output embedding of 256
            residual="scaled",  # the paper: residual sum times sqrt(0.5)
            positions="learned",  # the paper: embeddings of the absolute position
            max_positions=1024,  # released: max_positions=1024
            tie_embeddings="none",  # released: share_input_output_embed=False
            # the paper: N(0, 0.1); here N(0, 1/16), because larger ones saturate unscaled dot
            # products
            scale_embeddings=False,
            output_bias=True,  # released: fc3 is a linear layer with a bias
            # released command: --dropout 0.2; on the embeddings and on each convolution's input
            dropout=0.2,
            attention_dropout=0.0,  # the paper names none on attention weights
        ),
        train=TrainConfig(
            # about 50 epochs, as in the later released command (--force-anneal 50)
            steps=50_000,
            batch_tokens=4000,  # released command: --max-tokens 4000
            # the paper: Nesterov momentum of 0.99; Adam as in bentrevett/pytorch-seq2seq, part 5
            optimizer="adam",
            learning_rate=1e-3,  # Adam's default, as there; the paper: 0.25
            beta2=0.999,  # Adam's default, as there
            epsilon=1e-8,  # Adam's default, as there
            # the paper: gradient norm clipped at 0.1; with 1.0 training sometimes diverges
            max_grad_norm=0.1,
            # the paper: constant, lowered when validation stops improving; here on a schedule
            schedule="wsd",
            warmup_steps=0,  # the paper: none
            label_smoothing=0.1,  # the later released command: --label-smoothing 0.1
            checkpoint_every=1000,  # about an epoch
            validate_every=1000,  # the paper: every epoch
        ),
        decode=DecodeConfig(
            beam=5,  # the paper: a beam of 5
            # the paper: normalized by the length
            length_penalty=1.0,
        ),
    )


def gehring2017_wmt() -> Config:
    """The released model for WMT 2014 English-German, 15 layers per side of up to 2048 channels."""
    # released fconv_wmt_en_de: [(512, 3)] * 9 + [(1024, 3)] * 4 + [(2048, 1)] * 2, for both sides
    encoder = (
        "conv(width=512)*9",
        "conv(width=1024)*4",
        "conv(width=2048, kernel_size=1)*2",
    )
    # released: GradMultiply by 1 / (2 * num_attention_layers)
    decoder = (
        "conv(width=512, scale_encoder_grad=true)*9",
        "conv(width=1024, scale_encoder_grad=true)*4",
        "conv(width=2048, kernel_size=1, scale_encoder_grad=true)*2",
    )
    return gehring2017().replace(
        text={"vocab_size": 40_000},  # the paper: 40,000 types, source and target together
        model={
            "encoder": encoder,
            "decoder": decoder,
            "width": 768,  # released: embeddings of 768; its output embedding has 512
        },
        train={
            "steps": 300_000,  # not in the paper
            "optimizer": "sgd",  # the paper: Nesterov's accelerated gradient
            "momentum": 0.99,  # the paper: 0.99
            "learning_rate": 0.25,  # the paper: 0.25
            "checkpoint_every": 2000,  # not in the paper
            "validate_every": 2000,  # not in the paper
        },
    )

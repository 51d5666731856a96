"""The Transformer's variants, each the base model of Vaswani et al. (2017) but for what its paper changes.

Where a paper trains something else than a translator (a language model, an encoder to be tuned), what it changes is theirs and the
rest is the base model's. "Released" names code that was read; "not checked" means that the paper's text was not at hand. Feed-forward
layers and heads are the base model's wherever a line does not say otherwise.
"""

from __future__ import annotations

from dragoman.config import Config
from dragoman.recipes.transformer import vaswani2017_base


def shaw2018() -> Config:
    """Relative positions in the keys: Shaw, Uszkoreit and Vaswani (2018)."""
    return vaswani2017_base().replace(
        model={"positions": "shaw"},  # table 1: 26.8 BLEU for 26.5; distances clipped at 16
    )


def dai2019() -> Config:
    """Transformer-XL's relative positions: Dai et al. (2019), whose models are of language; the memory of earlier text is left out."""
    return vaswani2017_base().replace(
        model={
            "positions": "transformer_xl"
        },  # the paper's four terms; released: mem_transformer.py
    )


def su2021() -> Config:
    """Rotary positions: Su et al. (2021), "RoFormer"."""
    return vaswani2017_base().replace(
        model={"positions": "rotary"},  # table 1: 27.5 BLEU for 27.3
    )


def press2022() -> Config:
    """Scores that fall with the distance: Press, Smith and Lewis (2022), "ALiBi", whose models are of language."""
    return vaswani2017_base().replace(
        model={
            "positions": "alibi"
        },  # slopes 2^(-8 i / H); ahead of a word at slopes of their own, which are ours
    )


def raffel2020() -> Config:
    """T5's layer at its smallest size: Raffel et al. (2020). Their text-to-text training and Adafactor are not here."""
    return vaswani2017_base().replace(
        model={
            # 6 + 6 layers of 512, 8 heads of 64, 2048 inside: T5's small model has the base Transformer's sizes.
            "norm": "t5",  # section 2.1: no mean, no shift
            "norm_epsilon": 1e-6,  # released: layer_norm_epsilon
            "residual": "pre_norm",  # section 2.1: the norm stands before each layer, outside the way around
            "positions": "t5",  # section 2.1: a number for each of 32 buckets of distances; here each layer has its own
            "attention_bias": False,  # released: no biases anywhere
            "ffn_bias": False,  # released: the same
            # Embeddings of deviation 1, times the root of 1/512 on the way out (released), are ours times the root of 512 on the way in.
            "attention_dropout": 0.1,  # released: dropout_rate, everywhere
            "ffn_dropout": 0.1,  # released: the same
        },
    )


def xiong2020() -> Config:
    """The norm inside the way around, and no warm-up: Xiong et al. (2020)."""
    return vaswani2017_base().replace(
        model={"residual": "pre_norm"},  # their Pre-LN, with a norm at the end of each stack
        train={
            "learning_rate": 1e-3,  # figure 2: at 1e-3 without warm-up it trains as well as post-norm with it
            "schedule": "linear",  # not checked
            "warmup_steps": 0,  # figure 2: none
        },
    )


def nguyen2019() -> Config:
    """ScaleNorm and FixNorm for little data: Nguyen and Salazar (2019). Released: configurations.py and model.py."""
    return vaswani2017_base().replace(
        text={"vocab_size": 8000},  # not checked: fit for a hundred thousand pairs
        model={
            "norm": "scale",  # released: scnorm
            "norm_epsilon": 1e-5,  # released: layers.py
            "fix_norm": True,  # released: fix_norm
            "residual": "pre_norm",  # released: pre_act
            "attention_bias": True,  # released: use_bias
            "output_bias": True,  # released: out_bias
            "dropout": 0.3,  # released: dropout
            "attention_dropout": 0.3,  # released: att_dropout
            "ffn_dropout": 0.3,  # released: ff_dropout
        },
        train={
            "steps": 100_000,  # released: epochs of 1000 updates, 200 at most; half of it
            "batch_tokens": 4096,  # released: batch_size
            "learning_rate": 3e-4,  # released: lr
            "schedule": "wsd",  # released falls by 0.8 whenever validation stands still; here a planned fall
            "warmup_steps": 0,  # released: lr_scheduler is the one without warm-up
            "max_grad_norm": 1.0,  # released: clip_grad
            "average_checkpoints": 1,  # released: none
            "final_checkpoint": "best",  # released: the best on validation data
            "best_metric": "bleu",  # released: eval_metric
        },
    )


def lan2020() -> Config:
    """Shared layers and factorised embeddings: Lan et al. (2020), "ALBERT", whose models are encoders to be tuned."""
    return vaswani2017_base().replace(
        model={
            "share_layers": "all",  # ALBERT's default; sharing attention alone costs least (tables 3 to 5)
            "embedding_width": 128,  # E = 128 in all of its models
            "activation": "gelu",  # as in BERT; not checked
        },
    )


def fan2020() -> Config:
    """Layers left out in training: Fan, Grave and Joulin (2020), "LayerDrop". Released: fairseq's examples/layerdrop."""
    return vaswani2017_base().replace(
        model={
            "encoder": ("transformer*12",),  # released: layerdrop_wmt_en_de_12_6
            "decoder": ("transformer*6",),  # released: the same
            "layer_drop": 0.2,  # released: LayerDrop 0.2
        },
    )


def zhang2019() -> Config:
    """Twelve layers that start smaller the deeper they stand: Zhang, Titov and Sennrich (2019); their merged attention is not here."""
    return vaswani2017_base().replace(
        model={
            "encoder": (
                "transformer*12",
            ),  # the abstract: +1.1 BLEU on average for 12-layer models
            "decoder": ("transformer*12",),  # the same
            "initialization": "depth_scaled",  # DS-Init
        },
    )


def shazeer2020() -> Config:
    """Heads that talk: Shazeer et al. (2020), "Talking-Heads Attention", whose models are T5's."""
    return vaswani2017_base().replace(
        model={"talking_heads": True},  # as many heads of scores as of weights
    )


def shazeer2020_glu() -> Config:
    """A gate in the feed-forward layers: Shazeer (2020), "GLU Variants Improve Transformer", whose models are T5's."""
    return vaswani2017_base().replace(
        model={
            "activation": "swiglu",  # equation 5
            "ffn_width": 1365,  # two thirds of 2048, so that three matrices are as large as two were
            "ffn_bias": False,  # equation 5 has none
        },
    )


def ainslie2023() -> Config:
    """Keys and values shared by groups of heads: Ainslie et al. (2023), whose models are T5's."""
    return vaswani2017_base().replace(
        model={
            "kv_heads": 2
        },  # not the paper's, which groups 64 heads by eights; four heads to a key here
    )


def henry2020() -> Config:
    """Queries and keys of length one, times a trained number: Henry et al. (2020), "QKNorm"; it builds on Nguyen and Salazar's."""
    return nguyen2019().replace(
        model={
            "qk_norm": "scale"
        },  # the abstract: l2 along each head, then a learnt scale; which norm their layers keep is not checked
    )


def bhojanapalli2020() -> Config:
    """Heads as wide as a sentence is long: Bhojanapalli et al. (2020), "Low-Rank Bottleneck", whose models are BERT's."""
    return vaswani2017_base().replace(
        model={
            "head_width": 128
        },  # the fixed size of their tables 1 and 2: wider than most sentences are long
    )


def vaswani2017_restricted() -> Config:
    """Self-attention to neighbours, proposed in section 4 of "Attention Is All You Need" and not tried there."""
    return vaswani2017_base().replace(
        model={
            "window": 32
        },  # table 1: r; the paper names no value, and six layers reach 6 x 32 places to either side
    )

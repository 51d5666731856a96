"""Transformer variants: the base model of Vaswani et al. (2017) with the change of one paper.

Where a paper trains something else (a language model, a pretrained encoder), its change is applied
to the base translation model. "Released" names published code; "not checked" marks settings that
were not compared with the paper.
"""

from __future__ import annotations

from dragoman.config import Config
from dragoman.recipes.transformer import small, vaswani2017_base


def shaw2018() -> Config:
    """Relative position keys: Shaw, Uszkoreit and Vaswani (2018)."""
    return vaswani2017_base().replace(
        model={"positions": "shaw"},  # table 1: 26.8 BLEU for 26.5; distances clipped at 16
    )


def dai2019() -> Config:
    """Transformer-XL's relative positions, without its segment recurrence: Dai et al. (2019)."""
    return vaswani2017_base().replace(
        # the paper's four terms; released: mem_transformer.py
        model={"positions": "transformer_xl"},
    )


def su2021() -> Config:
    """Rotary position embeddings: Su et al. (2021), "RoFormer"."""
    return vaswani2017_base().replace(
        model={"positions": "rotary"},  # table 1: 27.5 BLEU for 27.3
    )


def press2022() -> Config:
    """Linear position biases: Press, Smith and Lewis (2022), "ALiBi"."""
    return vaswani2017_base().replace(
        # slopes 2^(-8 i / H); encoders have other slopes for later positions
        model={"positions": "alibi"},
    )


def raffel2020() -> Config:
    """T5-small layers, without its pretraining and Adafactor: Raffel et al. (2020)."""
    return vaswani2017_base().replace(
        model={
            # T5-small has the base Transformer's sizes: 6 + 6 layers, 512, 8 heads of 64, 2048.
            "norm": "t5",  # section 2.1: RMSNorm without a bias
            "norm_epsilon": 1e-6,  # released: layer_norm_epsilon
            # section 2.1: norm before each sub-layer
            "residual": "pre_norm",
            # section 2.1: a bias for each of 32 distance buckets; here one table per layer
            "positions": "t5",
            "attention_bias": False,  # released: no biases anywhere
            "ffn_bias": False,  # released: the same
            # Released: embeddings of unit variance, divided by sqrt(512) at the output; equivalent
            # here.
            "attention_dropout": 0.1,  # released: dropout_rate, everywhere
            "ffn_dropout": 0.1,  # released: the same
        },
    )


def xiong2020() -> Config:
    """Pre-norm without warm-up: Xiong et al. (2020)."""
    return vaswani2017_base().replace(
        model={"residual": "pre_norm"},  # Pre-LN, with a final norm in each stack
        train={
            # figure 2: 1e-3 without warm-up matches post-norm with warm-up
            "learning_rate": 1e-3,
            "schedule": "linear",  # not checked
            "warmup_steps": 0,  # figure 2: none
        },
    )


def nguyen2019() -> Config:
    """ScaleNorm and FixNorm for low-resource translation: Nguyen and Salazar (2019).

    Released: configurations.py and model.py.
    """
    return vaswani2017_base().replace(
        text={"vocab_size": 8000},  # not checked: for about 100,000 pairs
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
            "steps": 100_000,  # released: at most 200 epochs of 1000 steps; here half
            "batch_tokens": 4096,  # released: batch_size
            "learning_rate": 3e-4,  # released: lr
            # released: decays by 0.8 when validation stops improving; here on a schedule
            "schedule": "wsd",
            "warmup_steps": 0,  # released: lr_scheduler is the one without warm-up
            "max_grad_norm": 1.0,  # released: clip_grad
            "average_checkpoints": 1,  # released: none
            "final_checkpoint": "best",  # released: the best on validation data
            "best_metric": "bleu",  # released: eval_metric
        },
    )


def lan2020() -> Config:
    """Cross-layer sharing and factorized embeddings: Lan et al. (2020), "ALBERT"."""
    return vaswani2017_base().replace(
        model={
            # ALBERT's default; sharing attention only costs least (tables 3 to 5)
            "share_layers": "all",
            "embedding_width": 128,  # E = 128 in all of its models
            "activation": "gelu",  # as in BERT; not checked
        },
    )


def fan2020() -> Config:
    """LayerDrop: Fan, Grave and Joulin (2020). Released: fairseq's examples/layerdrop."""
    return vaswani2017_base().replace(
        model={
            "encoder": ("transformer*12",),  # released: layerdrop_wmt_en_de_12_6
            "decoder": ("transformer*6",),  # released: the same
            "layer_drop": 0.2,  # released: LayerDrop 0.2
        },
    )


def zhang2019() -> Config:
    """Depth-scaled initialization, without merged attention: Zhang, Titov and Sennrich (2019)."""
    return vaswani2017_base().replace(
        model={
            # the abstract: +1.1 BLEU on average for 12-layer models
            "encoder": ("transformer*12",),
            "decoder": ("transformer*12",),  # the same
            "initialization": "depth_scaled",  # DS-Init
        },
    )


def shazeer2020() -> Config:
    """Talking-heads attention: Shazeer et al. (2020)."""
    return vaswani2017_base().replace(
        model={"talking_heads": True},  # as many score heads as weight heads
    )


def shazeer2020_glu() -> Config:
    """SwiGLU feed-forward networks: Shazeer (2020), "GLU Variants Improve Transformer"."""
    return vaswani2017_base().replace(
        model={
            "activation": "swiglu",  # equation 5
            # two thirds of 2048, for as many parameters with three matrices
            "ffn_width": 1365,
            "ffn_bias": False,  # equation 5 has none
        },
    )


def ainslie2023() -> Config:
    """Grouped-query attention: Ainslie et al. (2023)."""
    return vaswani2017_base().replace(
        # four query heads per key-value head; the paper has 64 heads in 8 groups
        model={"kv_heads": 2},
    )


def henry2020() -> Config:
    """Query-key normalization on top of `nguyen2019`: Henry et al. (2020), "QKNorm"."""
    return nguyen2019().replace(
        # the abstract: L2 norm of each head, then a learned scale
        model={"qk_norm": "scale"},
    )


def bhojanapalli2020() -> Config:
    """Wider heads: Bhojanapalli et al. (2020), "Low-Rank Bottleneck in Multi-head Attention"."""
    return vaswani2017_base().replace(
        # their tables 1 and 2
        model={"head_width": 128},
    )


def vaswani2017_restricted() -> Config:
    """Sliding-window self-attention, proposed in section 4 of Vaswani et al. (2017)."""
    return vaswani2017_base().replace(
        # table 1: r; the paper gives no value
        model={"window": 32},
    )


def dong2019() -> Config:
    """One stack under a prefix mask, UniLM: Dong et al. (2019), at the size of `small`.

    The paper pre-trains BERT-large with three masks and fine-tunes with this one; all that differs
    from `small` here is the architecture, so that the two can be compared.
    """
    return small().replace(
        model={
            "architecture": "prefix_lm",  # section 2.3, the sequence-to-sequence language model
            "encoder": (),  # figure 1: one Transformer for source and target
            # nine layers without cross-attention have 0.96 of the weights of 4 + 4 with it
            "decoder": ("transformer*9",),
        },
    )

"""Masked language models: BERT, XLNet and ALBERT, in a size for a few megabytes of text.

The papers train on billions of words; these recipes take their objective and the shape of their
layers. Values without a remark are our own.
"""

from __future__ import annotations

from dragoman.config import Config, ModelConfig, TextConfig, TrainConfig
from dragoman.config.language_model import LanguageConfig


def devlin2019() -> Config:
    """Masked language modeling: 15 % of the tokens from all others.

    Devlin et al. (2019), "BERT".
    """
    return Config(
        task="language",
        text=TextConfig(
            vocab_size=8_000,  # 30,000 in the paper, for 3 billion words
            normalization="none",  # cased
        ),
        model=ModelConfig(
            decoder=("transformer*6",),  # 12 in the paper
            width=256,  # 768 in the paper
            heads=4,  # heads of 64, as in the paper
            ffn_width=1024,  # four times the width, as in the paper
            activation="gelu",  # appendix A.2
            residual="pre_norm",  # post-norm in the paper; trains at higher rates
            positions="learned",  # section 3
            tie_embeddings="all",  # released code
            output_bias=True,  # released code
            dropout=0.1,  # appendix A.2
            attention_dropout=0.1,  # released code
        ),
        language=LanguageConfig(
            objective="masked",  # section 3.1, task 1
            mask_rate=0.15,  # section 3.1
            segment=128,  # appendix A.2: for 90 % of the steps
            input_dropout=0.1,  # appendix A.2: on all layers
        ),
        train=TrainConfig(
            steps=20_000,
            batch_tokens=16_384,  # 128 rows; 131,072 in the paper
            optimizer="adamw",  # appendix A.2: Adam with weight decay
            beta2=0.999,  # appendix A.2
            weight_decay=0.01,  # appendix A.2
            learning_rate=1e-3,  # 1e-4 in the paper, for a model three times as wide
            schedule="linear",  # appendix A.2
            warmup_steps=1_000,  # 10,000 of a million in the paper
            max_grad_norm=1.0,  # released code
            label_smoothing=0.0,  # perplexity is the metric
            checkpoint_every=2_000,
            validate_every=2_000,
        ),
    )


def yang2019() -> Config:
    """Permuted language modeling: tokens in a random order, with two-stream attention.

    Yang et al. (2019), "XLNet", without the memory of earlier segments.
    """
    return devlin2019().replace(
        language={
            "objective": "permuted",  # section 2.2
            "mask_rate": 1 / 6,  # section 2.3: partial prediction, K = 6
        },
        # relative in the paper; both streams are one sequence here
        model={"positions": "sinusoidal"},
    )


def lan2020_lm() -> Config:
    """Masked tokens and the order of two segments, with shared layers and small embeddings.

    Lan et al. (2020), "ALBERT".
    """
    return devlin2019().replace(
        language={"sentence_order": True},  # section 3.1
        model={
            "share_layers": "all",  # section 3.1: cross-layer parameter sharing
            "embedding_width": 128,  # section 3.1: factorized embeddings of 128
            "width": 512,  # shared layers may be wider: 768 in the paper
            "heads": 8,  # heads of 64, as in the paper
            "ffn_width": 2048,  # four times the width, as in the paper
            "dropout": 0.0,  # section 4.9: none
            "attention_dropout": 0.0,  # section 4.9: none
        },
    )

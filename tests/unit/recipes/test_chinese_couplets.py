"""The couplets recipe has the sizes that the docs name, and builds."""

from __future__ import annotations

import torch

from dragoman.config import read_config
from dragoman.models.factory import build_model, count_parameters


def test_the_recipe_is_six_and_six_layers_of_width_256() -> None:
    config = read_config(recipe="couplets")
    assert config.problems() == []
    assert (config.model.encoder, config.model.decoder) == (("transformer*6",), ("transformer*6",))
    assert (config.model.width, config.model.dropout) == (256, 0.2)
    assert (config.text.tokenizer, config.text.character_coverage) == ("characters", 1.0)
    assert config.train.label_smoothing == 0.0, "perplexity is compared"
    train, decode = config.train, config.decode
    assert (train.steps, train.batch_tokens, train.learning_rate) == (3000, 8000, 1.5e-3)
    assert (train.schedule, train.warmup_steps, train.ema_decay) == ("linear", 300, 0.998)
    assert (decode.beam, decode.length_penalty) == (4, 0.0), "lines are of one length"
    assert (decode.max_length_ratio, decode.max_length_extra) == (1.0, 10)
    with torch.device("meta"):
        model = build_model(config.model, src_vocab_size=8600, tgt_vocab_size=8600)
    layers = count_parameters(model) - 8600 * 256
    assert 10e6 < layers < 12e6

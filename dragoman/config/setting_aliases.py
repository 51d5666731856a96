"""Old names of settings in files and bundles, and the names of other toolkits.

Settings, block names and block options were renamed before the first release. A configuration file
or a bundle's config.json with an old name is read through these tables; `--set` with an old name is
an error that names the new one.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

RENAMED_SETTINGS = {
    "text.kind": "tokenizer",
    "text.vocabulary": "vocab_size",
    "text.joint": "shared_vocab",
    "text.coverage": "character_coverage",
    "text.normalisation": "normalization",
    "text.dropout": "bpe_dropout",
    "data.cache": "cache_dir",
    "model.feedforward": "ffn_width",
    "model.feedforward_bias": "ffn_bias",
    "model.feedforward_dropout": "ffn_dropout",
    "model.tie": "tie_embeddings",
    "model.initialise": "initialization",
    "train.accumulate": "gradient_accumulation",
    "train.optimiser": "optimizer",
    "train.warmup": "warmup_steps",
    "train.cooldown": "cooldown_fraction",
    "train.clip": "max_grad_norm",
    "train.ema": "ema_decay",
    "train.average": "average_checkpoints",
    "train.choose": "final_checkpoint",
    "train.weights": "param_dtype",
    "train.replay": "cuda_graphs",
    "train.shard": "fsdp",
    "train.keep": "keep_checkpoints",
    "train.best_by": "best_metric",
    "train.budget": "time_budget",
    "decode.max_ratio": "max_length_ratio",
    "decode.max_extra": "max_length_extra",
}
RENAMED_VALUES = {  # by the new name of the setting
    "model.residual": {"post": "post_norm", "pre": "pre_norm", "none": "no_norm"},
    "model.share_layers": {"feedforward": "ffn"},
    "model.initialization": {
        "plain": "xavier",
        "depth": "depth_scaled",
        "residual": "residual_scaled",
    },
}
RENAMED_BLOCKS = {"self": "transformer", "attend": "cross_attention", "feedforward": "ffn"}
RENAMED_OPTIONS = {
    "kernel": "kernel_size",
    "damping": "scale_encoder_grad",
    "query": "decoder",
    "feeding": "input_feeding",
    "initial": "initial_state",
    "skip": "residual_connection",
    "reach": "radius",
    "chunk": "chunk_size",
    "chunks": "ffn_chunks",
    "penalty": "coverage_loss_weight",
    "compiled": "torch_compile",
    "feedforward": "ffn_width",
    "feedforward_dropout": "ffn_dropout",
}
RENAMED_OPTION_VALUES = {  # by the new name of the option
    "decoder": {"before": "bahdanau", "after": "luong", "below": "gnmt"},
    "initial_state": {"backward": "last_backward", "ends": "last_bidirectional"},
    "attention": {"embedded": "convs2s", "reinforced": "reinforce"},
    "alignment": {"reinforced": "reinforce"},
    "residual": RENAMED_VALUES["model.residual"],
}

# Names of settings in other toolkits and in papers.
SETTING_SYNONYMS = {
    "train.learning_rate": "lr max_lr peak_lr base_lr",
    "train.batch_tokens": (
        "batch_size batchsize max_tokens tokens_per_batch batch per_device_train_batch_size"
    ),
    "train.gradient_accumulation": (
        "accum accumulation gradient_accumulation_steps update_freq accum_count grad_accum "
        "accumulate"
    ),
    "train.epochs": "epoch num_epochs max_epoch max_epochs num_train_epochs",
    "train.steps": "max_steps max_update max_updates updates num_steps iterations",
    "train.warmup_steps": "warmup_updates warm_up num_warmup_steps warmup",
    "train.schedule": "scheduler lr_scheduler lr_scheduler_type decay_method",
    "train.optimizer": "optim optimiser",
    "train.max_grad_norm": (
        "clip_norm grad_clip gradient_clip gradient_clipping clip_grad_norm clip"
    ),
    "train.label_smoothing": "smoothing label_smoothing_factor",
    "train.precision": "dtype fp16 bf16 amp mixed_precision",
    "train.checkpoint_every": (
        "save_every save_steps save_interval save_interval_updates save_checkpoint_steps "
        "checkpoint_interval"
    ),
    "train.validate_every": (
        "eval_every eval_steps valid_steps validate_interval validate_interval_updates "
        "validation_interval valid_freq"
    ),
    "train.patience": "early_stopping early_stopping_patience",
    "train.threads": "num_threads workers num_workers",
    "train.average_checkpoints": "checkpoint_averaging",
    "model.width": (
        "d_model hidden_size dim model_dim embed_dim hidden hidden_dim rnn_size model_size "
        "word_vec_size emb_dim embedding_size encoder_embed_dim decoder_embed_dim"
    ),
    "model.encoder or model.decoder": (
        "num_layers layers n_layers depth encoder_layers decoder_layers enc_layers dec_layers"
    ),
    "model.heads": (
        "num_heads nhead n_heads attention_heads num_attention_heads encoder_attention_heads "
        "decoder_attention_heads"
    ),
    "model.ffn_width": (
        "ffn ffn_dim ff_dim d_ff dim_feedforward ff_size transformer_ff intermediate_size "
        "ffn_embed_dim encoder_ffn_embed_dim decoder_ffn_embed_dim feedforward ffn_size"
    ),
    "model.residual": "norm_first encoder_normalize_before decoder_normalize_before",
    "model.activation": "activation_fn activation_function nonlinearity",
    "model.attention_dropout": "attn_dropout attention_probs_dropout_prob",
    "model.dropout": "dropout_rate hidden_dropout hidden_dropout_prob p_dropout",
    "model.tie_embeddings": (
        "tie_weights tie_word_embeddings share_embeddings share_all_embeddings "
        "share_decoder_input_output_embed tie"
    ),
    "model.positions": (
        "position_encoding positional_encoding pos_emb position_embedding_type encoder_learned_pos"
    ),
    "text.vocab_size": "vocab vocabulary_size num_merges bpe_merges bpe_size vocabulary",
    "text.tokenizer": "tokenization model_type subword",
    "text.shared_vocab": "joint_vocab joined_dictionary share_vocab joint",
    "data.max_length": (
        "max_len max_seq_len max_sentence_length max_position_embeddings src_seq_length "
        "max_src_len max_source_positions max_target_positions"
    ),
    "data.src": "source train_src src_path",
    "data.tgt": "target trg train_tgt tgt_path",
    "decode.beam": "beam_size num_beams beams beam_width",
    "decode.length_penalty": "lenpen alpha",
    "train.init_from": "pretrained finetune_from init_checkpoint pretrained_model",
    "train.ema_decay": "ema",
    "train.keep_checkpoints": (
        "keep keep_last save_total_limit keep_last_epochs keep_interval_updates"
    ),
    "train.time_budget": "budget max_time",
    "train.fsdp": "shard zero",
    "train.cuda_graphs": "replay",
}
# What other toolkits call an option of a command that is no setting.
OPTION_SYNONYMS = {
    "--recipe": "arch architecture model_name",
    "--out": "save_dir output_dir output",
    "--output": "out out_file",
    "--src-lang": "source_lang source_language",
    "--tgt-lang": "target_lang target_language",
    "--config": "config_file config_yaml",
    "--model": "path checkpoint checkpoint_path model_dir",
    "--sample": "sampling",
    "--top-k": "sampling_topk topk",
    "--top-p": "sampling_topp topp",
    "--precision": "fp16 bf16 dtype half",
}
OPTION_BY_SYNONYM = {
    other: option for option, others in OPTION_SYNONYMS.items() for other in others.split()
}
SETTING_BY_SYNONYM = {
    other: path for path, others in SETTING_SYNONYMS.items() for other in others.split()
}

_MAX_ENTRY_CHARS = 1000  # longer entries are rejected by the parser of block lists
# `name=value` of an option, or a block's name; a list that YAML split at commas has both apart.
_NAME = re.compile(r"([A-Za-z_]\w*+)(?:(\s*+=\s*+)([^\s,()]*+))?")


def rename_old_settings(values: Mapping[str, Any], problems: list[str]) -> dict[str, Any]:
    """Return sections of settings with old names, values and block texts replaced by the new ones.

    A setting that is given by its old and its new name goes into `problems`.
    """
    return {
        section: _rename_section(section, found, problems) if isinstance(found, Mapping) else found
        for section, found in values.items()
    }


def _rename_section(section: str, values: Mapping[str, Any], problems: list[str]) -> dict[str, Any]:
    """Return one section with old names and values replaced."""
    renamed: dict[str, Any] = {}
    for name, value in values.items():
        new = RENAMED_SETTINGS.get(f"{section}.{name}", name)
        if new in values and new != name:
            problems.append(
                f"{section}.{new} must be given once; found it and its old name {section}.{name}; "
                "remove the old one"
            )
            continue
        if isinstance(value, str):
            value = RENAMED_VALUES.get(f"{section}.{new}", {}).get(value, value)
        if section == "model" and new in ("encoder", "decoder"):
            value = _rename_blocks(value)
        renamed[new] = value
    return renamed


def _rename_blocks(value: Any) -> Any:
    """Return a list of block texts with old names replaced; anything else is returned as it is."""
    if isinstance(value, str):
        return rename_block(value)
    if isinstance(value, list | tuple):
        return [rename_block(each) if isinstance(each, str) else each for each in value]
    return value


def rename_block(text: str) -> str:
    """Return a block text such as `self(window=4)*2` with old block and option names replaced."""
    return _NAME.sub(_rename_match, text) if len(text) <= _MAX_ENTRY_CHARS else text


def _rename_match(match: re.Match[str]) -> str:
    """Return one option or block name in its new form."""
    name, equals, value = match.groups()
    if equals is None:
        return RENAMED_BLOCKS.get(name, name)
    new = RENAMED_OPTIONS.get(name, name)
    return f"{new}{equals}{RENAMED_OPTION_VALUES.get(new, {}).get(value, value)}"

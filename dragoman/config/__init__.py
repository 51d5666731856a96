"""Typed configuration: frozen dataclasses, read from recipes, YAML and overrides, and validated."""

from dragoman.config.config import Config, DataConfig, DecodeConfig, TextConfig
from dragoman.config.loader import (
    apply_overrides,
    config_digest,
    from_dict,
    overridden_settings,
    read_config,
    read_yaml,
    require_config,
    to_dict,
)
from dragoman.config.model import ModelConfig
from dragoman.config.setting import Setting, list_settings, setting
from dragoman.config.train import TrainConfig

__all__ = [
    "Config",
    "DataConfig",
    "DecodeConfig",
    "ModelConfig",
    "Setting",
    "TextConfig",
    "TrainConfig",
    "apply_overrides",
    "config_digest",
    "from_dict",
    "list_settings",
    "overridden_settings",
    "read_config",
    "read_yaml",
    "require_config",
    "setting",
    "to_dict",
]

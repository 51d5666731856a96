"""The typed configuration: one tree of frozen dataclasses, read, checked, overridden, written and explained."""

from dragoman.config.model import ModelConfig
from dragoman.config.reading import apply_overrides, asked_paths, config_digest, from_dict, read_config, read_yaml, require_config, to_dict
from dragoman.config.setting import Setting, setting, settings_of
from dragoman.config.train import TrainConfig
from dragoman.config.tree import Config, DataConfig, DecodeConfig, TextConfig

__all__ = [
    "Config",
    "DataConfig",
    "DecodeConfig",
    "ModelConfig",
    "Setting",
    "TextConfig",
    "TrainConfig",
    "apply_overrides",
    "asked_paths",
    "config_digest",
    "from_dict",
    "read_config",
    "read_yaml",
    "require_config",
    "setting",
    "settings_of",
    "to_dict",
]

"""Typed configuration: frozen dataclasses, read from recipes, YAML and overrides, and validated."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
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
    from dragoman.config.root_config import Config, DataConfig, DecodeConfig, TextConfig
    from dragoman.config.setting_declaration import Setting, list_settings, setting
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

_MODULES = {
    **dict.fromkeys(("Config", "DataConfig", "DecodeConfig", "TextConfig"), "root_config"),
    "ModelConfig": "model",
    "TrainConfig": "train",
    **dict.fromkeys(("Setting", "list_settings", "setting"), "setting_declaration"),
}


def __getattr__(name: str) -> Any:
    """Import a name on first use: the commands' help needs no YAML parser."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_MODULES.get(name, 'loader')}"), name)
    globals()[name] = value
    return value

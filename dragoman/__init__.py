"""Neural machine translation on PyTorch: train, translate, explain and export models.

from dragoman import Translator
translator = Translator.load("my-model")
print(translator.translate(["Guten Morgen."]))
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from dragoman._version import __version__
from dragoman.errors import DragomanError

if TYPE_CHECKING:
    from dragoman.attention.attention_weight_hooks import edit, record
    from dragoman.config import Config, read_config
    from dragoman.explain import Explanation
    from dragoman.explore.notebook_display import explore
    from dragoman.inference import (
        Classifier,
        LanguageModel,
        MaskedLanguageModel,
        PairClassifier,
        SetModel,
        Tagger,
        Translation,
        Translator,
        load,
    )
    from dragoman.runs.training_run import train

__all__ = [
    "Classifier",
    "Config",
    "DragomanError",
    "Explanation",
    "LanguageModel",
    "MaskedLanguageModel",
    "PairClassifier",
    "SetModel",
    "Tagger",
    "Translation",
    "Translator",
    "__version__",
    "edit",
    "explore",
    "load",
    "read_config",
    "record",
    "train",
]

# Module of each public name. They are imported on first use, so that `import dragoman` and
# `dragoman --help` do not import torch.
_HOMES = {
    "Classifier": "dragoman.inference",
    "Config": "dragoman.config",
    "Explanation": "dragoman.explain",
    "LanguageModel": "dragoman.inference",
    "MaskedLanguageModel": "dragoman.inference",
    "PairClassifier": "dragoman.inference",
    "SetModel": "dragoman.inference",
    "Tagger": "dragoman.inference",
    "Translation": "dragoman.inference",
    "Translator": "dragoman.inference",
    "edit": "dragoman.attention.attention_weight_hooks",
    "explore": "dragoman.explore",
    "load": "dragoman.inference",
    "read_config": "dragoman.config",
    "record": "dragoman.attention.attention_weight_hooks",
    "train": "dragoman.runs.training_run",
}


def __getattr__(name: str) -> Any:
    """Import a public name on its first use."""
    if name not in _HOMES:
        raise AttributeError(
            f"module 'dragoman' has no attribute {name!r}; it has {', '.join(__all__)}"
        )
    home = importlib.import_module(_HOMES[name])
    value = home if name == "explore" else getattr(home, name)  # a package that can be called
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """Return the public names, imported or not."""
    return sorted({*__all__, *(name for name in globals() if name.startswith("__"))})

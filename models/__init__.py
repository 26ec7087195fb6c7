"""Language models whose mixers are softmax attention, linear attention or Mamba, all readable in the same
way.

Names are imported on first use: `import models` alone loads neither torch nor transformer_lens.
"""

import importlib

_HOME = {
    "LanguageModel": "models.language_model",
    "LanguageModelConfig": "models.config",
    "MLPConfig": "models.config",
    "RopeConfig": "models.config",
    "SoftmaxAttentionConfig": "models.config",
    "LinearAttentionConfig": "models.config",
    "Mamba1Config": "models.config",
    "Mamba2Config": "models.config",
    "Form": "models.form",
    "ConfigError": "models.errors",
    "CheckpointError": "models.errors",
    "load_model": "models.checkpoint",
    "save_model": "models.checkpoint",
    "list_checkpoints": "models.checkpoint",
}

__all__ = list(_HOME)

# Whether models have TransformerLens's hook points, where it is installed.
LENS = True


def without_lens() -> None:
    """Give the models of this process plain hook points, as where transformer_lens is not installed.

    Importing transformer_lens takes longer than importing torch. For commands that hook nothing by its means,
    before they import the first model; later it changes nothing.
    """
    global LENS
    LENS = False


def __getattr__(name: str):
    if name not in _HOME:
        raise AttributeError(f"module 'models' has no attribute {name!r}; it has {', '.join(_HOME)}")
    return getattr(importlib.import_module(_HOME[name]), name)


def __dir__():
    return sorted([*globals(), *_HOME])

"""Hugging Face folders, hub names and GGUF files to and from our own LanguageModel.

    model = from_pretrained("EleutherAI/pythia-70m", revision="step1000")      # or a folder, or a .gguf file
    to_pretrained("folder", model)

Read: gpt2, gpt_neox, llama, mamba, mamba2, from safetensors (sharded too) and GGUF. Norm gains stay in their
norms, nothing is centred, and parameters are the stored numbers; `model.source` records what the files say.
"""

import importlib

_HOME = {
    "from_pretrained": "models.pretrained.hub",
    "to_pretrained": "models.pretrained.export",
    "is_pretrained": "models.pretrained.hub",
    "open_pretrained": "models.pretrained.load",
    "load_opened": "models.pretrained.load",
    "PretrainedSource": "models.pretrained.load",
    "ARCHITECTURES": "models.pretrained.load",
    "UnsupportedArchitecture": "models.pretrained.keys",
    "open_series": "models.pretrained.series",
    "Series": "models.pretrained.series",
}

__all__ = list(_HOME)


def __getattr__(name: str):
    if name not in _HOME:
        raise AttributeError(
            f"module 'models.pretrained' has no attribute {name!r}; it has {', '.join(_HOME)}"
        )
    return getattr(importlib.import_module(_HOME[name]), name)


def __dir__():
    return sorted([*globals(), *_HOME])

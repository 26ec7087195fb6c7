"""Read the circuits of a language model: one set of instruments for softmax, linear attention and Mamba.

Names are imported on first use, so that a command's `--help` does not wait for torch.
"""

import importlib
from typing import Any

_EXPORTS = {
    "DetectionReport": "interp.records",
    "CheckpointScores": "interp.records",
    "HeadScore": "interp.records",
    "AttentionMap": "interp.records",
    "RepeatedTokens": "interp.sequences",
    "repeated_tokens": "interp.sequences",
    "Subject": "interp.subject",
    "documents": "interp.corpus",
    "split_by_document": "interp.corpus",
    "DetectionError": "interp.errors",
    "UnknownHook": "models.errors",
    "HookNotFired": "models.errors",
}
# `detect` is not here: `interp.detect` is a module, and its function is `interp.detect.detect`.

__all__ = sorted(_EXPORTS)


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"interp has no {name!r}; it has: {', '.join(__all__)}")
    return getattr(importlib.import_module(_EXPORTS[name]), name)


def __dir__() -> list[str]:
    return __all__

"""Read the circuits of a language model: one set of instruments for softmax, linear attention and Mamba.

Names are imported on first use, so that a command's `--help` does not wait for torch.
"""

import importlib
from typing import Any

_EXPORTS = {
    "detect": "interp.detect",
    "DetectionReport": "interp.records",
    "CheckpointScores": "interp.records",
    "HeadScore": "interp.records",
    "AttentionMap": "interp.records",
    "RepeatedTokens": "interp.sequences",
    "repeated_tokens": "interp.sequences",
    "open_subject": "interp.subject",
    "DetectionError": "interp.errors",
    "UnknownHook": "models.errors",
    "HookNotFired": "models.errors",
}
# Functions whose module bears the same name stay reachable as interp.<module>.<function>:
# prefix_matching, previous_token, copying, in_context_learning.

__all__ = sorted(_EXPORTS)


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"interp has no {name!r}; it has: {', '.join(__all__)}")
    return getattr(importlib.import_module(_EXPORTS[name]), name)


def __dir__() -> list[str]:
    return __all__

"""Read the circuits of a language model: one set of instruments for softmax, linear attention and Mamba.

Names are imported on first use, so that a command's `--help` does not wait for torch.
"""

import importlib
from typing import Any

_EXPORTS = {
    "detect": "interp.detection",
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
    "InterventionError": "interp.errors",
    "Site": "interp.sites",
    "head_sites": "interp.sites",
    "record": "interp.patching",
    "patched": "interp.patching",
    "activation_patching": "interp.patching",
    "swapped_state": "interp.patching",
    "Sender": "interp.path_patching",
    "Receiver": "interp.path_patching",
    "patch_paths": "interp.path_patching",
    "path_patching_scores": "interp.path_patching",
    "attribution_patching": "interp.attribution",
    "direct_logit_attribution": "interp.attribution",
    "logit_lens": "interp.attribution",
    "zero_ablated": "interp.ablation",
    "mean_ablated": "interp.ablation",
    "resample_ablated": "interp.ablation",
    "patterns_held": "interp.ablation",
    "idealised_pattern": "interp.ablation",
    "previous_token_pattern": "interp.ideal_patterns",
    "induction_pattern": "interp.ideal_patterns",
    "unit_weights": "interp.circuits",
    "ov_circuit": "interp.circuits",
    "qk_circuit": "interp.circuits",
    "eigenvalue_score": "interp.circuits",
    "tap_alignment": "interp.circuits",
    "value_alignment": "interp.circuits",
    "composition_scores": "interp.composition",
    "offset_profile": "interp.offset_cuts",
    "OffsetProfile": "interp.offset_cuts",
    "probe_matches": "interp.offset_edges",
    "window_matches": "interp.offset_edges",
    "next_token_losses": "interp.subject",
    "still_figures": "interp.display.still_figures",
    "Steering": "interp.steering",
    "steer": "interp.steering",
    "steering_effect": "interp.steering",
    "UnknownHook": "models.errors",
    "HookNotFired": "models.errors",
}

__all__ = sorted(_EXPORTS)


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"interp has no {name!r}; it has: {', '.join(__all__)}")
    return getattr(importlib.import_module(_EXPORTS[name]), name)


def __dir__() -> list[str]:
    return __all__

"""Block sizes per operator, width, dtype and GPU architecture: fixed, so that a user's first step tunes
nothing.

`experiments/benchmarks/tune.py` measures the alternatives; an architecture without an entry uses "sm_80",
said once.
"""

import functools
import warnings
from dataclasses import dataclass

import torch


@dataclass(frozen=True, kw_only=True)
class Config:
    """Rows and columns of a tile, warps of a program, pipeline stages, most registers of a thread."""

    block_m: int
    block_n: int
    warps: int
    stages: int
    registers: int | None = None


def _c(block_m: int, block_n: int, warps: int, stages: int, registers: int | None = None) -> Config:
    return Config(block_m=block_m, block_n=block_n, warps=warps, stages=stages, registers=registers)


# (part, widest head up to, bytes of a number) -> Config. Looked up with the smallest width that holds the
# head.
_SM_80 = {
    ("attention_fwd", 32, 2): _c(128, 64, 4, 3),
    ("attention_fwd", 64, 2): _c(128, 64, 4, 3),
    ("attention_fwd", 128, 2): _c(128, 32, 8, 2),
    ("attention_fwd", 256, 2): _c(64, 32, 8, 2),
    ("attention_bwd_key", 32, 2): _c(64, 64, 4, 2),
    ("attention_bwd_key", 64, 2): _c(32, 64, 4, 2),
    ("attention_bwd_key", 128, 2): _c(32, 64, 8, 2),
    ("attention_bwd_key", 256, 2): _c(16, 32, 8, 1),
    ("attention_bwd_query", 32, 2): _c(64, 64, 4, 2),
    ("attention_bwd_query", 64, 2): _c(64, 32, 4, 2),
    ("attention_bwd_query", 128, 2): _c(64, 32, 8, 2),
    ("attention_bwd_query", 256, 2): _c(32, 32, 8, 1),
    ("attention_match", 64, 2): _c(64, 64, 4, 3),
    ("attention_match", 128, 2): _c(64, 64, 4, 2),
    ("attention_match", 256, 2): _c(64, 32, 4, 2),
    ("attention_match", 64, 4): _c(32, 32, 8, 1),
    ("attention_match", 128, 4): _c(16, 32, 8, 1),
    ("attention_match", 256, 4): _c(16, 16, 8, 1),
    # Rows of linear_state are those of linear_output, which sets the chunks.
    ("linear_state", 64, 2): _c(64, 64, 4, 3),
    ("linear_state", 128, 2): _c(64, 64, 4, 2),
    ("linear_state", 256, 2): _c(64, 32, 4, 2),
    ("linear_state", 64, 4): _c(64, 64, 4, 1),
    ("linear_state", 128, 4): _c(32, 64, 8, 1),
    ("linear_state", 256, 4): _c(32, 32, 8, 1),
    ("linear_output", 64, 2): _c(64, 64, 4, 3),
    ("linear_output", 128, 2): _c(32, 64, 8, 2),
    # 64 rows here made matrix products read shared memory out of bounds (sm_90, Triton 3.6).
    ("linear_output", 256, 2): _c(32, 32, 8, 1),
    ("linear_output", 64, 4): _c(32, 32, 8, 1),
    ("linear_output", 128, 4): _c(16, 32, 8, 1),
    ("linear_output", 256, 4): _c(16, 16, 8, 1),
    # Rows of linear_gradient (with decays), linear_gradient_plain and linear_gradient_normalised are those of
    # linear_output.
    ("linear_gradient", 32, 2): _c(64, 32, 4, 3),
    ("linear_gradient", 64, 2): _c(64, 32, 4, 2),
    ("linear_gradient", 128, 2): _c(32, 64, 8, 2),
    ("linear_gradient", 256, 2): _c(32, 32, 8, 1),
    ("linear_gradient", 64, 4): _c(32, 16, 8, 1),
    ("linear_gradient", 128, 4): _c(16, 32, 8, 1),
    ("linear_gradient", 256, 4): _c(16, 16, 8, 1),
    ("linear_gradient_plain", 32, 2): _c(64, 32, 4, 2),
    ("linear_gradient_plain", 64, 2): _c(64, 64, 4, 2),
    ("linear_gradient_plain", 128, 2): _c(32, 64, 8, 2),
    ("linear_gradient_plain", 256, 2): _c(32, 32, 8, 1),
    ("linear_gradient_plain", 64, 4): _c(32, 16, 8, 1),
    ("linear_gradient_plain", 128, 4): _c(16, 32, 8, 1),
    ("linear_gradient_plain", 256, 4): _c(16, 16, 8, 1),
    ("attention_fwd", 32, 4): _c(64, 32, 4, 1),
    ("attention_fwd", 64, 4): _c(64, 32, 8, 1),
    ("attention_fwd", 128, 4): _c(16, 32, 8, 1),
    ("attention_fwd", 256, 4): _c(16, 16, 4, 1),
    ("attention_bwd_key", 32, 4): _c(16, 32, 4, 1),
    ("attention_bwd_key", 64, 4): _c(32, 32, 8, 1),
    ("attention_bwd_key", 128, 4): _c(32, 16, 8, 1),
    ("attention_bwd_key", 256, 4): _c(16, 16, 8, 1),
    ("attention_bwd_query", 32, 4): _c(64, 32, 4, 1),
    ("attention_bwd_query", 64, 4): _c(32, 32, 8, 1),
    ("attention_bwd_query", 128, 4): _c(16, 32, 8, 1),
    ("attention_bwd_query", 256, 4): _c(16, 16, 8, 1),
}
_SM_90 = _SM_80 | {
    # At most 80 registers: six programs.
    ("attention_fwd", 32, 2): _c(64, 64, 4, 2, 80),
    ("attention_fwd", 64, 2): _c(64, 64, 4, 3),
    ("attention_fwd", 128, 2): _c(128, 64, 8, 3),
    # At most 128 or 168 registers: four or three programs to a multiprocessor.
    ("attention_bwd_key", 32, 2): _c(64, 64, 4, 3, 128),
    ("attention_bwd_key", 64, 2): _c(64, 64, 4, 3, 168),
    ("attention_match", 64, 2): _c(64, 128, 4, 2),
    ("attention_bwd_query", 32, 2): _c(64, 64, 4, 3),
    # At most 128 registers: two programs to a multiprocessor.
    ("attention_bwd_query", 64, 2): _c(128, 64, 8, 3, 128),
    ("attention_bwd_query", 128, 2): _c(64, 64, 4, 2),
    ("linear_output", 128, 2): _c(64, 64, 4, 2),
    ("linear_gradient", 64, 2): _c(64, 64, 4, 2),
    ("linear_gradient", 128, 2): _c(64, 64, 4, 2),
    ("linear_gradient_plain", 32, 2): _c(64, 32, 4, 3, 168),
    ("linear_gradient_plain", 64, 2): _c(64, 64, 4, 3),
    ("linear_gradient_plain", 128, 2): _c(64, 64, 4, 2),
}
# Accumulators are not in registers there: no need of caps.
_SM_100 = _SM_90 | {
    ("attention_fwd", 32, 2): _c(64, 64, 4, 3),
    ("attention_bwd_key", 32, 2): _c(64, 64, 4, 3),
    ("attention_bwd_key", 64, 2): _c(64, 64, 4, 2),
    ("linear_gradient", 64, 2): _c(64, 32, 4, 2),
    ("linear_gradient_plain", 32, 2): _c(64, 32, 4, 2),
    ("linear_gradient_plain", 64, 2): _c(64, 64, 4, 2),
}
TABLES: dict[str, dict[tuple[str, int, int], Config]] = {"sm_80": _SM_80, "sm_90": _SM_90, "sm_100": _SM_100}
for _table in TABLES.values():
    # Normalised rows take the configurations of decayed ones.
    _table |= {
        ("linear_gradient_normalised", width, size): found
        for (part, width, size), found in _table.items()
        if part == "linear_gradient"
    }
TABLES["sm_90"]["linear_gradient_normalised", 64, 2] = _c(64, 64, 4, 3)
# Set by tune.py and by tests to try another configuration: (part, width, bytes) -> Config.
overrides: dict[tuple[str, int, int], Config] = {}


@functools.cache
def architecture(device: torch.device) -> str:
    """The table that a device uses: its own, the one of its family, or "sm_80"."""
    if device.type != "cuda":
        return "sm_90"
    major, minor = torch.cuda.get_device_capability(device)
    if f"sm_{major}{minor}" in TABLES:
        return f"sm_{major}{minor}"
    warnings.warn(f"no kernel configurations for sm_{major}{minor}; those of sm_80 are used", stacklevel=2)
    return "sm_80"


@functools.cache
def _look_up(part: str, width: int, size: int, table: str) -> Config:
    widths = sorted(w for p, w, s in TABLES[table] if p == part and s == size and w >= width)
    return TABLES[table][part, widths[0], size]


def config(part: str, width: int, dtype: torch.dtype, device: torch.device) -> Config:
    """The configuration of a part for a padded width and a dtype on a device."""
    if overrides and (found := overrides.get((part, width, dtype.itemsize))) is not None:
        return found
    return _look_up(part, width, dtype.itemsize, architecture(device))

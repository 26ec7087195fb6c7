"""Cases of operators that join what lies between projections; the jobs are in `kernels/jobs.py`."""

import torch
from torch import Tensor

from experiments.benchmarks.kernels.cases import _name
from experiments.benchmarks.kernels.checks import DEVICE, Check, Tensors, compare
from kernels.rms_norm import add_rms_norm
from kernels.ssd_block import ssd_block


def check_block(seq: int, dtype: torch.dtype, d_state: int = 64, **kind: bool) -> list[Check]:
    """Mamba-2 between its projections: heads of 64, one group or (plain) one a head, rows with gaps.
    Extreme: a step keeps e^-20 to e^-1 of a state, on average e^-4."""
    batch, heads, d_head = (1, 1, 64) if seq > 10_000 else (2, 4, 64)
    groups = heads if kind.get("plain") else 1
    inner = heads * d_head
    channels = inner + 2 * groups * d_state
    width = inner + channels + heads
    packed = torch.randn(batch, seq, width + 24, device=DEVICE, dtype=dtype)[..., :width]
    inputs = {
        "packed": packed,
        "conv_weight": torch.randn(channels, 4, device=DEVICE) * 0.5,
        "conv_bias": None if kind.get("plain") else torch.randn(channels, device=DEVICE) * 0.1,
        "dt_bias": torch.randn(heads, device=DEVICE) + (1.0 if kind.get("extreme") else -3.0),
        "A_log": torch.randn(heads, device=DEVICE) + (1.0 if kind.get("extreme") else 0.0),
        "D": torch.randn(heads, device=DEVICE),
        "gain": 1 + 0.3 * torch.randn(inner, device=DEVICE),
    }

    def run(x: Tensors, backend: str) -> dict[str, Tensor]:
        y, state, conv = ssd_block(**x, n_groups=groups, eps=1e-5, backend=backend)
        return {"o": y, "last": state, "last_conv": conv}

    def reference(x: Tensors, cotangents: dict[str, Tensor]) -> dict[str, Tensor]:
        return _pulled(run(x, "torch"), x, cotangents)

    case = f"block T={seq} n={d_state} {_name(dtype)} {'+'.join(n for n, on in kind.items() if on)}"
    # Sums over all steps of what cancels; the gradient of a log decay is itself a difference of sums of
    # products, whose rounding strong decays multiply (1e-4 to 2e-4 of the gradient here, in float32).
    gain = 25.0 if kind.get("extreme") and dtype == torch.float32 else 4.0
    loose = {"ddt_bias": gain, "dA_log": gain}
    return compare(case, lambda x: run(x, "triton"), reference, inputs, dtype, loose)


def check_norm(rows: int, dtype: torch.dtype, width: int = 256) -> list[Check]:
    """A float32 stream, what is added to it in another dtype, and the norm of the sum."""
    inputs = {
        "x": torch.randn(rows, width, device=DEVICE),
        "delta": torch.randn(rows, width + 8, device=DEVICE, dtype=dtype)[:, :width],
        "w": 1 + 0.3 * torch.randn(width, device=DEVICE),
    }

    def run(x: Tensors, backend: str) -> dict[str, Tensor]:
        total, y = add_rms_norm(**x, eps=1e-5, dtype=None if backend == "torch" else dtype, backend=backend)
        return {"total": total, "o": y}

    def reference(x: Tensors, cotangents: dict[str, Tensor]) -> dict[str, Tensor]:
        return _pulled(run(x, "torch"), x, cotangents)

    case = f"norm rows={rows} d={width} {_name(dtype)}"
    return compare(case, lambda x: run(x, "triton"), reference, inputs, dtype)


def _pulled(outputs: dict[str, Tensor], x: Tensors, cotangents: dict[str, Tensor]) -> dict[str, Tensor]:
    sum((outputs[n] * c).sum() for n, c in cotangents.items()).backward()
    return outputs | {f"d{n}": t.grad for n, t in x.items() if t is not None}

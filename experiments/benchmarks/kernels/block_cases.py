"""Cases of operators that join what lies between projections; the jobs are in `kernels/jobs.py`."""

import torch
from torch import Tensor

from experiments.benchmarks.kernels.cases import _name
from experiments.benchmarks.kernels.checks import (
    BOUNDS,
    DEVICE,
    Check,
    Tensors,
    compare,
    error,
    leaves,
    pulled_back,
)
from kernels.causal_conv import causal_conv
from kernels.rms_norm import add_rms_norm, rms_norm
from kernels.ssd import ssd
from kernels.ssd_block import ssd_block
from kernels.step_size import step_size


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
    # What is rounded between the operators passes through the next one: the block's own yardstick is these
    # operators one after the other, with the same cotangents.
    torch.manual_seed(1)
    cotangents: dict[str, Tensor] = {}
    found = pulled_back(lambda x: _one_by_one(x, groups), inputs, cotangents)
    expected = reference(leaves(inputs, torch.float64), {n: c.double() for n, c in cotangents.items()})
    # Sums of what cancels, added up in another order, scatter by as much as they are.
    gain = {"ddt_bias": 2.0, "dA_log": 2.0}
    loose = {n: gain.get(n, 1.1) * error(x, expected[n]) / BOUNDS[dtype] for n, x in found.items()}
    loose = {n: max(1.0, share) for n, share in loose.items()}
    torch.manual_seed(1)
    return compare(case, lambda x: run(x, "triton"), reference, inputs, dtype, loose)


def _one_by_one(x: Tensors, groups: int) -> dict[str, Tensor]:
    """What the block computes, by the single operators."""
    inner, channels, heads = x["gain"].shape[0], x["conv_weight"].shape[0], x["dt_bias"].shape[0]
    shared = (channels - inner) // 2
    z, convolved, steps = x["packed"].split((inner, channels, heads), -1)
    on = {"backend": "triton"}
    convolved, conv = causal_conv(convolved, x["conv_weight"], x["conv_bias"], silu=True, **on)
    values, b, c = convolved.split((inner, shared, shared), -1)
    b, c = (part.unflatten(-1, (groups, -1)) for part in (b, c))
    dt = step_size(steps, x["dt_bias"], **on)
    y, state = ssd(values.unflatten(-1, (heads, -1)), dt, x["A_log"], b, c, D=x["D"], **on)
    y = rms_norm(y.flatten(2), x["gain"], eps=1e-5, gate=z, **on)
    return {"o": y, "last": state, "last_conv": conv}


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

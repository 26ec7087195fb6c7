"""Every output and gradient of the Triton kernels against float64 references on the same GPU.

References are the readable forms, run in float64 over blocks of rows (softmax) or chunk by chunk from the
state that the
chunk before left (everything recurrent), so that any length fits.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels import softmax_attention as softmax

# RMS error relative to the RMS of the reference.
BOUNDS = {torch.float32: 2e-5, torch.bfloat16: 1.2e-2, torch.float16: 2e-3}
Tensors = dict[str, Tensor | None]
# Without a GPU, for Triton's interpreter.
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@dataclass(frozen=True, kw_only=True)
class Check:
    """One comparison: relative RMS error of one tensor of one case."""

    case: str
    tensor: str
    error: float
    bound: float

    @property
    def passed(self) -> bool:
        return self.error <= self.bound


@contextmanager
def poisoned() -> Iterator[None]:
    """torch.empty gives NaN inside, so that an element that no kernel writes shows."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def leaves(tensors: Tensors, dtype: torch.dtype | None = None) -> Tensors:
    """Detached copies that ask for a gradient, in another dtype if one is given."""
    return {n: None if x is None else x.detach().to(dtype or x.dtype).requires_grad_() for n,
        x in tensors.items()}


def error(x: Tensor, reference: Tensor) -> float:
    """||x - reference|| / ||reference||; NaN counts as infinite."""
    if reference.numel() == 0:
        return 0.0 if x.shape == reference.shape else float("inf")
    # A gradient that is zero in exact arithmetic (one key) is measured against 0.1 an element.
    gap = (x.double() - reference).norm() / reference.norm().clamp_min(0.1 * reference.numel() ** 0.5)
    return float("inf") if not torch.isfinite(gap) else gap.item()


def compare(
    case: str,
    operator: Callable[[Tensors], dict[str, Tensor]],
    reference: Callable[[Tensors, dict[str, Tensor]], dict[str, Tensor]],
    inputs: Tensors,
    dtype: torch.dtype,
    loose: dict[str, float] | None = None,
) -> list[Check]:
    """Run both, pull the same random cotangents back (non-contiguous ones), give one Check per output and
    gradient, and one that a second run gives the same bits.

    Args:
        operator: Inputs to named outputs.
        reference: float64 inputs and cotangents to outputs and gradients ("d" + name).
        loose: Factors on the bound of some tensors.
    """
    cotangents: dict[str, Tensor] = {}
    with poisoned():
        found = pulled_back(operator, inputs, cotangents)
        again = pulled_back(operator, inputs, cotangents)
    expected = reference(leaves(inputs, torch.float64), {n: c.double() for n, c in cotangents.items()})
    bound = BOUNDS[dtype]
    checks = [
        Check(case=case, tensor=n, error=error(x, expected[n]), bound=bound * (loose or {}).get(n, 1.0))
        for n, x in found.items()
    ]
    differ = [n for n, x in found.items() if not torch.equal(x, again[n])]
    return [*checks, Check(case=case, tensor=f"repeated {differ}", error=float(len(differ)), bound=0.0)]


def pulled_back(
    operator: Callable[[Tensors], dict[str, Tensor]], inputs: Tensors, cotangents: dict[str, Tensor]
) -> dict[str, Tensor]:
    """Outputs and gradients; cotangents that are not there yet are drawn, not contiguous."""
    mine = leaves(inputs)
    outputs = operator(mine)
    for name, out in outputs.items():
        if name not in cotangents:
            random = torch.randn(*out.shape[:-1], 2 * out.shape[-1], device=out.device)[..., ::2]
            cotangents[name] = random.to(out.dtype)
    present = {n: x for n, x in mine.items() if x is not None}
    pulled = [cotangents[n] for n in outputs]
    gradients = torch.autograd.grad(list(outputs.values()), list(present.values()), pulled)
    return outputs | {f"d{name}": g for name, g in zip(present, gradients, strict=True)}


def softmax_reference(options: dict, block: int = 512) -> Callable:
    """Rows of the readable form in blocks, each pulled back on its own."""

    def run(x: Tensors, cotangents: dict[str, Tensor]) -> dict[str, Tensor]:
        q, k, v, sink = x["q"], x["k"], x["v"], x.get("sink")
        shift = k.shape[1] - q.shape[1]
        pieces = []
        for start in range(0, q.shape[1], block):
            stop = min(start + block, q.shape[1])
            low = max(0, start + shift - options["window"] + 1) if options.get("window") else 0
            keys, values = k[:, low : stop + shift], v[:, low : stop + shift]
            o = softmax.parallel(q[:, start:stop], keys, values, sink=sink, **options)
            (o * cotangents["o"][:, start:stop]).sum().backward()
            pieces.append(o.detach())
        return {"o": torch.cat(pieces, 1)} | {f"d{n}": t.grad for n, t in x.items() if t is not None}

    return run


def chunked_reference(step: Callable, states: tuple[str, ...], per_step: tuple[str, ...],
    block: int = 256) -> Callable:
    """Chunk by chunk: `step(inputs of the chunk, state) -> (o, state)`; autograd spans the whole sequence."""

    def run(x: Tensors, cotangents: dict[str, Tensor]) -> dict[str, Tensor]:
        state = tuple(x.get(n) for n in states)
        pieces = []
        seq = x[per_step[0]].shape[1]
        for start in range(0, seq, block):
            cut = {n: t[:, start : start + block] if n in per_step and t is not None else t for n,
                t in x.items()}
            o, state = step(cut, state)
            pieces.append(o)
        outputs = {"o": torch.cat(pieces, 1)} | {f"last_{n}": t for n, t in zip(states, state, strict=True)}
        sum((outputs[n] * c).sum() for n, c in cotangents.items()).backward()
        return outputs | {f"d{n}": t.grad for n, t in x.items() if t is not None}

    return run

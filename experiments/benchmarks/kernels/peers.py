"""The peers of `kernels/contests.py`: what can be imported on the machine, each with its natural layout.

A peer that cannot be imported is a printed line and no entrant.
"""

import contextlib
import functools
import importlib
import importlib.metadata
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType

import torch
from torch import Tensor

PACKAGES = {"fla": "flash-linear-attention", "mamba_ssm": "mamba-ssm", "causal_conv1d": "causal-conv1d"}


@dataclass(frozen=True, kw_only=True)
class Layout:
    """How an entrant wants its inputs: made beforehand, not timed.

    Args:
        own: Our inputs to its inputs.
        back: Its inputs to ours again, differentiable, for the comparison with the reference.
        output: Its output to ours.
    """

    own: Callable[[list[Tensor]], list[Tensor]] = list
    back: Callable[[list[Tensor]], list[Tensor]] = list
    output: Callable[[Tensor], Tensor] = lambda o: o


@dataclass(frozen=True, kw_only=True)
class Entrant:
    """One implementation: its own inputs to its own output; `context` stands around all its calls."""

    run: Callable[..., Tensor]
    layout: Layout = Layout()
    context: Callable[[], contextlib.AbstractContextManager] = contextlib.nullcontext

    def __call__(self, *inputs: Tensor) -> Tensor:
        return self.run(*inputs)


def _swapped(x: Tensor) -> Tensor:
    return x.transpose(1, 2).contiguous()


def _scan_own(inputs: list[Tensor]) -> list[Tensor]:
    u, dt, a_log, b, c, d, z = inputs
    return [_swapped(u), _swapped(dt), -torch.exp(a_log), _swapped(b), _swapped(c), d, _swapped(z)]


def _scan_back(inputs: list[Tensor]) -> list[Tensor]:
    u, dt, a, b, c, d, z = inputs
    u, dt, b, c, z = (x.transpose(1, 2) for x in (u, dt, b, c, z))
    return [u, dt, torch.log(-a), b, c, d, z]


# [batch head seq d] in memory.
HEADS_FIRST = Layout(
    own=lambda inputs: [_swapped(x) for x in inputs],
    back=lambda inputs: [x.transpose(1, 2) for x in inputs],
    output=lambda o: o.transpose(1, 2),
)
# [batch channel seq] with the channels next to each other in memory.
CHANNEL_LAST = Layout(
    own=lambda inputs: [inputs[0].transpose(1, 2), *inputs[1:]],
    back=lambda inputs: [inputs[0].transpose(1, 2), *inputs[1:]],
    output=lambda o: o.transpose(1, 2),
)
# [batch channel seq] in memory, A itself.
SCAN = Layout(own=_scan_own, back=_scan_back, output=lambda o: o.transpose(1, 2))


@functools.cache
def imported(name: str) -> ModuleType | None:
    """The module, or None and a printed line, once."""
    try:
        return importlib.import_module(name)
    except Exception as problem:
        print(f"not here: {name} ({type(problem).__name__}: {str(problem)[:120]})", flush=True)
        return None


def versions() -> str:
    """Name and version of each peer's package that is here."""
    found = []
    for module, package in PACKAGES.items():
        try:
            version = getattr(importlib.import_module(module), "__version__", None)
            found.append(f"{package} {version or importlib.metadata.version(package)}")
        except Exception as problem:
            found.append(f"no {package} ({type(problem).__name__})")
    return ", ".join(found)


def softmax_peers(seq: int, window: int | None, device: str) -> dict[str, Entrant]:
    """SDPA's backends, FlexAttention and fla; the first two have no window."""
    found = {}
    if window is None:
        found["cuDNN (SDPA)"] = _sdpa("CUDNN_ATTENTION")
        found["FA2 (SDPA)"] = _sdpa("FLASH_ATTENTION")
    try:
        found["FlexAttention"] = Entrant(run=_flex(seq, window, device), layout=HEADS_FIRST)
    except Exception as problem:
        print(f"FlexAttention: {type(problem).__name__}: {str(problem)[:120]}", flush=True)
    if fla := imported("fla.ops.attn"):
        found["fla"] = Entrant(run=functools.partial(fla.parallel_attn, window_size=window))
    return found


def _sdpa(backend: str) -> Entrant:
    from torch.nn.attention import SDPBackend, sdpa_kernel

    run = functools.partial(torch.nn.functional.scaled_dot_product_attention, is_causal=True)
    context = functools.partial(sdpa_kernel, getattr(SDPBackend, backend))
    return Entrant(run=run, layout=HEADS_FIRST, context=context)


def _flex(seq: int, window: int | None, device: str) -> Callable[..., Tensor]:
    from torch.nn.attention.flex_attention import flex_attention

    # Every contest compiles anew; without this the later ones pass the limit and run uncompiled.
    torch._dynamo.reset()
    compiled = torch.compile(flex_attention, dynamic=False)
    # Made in the first call: at 32k tokens it takes gigabytes.
    mask = functools.cache(functools.partial(causal_mask, seq, window, device))

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return compiled(q, k, v, block_mask=mask())

    return run


def causal_mask(seq: int, window: int | None, device: str) -> object:
    """FlexAttention's block mask."""
    from torch.nn.attention.flex_attention import create_block_mask

    def sees(batch: Tensor, head: Tensor, dest: Tensor, src: Tensor) -> Tensor:
        return dest >= src if window is None else (dest >= src) & (dest - src < window)

    return create_block_mask(sees, None, None, seq, seq, device=device)


def linear_peers() -> dict[str, Entrant]:
    """fla's chunks, not normalised."""
    return _fla_linear(normalize=False)


def normalised_peers() -> dict[str, Entrant]:
    """fla's chunks, divided by the sum of weights."""
    return _fla_linear(normalize=True)


def _fla_linear(normalize: bool) -> dict[str, Entrant]:
    if not (fla := imported("fla.ops.linear_attn")):
        return {}
    run = functools.partial(_first, fla.chunk_linear_attn, scale=1.0, normalize=normalize)
    return {"fla": Entrant(run=run)}


def decay_peers() -> dict[str, Entrant]:
    """fla's simple gated linear attention."""
    if not (fla := imported("fla.ops.simple_gla")):
        return {}

    def run(q: Tensor, k: Tensor, v: Tensor, g: Tensor) -> Tensor:
        return fla.chunk_simple_gla(q, k, v, g=g, scale=1.0)[0]

    return {"fla, refusal lifted" if _refusal_lifted() else "fla": Entrant(run=run)}


@functools.cache
def _refusal_lifted() -> bool:
    """fla refuses gated backward passes on Hopper with Triton 3.4 to 3.7.0, which miscompile some of them.

    They are timed all the same; the error in the same row says whether the result was right.
    """
    chunks = importlib.import_module("fla.ops.common.chunk_o")
    refuses = not getattr(chunks, "TRITON_ABOVE_3_7_1", True) and getattr(chunks, "IS_NVIDIA_HOPPER", False)
    if refuses:
        chunks.TRITON_ABOVE_3_7_1 = True
    return refuses


def ssd_peers() -> dict[str, Entrant]:
    """mamba_ssm with its default chunk."""
    if not (module := imported("mamba_ssm.ops.triton.ssd_combined")):
        return {}

    def run(x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor) -> Tensor:
        return module.mamba_chunk_scan_combined(x, dt, a, b, c, chunk_size=256, D=d)

    return {"mamba_ssm": Entrant(run=run)}


def scan_peers() -> dict[str, Entrant]:
    """mamba_ssm's compiled scan."""
    if not (module := imported("mamba_ssm.ops.selective_scan_interface")):
        return {}
    return {"mamba_ssm": Entrant(run=module.selective_scan_fn, layout=SCAN)}


def conv_peers() -> dict[str, Entrant]:
    """causal-conv1d in its channel-last layout."""
    if not (module := imported("causal_conv1d")):
        return {}
    run = functools.partial(module.causal_conv1d_fn, activation="silu")
    return {"causal-conv1d": Entrant(run=run, layout=CHANNEL_LAST)}


def _first(function: Callable, *args: Tensor, **options: object) -> Tensor:
    return function(*args, **options)[0]

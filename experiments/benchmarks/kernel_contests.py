"""What is timed: shapes, ours, and the peers that can be imported on the machine."""

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

HEADS = {"S1": (8, 8, 2048, 64), "S2": (1, 8, 32768, 64), "S3": (64, 4, 512, 32)}
CHANNELS = {"M1": (8, 2048, 1024, 16), "M2": (1, 32768, 1024, 16), "M3": (64, 512, 256, 16)}


@dataclass(frozen=True, kw_only=True)
class Contest:
    """One operator at one shape: the same inputs for every entrant."""

    operator: str
    shape: str
    entrants: dict[str, Callable[..., Tensor]]
    inputs: list[Tensor]


def contests(operators: tuple[str, ...], peers: bool) -> Iterator[Contest]:
    """Every contest of the named operators, inputs made as they are needed."""
    torch.manual_seed(0)
    for operator in operators:
        if operator in MAKERS:
            yield from MAKERS[operator](peers)


def _half(*shape: int) -> Tensor:
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)


def _sdpa(backend: str) -> Callable[..., Tensor]:
    from torch.nn.attention import SDPBackend, sdpa_kernel

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with sdpa_kernel(getattr(SDPBackend, backend)):
            o = torch.nn.functional.scaled_dot_product_attention(
                q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True
            )
        return o.transpose(1, 2)

    return run


def _softmax(peers: bool) -> Iterator[Contest]:
    from kernels.triton.softmax_attention import softmax_attention

    def ours(q: Tensor, k: Tensor, v: Tensor, window: int | None = None) -> Tensor:
        return softmax_attention(q, k, v, window=window)[0]

    for name, (batch, heads, seq, d) in HEADS.items():
        inputs = [_half(batch, seq, heads, d) for _ in range(3)]
        entrants = {"ours": ours}
        if peers:
            entrants |= {"cuDNN (SDPA)": _sdpa("CUDNN_ATTENTION"), "FA2 (SDPA)": _sdpa("FLASH_ATTENTION")}
        yield Contest(operator="softmax", shape=name, entrants=entrants, inputs=inputs)
        if name == "S1":
            entrants = {"ours": functools.partial(ours, window=256)}
            if peers and (fla := _fla("attn")):
                entrants["fla"] = lambda q, k, v: fla.parallel_attn(q, k, v, window_size=256)
            yield Contest(operator="softmax, window 256", shape=name, entrants=entrants, inputs=inputs)


def _fla(module: str) -> object | None:
    import importlib

    try:
        return importlib.import_module(f"fla.ops.{module}")
    except ImportError:
        return None


def _linear(peers: bool) -> Iterator[Contest]:
    from kernels.triton.gated_linear_attention import gated_linear_attention

    def plain(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return gated_linear_attention(q, k, v)[0]

    def normalised(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return gated_linear_attention(q, k, v, normalise=True, eps=1e-6)[0]

    def decayed(q: Tensor, k: Tensor, v: Tensor, g: Tensor) -> Tensor:
        return gated_linear_attention(q, k, v, log_decay=g)[0]

    def ssd(x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor) -> Tensor:
        return gated_linear_attention(c, b, x, log_decay=dt * a, k_weight=dt, skip=d)[0]

    for name, (batch, heads, seq, d) in HEADS.items():
        q, k, v = (_half(batch, seq, heads, d) for _ in range(3))
        g = -torch.rand(batch, seq, heads, device="cuda") * 0.1
        dt = torch.rand(batch, seq, heads, device="cuda") * 0.1
        rates, skip = -torch.rand(heads, device="cuda") - 0.5, torch.ones(heads, device="cuda")
        b, c = (_half(batch, seq, 1, 64) for _ in range(2))
        linear, simple, ssm = ({} for _ in range(3))
        if peers:
            if fla := _fla("linear_attn"):
                linear["fla"] = functools.partial(_first, fla.chunk_linear_attn, scale=1.0, normalize=False)
            if fla := _fla("simple_gla"):
                simple["fla"] = functools.partial(_first, fla.chunk_simple_gla, scale=1.0)
            if peer := _mamba_ssd():
                ssm["mamba_ssm"] = lambda x, dt, a, b, c, d, peer=peer: peer(x, dt, a, b, c, chunk_size=256,
                    D=d)
        yield Contest(operator="linear", shape=name, entrants={"ours": plain} | linear, inputs=[q, k, v])
        yield Contest(
            operator="linear, normalised", shape=name, inputs=[q.abs(), k.abs(), v],
            entrants={"ours": normalised, "ours unnormalised": plain},
        )  # fmt: skip
        yield Contest(operator="scalar decay", shape=name, entrants={"ours": decayed} | simple, inputs=[q, k,
            v, g])
        yield Contest(operator="SSD", shape=name, entrants={"ours": ssd} | ssm, inputs=[v, dt, rates, b, c,
            skip])


def _first(function: Callable, *args: Tensor, **options: object) -> Tensor:
    return function(*args, **options)[0]


def _mamba_ssd() -> Callable | None:
    try:
        from mamba_ssm.ops.triton.ssd_combined import mamba_chunk_scan_combined
    except ImportError:
        return None
    return mamba_chunk_scan_combined


def _scan(peers: bool) -> Iterator[Contest]:
    from kernels.triton.selective_scan import selective_scan

    def ours(u: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor, z: Tensor) -> Tensor:
        return selective_scan(u, dt, a, b, c, D=d, z=z)[0]

    for name, (batch, seq, channels, d_state) in CHANNELS.items():
        u, z = _half(batch, seq, channels), _half(batch, seq, channels)
        dt = torch.nn.functional.softplus(_half(batch, seq, channels) - 3)
        a = torch.arange(1, d_state + 1, device="cuda").float().log().repeat(channels, 1)
        b, c = _half(batch, seq, d_state), _half(batch, seq, d_state)
        inputs = [u, dt, a, b, c, torch.ones(channels, device="cuda"), z]
        yield Contest(operator="scan", shape=name, entrants={"ours": ours}, inputs=inputs)


def _conv(peers: bool) -> Iterator[Contest]:
    from kernels.triton.causal_conv import causal_conv

    def ours(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return causal_conv(x, weight, bias, silu=True)[0]

    for name, (batch, seq, channels, _) in CHANNELS.items():
        entrants = {"ours": ours}
        if peers and (peer := _causal_conv1d()):
            entrants["causal-conv1d"] = lambda x, w, b, peer=peer: peer(
                x.transpose(1, 2), w, b, activation="silu"
            ).transpose(1, 2)
        inputs = [_half(batch, seq, channels), _half(channels, 4), _half(channels)]
        yield Contest(operator="conv", shape=name, entrants=entrants, inputs=inputs)


def _causal_conv1d() -> Callable | None:
    try:
        from causal_conv1d import causal_conv1d_fn
    except ImportError:
        return None
    return causal_conv1d_fn


MAKERS = {"softmax": _softmax, "linear": _linear, "scan": _scan, "conv": _conv}

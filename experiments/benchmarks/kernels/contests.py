"""What is timed: shapes, ours, the peers that can be imported, and the work and reference of each."""

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from experiments.benchmarks.kernels import floors
from experiments.benchmarks.kernels import peers as kernel_peers
from experiments.benchmarks.kernels.peers import Entrant

# (batch, head, seq, d_head) and (batch, seq, channel, d_state).
HEADS = {"S1": (8, 8, 2048, 64), "S2": (1, 8, 32768, 64), "S3": (64, 4, 512, 32)}
CHANNELS = {"M1": (8, 2048, 1024, 16), "M2": (1, 32768, 1024, 16), "M3": (64, 512, 256, 16)}
SHAPES = HEADS | CHANNELS
# Where errors are compared: small enough for float64 patterns, widths as in S1 and M1, for which the peers
# are tuned already.
SMALL = {"S": (1, 8, 512, 64), "M": (1, 512, 1024, 16)}
# States of a head of SSD: those of the spec's table, and Mamba-2's own default.
D_STATES = (64, 128)


@dataclass(frozen=True, kw_only=True)
class Contest:
    """One operator at one shape.

    Args:
        inputs: In our layout; those of another entrant are `entrants[who].layout.own(inputs)`.
        reference: Our inputs to the output, from the readable form.
        work: Of the forward pass, and of forward and backward.
    """

    operator: str
    shape: str
    entrants: dict[str, Entrant]
    names: tuple[str, ...]
    inputs: list[Tensor]
    reference: Callable[..., Tensor]
    work: tuple[floors.Work, floors.Work]


def contests(
    operators: tuple[str, ...],
    peers: bool,
    shapes: dict[str, tuple[int, ...]] = SHAPES,
    device: str = "cuda",
) -> Iterator[Contest]:
    """Every contest of the named operators, inputs made as they are needed."""
    torch.manual_seed(0)
    for operator in operators:
        for initial, maker in MAKERS.get(operator, ()):
            for name, shape in shapes.items():
                if name.startswith(initial):
                    yield from maker(name, shape, peers, device)


def _half(device: str, *shape: int) -> Tensor:
    return torch.randn(*shape, device=device, dtype=torch.bfloat16)


def _softmax(name: str, shape: tuple[int, ...], peers: bool, device: str) -> Iterator[Contest]:
    from kernels import softmax_attention as readable
    from kernels.triton.softmax_attention import softmax_attention

    batch, heads, seq, d = shape
    inputs = [_half(device, batch, seq, heads, d) for _ in range(3)]
    for window in (None, 256) if name in ("S1", "S") else (None,):
        ours = Entrant(run=lambda q, k, v, window=window: softmax_attention(q, k, v, window=window)[0])
        others = kernel_peers.softmax_peers(seq, window, device) if peers else {}
        yield Contest(
            operator="softmax" if window is None else f"softmax, window {window}", shape=name,
            entrants={"ours": ours} | others, names=("q", "k", "v"), inputs=inputs,
            reference=functools.partial(readable.parallel, window=window),
            work=floors.softmax_work(batch, heads, seq, d, window),
        )  # fmt: skip


def _linear(name: str, shape: tuple[int, ...], peers: bool, device: str) -> Iterator[Contest]:
    from kernels import gated_linear_attention as readable
    from kernels.triton.gated_linear_attention import gated_linear_attention

    def plain(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return gated_linear_attention(q, k, v)[0]

    def normalised(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return gated_linear_attention(q, k, v, normalise=True, eps=1e-6)[0]

    def decayed(q: Tensor, k: Tensor, v: Tensor, g: Tensor) -> Tensor:
        return gated_linear_attention(q, k, v, log_decay=g)[0]

    batch, heads, seq, d = shape
    q, k, v = (_half(device, batch, seq, heads, d) for _ in range(3))
    g = -torch.rand(batch, seq, heads, device=device) * 0.1
    yield Contest(
        operator="linear", shape=name, names=("q", "k", "v"), inputs=[q, k, v],
        entrants={"ours": Entrant(run=plain)} | (kernel_peers.linear_peers() if peers else {}),
        reference=lambda q, k, v: readable.parallel(q, k, v)[0],
        work=floors.linear_work(batch, heads, seq, d),
    )  # fmt: skip
    yield Contest(
        operator="linear, normalised", shape=name, names=("q", "k", "v"), inputs=[q.abs(), k.abs(), v],
        entrants={"ours": Entrant(run=normalised), "ours unnormalised": Entrant(run=plain)}
        | (kernel_peers.normalised_peers() if peers else {}),
        reference=lambda q, k, v: readable.parallel(q, k, v, normalise=True, eps=1e-6)[0],
        work=floors.linear_work(batch, heads, seq, d),
    )  # fmt: skip
    yield Contest(
        operator="scalar decay", shape=name, names=("q", "k", "v", "g"), inputs=[q, k, v, g],
        entrants={"ours": Entrant(run=decayed)} | (kernel_peers.decay_peers() if peers else {}),
        reference=lambda q, k, v, g: readable.parallel(q, k, v, log_decay=g)[0],
        work=floors.linear_work(batch, heads, seq, d, decay=True),
    )  # fmt: skip


def _ssd(name: str, shape: tuple[int, ...], peers: bool, device: str) -> Iterator[Contest]:
    from kernels import gated_linear_attention as readable
    from kernels.triton.gated_linear_attention import gated_linear_attention

    def ours(x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor) -> Tensor:
        return gated_linear_attention(c, b, x, log_decay=dt * a, k_weight=dt, skip=d)[0]

    def reference(x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor) -> Tensor:
        return readable.parallel(c, b, x, log_decay=dt * a, k_weight=dt)[0] + d[:, None] * x

    batch, heads, seq, d = shape
    x, dt = _half(device, batch, seq, heads, d), torch.rand(batch, seq, heads, device=device) * 0.1
    rates, skip = -torch.rand(heads, device=device) - 0.5, torch.ones(heads, device=device)
    for d_state in D_STATES:
        b, c = (_half(device, batch, seq, 1, d_state) for _ in range(2))
        yield Contest(
            operator="SSD" if d_state == D_STATES[0] else f"SSD, {d_state} states", shape=name,
            names=("x", "dt", "a", "b", "c", "d"), inputs=[x, dt, rates, b, c, skip],
            entrants={"ours": Entrant(run=ours)} | (kernel_peers.ssd_peers() if peers else {}),
            reference=reference, work=floors.ssd_work(batch, heads, seq, d, d_state),
        )  # fmt: skip


def _scan(name: str, shape: tuple[int, ...], peers: bool, device: str) -> Iterator[Contest]:
    from kernels import selective_scan as readable
    from kernels.triton.selective_scan import selective_scan

    def ours(u: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor, z: Tensor) -> Tensor:
        return selective_scan(u, dt, a, b, c, D=d, z=z)[0]

    def reference(u: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor, z: Tensor) -> Tensor:
        return readable.chunked(u, dt, a, b, c, D=d, z=z)[0]

    batch, seq, channels, d_state = shape
    u, z = _half(device, batch, seq, channels), _half(device, batch, seq, channels)
    dt = torch.nn.functional.softplus(_half(device, batch, seq, channels) - 3)
    a = torch.arange(1, d_state + 1, device=device).float().log().repeat(channels, 1)
    b, c = _half(device, batch, seq, d_state), _half(device, batch, seq, d_state)
    yield Contest(
        operator="scan", shape=name, names=("u", "dt", "a", "b", "c", "d", "z"),
        inputs=[u, dt, a, b, c, torch.ones(channels, device=device), z],
        entrants={"ours": Entrant(run=ours)} | (kernel_peers.scan_peers() if peers else {}),
        reference=reference, work=floors.scan_work(batch, seq, channels, d_state),
    )  # fmt: skip


def _conv(name: str, shape: tuple[int, ...], peers: bool, device: str) -> Iterator[Contest]:
    from kernels import causal_conv as readable
    from kernels.triton.causal_conv import causal_conv

    def ours(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return causal_conv(x, weight, bias, silu=True)[0]

    batch, seq, channels, _ = shape
    yield Contest(
        operator="conv", shape=name, names=("x", "weight", "bias"),
        inputs=[_half(device, batch, seq, channels), _half(device, channels, 4), _half(device, channels)],
        entrants={"ours": Entrant(run=ours)} | (kernel_peers.conv_peers() if peers else {}),
        reference=lambda x, weight, bias: readable.chunked(x, weight, bias, silu=True)[0],
        work=floors.conv_work(batch, seq, channels),
    )  # fmt: skip


# With the initial of the shapes they take.
MAKERS = {
    "softmax": (("S", _softmax),),
    "linear": (("S", _linear), ("S", _ssd)),
    "scan": (("M", _scan),),
    "conv": (("M", _conv),),
}

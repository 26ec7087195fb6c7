"""What an operator cannot go below on a GPU: its bytes, products and exponentials, against measured ceilings.

Forward + backward; a tensor is batch x seq x head x width (or channel) elements of 2 bytes, a pair a query
and a key that it sees:

| operator | bytes | flops of products | exponentials |
|---|---|---|---|
| softmax | 4 + 8 tensors: q k v o; q k v o do dq dk dv | 2 d a pair, 2 + 5 times | a pair, 1 + 1 |
| linear, normalised | 4 + 7 tensors: q k v o; q k v do dq dk dv | 2 d² a token, 2 + 5 times | none |
| scalar decay | the same, and decays (float32), 1 + 2 | the same | none |
| SSD | 2 + 3 tensors: x y; x dy dx. B C: 2 + 4. dt (float32): 1 + 2 | 2 d d_state a token, 2 + 5 | none |
| scan | 4 + 7 tensors: u dt z y; u dt z dy du ddt dz. B C: 2 + 4 | none | d_state a step, 1 + 1 |
| conv | 2 + 3 tensors: x y; x dy dx | none | none |

Inputs are read once, states stay in registers, and what the backward pass can recompute is not stored.
Products are those of the recurrences (state, output; state again, its gradient, dq, dk, dv), the least
there are. Weights and row statistics are left out: they are small.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from experiments.benchmarks.kernels.timing import device_time

HALF, SINGLE = 2, 4


@dataclass(frozen=True, kw_only=True)
class Work:
    """Bytes of memory traffic, flops of matrix products, exponentials."""

    bytes: float = 0.0
    flops: float = 0.0
    exps: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Ceilings:
    """Measured on this GPU: bytes, bfloat16 matmul flops and float32 exp2, each per second."""

    copy: float
    matmul: float
    exp2: float

    def floor(self, work: Work) -> float:
        """Least microseconds: the largest of the three."""
        return 1e6 * max(work.bytes / self.copy, work.flops / self.matmul, work.exps / self.exp2)

    def __str__(self) -> str:
        return (
            f"copy {self.copy / 1e9:,.0f} GB/s, bfloat16 matmul {self.matmul / 1e12:.0f} TFLOP/s (8192³), "
            f"exp2 {self.exp2 / 1e12:.2f}e12/s"
        )


def softmax_work(batch: int, heads: int, seq: int, d: int, window: int | None = None) -> tuple[Work, Work]:
    """(forward, forward and backward) of causal attention."""
    seen = seq if window is None else min(window, seq)
    pairs = batch * heads * (seq * seen - seen * (seen - 1) / 2)
    tensor = HALF * batch * heads * seq * d
    return (
        Work(bytes=4 * tensor, flops=2 * 2 * d * pairs, exps=pairs),
        Work(bytes=12 * tensor, flops=7 * 2 * d * pairs, exps=2 * pairs),
    )


def linear_work(batch: int, heads: int, seq: int, d: int, decay: bool = False) -> tuple[Work, Work]:
    """(forward, forward and backward) of linear attention, normalised or not, with a scalar decay or not."""
    tokens = batch * heads * seq
    tensor, decays, state = HALF * tokens * d, SINGLE * tokens * decay, 2 * d * d * tokens
    return (
        Work(bytes=4 * tensor + decays, flops=2 * state),
        Work(bytes=11 * tensor + 3 * decays, flops=7 * state),
    )


def ssd_work(batch: int, heads: int, seq: int, d: int, d_state: int) -> tuple[Work, Work]:
    """(forward, forward and backward) of Mamba-2's operator with one group."""
    tokens = batch * heads * seq
    tensor, shared, steps = HALF * tokens * d, HALF * batch * seq * d_state, SINGLE * tokens
    state = 2 * d * d_state * tokens
    return (
        Work(bytes=2 * tensor + 2 * shared + steps, flops=2 * state),
        Work(bytes=5 * tensor + 6 * shared + 3 * steps, flops=7 * state),
    )


def scan_work(batch: int, seq: int, channels: int, d_state: int) -> tuple[Work, Work]:
    """(forward, forward and backward) of Mamba-1's scan with D and gate."""
    tensor, shared = HALF * batch * seq * channels, HALF * batch * seq * d_state
    decays = batch * seq * channels * d_state
    return (
        Work(bytes=4 * tensor + 2 * shared, exps=decays),
        Work(bytes=11 * tensor + 6 * shared, exps=2 * decays),
    )


def conv_work(batch: int, seq: int, channels: int) -> tuple[Work, Work]:
    """(forward, forward and backward) of the short convolution."""
    tensor = HALF * batch * seq * channels
    return Work(bytes=2 * tensor), Work(bytes=5 * tensor)


@triton.jit
def _exp2_kernel(x_ptr, repeats, BLOCK: tl.constexpr):
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    b_x = tl.load(x_ptr + offs)
    for _ in range(repeats):
        b_x = tl.exp2(-b_x)
    tl.store(x_ptr + offs, b_x)


def measured_ceilings() -> Ceilings:
    """Copy of 2 GiB, product of two random 8192 x 8192 matrices, exp2 in registers."""
    # By a kernel: a graph replays `copy_` as a copy of memory, at two thirds of the rate.
    source = torch.randn(2**29, device="cuda")
    target = torch.empty_like(source)
    copy = 2 * 4 * source.numel() / device_time(lambda: torch.neg(source, out=target))[0]
    del source, target
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    product = torch.empty_like(a)
    matmul = 2 * 8192**3 / device_time(lambda: torch.mm(a, b, out=product))[0]
    programs = 16 * torch.cuda.get_device_properties("cuda").multi_processor_count
    x = torch.rand(programs * 1024, device="cuda")
    exps = 1000 * x.numel() / device_time(lambda: _exp2_kernel[(programs,)](x, 1000, BLOCK=1024))[0]
    return Ceilings(copy=copy * 1e6, matmul=matmul * 1e6, exp2=exps * 1e6)

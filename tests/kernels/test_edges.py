"""Edge operators against the dense pattern: weights, contributions, cuts, gradients, memory."""

import pytest
import torch
from mixer_cases import random_softmax
from torch.utils._python_dispatch import TorchDispatchMode

from kernels import KernelError, causal_conv, edges, selective_scan, softmax_attention
from kernels import gated_linear_attention as linear
from kernels.edge_set import Edges, Placed

SEQ = 33


def some_edges(n: int = 80, batch: int = 2, seq: int = SEQ) -> Edges:
    """Random existing edges, each once, and all of the last row of sequence 0."""
    g = torch.Generator().manual_seed(0)
    lower = torch.tril_indices(seq, seq)[:, torch.randperm(seq * (seq + 1) // 2, generator=g)[:n]]
    lower = lower[:, lower[0] < seq - 1]
    row = torch.stack([torch.full((seq,), seq - 1), torch.arange(seq)])
    index = torch.arange(lower.shape[1]) % batch
    dest, src = torch.cat([lower, row], dim=1)
    return Edges(batch=torch.cat([index, torch.zeros(seq, dtype=torch.int64)]), dest=dest, src=src)


def dense_mask(e: Edges, batch: int = 2, seq: int = SEQ) -> torch.Tensor:
    mask = torch.zeros(batch, 1, seq, seq, dtype=torch.float64)
    mask[e.batch, 0, e.dest, e.src] = 1
    return mask


def at_edges(A: torch.Tensor, e: Edges) -> torch.Tensor:
    return A[e.batch, :, e.dest, e.src]


def close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("options", [{}, {"window": 6}, {"sink": True}, {"scale": 0.3}], ids=str)
def test_softmax_edges(options):
    x = {n: t.requires_grad_() for n, t in random_softmax(SEQ, sink="sink" in options).items()}
    options = options | ({"sink": x["sink"]} if "sink" in x else {})
    e = some_edges()
    A = softmax_attention.pattern(x["q"], x["k"], **options)
    v = x["v"].repeat_interleave(2, dim=2)
    result = edges.softmax_edges(x["q"], x["k"], x["v"], e, **options)
    close(result.weights, at_edges(A, e))
    close(result.normaliser, softmax_attention.logsumexp(x["q"], x["k"], **options).transpose(1, 2))
    close(result.contribution, torch.einsum("bhij,bjhv->bihv", A * dense_mask(e), v))
    close(result.cut, torch.einsum("bhij,bjhv->bihv", A * (1 - dense_mask(e)), v))
    weights = torch.linspace(-1, 1, result.weights.numel()).double().view_as(result.weights)
    found = torch.autograd.grad((result.weights * weights).sum(), [x["q"], x["k"]], retain_graph=True)
    expected = torch.autograd.grad((at_edges(A, e) * weights).sum(), [x["q"], x["k"]])
    for mine, reference in zip(found, expected, strict=True):
        close(mine, reference)


@torch.no_grad()
def test_softmax_cut_and_renormalise_is_a_mask_on_the_logits():
    x, e = random_softmax(SEQ, sink=True), some_edges()
    result = edges.softmax_edges(x["q"], x["k"], x["v"], e, sink=x["sink"], renormalise=True)
    scores = torch.einsum("bihd,bjhd->bhij", x["q"], x["k"].repeat_interleave(2, dim=2)) * 5**-0.5
    hidden = (dense_mask(e) > 0) | (torch.ones(SEQ, SEQ) > 0).triu(1)
    scores = torch.cat(
        [scores.masked_fill(hidden, -torch.inf), x["sink"].view(1, 4, 1, 1).expand(2, 4, SEQ, 1)], -1
    )
    expected = torch.einsum(
        "bhij,bjhv->bihv", scores.softmax(-1)[..., :-1], x["v"].repeat_interleave(2, dim=2)
    )
    close(result.cut, expected)
    # Without a sink the row that lost everything is 0 and not NaN.
    lost = edges.softmax_edges(x["q"], x["k"], x["v"], e, renormalise=True).cut[0, -1]
    assert torch.equal(lost, torch.zeros_like(lost))


def linear_inputs(decay: str | None, weighted: bool) -> tuple[dict, dict]:
    g = torch.Generator().manual_seed(0)
    shapes = {"head": (6,), "step": (2, SEQ, 6), "channel": (2, SEQ, 6, 4)}
    x = {"q": torch.rand(2, SEQ, 2, 4, generator=g), "k": torch.rand(2, SEQ, 2, 4, generator=g)}
    x |= {"v": torch.randn(2, SEQ, 6, 3, generator=g)}
    gates = {} if decay is None else {"log_decay": -torch.rand(shapes[decay], generator=g)}
    gates |= {"k_weight": torch.rand(2, SEQ, 6, generator=g)} if weighted else {}
    return tuple({n: t.double().requires_grad_() for n, t in part.items()} for part in (x, gates))


@pytest.mark.parametrize("decay", [None, "head", "step", "channel"])
@pytest.mark.parametrize(("normalise", "weighted"), [(False, False), (True, False), (True, True)])
def test_linear_edges(decay, normalise, weighted):
    (x, gates), e = linear_inputs(decay, weighted), some_edges()
    options = {"scale": 0.7, "normalise": normalise, "eps": 0.01} | gates
    A = linear.pattern(x["q"], x["k"], **options)
    if decay is None and not weighted:
        A = A.repeat_interleave(3, dim=1)
    result = edges.linear_edges(x["q"], x["k"], x["v"], e, **options)
    close(result.weights, at_edges(A, e))
    assert (result.normaliser is None) == (not normalise)
    close(result.contribution, torch.einsum("bhij,bjhv->bihv", A * dense_mask(e), x["v"]))
    close(result.cut, torch.einsum("bhij,bjhv->bihv", A * (1 - dense_mask(e)), x["v"]))
    inputs = [x["q"], x["k"], *gates.values()]
    weights = torch.linspace(-1, 1, result.weights.numel()).double().view_as(result.weights)
    found = torch.autograd.grad((result.weights * weights).sum(), inputs)
    expected = torch.autograd.grad((at_edges(A, e) * weights).sum(), inputs)
    for mine, reference in zip(found, expected, strict=True):
        close(mine, reference)


@torch.no_grad()
def test_linear_cut_and_renormalise():
    (x, gates), e = linear_inputs("step", False), some_edges()
    raw = linear.pattern(x["q"], x["k"], **gates) * (1 - dense_mask(e))
    result = edges.linear_edges(x["q"], x["k"], x["v"], e, normalise=True, renormalise=True, **gates)
    rows = raw.sum(-1, keepdim=True)
    expected = torch.where(rows > 0, raw / torch.where(rows > 0, rows, 1), 0)
    close(result.cut, torch.einsum("bhij,bjhv->bihv", expected, x["v"]))
    with pytest.raises(KernelError, match="renormalise=True needs normalise=True"):
        edges.linear_edges(x["q"], x["k"], x["v"], e, renormalise=True)


@torch.no_grad()
def test_a_reset_cuts_every_edge_across_it():
    (x, gates), e = linear_inputs("step", False), some_edges()
    gates["log_decay"][:, 17] = -torch.inf
    weights = edges.linear_edges(x["q"], x["k"], x["v"], e, **gates).weights
    close(weights, at_edges(linear.pattern(x["q"], x["k"], **gates), e))
    assert (weights[(e.src < 17) & (e.dest >= 17)] == 0).all() and (weights[e.src >= 17] > 0).all()


def scan_inputs() -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(0)
    shapes = {"u": (2, SEQ, 5), "dt": (2, SEQ, 5), "A_log": (5, 3), "B": (2, SEQ, 3), "C": (2, SEQ, 3)}
    x = {name: torch.rand(shape, generator=g, dtype=torch.float64) - 0.2 for name, shape in shapes.items()}
    return x | {"dt": x["dt"].abs()}


def test_scan_edges():
    x, e = scan_inputs(), some_edges()
    x = {name: t.requires_grad_() for name, t in x.items()}
    inputs = [x[name] for name in ("dt", "A_log", "B", "C")]
    A = selective_scan.pattern(*inputs)
    D, z = torch.rand(5, dtype=torch.float64), torch.randn(2, SEQ, 5, dtype=torch.float64)
    result = edges.scan_edges(x["u"], *inputs, e, D=D, z=z)
    gate = torch.nn.functional.silu(z)
    close(result.weights, at_edges(A, e))
    close(result.contribution, torch.einsum("bcij,bjc->bic", A * dense_mask(e), x["u"]) * gate)
    close(result.cut, (torch.einsum("bcij,bjc->bic", A * (1 - dense_mask(e)), x["u"]) + D * x["u"]) * gate)
    found = torch.autograd.grad(result.weights.square().sum(), inputs)
    expected = torch.autograd.grad(at_edges(A, e).square().sum(), inputs)
    for mine, reference in zip(found, expected, strict=True):
        close(mine, reference)


@torch.no_grad()
def test_block_edges_compose_convolution_activation_and_skip():
    """The block's map per channel is (A + D I) Z K; on edges it is the same, entry by entry."""
    x, e = scan_inputs(), some_edges()
    g = torch.Generator().manual_seed(1)
    weight, D = (
        torch.randn(5, 4, generator=g, dtype=torch.float64),
        torch.randn(5, generator=g, dtype=torch.float64),
    )
    activation = torch.rand(2, SEQ, 5, generator=g, dtype=torch.float64)
    inner = [x[name] for name in ("dt", "A_log", "B", "C")]
    mixing = selective_scan.pattern(*inner) + torch.diag_embed(D[:, None].expand(5, SEQ))
    block = torch.einsum("bcij,bjc,cjs->bcis", mixing, activation, causal_conv.pattern(weight, SEQ))
    taps = edges.conv_taps(weight, activation, shape=(2, SEQ))
    found = edges.composed_weights(lambda at: edges.scan_weights(*inner, at), e, taps, skip=D)
    close(found, at_edges(block, e))
    plain = edges.composed_weights(
        lambda at: edges.scan_weights(*inner, at), e, edges.conv_taps(weight, shape=(2, SEQ))
    )
    without = torch.einsum("bcij,cjs->bcis", selective_scan.pattern(*inner), causal_conv.pattern(weight, SEQ))
    close(plain, at_edges(without, e))


@torch.no_grad()
def test_edges_that_do_not_exist_weigh_nothing():
    x = random_softmax(SEQ)
    lse = softmax_attention.logsumexp(x["q"], x["k"], window=5).transpose(1, 2)
    at = Placed(batch=torch.tensor([0, 1, 0]), dest=torch.tensor([9, 9, 9]), src=torch.tensor([10, -1, 4]))
    assert (edges.softmax_weights(x["q"], x["k"], at, lse, window=5) == 0).all()
    inside = Placed(batch=at.batch, dest=at.dest, src=torch.tensor([9, 8, 5]))
    assert (edges.softmax_weights(x["q"], x["k"], inside, lse, window=5) > 0).all()


@torch.no_grad()
@pytest.mark.parametrize("rows", [1, 16, 64])
def test_abs_row_sum(rows):
    (x, gates), scan = linear_inputs("step", False), scan_inputs()
    signed = x["q"] - 0.5
    found = edges.abs_row_sum(lambda r: linear.pattern(signed, x["k"], rows=r, **gates), SEQ, rows=rows)
    close(found, linear.pattern(signed, x["k"], **gates).abs().sum(-1).transpose(1, 2))
    inner = [scan[name] for name in ("dt", "A_log", "B", "C")]
    found = edges.abs_row_sum(lambda r: selective_scan.pattern(*inner, rows=r), SEQ, rows=rows)
    close(found, selective_scan.pattern(*inner).abs().sum(-1).transpose(1, 2))


@torch.no_grad()
@pytest.mark.parametrize("decay", [None, "step", "channel"])
@pytest.mark.parametrize("rows", [slice(0, 9), slice(9, 20), slice(32, 33)], ids=str)
def test_rows_of_a_linear_pattern(decay, rows):
    x, gates = linear_inputs(decay, False)
    state = linear.LinearState(s=torch.zeros(2, 6, 4, 3).double(), z=torch.rand(2, 6, 4).double())
    options = {"normalise": True, "state": state if decay else None} | gates
    whole = linear.pattern(x["q"], x["k"], **options)
    close(linear.pattern(x["q"], x["k"], rows=rows, **options), whole[:, :, rows])


class LargestTensor(TorchDispatchMode):
    """The largest tensor that any operation makes, in numbers."""

    largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else (result,):
            if isinstance(tensor, torch.Tensor):
                self.largest = max(self.largest, tensor.untyped_storage().nbytes() // tensor.element_size())
        return result


@torch.no_grad()
def test_memory_is_linear():
    """At 4,096 positions nothing comes near a [seq seq] matrix; the dense pattern, as a control, does."""
    seq = 4096
    last = torch.arange(1, seq)
    e = Edges(batch=torch.zeros_like(last), dest=last, src=last - 1)
    q, k, v = (torch.rand(1, seq, 2, 8) for _ in range(3))
    u, dt, B, C = torch.rand(1, seq, 16), torch.rand(1, seq, 16), torch.rand(1, seq, 4), torch.rand(1, seq, 4)
    with LargestTensor() as seen:
        edges.softmax_edges(q, k, v, e)
        edges.linear_edges(q, k, v, e, log_decay=-torch.rand(1, seq, 2), normalise=True)
        edges.scan_edges(u, dt, torch.zeros(16, 4), B, C, e)
    assert seen.largest < seq * seq / 12
    with LargestTensor() as dense:
        softmax_attention.pattern(q, k)
    assert dense.largest >= 2 * seq * seq


@pytest.mark.parametrize(
    ("batch", "dest", "src", "message"),
    [
        ([], [], [], "there is no edge"),
        ([0], [3], [4], "a source is after its destination"),
        ([0], [3], [-1], "a source is after its destination or an index is negative"),
        ([0, 0], [3, 3], [1, 1], "1 edges are named twice"),
        ([0, 0], [3], [1], "accepted are int64 arrays of one length"),
        ([0.0], [3], [1], "batch is torch.float32"),
    ],
)
def test_refused_edges(batch, dest, src, message):
    index = [
        torch.tensor(i, dtype=torch.int64 if not i or isinstance(i[0], int) else None)
        for i in (batch, dest, src)
    ]
    with pytest.raises(KernelError, match=message):
        Edges(batch=index[0], dest=index[1], src=index[2])


def test_edges_outside_the_batch_are_refused():
    x = random_softmax(5)
    for batch, dest in ((2, 3), (0, 5)):
        e = Edges(batch=torch.tensor([batch]), dest=torch.tensor([dest]), src=torch.tensor([0]))
        with pytest.raises(KernelError, match="accepted are below 2 and 5"):
            edges.softmax_edges(x["q"], x["k"], x["v"], e)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda x, e: Edges(batch=[0], dest=e.dest, src=e.src), "batch is a list"),
        (lambda x, e: Edges(batch=e.batch, dest=e.dest, src=None), "src is a NoneType"),
        (lambda x, e: edges.softmax_edges(x, x, x, None), "edges is a NoneType"),
        (lambda x, e: edges.softmax_edges(None, x, x, e), "q is None"),
        (lambda x, e: edges.softmax_edges(x, x, x, e, window=1.5), "window is 1.5"),
        (lambda x, e: edges.linear_edges(x, x, x[0], e), "v has shape"),
        (lambda x, e: edges.linear_edges(x + 0j, x, x, e), "q has dtype torch.complex64"),
        (lambda x, e: edges.linear_weights(x, x, e, n_heads=4, scale=float("nan")), "scale is nan"),
        (lambda x, e: edges.softmax_weights(x, x, e, x[..., 0], scale="1"), "scale is '1'"),
        (lambda x, e: edges.scan_edges(x, x, x, x, x, e), "dt has shape"),
        (lambda x, e: edges.conv_taps(x[0, 0, 0], shape=(2, 5)), "weight has shape"),
        (lambda x, e: edges.abs_row_sum(lambda rows: x, 5, rows=0), "rows is 0"),
    ],
)
def test_inputs_and_options_are_checked(call, message):
    one = torch.tensor([1])
    with pytest.raises(KernelError) as error:
        call(torch.ones(2, 5, 4, 3), Edges(batch=one, dest=one, src=one))
    assert message in str(error.value)

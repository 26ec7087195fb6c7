"""Copying: does a head raise the logit of what it attends to? Three answers: `logit`, `edge`, `eigenvalue`.

A raise is what a head's output does to a token's logit on its own: straight through the final norm's gain and
the unembedding. The final norm's scale at a position is frozen; it multiplies numerator and denominator of
every ratio here alike, so it is left out. With a = raise of the attended token and S = sum of raises over the
sample's tokens, r = a / (a + S) and the score is 4r - 1, in [-1, 1]: 1 when only the attended token is
raised, -1 when it is not raised.
"""

import functools
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from interp.sequences import RepeatedTokens
from models.mixers.reading import Reading


@dataclass(frozen=True, kw_only=True)
class CopyingScore:
    """`r` = a / (a + S) of each sequence, position (or edge) and unit; NaN where nothing is raised (S =
    0).
    """

    ratio: Float[Tensor, "batch unit position"]
    two_ratio: Float[Tensor, "batch unit position"]

    @property
    def score(self) -> Float[Tensor, " unit"]:
        """4r - 1, mean over positions and sequences; NaN for a unit that never raises anything."""
        return _mean(4 * self.ratio - 1)

    @property
    def score_2r(self) -> Float[Tensor, " unit"]:
        """2a/S - 1, the convention of a public reimplementation."""
        return _mean(2 * self.two_ratio - 1)

    @property
    def standard_error(self) -> Float[Tensor, " unit"]:
        """Standard error of `score` over sequences."""
        return standard_error_over_sequences(4 * self.ratio - 1)


def logit_copying(
    outputs: Float[Tensor, "batch seq unit d_source"],
    W_out: Float[Tensor, "unit d_source d_model"],
    weights: Float[Tensor, "batch unit dest=seq src=seq"],
    directions: Float[Tensor, "batch seq d_model"],
    *,
    bos: bool,
    with_bos: bool = False,
    attended: str = "weighted",
    rows: slice | None = None,
) -> CopyingScore:
    """Olsson's copying score on sequences of distinct tokens.

    Args:
        outputs: What each unit adds at each position, before `W_out` (for a softmax head: z).
        weights: Nonnegative attention weights, or the norms of contributions over their sum.
        directions: `logit = directions[b, j] @ residual` of the token at position j, the mean over the whole
            vocabulary taken out.
        bos: Position 0 is BOS; it is then no destination.
        with_bos: BOS among the sources and the sample's tokens. Without it the remaining weights are rescaled
            to sum to 1; what the head read from BOS stays in its output.
        attended: `weighted` for the weighted mean over sources, `argmax` for the most attended one.
        rows: The destinations that `weights` holds, where it is a block of them.

    Source: Olsson et al. 2022, arXiv:2209.11895, copying head evaluator.
    """
    first = 0 if rows is None else rows.start
    start = max(0, int(bos) - first)
    outputs = outputs if rows is None else outputs[:, rows]
    readout = torch.einsum("usd,bjd->busj", W_out, directions)
    raised = torch.einsum("btus,busj->butj", outputs[:, start:], readout).relu().double()
    weights = weights[:, :, start:].double()
    if bos and not with_bos:
        raised, weights = raised[..., 1:], weights[..., 1:]
        weights = weights / weights.sum(-1, keepdim=True)
    if attended == "argmax":
        a = raised.gather(-1, weights.argmax(-1, keepdim=True))[..., 0]
    elif attended == "weighted":
        a = (weights * raised).sum(-1)
    else:
        raise ValueError(f"attended is {attended!r}; accepted are weighted, argmax")
    return _ratio(a, raised.sum(-1))


@dataclass(frozen=True, kw_only=True)
class EdgeCopying:
    """Copying on induction edges: `score` 4r - 1 and how often the attended token is raised most."""

    raises: CopyingScore
    argmax_by_sequence: Float[Tensor, "batch unit"]

    @property
    def argmax_share(self) -> Float[Tensor, " unit"]:
        """Share of edges on which no other token of the sample gets a higher logit; 1 / period by chance."""
        return self.argmax_by_sequence.mean(0)


def edge_copying(
    reading: Reading,
    probe: RepeatedTokens,
    directions: Float[Tensor, "batch token d_model"],
    *,
    edges: tuple[Int[Tensor, "batch edge"], Int[Tensor, "batch edge"]] | None = None,
) -> EdgeCopying:
    """The same question where a head is at work: each induction edge alone, on the repeated probe.

    An edge's contribution c[i, j] goes straight to the logits, centred over the sample's tokens; r compares
    the raise of x_j with the raises of all of them. `directions` belong to the first `probe.period` tokens
    after BOS. `edges` are (dest, src) of some of `probe.edges`, padded alike; None for all.
    """
    if edges is None:
        batch, dest, src, token = probe.once(("copied edges",), lambda: _placed(probe, *probe.edges))
    else:
        batch, dest, src, token = _placed(probe, *edges)
    y = reading.edges(batch.flatten(), dest.flatten(), src.flatten())
    y = y.view(len(batch), -1, *y.shape[1:])
    # A unit's gain to each sample token; centring the directions centres the logits.
    centred = directions - directions.mean(1, keepdim=True)
    readout = torch.einsum("usd,bkd->busk", reading.W_out, centred)
    logits = torch.einsum("beus,busk->buek", y, readout).double()
    token = token[:, None, :, None].expand(-1, logits.shape[1], -1, 1)
    raised = logits.relu()
    a = raised.gather(-1, token)[..., 0]
    best = (logits.argmax(-1) == token[..., 0]).double()
    filled = (src <= dest)[:, None]
    share = (best * filled).sum(-1) / filled.sum(-1)
    return EdgeCopying(raises=_ratio(a, raised.sum(-1)), argmax_by_sequence=share)


def standard_error_over_sequences(values: Float[Tensor, "batch unit position"]) -> Float[Tensor, " unit"]:
    """Standard error of the mean over sequences of means over positions, NaN left out."""
    by_sequence = values.nanmean(-1)
    filled = by_sequence.isfinite()
    n = filled.sum(0)
    centred = torch.where(filled, by_sequence - by_sequence.nanmean(0), 0)
    return (centred.square().sum(0) / (n - 1).clamp(min=1) / n.clamp(min=1)).sqrt()


def sample_tokens(probe: RepeatedTokens) -> Int[Tensor, "batch token"]:
    """The distinct tokens of each sequence: its first copy."""
    return probe.tokens[:, probe.first : probe.first + probe.period]


def unit_outputs(reading: Reading, seq: int | None = None) -> Float[Tensor, "batch seq unit d_source"]:
    """What each unit adds at the first `seq` positions (None: all), before `W_out`: its source vectors
    summed.
    """
    blocks = [reading.rows(start, stop).sum(2) for start, stop in reading.row_blocks(0, seq or reading.n_seq)]
    return torch.cat(blocks, dim=1)


def eigenvalue_copying(
    W_V: Float[Tensor, "head d_model d_head"],
    W_O: Float[Tensor, "head d_head d_model"],
    gram: Float[Tensor, "d_model d_model"],
) -> Float[Tensor, " head"]:
    """Re(sum of eigenvalues) / sum of |eigenvalues| of W_E W_V W_O W_U, in [-1, 1]; 1 for pure copying.

    Args:
        gram: W_U W_E, with whatever gains are folded and with row-vector maps: `residual @ gram`. The nonzero
            eigenvalues are those of the d_head x d_head product `W_O gram W_V`, and of the d_model x d_model
            product `W_V W_O gram`; the smaller is all that is computed, in float64.

    Source: Elhage et al. 2021, "copying" eigenvalue summary of OV circuits.
    """
    return eigenvalue_ratio(ov_product(W_V, W_O, gram).cpu())


def eigenvalue_null(
    d_head: int, gram: Float[Tensor, "d_model d_model"], *, n_draws: int = 32, seed: int = 0
) -> Float[Tensor, " draw"]:
    """The eigenvalue score of heads with Gaussian random W_V and W_O between the same embeddings."""
    return eigenvalue_ratio(null_product(d_head, gram, n_draws=n_draws, seed=seed).cpu())


def ov_product(
    W_V: Float[Tensor, "head d_model d_head"],
    W_O: Float[Tensor, "head d_head d_model"],
    gram: Float[Tensor, "d_model d_model"],
) -> Float[Tensor, "head n n"]:
    """The smaller product whose eigenvalues `eigenvalue_copying` sums, float64."""
    W_V, W_O, gram = W_V.double(), W_O.double(), gram.double()
    narrow = W_V.shape[-1] <= W_V.shape[-2]
    return W_O @ gram @ W_V if narrow else W_V @ W_O @ gram


def null_product(
    d_head: int, gram: Float[Tensor, "d_model d_model"], *, n_draws: int = 32, seed: int = 0
) -> Float[Tensor, "draw n n"]:
    """`ov_product` of the heads of `eigenvalue_null`."""
    return ov_product(*_random_heads(n_draws, gram.shape[0], d_head, seed, gram.device), gram)


def eigenvalue_ratio(product: Float[Tensor, "head n n"]) -> Float[Tensor, " head"]:
    """Re(sum of eigenvalues) / sum of |eigenvalues| of matrices on the CPU. May be called in any thread.

    NaN for a matrix that is not finite, which LAPACK may not be given.
    """
    finite = product.isfinite().all(-1).all(-1)
    values = _eigenvalues(torch.where(finite[:, None, None], product, 0))
    return torch.where(finite, values.real.sum(-1) / values.abs().sum(-1), torch.nan)


def _eigenvalues(matrices: Float[Tensor, "head n n"]) -> Tensor:
    """Eigenvalues of each matrix; all but small ones side by side, since LAPACK takes one after the other."""
    if matrices.shape[-1] < 32:
        return torch.linalg.eigvals(matrices)
    with _beginning:
        solvers, n_threads = _solvers(os.getpid())
    parts = matrices.tensor_split(min(n_threads, len(matrices)))
    return torch.cat(list(solvers.map(torch.linalg.eigvals, parts)))


_beginning = threading.Lock()


@functools.lru_cache(maxsize=1)
def _solvers(process: int) -> tuple[ThreadPoolExecutor, int]:
    """Threads for a part of the matrices each, of all callers of this process together, and their number.

    LAPACK takes one thread in each: with more for each matrix they hinder one another.
    """
    n_threads = torch.get_num_threads()
    solvers = ThreadPoolExecutor(n_threads, "eigenvalues", _take_one_thread)
    begun = threading.Barrier(n_threads)
    list(solvers.map(lambda _: begun.wait(), range(n_threads)))
    # The number is that of the thread that sets it and of those to come, which shall have the old one.
    torch.set_num_threads(n_threads)
    return solvers, n_threads


def _take_one_thread() -> None:
    # A thread takes over the process's number when it first computes or asks, whatever was set before.
    torch.get_num_threads()
    torch.set_num_threads(1)


@functools.lru_cache(maxsize=2)
def _random_heads(
    n_draws: int, d_model: int, d_head: int, seed: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """W_V and W_O of the null: the same for every layer and checkpoint."""
    draw = torch.Generator().manual_seed(seed)
    W_V, W_O = (
        torch.randn(n_draws, d_model, d_head, generator=draw, dtype=torch.float64) for _ in range(2)
    )
    return W_V.to(device), W_O.transpose(1, 2).to(device)


def _placed(
    probe: RepeatedTokens, dest: Int[Tensor, "batch edge"], src: Int[Tensor, "batch edge"]
) -> tuple[Int[Tensor, "batch edge"], ...]:
    """Sequence, destination and source of each edge, and which token of the sample it reads."""
    batch = torch.arange(len(dest), device=dest.device)[:, None].expand_as(dest).contiguous()
    return batch, dest, src, _sample_index(probe, src)


def _sample_index(probe: RepeatedTokens, src: Int[Tensor, "batch edge"]) -> Int[Tensor, "batch edge"]:
    tokens = probe.tokens.gather(1, src.clamp(max=probe.tokens.shape[1] - 1))
    sample = sample_tokens(probe).sort(dim=1)
    at = torch.searchsorted(sample.values.contiguous(), tokens).clamp(max=sample.values.shape[1] - 1)
    return sample.indices.gather(1, at)


def _ratio(
    a: Float[Tensor, "batch unit position"], total: Float[Tensor, "batch unit position"]
) -> CopyingScore:
    raised = total > 0
    nan = torch.full_like(a, torch.nan)
    return CopyingScore(
        ratio=torch.where(raised, a / (a + total), nan), two_ratio=torch.where(raised, a / total, nan)
    )


def _mean(values: Float[Tensor, "batch unit position"]) -> Float[Tensor, " unit"]:
    return values.nanmean((0, 2))

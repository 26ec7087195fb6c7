"""Q-, K- and V-composition of heads in different layers, with two nulls.

    score(1, 2) = |OV_1 X_2| / (|OV_1| |X_2|),    Frobenius norms of maps on row vectors

X_2 is W_Q W_K^T (Q), W_K W_Q^T (K) or W_V W_O (V) of the later head. Nulls, with the later head as it is:
`gaussian`, an earlier head of Gaussian W_V and W_O of the same shapes; `spectrum`, the earlier head with its
singular values, writing to random directions. Norms weigh a matrix's largest directions: a later head with
one strong map of its own (to the first position, say) scores low with every earlier head. Source: Elhage et
al. 2021; the nulls are ours.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from interp.circuits import UnitWeights, unit_weights
from interp.displayed import Displayed
from interp.errors import InterventionError
from interp.heads import Head as AnyHead
from interp.heads import pair_of
from models.language_model import LanguageModel

KINDS = ("q", "k", "v")
Head = tuple[int, int]


@dataclass(frozen=True, kw_only=True)
class CompositionScores(Displayed, display="composition"):
    """Scores of every pair of units, earlier by later; NaN where the sender is not in an earlier layer, or
    writes 0.

    `heads` is (layer, unit) of rows and columns: heads, and of Mamba-1, which has none, the whole layer as
    unit 0. `of` takes records. Means and standard deviations of the nulls are over draws.
    """

    kind: str
    heads: tuple[Head, ...]
    scores: Float[Tensor, "sender receiver"]
    gaussian_mean: Float[Tensor, "sender receiver"]
    gaussian_std: Float[Tensor, "sender receiver"]
    spectrum_mean: Float[Tensor, "sender receiver"]
    spectrum_std: Float[Tensor, "sender receiver"]

    @property
    def excess(self) -> Float[Tensor, "sender receiver"]:
        """Score above the larger of the two nulls' means, in that null's standard deviations."""
        by_null = [
            (self.scores - mean) / std.clamp_min(1e-12)
            for mean, std in (
                (self.gaussian_mean, self.gaussian_std),
                (self.spectrum_mean, self.spectrum_std),
            )
        ]
        return torch.minimum(*by_null)

    def of(self, sender: AnyHead, receiver: AnyHead) -> float:
        """The score of one pair; each a (layer, unit), with unit None where the layer is one, or a record.

        Raises:
            InterventionError: a unit that has no score here.
        """
        return float(self.scores[self._index(sender), self._index(receiver)])

    def _index(self, head: AnyHead) -> int:
        layer, unit = pair_of(head)
        own = [pair for pair in self.heads if pair[0] == layer]
        pair = own[0] if unit is None and len(own) == 1 else (layer, unit)
        if pair not in self.heads:
            named = ", ".join(map(str, self.heads[:8])) + (", ..." if len(self.heads) > 8 else "")
            raise InterventionError(f"no unit {pair} here; accepted: {named}")
        return self.heads.index(pair)

    def above_null(self, n_std: float = 5.0) -> list[tuple[Head, Head, float]]:
        """(sender, receiver, score) of the pairs above both nulls by `n_std` standard deviations, strongest
        first.
        """
        places = (self.excess > n_std).nonzero().tolist()
        found = [(self.heads[a], self.heads[b], float(self.scores[a, b])) for a, b in places]
        return sorted(found, key=lambda pair: -pair[2])


@torch.no_grad()
def composition_scores(
    model: LanguageModel,
    kind: str,
    *,
    fold: bool = True,
    lags: dict[str, int] | None = None,
    n_draws: int = 16,
    seed: int = 0,
) -> CompositionScores:
    """Composition scores of all pairs of units, in float64; `CompositionScores.of` takes the records of two.

    Args:
        kind: "q", "k" or "v". `fold`, `lags`: see `circuits.unit_weights`.
        n_draws: Of each null.

    Raises:
        InterventionError: another kind, fewer than two draws, or a model of one layer.
    """
    n_layers = model.config.n_layers
    if kind not in KINDS:
        raise InterventionError(f"kind is {kind!r}; accepted: {', '.join(KINDS)}")
    if n_draws < 2:
        raise InterventionError(f"n_draws is {n_draws}; accepted: 2 and up")
    if n_layers < 2:
        raise InterventionError(
            "the model has 1 layer; accepted: 2 and up, as heads of one layer do not compose"
        )
    units = [
        unit_weights(model, layer, fold=fold, lags=_own_lags(model, layer, lags)) for layer in range(n_layers)
    ]
    heads = tuple((layer, n) for layer, unit in enumerate(units) for n in range(unit.W_V.shape[0]))
    first = [heads.index((layer, 0)) for layer in range(n_layers)] + [len(heads)]
    names = ("scores", "gaussian_mean", "gaussian_std", "spectrum_mean", "spectrum_std")
    found = {name: torch.full((len(heads), len(heads)), torch.nan, dtype=torch.float64) for name in names}
    draw = torch.Generator().manual_seed(seed)
    # Every receiver after a sender at once, layer by layer of senders.
    read = [_received(unit, kind) for unit in units]
    for layer, unit in enumerate(units[:-1]):
        sent = _sent(unit.W_V.double().cpu(), unit.W_O.double().cpu())
        spectrum = torch.linalg.svdvals(sent)
        random = [_spectrum_like(spectrum, sent.shape, draw) for _ in range(n_draws)]
        gaussian = torch.stack([_gaussian_like(unit, draw) for _ in range(n_draws)])
        for later in range(layer + 1, n_layers):
            block = (slice(first[layer], first[layer + 1]), slice(first[later], first[later + 1]))
            found["scores"][block] = _scores(sent, read[later])
            by_draw = torch.stack([_scores(one, read[later]) for one in random])
            found["spectrum_mean"][block], found["spectrum_std"][block] = by_draw.mean(0), by_draw.std(0)
            by_draw = _scores(gaussian, read[later])
            found["gaussian_mean"][block], found["gaussian_std"][block] = by_draw.mean(0), by_draw.std(0)
    return CompositionScores(kind=kind, heads=heads, **found)


def _own_lags(model: LanguageModel, layer: int, lags: dict[str, int] | None) -> dict[str, int] | None:
    return lags if getattr(model.blocks[layer].attn, "conv1d", None) is not None else None


def _sent(
    W_V: Float[Tensor, "unit d_model m"], W_O: Float[Tensor, "unit m d_model"]
) -> Float[Tensor, "unit r d_model"]:
    """S with |W_V W_O X| = |S X| for every X, and no more rows than the head is wide."""
    return torch.linalg.qr(W_V, mode="r").R @ W_O


def _received(unit: UnitWeights, kind: str) -> Float[Tensor, "unit d_model r"]:
    """T with |X times the later head's matrix| = |X T| for every X."""
    left, right = {
        "q": (unit.W_Q, unit.W_K),
        "k": (unit.W_K, unit.W_Q),
        "v": (unit.W_V, unit.W_O.transpose(1, 2)),
    }[kind]
    R = torch.linalg.qr(right.double().cpu(), mode="r").R
    return left.double().cpu() @ R.transpose(1, 2)


def _scores(
    sent: Float[Tensor, "sender r d_model"], read: Float[Tensor, "receiver d_model s"]
) -> Float[Tensor, "sender receiver"]:
    product = torch.einsum("ard,bds->abrs", sent, read).flatten(2).norm(dim=-1)
    return product / (sent.flatten(1).norm(dim=-1)[:, None] * read.flatten(1).norm(dim=-1))


def _spectrum_like(
    spectrum: Float[Tensor, "unit r"], shape: torch.Size, draw: torch.Generator
) -> Float[Tensor, "unit r d_model"]:
    units, _, d_model = shape
    rank = spectrum.shape[1]
    directions = torch.linalg.qr(torch.randn(units, d_model, rank, generator=draw, dtype=torch.float64)).Q
    return spectrum[:, :, None] * directions.transpose(1, 2)


def _gaussian_like(unit: UnitWeights, draw: torch.Generator) -> Float[Tensor, "r d_model"]:
    _, d_model, m = unit.W_V.shape
    W_V = torch.randn(1, d_model, m, generator=draw, dtype=torch.float64)
    W_O = torch.randn(1, m, d_model, generator=draw, dtype=torch.float64)
    return _sent(W_V, W_O)[0]

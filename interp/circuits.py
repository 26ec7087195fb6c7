"""Weight-space circuits of every mixer as low-rank matrices: OV and QK, by head and by tap of the
convolution.

Maps act on row vectors: a source's residual x gives x W_V W_O, and scores are (x_i W_Q)(x_j W_K)^T. Exact for
softmax and linear attention without convolution (rotations, normalisation and feature maps act on the scores
afterwards and are left out). Elsewhere `UnitWeights.approximation` says what stands in: of a convolution one
tap, or the sum of its taps; of Mamba's SiLU and gate the mean factor over given tokens, or 1.

Mamba-2: W_Q and W_K make C and B. Mamba-1, as one unit: C and B are made from the convolution's output by
    x_proj.

Units are heads; of Mamba-1, which has none, the whole layer (unit 0, or None), never a channel. Where a
function takes `layer` and `head`, a `HeadScore` record may stand for both.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float, Int
from torch import Tensor

from interp.conv_input import ConvInput
from interp.displayed import Displayed
from interp.errors import InterventionError
from interp.heads import layer_and_head
from interp.records import HeadScore
from interp.sites import check_layer
from kernels import causal_conv
from models.language_model import LanguageModel
from models.mixers.base import Mixer
from models.whole import is_whole

if TYPE_CHECKING:
    from transformer_lens import FactoredMatrix


@dataclass(frozen=True, kw_only=True)
class UnitWeights(Displayed, display="circuits"):
    """A layer's maps by unit (head; Mamba-1: the layer), and in words what was left out or averaged."""

    W_Q: Float[Tensor, "unit d_model d_k"]
    W_K: Float[Tensor, "unit d_model d_k"]
    W_V: Float[Tensor, "unit d_model d_v"]
    W_O: Float[Tensor, "unit d_v d_model"]
    approximation: str


@torch.no_grad()
def unit_weights(
    model: LanguageModel,
    layer: int,
    *,
    lags: dict[str, int] | None = None,
    fold: bool = True,
    tokens: Int[Tensor, "batch seq"] | None = None,
) -> UnitWeights:
    """The maps of a layer's units.

    Args:
        lags: The tap of each of "q", "k", "v" through which the convolution is read; those not named: the sum
            of taps.
        fold: The gain of the norm before the mixer (and LayerNorm's centring) goes into W_Q, W_K and W_V.
        tokens: For Mamba: sequences over which SiLU's factor sigmoid(pre), the gate and the gated norm are
            averaged.

    Raises:
        InterventionError: a layer or lag that does not exist.
    """
    check_layer(model, layer)
    block = model.blocks[layer]
    mixer = block.attn
    means = _means(model, layer, tokens) if tokens is not None and mixer.kind.startswith("mamba") else None
    q, k, v = (_tap_gain(mixer, part, (lags or {}).get(part), means) for part in "qkv")
    W_Q, W_K, W_V = _maps(mixer, q, k, v)
    W_O = mixer.W_O if means is None else means.W_O
    if mixer.kind == "mamba1" and means is None:
        W_O = mixer.out_proj.weight.T[None]
    if fold:
        W_Q, W_K, W_V = (_folded(block.ln1, W) for W in (W_Q, W_K, W_V))
    return UnitWeights(
        W_Q=W_Q, W_K=W_K, W_V=W_V, W_O=W_O, approximation=_approximation(mixer, lags, means is not None)
    )


def ov_circuit(
    model: LanguageModel,
    layer: int | HeadScore,
    head: int | None = 0,
    *,
    full: bool = False,
    lag: int | None = None,
    fold: bool = True,
    tokens: Int[Tensor, "batch seq"] | None = None,
) -> "FactoredMatrix":
    """What a unit writes for a source: [d_model d_model], or with `full` [source token, logit of a token].

    `layer` may be a record; `head` None is the layer where that is one unit (Mamba-1). `lag`: through one tap
    of the convolution. `tokens`: through Mamba's mean gate. With `full`, `fold` also takes the final norm's
    gain into the unembedding.
    """
    from transformer_lens import FactoredMatrix

    layer, head = layer_and_head(layer, head)
    lags = None if lag is None else {"v": lag}
    unit = unit_weights(model, layer, lags=lags, fold=fold, tokens=tokens)
    head = _checked_unit(unit, head, layer)
    A, B = unit.W_V[head], unit.W_O[head]
    if full:
        W_U = model.unembed.W_U
        W_U = _folded(model.ln_final, W_U) if fold else W_U
        A, B = model.embed.W_E @ A, B @ W_U
    return FactoredMatrix(A.detach(), B.detach())


def qk_circuit(
    model: LanguageModel,
    layer: int | HeadScore,
    head: int | None = 0,
    *,
    full: bool = False,
    lags: tuple[int | None, int | None] = (None, None),
    fold: bool = True,
) -> "FactoredMatrix":
    """Scores of a unit: [destination source] residual directions, or with `full` tokens. Softmax: scaled.

    `layer`, `head`: as `ov_circuit`. `lags` of the taps through which query and key are read.
    """
    from transformer_lens import FactoredMatrix

    layer, head = layer_and_head(layer, head)
    named = {part: lag for part, lag in zip("qk", lags, strict=True) if lag is not None}
    unit = unit_weights(model, layer, lags=named, fold=fold)
    head = _checked_unit(unit, head, layer)
    scale = getattr(model.blocks[layer].attn, "scale", 1.0)
    A, B = unit.W_Q[head] * scale, unit.W_K[head].T
    if full:
        A, B = model.embed.W_E @ A, B @ model.embed.W_E.T
    return FactoredMatrix(A.detach(), B.detach())


def eigenvalue_score(matrix: "FactoredMatrix") -> float:
    """Re(sum of eigenvalues) / sum of |eigenvalues|, in [-1, 1]: of a full OV circuit copying, of a full QK
    matching.

    0 for a matrix without eigenvalues other than 0. Source: Elhage et al. 2021.
    """
    values = torch.linalg.eigvals(matrix.BA.double() if matrix.ldim == matrix.rdim else matrix.AB.double())
    total = values.abs().sum()
    return float(values.real.sum() / total) if total > 0 else 0.0


@torch.no_grad()
def tap_alignment(
    model: LanguageModel, layer: int | HeadScore, head: int | None = 0
) -> Float[Tensor, "lag_q lag_k"]:
    """How far query tap and key tap together match equal tokens: the cosine of the token-by-token QK circuit
    with 1.

    Entry [a, b] reads the query a places and the key b places before; a match there makes position s + b - a
    the source for a token seen at s: delta* = b - a. Both sides are centred over the vocabulary; divided by
    the cosine that the circuit's rank allows, so that 1 is a perfect match of equal tokens. Random circuits
    lie within about 1 / sqrt(rank (d_vocab - 1)) of 0.
    """
    layer, head = layer_and_head(layer, head)
    width = _width(model, layer)
    E = model.embed.W_E
    units = [unit_weights(model, layer, lags={"q": lag, "k": lag}) for lag in range(width)]
    head = _checked_unit(units[0], head, layer)
    return torch.stack(
        [torch.stack([_cosine(E @ a.W_Q[head], E @ b.W_K[head]) for b in units]) for a in units]
    )


@torch.no_grad()
def value_alignment(
    model: LanguageModel, layer: int | HeadScore, head: int | None = 0
) -> Float[Tensor, " lag"]:
    """How far each value tap copies: the same cosine, of the full OV circuit through one tap with 1."""
    layer, head = layer_and_head(layer, head)
    W_U = _folded(model.ln_final, model.unembed.W_U)
    found = []
    for lag in range(_width(model, layer)):
        unit = unit_weights(model, layer, lags={"v": lag})
        head = _checked_unit(unit, head, layer)
        found.append(_cosine(model.embed.W_E @ unit.W_V[head], (unit.W_O[head] @ W_U).T))
    return torch.stack(found)


def _cosine(left: Float[Tensor, "token d"], right: Float[Tensor, "token d"]) -> Float[Tensor, ""]:
    """Cosine of left @ right.T with the identity, both centred, over what the rank allows; nothing d_vocab
    squared.
    """
    left, right = (x.double() - x.double().mean(0) for x in (left, right))
    norm = ((left.T @ left) * (right.T @ right)).sum().clamp_min(0).sqrt()
    n = left.shape[0] - 1
    ceiling = min(left.shape[1], n) ** 0.5
    return (left * right).sum() / (norm * ceiling) if norm > 0 else norm


@dataclass(frozen=True)
class _Means:
    """Mamba's factors, averaged over tokens: of each channel of the convolution, and within W_O."""

    sigmoid: Float[Tensor, " channel"]
    W_O: Float[Tensor, "unit d_v d_model"]


def _means(model: LanguageModel, layer: int, tokens: Tensor) -> _Means:
    mixer = model.blocks[layer].attn
    inputs: list[Tensor] = []
    handle = mixer.register_forward_pre_hook(lambda _, args: inputs.append(args[0]))
    try:
        with ConvInput(mixer) as seen:
            model(tokens, stop_at_layer=layer + 1)
            pre, _ = causal_conv.causal_conv(seen.last, mixer.conv1d.weight[:, 0], mixer.conv1d.bias)
    finally:
        handle.remove()
    return _Means(torch.sigmoid(pre).mean((0, 1)), mixer.ov_factors(inputs[0]).W_O)


def _width(model: LanguageModel, layer: int) -> int:
    check_layer(model, layer)
    conv = getattr(model.blocks[layer].attn, "conv1d", None)
    if conv is None:
        raise InterventionError(
            f"layer {layer} has no convolution, so no taps; accepted: a layer with d_conv above 0"
        )
    return conv.weight.shape[-1]


def _tap_gain(
    mixer: Mixer, part: str, lag: int | None, means: _Means | None
) -> Float[Tensor, " channel"] | None:
    """Factor of each channel of the convolution: one tap or the sum of all, times SiLU's mean factor."""
    conv = getattr(mixer, "conv1d", None)
    if conv is None:
        if lag is not None:
            raise InterventionError(f"lag {lag} of {part}, but the mixer has no convolution; accepted: None")
        return None
    weight = conv.weight[:, 0]
    width = weight.shape[-1]
    if lag is not None and (not is_whole(lag) or not 0 <= lag < width):
        raise InterventionError(f"lag {lag} of {part} is out of range; accepted: 0..{width - 1}")
    gain = weight.sum(-1) if lag is None else weight[:, width - 1 - lag]
    return gain if means is None else gain * means.sigmoid


def _maps(
    mixer: Mixer, q: Tensor | None, k: Tensor | None, v: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """W_Q, W_K, W_V with each channel's factor of the convolution."""
    if mixer.kind == "mamba1":
        return _mamba1_maps(mixer, q, k, v)
    if q is None:
        return mixer.W_Q, mixer.W_K, mixer.W_V
    if mixer.kind == "mamba2":
        shared = mixer.n_groups * mixer.d_state
        widths, order = (mixer.d_inner, shared, shared), ("v", "k", "q")
    else:
        key = mixer.n_kv_heads * mixer.d_head
        widths, order = (mixer.n_heads * mixer.d_head, key, key), ("q", "k", "v")
    gains = dict(zip(order, zip(*(x.split(widths) for x in (q, k, v)), strict=True), strict=True))
    found = []
    for which, (part, W) in enumerate(zip("qkv", (mixer.W_Q, mixer.W_K, mixer.W_V), strict=True)):
        gain = gains[part][which].view(-1, W.shape[-1])
        found.append(W * gain.repeat_interleave(W.shape[0] // gain.shape[0], 0)[:, None])
    return tuple(found)


def _mamba1_maps(mixer: Mixer, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    inner = mixer.in_proj.weight[: mixer.d_inner].T
    if mixer.config.constant_bcdt:
        none = inner.new_zeros(1, inner.shape[0], mixer.d_state)
        return none, none, (inner * v)[None]
    B, C = mixer.x_proj.weight[-2 * mixer.d_state :].split(mixer.d_state)
    return ((inner * q) @ C.T)[None], ((inner * k) @ B.T)[None], (inner * v)[None]


def _folded(norm: torch.nn.Module, W: Float[Tensor, "*unit d_model d"]) -> Float[Tensor, "*unit d_model d"]:
    gain = getattr(norm, "w", None)
    W = W if gain is None else W * gain[:, None]
    return W - W.mean(-2, keepdim=True) if getattr(norm, "kind", None) == "layer" else W


def _checked_unit(unit: UnitWeights, head: int | None, layer: int) -> int:
    """The index of a unit; None is the only one of its layer."""
    n = unit.W_V.shape[0]
    if head is None and n == 1:
        return 0
    if not is_whole(head):
        raise InterventionError(f"head {head!r} of layer {layer} is no whole number; accepted: 0..{n - 1}")
    if not 0 <= head < n:
        raise InterventionError(f"head index {head} is out of range in layer {layer}; accepted: 0..{n - 1}")
    return head


def _approximation(mixer: Mixer, lags: dict[str, int] | None, averaged: bool) -> str:
    words = []
    if getattr(mixer, "conv1d", None) is not None:
        taps = [f"{part} at lag {lag}" for part, lag in (lags or {}).items()]
        words.append(
            "taps of the convolution: " + ", ".join([*taps, *(["else their sum"] if len(taps) < 3 else [])])
        )
    if getattr(mixer, "smear", None) is not None:
        words.append("keys before smearing")
    if mixer.kind.startswith("mamba"):
        words.append("mean sigmoid(pre), gate and norm" if averaged else "SiLU and gate left out")
    if getattr(mixer, "rope", None) is not None:
        words.append("rotation left out")
    if mixer.kind == "linear":
        words.append("feature map left out")
    return "; ".join(words) or "exact"

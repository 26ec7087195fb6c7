"""Language models whose induction circuit is known because it is wired by hand: ground truth for every score.

The residual stream has a token part (one-hot), an output part that only the unembedding reads, and a junk
part that nothing reads. The circuit matches x_i with the token that stands `offset` places before a source
position and copies the token after that one. All other units attend evenly and write random vectors into the
junk part: every score must read chance on them.

| kind | circuit |
| --- | --- |
| softmax | layer 0 head 1 attends to the previous token and copies it; layer 1 head 2 matches and copies |
| linear | one layer, head 2: taps at lags 0 (q), `offset` (k) and `offset` - 1 (v), then the match |
| mamba1 | one layer: the same taps on three groups of channels that make C, B and the scan's values |
| mamba2 | one layer, head 2 (of one group of B and C each): the same taps on C, B and x |
"""

import math
from dataclasses import dataclass, field

import torch
from jaxtyping import Float
from torch import Tensor

from models.config import (
    LanguageModelConfig,
    LinearAttentionConfig,
    Mamba1Config,
    Mamba2Config,
    SoftmaxAttentionConfig,
)
from models.errors import ConfigError, closest
from models.language_model import LanguageModel

N_HEADS = 4
INDUCTION_HEAD, PREVIOUS_HEAD = 2, 1
D_CONV = 4
# Logit of the copied token above all others, at one match.
CONFIDENCE = 16.0
# Attention logit of a match above the rest (softmax).
SHARPNESS = 40.0
# Input of a SiLU that stands for "on".
_ON = 8.0
# exp of it: a decay rate at which nothing, or everything, is forgotten from one position to the next.
_KEEP, _FORGET = -20.0, 4.0


@dataclass(frozen=True, kw_only=True)
class Circuit:
    """Where the circuit is.

    Attributes:
        layer, unit: The layer and the head that match and copy (Mamba-1: the layer's one unit, 0).
        reading: The reading in which prefix matching at offset 1 is 1.
        offset: delta* in the mixer's own A: the match is at this many positions after the earlier copy.
        previous_token: (layer, head) that carries each token to the next position; None where a convolution
            does.
        taps: Lags of the convolution that the circuit uses, by part: `q`, `k`, `v`.
        channels: Mamba-1's channels by part, as ranges of the convolution's channels.
    """

    kind: str
    layer: int
    unit: int
    reading: str
    offset: int
    previous_token: tuple[int, int] | None = None
    taps: dict[str, int] = field(default_factory=dict)
    channels: dict[str, range] = field(default_factory=dict)


def constructed_model(
    kind: str, *, d_vocab: int = 32, n_ctx: int = 128, offset: int = 1, seed: int = 0
) -> tuple[LanguageModel, Circuit]:
    """A hand-wired model and the truth about it.

    On distinct tokens that come again its loss is ln(d_vocab) at the first copy and about d_vocab exp(-16) at
    later ones.

    Args:
        kind: "softmax", "linear", "mamba1" or "mamba2".
        offset: delta*, 1..3 with a convolution of four taps; softmax has 1 only.
        seed: Of the random vectors that idle units write.

    Raises:
        ConfigError: another kind, or an offset that the kind cannot have.
    """
    if kind not in _BUILDERS:
        raise ConfigError(f"no constructed model of kind {kind!r}{closest(kind, _BUILDERS)}")
    most = 1 if kind == "softmax" else D_CONV - 1
    if not 1 <= offset <= most:
        raise ConfigError(f"offset is {offset}; accepted for {kind}: 1..{most}")
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        model, circuit = _BUILDERS[kind](d_vocab, n_ctx, offset, draw)
    return model.eval(), circuit


def _junk(*shape: int, draw: torch.Generator) -> Tensor:
    return torch.randn(*shape, generator=draw) / math.sqrt(shape[-1])


def _model(d_vocab: int, n_ctx: int, d_model: int, positions: str, *mixers) -> LanguageModel:
    """A model without norms and MLPs whose weights are all 0, but token embedding and unembedding."""
    config = LanguageModelConfig(
        d_model=d_model,
        n_layers=len(mixers),
        d_vocab=d_vocab,
        n_ctx=n_ctx,
        mixers=mixers,
        norm="none",
        positions=positions,
    )
    model = LanguageModel(config)
    for parameter in model.parameters():
        parameter.zero_()
    model.embed.W_E[:, :d_vocab] = torch.eye(d_vocab)
    model.unembed.weight[:, d_vocab : 2 * d_vocab] = CONFIDENCE * torch.eye(d_vocab)
    return model


# Softmax. Residual: token, output, junk, previous token [each d_vocab], position [n_ctx].


def _softmax(d_vocab: int, n_ctx: int, offset: int, draw: torch.Generator) -> tuple[LanguageModel, Circuit]:
    width = max(n_ctx, d_vocab + 1)
    mixer = SoftmaxAttentionConfig(n_heads=N_HEADS, d_head=width, scale=1.0)
    model = _model(d_vocab, n_ctx, 4 * d_vocab + n_ctx, "learned", mixer, mixer)
    token, output, junk, previous = (slice(n * d_vocab, (n + 1) * d_vocab) for n in range(4))
    place = slice(4 * d_vocab, 4 * d_vocab + n_ctx)
    model.pos_embed.W_pos[:, place] = torch.eye(n_ctx)
    one = torch.eye(d_vocab)
    for layer, block in enumerate(model.blocks):
        q, k, v = block.attn.in_proj.weight.view(3, N_HEADS, width, -1)
        out = block.attn.out_proj.weight.T.view(N_HEADS, width, -1)
        for head in range(N_HEADS):
            v[head, :d_vocab, token] = one
            out[head, :d_vocab, junk] = _junk(d_vocab, d_vocab, draw=draw)
        if layer == 0:
            # Query i asks for key i - 1.
            q[PREVIOUS_HEAD, : n_ctx - 1, place] = SHARPNESS * torch.eye(n_ctx)[1:]
            k[PREVIOUS_HEAD, :n_ctx, place] = torch.eye(n_ctx)
            out[PREVIOUS_HEAD] = 0
            out[PREVIOUS_HEAD, :d_vocab, previous] = one
        else:
            q[INDUCTION_HEAD, :d_vocab, token] = SHARPNESS * one
            k[INDUCTION_HEAD, :d_vocab, previous] = one
            # Position 0 has no previous token: its key repels every query.
            q[INDUCTION_HEAD, d_vocab, place] = SHARPNESS
            k[INDUCTION_HEAD, d_vocab, place.start] = -2.0
            out[INDUCTION_HEAD] = 0
            out[INDUCTION_HEAD, :d_vocab, output] = one
    circuit = Circuit(
        kind="softmax",
        layer=1,
        unit=INDUCTION_HEAD,
        reading="pattern",
        offset=offset,
        previous_token=(0, PREVIOUS_HEAD),
    )
    return model, circuit


# The others. Residual: token, output, junk [each d_vocab]. The sum of the token part is 1: a constant.


def _taps(
    weight: Float[Tensor, "channel 1 width"], lags: dict[str, int], channels: dict[str, range | slice]
) -> None:
    """One tap of 1 for each part's channels."""
    for part, chosen in channels.items():
        chosen = slice(chosen.start, chosen.stop)
        weight[chosen, 0, weight.shape[-1] - 1 - lags[part]] = 1.0


def _linear(d_vocab: int, n_ctx: int, offset: int, draw: torch.Generator) -> tuple[LanguageModel, Circuit]:
    mixer = LinearAttentionConfig(n_heads=N_HEADS, d_head=d_vocab, feature_map="relu", d_conv=D_CONV)
    model = _model(d_vocab, n_ctx, 3 * d_vocab, "none", mixer)
    attn = model.blocks[0].attn
    token, output, junk = (slice(n * d_vocab, (n + 1) * d_vocab) for n in range(3))
    q, k, v = attn.in_proj.weight.view(3, N_HEADS, d_vocab, -1)
    out = attn.out_proj.weight.T.view(N_HEADS, d_vocab, -1)
    lags = {"q": 0, "k": offset, "v": offset - 1}
    for head in range(N_HEADS):
        v[head, :, token] = torch.eye(d_vocab)
        start, width = head * d_vocab, N_HEADS * d_vocab
        own = {part: range(n * width + start, n * width + start + d_vocab) for n, part in enumerate("qkv")}
        if head == INDUCTION_HEAD:
            q[head, :, token] = k[head, :, token] = torch.eye(d_vocab)
            out[head, :, output] = torch.eye(d_vocab)
            _taps(attn.conv1d.weight, lags, own)
        else:
            # The same key everywhere: even attention.
            q[head, 0, token] = k[head, 0, token] = 1.0
            out[head, :, junk] = _junk(d_vocab, d_vocab, draw=draw)
            _taps(attn.conv1d.weight, dict.fromkeys("qkv", 0), own)
    circuit = Circuit(kind="linear", layer=0, unit=INDUCTION_HEAD, reading="block", offset=offset, taps=lags)
    return model, circuit


def _silu(x: float) -> float:
    return x / (1 + math.exp(-x))


def _softplus_inverse(x: float) -> float:
    return math.log(math.expm1(x))


def _mamba1(d_vocab: int, n_ctx: int, offset: int, draw: torch.Generator) -> tuple[LanguageModel, Circuit]:
    mixer = Mamba1Config(d_inner=4 * d_vocab, d_state=d_vocab, d_conv=D_CONV, conv_bias=False, dt_rank=1)
    model = _model(d_vocab, n_ctx, 3 * d_vocab, "none", mixer)
    attn = model.blocks[0].attn
    token, output, junk = (slice(n * d_vocab, (n + 1) * d_vocab) for n in range(3))
    parts = {name: range(n * d_vocab, (n + 1) * d_vocab) for n, name in enumerate(("v", "k", "q", "idle"))}
    group = {name: slice(part.start, part.stop) for name, part in parts.items()}
    value, gate = attn.in_proj.weight.view(2, 4 * d_vocab, -1)
    lags = {"v": offset - 1, "k": offset, "q": 0, "idle": 0}
    for chosen in group.values():
        value[chosen, token] = _ON * torch.eye(d_vocab)
    gate[:, token] = _ON
    _taps(attn.conv1d.weight, lags, parts)
    on = _silu(_ON)
    # x_proj's rows are dt, B, C.
    attn.x_proj.weight[1 : 1 + d_vocab, group["k"]] = torch.eye(d_vocab) / on
    attn.x_proj.weight[1 + d_vocab :, group["q"]] = torch.eye(d_vocab) / on
    attn.dt_proj.bias.fill_(_softplus_inverse(1.0))
    # Only the value channels remember: the others see their own position alone.
    attn.A_log.fill_(_FORGET)
    attn.A_log[group["v"]] = _KEEP
    out = attn.out_proj.weight.T
    out[group["v"], output] = torch.eye(d_vocab) / on**2
    out[group["idle"], junk] = _junk(d_vocab, d_vocab, draw=draw)
    attn.D[group["idle"]] = 1.0
    del lags["idle"]
    circuit = Circuit(
        kind="mamba1", layer=0, unit=0, reading="block", offset=offset, taps=lags, channels=parts
    )
    return model, circuit


def _mamba2(d_vocab: int, n_ctx: int, offset: int, draw: torch.Generator) -> tuple[LanguageModel, Circuit]:
    mixer = Mamba2Config(
        d_inner=N_HEADS * d_vocab,
        n_heads=N_HEADS,
        d_state=d_vocab,
        n_groups=N_HEADS,
        d_conv=D_CONV,
        conv_bias=False,
        gated_norm=False,
    )
    model = _model(d_vocab, n_ctx, 3 * d_vocab, "none", mixer)
    attn = model.blocks[0].attn
    token, output, junk = (slice(n * d_vocab, (n + 1) * d_vocab) for n in range(3))
    width = N_HEADS * d_vocab
    # in_proj's rows are z, x, B, C, dt; the convolution is over x, B, C.
    gate, x, B, C = attn.in_proj.weight[: 4 * width].view(4, N_HEADS, d_vocab, -1)
    gate[:, :, token] = _ON
    out = attn.out_proj.weight.T.view(N_HEADS, d_vocab, -1)
    lags = {"q": 0, "k": offset, "v": offset - 1}
    on = _silu(_ON)
    for head in range(N_HEADS):
        x[head, :, token] = _ON * torch.eye(d_vocab)
        own = {
            part: range(n * width + head * d_vocab, n * width + (head + 1) * d_vocab)
            for n, part in enumerate("vkq")
        }
        if head == INDUCTION_HEAD:
            B[head, :, token] = C[head, :, token] = _ON * torch.eye(d_vocab)
            out[head, :, output] = torch.eye(d_vocab) / on**4
            _taps(attn.conv1d.weight, lags, own)
        else:
            B[head, 0, token] = C[head, 0, token] = _ON
            out[head, :, junk] = _junk(d_vocab, d_vocab, draw=draw) / on**4
            _taps(attn.conv1d.weight, dict.fromkeys("qkv", 0), own)
    attn.dt_bias.fill_(_softplus_inverse(1.0))
    attn.A_log.fill_(_KEEP)
    circuit = Circuit(kind="mamba2", layer=0, unit=INDUCTION_HEAD, reading="block", offset=offset, taps=lags)
    return model, circuit


_BUILDERS = {"softmax": _softmax, "linear": _linear, "mamba1": _mamba1, "mamba2": _mamba2}
CONSTRUCTED_KINDS = tuple(_BUILDERS)

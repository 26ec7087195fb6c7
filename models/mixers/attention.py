"""What softmax and linear attention share: projections, short convolution, hooks and parameter views."""

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from kernels import causal_conv
from models.form import Form
from models.mixers.base import ALL_FORMS, Mixer, OVFactors
from models.mixers.reading import Reading
from models.mixers.taps import conv_taps

# The convolution has no quadratic form of interest: PARALLEL concerns what comes after it.
CONV_FORM = {Form.PARALLEL: "chunked", Form.CHUNKED: "chunked", Form.RECURRENT: "recurrent"}


class Attention(Mixer):
    """A mixer with explicit queries, keys and values.

    Parameters: `in_proj` maps the residual stream to queries, keys and values side by side; `conv1d`, where
    the configuration asks for it, is a causal depthwise convolution over all three, without bias and without
    activation; `out_proj` maps the heads' outputs back.
    """

    def __init__(
        self,
        d_model: int,
        *,
        n_heads: int,
        n_kv_heads: int,
        d_head: int,
        d_conv: int,
        qkv_bias: bool,
        out_bias: bool,
    ):
        super().__init__(d_model, n_heads, d_head, ("pattern", "block") if d_conv else ("pattern",))
        self.n_kv_heads = n_kv_heads
        self.d_conv = d_conv
        self._widths = (n_heads * d_head, n_kv_heads * d_head, n_kv_heads * d_head)
        channels = sum(self._widths)
        self.in_proj = nn.Linear(d_model, channels, bias=qkv_bias)
        if d_conv:
            self.conv1d = nn.Conv1d(channels, channels, d_conv, groups=channels, bias=False)
        self.out_proj = nn.Linear(n_heads * d_head, d_model, bias=out_bias)
        self._add_hooks(dict.fromkeys(("hook_q", "hook_k", "hook_v", "hook_z", "hook_result"), ALL_FORMS))
        if d_conv:
            self._add_hooks({"hook_conv": ALL_FORMS})

    def _project(
        self, x: Float[Tensor, "batch seq d_model"], form: Form, conv: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Queries, keys, values by head, and the convolution's next state. No hook but `hook_conv` fires."""
        qkv, conv = self._packed(x, form, conv)
        return *self._heads(qkv), conv

    def _packed(
        self, x: Float[Tensor, "batch seq d_model"], form: Form, conv: Tensor | None
    ) -> tuple[Float[Tensor, "batch seq channel"], Tensor | None]:
        """Queries, keys and values side by side, and the convolution's next state. `hook_conv` fires."""
        qkv = self.in_proj(x)
        if self.d_conv:
            qkv, conv = causal_conv.causal_conv(
                qkv, self.conv1d.weight[:, 0], state=conv, form=CONV_FORM[form]
            )
            qkv = self.hook_conv(qkv)
        return qkv, conv

    def _unhooked(self, x: Float[Tensor, "batch seq d_model"]) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values of a whole sequence; no hook fires."""
        qkv = self.in_proj(x)
        if self.d_conv:
            qkv, _ = causal_conv.causal_conv(qkv, self.conv1d.weight[:, 0])
        return self._heads(qkv)

    def _heads(self, qkv: Float[Tensor, "batch seq channel"]) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = qkv.split(self._widths, -1)
        return tuple(part.unflatten(-1, (-1, self.d_head)) for part in (q, k, v))

    def _output(self, z: Float[Tensor, "batch seq head d_head"]) -> Float[Tensor, "batch seq d_model"]:
        return self._written(self.hook_z(z))

    def output_from_z(self, x: Tensor, z: Tensor) -> Tensor:
        """See `Mixer.output_from_z`: x has no part in it."""
        return self._written(z)

    def _written(self, z: Float[Tensor, "batch seq head d_head"]) -> Float[Tensor, "batch seq d_model"]:
        if not self.use_attn_result:
            return self.out_proj(z.flatten(2))
        result = self.hook_result(torch.einsum("bthd,hdm->bthm", z, self.W_O))
        return result.sum(2) + self.b_O

    def _conv_state(self, batch: int, own: dict[str, Any]) -> Tensor | None:
        return torch.zeros(batch, self.d_conv - 1, sum(self._widths), **own) if self.d_conv else None

    def _conv_state_size(self) -> int:
        return max(self.d_conv - 1, 0) * sum(self._widths)

    def _values_by_head(self, v: Float[Tensor, "*lead kv_head d_head"]) -> Float[Tensor, "*lead head d_head"]:
        return v.repeat_interleave(self.n_heads // self.n_kv_heads, -2)

    def _reading(self, x: Tensor, reading: str, v: Tensor, **fields: Any) -> Reading:
        """A reading whose sources are the values, or the values' projections before the convolution."""
        if reading == "block":
            projected = self.in_proj(x)[..., -self._widths[2] :]
            taps = conv_taps(projected, self.conv1d.weight[-self._widths[2] :, 0])
            taps = self._values_by_head(taps.unflatten(-1, (-1, self.d_head)))
            fields |= {"normalisation": "contribution", "make_pattern": None}
        else:
            taps = self._values_by_head(v)[None]
        index = torch.arange(self.n_heads * self.d_head, device=x.device)
        return Reading(
            name=reading,
            unit="head",
            W_out=self.W_O,
            constant=self.b_O.expand(*x.shape[:2], self.d_model),
            z_index=index.view(self.n_heads, self.d_head),
            taps=taps,
            **fields,
        )

    @torch.no_grad()
    def reset_parameters(self, *, std: float, out_std: float, generator: torch.Generator | None) -> None:
        """Normal projections, zero biases; convolution taps uniform within 1 / sqrt(d_conv)."""
        self.in_proj.weight.normal_(0, std, generator=generator)
        self.out_proj.weight.normal_(0, out_std, generator=generator)
        for projection in (self.in_proj, self.out_proj):
            if projection.bias is not None:
                projection.bias.zero_()
        if self.d_conv:
            bound = self.d_conv**-0.5
            self.conv1d.weight.uniform_(-bound, bound, generator=generator)

    def ov_factors(self, x: Float[Tensor, "batch seq d_model"]) -> OVFactors:
        """W_V and W_O by head: exact, or with a short convolution through the sum of its taps."""
        w_v = self.W_V
        if not self.d_conv:
            return OVFactors(w_v, self.W_O, "exact")
        gain = self.conv1d.weight[-self._widths[2] :, 0].sum(-1).view(self.n_kv_heads, 1, self.d_head)
        gain = gain.repeat_interleave(self.n_heads // self.n_kv_heads, 0)
        return OVFactors(w_v * gain, self.W_O, "sum of the convolution's taps")

    # Views of the stored parameters in TransformerLens's layout; with grouped keys and values, W_K, W_V, b_K
    # and b_V are copies repeated for every query head.

    @property
    def W_Q(self) -> Float[Tensor, "head d_model d_head"]:
        """Query projection by head."""
        return self._by_head(self.in_proj.weight, 0).transpose(1, 2)

    @property
    def W_K(self) -> Float[Tensor, "head d_model d_head"]:
        """Key projection by query head."""
        return self._by_head(self.in_proj.weight, 1).transpose(1, 2)

    @property
    def W_V(self) -> Float[Tensor, "head d_model d_head"]:
        """Value projection by query head."""
        return self._by_head(self.in_proj.weight, 2).transpose(1, 2)

    @property
    def W_O(self) -> Float[Tensor, "head d_head d_model"]:
        """Output projection by head."""
        return self.out_proj.weight.T.unflatten(0, (self.n_heads, self.d_head))

    @property
    def b_Q(self) -> Float[Tensor, "head d_head"]:
        """Query bias by head."""
        return self._by_head(self._in_bias(), 0)

    @property
    def b_K(self) -> Float[Tensor, "head d_head"]:
        """Key bias by query head."""
        return self._by_head(self._in_bias(), 1)

    @property
    def b_V(self) -> Float[Tensor, "head d_head"]:
        """Value bias by query head."""
        return self._by_head(self._in_bias(), 2)

    @property
    def b_O(self) -> Float[Tensor, " d_model"]:
        """Output bias."""
        bias = self.out_proj.bias
        return self.out_proj.weight.new_zeros(self.d_model) if bias is None else bias

    def _in_bias(self) -> Tensor:
        bias = self.in_proj.bias
        return self.in_proj.weight.new_zeros(sum(self._widths)) if bias is None else bias

    def _by_head(self, packed: Tensor, part: int) -> Tensor:
        rows = packed.split(self._widths)[part].unflatten(0, (-1, self.d_head))
        repeat = self.n_heads // rows.shape[0]
        return rows if repeat == 1 else rows.repeat_interleave(repeat, 0)

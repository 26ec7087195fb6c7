"""What the two Mamba mixers share: the block around the scan, its hooks' other names, its initialisation."""

import abc
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from kernels import causal_conv
from kernels.step_size import step_size
from models.config import Mamba1Config, Mamba2Config, RopeConfig
from models.errors import ConfigError
from models.form import Form
from models.mixers.attention import CONV_FORM
from models.mixers.base import Mixer, OVFactors
from models.mixers.mamba_init import fan_in_uniform
from models.mixers.reading import Reading


class Mamba(Mixer):
    """A short convolution, a state-space scan with a skip, an output gate.

    A subclass adds the scan. `hook_write` and `hook_state` fire once per position in RECURRENT;
    `hook.ctx["position"]` tells which. `hook_gate` is SiLU(z), the factor itself.
    """

    hook_aliases = {
        "hook_ssm_B": "hook_k",
        "hook_ssm_C": "hook_q",
        "hook_ssm_dt": "hook_dt",
        "hook_ssm_decay": "hook_decay",
        "hook_ssm_write": "hook_write",
        "hook_ssm_state": "hook_state",
    }
    block_aliases = {"hook_ssm_out": "hook_attn_out"}

    def __init__(
        self,
        config: Mamba1Config | Mamba2Config,
        d_model: int,
        *,
        n_heads: int,
        d_head: int,
        d_projected: int,
        d_convolved: int,
        rope: RopeConfig | None,
    ):
        if rope is not None:
            raise ConfigError(f"rope is given to a {config.kind} mixer; accepted: None (it rotates nothing)")
        super().__init__(d_model, n_heads, d_head, ("ssm", "block"))
        self.config = config
        self.d_inner, self.d_state = config.d_inner, config.d_state
        self.in_proj = nn.Linear(d_model, d_projected, bias=config.proj_bias)
        width = config.d_conv
        self.conv1d = nn.Conv1d(
            d_convolved, d_convolved, width, groups=d_convolved, padding=width - 1, bias=config.conv_bias
        )
        self.out_proj = nn.Linear(self.d_inner, d_model, bias=config.proj_bias)

    def _convolve(
        self, x: Float[Tensor, "batch seq channel"], state: Tensor | None, form: Form
    ) -> tuple[Float[Tensor, "batch seq channel"], Float[Tensor, "batch width_1 channel"]]:
        """SiLU of the convolution, and its last inputs."""
        return causal_conv.causal_conv(
            x, self.conv1d.weight[:, 0], self.conv1d.bias, state=state, silu=True, form=CONV_FORM[form]
        )

    def _pre(self, x: Float[Tensor, "batch seq channel"]) -> Float[Tensor, "batch seq channel"]:
        """The convolution of a whole sequence before its SiLU."""
        return causal_conv.causal_conv(x, self.conv1d.weight[:, 0], self.conv1d.bias)[0]

    def _output(self, y: Float[Tensor, "batch seq d_inner"]) -> Float[Tensor, "batch seq d_model"]:
        if not self.use_attn_result:
            return self.out_proj(y)
        y = y.unflatten(-1, (self.n_heads, self.d_head))
        result = self.hook_result(torch.einsum("bthd,hdm->bthm", y, self.W_O))
        return result.sum(2) + self.b_O

    def _reset_block(self, out_std: float, generator: torch.Generator | None) -> None:
        """Input projection and convolution uniform by fan-in, output projection normal, biases 0, D = 1."""
        for weight in (self.in_proj.weight, self.conv1d.weight):
            fan_in_uniform(weight, generator=generator)
        self.out_proj.weight.normal_(0, out_std, generator=generator)
        for module in (self.in_proj, self.conv1d, self.out_proj):
            if module.bias is not None:
                module.bias.zero_()
        self.D.fill_(1)

    def _steps(self, raw: Float[Tensor, "*lead step"], bias: Float[Tensor, " step"]) -> Tensor:
        """softplus(raw + bias), in float32 or better: a rounded step size would compound in the decay."""
        return step_size(raw, bias)

    def _tap_gain(self, pre: Float[Tensor, "batch seq d_inner"]) -> Float[Tensor, " d_inner"]:
        """Mean factor of the value path from the projection to the scan: sum of taps x mean sigmoid(pre)."""
        return self.conv1d.weight[: self.d_inner, 0].sum(-1) * torch.sigmoid(pre).mean((0, 1))

    @abc.abstractmethod
    def _parts(self, x: Float[Tensor, "batch seq d_model"]) -> Any:
        """Everything that readings and `ov_factors` need, of a whole sequence and without hooks."""

    @abc.abstractmethod
    def _reading(self, parts: Any, reading: str, units: str) -> Reading:
        """`_read` of parts that are at hand."""

    @abc.abstractmethod
    def _factors(self, parts: Any) -> OVFactors:
        """`ov_factors` of parts that are at hand."""

    def _read(self, x: Tensor, reading: str, units: str) -> Reading:
        return self._reading(self._parts(x), reading, units)

    def ov_factors(self, x: Float[Tensor, "batch seq d_model"]) -> OVFactors:
        """See `Mixer.ov_factors`; means are taken over x."""
        return self._factors(self._parts(x))

    def read_all(
        self, x: Float[Tensor, "batch seq d_model"], *, units: str | None = None
    ) -> tuple[tuple[Reading, ...], OVFactors]:
        """See `Mixer.read_all`; the parts are computed once."""
        units, parts = self._checked_units(units), self._parts(x)
        return tuple(self._reading(parts, name, units) for name in self.readings), self._factors(parts)

    @property
    def W_O(self) -> Float[Tensor, "head d_head d_model"]:
        """Output projection by head (Mamba-1: by channel)."""
        return self.out_proj.weight.T.unflatten(0, (self.n_heads, self.d_head))

    @property
    def b_O(self) -> Float[Tensor, " d_model"]:
        """Output bias."""
        bias = self.out_proj.bias
        return self.out_proj.weight.new_zeros(self.d_model) if bias is None else bias

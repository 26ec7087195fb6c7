"""A part of the induction circuit held at its ideal while the rest is trained (Singh et al. 2024,
arXiv:2404.07129).

carry   every key holds the previous token. Where a short convolution makes the keys, they are read through
        one tap of 1 at lag `offset` (for Mamba: B is); else the layer's heads attend exactly to the previous
        position.
match   the layer's heads attend to position s + offset of the latest earlier copy s of each token; rows of
        tokens that did not occur before stay as they are.
copy    what the layer's heads attend to is added to the logits, `gain` nats for all the weight on a token, in
        place of what they write to the residual stream.

A clamped model is trained and measured with its clamp; what its checkpoints hold is the bare model.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from experiments.config import ClampConfig
from interp.ideal_patterns import induction_pattern, previous_token_pattern
from models.errors import ConfigError
from models.form import Form
from models.language_model import LanguageModel
from models.mixers.base import Mixer


def clamped(model: LanguageModel, config: ClampConfig | None) -> nn.Module | Callable[..., Tensor]:
    """`model(tokens, return_type="logits")` with a clamp; the model itself for None.

    Raises:
        ConfigError: a layer, head or offset that the model does not have.
    """
    return model if config is None else Clamp(model, config)


class Clamp:
    """A model with a part of one layer clamped. Hooks are attached during each call only."""

    def __init__(self, model: LanguageModel, config: ClampConfig):
        self.model, self.config = model, config
        n_layers = model.config.n_layers
        self.layer = _default_layer(model, config) if config.layer is None else config.layer
        if not 0 <= self.layer < n_layers:
            raise ConfigError(f"clamp.layer is {self.layer}; accepted: 0..{n_layers - 1}")
        self.mixer: Mixer = model.blocks[self.layer].attn
        for head in config.heads or ():
            if not 0 <= head < self.mixer.n_heads:
                raise ConfigError(f"clamp.heads has {head}; accepted: 0..{self.mixer.n_heads - 1}")
        self.by_tap = config.part == "carry" and _has_conv(self.mixer)
        if self.by_tap and config.heads is not None:
            raise ConfigError(
                f"clamp.heads is {list(config.heads)}; accepted with a convolution's taps: None (all heads)"
            )
        self.heads = list(range(self.mixer.n_heads) if config.heads is None else config.heads)
        width = self.mixer.conv1d.weight.shape[-1] if self.by_tap else None
        if width is not None and config.offset >= width:
            raise ConfigError(
                f"clamp.offset is {config.offset}; accepted: 1..{width - 1}, the convolution's lags"
            )

    def __call__(self, tokens: Int[Tensor, "batch seq"], return_type: str = "logits") -> Tensor:
        """Logits of the clamped model."""
        if return_type != "logits":
            raise ConfigError(f"return_type is {return_type!r}; accepted of a clamped model: 'logits'")
        if self.by_tap:
            with self._tap():
                return self.model(tokens)
        attended: list[Tensor] = []
        hooks = self._hooks(tokens, attended)
        named = [(f"blocks.{self.layer}.attn.{name}", hook) for name, hook in hooks.items()]
        with self.model.hooks(fwd_hooks=named, form=Form.PARALLEL):
            logits = self.model(tokens)
        if not attended:
            return logits
        copied = _shifted(F.one_hot(tokens, logits.shape[-1]).to(logits.dtype), self.config.offset - 1)
        return logits + self.config.gain * attended[0].to(logits.dtype) @ copied

    def _hooks(self, tokens: Tensor, attended: list[Tensor]) -> dict[str, Callable]:
        if self.config.part == "copy":
            return {
                "hook_pattern": lambda pattern, hook: attended.append(pattern[:, self.heads].mean(1)),
                "hook_z": self._silenced,
            }
        if self.config.part == "carry":
            ideal = previous_token_pattern(tokens.shape[1])[None].to(tokens.device)
        else:
            ideal = induction_pattern(tokens, self.config.offset)
        matched = ideal.sum(-1, keepdim=True) > 0

        def replace(pattern: Tensor, hook: object) -> Tensor:
            pattern = pattern.clone()
            own = pattern[:, self.heads]
            pattern[:, self.heads] = torch.where(matched[:, None], ideal[:, None].to(own.dtype), own)
            return pattern

        return {"hook_pattern": replace}

    def _silenced(self, z: Tensor, hook: object) -> Tensor:
        z = z.clone()
        z[:, :, self.heads] = 0
        return z

    @contextmanager
    def _tap(self) -> Iterator[None]:
        """Keys (B) as a convolution with one tap of 1 at lag `offset` would make them."""
        projected: list[Tensor] = []
        handle = self.mixer.in_proj.register_forward_hook(lambda _, args, out: projected.append(out))
        name, hook = _tap_hook(self.mixer, projected, self.config.offset)
        try:
            with self.model.hooks([(f"blocks.{self.layer}.attn.{name}", hook)], form=Form.CHUNKED):
                yield
        finally:
            handle.remove()


def _default_layer(model: LanguageModel, config: ClampConfig) -> int:
    """carry: the first layer, or where the keys of the last are made by a convolution the last; else the
    last.
    """
    last = model.config.n_layers - 1
    return 0 if config.part == "carry" and not _has_conv(model.blocks[last].attn) else last


def _has_conv(mixer: Mixer) -> bool:
    return getattr(mixer, "conv1d", None) is not None


def _shifted(x: Float[Tensor, "batch seq channel"], lag: int) -> Float[Tensor, "batch seq channel"]:
    return F.pad(x, (0, 0, lag, 0))[:, : x.shape[1]]


def _tap_hook(mixer: Mixer, projected: list[Tensor], lag: int) -> tuple[str, Callable]:
    """The point at which keys are replaced, and the hook. `projected` is filled before it fires."""
    if mixer.kind == "mamba1":
        if mixer.config.constant_bcdt:
            raise ConfigError("clamp.part is 'carry'; a Mamba-1 with constant B has no keys to clamp")

        def replace_B(B: Tensor, hook: object) -> Tensor:
            inner = _shifted(projected[-1][..., : mixer.d_inner], lag)
            return mixer.x_proj(F.silu(inner))[..., -2 * mixer.d_state : -mixer.d_state][:, :, None]

        return "hook_k", replace_B
    if mixer.kind == "mamba2":
        start = mixer.d_inner
        keys = slice(start, start + mixer.n_groups * mixer.d_state)
        # in_proj's rows begin with the gate.
        source, act = slice(keys.start + mixer.d_inner, keys.stop + mixer.d_inner), F.silu
    else:
        start = mixer.n_heads * mixer.d_head
        keys = source = slice(start, start + mixer.n_kv_heads * mixer.d_head)
        act = torch.nn.Identity()

    def replace_keys(conv: Tensor, hook: object) -> Tensor:
        conv = conv.clone()
        conv[..., keys] = act(_shifted(projected[-1][..., source], lag))
        return conv

    return "hook_conv", replace_keys

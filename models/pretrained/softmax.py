"""What the softmax architectures share: which of our options they can express, and the layout of keys."""

import torch
from torch import Tensor

from models.config import LanguageModelConfig, MLPConfig, RopeConfig, SoftmaxAttentionConfig
from models.errors import ConfigError

# Options of our mixers that no architecture written here has, and the value that means "not used".
UNUSED = {"window": None, "sink": False, "d_conv": 0, "qk_norm": False, "smeared_keys": False}


def plain_softmax(
    config: LanguageModelConfig, name: str, *, grouped: bool
) -> tuple[SoftmaxAttentionConfig, ...]:
    """The mixers, resolved, if all are softmax attention of one shape without options that `name` lacks.

    Raises:
        ConfigError: another mixer, layers that differ, or an option; names it.
    """
    kinds = sorted({mixer.kind for mixer in config.mixers})
    if kinds != ["softmax"]:
        raise ConfigError(f"{name} has softmax attention in every layer; this model has {', '.join(kinds)}")
    mixers = tuple(mixer.resolved(config.d_model) for mixer in config.mixers)
    shapes = {(m.n_heads, m.n_kv_heads, m.d_head) for m in mixers}
    if len(shapes) > 1:
        raise ConfigError(f"{name} has the same heads in every layer; this model has {sorted(shapes)}")
    for mixer in mixers:
        for option, off in UNUSED.items():
            if getattr(mixer, option) != off:
                raise ConfigError(
                    f"{name} has no {option}; this model has {option} = {getattr(mixer, option)!r}"
                )
        if not grouped and (
            mixer.n_kv_heads != mixer.n_heads or mixer.n_heads * mixer.d_head != config.d_model
        ):
            raise ConfigError(
                f"{name} has as many key heads as query heads, together as wide as the model; this model has "
                f"{mixer.n_heads}, {mixer.n_kv_heads} and d_head = {mixer.d_head} at d_model = "
                f"{config.d_model}"
            )
    if config.unembed_bias:
        raise ConfigError(f"{name} has no unembedding bias; this model has one")
    return mixers


def usual_scale(mixers: tuple[SoftmaxAttentionConfig, ...], name: str) -> None:
    """Raises ConfigError where attention is not scaled with 1/sqrt(d_head)."""
    for mixer in mixers:
        if mixer.scale not in (None, mixer.d_head**-0.5):
            raise ConfigError(
                f"{name} scales attention with 1/sqrt(d_head); this model has scale = {mixer.scale}"
            )


def attention_only_mlp(*, act: str, gated: bool) -> MLPConfig:
    """The MLP that stands for none: one unit whose weights are written as zeros, so that it adds 0."""
    return MLPConfig(d_mlp=1, act=act, gated=gated, bias=False)


def half_layout(weight: Tensor, rope: RopeConfig, n_heads: int, n_kv_heads: int, d_head: int) -> Tensor:
    """Rows of `in_proj` (weight or bias) of a model with adjacent rotary pairs, in the order for halves.

    The same permutation of the entries of each query and key head: the patterns stay equal.
    """
    turned = rope.rotary_dim or d_head
    order = torch.cat((torch.arange(0, turned, 2), torch.arange(1, turned, 2), torch.arange(turned, d_head)))
    heads = weight.unflatten(0, (n_heads + 2 * n_kv_heads, d_head))
    moved = heads[: n_heads + n_kv_heads, order]
    return torch.cat((moved, heads[n_heads + n_kv_heads :])).flatten(0, 1)

"""Rotary positions between Hugging Face's keys and `RopeConfig`."""

import math
from typing import Any

from models.config import RopeConfig
from models.errors import ConfigError
from models.pretrained.keys import Keys

SCALING_TYPES = ("default", "linear", "dynamic", "llama3", "yarn")


def read_rope(keys: Keys, d_head: int, n_ctx: int, *, partial: float = 1.0) -> RopeConfig:
    """The rotary configuration that `rope_parameters` (transformers 5) or the older keys describe.

    Args:
        partial: Share of a head that is turned where the file does not say.

    Raises:
        ConfigError: a scaling type that is not read here, or one that lacks a value.
    """
    given = keys.get("rope_parameters", None) or keys.get("rope_scaling", {})
    if not isinstance(given, dict) or any(isinstance(value, dict) for value in given.values()):
        raise keys.refused("rope_parameters", "one set of values for all layers")
    inner = Keys({**keys.values, **given}, f"{keys.where}: rope_parameters")
    kind = inner.get("rope_type", "default", also=("type",))
    if kind not in SCALING_TYPES:
        raise ConfigError(f"{keys.where}: rope type is {kind!r}; accepted: {', '.join(SCALING_TYPES)}")
    share = inner.number("partial_rotary_factor", partial, also=("rotary_pct",))
    rotary_dim = int(d_head * share)
    return RopeConfig(
        base=float(inner.number("rope_theta", 10000.0, also=("rotary_emb_base",))),
        rotary_dim=None if rotary_dim == d_head else rotary_dim,
        scaling=None if kind == "default" else _scaling(kind, inner, n_ctx),
    )


def _scaling(kind: str, keys: Keys, n_ctx: int) -> dict[str, Any]:
    if kind == "linear":
        return {"type": "linear", "factor": float(keys.number("factor"))}
    if kind == "dynamic":
        # Up to its own context the model is unscaled, whatever an original length says.
        return {"type": "dynamic", "factor": float(keys.number("factor")), "original_length": n_ctx}
    length = keys.integer("original_max_position_embeddings", n_ctx)
    if kind == "llama3":
        names = ("factor", "low_freq_factor", "high_freq_factor")
        return {"type": "llama3", "original_length": length, **{n: float(keys.number(n)) for n in names}}
    factor = float(keys.number("factor", n_ctx / length))
    return {
        "type": "yarn",
        "factor": factor,
        "original_length": length,
        "beta_fast": float(keys.number("beta_fast", 32.0)),
        "beta_slow": float(keys.number("beta_slow", 1.0)),
        "ramp": "index",
        "truncate": keys.flag("truncate", True),
        "attention_factor": _yarn_factor(keys, factor),
    }


def _yarn_factor(keys: Keys, factor: float) -> float:
    """What cos and sin are multiplied with: given, or from the two `mscale` keys, or 0.1 ln(factor) + 1."""
    given = keys.number("attention_factor", None)
    if given is not None:
        return float(given)

    def grown(by: float) -> float:
        return 0.1 * by * math.log(factor) + 1.0 if factor > 1 else 1.0

    above, below = keys.number("mscale", 0.0), keys.number("mscale_all_dim", 0.0)
    return grown(above) / grown(below) if above and below else grown(1.0)


def write_rope(rope: RopeConfig, d_head: int) -> dict[str, Any]:
    """`rope_parameters` for a rotary configuration of layout "half".

    Raises:
        ConfigError: YaRN blended by rotations, which Hugging Face's models do not have.
    """
    values: dict[str, Any] = {"rope_type": "default", "rope_theta": rope.base}
    if rope.rotary_dim not in (None, d_head):
        values["partial_rotary_factor"] = rope.rotary_dim / d_head
    if rope.scaling is None:
        return values
    scaling = dict(rope.scaling)
    if scaling["type"] == "yarn" and scaling.pop("ramp", "index") != "index":
        raise ConfigError("YaRN with ramp 'rotations' has no Hugging Face form; accepted: ramp 'index'")
    values["rope_type"] = scaling.pop("type")
    length = scaling.pop("original_length", None)
    if length is not None and values["rope_type"] != "dynamic":
        values["original_max_position_embeddings"] = length
    return values | {key: value for key, value in scaling.items() if value is not None}

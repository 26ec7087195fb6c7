"""The configuration of rotary positions."""

import math
from dataclasses import dataclass, field
from typing import Any, Literal

from models.errors import ConfigError, closest
from models.plain_config import LARGEST, PlainConfig

# The keys of each kind of RoPE scaling: required, optional.
ROPE_SCALING = {
    "linear": (("factor",), ()),
    "dynamic": (("factor", "original_length"), ()),
    "llama3": (("factor", "low_freq_factor", "high_freq_factor", "original_length"), ()),
    "yarn": (
        ("factor", "original_length"),
        ("beta_fast", "beta_slow", "ramp", "truncate", "attention_factor"),
    ),
}
# Keys whose values are numbers above 0.
POSITIVE = ("factor", "low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow", "attention_factor")
# The key that has to be below another one, and the values that yarn takes where they are not given.
ASCENDING = {
    "llama3": ("low_freq_factor", "high_freq_factor", {}),
    "yarn": ("beta_slow", "beta_fast", {"beta_slow": 1.0, "beta_fast": 32.0}),
}


@dataclass(frozen=True, kw_only=True)
class RopeConfig(PlainConfig):
    """Rotary positions.

    `rotary_dim` None turns the whole head. `layout` says which entries form a pair: "half" (n, n +
    rotary_dim/2) or "adjacent" (2n, 2n+1). `scaling` is None or a dictionary with "type": "linear"
    (factor) · "dynamic" (factor, original_length) · "llama3" (factor, low_freq_factor,
    high_freq_factor, original_length) · "yarn" (factor, original_length; optional beta_fast, beta_slow, ramp
    "index"|"rotations", truncate, attention_factor).
    """

    base: float = 10000.0
    rotary_dim: int | None = None
    layout: Literal["half", "adjacent"] = "half"
    scaling: dict[str, Any] | None = field(default=None, hash=False)

    def _check(self) -> None:
        self._require(self.base > 1, "base", "a number above 1")
        self._require(
            self.rotary_dim is None or (0 < self.rotary_dim <= LARGEST and self.rotary_dim % 2 == 0),
            "rotary_dim",
            "a positive even number",
        )
        if self.scaling is not None:
            _check_scaling(self.scaling)


def _check_scaling(scaling: dict[str, Any]) -> None:
    kind = scaling.get("type")
    if not isinstance(kind, str) or kind not in ROPE_SCALING:
        raise ConfigError(f"RopeConfig.scaling has type {kind!r}; accepted: {', '.join(ROPE_SCALING)}")
    required, optional = ROPE_SCALING[kind]
    for key in scaling:
        if key not in ("type", *required, *optional):
            raise ConfigError(
                f"RopeConfig.scaling of type {kind!r} has no key {key!r}"
                f"{closest(str(key), required + optional)}"
            )
    for key in required:
        if key not in scaling:
            raise ConfigError(f"RopeConfig.scaling of type {kind!r} needs the key {key!r}")
    for key, value in scaling.items():
        _check_value(kind, key, value)
    if kind in ASCENDING:
        low, high, absent = ASCENDING[kind]
        values = {**absent, **scaling}
        if values[low] >= values[high]:
            raise ConfigError(
                f"RopeConfig.scaling of type {kind!r} has {low} = {values[low]!r}; accepted: a number "
                f"below {high} = {values[high]!r}"
            )


def _check_value(kind: str, key: str, value: Any) -> None:
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if key in POSITIVE:
        absent = key == "attention_factor" and value is None
        fits, accepted = absent or number and 0 < value < math.inf, "a finite number above 0"
    elif key == "original_length":
        fits, accepted = type(value) is int and 0 < value <= LARGEST, "a positive whole number"
    elif key == "truncate":
        fits, accepted = isinstance(value, bool), "true or false"
    else:
        return
    if not fits:
        raise ConfigError(
            f"RopeConfig.scaling of type {kind!r} has {key} = {value!r}; accepted: {accepted}"
        )

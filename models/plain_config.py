"""The base of all configurations: types checked on construction, an exact round trip through JSON."""

import dataclasses
import functools
import sys
import types
import typing
from typing import Any, Literal, Self

from models.errors import ConfigError, closest

# The largest width or count: far above any memory, and three times it is still a size of 64 bits.
LARGEST = 2**48


class PlainConfig:
    """Type checks on construction, and the round trip."""

    def __post_init__(self):
        for name, kind in _hints(type(self)).items():
            object.__setattr__(
                self, name, _checked(getattr(self, name), kind, f"{type(self).__name__}.{name}")
            )
        self._check()

    def _check(self) -> None:
        """Raises ConfigError where values are well typed but do not fit together."""

    def _require(self, condition: bool, name: str, accepted: str) -> None:
        if not condition:
            raise ConfigError(
                f"{type(self).__name__}.{name} is {getattr(self, name)!r}; accepted: {accepted}"
            )

    def _require_sizes(self, *names: str) -> None:
        """Widths and counts: 1 to LARGEST, or None where the field may be None."""
        for name in names:
            value, optional = getattr(self, name), type(None) in typing.get_args(_hints(type(self))[name])
            accepted = f"a positive number up to {LARGEST}" + (" or None" if optional else "")
            self._require(value is None or 0 < value <= LARGEST, name, accepted)

    def to_dict(self) -> dict[str, Any]:
        """The configuration as JSON values (tuples become lists)."""
        return {f.name: _plain(getattr(self, f.name)) for f in dataclasses.fields(self)}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Self:
        """The configuration that `to_dict` gave these values for.

        Raises:
            ConfigError: an unknown key (with the closest matches), a missing key, or a value that is not
            accepted.
        """
        if not isinstance(values, dict):
            raise ConfigError(f"{cls.__name__} needs a dictionary, not {type(values).__name__}: {values!r}")
        known = {f.name: f for f in dataclasses.fields(cls)}
        for key in values:
            if key not in known:
                raise ConfigError(f"{cls.__name__} has no key {key!r}{closest(str(key), known)}")
        for name, f in known.items():
            required = f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING
            if required and name not in values:
                raise ConfigError(f"{cls.__name__} needs the key {name!r}")
        return cls(**values)

    def replace(self, **changes) -> Self:
        """A copy with some fields changed."""
        return type(self).from_dict({**self.to_dict(), **{k: _plain(v) for k, v in changes.items()}})


@functools.cache
def _hints(cls: type) -> dict[str, Any]:
    hints = typing.get_type_hints(cls)
    return {f.name: hints[f.name] for f in dataclasses.fields(cls)}


def _checked(value: Any, kind: Any, name: str) -> Any:
    """`value` as the annotated type: int -> float and list -> tuple are the only conversions."""
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if kind is Any:
        return value
    if origin in (types.UnionType, typing.Union):
        if value is None and type(None) in args:
            return None
        return _checked(value, next(a for a in args if a is not type(None)), name)
    if origin is Literal:
        if value not in args:
            raise ConfigError(f"{name} is {value!r}; accepted: {', '.join(map(repr, args))}")
        return value
    if origin is tuple:
        if not isinstance(value, (list, tuple)) or (args[-1] is not Ellipsis and len(value) != len(args)):
            raise ConfigError(
                f"{name} is {value!r}; accepted: a list"
                + ("" if args[-1] is Ellipsis else f" of {len(args)}")
            )
        kinds = [args[0]] * len(value) if args[-1] is Ellipsis else args
        return tuple(
            _checked(v, k, f"{name}[{i}]") for i, (v, k) in enumerate(zip(value, kinds, strict=True))
        )
    if isinstance(kind, type) and issubclass(kind, PlainConfig):
        if isinstance(value, dict):
            return kind.from_dict(value)
        if isinstance(value, kind):
            return value
    elif origin is dict:
        if isinstance(value, dict):
            return dict(value)
    elif kind is float and isinstance(value, (int, float)) and not isinstance(value, bool):
        # An integer may be too large for a float.
        if abs(value) <= sys.float_info.max:
            return float(value)
    elif type(value) is kind:
        return value
    wanted = "a finite number" if kind is float else getattr(kind, "__name__", str(kind))
    if isinstance(kind, type) and issubclass(kind, PlainConfig) and (some := kind.__subclasses__()):
        wanted = f"a {', '.join(one.__name__ for one in some[:-1])} or {some[-1].__name__}"
    raise ConfigError(f"{name} is {value!r}; accepted: {wanted}")


def _plain(value: Any) -> Any:
    if isinstance(value, PlainConfig):
        return value.to_dict()
    if isinstance(value, (list, tuple)):
        return [_plain(v) for v in value]
    return dict(value) if isinstance(value, dict) else value

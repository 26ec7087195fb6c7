"""The three forms in which every mixer can be evaluated; they agree to rounding."""

from enum import StrEnum

from models.errors import ConfigError


class Form(StrEnum):
    """How a mixer is evaluated. Always an explicit argument: no length and no device switches it.

    PARALLEL builds the implied attention and multiplies it with the values: quadratic, readable.
    CHUNKED is linear in time, for training. RECURRENT goes token by token from a state of fixed size.
    """

    PARALLEL = "parallel"
    CHUNKED = "chunked"
    RECURRENT = "recurrent"

    @classmethod
    def of(cls, value: "Form | str") -> "Form":
        """The form that a name means.

        Raises:
            ConfigError: no form has this name.
        """
        # torch.compile (2.11) cannot call an enumeration's class.
        if isinstance(value, Form):
            return value
        try:
            return cls(value)
        except ValueError:
            accepted = ", ".join(f.value for f in cls)
            raise ConfigError(f"form is {value!r}; accepted: {accepted}") from None

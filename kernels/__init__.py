"""Sequence operators as pure tensor functions: one file per operator.

Each file holds, in this order: pattern (implied attention), parallel (= pattern @ values), chunked,
recurrent and step, and the public operator. `KernelError` is the one error they raise.
"""


class KernelError(ValueError):
    """A tensor or option that an operator does not accept: names it, its value and what is accepted."""

"""The mixer contract: what every sequence mixer of a language model offers, whatever its kind.

A mixer turns [batch seq d_model] into the same shape and can be evaluated in three forms that agree
(`models.form`). The form is an explicit argument and never switches by itself.
"""

import abc
from collections.abc import Mapping
from typing import Any, ClassVar, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn

from models.errors import ConfigError, closest
from models.form import Form
from models.lens import HookPoint
from models.mixers.reading import Reading
from models.whole import is_whole

ALL_FORMS = frozenset(Form)
PARALLEL_ONLY = frozenset({Form.PARALLEL})
RECURRENT_ONLY = frozenset({Form.RECURRENT})


class OVFactors(NamedTuple):
    """What a unit does to a source's residual stream, as W_V[unit] @ W_O[unit], and how exact that is."""

    W_V: Float[Tensor, "unit d_model d_head"]
    W_O: Float[Tensor, "unit d_head d_model"]
    approximation: str


class Mixer(nn.Module, abc.ABC):
    """Base of all mixers.

    Class and instance attributes:
        kind: name in the registry and in the configuration.
        state_type: class of the state that `prefill` and `step` take and return.
        d_model, n_heads, d_head: widths. `n_heads` and `d_head` are those of `hook_z` and of
        `implied_attention`
            (Mamba-1: one head per channel, d_head 1).
        readings: names that `read` accepts, the default first.
        hook_forms: hook point's name -> the forms in which it fires.
        hook_aliases: another name -> the hook point of this mixer that it stands for.
        block_aliases: the same for points that belong to the block around the mixer.
        use_attn_result: while true, `hook_result` fires and its sum over heads is the output.
    """

    kind: ClassVar[str]
    state_type: ClassVar[type]
    hook_aliases: ClassVar[Mapping[str, str]] = {}
    block_aliases: ClassVar[Mapping[str, str]] = {}

    def __init__(self, d_model: int, n_heads: int, d_head: int, readings: tuple[str, ...]):
        super().__init__()
        self.d_model = d_model
        self.n_heads = n_heads
        self.d_head = d_head
        self.readings = readings
        self.hook_forms: dict[str, frozenset[Form]] = {}
        self.use_attn_result = False

    def _add_hooks(self, forms: Mapping[str, frozenset[Form]]) -> None:
        """Create the hook points and note in which forms each fires."""
        for name, where in forms.items():
            setattr(self, name, HookPoint())
            self.hook_forms[name] = where

    @abc.abstractmethod
    def evaluate(
        self, x: Float[Tensor, "batch seq d_model"], form: Form, state: Any | None
    ) -> tuple[Float[Tensor, "batch seq d_model"], Any]:
        """Output and the state after the last position, from `state` (None: the start of a sequence)."""

    def forward(
        self, x: Float[Tensor, "batch seq d_model"], form: Form = Form.CHUNKED, state: Any | None = None
    ) -> Float[Tensor, "batch seq d_model"]:
        """The mixer's output in the chosen form."""
        return self.evaluate(x, Form.of(form), self._checked(state))[0]

    def prefill(
        self, x: Float[Tensor, "batch seq d_model"], state: Any | None, form: Form = Form.CHUNKED
    ) -> tuple[Float[Tensor, "batch seq d_model"], Any]:
        """Output of a piece of a sequence and the state that it leaves, to be continued in any form."""
        return self.evaluate(x, Form.of(form), self._checked(state))

    def step(
        self, x: Float[Tensor, "batch d_model"], state: Any
    ) -> tuple[Float[Tensor, "batch d_model"], Any]:
        """One more position in the recurrent form."""
        y, state = self.evaluate(x[:, None], Form.RECURRENT, self._checked(state))
        return y[:, 0], state

    def _checked(self, state: Any | None) -> Any | None:
        """The state, refused where it is another mixer's."""
        if state is not None and not isinstance(state, self.state_type):
            raise ConfigError(
                f"a {self.kind} mixer's state is a {type(state).__name__}; accepted: None or a "
                f"{self.state_type.__name__}, from init_state, prefill or step"
            )
        return state

    @abc.abstractmethod
    def implied_attention(
        self, x: Float[Tensor, "batch seq d_model"]
    ) -> Float[Tensor, "batch head dest=seq src=seq"]:
        """What PARALLEL multiplies with (before hooks). Signed and unnormalised for state-space mixers."""

    @abc.abstractmethod
    def init_state(
        self, batch: int, *, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> Any:
        """The state at the start of a sequence; by default of the parameters' device and dtype."""

    @abc.abstractmethod
    def state_size(self) -> int:
        """Numbers that the state of one sequence holds (softmax: at the full context length)."""

    @abc.abstractmethod
    def reset_parameters(self, *, std: float, out_std: float, generator: torch.Generator | None) -> None:
        """Draw the weights. `std`: projections from the residual stream, `out_std`: the output projection."""

    @abc.abstractmethod
    def _read(self, x: Float[Tensor, "batch seq d_model"], reading: str, units: str) -> Reading:
        """`read` after its arguments were checked."""

    # Names of units that `read` accepts, the default first.
    unit_names: ClassVar[tuple[str, ...]] = ("head",)

    def read(
        self, x: Float[Tensor, "batch seq d_model"], reading: str | None = None, *, units: str | None = None
    ) -> Reading:
        """What each source position contributed to each destination, exactly, for the sequence x alone.

        Args:
            x: The mixer's input (after the block's norm); no hook fires and no state is carried in.
            reading: One of `readings`; None is the first.
            units: One of `unit_names`; None is the first. "cluster:K" stands for K clusters of channels.

        Raises:
            ConfigError: a reading or a kind of unit that this mixer does not have.
        """
        reading = self.readings[0] if reading is None else reading
        if reading not in self.readings:
            raise ConfigError(
                f"a {self.kind} mixer has no reading {reading!r}{closest(reading, self.readings)}"
            )
        return self._read(x, reading, self._checked_units(units))

    def _checked_units(self, units: str | None) -> str:
        units = self.unit_names[0] if units is None else units
        if units.split(":")[0] not in {name.split(":")[0] for name in self.unit_names}:
            raise ConfigError(
                f"a {self.kind} mixer has no units {units!r}; accepted: {', '.join(self.unit_names)}"
            )
        return units

    @abc.abstractmethod
    def output_from_z(
        self,
        x: Float[Tensor, "batch seq d_model"],
        z: Float[Tensor, "copies_batch seq head d_head"],
    ) -> Float[Tensor, "copies_batch seq d_model"]:
        """The output where `hook_z` gives z: only what comes after that point is computed.

        `z` may hold several variants of the batch, one after the other, of one and the same input x.
        """

    def read_all(
        self, x: Float[Tensor, "batch seq d_model"], *, units: str | None = None
    ) -> tuple[tuple[Reading, ...], OVFactors]:
        """All of `readings` and `ov_factors`, of one x; errors as `read`."""
        return tuple(self.read(x, name, units=units) for name in self.readings), self.ov_factors(x)

    @abc.abstractmethod
    def ov_factors(self, x: Float[Tensor, "batch seq d_model"]) -> OVFactors:
        """The value path of each unit as a product of two matrices, for eigenvalue copying scores.

        Where a gate stands in the path, its mean over x is taken, and `approximation` says so.
        """

    def _own(
        self, batch: int, device: torch.device | str | None, dtype: torch.dtype | None
    ) -> dict[str, Any]:
        """Device and dtype of a new state of `batch` sequences: those given, else the parameters'."""
        if not is_whole(batch) or batch < 1:
            raise ConfigError(f"batch is {batch!r}; accepted: a positive whole number of sequences")
        parameter = next(self.parameters())
        return {"device": device or parameter.device, "dtype": dtype or parameter.dtype}

    # Parameter views in TransformerLens's layout.

    @property
    @abc.abstractmethod
    def W_O(self) -> Float[Tensor, "head d_head d_model"]:
        """Output projection by head: a view of the stored parameter."""

    @property
    @abc.abstractmethod
    def b_O(self) -> Float[Tensor, " d_model"]:
        """Bias of the output projection (zeros where the mixer has none)."""

"""The table that drives every operator test: the case files of tests/cases/mixers, and random inputs of any
length.

Adding an operator = one entry in `experiments.case_operators` (its case files) and one in `RANDOM` (its
random inputs).
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from experiments.mixer_cases import MixerCase, load_case
from kernels import causal_conv, delta_rule, s4d, selective_scan, softmax_attention, ssd
from kernels import gated_linear_attention as linear

FOLDER = Path(__file__).parent / "cases" / "mixers"
PATHS = sorted(FOLDER.glob("*.safetensors"))
INDEX = {entry["case"]: entry for entry in json.loads((FOLDER / "index.json").read_text())["cases"]}


def load(name: str) -> MixerCase:
    """A case by its name."""
    return load_case(FOLDER / f"{name}.safetensors")


@dataclass(frozen=True, kw_only=True)
class RandomOperator:
    """An operator on random inputs.

    Attributes:
        inputs: Length and generator to inputs by name, float64.
        run: Inputs, form and state (None: the zero state) to (output, tuple of state tensors).
        sequence: Names of the inputs that have a sequence axis (axis 1).
        state: Shapes of the state's tensors.
    """

    inputs: Callable[[int, torch.Generator], dict[str, Tensor]]
    run: Callable[[dict[str, Tensor], str, tuple[Tensor, ...] | None], tuple[Tensor, tuple[Tensor, ...]]]
    sequence: str
    state: tuple[tuple[int, ...], ...]
    complex_state: bool = False


def _normal(generator: torch.Generator, **shapes: tuple[int, ...]) -> dict[str, Tensor]:
    return {
        name: torch.randn(shape, generator=generator, dtype=torch.float64) for name, shape in shapes.items()
    }


def _linear(
    log_decay: str | None, normalise: bool, groups: int = 3, weighted: bool = False
) -> RandomOperator:
    """Batch 2, 3 heads (6 where grouped), d_k 4, d_v 5."""
    heads = 3 if groups == 3 else 6
    decays = {
        "head": lambda t: (heads,),
        "step": lambda t: (2, t, heads),
        "channel": lambda t: (2, t, heads, 4),
    }

    def inputs(seq: int, g: torch.Generator) -> dict[str, Tensor]:
        x = _normal(g, q=(2, seq, groups, 4), k=(2, seq, groups, 4), v=(2, seq, heads, 5))
        if log_decay is not None:
            x |= {"log_decay": -_normal(g, a=decays[log_decay](seq))["a"].exp()}
        return x | ({"k_weight": _normal(g, w=(2, seq, heads))["w"].exp()} if weighted else {})

    def run(
        x: dict[str, Tensor], form: str, state: tuple[Tensor, ...] | None
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        q, k = (linear.elu_plus_one(x[name]) if normalise else x[name] for name in "qk")
        options: dict[str, Any] = {name: x.get(name) for name in ("log_decay", "k_weight")}
        before = None if state is None else linear.LinearState(s=state[0], z=state[1] if normalise else None)
        output, after = linear.gated_linear_attention(
            q, k, x["v"], scale=0.7, normalise=normalise, eps=1e-3, state=before, form=form, **options
        )
        return output, (after.s, after.z) if normalise else (after.s,)

    state = ((2, heads, 4, 5), (2, heads, 4)) if normalise else ((2, heads, 4, 5),)
    stepwise = "q k v k_weight" + (" log_decay" if log_decay in ("step", "channel") else "")
    return RandomOperator(inputs=inputs, run=run, sequence=stepwise, state=state)


def _delta(gated: bool) -> RandomOperator:
    def inputs(seq: int, g: torch.Generator) -> dict[str, Tensor]:
        x = _normal(
            g, q=(2, seq, 3, 4), k=(2, seq, 3, 4), v=(2, seq, 3, 5), beta=(2, seq, 3), log_decay=(2, seq, 3)
        )
        x |= {"k": torch.nn.functional.normalize(x["k"], dim=-1), "beta": 2 * torch.sigmoid(x["beta"])}
        return {name: t for name, t in x.items() if name != "log_decay"} | (
            {"log_decay": -x["log_decay"].exp()} if gated else {}
        )

    def run(
        x: dict[str, Tensor], form: str, state: tuple[Tensor, ...] | None
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        before = None if state is None else state[0]
        output, after = delta_rule.delta_rule(
            x["q"],
            x["k"],
            x["v"],
            x["beta"],
            log_decay=x.get("log_decay"),
            scale=0.7,
            state=before,
            form=form,
        )
        return output, (after,)

    return RandomOperator(inputs=inputs, run=run, sequence="q k v beta log_decay", state=((2, 3, 4, 5),))


def _scan(gate: bool) -> RandomOperator:
    def inputs(seq: int, g: torch.Generator) -> dict[str, Tensor]:
        x = _normal(g, u=(2, seq, 5), dt_raw=(2, seq, 5), A_log=(5, 3), B=(2, seq, 3), C=(2, seq, 3))
        return x | (_normal(g, D=(5,), z=(2, seq, 5)) if gate else {})

    def run(
        x: dict[str, Tensor], form: str, state: tuple[Tensor, ...] | None
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        dt = selective_scan.softplus_dt(x["dt_raw"])
        options = {
            "D": x.get("D"),
            "z": x.get("z"),
            "state": None if state is None else state[0],
            "form": form,
        }
        output, after = selective_scan.selective_scan(x["u"], dt, x["A_log"], x["B"], x["C"], **options)
        return output, (after,)

    return RandomOperator(inputs=inputs, run=run, sequence="u dt_raw B C z", state=((2, 5, 3),))


def _ssd() -> RandomOperator:
    def inputs(seq: int, g: torch.Generator) -> dict[str, Tensor]:
        return _normal(
            g, x=(2, seq, 4, 3), dt_raw=(2, seq, 4), A_log=(4,), B=(2, seq, 2, 5), C=(2, seq, 2, 5), D=(4,)
        )

    def run(
        x: dict[str, Tensor], form: str, state: tuple[Tensor, ...] | None
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        dt = selective_scan.softplus_dt(x["dt_raw"])
        before = None if state is None else state[0]
        output, after = ssd.ssd(x["x"], dt, x["A_log"], x["B"], x["C"], D=x["D"], state=before, form=form)
        return output, (after,)

    return RandomOperator(inputs=inputs, run=run, sequence="x dt_raw B C", state=((2, 4, 3, 5),))


def _conv(silu: bool) -> RandomOperator:
    def inputs(seq: int, g: torch.Generator) -> dict[str, Tensor]:
        return _normal(g, x=(2, seq, 5), weight=(5, 4), bias=(5,))

    def run(
        x: dict[str, Tensor], form: str, state: tuple[Tensor, ...] | None
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        before = None if state is None else state[0]
        output, after = causal_conv.causal_conv(
            x["x"], x["weight"], x["bias"], state=before, silu=silu, form=form
        )
        return output, (after,)

    return RandomOperator(inputs=inputs, run=run, sequence="x", state=((2, 3, 5),))


def _s4d() -> RandomOperator:
    def inputs(seq: int, g: torch.Generator) -> dict[str, Tensor]:
        names = ("rate", "turn", "B_re", "B_im", "C_re", "C_im")
        return _normal(g, u=(2, seq, 4), log_dt=(4,), D=(4,), **dict.fromkeys(names, (4, 3)))

    def run(
        x: dict[str, Tensor], form: str, state: tuple[Tensor, ...] | None
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        A = torch.complex(-x["rate"].exp(), x["turn"])
        B, C = (torch.complex(x[f"{name}_re"], x[f"{name}_im"]) for name in "BC")
        before = None if state is None else state[0]
        output, after = s4d.s4d(x["u"], x["log_dt"] - 2, A, B, C, D=x["D"], state=before, form=form)
        return output, (after,)

    return RandomOperator(inputs=inputs, run=run, sequence="u", state=((2, 4, 3),), complex_state=True)


RANDOM: dict[str, RandomOperator] = {
    "linear": _linear(None, False),
    "linear_normalised": _linear(None, True),
    "linear_normalised_groups_weighted": _linear(None, True, groups=2, weighted=True),
    "retention": _linear("head", False),
    "scalar_decay": _linear("step", False),
    "scalar_decay_normalised_groups_weighted": _linear("step", True, groups=2, weighted=True),
    "channel_decay": _linear("channel", False),
    "channel_decay_normalised_weighted": _linear("channel", True, weighted=True),
    "ssd": _ssd(),
    "delta_rule": _delta(False),
    "gated_delta_rule": _delta(True),
    "selective_scan": _scan(False),
    "selective_scan_gate": _scan(True),
    "causal_conv": _conv(False),
    "causal_conv_silu": _conv(True),
    "s4d": _s4d(),
}


def random_softmax(
    seq: int, *, sink: bool = False, heads: int = 4, kv_heads: int = 2, d_v: int = 5
) -> dict[str, Tensor]:
    """q, k, v (and a sink) of batch 2, d_head 5, float64; softmax's state is its cache, so it stands
    apart.
    """
    g = torch.Generator().manual_seed(seq)
    x = _normal(g, q=(2, seq, heads, 5), k=(2, seq, kv_heads, 5), v=(2, seq, kv_heads, d_v))
    return x | (_normal(g, sink=(heads,)) if sink else {})


SOFTMAX_FORMS = {
    "parallel": softmax_attention.parallel,
    "chunked": softmax_attention.chunked,
    "recurrent": softmax_attention.recurrent,
}

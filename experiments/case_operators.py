"""How each operator of the case files is run with this project's operators and mixers.

One class an operator: `run` gives the output and the state of a piece of the sequence in one form, `others`
what else a file may hold. `flags` are those that it honours; a case with another one is not supported
rather than run without it.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from kernels import causal_conv, delta_rule, s4d, selective_scan, softmax_attention, ssd
from kernels import gated_linear_attention as linear
from models.config import Mamba1Config, RopeConfig
from models.form import Form
from models.mixers.mamba1 import Mamba1, Mamba1State
from models.positions import Rope

Inputs = dict[str, Tensor]
State = dict[str, Any]
Result = tuple[Tensor, State]


class UnsupportedCase(ValueError):
    """The case names an operator, flag, input or format that the project does not have."""


class Operator:
    """One kind of case. Its inputs are named as in the files, without "in."."""

    inputs: frozenset[str] = frozenset()
    flags: frozenset[str] = frozenset()
    # The input that the output is linear in, apart from the initial state.
    values = "v"
    forms = ("parallel", "chunked", "recurrent")

    def leaves(self, inputs: Inputs, flags: dict) -> Inputs:
        """The tensors that gradients are taken with respect to; reshaped where the project's layout
        differs.
        """
        return {name: tensor.clone().requires_grad_() for name, tensor in inputs.items()}

    def check(self, inputs: Inputs, flags: dict) -> None:
        """Raise UnsupportedCase for an input or the value of a flag that this project does not have."""
        unknown = sorted(set(inputs) - self.inputs)
        if unknown:
            raise UnsupportedCase(f"input {unknown[0]!r}")

    def start(self, x: Inputs) -> State | None:
        """The case's initial state."""
        return None if "state0" not in x else {"state": x["state0"]}

    def run(self, x: Inputs, flags: dict, form: str, state: State | None, position: int) -> Result:
        raise NotImplementedError

    def others(self, x: Inputs, flags: dict) -> Iterator[tuple[str, Tensor]]:
        """Further results by name: the implied attention, the part that comes from the initial state."""
        if self.start(x) is not None:
            silent = {**x, self.values: torch.zeros_like(x[self.values])}
            yield "o_from_state0", self.run(silent, flags, "chunked", self.start(x), 0)[0]


class SoftmaxAttention(Operator):
    inputs = frozenset("q k v sink".split())
    flags = frozenset({"scale", "n_heads", "n_kv_heads", "window", "sink", "rope"})

    def _options(self, x: Inputs, flags: dict) -> dict[str, Any]:
        return {"scale": flags["scale"], "window": flags["window"], "sink": x.get("sink")}

    def _rotated(self, x: Inputs, flags: dict, position: int) -> tuple[Tensor, Tensor]:
        if flags["rope"] is None:
            return x["q"], x["k"]
        rope = Rope(rope_config(flags["rope"]), x["q"].shape[-1])
        offset = flags["rope"]["position_offset"] + position
        return rope(x["q"], offset), rope(x["k"], offset)

    def run(self, x: Inputs, flags: dict, form: str, state: State | None, position: int) -> Result:
        (q, k), v, options = self._rotated(x, flags, position), x["v"], self._options(x, flags)
        kept = softmax_attention.empty_state(
            k.shape[0], *k.shape[2:], v.shape[3], dtype=k.dtype, device=k.device
        )
        kept = kept if state is None else state["cache"]
        if form != "recurrent":
            keys, values = torch.cat([kept.k, k], dim=1), torch.cat([kept.v, v], dim=1)
            output = softmax_attention.softmax_attention(q, keys, values, form=form, **options)
            return output, {"cache": softmax_attention.step(q, k, v, kept, **options)[1]}
        outputs = []
        for t in range(q.shape[1]):
            at = slice(t, t + 1)
            output, kept = softmax_attention.step(q[:, at], k[:, at], v[:, at], kept, **options)
            outputs.append(output)
        return torch.cat(outputs, dim=1), {"cache": kept}

    def others(self, x: Inputs, flags: dict) -> Iterator[tuple[str, Tensor]]:
        q, k = self._rotated(x, flags, 0)
        yield from (("q_rotated", q), ("k_rotated", k))
        yield "A", softmax_attention.pattern(q, k, **self._options(x, flags))
        yield "lse", softmax_attention.logsumexp(q, k, **self._options(x, flags))


class LinearAttention(Operator):
    """Linear attention, retention and both gated kinds."""

    inputs = frozenset("q k v log_decay state0 z0".split())
    flags = frozenset({"feature", "normalise", "eps", "scale"})

    def check(self, inputs: Inputs, flags: dict) -> None:
        super().check(inputs, flags)
        feature = flags.get("feature", "identity")
        if feature not in linear.FEATURE_MAPS:
            raise UnsupportedCase(f"feature map {feature!r}")

    def start(self, x: Inputs) -> State | None:
        return None if "state0" not in x else {"state": x["state0"], "z": x.get("z0")}

    def _arguments(self, x: Inputs, flags: dict) -> tuple[list[Tensor], dict[str, Any]]:
        feature = linear.FEATURE_MAPS[flags.get("feature", "identity")]
        names = {name: flags[name] for name in ("scale", "normalise", "eps") if name in flags}
        return [feature(x["q"]), feature(x["k"])], {"log_decay": x.get("log_decay"), **names}

    def run(self, x: Inputs, flags: dict, form: str, state: State | None, position: int) -> Result:
        before = None if state is None else linear.LinearState(s=state["state"], z=state["z"])
        features, options = self._arguments(x, flags)
        output, after = linear.gated_linear_attention(*features, x["v"], state=before, form=form, **options)
        return output, {"state": after.s, "z": after.z}

    def others(self, x: Inputs, flags: dict) -> Iterator[tuple[str, Tensor]]:
        features, options = self._arguments(x, flags)
        start = self.start(x)
        before = None if start is None else linear.LinearState(s=start["state"], z=start["z"])
        yield "A", linear.pattern(*features, state=before, **options)
        yield from super().others(x, flags)


class DeltaRule(Operator):
    inputs = frozenset("q k v beta log_decay state0".split())
    flags = frozenset({"scale"})

    def run(self, x: Inputs, flags: dict, form: str, state: State | None, position: int) -> Result:
        before = None if state is None else state["state"]
        output, after = delta_rule.delta_rule(
            x["q"], x["k"], x["v"], x["beta"], log_decay=x.get("log_decay"), scale=flags["scale"],
            state=before, form=form,
        )  # fmt: skip
        return output, {"state": after}

    def others(self, x: Inputs, flags: dict) -> Iterator[tuple[str, Tensor]]:
        decay, state = x.get("log_decay"), x.get("state0")
        yield "A", delta_rule.pattern(x["q"], x["k"], x["beta"], log_decay=decay, scale=flags["scale"])
        yield "write", delta_rule.writes(x["k"], x["v"], x["beta"], log_decay=decay, state=state)
        yield from super().others(x, flags)


class S4D(Operator):
    inputs = frozenset("u log_dt log_A_re A_im B_re B_im C_re C_im D state0_re state0_im".split())
    flags = frozenset({"re_factor"})
    values = "u"

    def start(self, x: Inputs) -> State | None:
        return None if "state0_re" not in x else {"state_re": x["state0_re"], "state_im": x["state0_im"]}

    def _modes(self, x: Inputs) -> list[Tensor]:
        A = torch.complex(-torch.exp(x["log_A_re"]), x["A_im"])
        return [x["log_dt"], A, torch.complex(x["B_re"], x["B_im"]), torch.complex(x["C_re"], x["C_im"])]

    def run(self, x: Inputs, flags: dict, form: str, state: State | None, position: int) -> Result:
        before = None if state is None else torch.complex(state["state_re"], state["state_im"])
        options = {"D": x.get("D"), "re_factor": flags["re_factor"], "state": before, "form": form}
        output, after = s4d.s4d(x["u"], *self._modes(x), **options)
        return output, {"state_re": after.real, "state_im": after.imag}

    def others(self, x: Inputs, flags: dict) -> Iterator[tuple[str, Tensor]]:
        arguments, factor = (*self._modes(x), x["u"].shape[1]), flags["re_factor"]
        yield "kernel", s4d.kernel(*arguments, re_factor=factor)
        yield "A", s4d.pattern(*arguments, re_factor=factor)
        yield from super().others(x, flags)


class CausalConv(Operator):
    inputs = frozenset("x weight bias state0".split())
    flags = frozenset({"silu", "width"})

    def run(self, x: Inputs, flags: dict, form: str, state: State | None, position: int) -> Result:
        before = None if state is None else state["state"]
        output, after = causal_conv.causal_conv(
            x["x"], x["weight"], x.get("bias"), state=before, silu=flags["silu"], form=form
        )
        return output, {"state": after}

    def others(self, x: Inputs, flags: dict) -> Iterator[tuple[str, Tensor]]:
        linear_part, start = {**flags, "silu": False}, self.start(x)
        yield "A", causal_conv.pattern(x["weight"], x["x"].shape[1])
        yield "pre", self.run(x, linear_part, "chunked", start, 0)[0]
        silent = {**x, "x": torch.zeros_like(x["x"])}
        yield "pre_constant", self.run(silent, linear_part, "chunked", start, 0)[0]


class Mamba1Scan(Operator):
    inputs = frozenset("u dt_raw dt_bias A_log B C D z state0".split())
    flags = frozenset({"gate"})
    values = "u"

    def run(self, x: Inputs, flags: dict, form: str, state: State | None, position: int) -> Result:
        before = None if state is None else state["state"]
        dt = selective_scan.softplus_dt(x["dt_raw"], x.get("dt_bias"))
        options = {"D": x.get("D"), "z": x.get("z"), "state": before, "form": form}
        output, after = selective_scan.selective_scan(x["u"], dt, x["A_log"], x["B"], x["C"], **options)
        return output, {"state": after}

    def others(self, x: Inputs, flags: dict) -> Iterator[tuple[str, Tensor]]:
        dt = selective_scan.softplus_dt(x["dt_raw"], x.get("dt_bias"))
        yield "dt", dt
        yield "A", selective_scan.pattern(dt, x["A_log"], x["B"], x["C"])
        yield "A_by_state", selective_scan.pattern_by_state(dt, x["A_log"], x["B"], x["C"])
        yield from super().others(x, flags)


class Mamba2SSD(Operator):
    inputs = frozenset("x dt_raw dt_bias A_log B C D state0".split())
    flags = frozenset({"n_heads", "n_groups"})
    values = "x"

    def run(self, x: Inputs, flags: dict, form: str, state: State | None, position: int) -> Result:
        before = None if state is None else state["state"]
        dt = selective_scan.softplus_dt(x["dt_raw"], x.get("dt_bias"))
        output, after = ssd.ssd(x["x"], dt, x["A_log"], x["B"], x["C"], D=x.get("D"), state=before, form=form)
        return output, {"state": after}

    def others(self, x: Inputs, flags: dict) -> Iterator[tuple[str, Tensor]]:
        dt = selective_scan.softplus_dt(x["dt_raw"], x.get("dt_bias"))
        yield "dt", dt
        yield "A", ssd.pattern(dt, x["A_log"], x["B"], x["C"])
        yield from super().others(x, flags)


class Mamba1Block(Operator):
    """The whole mixer with the case's weights."""

    flags = frozenset({"width", "dt_rank"})
    values = "hidden"
    parameters = {
        "in_proj.weight": "in_proj_weight", "conv1d.weight": "conv_weight", "conv1d.bias": "conv_bias",
        "x_proj.weight": "x_proj_weight", "dt_proj.weight": "dt_proj_weight", "dt_proj.bias": "dt_proj_bias",
        "A_log": "A_log", "D": "D", "out_proj.weight": "out_proj_weight",
    }  # fmt: skip

    inputs = frozenset({*parameters.values(), "hidden", "conv_state0", "ssm_state0"})

    def leaves(self, inputs: Inputs, flags: dict) -> Inputs:
        x = super().leaves(inputs, flags)
        weights = {name: nn.Parameter(x[name].detach()) for name in self.parameters.values()}
        weights["conv_weight"] = nn.Parameter(x["conv_weight"].detach()[:, None])
        return {**x, **weights}

    def start(self, x: Inputs) -> State | None:
        return (
            None if "ssm_state0" not in x else {"ssm_state": x["ssm_state0"], "conv_state": x["conv_state0"]}
        )

    def _mixer(self, x: Inputs, flags: dict) -> Mamba1:
        d_inner, d_state = x["A_log"].shape
        config = Mamba1Config(
            d_inner=d_inner, d_state=d_state, d_conv=flags["width"], dt_rank=flags["dt_rank"]
        )
        mixer = Mamba1(config, x["hidden"].shape[-1]).to(x["hidden"].dtype)
        mixer.load_state_dict({ours: x[theirs] for ours, theirs in self.parameters.items()}, assign=True)
        return mixer

    def run(self, x: Inputs, flags: dict, form: str, state: State | None, position: int) -> Result:
        before = None
        if state is not None:
            before = Mamba1State(ssm=state["ssm_state"], conv=state["conv_state"], length=position)
        output, after = self._mixer(x, flags).prefill(x["hidden"], before, Form(form))
        return output, {"ssm_state": after.ssm, "conv_state": after.conv}

    def others(self, x: Inputs, flags: dict) -> Iterator[tuple[str, Tensor]]:
        if self.start(x) is not None:
            return
        mixer, hidden = self._mixer(x, flags), x["hidden"]
        yield "A", mixer.implied_attention(hidden)
        reading = mixer.read(hidden, "block")
        edges = (torch.arange(n) for n in (hidden.shape[0], hidden.shape[1], hidden.shape[1]))
        edges = torch.meshgrid(*edges, indexing="ij")
        contribution = reading.contribution(*(index.flatten() for index in edges)).sum(dim=1)
        yield "contribution", contribution.view(*edges[0].shape, -1)


def rope_config(flags: dict) -> RopeConfig:
    """The project's rotary configuration for a case's `rope` flags."""
    yarn = flags["yarn"]
    scaling = None if yarn is None else {"type": "yarn"} | {k: v for k, v in yarn.items() if v is not None}
    return RopeConfig(
        base=flags["base"], rotary_dim=flags["rotary_dim"], layout=flags["layout"], scaling=scaling
    )


OPERATORS: dict[str, Operator] = {
    "softmax_attention": SoftmaxAttention(),
    "linear_attention": LinearAttention(),
    "retention": LinearAttention(),
    "simple_gated_linear_attention": LinearAttention(),
    "gated_linear_attention": LinearAttention(),
    "delta_rule": DeltaRule(),
    "gated_delta_rule": DeltaRule(),
    "s4d": S4D(),
    "causal_conv1d": CausalConv(),
    "mamba1_scan": Mamba1Scan(),
    "mamba2_ssd": Mamba2SSD(),
    "mamba1_block": Mamba1Block(),
}

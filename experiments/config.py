"""Configuration of an experiment: model, data, optimiser, training, checkpoints, evaluation and three seeds.

`ExperimentConfig.to_dict()` is what `run.json` holds. `with_settings` applies `--set key=value` pairs by
dotted key.
"""

import json
from dataclasses import dataclass, field
from typing import Any, Literal

from experiments.data.config import DataConfig
from models.config import LanguageModelConfig
from models.errors import ConfigError, closest
from models.plain_config import PlainConfig

_CAPTURE = "training.cuda_graph"


@dataclass(frozen=True, kw_only=True)
class Seeds(PlainConfig):
    """Three independent seeds: initial weights, order or content of training data, held-out windows."""

    init: int = 0
    data: int = 0
    eval: int = 0

    def _check(self) -> None:
        for name in ("init", "data", "eval"):
            accepted = "0 or a positive number below 2^63"
            self._require(0 <= getattr(self, name) < 1 << 63, name, accepted)


@dataclass(frozen=True, kw_only=True)
class OptimiserConfig(PlainConfig):
    """AdamW with linear warm-up, then a constant rate or a cosine that ends at `final_lr_fraction` of the
    peak.

    Weight decay acts on matrices only: never on norms, biases, A_log, D or dt.
    """

    lr: float = 3e-3
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.01
    warmup_steps: int = 50
    schedule: Literal["constant", "cosine"] = "constant"
    final_lr_fraction: float = 0.1
    clip: float = 1.0

    def _check(self) -> None:
        self._require(self.lr > 0, "lr", "a positive number")
        self._require(all(0 <= b < 1 for b in self.betas), "betas", "two numbers in [0, 1)")
        self._require(self.eps > 0, "eps", "a positive number")
        self._require(self.weight_decay >= 0, "weight_decay", "0 or a positive number")
        self._require(self.warmup_steps >= 0, "warmup_steps", "0 or a positive number")
        self._require(0 <= self.final_lr_fraction <= 1, "final_lr_fraction", "a number in [0, 1]")
        self._require(self.clip >= 0, "clip", "0 (no clipping) or a positive norm")


@dataclass(frozen=True, kw_only=True)
class TrainingConfig(PlainConfig):
    """Length and shape of training.

    `batch` is the global number of sequences of one update; it is split over processes and over
    `accumulation` parts. `precision` "auto" is bfloat16 autocast on CUDA and float32 elsewhere. `cuda_graph`
    captures the whole step on CUDA: None does so wherever it can be done (`ExperimentConfig.captures_step`),
    true is met or refused, false leaves the step eager. `threads` sets torch's CPU threads (None leaves
    them): results are bit-identical only at equal threads.
    """

    steps: int
    batch: int = 64
    accumulation: int = 1
    precision: Literal["auto", "fp32", "bf16"] = "auto"
    compile: bool = False
    cuda_graph: bool | None = None
    threads: int | None = None
    log_every: int = 10

    def _check(self) -> None:
        for name in ("steps", "batch", "accumulation", "log_every"):
            self._require(getattr(self, name) > 0, name, "a positive number")
        self._require(
            self.batch % self.accumulation == 0, "accumulation", f"a divisor of batch = {self.batch}"
        )
        self._require(self.threads is None or 0 < self.threads <= 1024, "threads", "1 to 1024, or None")
        self._require(not (self.cuda_graph and self.accumulation > 1), "accumulation", "1 with cuda_graph")
        self._require(not (self.cuda_graph and self.compile), "compile", "False with cuda_graph")


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig(PlainConfig):
    """Which steps are saved: 0, the last, `log_spaced` steps between, and every `every`-th of each dense
    window.

    `windows` holds (start, stop, every), all inclusive. `training_state` "last" removes the optimiser state
    of earlier checkpoints once a later one is safe on disk.
    """

    log_spaced: int = 12
    windows: tuple[tuple[int, int, int], ...] = ()
    training_state: Literal["all", "last"] = "all"

    def _check(self) -> None:
        self._require(0 <= self.log_spaced <= 10_000, "log_spaced", "0 to 10,000")
        for start, stop, every in self.windows:
            if not 0 <= start <= stop or every < 1:
                raise ConfigError(
                    f"CheckpointConfig.windows has {[start, stop, every]}; "
                    "accepted: 0 <= start <= stop, every >= 1"
                )


@dataclass(frozen=True, kw_only=True)
class EvalConfig(PlainConfig):
    """The held-out windows that every checkpoint is measured on, and that `eval.safetensors` keeps."""

    n_windows: int = 64
    batch: int = 64

    def _check(self) -> None:
        for name in ("n_windows", "batch"):
            self._require(getattr(self, name) > 0, name, "a positive number")


@dataclass(frozen=True, kw_only=True)
class ClampConfig(PlainConfig):
    """A part of the induction circuit held at its ideal during training; see `experiments.clamping`.

    `layer` None is the part's usual layer, `heads` None all of the layer's. `offset`: of the match in the
    mixer's own A ("match", "copy"), or the lag of the convolution's tap ("carry"). `gain` is "copy"'s, in
    nats.
    """

    part: Literal["carry", "match", "copy"]
    layer: int | None = None
    heads: tuple[int, ...] | None = None
    offset: int = 1
    gain: float = 8.0

    def _check(self) -> None:
        self._require(self.offset >= 1, "offset", "a positive number")
        self._require(self.gain > 0, "gain", "a positive number")


@dataclass(frozen=True, kw_only=True)
class ExperimentConfig(PlainConfig):
    """One training run, whole: equal configurations give equal weights on one CPU machine."""

    description: str = ""
    model: LanguageModelConfig
    data: DataConfig
    training: TrainingConfig
    optimiser: OptimiserConfig = field(default_factory=OptimiserConfig)
    checkpoints: CheckpointConfig = field(default_factory=CheckpointConfig)
    evaluation: EvalConfig = field(default_factory=EvalConfig)
    seeds: Seeds = field(default_factory=Seeds)
    clamp: ClampConfig | None = None

    def captures_step(self, device: str, n_processes: int) -> bool:
        """Whether the whole step runs as one captured CUDA graph on a kind of device ("cuda", "cpu").

        Raises:
            ConfigError: `training.cuda_graph` is true where a step cannot be captured.
        """
        training = self.training
        fits = device == "cuda" and n_processes == 1
        if training.cuda_graph and not fits:
            raise ConfigError(
                "training.cuda_graph is true; accepted: only on one CUDA device, in one process"
            )
        if training.cuda_graph is not None:
            return training.cuda_graph
        return fits and not (self.clamp or training.compile or training.accumulation > 1)

    def _check(self) -> None:
        if self.clamp is not None and (self.training.compile or self.training.cuda_graph):
            raise ConfigError("clamp is given; accepted: only with training.compile and cuda_graph false")
        if self.data.seq > self.model.n_ctx and self.model.positions == "learned":
            raise ConfigError(
                f"data.seq is {self.data.seq}, but learned positions end at model.n_ctx = {self.model.n_ctx}"
            )
        if self.data.d_vocab > self.model.d_vocab:
            raise ConfigError(
                f"data.d_vocab is {self.data.d_vocab}; accepted: at most model.d_vocab = {self.model.d_vocab}"
            )


def flattened(values: Any, prefix: str = "") -> dict[str, Any]:
    """Dotted keys of nested JSON values; entries of lists of dictionaries are numbered
    (`model.mixers.0.n_heads`).
    """
    if isinstance(values, dict) and values:
        items = values.items()
    elif isinstance(values, list) and values and isinstance(values[0], dict):
        items = enumerate(values)
    else:
        return {prefix: values}
    flat = {}
    for key, value in items:
        flat.update(flattened(value, f"{prefix}.{key}" if prefix else str(key)))
    return flat


def with_settings(config: ExperimentConfig, settings: list[str]) -> ExperimentConfig:
    """The configuration with `key=value` pairs applied; a value is read as JSON, else as text.

    Raises:
        ConfigError: no `=`, an unknown key (with the closest matches), or a value that is not accepted.
    """
    values = config.to_dict()
    for setting in settings:
        key, equals, text = setting.partition("=")
        if not equals:
            raise ConfigError(f"--set {setting!r} has no '='; accepted: key=value")
        value = _value(text)
        # `--set clamp=match` names the part alone.
        if key.strip() == "clamp" and isinstance(value, str):
            value = {"part": value}
        _assign(values, key.strip(), value)
    return ExperimentConfig.from_dict(values)


def differing_keys(stored: dict[str, Any], current: dict[str, Any]) -> list[str]:
    """`key: stored -> current` for every dotted key on which two configurations differ.

    `training.cuda_graph` left open (None, or absent) differs from nothing: the losses are the same.
    """
    a, b = flattened(stored), flattened(current)
    missing = "(absent)"
    keys = dict.fromkeys([*a, *b])
    if None in (a.get(_CAPTURE), b.get(_CAPTURE)):
        keys.pop(_CAPTURE, None)
    return [
        f"{key}: {a.get(key, missing)!r} -> {b.get(key, missing)!r}"
        for key in keys
        if a.get(key, missing) != b.get(key, missing)
    ]


def _assign(values: dict[str, Any], key: str, value: Any) -> None:
    flat = flattened(values)
    branches = {key.rsplit(".", n)[0] for key in flat for n in range(1, key.count(".") + 1)}
    if key not in flat and key not in branches:
        by_last_part = [k for k in flat if k.rsplit(".", 1)[-1] == key]
        hint = (
            f"; did you mean {', '.join(by_last_part[:3])}?"
            if by_last_part
            else closest(key, [*flat, *branches])
        )
        raise ConfigError(f"no setting {key!r}{hint}")
    *parents, last = key.split(".")
    node: Any = values
    for part in parents:
        node = node[int(part)] if isinstance(node, list) else node[part]
    if isinstance(node, list):
        node[int(last)] = value
    else:
        node[last] = value


def _value(text: str) -> Any:
    try:
        return json.loads({"None": "null", "True": "true", "False": "false"}.get(text, text))
    except (json.JSONDecodeError, RecursionError):
        return text

"""What an instrument reports: frozen records, and their JSON, JSON Lines and CSV forms.

The keys of `DetectionReport.to_dict()` are those of `detect-induction --json`. Losses are in nats, steps are
optimiser steps, scores have no unit. `None` means "not measured here"; the report's `notes` say why.
"""

import csv
import dataclasses
import io
import json
import math
import os
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from interp.displayed import Displayed
from interp.errors import InterventionError

FORMAT = 1
# What `--scores` accepts. Prefix matching and previous token are always read: the rest is called by them.
SCORES = ("prefix_matching", "previous_token", "copying", "in_context_learning", "repeats", "causal")


@dataclass(frozen=True, kw_only=True)
class ProbeRecord:
    """The repeated-token sequences that the head scores were read on.

    `period` distinct tokens tiled `repeats` times; `loss_period` and `loss_repeats` are the shape of the
    second probe, which the losses (first copy, repeats, order gain) are read on.
    """

    period: int
    repeats: int
    n_sequences: int
    seed: int
    bos: int | None
    aggregation: str = "rowsum"
    loss_period: int
    loss_repeats: int
    d_candidates: int


@dataclass(frozen=True, kw_only=True)
class HeadScore(Displayed, display="head"):
    """All scores of one unit of one layer under one reading, at one checkpoint.

    Fields ending in `_se` are standard errors over the probe's sequences. `normalisation` says what the
    weights are: `none` (the pattern itself), `abs_row` (absolute value over the row's sum) or `contribution`
    (norm of the contribution vector over the row's sum). `copying` is the logit score 4r-1, without BOS among
    the sources where the probe has one. `prefix_matching_by_sequence` holds the values that the mean is taken
    over. `unit_key` is what ablation and the other interventions take; they take the record itself too.

    The causal test (`interp.induction_test`; None where it was not made in this reading):
    `offset_effect_nats` is what cutting the unit's edges at its strongest offset costs above random edges
    (`offset_control_nats`), `copying_offset` what those edges copy, `cut_by_offset_nats` the cost at offsets
    from `cut_first_offset` on. `decided_by` says what `is_induction` rests on: `causal`, or `attention`
    (prefix matching and copying). `offset` is the strongest offset by causal effect where it was measured in
    this reading, by weight elsewhere.
    """

    layer: int
    head: int
    unit: str
    reading: str
    mixer: str
    normalisation: str
    prefix_matching: float
    prefix_matching_se: float
    prefix_matching_chance: float
    prefix_matching_latest: float
    prefix_matching_pairs: float
    previous_token: float
    previous_token_se: float
    previous_token_chance: float
    first_position: float
    copying: float | None
    copying_se: float | None
    copying_2r: float | None
    copying_with_bos: float | None
    copying_edge: float | None
    copying_edge_se: float | None
    copying_edge_argmax: float | None
    copying_eigenvalue: float | None
    copying_eigenvalue_null_sd: float | None
    copying_eigenvalue_form: str | None
    offset: int
    weight_by_offset: tuple[float, ...]
    offset_effect_nats: float | None = None
    offset_effect_se_nats: float | None = None
    offset_control_nats: float | None = None
    cut_by_offset_nats: tuple[float, ...] = ()
    cut_first_offset: int | None = None
    copying_offset: float | None = None
    is_induction: bool
    decided_by: str = "attention"
    prefix_matching_by_sequence: tuple[float, ...] = field(default=(), repr=False)

    SAMPLES: ClassVar[tuple[str, ...]] = ("prefix_matching_by_sequence",)

    @property
    def unit_key(self) -> tuple[int, int | None]:
        """(layer, head) as interventions count heads: (layer, None) for a whole layer, whose `head` reads 0.

        Raises:
            InterventionError: a state index or a cluster of channels, which no intervention takes out.
        """
        if self.unit not in ("head", "layer"):
            raise InterventionError(
                f"the record is of {self.unit} {self.head} of layer {self.layer}; accepted: records of heads "
                "and of whole layers, or pairs (layer, head)"
            )
        return self.layer, None if self.unit == "layer" else self.head


@dataclass(frozen=True, kw_only=True)
class CheckpointScores(Displayed, display="checkpoint"):
    """One checkpoint: behaviour (losses) and one `HeadScore` for each (layer, unit, reading).

    `in_context_learning_nats` = loss at `icl_positions[0]` (late) - loss at `icl_positions[1]` (early);
    `_window_` the same for means around both positions. Losses of the probe: the first copy, the later
    copies, `repeat_gain` (first minus later), `order_gain` (later copies shuffled each on its own, minus in
    order). `hit_loss_nats`: held-out text at tokens whose bigram already occurred in the window.
    `*_by_sequence` and `*_by_window` hold the samples behind the means, the same sequences at every
    checkpoint; `in_context_learning_by_window` those of the window means, which transitions are fitted to: a
    difference of two single tokens' losses is too noisy to date.
    """

    step: int
    tokens: int | None = None
    weight_sha256: str | None = None
    same_weights_as_step: int | None = None
    loss_nats: float | None
    in_context_learning_nats: float | None
    in_context_learning_se_nats: float | None = None
    in_context_learning_window_nats: float | None = None
    icl_positions: tuple[int, int] | None
    repeat_loss_nats: float | None
    first_copy_loss_nats: float | None
    repeat_gain_nats: float | None
    order_gain_nats: float | None
    order_gain_se_nats: float | None = None
    hit_loss_nats: float | None
    hit_share: float | None = None
    heads: tuple[HeadScore, ...] = field(repr=False)
    order_gain_by_sequence: tuple[float, ...] = field(default=(), repr=False)
    in_context_learning_by_window: tuple[float, ...] = field(default=(), repr=False)
    loss_by_position_nats: tuple[float, ...] = field(default=(), repr=False)

    SAMPLES: ClassVar[tuple[str, ...]] = ("order_gain_by_sequence", "in_context_learning_by_window")


@dataclass(frozen=True, kw_only=True)
class AttentionMap(Displayed, display="attention"):
    """The weights of one unit on one sequence: `matrix[dest][src]`, with the sequence's tokens as text.

    Weights are signed under normalisation `none` for mixers whose implied attention is; otherwise in [0, 1].
    """

    step: int
    layer: int
    head: int
    unit: str
    reading: str
    normalisation: str
    tokens: tuple[str, ...] = field(repr=False)
    matrix: tuple[tuple[float, ...], ...] = field(repr=False)


@dataclass(frozen=True, kw_only=True)
class DetectionReport(Displayed, display="report"):
    """Everything that `detect-induction` found, for one checkpoint or a series of them, in step order.

    `phase_transition` is an `interp.phase_transition.PhaseTransition`, which is also a mapping of the JSON of
    that key, or None: no transition.
    `attention_maps` are of the strongest units of the last checkpoint; `notes` name every default that was
    shrunk and every score that could not be measured. `model`: for models of other projects, what their files
    say (BOS, special tokens, dtype, tied embeddings, norm folding) and which reader read them.
    `missing_steps` were asked for and are not in the series.
    """

    path: str
    mixers: tuple[str, ...]
    n_layers: int
    n_heads: int
    probe: ProbeRecord
    checkpoints: tuple[CheckpointScores, ...]
    phase_transition: Mapping[str, Any] | None = None
    attention_maps: tuple[AttentionMap, ...] = ()
    notes: tuple[str, ...] = ()
    text: str | None = None
    model: Mapping[str, Any] | None = None
    missing_steps: tuple[int, ...] = ()
    wall_s: float | None = None
    versions: Mapping[str, str] = field(default_factory=dict)

    def __repr__(self) -> str:
        """The printed report: a screen of it. Every number is in `to_dict` and `to_pandas`."""
        from interp.table import printed_report

        return f"DetectionReport of {printed_report(self)}"

    def to_dict(self, *, samples: bool = False, maps: bool = False) -> dict[str, Any]:
        """The JSON object of `--json`; `samples` adds the values behind the means, `maps` the attention
        maps.
        """
        record = {"format": FORMAT, **to_plain(self, samples=samples)}
        if not maps:
            del record["attention_maps"]
        return record

    def induction_heads(self, step: int | None = None) -> tuple[HeadScore, ...]:
        """The units called induction heads at `step` (default: the last checkpoint), highest prefix
        matching first."""
        checkpoint = self.checkpoints[-1] if step is None else self.at(step)
        return tuple(by_prefix_matching(head for head in checkpoint.heads if head.is_induction))

    def at(self, step: int) -> CheckpointScores:
        """The scores at `step`; ValueError names the steps there are."""
        for checkpoint in self.checkpoints:
            if checkpoint.step == step:
                return checkpoint
        steps = ", ".join(str(checkpoint.step) for checkpoint in self.checkpoints)
        raise ValueError(f"no checkpoint at step {step}; there are: {steps}")


def by_prefix_matching(heads: Iterable[HeadScore]) -> list[HeadScore]:
    """Units in the order of tables and maps: highest prefix matching first, equals as they came."""
    return sorted(heads, key=lambda head: -head.prefix_matching)


def strongest_unit(heads: Iterable[HeadScore]) -> HeadScore | None:
    """What every overview calls the strongest unit; None of no units.

    Where edges were cut, the unit and reading whose cut costs most above random edges, as the cut decides
    what an induction head is; elsewhere that of the highest prefix matching.
    """
    heads = by_prefix_matching(heads)
    cut = [head for head in heads if head.offset_effect_nats is not None]
    return max(cut, key=lambda head: head.offset_effect_nats) if cut else next(iter(heads), None)


def begins_below_chance(curve: Mapping[str, Any] | None) -> bool:
    """Whether a curve's onset is that of a climb towards chance; see `interp.transition.Transition`."""
    if curve is None or curve.get("chance") is None:
        return False
    above = curve.get("above_chance_from_step")
    return above is None or above > curve["onset_step"][1]


def to_plain(record: Any, *, samples: bool = False) -> Any:
    """A record as dicts, lists and scalars that JSON holds exactly; a float that is not finite is refused."""
    if record is None or type(record) in (int, str, bool):
        return record
    if isinstance(record, float):
        if math.isfinite(record):
            return record
        raise ValueError(
            f"a record holds {record}; every number in a record is finite, None where not measured"
        )
    if dataclasses.is_dataclass(record) and not isinstance(record, Mapping):
        left_out = () if samples else getattr(record, "SAMPLES", ())
        names = [f.name for f in dataclasses.fields(record) if f.name not in left_out]
        return {name: to_plain(getattr(record, name), samples=samples) for name in names}
    if isinstance(record, Mapping):
        return {key: to_plain(value, samples=samples) for key, value in record.items()}
    if isinstance(record, list | tuple):
        # Most of a report is long rows of numbers.
        if all(type(value) is float for value in record) and all(map(math.isfinite, record)):
            return list(record)
        return [to_plain(value, samples=samples) for value in record]
    return record


def to_json(report: DetectionReport, *, samples: bool = False) -> str:
    """The text of `--json FILE`."""
    return json.dumps(report.to_dict(samples=samples), indent=1, allow_nan=False) + "\n"


def to_json_lines(records: Iterable[Any]) -> str:
    """One JSON object a line, for any of the records above."""
    return "".join(json.dumps(to_plain(record), allow_nan=False) + "\n" for record in records)


def rows(report: DetectionReport, *, lists: bool = False) -> list[dict[str, Any]]:
    """One flat dict for each (step, layer, head, reading): the checkpoint's numbers beside the head's.

    `cut_by_offset_nats`, from `cut_first_offset` on, is text with spaces between, or with `lists` a list.
    """
    table = []
    for checkpoint in report.checkpoints:
        shared = to_plain(checkpoint)
        del shared["heads"], shared["loss_by_position_nats"]
        late, early = shared.pop("icl_positions") or (None, None)
        shared |= {"icl_position_late": late, "icl_position_early": early}
        for head in checkpoint.heads:
            own = to_plain(head)
            offsets = own.pop("weight_by_offset")
            own |= {f"weight_at_offset_{offset}": value for offset, value in enumerate(offsets, start=1)}
            cuts = own.pop("cut_by_offset_nats")
            joined = cuts if lists else " ".join(f"{value:.6g}" for value in cuts)
            own["cut_by_offset_nats"] = joined or None
            table.append({"step": checkpoint.step, **own, **shared})
    return table


def to_csv(report: DetectionReport) -> str:
    """The text of `--csv FILE`: a header and the lines of `rows`; an empty cell is "not measured"."""
    table = rows(report)
    text = io.StringIO()
    writer = csv.DictWriter(text, fieldnames=list(table[0]) if table else ["step"], lineterminator="\n")
    writer.writeheader()
    writer.writerows(table)
    return text.getvalue()


def write_text(path: str | Path, text: str) -> None:
    """Write a file whole or not at all: to a temporary sibling, flushed to disk, then renamed over `path`.

    A link is followed; a device or pipe (`/dev/stdout`) is written to, not replaced.

    Raises:
        OSError: the folder cannot be written; what stood at `path` stays as it was.
    """
    path = Path(path)
    # Before links are followed: that of /dev/stdout leads to a pipe, which has no path.
    if path.exists() and not path.is_file():
        path.write_text(text, encoding="utf-8")
        return
    path = path.resolve()
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".part")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(name, 0o666 & ~_umask())
        os.replace(name, path)
    except OSError as error:
        Path(name).unlink(missing_ok=True)
        raise OSError(error.errno, error.strerror, str(path)) from None
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask

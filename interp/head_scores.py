"""All scores of all units of a model on one probe, gathered in one visit of the model."""

import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from interp import copying, edge_scores, prefix_matching, previous_token
from interp.errors import DetectionError
from interp.host import begin_to_host
from interp.layer_inputs import Visited
from interp.prefix_matching import standard_error
from interp.records import HeadScore
from interp.sequences import RepeatedTokens
from interp.subject import LayerView, Subject
from interp.table_entries import computed_once, may_stay
from models.mixers.reading import Reading

# A unit is called an induction head from here on (until the causal test decides).
MIN_PREFIX_MATCHING = 0.3
MIN_STANDARD_ERRORS = 5
# Offsets of the weight profile: 1 .. d_conv + 1 of the usual convolution of width 4.
OFFSETS = range(1, 6)
# Random heads behind the null of the eigenvalue score.
NULL_DRAWS = 16


@dataclass(frozen=True, kw_only=True)
class UnitSamples:
    """One layer under one reading: a value for each sequence and unit; copying ratios also by position."""

    rowsum: Float[Tensor, "batch unit"]
    latest: Float[Tensor, "batch unit"]
    pairs: Float[Tensor, "batch unit"]
    by_offset: Float[Tensor, "batch unit offset"]
    previous: Float[Tensor, "batch unit"]
    first_position: Float[Tensor, "batch unit"]
    logit: Float[Tensor, "batch unit position"] | None = None
    logit_2r: Float[Tensor, "batch unit position"] | None = None
    logit_with_bos: Float[Tensor, "batch unit position"] | None = None
    edge: Float[Tensor, "batch unit edge"] | None = None
    edge_argmax: Float[Tensor, "batch unit"] | None = None


def measure_reading(
    reading: Reading,
    probe: RepeatedTokens,
    directions: Float[Tensor, "batch position d_model"] | None,
    *,
    linear_memory: bool | None = None,
) -> UnitSamples:
    """Every score of one reading on a batch of the probe.

    `directions` are those of the tokens of the first copy, BOS before them where the probe has one; None
    leaves the copying scores out. `linear_memory`: see `edge_scores.chosen`.
    """
    if edge_scores.chosen(probe, linear_memory):
        return _measure_by_edges(reading, probe, directions)
    weights = reading.weights()
    later = probe.first + probe.period
    found: dict[str, Tensor] = {
        **prefix_matching.by_offset(weights, probe, tuple(OFFSETS)),
        "previous": previous_token.previous_token_by_sequence(
            previous_token.previous_weights(weights), first=1 + probe.first
        ),
        "first_position": weights[:, :, later:, 0].double().mean(-1),
    }
    if directions is not None:
        found |= _copying(reading, probe, weights[:, :, :later, :later], directions)
    return UnitSamples(**found)


def _measure_by_edges(
    reading: Reading, probe: RepeatedTokens, directions: Float[Tensor, "batch position d_model"] | None
) -> UnitSamples:
    """The same without a pattern; edge copying is one number for each sequence, not one for each edge."""
    found = edge_scores.edge_scores(reading, probe, offsets=OFFSETS)
    samples = {name: getattr(found, name) for name in ("previous", "first_position")}
    samples |= {"rowsum": found.rowsum[..., 0], "latest": found.latest, "pairs": found.pairs}
    if directions is not None:
        samples |= edge_scores.copying_scores(reading, probe, directions)
    return UnitSamples(by_offset=found.rowsum, **samples)


def _copying(
    reading: Reading, probe: RepeatedTokens, weights: Tensor, directions: Tensor
) -> dict[str, Tensor]:
    # In a causal model the first copy is a sample of tokens that are not repeated.
    outputs = copying.unit_outputs(reading, weights.shape[-1])
    bos = probe.bos is not None
    alone = copying.logit_copying(outputs, reading.W_out, weights, directions, bos=bos)
    edge = copying.edge_copying(reading, probe, directions[:, probe.first :])
    found = {
        "logit": 4 * alone.ratio - 1,
        "logit_2r": 2 * alone.two_ratio - 1,
        "edge": 4 * edge.raises.ratio - 1,
        "edge_argmax": edge.argmax_by_sequence,
    }
    if bos:
        all_sources = copying.logit_copying(
            outputs, reading.W_out, weights, directions, bos=bos, with_bos=True
        )
        found["logit_with_bos"] = 4 * all_sources.ratio - 1
    return found


class HeadScores:
    """Gathers the scores of every (layer, unit, reading) over batches of a probe."""

    def __init__(
        self,
        subject: Subject,
        probe: RepeatedTokens,
        *,
        with_copying: bool = True,
        linear_memory: bool | None = None,
        in_thread: bool | None = None,
    ):
        """`in_thread`: eigenvalues in a thread beside the rest; None: where the model is on a GPU."""
        self.subject, self.probe, self.with_copying = subject, probe, with_copying
        self.linear_memory = linear_memory
        on_gpu = torch.device(subject.device).type == "cuda"
        self._in_thread = on_gpu if in_thread is None else in_thread
        self._samples: dict[tuple[int, str], list[UnitSamples]] = {}
        self._labels: dict[tuple[int, str], tuple[str, str]] = {}
        self._on_host: Callable[[], dict[tuple[int, str], UnitSamples]] = dict
        # By layer: what waits for the values, and in words what they are of.
        self._eigenvalues: dict[int, tuple[Callable[[], tuple[list[float], float]], str]] = {}

    def visit(self, *, units: str | None = None, visited: Visited | None = None) -> None:
        """Run the probe through the model. The model may change before the records are asked for.

        `visited`: see `LanguageModelSubject.visit`; left empty where the probe takes more than one pass.
        """
        tokens = self.probe.tokens
        # Clusters are made from the sequences of a batch: one batch, or they would differ.
        whole = units is not None and units.startswith("cluster")
        batches = [slice(0, len(tokens))] if whole else list(self.subject.batches(*tokens.shape))
        kept = {} if visited is None or len(batches) > 1 else {"visited": visited}
        pool = ThreadPoolExecutor(self.subject.n_layers) if self._in_thread and self.with_copying else None
        try:
            for batch in batches:
                self._visit_batch(batch, units, pool, **kept)
        finally:
            # The threads end with what they were given; nobody has to wait for them.
            if pool is not None:
                pool.shutdown(wait=False)
        self._on_host = self._begin_to_host()

    def _visit_batch(
        self, batch: slice, units: str | None, pool: ThreadPoolExecutor | None, **kept: Visited
    ) -> None:
        probe = self.probe.take(batch)
        directions = None
        if self.with_copying:
            directions = self.subject.directions(probe.tokens[:, : probe.first + probe.period])

        def look(view: LayerView) -> None:
            # First: a thread then has the time that all the rest takes.
            if self.with_copying and view.layer not in self._eigenvalues:
                self._eigenvalues[view.layer] = self._eigenvalue(view, pool)
            by_edges = edge_scores.chosen(probe, self.linear_memory)
            readings = view.readings if by_edges else computed_once(view.readings)
            if kept and may_stay(readings[0], self.subject.n_layers):
                kept["visited"].readings[view.layer] = readings[0]
            for reading in readings:
                key = (view.layer, reading.name)
                self._labels[key] = (reading.unit, reading.normalisation)
                samples = measure_reading(reading, probe, directions, linear_memory=self.linear_memory)
                self._samples.setdefault(key, []).append(samples)

        self.subject.visit(probe.tokens, look, units=units, **kept)

    def _eigenvalue(
        self, view: LayerView, pool: ThreadPoolExecutor | None
    ) -> tuple[Callable[[], tuple[list[float], float]], str]:
        gram = self.subject.gram(view.layer)
        product = copying.ov_product(view.W_V, view.W_O, gram)
        null = copying.null_product(view.W_V.shape[-1], gram, n_draws=NULL_DRAWS)
        arrived = begin_to_host([product, null])
        form = f"norm gains folded; {view.ov_form}"
        if pool is not None:
            return pool.submit(_eigenvalue_scores, arrived).result, form
        found = _eigenvalue_scores(arrived)
        return lambda: found, form

    def records(self) -> tuple[HeadScore, ...]:
        """The scores as records, in order of layer, reading and unit.

        Waits for the eigenvalues, and raises what went wrong with them.
        """
        chance = prefix_matching.uniform_chance(self.probe)
        seq, first = self.probe.tokens.shape[1], 1 + self.probe.first
        chances = (chance, previous_token.uniform_chance(seq, first=first))
        records: list[HeadScore] = []
        measured = self._on_host()
        if not measured:
            return ()
        # All layers and readings together: what a sum costs is mostly its call.
        columns, start = _columns(_side_by_side(list(measured.values()))), 0
        for (layer, name), samples in measured.items():
            n_units = samples.rowsum.shape[1]
            eigenvalue = self._eigenvalue_columns(layer, name, n_units)
            for unit in range(n_units):
                values = {key: column[start + unit] for key, column in columns.items()}
                values |= {key: column[unit] for key, column in eigenvalue.items()}
                records.append(self._record(layer, name, unit, values, chances))
            start += n_units
        return tuple(records)

    def _begin_to_host(self) -> Callable[[], dict[tuple[int, str], UnitSamples]]:
        """The samples of all layers and readings on the CPU, once they are there, in one transfer."""
        joined = {key: _joined(parts) for key, parts in self._samples.items()}
        places = [
            (key, name)
            for key, samples in joined.items()
            for name, values in vars(samples).items()
            if values is not None
        ]
        arrived = begin_to_host([getattr(joined[key], name) for key, name in places])

        def read() -> dict[tuple[int, str], UnitSamples]:
            found = dict(zip(places, arrived(), strict=True))
            return {
                key: UnitSamples(**{name: found.get((key, name)) for name in vars(samples)})
                for key, samples in joined.items()
            }

        return read

    def _eigenvalue_columns(self, layer: int, name: str, n_units: int) -> dict[str, list[Any]]:
        found, form = self._eigenvalues.get(layer, (lambda: ([], 0.0), ""))
        scores, null = found()
        # State indices and clusters share the layer's values: they have no OV circuit of their own.
        if len(scores) != n_units:
            return {
                key: [None] * n_units
                for key in ("copying_eigenvalue", "copying_eigenvalue_null_sd", "copying_eigenvalue_form")
            }
        return {
            "copying_eigenvalue": [_finite(score) for score in scores],
            "copying_eigenvalue_null_sd": [_finite(null)] * n_units,
            "copying_eigenvalue_form": [form] * n_units,
        }

    def _record(
        self, layer: int, name: str, unit: int, values: dict[str, Any], chances: tuple[float, float]
    ) -> HeadScore:
        kind, normalisation = self._labels[layer, name]
        if values["prefix_matching"] is None:
            raise DetectionError(
                f"layer {layer}, {name}: the weights of {kind} {unit} are not finite: the model's numbers "
                "overflow"
            )
        profile = values["weight_by_offset"]
        clear = chances[0] + MIN_STANDARD_ERRORS * values["prefix_matching_se"]
        matches = values["prefix_matching"] >= max(MIN_PREFIX_MATCHING, clear)
        edge = values["copying_edge"]
        return HeadScore(
            layer=layer,
            head=unit,
            unit=kind,
            reading=name,
            mixer=self.subject.mixers[layer],
            normalisation=normalisation,
            prefix_matching_chance=chances[0],
            previous_token_chance=chances[1],
            offset=OFFSETS[max(range(len(profile)), key=profile.__getitem__)],
            # Without copying scores the call rests on prefix matching alone; the report's notes say so.
            is_induction=matches and (not self.with_copying or (edge is not None and edge > 0)),
            **values,
        )


def _joined(parts: list[UnitSamples]) -> UnitSamples:
    if len(parts) == 1:
        return parts[0]
    columns = {field.name: [getattr(part, field.name) for part in parts] for field in fields(UnitSamples)}
    return UnitSamples(**{name: None if v[0] is None else torch.cat(v) for name, v in columns.items()})


def _side_by_side(samples: list[UnitSamples]) -> UnitSamples:
    """The units of several layers and readings as those of one."""
    found = {}
    for field in fields(UnitSamples):
        parts = [getattr(one, field.name) for one in samples]
        found[field.name] = None if parts[0] is None else torch.cat(parts, 1)
    return UnitSamples(**found)


def _columns(samples: UnitSamples) -> dict[str, list[Any]]:
    """A list over units for every score of a record; NaN (nothing was raised) becomes None."""
    scores = {
        "prefix_matching": samples.rowsum.mean(0),
        "prefix_matching_se": standard_error(samples.rowsum),
        "prefix_matching_latest": samples.latest.mean(0),
        "prefix_matching_pairs": samples.pairs.mean(0),
        "previous_token": samples.previous.mean(0),
        "previous_token_se": standard_error(samples.previous),
        "first_position": samples.first_position.mean(0),
        "copying": _mean(samples.logit),
        "copying_se": _standard_error(samples.logit),
        "copying_2r": _mean(samples.logit_2r),
        "copying_with_bos": _mean(samples.logit_with_bos),
        "copying_edge": _mean(samples.edge),
        "copying_edge_se": _standard_error(samples.edge),
        "copying_edge_argmax": None if samples.edge_argmax is None else samples.edge_argmax.mean(0),
        "weight_by_offset": samples.by_offset.mean(0),
        "prefix_matching_by_sequence": samples.rowsum.T,
    }
    absent = [None] * samples.rowsum.shape[1]
    return {name: absent if values is None else _plain(values) for name, values in scores.items()}


def _plain(values: Tensor) -> list[Any]:
    if values.ndim > 1:
        return [tuple(row) for row in values.tolist()]
    return [_finite(value) for value in values.tolist()]


def _eigenvalue_scores(arrived: Callable[[], list[Tensor]]) -> tuple[list[float], float]:
    """The scores of the heads, and the standard deviation of those of random ones.

    `arrived` waits for the products of both, [head n n] and [draw n n]: in a thread, where there is one. Of
    the random ones float32 is enough: they are most of the work, and their scatter needs few digits. The
    scores do not depend on scale.
    """
    product, null = arrived()
    null_scores = copying.eigenvalue_ratio((null / null.abs().amax((-2, -1), keepdim=True)).float())
    return copying.eigenvalue_ratio(product).tolist(), float(null_scores.double().std())


def _mean(values: Float[Tensor, "batch unit position"] | None) -> Float[Tensor, " unit"] | None:
    return None if values is None else values.nanmean((0, 2))


def _standard_error(values: Float[Tensor, "batch unit position"] | None) -> Float[Tensor, " unit"] | None:
    return None if values is None else copying.standard_error_over_sequences(values)


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None

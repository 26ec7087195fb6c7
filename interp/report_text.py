"""What a detection report says, in plain words."""

from collections.abc import Iterable, Mapping
from typing import Any

from interp.head_scores import MIN_PREFIX_MATCHING
from interp.induction_test import MIN_EFFECT_NATS
from interp.records import DetectionReport, HeadScore, begins_below_chance, strongest_unit
from interp.unit_name import several_readings, unit_name

CURVES = {
    "prefix_matching": "prefix matching",
    "order_gain": "the order gain",
    "in_context_learning": "the in-context-learning score",
}
MOST_NAMED = 4


def signed(value: float, digits: int = 2) -> str:
    """A number with a real minus sign."""
    text = f"{value:.{digits}f}"
    return text.lstrip("-") if float(text) == 0 else text.replace("-", "−")


def steps_between(interval: tuple[float, float] | list[float]) -> str:
    """`steps 200 and 300`, with thousands separated."""
    low, high = interval
    return f"steps {low:,.0f} and {high:,.0f}"


def heads_sentence(report: DetectionReport) -> str:
    """How many induction heads the last checkpoint has, and the strongest; or the strongest unit that is
    none."""
    last = report.checkpoints[-1]
    if not last.heads:
        return "No head was scored."
    with_reading = several_readings(last.heads)
    # A unit counts once, under the reading that matches prefixes best.
    found = _each_once(report.induction_heads())
    n_units = len({(head.layer, head.head) for head in last.heads})
    at = f" at step {last.step:,}" if len(report.checkpoints) > 1 else ""
    if not found:
        best = strongest_unit(last.heads)
        name, score = unit_name(best, with_reading=with_reading), signed(best.prefix_matching)
        chance = signed(best.prefix_matching_chance)
        return (
            f"No induction head{at}: the strongest unit, {name}, has prefix matching {score} "
            f"(chance {chance}){_failed(best, last.heads)}."
        )
    named = [
        f"{unit_name(head, with_reading=with_reading)} ({signed(head.prefix_matching)})"
        for head in found[:MOST_NAMED]
    ]
    more = f" and {len(found) - MOST_NAMED} more" if len(found) > MOST_NAMED else ""
    kind = "induction head" if len(found) == 1 else "induction heads"
    chance = signed(found[0].prefix_matching_chance)
    return (
        f"{len(found)} {kind} among {n_units} scored units{at}: {', '.join(named)}{more} "
        f"(prefix matching; chance {chance})."
    )


def _each_once(heads: Iterable[HeadScore]) -> list[HeadScore]:
    kept: dict[tuple[int, int], HeadScore] = {}
    for head in heads:
        kept.setdefault((head.layer, head.head), head)
    return list(kept.values())


def _failed(head: HeadScore, heads: Iterable[HeadScore]) -> str:
    """What the unit lacks of what decides: its strongest cut, or prefix matching and copying at +1."""
    copying, where = head.copying_edge, ", and no causal test was made"
    if head.decided_by == "causal":
        same = [h for h in heads if (h.layer, h.head) == (head.layer, head.head)]
        own = [h for h in same if h.offset_effect_nats is not None]
        if not own:
            return ""
        cut = max(own, key=lambda h: h.offset_effect_nats or 0.0)
        copying, where = cut.copying_offset, f" at offset {cut.offset:+d}"
        cost = cut.offset_effect_nats or 0.0
        if cost < MIN_EFFECT_NATS:
            return (
                f", and cutting its strongest offset, {cut.offset:+d}, costs {signed(cost)} nats "
                f"({MIN_EFFECT_NATS} is asked)"
            )
    elif head.prefix_matching < MIN_PREFIX_MATCHING:
        return ""
    if copying is None or copying > 0:
        return ""
    return f", but copies too weakly to be called one (copying {signed(copying)}, 0 is asked{where})"


def previous_token_sentence(report: DetectionReport) -> str | None:
    """The strongest previous-token unit, where it is clearly above chance."""
    heads = report.checkpoints[-1].heads
    if not heads:
        return None
    best = max(heads, key=lambda head: head.previous_token)
    if best.previous_token < best.previous_token_chance + 0.3:
        return None
    name = unit_name(best, with_reading=several_readings(heads))
    return f"The strongest previous-token unit is {name} ({signed(best.previous_token)})."


def transition_sentences(report: DetectionReport) -> list[str]:
    """Onsets and the lead; one sentence that there is none; nothing for a single checkpoint."""
    if len(report.checkpoints) < 2:
        return []
    found = report.phase_transition
    if found is None:
        return [
            "No phase transition: the order gain has no step beyond noise "
            "and drift."
        ]
    # A rise that begins below chance is no onset of matching: it has a sentence of its own.
    low = begins_below_chance(found.get("prefix_matching"))
    sentences = [below_chance_sentence(found["prefix_matching"])] if low else []
    there = [
        (name, found[key]["onset_step"])
        for key, name in CURVES.items()
        if found.get(key) is not None and not (low and key == "prefix_matching")
    ]
    if there:
        (name, interval), *others = there
        parts = [f"{name[0].upper()}{name[1:]} sets in between {steps_between(interval)}"]
        parts += [f"{name} between {steps_between(interval)}" for name, interval in others]
        sentences.append(", ".join(parts) + ".")
    absent = [name for key, name in CURVES.items() if found.get(key) is None]
    if absent:
        text, verb = " and ".join(absent), "has" if len(absent) == 1 else "have"
        sentences.append(f"{text[0].upper()}{text[1:]} {verb} no transition.")
    return sentences + ([lead_sentence(found)] if found.get("lead_steps") is not None else [])


def below_chance_sentence(curve: Mapping[str, Any]) -> str:
    """What is said of prefix matching whose rise begins below chance."""
    above = curve["above_chance_from_step"]
    until = "it stays there" if above is None else f"it is above chance from step {above:,}"
    return (
        f"Prefix matching begins to rise between {steps_between(curve['onset_step'])}, below chance "
        f"({signed(curve['chance'], 3)}); {until}."
    )


def lead_sentence(found: Mapping[str, Any]) -> str:
    """Which of two curves changed first, with the interval; or that it cannot be told.

    An onset that lies below chance leads nothing.
    """
    low, high = found["lead_steps"]
    first, second = found.get("lead_of") or ("prefix_matching", "in_context_learning")
    if "prefix_matching" in (first, second) and begins_below_chance(found["prefix_matching"]):
        other = CURVES[second if first == "prefix_matching" else first]
        return f"No lead of prefix matching over {other} is read, as its rise begins below chance."
    if low <= 0 <= high:
        return (
            f"Which of {CURVES[first]} and {CURVES[second]} came first cannot be told at these checkpoints "
            f"(lead {signed(low, 0)} to {signed(high, 0)} steps, 95%)."
        )
    if high < 0:
        low, high, first, second = -high, -low, second, first
    name = CURVES[first]
    return f"{name[0].upper()}{name[1:]} leads {CURVES[second]} by {low:,.0f} to {high:,.0f} steps (95%)."


def finding(report: DetectionReport) -> list[str]:
    """The finding of one report, a sentence an entry."""
    previous = previous_token_sentence(report)
    return [heads_sentence(report), *([previous] if previous else []), *transition_sentences(report)]

"""What is said under each view: plain sentences with the numbers and limits of its figure."""

from interp.dashboard import views
from interp.dashboard.causal import CutProfile
from interp.dashboard.sheet import Sheet
from interp.dashboard.states import StateNorms
from interp.report_text import signed


def number(value: float) -> str:
    """Three decimals with a real minus sign, or three digits where that would show none of them."""
    text = f"{value:.3f}" if value == 0 or abs(value) >= 0.01 else f"{value:.3g}"
    return "0" if float(text) == 0 else text.replace("-", "−")


def map_caption(sheet: Sheet, unit: int, limit: float, shared: bool) -> str:
    """How many tokens, what the colours mean and reach to, and what else there is to know of the prompt."""
    weights = sheet.of(unit)
    low, high = float(weights.min()), float(weights.max())
    colours = f"from {number(-limit if views.is_signed(sheet) else 0.0)} to {number(limit)}"
    said = [
        f"{len(sheet.prompt):,} tokens. Colours: {sheet.quantity}, {colours}"
        + (" on both maps." if shared else ".")
    ]
    if max(high, -low) > limit * (1 + 1e-6):
        said.append(
            f"Weights lie between {number(low)} and {number(high)}; those beyond have the last colour."
        )
    block = -(-len(sheet.prompt) // views.MOST_CELLS)
    if block > 1:
        said.append(f"Each cell stands for {block} × {block} positions; drag over a part for exact values.")
    if sheet.unit == "cluster":
        said.append("Groups of channels are made from this prompt.")
    said += [f"{note[0].upper()}{note[1:]}." for note in sheet.prompt.notes]
    return " ".join(said)


def weight_caption(found: bool) -> str:
    """Under the weights by offset."""
    if not found:
        return "No token comes again in this prompt."
    return (
        "On this prompt. Offset +1 is the token after the earlier copy; dotted: the mean of all earlier "
        "tokens."
    )


def cut_caption(profile: CutProfile) -> str:
    """The strongest offset with its standard error, what it was measured on, and the controls."""
    on = "of the standard probe" if profile.measured_on == "probe" else "(this prompt)"
    one = "sequence" if profile.n_sequences == 1 else "sequences"
    error = (
        "one sequence: no standard error"
        if profile.effect_se is None
        else f"standard error {signed(profile.effect_se)}"
    )
    said = (
        f"Strongest at offset {profile.best:+d}: {signed(profile.effect)} nats above random edges "
        f"({error}); {profile.n_sequences} {one} {on}, "
        f"{profile.n_scored:,} predicted tokens. Cutting the edges to the token before costs "
        f"{signed(profile.previous)}."
    )
    if profile.taps:
        lags = ", ".join(f"lag {lag}: {signed(value)}" for lag, value in enumerate(profile.taps))
        said += f" Without one tap of the short convolution the layer loses (nats) {lags}."
    return said


def wait_caption(n_weights: int) -> str:
    """In place of costs that were not asked for yet."""
    return (
        f"Not measured yet: this model has {n_weights:,} weights, and cutting one unit's edges takes from "
        "seconds to a minute. Press “Measure the cuts” to begin; the other views go on meanwhile."
    )


def state_caption(norms: StateNorms) -> str:
    """Under the norms of the state."""
    one = f"One line for each {norms.unit}; the norm of" if len(norms.norms) > 1 else "The norm of"
    return f"{one} {norms.what}."

"""Definitions printed at the foot of every report page."""

from interp.head_scores import MIN_PREFIX_MATCHING
from interp.induction_test import MIN_COPYING, MIN_EFFECT_NATS, MIN_STANDARD_ERRORS

TERMS = {
    "Prefix matching": (
        "Weight that a position pays to the tokens that followed earlier copies of its own token, on random "
        "tokens repeated in order; summed over those tokens, mean over positions that have one. 1 for a "
        "perfect induction head; chance is what uniform attention gets on the same sequences."
    ),
    "Previous token": ("Weight on the position just before. Chance: uniform attention."),
    "Copying at +1": (
        "On the repeated tokens, the contribution of each edge to the token after an earlier copy goes "
        "straight to the logits: how much it raises that token, against all tokens of the sequence. 4r − 1 "
        "in [−1, 1]; a token raised alone gives 1."
    ),
    "Copying at the offset": (
        "The same for the edges at the unit's strongest offset, which the cut takes out: how much they raise "
        "the token after the earlier copy. Of the two, this one decides whether a unit is an induction head."
    ),
    "Copying (logit)": (
        "The same for whole head outputs on tokens that do not repeat, weighted by attention."
    ),
    "Copying (eigenvalue)": (
        "Sum of the real parts of the eigenvalues of the output-value circuit from token to token, over the "
        "sum of their absolute values; in [−1, 1], 0 for random matrices."
    ),
    "Offset": (
        "Where a unit reads, counted from the earlier copy of the current token: +1 is the token after it, "
        "the textbook target. Where edges were cut, the offset from +1 on whose cut costs most; in other "
        "rows that of the largest weight."
    ),
    "Effect": (
        "What cutting all of a unit's edges at its offset adds to the loss on the predicted tokens, minus "
        "what as many random edges add (nats); everything after the cut is computed anew. The chance level "
        "of a cut is that of the random edges: the dotted line beside the raw cost, 0 once it is "
        "subtracted. Cuts are of the mixer's own reading (pattern, ssm). In the block reading the "
        "convolution is counted in, so that the same circuit is often found at +1 with another cost: rows "
        "of that reading have no cut here; interp.offset_profile with reading='block' makes it, and the "
        "dashboard has it under “Offsets and cuts”."
    ),
    "Strongest unit": (
        "The unit and reading of largest effect where edges were cut, else of highest prefix matching."
    ),
    "Induction head": (
        f"A unit whose effect is at least {MIN_EFFECT_NATS:g} nats and {MIN_STANDARD_ERRORS:g} standard "
        f"errors, and whose copying at the offset is at least {MIN_COPYING:g}. All readings of a unit carry "
        f"the verdict. Where no cut was made: prefix matching of at least {MIN_PREFIX_MATCHING:g}, clearly "
        "above chance, with copying at +1 above 0."
    ),
    "Order gain": (
        "Loss on later copies when each copy is shuffled on its own, minus the loss when they are in order "
        "(nats). It is 0 for a model that only learns which tokens occur."
    ),
    "ICL score": (
        "Loss at one late token of the window minus loss at one early token (nats; the two positions stand "
        "above, under ICL score); below 0 when context helps. Not all of it is induction. On data with a "
        "fixed structure the two places may miss where context helps (the last tokens of a segment copy are "
        "random again): loss by position tells more. Curves over training, and their transitions, are of "
        "means around the two places: two single tokens are too noisy to date."
    ),
    "Onset": (
        "The two checkpoints between which a curve has done 10% of its fitted rise (order gain: crosses 0.1 "
        "nats). “95%” are bootstrap intervals over sequences. A rise that begins below chance is no onset of "
        "matching: the table says from which checkpoint on the score is above chance."
    ),
    "Lead": (
        "How many steps one onset comes before another, as a 95% interval that counts the gaps between "
        "checkpoints in. An interval with 0 in it does not tell which came first."
    ),
    "Readings": (
        "pattern: the attention matrix that makes the output. ssm: the implied attention of a state-space "
        "recurrence alone. block: the whole mixer, its convolution and gate included, by norms of "
        "contribution vectors."
    ),
    "Normalisation": (
        "none: the weights as they are. abs_row: absolute value over the row's sum. contribution: norm of the"
        " contribution vector over the row's sum."
    ),
}

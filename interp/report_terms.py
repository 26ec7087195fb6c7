"""Definitions printed at the foot of every report page."""

TERMS = {
    "Prefix matching": (
        "Weight that a position pays to the tokens that followed earlier copies of its own token, on random "
        "tokens repeated in order; summed over those tokens, mean over positions that have one. 1 for a "
        "perfect induction head; chance is what uniform attention gets on the same sequences."
    ),
    "Previous token": ("Weight on the position just before. Chance: uniform attention."),
    "Copying (edge)": (
        "On the repeated tokens, the contribution of each induction edge alone goes straight to the logits: "
        "how much it raises the token it reads, against all tokens of the sequence. 4r − 1 in [−1, 1]; a "
        "token raised alone gives 1."
    ),
    "Copying (logit)": (
        "The same for whole head outputs on tokens that do not repeat, weighted by attention."
    ),
    "Copying (eigenvalue)": (
        "Sum of the real parts of the eigenvalues of the output-value circuit from token to token, over the "
        "sum of their absolute values; in [−1, 1], 0 for random matrices."
    ),
    "Order gain": (
        "Loss on later copies when each copy is shuffled on its own, minus the loss when they are in order "
        "(nats). It is 0 for a model that only learns which tokens occur."
    ),
    "ICL score": (
        "Loss late in the sequence minus loss early (nats); below 0 when context helps. Not all of it "
        "is induction."
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

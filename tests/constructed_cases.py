"""What the tests of the instruments share: the wired models to test on, and the probe."""

from interp.sequences import RepeatedTokens, candidates, repeated_tokens

# Kind and offset of the match.
CASES = (
    ("softmax", 1),
    ("linear", 1), ("linear", 3),
    ("mamba1", 1), ("mamba1", 2),
    ("mamba2", 1), ("mamba2", 3),
)  # fmt: skip


def probe(n_sequences: int = 3, period: int = 25, repeats: int = 3) -> RepeatedTokens:
    """Repeated tokens in the vocabulary of the wired models."""
    return repeated_tokens(n_sequences, period, repeats, ids=candidates(32))

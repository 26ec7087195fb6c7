"""The attention maps that a detection keeps: of the units that matter most, on one sequence of the probe."""

import torch
from torch import Tensor

from interp.plan import Plan
from interp.records import AttentionMap, CheckpointScores, HeadScore, by_prefix_matching
from interp.subject import LayerView, Subject


def attention_maps(
    subject: Subject, plan: Plan, scored: CheckpointScores, n_maps: int, units: str | None
) -> tuple[AttentionMap, ...]:
    """Maps of the strongest units by prefix matching and of the strongest previous-token one, on the first
    sequence.
    """
    if n_maps < 1:
        return ()
    by_prefix = by_prefix_matching(scored.heads)
    before = max(scored.heads, key=lambda head: head.previous_token)
    chosen = by_prefix[: n_maps - (before not in by_prefix[:n_maps])]
    chosen = chosen if before in chosen else [*chosen, before]
    tokens = plan.probe.tokens[:1]
    words = tuple(subject.token_text(int(token)) for token in tokens[0])
    found: dict[tuple[int, str, int], Tensor] = {}

    def look(view: LayerView) -> None:
        for reading in view.readings:
            heads = [h.head for h in chosen if (h.layer, h.reading) == (view.layer, reading.name)]
            weights = reading.weights()[0] if heads else None
            found.update({(view.layer, reading.name, head): weights[head] for head in heads})

    with torch.no_grad():
        subject.visit(tokens, look, units=units)
    return tuple(
        _map(head, scored.step, words, found[head.layer, head.reading, head.head]) for head in chosen
    )


def _map(head: HeadScore, step: int, words: tuple[str, ...], weights: Tensor) -> AttentionMap:
    rounded = [[round(value, 5) for value in row] for row in weights.tolist()]
    return AttentionMap(
        step=step,
        layer=head.layer,
        head=head.head,
        unit=head.unit,
        reading=head.reading,
        normalisation=head.normalisation,
        tokens=words,
        matrix=tuple(tuple(row) for row in rounded),
    )

"""Detection reports made by rule, for tests of figures and pages: every number in them is known."""

import numpy as np

from interp.phase_transition import from_checkpoints
from interp.records import AttentionMap, CheckpointScores, DetectionReport, HeadScore, ProbeRecord

STEPS = (
    0,
    10,
    20,
    40,
    60,
    80,
    100,
    125,
    150,
    175,
    200,
    225,
    250,
    300,
    350,
    400,
    500,
    600,
    800,
    1000,
    1500,
    2000,
)
NASTY = (
    "<script>alert(1)</script>",
    "&amp;",
    "'\"",
    "שלום",
    "مرحبا",
    "🙂",
    "👩‍🔬",
    "\n",
    "\t",
    " the",
    "�",
    "\u202eevil",
    "\ud83d",
    "a" * 60,
)


def sigmoid(step, midpoint, scale=0.2):
    return 1 / (1 + np.exp(-(np.log(max(step, 1)) - np.log(midpoint)) / scale))


def head_score(
    layer, head, prefix, rng, *, reading="pattern", unit="head", mixer="softmax", previous=0.05, edge=0.0
):
    samples = prefix + 0.02 * rng.standard_normal(16)
    mean = float(samples.mean())
    return HeadScore(
        layer=layer,
        head=head,
        unit=unit,
        reading=reading,
        mixer=mixer,
        normalisation={"pattern": "none", "ssm": "abs_row"}.get(reading, "contribution"),
        prefix_matching=mean,
        prefix_matching_se=float(samples.std() / 4),
        prefix_matching_chance=0.041,
        prefix_matching_latest=mean * 0.6,
        prefix_matching_pairs=mean * 0.5,
        previous_token=float(previous),
        previous_token_se=0.004,
        previous_token_chance=0.052,
        first_position=0.1,
        copying=float(edge * 0.7),
        copying_se=0.02,
        copying_2r=float(edge * 0.6),
        copying_with_bos=None,
        copying_edge=float(edge),
        copying_edge_se=0.01,
        copying_edge_argmax=max(0.0, float(edge)),
        copying_eigenvalue=float(edge * 0.8) if mixer == "softmax" else None,
        copying_eigenvalue_null_sd=0.1,
        copying_eigenvalue_form=None,
        offset=1,
        weight_by_offset=(mean, 0.05, 0.03, 0.02),
        is_induction=bool(mean > 0.341 and edge > 0),
        prefix_matching_by_sequence=tuple(samples.tolist()),
    )


def heads_at(step, rng, mixer, n_heads):
    rise = sigmoid(step, 260)
    found = []
    for layer in range(2):
        for head in range(1 if mixer == "mamba1" else n_heads):
            strong = layer == 1 and head in (0, 2)
            prefix = 0.04 + (0.88 - 0.25 * head) * rise * strong + 0.03 * rng.random()
            previous = 0.05 + 0.85 * sigmoid(step, 180) * (layer == 0 and head == 1)
            edge = (0.9 - 0.2 * head) * rise if strong else 0.25 * np.sin(3 * head + layer)
            readings = ("pattern",) if mixer == "softmax" else ("ssm", "block")
            for reading in readings:
                unit = "layer" if mixer == "mamba1" else "head"
                scaled = prefix if reading != "ssm" else 0.05 + 0.4 * (prefix - 0.04)
                options = {
                    "reading": reading,
                    "unit": unit,
                    "mixer": mixer,
                    "previous": previous,
                    "edge": edge,
                }
                found.append(head_score(layer, head, scaled, rng, **options))
    return tuple(found)


def attention(tokens, rng, *, signed=False, strength=0.8):
    n = len(tokens)
    weights = np.tril(rng.random((n, n)) ** 4)
    for i, token in enumerate(tokens):
        for j in range(i):
            if tokens[j] == token and j + 1 <= i:
                weights[i, j + 1] += strength * weights[i].sum()
    weights /= np.maximum(weights.sum(1, keepdims=True), 1e-9)
    if signed:
        weights *= np.sign(rng.standard_normal((n, n)) + 0.8)
    return tuple(tuple(row) for row in weights.tolist())


def report(
    *,
    mixer="softmax",
    steps=STEPS,
    n_heads=4,
    transition=True,
    nasty=False,
    path="runs/segment-copy-softmax",
    n=24,
):
    """A series (or one checkpoint) of a two-layer model whose head L1H0 becomes an induction head around
    step 260."""
    rng = np.random.default_rng(0)
    checkpoints = []
    for step in steps:
        at = step if transition else 0
        order, learning = 3.1 * sigmoid(at, 280, 0.25), -0.55 * sigmoid(at, 420, 0.3)
        orders = order + 0.3 * rng.standard_normal(32)
        windows = learning + 0.3 * rng.standard_normal(32)
        positions = np.arange(128)
        loss = (
            4.2
            - 1.4 * sigmoid(step, 60, 0.8)
            + (learning * 2) * (1 - np.exp(-positions / 30))
            + 0.05 * rng.random(128)
        )
        checkpoints.append(
            CheckpointScores(
                step=step,
                loss_nats=float(loss.mean()),
                in_context_learning_nats=float(windows.mean()),
                in_context_learning_se_nats=float(windows.std() / 32**0.5),
                icl_positions=(120, 20),
                repeat_loss_nats=float(4 - order),
                first_copy_loss_nats=4.1,
                repeat_gain_nats=float(order),
                order_gain_nats=float(orders.mean()),
                order_gain_se_nats=float(orders.std() / 32**0.5),
                hit_loss_nats=None,
                heads=heads_at(at, rng, mixer, n_heads),
                order_gain_by_sequence=tuple(orders.tolist()),
                in_context_learning_by_window=tuple(windows.tolist()),
                loss_by_position_nats=tuple(loss.tolist()),
            )
        )
    found = from_checkpoints(checkpoints)
    words = (
        NASTY
        if nasty
        else tuple("Ġthe cat sat on a mat and then it slept , while the".replace("Ġ", " ").split())
    )
    tokens = tuple(words[i % 12] for i in range(n)) if not nasty else words * 2
    pictures = [(0, 1, False), (1, 0, mixer != "softmax"), (1, 2, False)]
    maps = tuple(
        AttentionMap(
            step=steps[-1],
            layer=layer,
            head=head,
            unit="layer" if mixer == "mamba1" else "head",
            reading="pattern" if mixer == "softmax" else "ssm" if signed else "block",
            normalisation="none" if mixer == "softmax" or signed else "contribution",
            tokens=tokens,
            matrix=attention(tokens, rng, signed=signed, strength=3 if layer else 0),
        )
        for layer, head, signed in pictures
    )
    probe = ProbeRecord(
        period=25,
        repeats=4,
        n_sequences=16,
        seed=0,
        bos=None,
        loss_period=50,
        loss_repeats=2,
        d_candidates=60,
    )
    return DetectionReport(
        path=path,
        mixers=(mixer, mixer),
        n_layers=2,
        n_heads=n_heads,
        probe=probe,
        checkpoints=tuple(checkpoints),
        phase_transition=found,
        attention_maps=maps,
        notes=("The probe was shortened to 25 tokens: the context is 128.",),
        text="standard library",
        versions={"torch": "2.13.0", "beyond-softmax": "0.1.0"},
    )

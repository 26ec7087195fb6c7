"""The figure of the offset tables shows the measured lines, each once."""

import json

from experiments.offset_figure import offset_figure, points
from experiments.offset_table import RESULTS


def test_every_measured_line_is_a_point():
    rows = [
        json.loads(line)
        for name in ("offset_table.jsonl", "offset_text_table.jsonl")
        for line in (RESULTS / name).read_text("utf-8").splitlines()
    ]
    found = points(RESULTS)
    figure = offset_figure(found)
    assert len(found) == len(rows)
    shown = sorted((x, y) for trace in figure.data for x, y in zip(trace.x, trace.y, strict=True))
    wanted = sorted(
        ((row.get("probe") or {}).get("textbook_prefix") if "text" in row else row["textbook_prefix"],
         row["probe"]["effect_nats"] if "text" in row else row["effect_nats"])
        for row in rows
    )
    assert shown == wanted


def test_mixers_without_a_convolution_are_open():
    figure = offset_figure(points(RESULTS))
    symbols = {
        text.split(",")[0]: symbol
        for trace in figure.data
        for text, symbol in zip(trace.text, trace.marker.symbol, strict=True)
    }
    assert symbols["copy-softmax"] == "diamond-open"
    assert symbols["gpu-text-softmax-conv"] == "square"
    assert symbols["periodic-mamba2-1l"] == "circle"

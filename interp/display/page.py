"""The HTML and the plain text of a record's display."""

import html
import math
from types import ModuleType
from typing import TYPE_CHECKING, Any

from interp.figures.still import data_address
from interp.figures.token_text import visible
from interp.report_text import signed

if TYPE_CHECKING:
    import pandas as pd

# Notebooks say in their own ways that they are dark; the dark picture stays hidden where none is known.
STYLE = """
.bsx{max-width:900px;font-size:13px}.bsx p{margin:0 0 4px}.bsx .bsx-scroll{overflow-x:auto;margin:6px 0}
.bsx table{border-collapse:collapse;font-size:13px;font-variant-numeric:tabular-nums;margin:0}
.bsx th,.bsx td{padding:3px 6px;text-align:right;vertical-align:bottom}
.bsx td{white-space:nowrap}.bsx th{white-space:normal}
.bsx tr{border-bottom:1px solid rgba(128,128,128,.25)}
.bsx th:first-child,.bsx td:first-child{text-align:left}.bsx img{max-width:100%;height:auto}
.bsx .bsx-small{opacity:.7;font-size:12px}
body[data-jp-theme-light="false"] .bsx .bsx-light,body.vscode-dark .bsx .bsx-light{display:none!important}
body[data-jp-theme-light="false"] .bsx .bsx-dark,body.vscode-dark .bsx .bsx-dark{display:block!important}
"""


def escaped(text: object) -> str:
    """Text for HTML, controls and bidirectional characters made visible."""
    return html.escape(visible(str(text)).replace("␣", " "), quote=True)


def bundle(record: Any, module: ModuleType) -> dict[str, str]:
    """Display of a record as `text/html` and `text/plain`.

    Args:
        module: Of `interp.display`, with `words`, `shown` and `figure` for this record.
    """
    words, table = module.words(record), module.shown(record)
    paragraphs = "".join(f"<p>{escaped(text)}</p>" for text in words)
    name = type(record).__name__
    parts = [f"<style>{STYLE}</style>", paragraphs, _pictures(record, module, words), html_table(table)]
    plain = "\n".join([f"{name}: {' '.join(words)}", *([] if table.empty else ["", plain_table(table)])])
    if left_out := table.attrs.get("left_out", 0):
        plain += f"\nand {left_out:,} more rows: to_pandas()"
    return {"text/html": f'<div class="bsx">{"".join(parts)}</div>', "text/plain": plain}


def _pictures(record: Any, module: ModuleType, words: list[str]) -> str:
    light = module.figure(record, "light")
    if light is None:
        return ""
    alt = escaped(words[0] if words else type(record).__name__)
    found = f'<img class="bsx-light" alt="{alt}" src="{data_address(light)}">'
    dark = data_address(module.figure(record, "dark"))
    return found + f'<img class="bsx-dark" style="display:none" alt="{alt}" src="{dark}">'


def text_of(value: Any) -> str:
    """One cell: numbers to three places or significant digits, a dash for what was not measured."""
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "–"
    if isinstance(value, int):
        return f"{value:,}".replace("-", "−")
    if isinstance(value, float):
        return signed(value, 3) if abs(value) < 1000 else f"{value:,.0f}".replace("-", "−")
    return str(value)


def html_table(table: "pd.DataFrame") -> str:
    """A table of escaped cells; nothing for an empty one."""
    if table.empty:
        return ""
    head = "".join(f"<th>{escaped(name)}</th>" for name in table.columns)
    body = "".join(
        "<tr>" + "".join(f"<td>{escaped(text_of(value))}</td>" for value in row) + "</tr>"
        for row in _rows(table)
    )
    left_out = table.attrs.get("left_out", 0)
    more = f'<p class="bsx-small">and {left_out:,} more rows: to_pandas()</p>' if left_out else ""
    drawn = f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
    # Some viewers drop the style sheet and keep what stands on the element.
    return f'<div class="bsx-scroll" style="overflow-x:auto">{drawn}</div>{more}'


def plain_table(table: "pd.DataFrame") -> str:
    """The same table in columns of plain text."""
    rows = [
        [str(name) for name in table.columns],
        *([text_of(value) for value in row] for row in _rows(table)),
    ]
    widths = [max(len(row[k]) for row in rows) for k in range(len(rows[0]))]
    return "\n".join(
        "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows
    )


def _rows(table: "pd.DataFrame") -> list[tuple[Any, ...]]:
    """Rows of plain Python values."""
    columns = [[v.item() if hasattr(v, "item") else v for v in table[name]] for name in table.columns]
    return list(zip(*columns, strict=True))


def first_rows(rows: list[dict[str, Any]], most: int) -> "pd.DataFrame":
    """A table of at most `most` rows that knows how many were left out."""
    import pandas as pd

    table = pd.DataFrame(rows[:most], dtype=object)
    table.attrs["left_out"] = max(len(rows) - most, 0)
    return table

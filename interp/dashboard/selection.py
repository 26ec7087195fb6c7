"""What one side of the page has chosen: model, checkpoint, layer, reading, unit."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from interp.dashboard.quotation import quoted
from interp.dashboard.sheet import VALUES
from interp.errors import DetectionError


@dataclass(frozen=True, kw_only=True)
class Selection:
    """Comes with every request, and is checked: it may be of another window, or made by hand."""

    run: int = 0
    step: int = 0
    layer: int = 0
    reading: str
    units: str = "head"
    head: int = 0
    values: str = "scored"

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> "Selection":
        """From the page's store.

        Raises:
            DetectionError: a member is missing or of another kind.
        """
        found = {}
        for part in fields(cls):
            value = values.get(part.name)
            if type(value) is not part.type:
                raise DetectionError(f"{part.name} is {quoted(value)}; choose one in the panel on the left")
            found[part.name] = value
        if found["values"] not in VALUES:
            raise DetectionError(f"values {quoted(found['values'])}; accepted: {', '.join(VALUES)}")
        return cls(**found)

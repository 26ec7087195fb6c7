"""Records that show themselves in a notebook and turn into tables: the methods, without what they draw with.

What is drawn stands in `interp.display`, one module a kind of record, imported when it is asked for: records
stay small, and a command that prints them needs neither pandas nor plotly.
"""

import importlib
from dataclasses import fields
from types import ModuleType
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    import pandas as pd
    import plotly.graph_objects as go


class Displayed:
    """A record shown by the module of `interp.display` that its class names.

    class X(Displayed, display="x")
    """

    _display: ClassVar[str]

    def __init_subclass__(cls, *, display: str | None = None, **options: Any):
        super().__init_subclass__(**options)
        if display is not None:
            cls._display = display
            # A record is a line, also in a list. IPython and dataclasses ask the class itself, and would
            # else print every number.
            cls._repr_pretty_ = cls._repr_pretty_
            if "__repr__" not in cls.__dict__:
                cls.__repr__ = Displayed._printed

    def to_pandas(self) -> "pd.DataFrame":
        """Every number of the record as one table; what was not measured is missing."""
        return self._module().to_pandas(self)

    def figure(self, *, mode: str = "light") -> "go.Figure | None":
        """The record's figure, `light` or `dark`; None where there is none."""
        return self._module().figure(self, mode)

    def _module(self) -> ModuleType:
        return importlib.import_module(f"interp.display.{self._display}")

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, str]:
        from interp.display.page import bundle

        return bundle(self, self._module())

    def _repr_html_(self) -> str:
        return self._repr_mimebundle_()["text/html"]

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        printer.text(self._in_words())

    def _printed(self) -> str:
        try:
            return self._in_words()
        except ModuleNotFoundError:
            # Without pandas: every number.
            shown = (f"{one.name}={getattr(self, one.name)!r}" for one in fields(self) if one.repr)
            return f"{type(self).__name__}({', '.join(shown)})"

    def _in_words(self) -> str:
        return f"{type(self).__name__}: {' '.join(self._module().words(self))}"

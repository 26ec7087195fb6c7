"""What a browser sends to the callbacks, checked at one place before any of them sees it: 400 and why.

The page sends none of what is refused here; other programs may. What is chosen (`Selection`, `PromptSpec`) is
checked where it is read, and ends as a message on the page.
"""

import math
from collections.abc import Callable
from typing import Any

from dash import Dash
from flask import Response, request
from werkzeug.exceptions import RequestEntityTooLarge

from interp.dashboard.quotation import quoted
from interp.figures.theme import MODES

_PATH = "/_dash-update-component"
Check = Callable[[Any], bool]


class MalformedError(ValueError):
    """A request that the page never sends, in one line."""


def refuse_malformed(app: Dash) -> None:
    """Answer malformed requests for callbacks with 400 and one line."""

    @app.server.before_request
    def check() -> Response | None:
        if request.path != _PATH or request.method != "POST":
            return None
        try:
            check_body(app, _body())
        except MalformedError as error:
            return Response(f"400: {error}\n", status=400, mimetype="text/plain")
        return None


def _body() -> Any:
    try:
        return request.get_json(force=True)
    except RequestEntityTooLarge:
        raise
    # Not JSON, not UTF-8, numbers of thousands of digits, thousands of brackets.
    except Exception:
        raise MalformedError("the body cannot be read as JSON") from None


def check_body(app: Dash, body: Any) -> None:
    """Refuse a body that names no callback of the server, or whose values are of another kind.

    Raises:
        MalformedError: it names the part, and what it is.
    """
    if not isinstance(body, dict):
        raise MalformedError("the body is no JSON object")
    output = body.get("output")
    callback = app.callback_map.get(output) if isinstance(output, str) else None
    if callback is None or "callback" not in callback:
        raise MalformedError(f"output is {quoted(output)}; no such callback")
    outputs = body.get("outputs")
    listed = outputs if isinstance(outputs, list) else [outputs]
    if not all(_names_property(one) for one in listed):
        raise MalformedError("outputs must be of the form {id, property}")
    if output.startswith("..") != isinstance(outputs, list) or len(listed) != len(_parts(output)):
        raise MalformedError("outputs are not those of the callback")
    changed = body.get("changedPropIds", [])
    if not isinstance(changed, list) or not all(_is_text(one) and "." in one for one in changed):
        raise MalformedError("changedPropIds must be a list of id.property")
    for kind in ("inputs", "state"):
        _check_values(kind, body.get(kind, []), callback[kind])


def _parts(output: str) -> list[str]:
    return output[2:-2].split("...") if output.startswith("..") else [output]


def _names_property(one: Any) -> bool:
    return isinstance(one, dict) and isinstance(one.get("id"), str | dict) and _is_text(one.get("property"))


def _check_values(kind: str, given: Any, wanted: list[dict[str, Any]]) -> None:
    if not isinstance(given, list) or not all(_names_property(one) for one in given):
        raise MalformedError(f"{kind} must be a list of {{id, property, value}}")
    names = [f"{one['id']}.{one['property']}" for one in wanted]
    if [f"{one['id']}.{one['property']}" for one in given] != names:
        raise MalformedError(f"{kind} are not those of the callback: {', '.join(names) or 'none'}")
    for name, one in zip(names, given, strict=True):
        accepts = _KINDS.get(name.split("-", 1)[1] if name[:2] in ("a-", "b-") else name, _is_anything)
        if not accepts(one.get("value")):
            raise MalformedError(f"{name} is {quoted(one.get('value'))}: of another kind, or not offered")


def _is_anything(value: Any) -> bool:
    return True


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_number(value: Any) -> bool:
    return type(value) is int and 0 <= value < 1 << 53


def _or_none(check: Check) -> Check:
    return lambda value: value is None or check(value)


def _is_object(value: Any) -> bool:
    return isinstance(value, dict)


def _is_request(value: Any) -> bool:
    """What a view is asked: both sides, the prompt, the colours."""
    return (
        isinstance(value, dict)
        and all(_or_none(_is_object)(value.get(name)) for name in ("a", "b", "prompt"))
        and value.get("a") is not None
        and value.get("mode") in MODES
    )


def _is_move(value: Any) -> bool:
    """What plotly says of a moved map: the ends of its axes are finite numbers, both of each."""
    if not isinstance(value, dict):
        return False
    starts = [name for name in value if name.endswith(".range[0]")]
    return all(name.replace("[0]", "[1]") in value for name in starts) and all(
        isinstance(end, int | float) and math.isfinite(end) and abs(end) < 1 << 31
        for name, end in value.items()
        if ".range[" in name
    )


def _are_texts(value: Any) -> bool:
    return isinstance(value, list) and all(map(_is_text, value))


# By id (without the side) and property.
_KINDS: dict[str, Check] = {
    "run.value": _is_number,
    "layer.value": _is_number,
    "head.value": _or_none(_is_number),
    "units.value": _is_text,
    "reading.value": _is_text,
    "selection.data": _or_none(_is_object),
    "map.relayoutData": _or_none(_is_move),
    "prompt.data": _or_none(_is_object),
    "targets.value": _or_none(_are_texts),
    "contrast.value": _or_none(_is_text),
    "measured-on.value": _is_text,
    "measure.n_clicks": _or_none(_is_number),
    "poll.n_intervals": _or_none(_is_number),
    "room.data": _or_none(_is_number),
    "selected.data": _or_none(_is_number),
    **{f"{view}-request.data": _or_none(_is_request) for view in ("attention", "cuts", "training", "state")},
}

"""Requests for callbacks by hand: malformed ones end as 400 in one line, unknown choices as a message."""

import copy
import json
import time

import pytest

from interp.dashboard.app import make_app
from interp.dashboard.desk import Desk

GOOD = {"run": 0, "step": 4, "layer": 1, "reading": "pattern", "units": "head", "head": 2, "values": "scored"}
PROMPT = {"kind": "probe", "period": 5, "repeats": 3, "seed": 0, "sample": 0, "text": ""}
VIEWS = ("attention", "cuts", "training", "state")


@pytest.fixture(scope="module")
def client(wired_run):
    desk = Desk([str(wired_run)])
    yield make_app(desk).server.test_client()
    # A thread of torch must not outlive the tests.
    end = time.monotonic() + 60
    while (found := desk.scoring.of(desk.runs[0])).report is None and found.error is None:
        assert time.monotonic() < end
        time.sleep(0.02)


@pytest.fixture(scope="module")
def callbacks(client):
    return [one for one in client.get("/_dash-dependencies").json if not one.get("clientside_function")]


def asked(a, **others):
    return {"a": a, "b": None, "prompt": PROMPT, "mode": "light", **others}


VALUES = {
    **{f"{view}-request.data": asked(GOOD) for view in VIEWS},
    **{f"{side}-selection.data": GOOD for side in "ab"},
    **{f"{side}-run.value": 0 for side in "ab"},
    **{f"{side}-layer.value": 1 for side in "ab"},
    **{f"{side}-head.value": 2 for side in "ab"},
    **{f"{side}-units.value": "head" for side in "ab"},
    **{f"{side}-reading.value": "pattern" for side in "ab"},
    "prompt.data": PROMPT,
    "targets.value": ["on"],
    "contrast.value": "largest",
    "measured-on.value": "prompt",
}


def body_of(callback, **values):
    def names(one):
        identity, name = one.rsplit(".", 1)
        return {"id": json.loads(identity) if identity.startswith("{") else identity, "property": name}

    output = callback["output"]
    many = output.startswith("..")
    outputs = [names(one) for one in (output[2:-2].split("...") if many else [output])]
    found = {"output": output, "outputs": outputs if many else outputs[0]}
    for kind in ("inputs", "state"):
        found[kind] = [
            {**one, "value": {**VALUES, **values}.get(f"{one['id']}.{one['property']}")}
            for one in callback[kind]
        ]
    first = callback["inputs"][0]
    return {**found, "changedPropIds": [f"{first['id']}.{first['property']}"]}


def sent(client, body):
    return client.post("/_dash-update-component", json=body)


def of_view(callbacks, view):
    return [one for one in callbacks if one["inputs"][0]["id"] == f"{view}-request"]


def test_what_the_page_sends_is_answered(client, callbacks):
    for callback in callbacks:
        assert sent(client, body_of(callback)).status_code in (200, 204), callback["output"]


WRONG = [None, True, -1, 2.5, 1 << 70, "x" * 9999, [], [1], {}, {"a": 1}, {"run": []}, [[]], ""]


def test_values_of_any_kind_end_in_an_answer(client, callbacks):
    seen = set()
    for callback in callbacks:
        places = [(kind, n) for kind in ("inputs", "state") for n in range(len(callback[kind]))]
        for kind, n in places:
            for wrong in WRONG:
                body = body_of(callback)
                body[kind][n]["value"] = wrong
                answer = sent(client, body)
                assert answer.status_code in (200, 204, 400), (callback["output"], kind, n, wrong)
                if answer.status_code == 400:
                    assert answer.text.count("\n") == 1 and len(answer.text) < 200
                seen.add(answer.status_code)
    assert seen == {200, 204, 400}


def test_choices_of_any_kind_end_in_an_answer(client, callbacks):
    for view in VIEWS:
        for callback in of_view(callbacks, view):
            for part, good in (("a", GOOD), ("prompt", PROMPT)):
                for name in good:
                    for wrong in WRONG:
                        data = {**asked(GOOD), part: {**good, name: wrong}}
                        answer = sent(client, body_of(callback, **{f"{view}-request.data": data}))
                        assert answer.status_code in (200, 400), (view, part, name, wrong)


@pytest.mark.parametrize("view", ["attention", "cuts", "state"])
@pytest.mark.parametrize(
    "wrong, message",
    [
        ({"run": -1}, "model -1; open are 0..0"),
        ({"step": 99}, "has checkpoints 0..4; asked for 99"),
        ({"step": -1}, "has checkpoints 0..4; asked for -1"),
        ({"layer": 99}, "layer 99: the model has layers 0..1"),
        ({"layer": -1}, "layer -1: the model has layers 0..1"),
        ({"reading": "ssm"}, "layer 1 has no reading 'ssm'; accepted: pattern"),
        ({"units": "state"}, "layer 1 has no units 'state'; accepted: head"),
        ({"head": -1}, "layer 1 has heads 0..3; asked for -1"),
        ({"head": 4}, "layer 1 has heads 0..3; asked for 4"),
    ],
)
def test_a_choice_that_is_not_there_is_a_message(client, callbacks, view, wrong, message):
    data = asked({**GOOD, **wrong})
    answers = [
        sent(client, body_of(callback, **{f"{view}-request.data": data}))
        for callback in of_view(callbacks, view)
    ]
    assert {answer.status_code for answer in answers} == {200}
    assert any(message in answer.text for answer in answers), answers[0].text


def test_bodies_of_any_kind_end_in_one_line(client, callbacks):
    good = body_of(of_view(callbacks, "state")[0])
    bodies = [None, [], "x", 3, {}, {**good, "output": "x.y"}, {**good, "output": []}]
    bodies += [{**good, "outputs": wrong} for wrong in (None, [], [1], {"id": 1}, good["outputs"][:1])]
    bodies += [{**good, "inputs": wrong} for wrong in (None, [], [1], {}, [*good["inputs"], 1])]
    bodies += [{**good, "changedPropIds": wrong} for wrong in (3, [3], "x", ["x"])]
    renamed = copy.deepcopy(good)
    renamed["inputs"][0]["id"] = "cuts-request"
    for body in [*bodies, renamed]:
        answer = sent(client, body)
        assert answer.status_code == 400 and answer.text.startswith("400: "), body
        assert answer.text.count("\n") == 1
    for raw in (b"", b"{", b"\xff", b'{"a": ' + b"9" * 5000 + b"}", b"[" * 100_000):
        answer = client.post("/_dash-update-component", data=raw, content_type="application/json")
        assert answer.status_code == 400 and answer.text.count("\n") == 1, raw[:10]

"""Long input: one short message, never a failed conversion."""

import pytest

from interp.dashboard.cli import main
from interp.dashboard.desk import Desk
from interp.dashboard.export_choice import choose
from interp.dashboard.prompt import PromptError, PromptSpec, make_prompt
from interp.dashboard.quotation import quoted, whole_number
from interp.dashboard.run import Run
from interp.dashboard.selection import Selection
from interp.errors import DetectionError

LONG = "9" * 5000


def test_quotations_are_short():
    assert quoted("a'b") == '"a\'b"' and quoted(2.5) == "2.5"
    assert quoted("x" * 40) == repr("x" * 40) and quoted("x" * 41) == repr("x" * 40) + "…"
    assert len(quoted(list(range(1000)))) == 41


@pytest.mark.parametrize(
    "digits, number",
    [("0", 0), ("31", 31), ("32", 32), ("33", 33), ("34", 33), (LONG, 33), ("0" * 9000 + "7", 7)],
)
def test_numbers_of_any_length(digits, number):
    assert whole_number(digits, 32) == number


@pytest.mark.parametrize("text, word", [(LONG, "Unknown token 999"), ("x" * 100_000, "not 'xxx")])
def test_a_typed_prompt_is_quoted_in_part(wired_run, text, word):
    run = Run(str(wired_run))
    with pytest.raises(PromptError, match=word) as refused:
        make_prompt(run, run.load(4).subject, PromptSpec(kind="typed", text=text))
    assert "…" in str(refused.value) and len(str(refused.value)) < 200


@pytest.mark.parametrize(
    "name, form", [("heads", "L{}"), ("heads", "L1H{}"), ("heads", "{}"), ("steps", "{}")]
)
def test_a_choice_is_quoted_in_part(wired_run, name, form):
    with pytest.raises(DetectionError, match="999") as refused:
        choose(Desk([str(wired_run)]), **{name: form.format(LONG)})
    assert "…" in str(refused.value) and len(str(refused.value)) < 250


def test_a_prompt_and_a_port_of_the_command(wired_run, tmp_path, capsys):
    assert main([str(wired_run), "--export", str(tmp_path / "x.html"), "--prompt", LONG]) == 1
    said = capsys.readouterr().err.splitlines()[-1]
    assert said.startswith("attention-dashboard: error: Unknown token 999") and len(said) < 250
    with pytest.raises(SystemExit):
        main([str(wired_run), "--port", LONG])
    assert "accepted are 0 to 65535" in capsys.readouterr().err


def test_what_a_page_sends_is_quoted_in_part():
    with pytest.raises(DetectionError) as refused:
        Selection.of({"run": "x" * 9999})
    assert len(str(refused.value)) < 120
    with pytest.raises(PromptError) as refused:
        PromptSpec.of({"kind": "k" * 9999})
    assert len(str(refused.value)) < 120

"""models/README.md: its code runs, and it lists every hook point, with the forms in which it fires."""

import re
from pathlib import Path

import language_models

from models import Form

README = (Path(__file__).parents[2] / "models" / "README.md").read_text(encoding="utf-8")
LETTERS = {"P": Form.PARALLEL, "C": Form.CHUNKED, "R": Form.RECURRENT}


def test_the_example_runs():
    exec(re.search(r"```python\n(.*?)```", README, re.S)[1], {})


def test_every_point_is_listed_with_its_forms():
    listed: dict[str, set[frozenset[Form]]] = {}
    for row in re.findall(r"^\| (`[^|]*) \| [^|]* \| ([PCR ]+) \|", README, re.M):
        for name in re.findall(r"(hook_\w+)`", row[0]):
            listed.setdefault(name, set()).add(frozenset(LETTERS[c] for c in row[1].split()))
    found: dict[str, set[frozenset[Form]]] = {}
    for name in language_models.CONFIGS:
        for point, forms in language_models.build(name).hook_forms.items():
            found.setdefault(point.split(".")[-1], set()).add(forms)
    assert listed == found

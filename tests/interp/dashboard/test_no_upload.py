"""Plotly's button that uploads a figure is nowhere: on none of our pages, nor in figures shown elsewhere."""

import re
from pathlib import Path

import pytest

from interp import figures
from interp.figures.theme import MODES

ROOT = Path(__file__).parents[3]
# Where a figure is given to plotly.js with a configuration.
DRAWN = re.compile(r"Plotly\.(?:react|newPlot)\(|\.(?:write_html|to_html|show)\(|dcc\.Graph\(")
NAMED = {
    "interp/dashboard/export_views.js",
    "interp/dashboard/layout.py",
    "interp/report.js",
    "experiments/offset_figure.py",
}


def sources():
    for folder in ("interp", "experiments", "models", "kernels"):
        for path in (ROOT / folder).rglob("*"):
            if path.suffix in (".py", ".js", ".ipynb", ".html"):
                yield path.relative_to(ROOT).as_posix(), path.read_text("utf-8")


def test_every_place_that_draws_turns_it_off():
    found = {name for name, text in sources() if DRAWN.search(text)}
    assert found == NAMED
    for name in NAMED:
        text = (ROOT / name).read_text("utf-8")
        assert re.search(r"showSendToCloud\W+[Ff]alse\b", text), name
        assert re.search(r'plotlyServerURL\W+""', text), name


@pytest.mark.xdist_group("browser")
@pytest.mark.parametrize("mode", MODES)
def test_a_figure_shown_with_plotlys_own_defaults_has_no_such_button(browser, tmp_path, mode):
    file = tmp_path / "figure.html"
    figure = figures.attention_map([[1.0, 0.0], [0.5, 0.5]], ["a", "b"], mode=mode)
    figure.write_html(file, include_plotlyjs=True)
    assert titles(browser, file) and not shares(titles(browser, file))
    # The search finds it where it is.
    figure.layout.modebar.remove = ()
    figure.write_html(file, include_plotlyjs=True)
    assert shares(titles(browser, file))


def titles(browser, file):
    """What the figure's buttons say."""
    page = browser.new_page(offline=True)
    page.goto(file.as_uri())
    page.wait_for_selector(".modebar-btn", state="attached")
    found = page.locator(".modebar-btn").evaluate_all("all => all.map((one) => one.dataset.title)")
    page.close()
    return found


def shares(found):
    return [title for title in found if re.search("share|cloud|upload", title, re.IGNORECASE)]

"""Plotly figures of a notebook as still pictures, once that is asked for."""

import plotly.io as pio
import pytest

from interp import figures
from interp.display.still_figures import NAME, still_figures


@pytest.fixture
def renderer():
    """The default renderer, put back afterwards."""
    before = pio.renderers.default
    yield
    pio.renderers.default = before


def test_a_figure_is_one_picture(renderer):
    still_figures()
    assert pio.renderers.default == NAME
    figure = figures.offset_profile({"a": [0.5, 1.0]}, title="<b>bars</b>")
    bundle = figure._repr_mimebundle_()
    assert set(bundle) == {"text/html", "text/plain"}
    assert bundle["text/html"].startswith(
        '<img alt="&lt;b&gt;bars&lt;/b&gt;" src="data:image/svg+xml;base64,'
    )
    assert len(bundle["text/html"]) < 20_000 and "script" not in bundle["text/html"]


def test_without_asking_figures_stay_plotlys(renderer):
    pio.renderers.default = "plotly_mimetype"
    bundle = figures.offset_profile({"a": [0.5, 1.0]})._repr_mimebundle_()
    assert "application/vnd.plotly.v1+json" in bundle

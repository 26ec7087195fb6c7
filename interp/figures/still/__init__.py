"""A figure of this library as one still SVG picture: no script, no network, nothing to install.

For places that show pictures and run nothing: a notebook on a code host, an untrusted notebook, a printed
page. What the figures here are made of is drawn (lines, markers, bars, heatmaps, text, shapes, notes);
controls of animations are left out and the picture shows the frame that the figure shows first.
"""

from interp.figures.still.picture import data_address, svg

__all__ = ["data_address", "svg"]

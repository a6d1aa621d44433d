"""Figures of the published systems, made again: what is expected of each, how it is computed here, how it is drawn."""

from penstock.reproduce.catalog import REPRODUCTIONS
from penstock.reproduce.figures import Claim, Drawing, Evidence, FigureSpec, Plotted, Reproduction, reproduced
from penstock.reproduce.writing import write_figure, write_page

__all__ = [
    "REPRODUCTIONS", "Claim", "Drawing", "Evidence", "FigureSpec", "Plotted", "Reproduction", "reproduced", "write_figure", "write_page",
]  # fmt: skip

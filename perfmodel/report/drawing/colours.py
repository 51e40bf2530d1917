"""Colours: one meaning, one colour, in every picture and plot.

The palette is Okabe and Ito's (2008), made to be distinguished with any colour vision.
"""

__all__ = [
    "BLUE",
    "BOUND_COLOURS",
    "GREEN",
    "GREY",
    "GRID",
    "INK",
    "METRIC_COLOURS",
    "ORANGE",
    "PINK",
    "SKY",
    "VERMILION",
]

BLUE, ORANGE, GREEN, VERMILION, PINK, SKY, GREY = (
    "#0072B2",
    "#E69F00",
    "#009E73",
    "#D55E00",
    "#CC79A7",
    "#56B4E9",
    "#8A8F98",
)
INK = "#1F2933"
GRID = "#E6E9ED"

BOUND_COLOURS = {"compute": BLUE, "memory": GREEN, "communication": ORANGE, "overhead": GREY}
METRIC_COLOURS = {"ttft": BLUE, "tpot": GREEN, "itl": SKY, "e2el": PINK}

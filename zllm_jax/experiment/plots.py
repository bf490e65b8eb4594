"""How plots look and how they are saved: legible at README width, safe for colour-blind readers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure as Canvas

# Okabe and Ito (2008): distinguishable under the common forms of colour blindness.
BLACK, ORANGE, SKY, GREEN, BLUE, VERMILION, PURPLE = (
    "#222222", "#E69F00", "#56B4E9", "#009E73", "#0072B2", "#D55E00", "#CC79A7",
)  # fmt: skip

_STYLE: Any = {
    "font.size": 10,
    "axes.titlesize": 11,
    "axes.titleweight": "bold",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#dddddd",
    "grid.linewidth": 0.6,
    "lines.linewidth": 1.8,
    "lines.markersize": 6,
    "legend.frameon": False,
    "figure.facecolor": "white",
    "svg.fonttype": "none",
    "svg.hashsalt": "zllm",
}


@dataclass(frozen=True)
class Figure:
    """One plot: `draw` fills an empty canvas of `size_in` inches; `caption` is also its text for screen readers."""

    name: str
    caption: str
    draw: Callable[[Canvas], None]
    size_in: tuple[float, float] = (8.0, 4.5)


def save_figure(figure: Figure, folder: Path) -> None:
    """Write `name.png` and `name.svg`. The same results give the same bytes."""
    import matplotlib as mpl
    from matplotlib.figure import Figure as Canvas

    with mpl.rc_context(_STYLE):
        canvas = Canvas(figsize=figure.size_in, layout="constrained")
        figure.draw(canvas)
        canvas.savefig(folder / f"{figure.name}.png", dpi=150, metadata={"Software": None})
        canvas.savefig(folder / f"{figure.name}.svg", metadata={"Date": None})


def plain_ticks(axes: Axes, ticks: list[int]) -> None:
    """Ticks of a logarithmic x axis at the measured points, written out."""
    axes.set_xticks(ticks, [f"{tick:,}" for tick in ticks])
    axes.set_xticks([], minor=True)

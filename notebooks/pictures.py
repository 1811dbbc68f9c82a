"""matplotlib as the notebooks use it: pictures to read on a light page and on a dark one.

Grey ink on no paper, and Okabe and Ito's colours, which people with any kind of colour blindness
tell apart.
"""

import matplotlib.pyplot as plt
from cycler import cycler

from fuel_jax.judge.plots import COLOURS as COLOURS

INK = "#808080"
plt.rcParams.update(
    {
        **dict.fromkeys(("figure.facecolor", "axes.facecolor", "legend.facecolor"), "none"),
        **dict.fromkeys(("text.color", "axes.edgecolor", "axes.labelcolor"), INK),
        **dict.fromkeys(("xtick.color", "ytick.color", "grid.color"), INK),
        **{"axes.prop_cycle": cycler(color=COLOURS), "axes.grid": False, "grid.alpha": 0.3},
        **{"axes.spines.top": False, "axes.spines.right": False, "legend.frameon": False},
        **{"figure.constrained_layout.use": True, "font.size": 10, "image.cmap": "viridis"},
    }
)

"""Style of the figures: the same in every lab, with colours that colour-blind readers can tell apart."""

from __future__ import annotations

# Okabe and Ito, "Color Universal Design" (2008): distinct with every kind of colour vision.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")


def use_style() -> None:
    """Set the course's matplotlib style: sizes that are readable on a slide, a light grid, no top or right frame."""
    import matplotlib as mpl
    from cycler import cycler

    mpl.rcParams.update(
        {
            "axes.prop_cycle": cycler(color=COLOURS),
            "axes.grid": True,
            "axes.spines.top": False,
            "axes.spines.right": False,
            "axes.titleweight": "bold",
            "figure.figsize": (7.5, 4),
            "figure.constrained_layout.use": True,
            "font.size": 11,
            "grid.alpha": 0.3,
            "lines.linewidth": 2,
            "savefig.dpi": 120,
        }
    )

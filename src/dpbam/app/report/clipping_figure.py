"""The paper's Figure 1: clipping two gradients moves their mean. An illustration, from no data."""

from __future__ import annotations

import math
from collections.abc import Sequence

from dpbam.app.report.figure import Figure
from dpbam.app.report.groups import Group
from dpbam.app.report.panels import Arrow, Arrows

Vector = tuple[float, float]

G1: Vector = (1.22, 2.0)
G2: Vector = (-0.97, 0.24)
C = 1.0


def clipping(groups: Sequence[Group] = ()) -> Figure:
    """Two gradients, the clipping norm, both means and the bias between them; takes no run."""
    k1, k2 = clip(G1, C), clip(G2, C)
    plain, clipped = mean(G1, G2), mean(k1, k2)
    arrows = (
        Arrow("g₁", "sample", (0.0, 0.0), G1),
        Arrow("g₂", "sample", (0.0, 0.0), G2),
        Arrow("", "cut", (0.0, 0.0), k1),
        Arrow("", "cut", (0.0, 0.0), k2),
        Arrow("ĝ", "gradient", (0.0, 0.0), plain),
        Arrow("g clip", "clipped", (0.0, 0.0), clipped, side="left"),
        Arrow("bias", "bias", plain, clipped, side="right"),
    )
    length = math.dist(plain, clipped)
    panel = Arrows(
        "",
        arrows,
        circle=C,
        notes=(("|bias|", f"{length:.2f}"), ("C", f"{C:g}")),
        bounds=(-1.3, -1.05, 1.6, 2.3),
    )
    return Figure(
        "clipping",
        "What clipping does",
        "Two gradients, cut to length C, and the means before and after: the difference is a bias "
        "that no averaging removes. The paper's Figure 1.",
        about="nobody",
        panels=[panel],
    )


def clip(g: Vector, c: float) -> Vector:
    """g / max(1, |g| / C).

    Example:
        >>> clip((3.0, 4.0), 1.0)
        (0.6, 0.8)
    """
    m = max(1.0, math.hypot(*g) / c)
    return (g[0] / m, g[1] / m)


def mean(u: Vector, v: Vector) -> Vector:
    """(u + v) / 2."""
    return ((u[0] + v[0]) / 2, (u[1] + v[1]) / 2)

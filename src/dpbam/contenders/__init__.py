"""Rivals of BAM on the bench: plug-ins that come with dpbam, each one entry and one class.

They are registered as those of other packages are (:mod:`dpbam.catalogue`), and no part of the
mechanism knows them. Importing this package imports no torch.
"""

from __future__ import annotations

from dpbam.catalogue import Method, Part

METHODS = (
    Method("disk", "dpbam.contenders.disk:DiSK",
           "noise dominates and steps are many; not with momentum", label="DiSK",
           formula="a d_i(theta + gamma v) + (1 - a) d_i(theta), then a Kalman step",
           reference="Zhang et al. 2025", settings=("lam", "lam_share", "gradient")),
)  # fmt: skip

CLIPPINGS = (
    Part("normalised", "dpbam.contenders.clippings:NormalisedClipping",
         "norms fall below C during training", formula="C d / |d|", reference="Yang et al. 2022"),
    Part("psac", "dpbam.contenders.clippings:PSACClipping",
         "as automatic, with many small gradients", reference="Xia et al. 2023",
         formula="C d / (|d| + r / (|d| + r))"),
    Part("quantile", "dpbam.contenders.clippings:QuantileClipping",
         "C is unknown and norms change", reference="Andrew et al. 2021",
         formula="min(1, C_t / |d|) d, C_t a private quantile of norms",
         cost="noise over C grows by sqrt(1 + rho^2): 0.5% at rho = 0.1"),
    Part("slaclip", "dpbam.contenders.clippings:SlackClipping",
         "the same; the distribution of norms comes with it", reference="Zou et al. 2026",
         formula="min(1, C_t / |d|) d, C_t from the slack C - |clipped d|"),
)  # fmt: skip

#: By the group of entry points that a plug-in of another package would use.
ENTRIES = {"dpbam.methods": METHODS, "dpbam.clippings": CLIPPINGS}

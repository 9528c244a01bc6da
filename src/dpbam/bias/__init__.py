"""The bias of clipping: measurement, decomposition, flatness, advice, and a private release.

What is here is computed from the data without noise: not protected by privacy, do not share. It has
``non_private`` in its names. Two names are exceptions: :class:`PrivateStatistics` adds noise,
and :func:`method_advice` reads no data.
"""

from __future__ import annotations

from dpbam.bias.advisor import Advice, Option, advise, method_advice
from dpbam.bias.decomposition import decompose, flat
from dpbam.bias.flatness import Flatness, measure_flatness
from dpbam.bias.lens import BiasLens
from dpbam.bias.record import BiasRecord, Layer, Norms, Reading
from dpbam.bias.release import PrivateStatistics, ReleasedStatistics

__all__ = [
    "Advice",
    "BiasLens",
    "BiasRecord",
    "Flatness",
    "Layer",
    "Norms",
    "Option",
    "PrivateStatistics",
    "Reading",
    "ReleasedStatistics",
    "advise",
    "decompose",
    "flat",
    "measure_flatness",
    "method_advice",
]

"""What clipping does to the gradients: bias, decomposition, alignment, flatness, advice, releases.

Everything here but :class:`PrivateStatistics` is not private: it is computed from the data without
noise, for the operator's eyes, and carries ``non_private`` in its names.
"""

from __future__ import annotations

from dpbam.bias.advisor import Advice, Option, advise
from dpbam.bias.decomposition import decompose, flat
from dpbam.bias.flatness import Flatness, measure_flatness
from dpbam.bias.lens import BiasLens
from dpbam.bias.record import BIAS_FILE, BiasRecord, Layer, Norms, Reading, append, read
from dpbam.bias.release import PrivateStatistics, ReleasedStatistics

__all__ = [
    "BIAS_FILE",
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
    "append",
    "decompose",
    "flat",
    "measure_flatness",
    "read",
]

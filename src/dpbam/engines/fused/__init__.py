"""The fused engine: per-sample clipping and BAM with shared weights."""

from dpbam.engines.fused.directions import FusedDirections
from dpbam.engines.fused.engine import FusedEngine

__all__ = ["FusedDirections", "FusedEngine"]

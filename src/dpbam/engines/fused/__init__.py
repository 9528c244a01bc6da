"""The fused engine: per-sample clipping and BAM with shared weights."""

from dpbam.engines.fused.engine import FusedDirections, FusedEngine

__all__ = ["FusedDirections", "FusedEngine"]

"""One run on many processes: ``torchrun`` in front of the same command.

Every process, a *rank*, owns a fixed share of the units of privacy: unit i belongs to rank i mod W.

    each rank          its units of one global Poisson sample -> clipped sum     (its share)
    reduce-scatter     the sums, once per logical batch: each rank has a slice of the total
    each rank          noise on its slice, divide                                (Algorithm 1)
    the leader         rank 0 writes the ledger; the others wait until it is on disk
    all-gather         the private gradient: all ranks take the same step, bit for bit

**Who draws the noise.** Every coordinate is drawn by exactly one rank, with full variance. Noise on
all coordinates on every rank, with a share of the variance, would also sum to sigma C, but not for
secure noise, since a sum of rounded Gaussians is not a rounded Gaussian. Seeded noise is keyed by
the coordinate's number in the whole vector, so it does not depend on the number of ranks. The grid
of secure noise depends on sigma C alone, so that it is the same on every slice.

Guarantee: with W ranks a step is the same mechanism as with one. A unit is on one rank only, so it
changes the total by at most C; noise N(0, (sigma C)^2 I) is added once; the step is charged once,
before any rank has more of the private gradient than its own slice.

The network between the ranks carries sums before noise: it must be trusted as their memory is.

Example:
    >>> with joined() as ranks:  # without torchrun: this process alone
    ...     ranks.rank, ranks.world, ranks.leads
    (0, 1, True)
"""

from __future__ import annotations

from dpbam.distributed.ranks import EndedElsewhereError, RankLostError, Ranks, joined, launched

__all__ = ["EndedElsewhereError", "RankLostError", "Ranks", "joined", "launched"]

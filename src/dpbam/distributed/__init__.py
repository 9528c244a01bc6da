"""One run on many processes: ``torchrun`` in front of the same command.

Every process, a *rank*, owns a fixed share of the units of privacy: unit i belongs to rank i mod W.

    each rank          its units of one global Poisson sample -> clipped sum     (its share)
    reduce             the sums, once per logical batch, to rank 0, the leader
    the leader         noise once, divide, ledger                                (Algorithm 1)
    broadcast          the private gradient: all ranks take the same step, bit for bit

**Why one rank draws the noise.** Noise on every rank, with a share of the variance, would also sum
to sigma C, but not for secure noise, since a sum of rounded Gaussians is not a rounded Gaussian.
With one rank the rule is the same for both, a seeded run has the noise of a single process, the
noise does not depend on the number of ranks, and no parameter changes before the leader has written
the ledger.

Guarantee: with W ranks a step is the same mechanism as with one. A unit is on one rank only, so it
changes the total by at most C; noise N(0, (sigma C)^2 I) is added once; the step is charged once.

The network between the ranks carries sums before noise: it must be trusted as their memory is.

Example:
    >>> with joined() as ranks:  # without torchrun: this process alone
    ...     ranks.rank, ranks.world, ranks.leads
    (0, 1, True)
"""

from __future__ import annotations

from dpbam.distributed.ranks import EndedElsewhereError, RankLostError, Ranks, joined, launched

__all__ = ["EndedElsewhereError", "RankLostError", "Ranks", "joined", "launched"]

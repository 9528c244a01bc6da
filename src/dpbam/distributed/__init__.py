"""One run on many processes: ``torchrun`` in front of the same command.

Every process, a *rank*, owns a fixed share of the units of privacy: unit i is rank (i mod W)'s.

    each rank          its own units of one global Poisson sample -> clipped sum     (its share)
    reduce             the sums, once a logical batch, to rank 0, the leader
    the leader         noise once, divide, ledger                                    (Algorithm 1)
    broadcast          the private gradient: all ranks step alike, bit for bit

**Why one rank draws the noise.** Shares of variance on every rank would also sum to sigma C, but
not for secure noise, since a sum of rounded Gaussians is not one. With one rank there is one rule
for both, a seeded run has the noise of a single process, the total does not hang on the number of
ranks that took part, and nothing reaches any parameters before the leader has written the ledger.

Guarantee: with W ranks a step is the same mechanism as with one. A unit is on one rank only, so it
moves the total by at most C; the total has the noise N(0, (sigma C)^2 I) once; it is charged once.

The network between the ranks carries sums before noise: it is the operator's, as their memory is.

Example:
    >>> with joined() as ranks:  # without torchrun: this process alone
    ...     ranks.rank, ranks.world, ranks.leads
    (0, 1, True)
"""

from __future__ import annotations

from dpbam.distributed.ranks import EndedElsewhereError, RankLostError, Ranks, joined, launched

__all__ = ["EndedElsewhereError", "RankLostError", "Ranks", "joined", "launched"]

"""Steps without privacy: references such as SGD and SAM, and clipping without noise.

They need ``PrivacyPlan.non_private`` and never pass through :func:`dpbam.mechanism.release`. The
ledger has each of them without noise, so that its epsilon is infinite.
"""

from __future__ import annotations

from dpbam import mechanism
from dpbam.mechanism import Released, Step


def reference_step(step: Step) -> Released:
    """Return the sums of the directions, divided by l, with the plan's noise, if it has any.

    Guarantee: none; the step is charged without noise, so that epsilon is infinite.

    Assumptions: none.

    Proof: ``charged_at`` of a plan without privacy is 0.
    """
    queries, terms = mechanism.clipped_sums(step), step.terms
    # std may be 0 here: add_noise then only divides
    sums = {name: mechanism.add_noise(query, terms) for name, query in queries.items()}
    replay = mechanism.identify(sums, terms)
    terms.ranks.from_leader(lambda: mechanism.charge(terms, replay))
    step.attempt.charged = True
    return mechanism.gather(sums, queries, terms.ranks)

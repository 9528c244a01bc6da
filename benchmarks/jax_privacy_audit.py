"""Bounds by jax_privacy's auditor on stored scores, for the tests to agree with.

    pip install jax-privacy
    python benchmarks/jax_privacy_audit.py > tests/claims/jax_privacy.json

jax is no dependency of the tests: they read the file.
"""

from __future__ import annotations

import json
from importlib.metadata import version

import numpy as np
from jax_privacy import auditing


def main() -> None:
    rng = np.random.default_rng(7)
    cases = []
    for shift, count in ((0.5, 400), (0.925, 1000), (2.0, 300)):
        present, absent = rng.normal(shift, 1, count), rng.normal(0, 1, count)
        for threshold in (0.3, 1.0):
            cases.append(_case(present, absent, threshold, 1e-5, 0.05))
    guesses = [
        {"m": m, "guesses": r, "right": v, "epsilon": e, "delta": d,
         "p_value": float(auditing._one_run_p_value(m, r, v, e, d)),
         "lower_bound": float(auditing._epsilon_one_run(0.0, m, r, v, 0.05, d))}
        for m, r, v, e, d in (
            (1000, 200, 150, 0.5, 1e-5), (1000, 1000, 600, 0.2, 1e-5), (500, 100, 99, 2.0, 1e-6),
            (100, 50, 26, 0.0, 1e-5), (2000, 500, 420, 1.2, 1e-4),
        )
    ]  # fmt: skip
    print(json.dumps({"jax_privacy": version("jax-privacy"), "many": cases, "one": guesses}))


def _case(present, absent, threshold, delta, significance):
    """Clopper-Pearson at one threshold; the Gaussian bound on the guesses at that threshold.

    On guesses (0 or 1) the auditor has few thresholds, and shares its significance among them; it
    is given as many times more.
    """
    explicit = auditing.Explicit(threshold)
    free = auditing.CanaryScoreAuditor(present, absent).epsilon_clopper_pearson(
        significance, delta, one_sided=False, threshold_strategy=explicit
    )
    said = auditing.CanaryScoreAuditor(1.0 * (present >= threshold), 1.0 * (absent >= threshold))
    gaussian = said.epsilon_from_gdp(significance * len(said._thresholds), delta)
    return {
        "present": present.round(12).tolist(), "absent": absent.round(12).tolist(),
        "threshold": threshold, "delta": delta, "significance": significance,
        "clopper_pearson": float(free), "gaussian": float(gaussian),
    }  # fmt: skip


if __name__ == "__main__":
    main()

"""Several methods on the same data with paired seeds, each run in its own folder.

Runs of one seed share initial weights and Poisson batches. Their noise is independent from method
to method: two published models with the same noise would let it cancel. (Seeded runs are research
in any case: who knows the seed can recompute the noise.)

``out/CONTENDER/seed-S`` is a run folder like any other; ``out/comparison.json`` has all results.
The same call again keeps finished runs and resumes unfinished ones.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from dpbam import _validate
from dpbam.app.compare.pairing import check_pairs
from dpbam.app.compare.pool import FinishedRun, PlannedRun, Watcher, run_all
from dpbam.app.compare.statistics import Estimate, estimate, paired_difference
from dpbam.app.runs import prepare
from dpbam.app.runs.config import ConfigError, RunConfig
from dpbam.app.runs.files import write_json
from dpbam.app.runs.folder import stored_config
from dpbam.privacy.accounting import Charge, total_epsilon

REFERENCE = "sgd"  # what a method without privacy reaches
EXACT = "exact"
Verdict = Literal["better", "worse", "no winner"]


@dataclass(frozen=True)
class Contender:
    """A method of the comparison; ``lam`` and ``gradient`` None take the configuration's.

    Example:
        >>> Contender.parse("bam-exact:0.05")
        Contender(method='bam', lam=0.05, gradient='exact')
        >>> Contender.parse("bam-exact:0.05").name
        'bam-exact-0.05'
    """

    method: str
    lam: float | None = None
    gradient: str | None = None

    @property
    def name(self) -> str:
        """What tells it from the others, also its folder's name."""
        parts = [self.method, self.gradient, None if self.lam is None else f"{self.lam:g}"]
        return "-".join(part for part in parts if part)

    @classmethod
    def parse(cls, text: str) -> Contender:
        """From ``METHOD`` or ``METHOD:LAMBDA``; ``bam-exact`` is BAM with the exact gradient."""
        method, colon, lam = text.partition(":")
        exact = method == f"bam-{EXACT}"
        try:
            value = float(lam) if colon else None
        except ValueError:
            raise ConfigError(
                f"a method is like bam, bam:0.02 or bam-exact:0.02, got {text!r}"
            ) from None
        return cls("bam" if exact else method, value, EXACT if exact else None)


@dataclass(frozen=True)
class Comparison:
    """All runs of a comparison, and what they say together. The first name is the baseline.

    Raises:
        ConfigError: if runs of one seed do not share data, initial weights and batches.
    """

    names: tuple[str, ...]
    runs: tuple[FinishedRun, ...]

    def __post_init__(self) -> None:
        check_pairs(self.runs)

    def accuracies(self, name: str) -> dict[int, float]:
        """Accuracy by seed."""
        return {run.seed: run.accuracy for run in self.runs if run.name == name}

    def mean(self, name: str) -> Estimate:
        """Mean accuracy over the seeds."""
        return estimate(list(self.accuracies(name).values()))

    def difference(self, name: str) -> Estimate:
        """Mean paired difference in accuracy to the baseline."""
        return paired_difference(self.accuracies(name), self.accuracies(self.names[0]))

    def verdict(self, name: str) -> Verdict:
        """Whether it does better or worse than the baseline, or nobody can tell."""
        found = self.difference(name)
        return "better" if found.above_zero else "worse" if found.below_zero else "no winner"

    def total_epsilon(self) -> float:
        """Epsilon of all private runs together: what publishing all of them would cost."""
        private = [run for run in self.runs if math.isfinite(run.epsilon)]
        if not private:
            return math.inf
        charges = [Charge(r.noise_multiplier, r.sampling_rate, r.charged) for r in private]
        return total_epsilon(charges, private[0].delta, accountant=private[0].accountant)

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "contenders": {
                name: {
                    "accuracy": self.mean(name).to_dict(),
                    "difference_to_first": self.difference(name).to_difference(),
                    "verdict": self.verdict(name) if name != self.names[0] else "baseline",
                }
                for name in self.names
            },
            "epsilon_of_all_private_runs": self.total_epsilon(),
            "runs": [vars(run) for run in self.runs],
        }


def plan_runs(
    settings: Mapping[str, Any],
    contenders: Sequence[Contender],
    seeds: Sequence[int],
    out: Path,
    *,
    include_non_private: bool = False,
    share_noise: bool = False,
) -> list[PlannedRun]:
    """The runs of a comparison, seed by seed; every configuration is checked.

    Args:
        settings: fields of :class:`~dpbam.app.runs.RunConfig` that all runs share.
        contenders: the methods; the first is the baseline.
        seeds: one set of runs each.
        out: their folders go into it.
        include_non_private: add plain SGD, without clipping and noise.
        share_noise: research only: the same noise in every method.
    """
    if not contenders or not seeds:
        raise ConfigError("a comparison needs at least one method and one seed")
    names = [contender.name for contender in contenders]
    if len(set(names)) < len(names):
        raise ConfigError(f"each contender may be there once, got {', '.join(names)}")
    chosen = list(contenders)
    if include_non_private and REFERENCE not in names:
        chosen.append(Contender(REFERENCE))
    return [
        PlannedRun(c.name, seed, _config(settings, c, seed, share_noise),
                   out / c.name / f"seed-{seed}")
        for seed in seeds
        for c in chosen
    ]  # fmt: skip


def compare(
    runs: Sequence[PlannedRun], out: Path, *, jobs: int = 1, watcher: Watcher | None = None
) -> Comparison:
    """Do the runs, at most ``jobs`` at a time in processes of their own; write comparison.json.

    Raises:
        ConfigError: if a folder holds a run with other settings, or runs of one seed turn out not
            to be paired.
        StoppedError: after Ctrl-C, when the running ones have saved.
    """
    for run in runs:
        _check_folder(run)
    for run in {run.name: run for run in runs if not run.started}.values():
        prepare(run.config, estimate=True)  # refuse what cannot work before anything is written
    finished = run_all(runs, _validate.count("jobs", jobs), watcher)
    names = tuple(dict.fromkeys(run.name for run in runs))
    result = Comparison(names, tuple(finished))
    write_json(out / "comparison.json", result.to_dict())
    return result


def noise_seed(seed: int, name: str) -> int:
    """The noise's own seed: differs between contenders and between seeds.

    Example:
        >>> noise_seed(0, "bam") != noise_seed(0, "dp-sgd")
        True
    """
    return int.from_bytes(hashlib.sha256(f"{name} {seed}".encode()).digest()[:7], "big")


def _config(
    settings: Mapping[str, Any], contender: Contender, seed: int, share_noise: bool
) -> RunConfig:
    values = {**settings, "method": contender.method, "seed": seed}
    own = {"lam": contender.lam, "gradient": contender.gradient}
    values |= {field: value for field, value in own.items() if value is not None}
    if contender.method == REFERENCE:
        values = {k: v for k, v in values.items() if k not in ("epsilon", "noise_multiplier")}
    elif not share_noise:
        values["noise_seed"] = noise_seed(seed, contender.name)
    return RunConfig.from_mapping(values)


def _check_folder(run: PlannedRun) -> None:
    """Refuse to go on with a run that was started with other settings."""
    if not run.started:
        return
    before, now = stored_config(run.out).to_mapping(), run.config.to_mapping()
    changed = sorted(k for k in before.keys() | now.keys() if before.get(k) != now.get(k))
    if changed:
        raise ConfigError(
            f"{run.out} holds a run with another {changed[0]} ({before.get(changed[0])}, now "
            f"{now.get(changed[0])}): choose another --out"
        )

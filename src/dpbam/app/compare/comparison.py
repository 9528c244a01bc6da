"""Several methods on the same data with paired seeds, each run in its own folder.

Runs of one seed share initial weights and Poisson batches. Their noise is independent between
methods: the noise of two published models with the same noise would cancel. (Seeded runs are for
research in any case: anyone who knows the seed can recompute the noise.)

``out/CONTENDER/seed-S`` is a run folder like any other; ``out/comparison.json`` has all results.
The same call again keeps finished runs and resumes unfinished ones.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import get_origin

from dpbam import _validate
from dpbam._names import AUTO, did_you_mean
from dpbam.app.compare.pairing import check_pairs
from dpbam.app.runs import ConfigError, RunConfig, RunResult, RunSpec, prepare, stored_config
from dpbam.app.runs.automatic import as_chosen
from dpbam.app.runs.files import write_json
from dpbam.app.runs.folder import RunFolder
from dpbam.app.runs.pool import Watcher, train_all
from dpbam.app.runs.settings import settings
from dpbam.catalogue import METHODS
from dpbam.estimates import Estimate, estimate, paired_difference
from dpbam.privacy.accounting import total_epsilon

REFERENCE = "sgd"  # what a method without privacy reaches
EXACT = "exact"
#: Settings that a reference without privacy cannot have: its budget, and what is released from it.
_PAID = (
    "epsilon", "noise_multiplier", "release_norms", "release_counts", "release_centre", "balance",
)  # fmt: skip


@dataclass(frozen=True)
class Contender:
    """A method of the comparison; where ``lam`` or ``gradient`` is None, the configuration's holds.

    Example:
        >>> Contender.parse("bam-exact:0.05").name
        'bam-exact-0.05'
        >>> Contender.parse("dp-sgd,clipping=slaclip").name
        'dp-sgd-slaclip'
        >>> Contender.parse("mine:Method:0.1")
        Contender(method='mine:Method', lam=0.1, gradient=None, settings=())
    """

    method: str
    lam: float | None = None
    gradient: str | None = None
    settings: tuple[tuple[str, str], ...] = ()  # its own, as written

    @property
    def name(self) -> str:
        """A name that differs from the other contenders', also of the folder."""
        parts = [self.method, self.gradient, None if self.lam is None else f"{self.lam:g}"]
        joined = "-".join([*(word for word in parts if word), *(v for _, v in self.settings)])
        return re.sub(r"[^\w.+-]", ".", joined)

    @classmethod
    def parse(cls, text: str) -> Contender:
        """Parse ``METHOD`` or ``METHOD:LAMBDA``, then ``,SETTING=VALUE`` for settings of its own.

        ``bam-exact`` is BAM with the exact gradient; ``module:Name`` a method of the user's own.
        """
        first, *others = text.split(",")
        method, value = first, None
        before, colon, last = first.rpartition(":")
        with suppress(ValueError):  # of module:Name
            method, value = (before, float(last)) if colon else (first, None)
        exact = method == f"bam-{EXACT}"
        pairs = [other.partition("=") for other in others]
        wrong = colon and value is None and before in (*METHODS, f"bam-{EXACT}")  # bam:much
        if wrong or not all(v for _, _, v in pairs):
            raise ConfigError(
                "a method must be like bam, bam:0.02, bam-exact:0.02, module:Name or "
                f"bam,clipping=psac, got {text!r}"
            )
        chosen = tuple((k.replace("_", "-"), v) for k, _, v in pairs)
        return cls("bam" if exact else method, value, EXACT if exact else None, chosen)


@dataclass(frozen=True)
class Comparison:
    """The results of all runs, and their statistics. The first name is the baseline.

    Runs of one seed that do not share data, initial weights and batches are refused.
    """

    names: tuple[str, ...]
    runs: tuple[RunResult, ...]

    def __post_init__(self) -> None:
        check_pairs(self.runs)

    @property
    def metric(self) -> str:
        """The name of what is compared: the task's main metric, such as the accuracy."""
        return self.runs[0].metric

    def scores(self, name: str) -> dict[int | None, float]:
        return {run.seed: run.score for run in self.runs if run.arm == name}

    def mean(self, name: str) -> Estimate:
        """Estimate the mean of the metric over the seeds."""
        return estimate(list(self.scores(name).values()))

    def difference(self, name: str) -> Estimate:
        """Estimate the mean paired difference in the metric to the baseline."""
        return paired_difference(self.scores(name), self.scores(self.names[0]))

    def diverged(self, name: str) -> int:
        """Return how many of the contender's runs have diverged."""
        return sum(run.evaluations[-1].diverged for run in self.runs if run.arm == name)

    def total_epsilon(self) -> float:
        private = [run for run in self.runs if math.isfinite(run.epsilon)]
        if not private:
            return math.inf
        charges = [charge for run in private for charge in run.charges]
        return total_epsilon(charges, private[0].delta, accountant=private[0].plan.accountant)

    def to_dict(self) -> dict[str, object]:
        return {
            "contenders": {
                name: {
                    self.metric: asdict(self.mean(name)),
                    "diverged": self.diverged(name),
                    "difference_to_first": self.difference(name).to_dict(),
                    "verdict": self.difference(name).verdict
                    if name != self.names[0]
                    else "baseline",
                }
                for name in self.names
            },
            "epsilon_of_all_private_runs": self.total_epsilon(),
            "runs": [_row(run) for run in self.runs],
        }


def _row(run: RunResult) -> dict[str, object]:
    return {
        "name": run.arm,
        "seed": run.seed,
        **run.evaluations[-1].scores,
        "epsilon": run.epsilon,
        "delta": run.delta,
        "noise_multiplier": run.plan.noise_multiplier,
        "charged_noise_multiplier": run.plan.charged_noise_multiplier,
        "sampling_rate": run.plan.sampling_rate,
        "accountant": run.plan.accountant,
        "charged": run.charged,
        "non_private_seconds": run.seconds,
        "out": str(run.out),
        "non_private_pairing": run.pairing,
    }


def plan_runs(
    settings: Mapping[str, object],
    contenders: Sequence[Contender],
    seeds: Sequence[int],
    out: Path,
    *,
    include_non_private: bool = False,
    share_noise: bool = False,
) -> list[RunSpec]:
    """Specify the runs of a comparison, seed by seed; every configuration is checked.

    Args:
        settings: fields of :class:`~dpbam.app.runs.RunConfig` that all runs share.
        contenders: the methods; the first is the baseline.
        seeds: one set of runs each.
        out: the folder of their run folders.
        include_non_private: add plain SGD, without clipping and noise.
        share_noise: research only: the same noise in every method.
    """
    if not contenders or not seeds:
        raise ConfigError("a comparison needs at least one method and one seed")
    names = [contender.name for contender in contenders]
    if len(set(names)) < len(names):
        raise ConfigError(f"each contender may occur only once, got {', '.join(names)}")
    chosen = list(contenders)
    if include_non_private and REFERENCE not in names:
        chosen.append(Contender(REFERENCE))
    return [
        RunSpec(c.name, _config(settings, c, seed, share_noise), out / c.name / f"seed-{seed}")
        for seed in seeds
        for c in chosen
    ]


def choose_once(settings: Mapping[str, object]) -> dict[str, object]:
    """Return the settings of a comparison; what model auto chooses is the same for all methods.

    The rule may choose other settings for dp-sgd, such as a head in closed form, and knows none for
    a reference without privacy: so it is asked once, for a method that needs gradients.
    """
    if settings.get("model") != AUTO:
        return dict(settings)
    chosen = prepare(RunConfig.from_mapping({**settings, "method": "bam"})).config.to_mapping()
    return {k: v for k, v in chosen.items() if k not in ("method", "auto_facts", "auto_settings")}


def compare(
    runs: Sequence[RunSpec],
    out: Path,
    *,
    jobs: int = 1,
    watcher: Watcher | None = None,
    warn: Callable[[str], None] = lambda warning: None,
) -> Comparison:
    """Do the runs, and write ``comparison.json``.

    Args:
        runs: what to train.
        out: the folder of the comparison.
        jobs: runs at a time.
        watcher: displays their progress.
        warn: called with what is wrong with the data, once: for the operator only.

    Raises:
        ConfigError: if a folder holds a run with other settings, or runs of one seed are not
            paired.
        StoppedError: after Ctrl-C, when the runs in progress have saved.
    """
    new = [run for run in runs if not RunFolder(run.out).started]
    for run in runs:
        if run not in new:
            _check_folder(run)
    for place, run in enumerate({run.arm: run for run in new}.values()):
        prepared = prepare(run.config)
        prepared.estimated_fit()  # refuses what cannot work before anything is written
        for warning in prepared.defects() if place == 0 else ():  # all have the same data
            warn(warning)
    results = train_all(runs, _validate.count("jobs", jobs), watcher)
    result = Comparison(tuple(dict.fromkeys(run.arm for run in runs)), tuple(results))
    write_json(out / "comparison.json", result.to_dict())
    return result


def noise_seed(seed: int, name: str) -> int:
    """Derive a seed for the noise that differs between contenders and between seeds.

    Example:
        >>> noise_seed(0, "bam") != noise_seed(0, "dp-sgd")
        True
    """
    return int.from_bytes(hashlib.sha256(f"{name} {seed}".encode()).digest()[:7], "big")


def _config(
    shared: Mapping[str, object], contender: Contender, seed: int, share_noise: bool
) -> RunConfig:
    values: dict[str, object] = {**shared, "method": contender.method, "seed": seed}
    of_method = {"lam": contender.lam, "gradient": contender.gradient}
    values |= {field: value for field, value in of_method.items() if value is not None}
    values |= _parse_settings(contender.settings)
    if contender.method == REFERENCE:
        values = {k: v for k, v in values.items() if k not in _PAID}
    elif not share_noise:
        values["noise_seed"] = noise_seed(seed, contender.name)
    return RunConfig.from_mapping(values)


def _parse_settings(texts: Sequence[tuple[str, str]]) -> dict[str, object]:
    """Read a contender's own settings as their flags would be."""
    flags = {one.flag.removeprefix("--"): one for one in settings(RunConfig)}
    parsed: dict[str, object] = {}
    for name in dict(texts):
        if name not in flags:
            raise ConfigError(f"{name} is unknown: {did_you_mean(name, flags)}")
        values = [value for key, value in texts if key == name]
        is_list = get_origin(flags[name].type) is list
        parsed[flags[name].name] = flags[name].parse(values if is_list else values[-1])
    return parsed


def _check_folder(run: RunSpec) -> None:
    stored = stored_config(run.out)
    before, now = stored.to_mapping(), as_chosen(run.config, stored).to_mapping()
    changed = sorted(k for k in before.keys() | now.keys() if before.get(k) != now.get(k))
    if changed:
        raise ConfigError(
            f"{run.out} holds a run with another {changed[0]} ({before.get(changed[0])}, now "
            f"{now.get(changed[0])}): choose another --out"
        )

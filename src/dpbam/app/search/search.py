"""A search for hyper-parameters on Optuna: what is asked for, checked, before any trial.

The paper's search (App. B) has one stage a method. The first method (DP-SGD) varies all there is to
vary but lambda; every further one (DP-SAT, BAM) keeps the best of that and varies lambda alone.

A search on private data is a release of its own. ``pay`` says how that is settled:

=============  =====================================================================================
public         the data is public or synthetic: nothing to pay
nothing        unaccounted: every file and screen says that epsilon does not cover the search
accounted      each stage is a random number of independent trials of which the best alone is
               released (:mod:`dpbam.app.search.selection`); epsilon covers all stages
=============  =====================================================================================

The trials themselves are done by :mod:`dpbam.app.search.trials`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from importlib.util import find_spec
from typing import Any

from dpbam import _validate
from dpbam.app.runs import prepare
from dpbam.app.runs.config import ConfigError, RunConfig
from dpbam.app.search.selection import Repetitions, search_noise_multiplier
from dpbam.app.search.space import Domain

PAYMENTS = ("public", "nothing", "accounted")
SAMPLERS = ("random", "tpe", "qmc")
PRUNERS = ("none", "median", "hyperband")
METHODS = ("dp-sgd", "dp-sat", "bam")
WITH_LAMBDA = ("dp-sat", "bam", "sam")
LAMBDA = Domain("lam", 0.002, 0.2, log=True)
# fields that change the event of a trial, or whom it protects: alike in all trials of a selection
_ACCOUNTED = (
    "epsilon", "noise_multiplier", "delta", "batch_size", "epochs", "max_records", "accountant",
    "release_norms", "release_bias",
)  # fmt: skip
_UNACCOUNTABLE = {
    "budget": "a budget file counts steps and knows no selections",
    "release_norms": "what is released beside the gradients is released by every trial",
}


@dataclass(frozen=True, kw_only=True)
class Search:
    """A search that has been checked.

    Attributes:
        settings: fields of :class:`~dpbam.app.runs.RunConfig` that all trials share.
        space: what is varied, by field.
        pay: "public", "nothing" or "accounted".
        methods: a stage each, in this order.
        trials: of each stage; in an accounted search their mean.
        sampler: Optuna's: "random", "tpe" or "qmc".
        pruner: Optuna's: "none", "median" or "hyperband".
        distribution: of the number of trials in an accounted search.
        shape: of the negative binomial distribution.
        score_noise: accounted: the deviation of the noise on the number of test records that a
            trial gets right; None declares those records public.

    Example:
        >>> from dpbam.app.search.space import parse_space
        >>> search = Search(settings={"epsilon": 3.0}, space=parse_space(["lr=1e-3..1e-1:log"]),
        ...                 pay="public", trials=4)
        >>> [(stage.method, list(stage.space)) for stage in search.stages()]
        [('dp-sgd', ['lr']), ('dp-sat', ['lam']), ('bam', ['lam'])]
    """

    settings: Mapping[str, Any]
    space: Mapping[str, Domain]
    pay: str
    methods: tuple[str, ...] = METHODS
    trials: int = 20
    sampler: str = "random"
    pruner: str = "none"
    distribution: str = "poisson"
    shape: float = 1.0
    score_noise: float | None = None

    def __post_init__(self) -> None:
        _validate.one_of("pay", self.pay, PAYMENTS)
        _validate.one_of("sampler", self.sampler, SAMPLERS)
        _validate.one_of("pruner", self.pruner, PRUNERS)
        _validate.count("trials", self.trials)
        if not self.methods or len(set(self.methods)) < len(self.methods):
            raise ConfigError(f"each method may be there once, got {', '.join(self.methods)}")
        if "method" in self.settings:
            raise ConfigError(
                "a search names its methods apart from the settings: leave method out"
            )
        for stage in self.stages():
            if not stage.space:
                raise ConfigError(
                    f"{stage.method} has nothing to vary: add --vary lr=1e-4..1e-2:log"
                )
        varied = [name for name in self.space if name in self.settings]
        if varied:
            raise ConfigError(f"{varied[0]} is both fixed and varied: leave one of the two out")
        self._check_trial()
        if self.accounted:
            self._check_accounted()
        elif self.score_noise is not None:
            raise ConfigError(f"a noised score goes with --pay accounted, not {self.pay}")

    @property
    def accounted(self) -> bool:
        """Whether epsilon covers the search."""
        return self.pay == "accounted"

    @property
    def repetitions(self) -> Repetitions:
        """How an accounted search draws its number of trials, for each stage."""
        return Repetitions(float(self.trials), self.distribution, self.shape)

    def stages(self) -> list[Stage]:
        """One a method; what the later ones vary is lambda."""
        lam = self.space.get("lam", LAMBDA)
        first, *others = self.methods
        space = {name: domain for name, domain in self.space.items() if name != "lam"}
        if first in WITH_LAMBDA and ("lam" in self.space or not space):
            space["lam"] = lam
        later = [Stage(m, {"lam": lam} if m in WITH_LAMBDA else space) for m in others]
        return [Stage(first, space), *later]

    def config(self, stage: Stage, params: Mapping[str, Any], **more: Any) -> RunConfig:
        """The configuration of one trial."""
        return RunConfig.from_mapping({**self.settings, **params, "method": stage.method, **more})

    def calibrated(self) -> Search:
        """An accounted search with its trials' sigma in place of the whole search's epsilon.

        Loads the data, to know n. Others are as they are.
        """
        if not self.accounted:
            return self
        first = self.config(self.stages()[0], {}, accountant="rdp")
        sigma = first.noise_multiplier
        known = first.replace(epsilon=None, noise_multiplier=sigma or 1.0)
        plan = prepare(known).plan
        if sigma is None:
            assert first.epsilon is not None  # a configuration has one of the two
            sigma = search_noise_multiplier(
                first.epsilon, plan.delta, plan.sampling_rate, plan.steps, self.repetitions,
                stages=len(self.methods), score_noise=self.score_noise,
            )  # fmt: skip
        settings = {k: v for k, v in self.settings.items() if k != "epsilon"}
        return replace(self, settings={
            **settings, "noise_multiplier": sigma, "delta": plan.delta, "accountant": "rdp",
        })  # fmt: skip

    def to_mapping(self) -> dict[str, Any]:
        """Plain values: what two workers must agree on."""
        values = {**asdict(self), "settings": {k: _plain(v) for k, v in self.settings.items()}}
        values["space"] = {name: asdict(domain) for name, domain in self.space.items()}
        return values

    def _check_trial(self) -> None:
        """Refuse settings that no trial could have."""
        for stage in self.stages():
            for end in (0, -1):
                self.config(stage, {d.name: d.end(end) for d in stage.space.values()})

    def _check_accounted(self) -> None:
        if self.sampler != "random":
            raise ConfigError(
                f"sampler {self.sampler} makes trials depend on one another, and an accounted "
                "search needs independent ones: take random, or pay otherwise"
            )
        if self.pruner != "none":
            raise ConfigError(
                f"pruner {self.pruner} stops trials in view of others, and an accounted search "
                "needs independent ones: take none, or pay otherwise"
            )
        for name in self.space:
            if name in _ACCOUNTED:
                raise ConfigError(
                    f"{name} changes what a trial costs, and an accounted search needs trials of "
                    "one cost: fix it, or pay otherwise"
                )
        first = self.config(self.stages()[0], {})
        for stage in self.stages():
            if not self.config(stage, {}).private:
                raise ConfigError(f"method {stage.method} is not private: nothing can be accounted")
        for name, why in _UNACCOUNTABLE.items():
            if self.settings.get(name) is not None:
                raise ConfigError(f"{why}: leave {name} out of an accounted search")
        if self.score_noise is not None and first.unit != "record":
            raise ConfigError(
                f"a noised score counts test records, of which one {first.unit} may have many: "
                "declare them public, or take the record as the unit"
            )
        if self.score_noise is not None:
            _validate.positive("score_noise", self.score_noise)
        self.repetitions.event(None)  # refuses a wrong mean or shape


@dataclass(frozen=True)
class Stage:
    """The trials of one method.

    Attributes:
        method: as in a configuration.
        space: what they vary.
    """

    method: str
    space: Mapping[str, Domain] = field(default_factory=dict)


def require_optuna() -> None:
    """Say how to install it, if it is not there.

    Example:
        >>> require_optuna()
    """
    if find_spec("optuna") is None:
        raise ConfigError("a search needs optuna: pip install 'dpbam[search]'")


def _plain(value: Any) -> Any:
    return value if isinstance(value, str | int | float | bool | list | dict) else str(value)

"""A random search for hyper-parameters: what it varies and how it is paid for, checked.

A search on private data is a release of its own: ``pay`` is how it is paid for (docs/search.md).
What it varies, as text:

==========================  =====================================================
``lr=1e-4..1e-2:log``       any value between, uniform in the logarithm
``momentum=0..0.95``        any value between, uniform
``batch_size=256..1024``    a field of whole numbers: any whole number between
``batch_size=256,512``      one of these
``optimizer=sgd,nadam``     one of these
==========================  =====================================================

:mod:`dpbam.app.search.study` does the trials and releases the best.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING

from pydantic import JsonValue

from dpbam import _validate
from dpbam._names import did_you_mean
from dpbam.app.runs import prepare
from dpbam.app.runs.config import ConfigError, RunConfig
from dpbam.app.runs.settings import policies, read_value, settings
from dpbam.app.search.selection import search_noise_multiplier

if TYPE_CHECKING:
    from numpy.random import Generator

PAYMENTS = ("public", "nothing", "accounted")
# a budget file counts steps and knows no selections; the others are released by every trial
_UNACCOUNTABLE = ("budget", "release_norms", "release_counts", "release_centre")
_NOT_VARIED = ("data", "method", "unit", "model_options")  # nor what distinguishes no runs
_RANGE = re.compile(r"([^:]*?)\.\.(.*?)(:log)?")  # low, high, whether it is logarithmic


@dataclass(frozen=True, kw_only=True)
class Search:
    """A search, checked when it is made.

    Attributes:
        settings: fields of :class:`~dpbam.app.runs.RunConfig` that all trials share.
        space: what is varied, by field.
        pay: "public", "nothing" or "accounted".
        trials: how many; in an accounted search their mean.
        score_noise: accounted: the deviation of the noise on the number of test records that a
            trial gets right; None declares those records public.

    Example:
        >>> from dpbam.app.search.search import parse_space
        >>> search = Search(settings={"epsilon": 3.0}, space=parse_space(["lr=1e-3..1e-1:log"]),
        ...                 pay="public", trials=4)
        >>> search.config({"lr": 0.01}).lr
        0.01
    """

    settings: Mapping[str, object]
    space: Mapping[str, Domain]
    pay: str
    trials: int = 20
    score_noise: float | None = None

    def __post_init__(self) -> None:
        _validate.one_of("pay", self.pay, PAYMENTS)
        _validate.count("trials", self.trials)
        if not self.space:
            raise ConfigError("a search has nothing to vary: add --vary lr=1e-4..1e-2:log")
        if varied := [name for name in self.space if name in self.settings]:
            raise ConfigError(f"{varied[0]} is both fixed and varied: leave one of the two out")
        for end in (0, -1):  # settings that no trial could have are refused
            self.end_config(end)
        if self.score_noise is not None:
            _validate.positive("score_noise", self.score_noise)
        if self.accounted:
            self._check_accounted()
        elif self.score_noise is not None:
            raise ConfigError(f"a noised score goes with --pay accounted, not {self.pay}")

    @property
    def accounted(self) -> bool:
        return self.pay == "accounted"

    @property
    def seed(self) -> int | None:
        """The seed of a search for research; its trials derive theirs from it."""
        return self.end_config(0).seed

    @property
    def method(self) -> str:
        """The method of all trials."""
        return str(self.end_config(0).method)

    def config(self, varied: Mapping[str, object]) -> RunConfig:
        """Return the configuration of a trial; ``varied`` has its hyper-parameters."""
        return RunConfig.from_mapping({**self.settings, **varied})

    def end_config(self, end: int) -> RunConfig:
        """Return the configuration of a trial with the first (0) or last (-1) of every range."""
        return self.config({name: domain.ends[end] for name, domain in self.space.items()})

    def calibrated(self) -> Search:
        """Return an accounted search with its trials' sigma in place of the whole search's epsilon.

        Loads the data, to know n and the unit. Other searches, and calibrated ones, stay as they
        are.
        """
        if not self.accounted:
            return self
        config = self.config({"accountant": "rdp"})
        sigma = config.noise_multiplier
        # the plan's n, q and steps do not depend on sigma: any will do
        prepared = prepare(config.replace(epsilon=None, noise_multiplier=sigma or 1.0))
        plan = prepared.plan
        if self.score_noise is not None:
            if prepared.task.metric != "accuracy":
                raise ConfigError(
                    "score_noise is for an accuracy, which one test record changes by 1/n: "
                    f"{prepared.task.metric} has no such bound; leave it out if the test set is "
                    "public"
                )
            if plan.unit != "record":
                raise ConfigError(
                    f"a noised score counts test records, of which one {plan.unit} may have many: "
                    "declare them public, or use the record as the unit"
                )
        if sigma is None:
            assert config.epsilon is not None  # a configuration has one of the two
            sigma = search_noise_multiplier(
                config.epsilon, plan.delta, plan.sampling_rate, plan.steps, self.trials,
                self.score_noise,
            )  # fmt: skip
        settings = {k: v for k, v in self.settings.items() if k != "epsilon"}
        settings |= {"noise_multiplier": sigma, "delta": plan.delta, "accountant": "rdp"}
        return replace(self, settings=settings)

    def to_mapping(self) -> dict[str, JsonValue]:
        """Return the search as JSON reads it: what the same command again must agree on."""
        values: dict[str, JsonValue] = json.loads(json.dumps(asdict(self), default=str))
        return values

    def describe_number(self) -> str:
        """Name the distribution of an accounted search's number of trials, which is no secret."""
        return f"Poisson, mean {self.trials}"

    def _check_accounted(self) -> None:
        for name in self.space:
            if not policies(RunConfig)[name].searchable:
                raise ConfigError(
                    f"{name} may change what a trial costs, and an accounted search needs trials "
                    "of one cost: fix it, or pay otherwise"
                )
        for name in _UNACCOUNTABLE:
            if self.settings.get(name) is not None:
                raise ConfigError(f"an accounted search does not account for {name}: leave it out")
        config = self.config({})
        if not config.private:
            raise ConfigError(
                f"method {config.method} gives no privacy, so its trials cannot be accounted: "
                "leave it out"
            )


@dataclass(frozen=True)
class Domain:
    """The values that one field may take: ``choices``, or ``low`` to ``high``.

    Example:
        >>> Domain.parse("lr", "1e-4..1e-2:log")
        Domain(name='lr', low=0.0001, high=0.01, log=True, integer=False, choices=())
        >>> Domain.parse("lrr", "1..2")
        Traceback (most recent call last):
        dpbam.app.runs.config.ConfigError: lrr cannot be varied: did you mean 'lr'?
    """

    name: str
    low: float = 0.0
    high: float = 0.0
    log: bool = False
    integer: bool = False
    choices: tuple[object, ...] = ()

    def __post_init__(self) -> None:
        if not self.choices and not self.low < self.high:
            raise ConfigError(
                f"the range of {self.name} must rise, got {self.low:g}..{self.high:g}"
            )
        if self.log and self.low <= 0:
            raise ConfigError(
                f"a logarithmic range must be above 0, got {self.name} from {self.low:g}"
            )
        needs = {} if self.name in ("epsilon", "noise_multiplier") else {"epsilon": 1.0}
        for value in self.choices or self.ends:
            RunConfig(**needs, **{self.name: value})  # refuses a value that no run takes

    def __str__(self) -> str:
        if self.choices:
            return f"{self.name} in {', '.join(map(str, self.choices))}"
        return f"{self.name} {self.low:g}..{self.high:g}{' (log)' if self.log else ''}"

    @classmethod
    def parse(cls, name: str, text: str) -> Domain:
        """Parse the text after ``NAME=``."""
        allowed = [one for one in settings(RunConfig) if one.policy.distinguishes]
        types = {one.name: one.type for one in allowed if one.name not in _NOT_VARIED}
        if name not in types:
            raise ConfigError(f"{name} cannot be varied: {did_you_mean(name, types)}")
        span = _RANGE.fullmatch(text)
        if span is None:
            choices = tuple(read_value(choice.strip()) for choice in text.split(","))
            return cls(name, choices=choices)
        low, high, log = span.groups()
        try:
            bounds = float(low), float(high)
        except ValueError:
            raise ConfigError(
                f"{name} must vary like 1e-4..1e-2:log or 256,512, got {text!r}"
            ) from None
        return cls(name, *bounds, log=log is not None, integer=types[name] is int)

    @property
    def ends(self) -> tuple[object, object]:
        """The first and the last value."""
        if self.choices:
            return self.choices[0], self.choices[-1]
        return (int(self.low), int(self.high)) if self.integer else (self.low, self.high)

    def draw(self, generator: Generator) -> object:
        """Draw a value, uniform among the choices, in the range or in its logarithm."""
        if self.choices:
            return self.choices[int(generator.integers(len(self.choices)))]
        # a whole number stands for the values that round to it, so that both ends are as likely
        margin = 0.5 if self.integer else 0.0
        low, high = self.low - margin, self.high + margin
        if self.log:
            value = math.exp(generator.uniform(math.log(low), math.log(high)))
        else:
            value = float(generator.uniform(low, high))
        value = min(max(value, self.low), self.high)  # exp and log round
        return round(value) if self.integer else value


def parse_space(texts: Iterable[str]) -> dict[str, Domain]:
    """Parse ``NAME=...`` texts; of two with one name the last counts.

    Example:
        >>> list(parse_space(["lr=1e-3..1e-1:log", "clip_norm=0.5,1"]))
        ['lr', 'clip_norm']
    """
    space = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals:
            raise ConfigError(f"--vary must be like lr=1e-4..1e-2:log, got {text!r}")
        name = name.strip().replace("-", "_")
        space[name] = Domain.parse(name, value.strip())
    return space

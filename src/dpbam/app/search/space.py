"""What a search may vary: a range or a list of values for fields of a run's configuration.

==========================  =====================================================
text                        meaning
==========================  =====================================================
``lr=1e-4..1e-2:log``       any value between, uniform in the logarithm
``momentum=0..0.95``        any value between, uniform
``batch_size=256..1024``    a field of whole numbers: any whole number between
``batch_size=256,512``      one of these
``optimizer=sgd,nadam``     one of these
==========================  =====================================================
"""

from __future__ import annotations

import math
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dpbam._names import did_you_mean
from dpbam.app.runs.config import ConfigError, RunConfig
from dpbam.app.runs.settings import settings

if TYPE_CHECKING:
    from numpy.random import Generator

_NOT_VARIED = ("data", "method", "unit", "model_options")  # nor what distinguishes no runs


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
        types = {
            one.name: one.type
            for one in settings(RunConfig)
            if one.policy.distinguishes and one.name not in _NOT_VARIED
        }
        if name not in types:
            raise ConfigError(f"{name} cannot be varied: {did_you_mean(name, types)}")
        span, colon, mark = text.partition(":")
        if ".." not in span:
            return cls(name, choices=tuple(_read_value(choice) for choice in text.split(",")))
        low, _, high = span.partition("..")
        try:
            bounds = float(low), float(high)
        except ValueError:
            raise ConfigError(
                f"{name} must vary like 1e-4..1e-2:log or 256,512, got {text!r}"
            ) from None
        if colon and mark != "log":
            raise ConfigError(f"only :log may follow the range of {name}, got :{mark}")
        return cls(name, *bounds, log=bool(colon), integer=types[name] is int)

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


def _read_value(text: str) -> object:
    """Read a choice as TOML, else as text."""
    try:
        return tomllib.loads(f"value = {text.strip()}")["value"]
    except tomllib.TOMLDecodeError:
        return text.strip()

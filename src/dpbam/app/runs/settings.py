"""How a setting is defined once: from one field follow flag, key, type, help and reference page.

A field of a pydantic model names its panel, its description and its default::

    lr: Positive = setting("Training", "Learning rate.", 0.005)

``--lr`` of the command line (:mod:`dpbam.app.cli.flags`), the key ``lr`` of a configuration file
and the row of the reference page (``tools/docs_site/configuration.py``) are derived from it. So are
its policies: what resuming, publishing, comparing and searching may do with it (:class:`Policy`).
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import AfterValidator, BaseModel, Field, ValidationError
from pydantic.fields import FieldInfo

from dpbam import _validate
from dpbam._names import did_you_mean
from dpbam.catalogue import Arguments, Kind
from dpbam.errors import ArgumentError

Resume = Literal["never", "always", "unseeded", "constant", "moved"]


@dataclass(frozen=True)
class Policy:
    """What may be done with a setting.

    Each default is the strictest: a new setting is refused, hidden and distinguished until its
    definition allows more.

    Attributes:
        resume: whether a resumed run may change it: "never"; "always"; "unseeded", which changes
            the last bits; "constant", where no schedule depends on the length of the run; "moved",
            for another path of the same kind, whose content is compared.
        published: a report for publication may show it. Paths reveal where data are, and a seed
            lets anyone compute the noise and subtract it.
        distinguishes: runs with different values are compared, and not one group of seeds.
        searchable: an accounted search may vary it: it changes neither a trial's event nor the unit
            that it protects.
        private_only: it has no effect without privacy.
        of_method: it has an effect only with methods that name it in the catalogue.
        idle: another setting, and those of its values with which this one has no effect.
        off: a value with which it has no effect, in addition to None, False and empty ones.
        instead_of: the setting that it replaces.
        symbol: the letter for it in a figure; empty: its name.
        code: its value may be ``module:Name``, which is imported and called, as that of a
            :func:`named` setting may without saying so.
        secret: not even a digest of it is published, since anyone could try out its values.
    """

    resume: Resume = "never"
    published: bool = False
    distinguishes: bool = True
    searchable: bool = False
    private_only: bool = False
    of_method: bool = False
    idle: tuple[str, tuple[object, ...]] = ("", ())
    off: object = None
    instead_of: str = ""
    symbol: str = ""
    code: bool = False
    secret: bool = False


STRICTEST = Policy()


@dataclass(frozen=True)
class Definition:
    """What :func:`setting` knows of a field, next to its type, description and default."""

    panel: str
    unset: str
    by_auto: bool
    flag: str | None
    common: bool
    policy: Policy


def setting(
    panel: str, description: str, default: Any = None, *, unset: str = "", by_auto: bool = False,
    flag: str | None = None, common: bool = False, policy: Policy = STRICTEST, **policies: Any,
) -> Any:  # fmt: skip
    """Define a field.

    Args:
        panel: the group of flags it is shown in.
        description: the help; the choices of a ``Literal`` are added to it.
        default: its default.
        unset: what the default None stands for, such as "chosen to fit".
        by_auto: model auto, and a head on fixed features, choose it where it is left out.
        flag: the flag, if it is not the name with dashes; empty: there is none.
        common: most users need it, so that ``--help`` shows it; else ``--help-all`` alone does.
        policy: what it shares with other settings.
        **policies: those of :class:`Policy` in which it differs.
    """
    definition = Definition(panel, unset, by_auto, flag, common, replace(policy, **policies))
    extra: Any = {"setting": definition}
    return Field(default, description=description, json_schema_extra=extra)


@dataclass(frozen=True)
class Written:
    """How a value that is not plain is written as a flag: as ``type``, which ``parse`` reads."""

    type: Any
    parse: Callable[[Any], Any]
    write: Callable[[Any], str | list[str]] = str  # the inverse: one text, or one per flag


@dataclass(frozen=True)
class Names:
    """The names of one kind in the catalogue, as choices of a setting."""

    kind: Kind[Any]
    others: tuple[str, ...] = ()  # choices in addition
    own_code: bool = True  # whether ``module:Name`` is one


@dataclass(frozen=True)
class Setting:
    """One field, as flags and the reference page need it."""

    name: str  # also the key of a configuration file
    panel: str
    flag: str  # empty if it has none
    type: Any  # what the flag takes
    parse: Callable[[Any], Any]  # turns it into the value
    choices: str  # the allowed values, in words; empty: any
    default: str  # in words; empty if there is nothing to say
    description: str
    common: bool  # whether ``--help`` shows it where there are many
    policy: Policy
    may_be_code: bool  # whether it may name code to run
    write: Callable[[Any], str | list[str]] = str  # the inverse of parse

    def words(self, value: Any) -> list[str]:
        """Return the words of a command line that set this to ``value``."""
        if value is None or value is False:
            return []
        if value is True:
            return [self.flag]
        texts = self.write(value)
        texts = [texts] if isinstance(texts, str) else texts
        return [word for text in texts for word in (self.flag, text)]

    @property
    def help(self) -> str:
        """The description, with choices and default in its first sentence."""
        first, dot, rest = self.description.partition(". ")
        choices = f": {self.choices}" if self.choices else ""
        default = f" [{self.default}]" if self.default else ""
        return f"{first.removesuffix('.')}{choices}{default}.{dot[1:]}{rest}"


def settings(model: type[BaseModel]) -> list[Setting]:
    """Return the fields of ``model``, all defined by :func:`setting`, in their order."""
    return [_setting(name, field) for name, field in model.model_fields.items()]


def policies(model: type[BaseModel]) -> dict[str, Policy]:
    """Return the policy of each field, by its name."""
    return {name: _definition(field).policy for name, field in model.model_fields.items()}


def _definition(field: FieldInfo) -> Definition:
    extra: Any = field.json_schema_extra
    definition: Definition = extra["setting"]
    return definition


def _setting(name: str, field: FieldInfo) -> Setting:
    defined = _definition(field)
    annotations = [*field.metadata, *_parts(field.annotation)]
    written = next((one for one in annotations if isinstance(one, Written)), None)
    choices = [one for one in annotations if isinstance(one, str | int)]
    catalogued = [one for one in annotations if isinstance(one, Names)]
    for names in catalogued:
        choices += [*names.others, *names.kind]
    types = [one for one in annotations if isinstance(one, type)]
    plain = type(choices[0]) if choices else (types or [str])[0]
    default = defined.unset or _shown(field.default)
    return Setting(
        name=name,
        panel=defined.panel,
        flag=defined.flag if defined.flag is not None else f"--{name.replace('_', '-')}",
        type=written.type if written else plain,
        parse=written.parse if written else lambda value: value,
        choices=_listed(choices),
        default=f"chosen by auto; {default} for a net" if defined.by_auto else default,
        description=str(field.description),
        common=defined.common,
        policy=defined.policy,
        may_be_code=defined.policy.code or any(names.own_code for names in catalogued),
        write=written.write if written else str,
    )


def _parts(annotation: Any) -> Iterator[Any]:
    """Yield the types, the choices and the metadata that a type is made of."""
    if get_origin(annotation) is Literal:
        yield from get_args(annotation)
    elif get_origin(annotation) is Annotated:
        first, *metadata = get_args(annotation)
        yield from metadata
        yield from _parts(first)
    elif get_origin(annotation) in (Union, UnionType):
        for inner in get_args(annotation):
            yield from _parts(inner)
    else:
        yield annotation


def _listed(choices: Sequence[str | int]) -> str:
    *others, last = map(str, choices or [""])
    return f"{', '.join(others)} or {last}" if others else last


def _shown(default: Any) -> str:
    if default is None or isinstance(default, bool | tuple | dict):
        return ""
    return f"{default:g}" if isinstance(default, float) else str(default)


def sentence(error: ValidationError, model: type[BaseModel]) -> str:
    """Return the first problem as one sentence with the field's name."""
    problem = error.errors(include_url=False)[0]
    message, value = str(problem["msg"]), problem.get("input")
    where = ".".join(str(place) for place in problem["loc"][:1])
    if problem["type"] == "extra_forbidden":
        otherwise = "see dpbam train --help-all for what there is"
        return f"{where} is unknown: {did_you_mean(where, model.model_fields, otherwise)}"
    if problem["type"] == "value_error":
        return message.removeprefix("Value error, ")
    if problem["type"] == "literal_error":
        expected = str(problem["ctx"]["expected"]).replace(" or ", ",").split(",")
        hint = did_you_mean(value, [choice.strip(" '") for choice in expected])
        return f"{where} {value!r} is unknown: {hint}"
    said = message.removeprefix("Input should be ").removesuffix(", unable to parse string")
    said = said.replace("a valid tuple", "a list, such as [1, 2]")
    return f"{where} must be {said.split(', unable')[0]}, got {value!r}"


def _fraction(name: str, value: float) -> float:
    if not 0 <= value <= 1:
        raise ArgumentError(f"{name} must lie between 0 and 1, got {value!r}")
    return value


def _named(check: Callable[[str, Any], Any]) -> AfterValidator:
    """Check a value after its type, with the field's name in the message."""
    return AfterValidator(lambda value, info: check(str(info.field_name), value))


def _every(text: str) -> int:
    """``every=5``, or 5."""
    number = text.removeprefix("every=")
    if not number.isdecimal() or int(number) < 1:
        raise ArgumentError(f"--measure-bias must be every=N, such as every=10, got {text!r}")
    return int(number)


def _size(text: str) -> int | tuple[int, int]:
    sides = text.lower().split("x")
    if not all(side.isdigit() for side in sides) or len(sides) > 2:
        raise ArgumentError(f"--image-size must be like 64 or 64x48, got {text!r}")
    return int(sides[0]) if len(sides) == 1 else (int(sides[0]), int(sides[1]))


def _pair(form: str, text: str) -> tuple[float, float]:
    """Read two numbers; ``form`` is how the flag must be written."""
    first, colon, second = text.partition(":")
    try:
        return float(first), float(second if colon else "")
    except ValueError:
        raise ArgumentError(f"{form}, got {text!r}") from None


def _weight(text: str) -> tuple[str, float]:
    """``ill=4`` as ("ill", 4.0); a class may have an = in its name."""
    name, _, value = text.rpartition("=")
    try:
        return name, float(value if name else "")
    except ValueError:
        raise ArgumentError(f"--class-weight must be like ill=4, got {text!r}") from None


def _option(text: str) -> tuple[str, Any]:
    """``width=0.25`` as ("width", 0.25): the value is read as TOML, else taken as text."""
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise ArgumentError(f"an option must be like width=0.25, got {text!r}")
    return name, read_value(value)


def read_value(text: str) -> Any:
    """Read a value as TOML, else as text.

    Example:
        >>> read_value("0.25"), read_value("sgd")
        (0.25, 'sgd')
    """
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def named(kind: Kind[Any], *others: str, own_code: bool = True) -> Any:
    """Return the type of a setting that is a name of the catalogue, or else ``module:Name``."""

    def check(value: str) -> str:
        is_code = own_code and all(value.partition(":")[::2])
        if not is_code and value not in others and value not in kind:
            hint = did_you_mean(value, [*others, *kind])
            raise ArgumentError(f"{kind.noun} {value!r} is unknown: {hint}")
        return value

    return Annotated[str, Names(kind, others, own_code), AfterValidator(check)]


def _written_options(options: Arguments) -> list[str]:
    """Write values as TOML, which :func:`_option` reads."""
    return [f"{name}={json.dumps(value)}" for name, value in options.items()]


def _written_pair(pair: tuple[float, float]) -> str:
    return f"{pair[0]}:{pair[1]}"


def _written_size(size: int | tuple[int, int]) -> str:
    return str(size) if isinstance(size, int) else f"{size[0]}x{size[1]}"


Positive = Annotated[float, _named(_validate.positive)]
NonNegative = Annotated[float, _named(_validate.non_negative)]
Probability = Annotated[float, _named(_validate.probability)]
Fraction = Annotated[float, _named(_fraction)]
Count = Annotated[int, _named(_validate.count)]
FromZero = Annotated[int, _named(partial(_validate.count, least=0))]
Every = Annotated[Count, Written(str, _every)]
ImageSize = Annotated[int | tuple[int, int], Written(str, _size, _written_size)]
Options = Annotated[
    Arguments, Written(list[str], lambda texts: dict(map(_option, texts)), _written_options)
]
Range = Annotated[
    tuple[float, float],
    Written(str, partial(_pair, "--target-range must be like 0:100"), _written_pair),
]
Window = Annotated[
    tuple[float, float],
    Written(
        str, partial(_pair, "--dicom-window must be CENTER:WIDTH, such as 40:400"), _written_pair
    ),
]
Weights = Annotated[
    dict[str, float],
    Written(list[str], lambda texts: dict(map(_weight, texts)), _written_options),
]
Patterns = Annotated[tuple[str, ...], Written(list[str], list, list)]

"""Freeze parameters: a frozen one gets no gradient and no noise, and does not count in clipping."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase

from torch import nn

from dpbam import _validate
from dpbam._names import did_you_mean
from dpbam.errors import ArgumentError, ArgumentTypeError

PARTS = ("head", "lora", "norms", "all")


def freeze(model: nn.Module, patterns: Sequence[str]) -> list[str]:
    """Freeze the parameters whose names match a pattern: ``requires_grad`` becomes False.

    Args:
        model: changed in place.
        patterns: shell patterns on parameter names, such as "conv1.*" or "*.bias". ``*`` matches
            dots too.

    Returns:
        The names of the frozen parameters. If a pattern matches nothing, nothing is frozen and it
        is refused.

    Example:
        >>> freeze(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1)), ["0.*"])
        ['0.weight', '0.bias']
    """
    if isinstance(patterns, str):
        raise ArgumentTypeError(
            f"patterns must be a list of patterns, got one string: [{patterns!r}]?"
        )
    parameters = dict(model.named_parameters(remove_duplicate=False))  # a tied one by any name
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in parameters):
            names = list(parameters)
            hint = (
                f"names are like {', '.join(names[:3])}" if names else "the model has no parameters"
            )
            hint = did_you_mean(pattern, names, hint, cutoff=0.4)
            raise ArgumentError(f"pattern {pattern!r} matches no parameter of the model: {hint}")
    matched = [n for n in parameters if any(fnmatchcase(n, pattern) for pattern in patterns)]
    for name in matched:
        parameters[name].requires_grad_(False)
    return matched


def head_only(model: nn.Module) -> list[str]:
    """Freeze everything except the last registered module that has parameters: usually the head.

    A parameter of the head that is used elsewhere too (tied weights) stays trainable there.
    Freezing stops gradients, not running statistics: a batch norm in the frozen part must be in
    eval (:func:`~dpbam.nn.check_model` refuses it otherwise).

    Returns:
        The names of the trainable parameters.

    Example:
        >>> head_only(nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 1)))
        ['2.weight', '2.bias']
    """
    parametric = [m for m in model.modules() if next(m.parameters(recurse=False), None) is not None]
    if not parametric:
        raise ArgumentError("the model has no parameters, so it has no head to train")
    model.requires_grad_(False)
    for parameter in parametric[-1].parameters(recurse=False):
        parameter.requires_grad_(True)
    return _trainable(model)


def train_part(model: nn.Module, trained: str) -> list[str]:
    """Freeze everything except a part of the model.

    Args:
        model: changed in place.
        trained: "head", the last layer; "norms", the scales and shifts of norm layers, and the
            head; "lora", the factors B of a public encoder's low-rank updates, and the head; or
            "all", which leaves the model as it is.

    Returns:
        The names of the trainable parameters.

    Example:
        >>> train_part(nn.Sequential(nn.LayerNorm(2), nn.Linear(2, 2), nn.Linear(2, 1)), "norms")
        ['0.weight', '0.bias', '2.weight', '2.bias']
    """
    _validate.one_of("train", trained, PARTS)
    if trained == "all":
        return _trainable(model)
    head = head_only(model)
    if trained == "head":
        return head
    for name, module in model.named_modules():
        norm = trained == "norms" and "norm" in type(module).__name__.lower()
        if norm or (trained == "lora" and "lora_B" in name):
            for parameter in module.parameters(recurse=False):
                parameter.requires_grad_(True)
    if len(_trainable(model)) == len(head):
        what = "norm layers" if trained == "norms" else "low-rank updates"
        raise ArgumentError(f"the model has no {what} to train: train head or all")
    return _trainable(model)


def _trainable(model: nn.Module) -> list[str]:
    return [name for name, parameter in model.named_parameters() if parameter.requires_grad]

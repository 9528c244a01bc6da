"""What an oracle is made of: checked once, when it is made. No check here depends on a record."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from types import FunctionType
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from dpbam.errors import ArgumentError, ArgumentTypeError
from dpbam.filters import Filter
from dpbam.joint_release import JointRelease
from dpbam.methods import Method, check_declared
from dpbam.nn import check_model, check_trainable
from dpbam.observers import Observer
from dpbam.params import digest, trainable
from dpbam.privacy.clipping import Clipping, check_coordinates, check_groups
from dpbam.privacy.plan import PrivacyPlan

if TYPE_CHECKING:
    from dpbam.distributed import Ranks
    from dpbam.engines import Loss
    from dpbam.oracle import PrivateGradientOracle


def check_oracle(oracle: PrivateGradientOracle, loss: Loss, *, filtered: bool) -> None:
    """Refuse an oracle whose components do not fit together; ``filtered``: a filter was given."""
    plan, method, clipping = oracle.plan, oracle.method, oracle.clipping
    check_model(oracle.model)
    check_trainable(oracle.model)
    check_interceptable(oracle.model, loss)
    for component, base in ((method, Method), (clipping, Clipping), (oracle.filter, Filter),
                            (oracle.statistics, JointRelease)):  # fmt: skip
        if component is not None:
            _check_signatures(component, base)
    for observer in oracle.observers:
        _check_signatures(observer, Observer)
    check_declared(method)
    check_coordinates(clipping)
    check_groups(clipping.groups(list(trainable(oracle.model))), list(trainable(oracle.model)))
    if filtered and method.filter() is not None:
        raise ArgumentError(f"{method.name} has a filter of its own: leave filter out")
    if plan.private and not method.private:
        raise ArgumentError(
            f"{method.name} uses the batch without noise, so it cannot be private: "
            "use it with PrivacyPlan.non_private(...)"
        )
    joint = () if oracle.statistics is None else oracle.statistics.noise_multipliers
    if joint != plan.joint_noise_multipliers:
        raise ArgumentError(
            f"the plan has joint_noise_multipliers={plan.joint_noise_multipliers} but the "
            f"release adds {joint}: make the plan with joint_noise_multipliers="
            "release.noise_multipliers"
        )
    if clipping.sensitivity != plan.clip_norm:
        raise ArgumentError(
            f"the clipping's sensitivity {clipping.sensitivity:g} is not the plan's "
            f"clip_norm {plan.clip_norm:g}: make both the same"
        )
    check_apart(oracle.observers, oracle.statistics)
    check_same_components(oracle.ranks, plan, noise=oracle.noise, clipping=clipping, method=method,
                          filter=oracle.filter)  # fmt: skip


def check_instance(name: str, component: object, base: type) -> None:
    """Refuse a name, a class or a function where an object with the hooks of ``base`` belongs.

    Example:
        >>> check_instance("method", "bam", Method)
        Traceback (most recent call last):
        ...
        dpbam.errors.ArgumentTypeError: method must be an object of dpbam.methods.Method, got ...
    """
    if not isinstance(component, str | type | FunctionType):
        return
    what = f"the class {component.__name__}" if isinstance(component, type) else repr(component)
    raise ArgumentTypeError(
        f"{name} must be an object of {base.__module__}.{base.__name__}, got {what}: make one, "
        "with its options, and pass it"
    )


def check_parts(oracle: PrivateGradientOracle, parts: Mapping[str, Tensor]) -> None:
    """Refuse parts of a state for which the oracle has no component: they would be lost.

    Guarantee: a resumed run has all that the state has.

    Assumptions: a component reads what is its own in the state.

    Proof: every name begins with that of a component that reads a state, or of the history.
    """
    reads = {
        "clipping": (oracle.clipping, Clipping),
        "filter": (oracle.filter, Filter),
        "method": (oracle.method, Method),
    }
    for name in parts:
        kind = name.partition("/")[0]
        component, base = reads.get(kind, (None, None))
        if kind == "history":
            fits = oracle.method.remembers > 0
        else:
            reader = getattr(type(component), "load_state_dict", None)
            fits = reader is not None and reader is not getattr(base, "load_state_dict", None)
        if not fits:
            raise ArgumentError(
                f"the state has {name}, for which this oracle has no use: make it with the method, "
                "clipping and filter of the run that the state is of"
            )


def check_apart(observers: Sequence[object], statistics: object) -> None:
    """Refuse an object that observes and releases: it could release what it has observed.

    Guarantee: no statistic is given the batch gradient, or a sum without noise.

    Assumptions: an observer and a statistic share no object with each other.

    Proof: observers get both, statistics neither, and no object is of both kinds.
    """
    if statistics is not None and any(each is statistics for each in observers):
        raise ArgumentError(
            f"{type(statistics).__name__} is given as observer and as statistics: what it observes "
            "has no noise, and what it releases could contain it; make two objects"
        )


def _check_signatures(component: object, base: type) -> None:
    """Refuse a component of the user's own that cannot be called as its base class is.

    Otherwise the first step would end in a TypeError from inside the library.
    """
    name = type(component).__name__
    for hook, function in vars(base).items():
        if hook.startswith("_") or not inspect.isfunction(function):
            continue
        _, *arguments = inspect.signature(function).parameters  # without self
        if not callable(getattr(component, hook, None)):
            raise ArgumentTypeError(
                f"a {name} is no {base.__name__}: it has no {hook}({', '.join(arguments)})"
            )
        try:
            inspect.signature(getattr(component, hook)).bind(*arguments)
        except TypeError:
            raise ArgumentTypeError(
                f"{name}.{hook} cannot be called with ({', '.join(arguments)}), as a step does: "
                f"define {hook}({', '.join(['self', *arguments])})"
            ) from None


def check_interceptable(model: nn.Module, loss: object) -> None:
    """Refuse compiled and scripted code, and trained parameters that are complex.

    Guarantee: no module of the model or the loss hides its operations from the engines, or keeps
    tensors of records in compiled code.

    Assumptions: a function under ``torch.compile`` that forward calls is not seen here; what it
    keeps is refused after the pass.

    Proof: every module is looked at, before anything runs.

    Example:
        >>> check_interceptable(torch.jit.script(nn.Linear(2, 2)), None)
        Traceback (most recent call last):
        ...
        dpbam.errors.ArgumentError: the model is TorchScript (RecursiveScriptModule), whose ...
    """
    roots = {"the model": model} | ({"the loss": loss} if isinstance(loss, nn.Module) else {})
    for root, tree in roots.items():
        for path, module in tree.named_modules():
            where = f"layer {path!r} of {root}" if path else root
            if "_orig_mod" in module._modules or module._compiled_call_impl is not None:
                raise ArgumentError(
                    f"{where} is compiled, which hides its operations from the engines and is no "
                    "faster there: compile nothing (of compiled = torch.compile(model) pass "
                    "model, or compiled._orig_mod)"
                )
            if isinstance(module, torch.jit.ScriptModule):
                raise ArgumentError(
                    f"{where} is TorchScript ({type(module).__name__}), whose operations cannot be "
                    "intercepted: pass the module that torch.jit.script or torch.jit.trace was "
                    "given"
                )
    if isinstance(loss, torch.jit.ScriptFunction):
        raise ArgumentError(
            "the loss is TorchScript, whose operations cannot be intercepted: pass the function "
            "that torch.jit.script was given"
        )
    for name, parameter in trainable(model).items():
        if parameter.is_complex():
            raise ArgumentError(
                f"parameter {name} is complex, and clipping and noise are for real numbers: keep "
                "real and imaginary part in a real parameter, and use torch.view_as_complex of it"
            )


def check_same_components(ranks: Ranks, plan: PrivacyPlan, **components: object) -> None:
    """Refuse an oracle that was made of other components, or with other options, on some rank.

    Guarantee: every slice of the gradient has the noise that rank 0 charges.

    Assumptions: a class of the user's own has the same code on every rank, and its options are
    attributes of plain values or tensors (:func:`describe`).

    Proof: plan, noise, clipping, method and filter of each rank are compared with those of rank 0,
    with their options, at construction.
    """
    described = {"plan": repr(plan)} | {kind: describe(c) for kind, c in components.items()}
    leaders, *others = ranks.collect(described)
    for rank, other in enumerate(others, 1):
        for kind in described:
            if other[kind] != leaders[kind]:
                raise ArgumentError(
                    f"rank {rank} has another {kind} than rank 0, which charges the steps: make "
                    "the oracle with the same one, and the same options, on every rank"
                )


def describe(component: object) -> str:
    """Name the class of a component, and its attributes, for a comparison.

    Objects among the attributes count by their class, so that randomness, which ranks must not
    share, is not compared.

    Example:
        >>> from dpbam.privacy.clipping import FlatClipping
        >>> describe(FlatClipping(0.5))
        "dpbam.privacy.clipping.FlatClipping({'clip_norm': '0.5'})"
    """
    options = {
        name: _describe_value(value)
        for name, value in sorted(getattr(component, "__dict__", {}).items())
    }
    return f"{type(component).__module__}.{type(component).__qualname__}({options})"


def _describe_value(value: object) -> object:
    if value is None or isinstance(value, (bool, int, float, str, bytes)):
        return repr(value)
    if isinstance(value, dict):
        return {repr(k): _describe_value(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_describe_value(v) for v in value]
    if isinstance(value, Tensor):
        return digest({"": value})
    if isinstance(value, Method):  # inside another
        return describe(value)
    return getattr(value, "__qualname__", type(value).__qualname__)

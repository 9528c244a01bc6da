"""Rules: what to write on the tape for a torch function that takes a trainable parameter.

A rule gets the capture, the function and its arguments; it does the call with parameters detached
and writes down sites. A function without a rule gets the generic one (:mod:`generic`), which is
right for any function of rows; a rule is there only where it is faster, where the generic one
cannot go (attention), or to refuse with a clear word.

To add one for a function of your own, make it a torch function and register a rule::

    def scaled(x, weight):                                  # your layer's function
        if torch.overrides.has_torch_function((x, weight)):
            return torch.overrides.handle_torch_function(scaled, (x, weight), x, weight)
        return x * weight

    @rule(scaled)
    def _(capture, func, args, kwargs):
        x, k = capture.input(args[0], "scaled")             # k: x's place on the tape
        source = capture.source(args[1])                    # what the parameter is made of
        y, j = capture.output(x * args[1].detach(), "scaled")
        capture.site(ScaleSite(source, tuple(args[1].shape), k, j))
        return y
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import tree_map

from dpbam.engines.base import CannotServe
from dpbam.engines.capture import EXPAND_ROWS, Capture, Rule
from dpbam.engines.generic import GenericSite
from dpbam.engines.layer_math import EmbeddingFamily, Family, LinearFamily
from dpbam.engines.sites import MatrixSite, ScaleSite, SumSite
from dpbam.engines.sources import Source
from dpbam.nn.standardise import standardised

RULES: dict[Callable[..., Any] | None, Rule] = {}


def rule(*funcs: Callable[..., Any] | None) -> Callable[[Rule], Rule]:
    """Register a rule for torch functions."""

    def register(made: Rule) -> Rule:
        for func in funcs:
            RULES[func] = made
        return made

    return register


def bind(names: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Arguments by name; those not given are None."""
    listed = names.split()
    return {**dict.fromkeys(listed), **dict(zip(listed, args, strict=False)), **kwargs}


def bare(t: Any) -> Any:
    """A tensor without its graph: parameters take no part in ours."""
    return t.detach() if isinstance(t, Tensor) else t


def matrix_like(source: Source | None) -> bool:
    """Whether the special rules know this source: a selection, or a standardised parameter."""
    if source is None or source.selection:
        return True
    return source.func is standardised and source.args[0].func is None


def use_matrix(
    capture: Capture,
    what: str,
    call: Callable[[Tensor, Tensor, Tensor | None], Tensor],
    family: Family,
    operands: tuple[Tensor, Tensor, Tensor | None],
    *,
    channel_axes: int = 0,
    swap: bool = False,
) -> Tensor:
    """y = call(x, weight, bias), with sites for the weight and the bias that are trainable.

    ``channel_axes``: how many axes of y follow its channels.
    """
    x, weight, bias = operands
    source, shift = capture.source(weight), capture.source(bias)
    k = -1
    if source is not None:
        x, k = capture.input(x, what)
    shape = () if shift is None else tuple(shift.tensor.shape) + (1,) * channel_axes
    j = len(capture.tape.outputs)
    site = None if source is None else MatrixSite(source, family, k, j, swap)

    def shared() -> Tensor:
        return call(x, bare(weight), bare(bias))

    if capture.ascent is None:
        y = shared()
    else:
        constant = None if bias is None else bare(bias).view(-1, *(1,) * channel_axes)
        y = shared() if site is None else capture.ascent.matrix(site, x, shared, constant)
        y = y if shift is None else capture.moved(y, shift, shape)
    y, j = capture.output(y, what)
    if site is not None:
        capture.site(site)
    if shift is not None:
        capture.site(SumSite(shift, shape, j))
    return y


@rule(F.linear)
def _linear(capture: Capture, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    given = bind("input weight bias", args, kwargs)
    x, weight, bias = given["input"], given["weight"], given["bias"]
    if not _ready(capture, x, weight, bias):
        return _generic(capture, func, args, kwargs)
    family = LinearFamily(tuple(weight.shape))
    x = x.contiguous()  # else torch multiplies slice by slice
    return use_matrix(capture, _name(capture, func, weight), F.linear, family, (x, weight, bias))


@rule(torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.mm, Tensor.mm)
def _matmul(capture: Capture, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if len(args) == 2:
        x, weight = args
        source = capture.source(weight)
        if source and source.selection and weight.ndim == 2 and x.ndim >= 2:
            flipped = Source(weight.t(), source.names, torch.t, (source,))
            capture.adopt(flipped)
            return _linear(capture, F.linear, (x, flipped.tensor), {})
    return _generic(capture, func, args, kwargs)


@rule(torch.addmm)
def _addmm(capture: Capture, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if kwargs or len(args) != 3:
        return _generic(capture, func, args, kwargs)
    with capture:
        return torch.matmul(args[1], args[2]) + args[0]


@rule(F.bilinear)
def _bilinear(capture: Capture, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """x1^T W_o x2 is linear in the outer product of x1 and x2."""
    given = bind("input1 input2 weight bias", args, kwargs)
    with capture:
        outer = (given["input1"].unsqueeze(-1) * given["input2"].unsqueeze(-2)).flatten(-2)
        return F.linear(outer, given["weight"].flatten(1), given["bias"])


@rule(F.embedding, torch.embedding)
def _embedding(capture: Capture, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    names = "input weight padding_idx max_norm norm_type scale_grad_by_freq sparse"
    given = bind(names, args if func is F.embedding else (args[1], args[0]), kwargs)
    ids, weight, padding = given["input"], given["weight"], given["padding_idx"]
    source = capture.source(weight)
    what = _name(capture, func, weight)
    if given["max_norm"] is not None or given["scale_grad_by_freq"]:
        raise CannotServe(f"{what} uses max_norm or scale_grad_by_freq, which look at the batch")
    if source is None or not source.selection:
        return _generic(capture, func, args, kwargs)
    if padding is not None and padding < 0:
        padding = padding + weight.shape[0] if func is F.embedding else None
    family = EmbeddingFamily(tuple(weight.shape), padding)
    return use_matrix(capture, what, lambda x, w, _: F.embedding(x, w), family, (ids, weight, None))


@rule(torch.add, Tensor.add, Tensor.__add__, Tensor.__radd__)
def _add(capture: Capture, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    found = _broadcast_pair(capture, args, kwargs)
    if found is None:
        return _generic(capture, func, args, kwargs)
    x, theta, source = found
    y = capture.moved(x + theta.detach(), source, tuple(theta.shape))
    y, j = capture.output(y, _name(capture, func, theta))
    capture.site(SumSite(source, tuple(theta.shape), j))
    return y


@rule(torch.mul, Tensor.mul, Tensor.__mul__, Tensor.__rmul__, torch.multiply)
def _mul(capture: Capture, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    found = _broadcast_pair(capture, args, kwargs)
    if found is None:
        return _generic(capture, func, args, kwargs)
    x, theta, source = found
    what = _name(capture, func, theta)
    x, k = capture.input(x, what)
    y, j = capture.output(capture.moved(x * theta.detach(), source, tuple(theta.shape), x), what)
    capture.site(ScaleSite(source, tuple(theta.shape), k, j))
    return y


@rule(Tensor.__iadd__, Tensor.add_, Tensor.__imul__, Tensor.mul_)
def _in_place(capture: Capture, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """x += theta: compute beside, then copy in, so that others who hold x see the change."""
    pure = _add if func in (Tensor.__iadd__, Tensor.add_) else _mul
    plain = torch.add if pure is _add else torch.mul
    return args[0].copy_(pure(capture, plain, (args[0].clone(), *args[1:]), kwargs))


@rule(EXPAND_ROWS)
def _expand_rows(capture: Capture, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A parameter repeated over the rows: each row has its own copy, and so its own gradient."""
    out, theta = args
    shape = (1,) * (out.ndim - theta.ndim) + tuple(theta.shape)
    what = _name(capture, func, theta)
    if any(n not in (1, m) for n, m in zip(shape, out.shape, strict=True)):
        raise CannotServe(f"{what} repeats an axis that has more than one entry")
    source = capture.source(theta)
    if source is None or not source.linear:
        raise CannotServe(f"{what} repeats a non-linear function of a parameter over the rows")
    y, j = capture.output(capture.moved(out.detach().clone(), source, shape), what)
    capture.site(SumSite(source, shape, j))
    return y


@rule(None)
def _generic(capture: Capture, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Any torch function of rows and parameters that returns one tensor."""
    hidden = capture.hide((args, kwargs))
    xs: list[Tensor] = []
    what = func.__name__ if hasattr(func, "__name__") else str(func)

    def slot(leaf: Any) -> Any:
        if isinstance(leaf, Tensor) and capture.varies(leaf):
            xs.append(leaf)
            return _Slot(len(xs) - 1)
        return leaf

    hidden = tree_map(slot, hidden)
    sources = {n: s for s in _all_sources(hidden) for n in s.names}
    what = f"{what} of {', '.join(sorted(sources))}"
    name = what.split()[0]
    if name == "__setitem__" or (name.endswith("_") and not name.endswith("__")):
        raise CannotServe(f"{what} changes a tensor in place")
    function = _replay(func, hidden)
    theta = {n: p.detach() for n, p in capture.parameters.items() if n in sources}
    if not _depends(function, theta, xs):
        return function(theta, xs)
    nodes = [capture.input(x, what) for x in xs]
    site = GenericSite(theta, function, [k for _, k in nodes], len(capture.tape.outputs))
    if capture.ascent is None:
        out = function(theta, [x for x, _ in nodes])
    else:
        site.moved = capture.ascent.rows(theta)
        out = site.rows_apart([x for x, _ in nodes], capture.plan.inputs, capture.plan.outputs)
    if not isinstance(out, Tensor):
        raise CannotServe(f"{what} returns several tensors, and no rule knows it")
    y, _ = capture.output(out, what)
    capture.site(site)
    return y


class _Slot:
    """The place of a varying tensor in a call's arguments."""

    def __init__(self, index: int) -> None:
        self.index = index


def _replay(func: Callable[..., Any], hidden: Any) -> Callable[[Any, list[Tensor]], Any]:
    """F(theta, xs): the call with parameters and varying tensors put in."""

    def function(theta: Any, xs: list[Tensor]) -> Any:
        def value(leaf: Any) -> Any:
            if isinstance(leaf, _Slot):
                return xs[leaf.index]
            return leaf.evaluate(theta) if isinstance(leaf, Source) else leaf

        args, kwargs = tree_map(value, hidden)
        return func(*args, **kwargs)

    return function


def _depends(function: Any, theta: dict[str, Tensor], xs: list[Tensor]) -> bool:
    """Whether the result depends on the parameters' values (``x.type_as(weight)`` does not)."""
    with torch.enable_grad():
        out = function(
            {n: t.clone().requires_grad_() for n, t in theta.items()},
            [x.detach() for x in xs],
        )
    parts = out if isinstance(out, tuple | list) else (out,)
    return any(isinstance(t, Tensor) and t.requires_grad for t in parts)


def _all_sources(tree: Any) -> list[Source]:
    if isinstance(tree, Source):
        return [tree]
    if isinstance(tree, dict):
        tree = tuple(tree.values())
    return (
        [s for leaf in tree for s in _all_sources(leaf)] if isinstance(tree, list | tuple) else []
    )


def _ready(capture: Capture, x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Whether the layer is x times known sources or constants."""
    if capture.source(x) is not None or capture.varies(weight):
        return False
    if bias is not None and capture.varies(bias):
        return False
    shift = capture.source(bias)
    return matrix_like(capture.source(weight)) and (shift is None or shift.linear)


def _broadcast_pair(
    capture: Capture, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Tensor, Tensor, Source] | None:
    """(x, theta, its source) where a linear source broadcasts to x's shape, else None."""
    if kwargs or len(args) != 2 or not all(isinstance(a, Tensor) for a in args):
        return None
    for theta, x in (args, args[::-1]):
        source = capture.source(theta)
        if source is not None and source.linear and capture.varies(x):
            fits = _broadcasts(theta.shape, x.shape)
            same = x.dtype == torch.result_type(x, theta)
            return (x, theta, source) if fits and same else None
    return None


def _broadcasts(shape: torch.Size, target: torch.Size) -> bool:
    """Whether ``shape`` expands to ``target``."""
    pairs = zip(reversed(shape), reversed(target), strict=False)
    return len(shape) <= len(target) and all(n in (1, m) for n, m in pairs)


def _name(capture: Capture, func: Any, theta: Any) -> str:
    source = capture.source(theta)
    names = ", ".join(source.names) if source else "a constant"
    return f"{getattr(func, '__name__', func)} of {names}"

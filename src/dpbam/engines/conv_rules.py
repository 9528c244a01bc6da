"""Rules for convolutions, transposed convolutions and normalisation layers."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dpbam.engines.activations import Mish
from dpbam.engines.base import CannotServe
from dpbam.engines.capture import ALWAYS, Capture
from dpbam.engines.conv_math import ConvFamily
from dpbam.engines.layer_rules import (
    RULES,
    _generic,
    _name,
    _ready,
    bare,
    bind,
    rule,
    use_matrix,
)
from dpbam.engines.maps import AveragePool, Convolve
from dpbam.engines.norms import GroupNorm
from dpbam.engines.sites import RecordSite, ScaleSite, SumSite

_CONV = {torch.conv1d: 1, torch.conv2d: 2, torch.conv3d: 3}
_TRANSPOSED = {torch.conv_transpose1d: 1, torch.conv_transpose2d: 2, torch.conv_transpose3d: 3}


@rule(*_CONV)
def _conv(capture: Capture, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    given = bind("input weight bias stride padding dilation groups", args, kwargs)
    x, weight, bias = given["input"], given["weight"], given["bias"]
    dims = _CONV[func]
    if x.ndim != dims + 2 or not _ready(capture, x, weight, bias):
        return _generic(capture, func, args, kwargs)
    stride, dilation = _each(given["stride"], dims, 1), _each(given["dilation"], dims, 1)
    x, padding = _padded(x, given["padding"], weight.shape[2:], dilation)
    groups = given["groups"] or 1
    family = ConvFamily(tuple(weight.shape), stride, padding, dilation, groups)

    def call(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        y: Tensor = Convolve.apply(x, *cast(x, weight, bias), family)  # type: ignore[no-untyped-call]
        return y

    what = _name(capture, func, weight)
    operands = (autocast(x), weight, bias)
    return use_matrix(capture, what, call, family, operands, channel_axes=dims)


@rule(*_TRANSPOSED)
def _transposed(capture: Capture, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """y = conv^T(x): its weight gradient is conv's with x and the output's gradient exchanged."""
    names = "input weight bias stride padding output_padding groups dilation"
    given = bind(names, args, kwargs)
    x, weight, bias = given["input"], given["weight"], given["bias"]
    dims = _TRANSPOSED[func]
    if x.ndim != dims + 2 or not _ready(capture, x, weight, bias):
        return _generic(capture, func, args, kwargs)
    stride, dilation = _each(given["stride"], dims, 1), _each(given["dilation"], dims, 1)
    padding, more = _each(given["padding"], dims, 0), _each(given["output_padding"], dims, 0)
    groups = given["groups"] or 1
    family = ConvFamily(tuple(weight.shape), stride, padding, dilation, groups)

    def call(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        y: Tensor = func(x, weight, bias, stride, padding, more, groups, dilation)
        return y

    what = _name(capture, func, weight)
    return use_matrix(capture, what, call, family, (x, weight, bias), channel_axes=dims, swap=True)


def autocast(x: Tensor) -> Tensor:
    """x as autocast would have it: our own functions must do that themselves."""
    kind = x.device.type
    return x.to(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else x


def wide(x: Tensor) -> Tensor:
    """x in float32 or better: statistics are not for bfloat16."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def cast(x: Tensor, *others: Tensor | None) -> list[Tensor | None]:
    """Others in x's dtype."""
    return [None if t is None else t.to(x.dtype) for t in others]


def _each(value: Any, dims: int, default: int) -> tuple[int, ...]:
    if value is None:
        return (default,) * dims
    values = tuple(value) if isinstance(value, tuple | list) else (value,)
    return values * dims if len(values) == 1 else values


def _padded(
    x: Tensor, padding: Any, kernel: torch.Size, dilation: tuple[int, ...]
) -> tuple[Tensor, tuple[int, ...]]:
    """x and a padding in numbers; 'same' with an even kernel pads x on one side first."""
    dims = len(kernel)
    if not isinstance(padding, str):
        return x, _each(padding, dims, 0)
    if padding == "valid":
        return x, (0,) * dims
    total = [d * (k - 1) for d, k in zip(dilation, kernel, strict=True)]
    odd = [t % 2 for t in total]
    if any(odd):
        x = F.pad(x, [side for extra in reversed(odd) for side in (0, extra)])
    return x, tuple(t // 2 for t in total)


# --- normalisation: y = scale * xhat + shift, xhat without parameters


@rule(F.group_norm)
def _group_norm(capture: Capture, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    given = bind("input num_groups weight bias eps", args, kwargs)
    eps = 1e-5 if given["eps"] is None else given["eps"]
    return _grouped(capture, func, given, given["num_groups"], eps)


@rule(F.instance_norm)
def _instance_norm(
    capture: Capture, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    names = "input running_mean running_var weight bias use_input_stats momentum eps"
    given = bind(names, args, kwargs)
    if given["running_mean"] is not None:
        raise CannotServe("an instance norm that tracks running statistics keeps private data")
    eps = 1e-5 if given["eps"] is None else given["eps"]
    return _grouped(capture, func, given, given["input"].shape[1], eps)


def _grouped(capture: Capture, func: Any, given: dict[str, Any], groups: int, eps: float) -> Tensor:
    """Group norm, which tells the per-row gradients of its scale and shift itself."""
    x, scale, shift = wide(given["input"]).contiguous(), given["weight"], given["bias"]
    what = _name(capture, func, shift if scale is None else scale)
    sources = [capture.source(scale), capture.source(shift)]
    if any(s is not None and not s.linear for s in sources):
        raise CannotServe(f"{what}: its scale or shift is a non-linear function of parameters")
    sites: list[RecordSite | None] = [None if s is None else RecordSite(s, -1) for s in sources]

    def record(dscale: Tensor, dshift: Tensor | None) -> None:
        for site, gradient in zip(sites, (dscale, dshift), strict=True):
            if site is not None and gradient is not None:
                site.record(gradient)

    if not x.requires_grad:
        x = capture.root(x.clone())
    scale, shift = _own_affine(capture, x, scale, shift)
    y, j = capture.output(
        GroupNorm.apply(x, scale, shift, groups, eps, record),  # type: ignore[no-untyped-call]
        what,
        told=True,
    )
    for site in sites:
        if site is not None:
            site.y = j
            capture.site(site)
    return y


def _own_affine(
    capture: Capture, x: Tensor, scale: Any, shift: Any
) -> tuple[Tensor | None, Tensor | None]:
    """Scale and shift [channels]; in the ascent step [n, channels], moved for every row."""
    sources, j = (capture.source(scale), capture.source(shift)), len(capture.tape.outputs)
    scale, shift = bare(scale), bare(shift)
    if capture.ascent is None or (scale is None and shift is None):
        return scale, shift
    parts = []
    for value, source, default in ((scale, sources[0], 1.0), (shift, sources[1], 0.0)):
        value = x.new_full(x.shape[1:2], default) if value is None else value
        step = None if source is None else capture.ascent.spread(source, value.shape, j, 2)
        parts.append(value.expand(x.shape[:2]) if step is None else value + step.to(value.dtype))
    return parts[0], parts[1]


@rule(F.layer_norm)
def _layer_norm(capture: Capture, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    given = bind("input normalized_shape weight bias eps", args, kwargs)
    eps = 1e-5 if given["eps"] is None else given["eps"]
    xhat = F.layer_norm(given["input"], given["normalized_shape"], None, None, eps)
    return _affine(capture, func, xhat, given["weight"], given["bias"], 0)


@rule(F.mish)
def _mish(capture: Capture, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    given = bind("input inplace", args, kwargs)
    if given["inplace"]:
        return func(*args, **kwargs)
    return Mish.apply(given["input"], capture.twice)  # type: ignore[no-untyped-call]


@rule(torch._C._nn.avg_pool2d)
def _average_pool(
    capture: Capture, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    names = "input kernel_size stride padding ceil_mode count_include_pad divisor_override"
    given = bind(names, args, kwargs)
    x, k = given["input"], given["kernel_size"]
    k = k[0] if isinstance(k, tuple) and k[0] == k[1] else k
    tiles = given["stride"] in (None, k, (k, k)) and not given["padding"]
    fits = isinstance(k, int) and x.ndim == 4 and not (x.shape[2] % k or x.shape[3] % k)
    if not (tiles and fits) or given["divisor_override"] is not None:
        return func(*args, **kwargs)
    return AveragePool.apply(x, k)  # type: ignore[no-untyped-call]


_DROPOUTS = (F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, torch.dropout, torch.feature_dropout)


@rule(*_DROPOUTS)
def _dropout(capture: Capture, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Keyed dropout draws by row: the first axis must count them, and nothing else."""
    given = bind("input p training", args, kwargs)
    on = given["training"] is not False and given["p"] != 0
    if on and given["input"].shape[0] != capture.rows:
        raise CannotServe(
            f"dropout on a tensor of shape {tuple(given['input'].shape)}: its first axis must "
            f"count the {capture.rows} samples"
        )
    return func(*args, **kwargs)


ALWAYS.update(_DROPOUTS)
ALWAYS.update({F.group_norm, F.instance_norm, F.batch_norm, F.mish, torch._C._nn.avg_pool2d})


@rule(F.rms_norm)
def _rms_norm(capture: Capture, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    given = bind("input normalized_shape weight eps", args, kwargs)
    xhat = F.rms_norm(given["input"], given["normalized_shape"], None, given["eps"])
    return _affine(capture, func, xhat, given["weight"], None, 0)


@rule(F.batch_norm)
def _batch_norm(capture: Capture, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    given = bind("input running_mean running_var weight bias training momentum eps", args, kwargs)
    if given["training"] or given["running_mean"] is None:
        raise CannotServe(
            "batch norm in training mixes the samples of a batch: use group norm, or model.eval()"
        )
    eps = 1e-5 if given["eps"] is None else given["eps"]
    x = given["input"]
    xhat = F.batch_norm(x, given["running_mean"], given["running_var"], eps=eps)
    return _affine(capture, func, xhat, given["weight"], given["bias"], x.ndim - 2)


def _affine(
    capture: Capture, func: Any, xhat: Tensor, scale: Any, shift: Any, channel_axes: int
) -> Tensor:
    """Scale * xhat + shift, each [channels] or [*normalized_shape]."""
    what = _name(capture, func, shift if scale is None else scale)
    trailing = (1,) * channel_axes

    def placed(t: Tensor | None) -> Tensor | None:
        return None if t is None else bare(t).reshape(*t.shape, *trailing)

    sources = capture.source(scale), capture.source(shift)
    used, k = capture.input(xhat, what) if capture.source(scale) is not None else (xhat, -1)
    a, c = placed(scale), placed(shift)
    y = used if a is None else used * a if c is None else torch.addcmul(c, used, a)
    if a is None and c is not None:
        y = used + c
    for source, factor in zip(sources, (used, None), strict=True):
        if source is not None:
            y = capture.moved(y, source, (*source.tensor.shape, *trailing), factor)
    y, j = capture.output(y, what)
    for source, kind in zip(sources, (ScaleSite, SumSite), strict=True):
        if source is None:
            continue
        if not source.linear:
            raise CannotServe(f"{what}: its scale or shift is a non-linear function of parameters")
        shape = (*source.tensor.shape, *trailing)
        capture.site(
            ScaleSite(source, shape, k, j) if kind is ScaleSite else SumSite(source, shape, j)
        )
    return y


def _refuse(name: str) -> Any:
    def refuse(capture: Capture, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        raise CannotServe(
            f"{name} hides its steps in one function, so its per-sample gradients are hidden"
        )

    return refuse


for _recurrent in (
    "lstm", "gru", "rnn_tanh", "rnn_relu",
    "lstm_cell", "gru_cell", "rnn_tanh_cell", "rnn_relu_cell",
):  # fmt: skip
    RULES[getattr(torch._VF, _recurrent)] = _refuse(_recurrent)

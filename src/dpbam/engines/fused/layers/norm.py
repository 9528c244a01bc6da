"""Normalisation layers: y = scale * xhat + shift, xhat without parameters."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dpbam.engines.base import UnsupportedModelError
from dpbam.engines.batching import is_batched
from dpbam.engines.fused.fold import split_axis
from dpbam.engines.fused.layers.group_norm import GroupNorm
from dpbam.engines.fused.rules import Call, bare, bind, name_of, rule
from dpbam.engines.fused.tape import Capture
from dpbam.engines.fused.uses import RecordedUse, ScaleUse, SumUse
from dpbam.engines.fused.weights import Weight


@rule(F.group_norm, always=True)
def _group_norm(capture: Capture, call: Call) -> Any:
    given = bind("input num_groups weight bias eps", call)
    return _grouped(capture, call, given, given["num_groups"], _eps(given))


@rule(F.instance_norm, always=True)
def _instance_norm(capture: Capture, call: Call) -> Any:
    names = "input running_mean running_var weight bias use_input_stats momentum eps"
    given = bind(names, call)
    if given["running_mean"] is not None:
        raise UnsupportedModelError(
            "an instance norm that tracks running statistics keeps private data"
        )
    return _grouped(capture, call, given, given["input"].shape[1], _eps(given))


def _grouped(capture: Capture, call: Call, given: dict[str, Any], groups: int, eps: float) -> Any:
    """Group norm, whose backward records the per-row gradients of its scale and shift itself."""
    given_x, scale, shift = given["input"], given["weight"], given["bias"]
    if _differs_by_row(scale, shift):
        xhat = F.group_norm(given_x, groups, None, None, eps)
        return _affine_by_row(capture, xhat, scale, shift, given_x.ndim - 2)
    x = given_x.to(torch.promote_types(given_x.dtype, torch.float32))
    what = name_of(capture, call, shift if scale is None else scale)
    weights = [capture.weight(scale), capture.weight(shift)]
    _refuse_non_linear(what, weights)
    uses = [None if w is None else RecordedUse(w) for w in weights]
    count = capture.rows  # the graph holds ``record``, so that must not hold the capture

    def record(dscale: Tensor, dshift: Tensor | None) -> None:
        for use, gradient in zip(uses, (dscale, dshift), strict=True):
            if use is not None and gradient is not None:
                use.record(split_axis(gradient, 0, (count, -1)))

    def for_all_rows(x: Tensor) -> Tensor:
        x, _ = capture.tape.output(
            x if x.requires_grad else x.clone(), what
        )  # so that backward runs
        images = x.flatten(0, 1).contiguous()
        affine = _affine_of(capture, images, (scale, shift), weights)
        y = GroupNorm.apply(images, *affine, groups, eps, record)  # type: ignore[no-untyped-call]
        y = split_axis(y, 0, x.shape[:2])
        y, _ = capture.tape.output(y, what, recorded=True)
        capture.tape.uses.extend(use for use in uses if use is not None)
        return y

    y = capture.all_rows(for_all_rows, x)
    return y if torch.is_autocast_enabled(x.device.type) else y.to(given_x.dtype)


def _affine_of(
    capture: Capture,
    images: Tensor,
    values: tuple[Tensor | None, Tensor | None],
    weights: list[Weight | None],
) -> list[Tensor | None]:
    """Return scale and shift [channels]; in the ascent step [n, channels], moved for every row."""
    bare_values = [None if v is None else v.detach().to(images.dtype) for v in values]
    if capture.ascent is None or not any(w is not None for w in weights):
        return bare_values
    moved: list[Tensor | None] = []
    for value, weight, default in zip(bare_values, weights, (1.0, 0.0), strict=True):
        value = images.new_full(images.shape[1:2], default) if value is None else value
        step = None if weight is None else capture.ascent.step_of(weight)
        rows = value.expand(images.shape[:2])
        if step is not None:
            repeated = step.repeat_interleave(images.shape[0] // step.shape[0], dim=0)
            rows = rows + repeated.to(value.dtype)
        moved.append(rows)
    return moved


@rule(F.layer_norm)
def _layer_norm(capture: Capture, call: Call) -> Any:
    given = bind("input normalized_shape weight bias eps", call)
    xhat = F.layer_norm(given["input"], given["normalized_shape"], None, None, _eps(given))
    return _affine(capture, call, xhat, given["weight"], given["bias"], 0)


@rule(F.rms_norm)
def _rms_norm(capture: Capture, call: Call) -> Any:
    given = bind("input normalized_shape weight eps", call)
    xhat = F.rms_norm(given["input"], given["normalized_shape"], None, given["eps"])
    return _affine(capture, call, xhat, given["weight"], None, 0)


@rule(F.batch_norm, always=True)
def _batch_norm(capture: Capture, call: Call) -> Any:
    given = bind("input running_mean running_var weight bias training momentum eps", call)
    if given["training"] or given["running_mean"] is None:
        raise UnsupportedModelError(
            "batch norm in training mixes the samples of a batch: use group norm, or model.eval()"
        )
    x = given["input"]
    xhat = F.batch_norm(x, given["running_mean"], given["running_var"], eps=_eps(given))
    return _affine(capture, call, xhat, given["weight"], given["bias"], x.ndim - 2)


def _affine(
    capture: Capture, call: Call, xhat: Tensor, scale: Any, shift: Any, channel_axes: int
) -> Tensor:
    """Return scale * xhat + shift, each [channels] or [*normalized_shape]."""
    if _differs_by_row(scale, shift):
        return _affine_by_row(capture, xhat, scale, shift, channel_axes)
    what = name_of(capture, call, shift if scale is None else scale)
    trailing = (1,) * channel_axes

    def placed(t: Tensor | None) -> Tensor | None:
        return None if t is None else bare(t).reshape(*t.shape, *trailing).to(xhat.dtype)

    weights = capture.weight(scale), capture.weight(shift)
    _refuse_non_linear(what, weights)
    x, k = (xhat, -1) if weights[0] is None else capture.input(xhat, what)
    a, c = placed(scale), placed(shift)
    y = x if a is None else x * a if c is None else torch.addcmul(c, x, a)
    if a is None and c is not None:
        y = x + c
    for weight, factor in zip(weights, (x, None), strict=True):
        if weight is not None:
            y = capture.moved(y, weight, channel_axes, factor)
    if not any(w is not None for w in weights):
        return y
    y, j = capture.output(y, what)
    if weights[0] is not None:
        shape = (*weights[0].tensor.shape, *trailing)
        capture.tape.uses.append(ScaleUse(weights[0], shape, k, j))
    if weights[1] is not None:
        capture.tape.uses.append(SumUse(weights[1], (*weights[1].tensor.shape, *trailing), j))
    return y


def _differs_by_row(*values: Tensor | None) -> bool:
    return any(v is not None and is_batched(v) for v in values)


def _affine_by_row(
    capture: Capture, xhat: Tensor, scale: Any, shift: Any, channel_axes: int
) -> Tensor:
    """Return scale * xhat + shift where one of them is computed from the row."""
    trailing = (1,) * channel_axes
    with capture:
        y = xhat if scale is None else xhat * scale.reshape(*scale.shape, *trailing)
        return y if shift is None else y + shift.reshape(*shift.shape, *trailing)


def _refuse_non_linear(what: str, weights: Any) -> None:
    if any(w is not None and not w.linear for w in weights):
        raise UnsupportedModelError(
            f"{what}: its scale or shift is a non-linear function of parameters"
        )


def _eps(given: dict[str, Any]) -> float:
    return 1e-5 if given["eps"] is None else float(given["eps"])

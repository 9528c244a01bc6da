"""Layer, RMS and batch normalisation: y = scale * xhat + shift, xhat without parameters."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dpbam.engines.base import UnsupportedModelError
from dpbam.engines.batching import is_batched
from dpbam.engines.fused.rules import Call, bare, rule
from dpbam.engines.fused.tape import Capture
from dpbam.engines.fused.uses import ScaleUse, SumUse
from dpbam.params import Keywords


@rule(F.layer_norm, always=True)
def _layer_norm(capture: Capture, call: Call) -> Any:
    args = call.bind("input normalized_shape weight bias eps")
    x, shape, scale, shift = (args[n] for n in ("input", "normalized_shape", "weight", "bias"))
    trained = capture.weight(scale) is not None or capture.weight(shift) is not None
    if not trained and is_batched(x) and not differs_by_row(scale, shift):
        # frozen: for all rows at once, since vmap multiplies and adds in operations of their own
        eps = eps_of(args)
        return capture.all_rows(lambda x: F.layer_norm(x, shape, scale, shift, eps), x)
    xhat = F.layer_norm(x, shape, None, None, eps_of(args))
    return _affine(capture, call, xhat, scale, shift, 0)


@rule(F.rms_norm)
def _rms_norm(capture: Capture, call: Call) -> Any:
    args = call.bind("input normalized_shape weight eps")
    xhat = F.rms_norm(args["input"], args["normalized_shape"], None, args["eps"])
    return _affine(capture, call, xhat, args["weight"], None, 0)


@rule(F.batch_norm, always=True)
def _batch_norm(capture: Capture, call: Call) -> Any:
    args = call.bind("input running_mean running_var weight bias training momentum eps")
    if args["training"] or args["running_mean"] is None:
        raise UnsupportedModelError(
            "batch norm in training mixes the samples of a batch: use group norm, or model.eval()"
        )
    x = args["input"]
    xhat = F.batch_norm(x, args["running_mean"], args["running_var"], eps=eps_of(args))
    return _affine(capture, call, xhat, args["weight"], args["bias"], x.ndim - 2)


def _affine(
    capture: Capture, call: Call, xhat: Tensor, scale: Any, shift: Any, channel_axes: int
) -> Tensor:
    """Return scale * xhat + shift, each [channels] or [*normalized_shape]."""
    if differs_by_row(scale, shift):
        return affine_by_row(capture, xhat, scale, shift, channel_axes)
    what = capture.name_of(call, shift if scale is None else scale)
    trailing = (1,) * channel_axes

    def placed(t: Tensor | None) -> Tensor | None:
        if t is None:
            return None
        value = bare(t).reshape(*t.shape, *trailing).to(xhat.dtype)
        return capture.move(value, capture.weight(t))

    weights = capture.weight(scale), capture.weight(shift)
    refuse_non_linear(what, weights)
    x, k = (xhat, -1) if weights[0] is None else capture.input(xhat, what)
    a, c = placed(scale), placed(shift)
    y = x if a is None else x * a if c is None else torch.addcmul(c, x, a)
    if a is None and c is not None:
        y = x + c
    if not any(w is not None for w in weights):
        return y
    y, j = capture.output(y, what)
    if weights[0] is not None:
        shape = (*weights[0].tensor.shape, *trailing)
        capture.tape.uses.append(ScaleUse(weights[0], shape, k, j))
    if weights[1] is not None:
        capture.tape.uses.append(SumUse(weights[1], (*weights[1].tensor.shape, *trailing), j))
    return y


def differs_by_row(*values: Tensor | None) -> bool:
    """Whether one of the values is computed from the row."""
    return any(v is not None and is_batched(v) for v in values)


def affine_by_row(
    capture: Capture, xhat: Tensor, scale: Any, shift: Any, channel_axes: int
) -> Tensor:
    """Return scale * xhat + shift, one of which is computed from the row."""
    trailing = (1,) * channel_axes
    with capture:
        y = xhat if scale is None else xhat * scale.reshape(*scale.shape, *trailing)
        return y if shift is None else y + shift.reshape(*shift.shape, *trailing)


def refuse_non_linear(what: str, weights: Any) -> None:
    """Refuse a scale or shift that is a non-linear function of parameters."""
    if any(w is not None and not w.linear for w in weights):
        raise UnsupportedModelError(
            f"{what}: its scale or shift is a non-linear function of parameters"
        )


def eps_of(args: Keywords) -> float:
    """Return ``eps``, by default torch's."""
    return 1e-5 if args["eps"] is None else float(args["eps"])

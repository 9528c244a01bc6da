"""Rules: what to record on the tape for a torch function that takes a trainable parameter.

A rule gets the capture and the call; it runs the call with parameters detached and records uses. A
function without a rule gets the :func:`~dpbam.engines.fused.generic.generic` one, which is right
for any function. A rule exists only where it is faster, where the generic one fails, or to refuse
with a clear message.

To add one for a function of your own, make it a torch function and register a rule::

    def scaled(x, weight):                                  # your layer's function
        if torch.overrides.has_torch_function((x, weight)):
            return torch.overrides.handle_torch_function(scaled, (x, weight), x, weight)
        return x * weight

    @rule(scaled)
    def _(capture, call):
        x, k = capture.input(call.args[0], "scaled")        # k: x's index on the tape
        weight = capture.weight(call.args[1])               # the parameters behind the argument
        y, j = capture.output(x * call.args[1].detach(), "scaled")
        capture.tape.uses.append(ScaleUse(weight, tuple(weight.tensor.shape), k, j))
        return y

Inside a rule a tensor looks like that of one row; ``capture.all_rows`` gives those of all rows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from dpbam.engines.batching import is_batched
from dpbam.engines.fused.bilinear import Layer
from dpbam.engines.fused.tape import ALWAYS, RULES, Call, Capture, Rule
from dpbam.engines.fused.uses import Bias, MatrixUse, SumUse

__all__ = ["RULES", "Call", "bare", "ready", "rule", "use_matrix"]


def rule(*funcs: Callable[..., Any], always: bool = False) -> Callable[[Rule], Rule]:
    """Register a rule for torch functions; ``always``: also for calls without parameters."""

    def register(rule_of_all: Rule) -> Rule:
        for func in funcs:
            RULES[func] = rule_of_all
        if always:
            ALWAYS.update(funcs)
        return rule_of_all

    return register


def bare(t: Tensor | None) -> Any:
    """Return a parameter without its graph."""
    return None if t is None else t.detach()


def ready(capture: Capture, x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Whether the call is x times a weight, plus a bias, that :func:`use_matrix` supports."""
    if not is_batched(x) or is_batched(weight) or (bias is not None and is_batched(bias)):
        return False
    source, shift = capture.weight(weight), capture.weight(bias)
    known = source is None or source.selection or source.centred
    return known and (shift is None or shift.linear)


def use_matrix(
    capture: Capture,
    what: str,
    function: Callable[[Tensor, Tensor, Any], Tensor],
    layer: Layer,
    operands: tuple[Tensor, Tensor, Tensor | None],
    *,
    channel_axes: int = 0,
    swap: bool = False,
) -> Tensor:
    """Return y = function(x, weight, bias), and record the uses of a trained weight and bias.

    Args:
        capture: the capture.
        what: the name of the call in messages.
        function: of x for all rows, [N, *row].
        layer: f, without the bias.
        operands: x, weight, bias.
        channel_axes: the number of axes of y after its channels.
        swap: x and y are exchanged in the layer (transposed convolutions).
    """
    x, weight, bias = operands
    source, shift = capture.weight(weight), capture.weight(bias)
    tape, ascent = capture.tape, capture.ascent

    def for_all_rows(x: Tensor) -> Tensor:
        k = -1
        if source is not None:
            x, k = tape.input(x, what)

        def shared() -> Tensor:
            return function(x, bare(weight), bare(bias))

        use = MatrixUse(source, layer, k, len(tape.outputs), swap) if source else None
        if ascent is None:
            y = shared()
        elif use is None:
            y = shared() if shift is None else ascent.shifted(shared(), shift, channel_axes)
        else:
            y = ascent.matrix(use, len(tape.uses), x, shared, Bias(bare(bias), shift), channel_axes)
        y, j = tape.output(y, what)
        if use is not None:
            tape.uses.append(use)
        if shift is not None:
            shape = tuple(shift.tensor.shape) + (1,) * channel_axes
            tape.uses.append(SumUse(shift, shape, j))
        return y

    y: Tensor = capture.all_rows(for_all_rows, x)
    return y

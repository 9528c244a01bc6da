"""A look at the model, once: where the rows are, and whether they stay apart.

The fused engine runs rows together, so two things must be known that the functional engine gets
for free. Both come from running three rows of the batch, and two of them again.

1. *Where the rows are.* In every tensor at a use, the one axis whose size goes from 3 k to 2 k.
2. *That they do not mix.* The gradient of the first row's loss at every use must be exactly zero
   in the places of the other rows, and the rows' losses must be the same in both runs (this finds
   mixing that no gradient sees). A layer like x - x.mean(0) fails the first, and by name.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from dpbam.engines.base import CannotServe, PhysicalBatch
from dpbam.engines.capture import Node, Plan, Tape
from dpbam.engines.sites import Layout
from dpbam.trees import map_rows, rows

Run = Callable[[PhysicalBatch, Plan], tuple[Tape, Tensor]]
_MORE, _FEWER = 3, 2


@dataclass(frozen=True)
class Probed:
    """A plan, the passes it is good for, and whether different rows were seen."""

    plan: Plan
    signature: tuple[Any, ...]
    thorough: bool


def probe(run: Run, batch: PhysicalBatch) -> Probed:
    """Find the plan for this model, or refuse.

    Args:
        run: (batch, plan) -> (tape, losses [rows]); a forward pass.
        batch: any batch for the model.
    """
    more, fewer = _take(batch, _MORE), _take(batch, _FEWER)
    plan = Plan()
    (tape, losses), (small, _) = run(more, plan), run(fewer, plan)
    _check_same(tape, small)
    expansions = frozenset(
        call for call, shape in tape.expansions.items() if _row_axis(shape, small.expansions[call])
    )
    if expansions:
        plan = Plan(expansions)
        tape, losses = run(more, plan)
        small, _ = run(fewer, plan)
        _check_same(tape, small)
    _, again = run(fewer, plan)
    _check_losses(losses, again)
    inputs = [_layout(a, b) for a, b in zip(tape.inputs, small.inputs, strict=True)]
    outputs = [_layout(a, b) for a, b in zip(tape.outputs, small.outputs, strict=True)]
    nodes = tape.inputs + tape.outputs
    layouts = _apart(losses[0], nodes, inputs + outputs, more)
    found = Plan(expansions, tuple(layouts[: len(inputs)]), tuple(layouts[len(inputs) :]))
    return Probed(found, tape.signature, batch.unit.shape[0] > 1)


def _take(batch: PhysicalBatch, count: int) -> PhysicalBatch:
    """The first ``count`` rows, from the start again if there are fewer, each its own unit."""
    index = torch.arange(count, device=batch.unit.device) % rows(batch.inputs)
    inputs, targets, keys = map_rows(lambda t: t[index], (batch.inputs, batch.targets, batch.keys))
    for t in _floats(inputs):
        t.requires_grad_()  # so that every later tensor tells which rows it is made of
    return PhysicalBatch(
        inputs=inputs,
        targets=targets,
        unit=torch.arange(count, device=batch.unit.device),
        units=count,
        weights=torch.ones(count, device=batch.weights.device, dtype=batch.weights.dtype),
        keys=keys,
    )


def _check_same(tape: Tape, small: Tape) -> None:
    if tape.signature != small.signature or tape.expansions.keys() != small.expansions.keys():
        raise CannotServe("the forward pass takes other steps for another number of samples")


def _row_axis(more: torch.Size, fewer: torch.Size) -> Layout | None:
    differ = [i for i, (a, b) in enumerate(zip(more, fewer, strict=True)) if a != b]
    if len(differ) != 1:
        return None
    axis = differ[0]
    many, rest = divmod(more[axis], _MORE)
    return None if rest or fewer[axis] != _FEWER * many else Layout(axis, many)


def _layout(more: Node, fewer: Node) -> Layout:
    found = _row_axis(more.shape, fewer.shape)
    if found is None:
        raise CannotServe(
            f"no axis of a tensor at {more.what} counts the samples (shape {tuple(more.shape)} for "
            f"{_MORE}, {tuple(fewer.shape)} for {_FEWER}): the model may mix samples there"
        )
    return found


def _apart(loss: Tensor, nodes: list[Node], layouts: list[Layout], batch: Any) -> list[Layout]:
    """The first row's loss must not see the other rows; which of two orders makes it so."""
    data = _floats(batch.inputs)
    known = [i for i, node in enumerate(nodes) if node.edge is not None]
    wanted: list[Any] = [nodes[i].edge for i in known] + data
    gradients = torch.autograd.grad(loss, wanted, allow_unused=True) if wanted else ()
    for t in gradients[len(known) :]:
        if t is not None and not _zero_elsewhere(t, Layout()):
            raise CannotServe("samples mix: one's loss depends on another's inputs")
    found = list(layouts)
    for i, gradient in zip(known, gradients, strict=False):
        if gradient is None or _zero_elsewhere(gradient, layouts[i]):
            continue
        found[i] = replace(layouts[i], minor=True)
        if layouts[i].many == 1 or not _zero_elsewhere(gradient, found[i]):
            raise CannotServe(
                f"samples mix after {nodes[i].what}: one's loss depends on another's data"
            )
    return found


def _floats(tree: Any) -> list[Tensor]:
    return [t for t in tree_leaves(tree) if isinstance(t, Tensor) and t.is_floating_point()]


def _zero_elsewhere(gradient: Tensor, layout: Layout) -> bool:
    others = layout.rows_first(gradient, _MORE)[1:]
    return not bool((others[others.isfinite()] != 0).any())


def _check_losses(more: Tensor, fewer: Tensor) -> None:
    a, b = more.detach()[:_FEWER], fewer.detach()
    slack = 30 * torch.finfo(a.dtype).eps ** 0.5
    both = a.isfinite() & b.isfinite()
    if bool(((a - b).abs() > slack * (1 + b.abs()))[both].any()):
        raise CannotServe(
            "a sample's loss changes with the other samples of the batch: the model mixes samples"
        )

"""The fused engine: per-sample clipping and exact BAM with shared weights.

One forward pass, one backward pass for the plain gradients, one more for BAM, all batched, without
per-sample weights. ``docs/engine.md`` has the mathematics; in short, with p = lambda:

1. forward, one row at a time for the model (``vmap``), under
   :class:`~dpbam.engines.fused.tape.Capture`: x and y of every use of a parameter;
2. backward of L: b = dL/dy, and for BAM h = dL/dx, still attached to the graph;
3. |g_u| from the pairs (x, b), differentiable; L_BAO = sum_u (L_u + p |g_u|);
4. backward of L_BAO: ybar at every y, hbar at every h;
5. d_u is a sum over uses of outer products, from (x, ybar) and (hbar, b); its norm by ghost norms;
6. the clipped sum: the ordinary weight gradients, with rows scaled by the clip factors.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import dpbam.engines.fused.layers  # noqa: F401  # the layers register their rules
from dpbam.engines.base import Loss, PhysicalBatch, UnsupportedModelError
from dpbam.engines.batching import on_all_rows
from dpbam.engines.decomposed import Decompose
from dpbam.engines.draws import KeyedDraws
from dpbam.engines.fused.ascent import Ascent
from dpbam.engines.fused.bilinear import Purpose
from dpbam.engines.fused.collect import Collected, PlainPass, collect
from dpbam.engines.fused.directions import FusedDirections
from dpbam.engines.fused.fold import Fold
from dpbam.engines.fused.generic import generic
from dpbam.engines.fused.gradients import Norm, read_flags, settle
from dpbam.engines.fused.tape import Capture, Tape
from dpbam.engines.fused.uses import Flow
from dpbam.engines.isolation import Isolation, Isolator, alone, over_rows, row_loss
from dpbam.engines.precision import full_precision
from dpbam.methods import Ascended, Method, form_of
from dpbam.params import trainable

_ANY_KERNEL = [SDPBackend.MATH, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION]


class FusedEngine:
    """Compute directions without per-sample weights.

    Args:
        model: any module; parameters that do not require a gradient are constants and cost nothing.
        loss: (output, targets) -> one value per row. It may use the model's parameters.
        groups: the clipping group of each trainable parameter; None puts all in one.
        memory_limit: bytes that one layer's norm may take, for Gram matrices or for per-unit
            gradients; above it the norm is computed the other way, or by some units at a time.

    Example:
        >>> from dpbam.methods import BAM
        >>> model = nn.Linear(3, 2)
        >>> engine = FusedEngine(model, nn.CrossEntropyLoss(reduction="none"))
        >>> batch = PhysicalBatch(
        ...     torch.randn(4, 3), torch.tensor([0, 1, 0, 1]), 4, torch.arange(4))
        >>> engine.directions(batch, BAM(0.1, exact=True), 0.1).norms().shape
        torch.Size([1, 4])
    """

    name = "fused"

    def __init__(
        self,
        model: nn.Module,
        loss: Loss,
        groups: Mapping[str, int] | None = None,
        *,
        memory_limit: int = 2**28,
    ) -> None:
        self._model, self._loss, self._limit = model, loss, memory_limit
        self._clipping_groups, self._isolator = groups, Isolator(model, loss)
        self._parameters: dict[str, Tensor] = {}

    def directions(
        self, batch: PhysicalBatch, method: Method, lam: float, *, plain: bool = False
    ) -> FusedDirections:
        """Return the directions of every unit, factored."""
        # before the snapshot of what a pass must not change: Lightning's modules reach the oracle
        self._parameters = dict(trainable(self._model))
        form = form_of(method, lam)
        if form is None:
            raise UnsupportedModelError(
                f"{method!r} has a direction that is not declared to be a gradient of L + p |g| or "
                "BAM's ascent step (dpbam.methods.computed_as)"
            )

        def run(watch: Isolation) -> FusedDirections:
            if isinstance(form, Ascended):
                return self._ascend(batch, form.step, watch, plain=plain)
            if form.penalty > 0:
                return self._exact(batch, form.penalty, watch, plain=plain)
            directions = self._plain(batch, watch)
            directions.plain = directions if plain else None
            return directions

        return self._isolator.run(run)

    def _plain(
        self,
        batch: PhysicalBatch,
        watch: Isolation,
        ascent: Ascent | None = None,
        purpose: Purpose = "sum",
    ) -> FusedDirections:
        """Return g_u, at theta or where the ascent moves it."""
        tape, losses = self._forward(batch, watch, ascent=ascent)
        with full_precision():
            flow = self._backward(tape, batch.total(losses), Fold(batch), twice=False).flow
            flow = flow.detach(purpose)
            directions = self._directions(collect(tape.uses, flow), batch)
        directions.row_losses = losses.detach()
        return directions

    def _ascend(
        self, batch: PhysicalBatch, lam: float, watch: Isolation, *, plain: bool
    ) -> FusedDirections:
        """Return g_u at theta + lam g_u / |g_u|: the paper's BAM."""
        before = self._plain(batch, watch, purpose="ascent")

        def ascend() -> FusedDirections:
            with torch.no_grad():
                total = before.norms().square().sum(0)  # over the clipping groups
                steps = lam * _safe_root(total)[1]
                ascent = Ascent(before, steps, Fold(batch))
            return self._plain(batch, watch, ascent)

        # Both passes run before the device is asked whether a norm needs repair: it waits once, not
        # twice. Rarely it does; then the second pass runs again from the repaired norms.
        measured = before.measure()
        directions = ascend()
        measured_there = directions.measure()
        sound = read_flags(measured, measured_there)
        if before.settle(measured, sound[0]):
            directions = ascend()
        else:
            directions.settle(measured_there, sound[1])
        directions.plain = before if plain else None
        directions.row_losses = before.row_losses  # at theta, not where the ascent has moved it
        return directions

    def _exact(
        self, batch: PhysicalBatch, penalty: float, watch: Isolation, *, plain: bool
    ) -> FusedDirections:
        """Return the gradient of L_u + p |g_u|, by backward over backward."""
        tape, losses = self._forward(batch, watch, twice=True)
        with full_precision():
            first = self._backward(tape, batch.total(losses), Fold(batch), twice=True)
            before, bam = first.again(tape, penalty)
            with torch.no_grad():
                directions = self._directions(collect(tape.uses, bam, before), batch)
        directions.row_losses = losses.detach()
        if plain:
            directions.plain = self._directions(before.collected, batch, before.norms)
            directions.plain.row_losses = directions.row_losses
        return directions

    def _directions(
        self, collected: Collected, batch: PhysicalBatch, norms: list[Norm] | None = None
    ) -> FusedDirections:
        return FusedDirections(collected, self._groups, batch.units, self._parameters, norms)

    @property
    def _groups(self) -> Mapping[str, int]:
        return self._clipping_groups or dict.fromkeys(self._parameters, 0)

    def _forward(
        self,
        batch: PhysicalBatch,
        watch: Isolation,
        *,
        twice: bool = False,
        ascent: Ascent | None = None,
    ) -> tuple[Tape, Tensor]:
        """Return the tape, and the losses of the rows, [U R]: step 1."""
        parameters = self._parameters
        capture = Capture(parameters, batch.rows, generic, twice=twice, ascent=ascent)

        def key() -> Tensor:
            keys: Tensor = on_all_rows(batch.row_keys, capture.rows)
            return keys

        def loss_of(row: tuple[Any, Any]) -> Tensor:
            around = watch.around(capture, KeyedDraws(key), Decompose())
            return row_loss(self._model, self._loss, row, around)

        with torch.enable_grad(), _attention_kernels(twice):
            losses: Tensor = over_rows(loss_of, alone((batch.inputs, batch.targets))).squeeze(1)
        if not losses.requires_grad:
            raise UnsupportedModelError("the loss depends on no trainable parameter")
        capture.tape.check_untouched()
        return capture.tape, losses

    def _backward(self, tape: Tape, total: Tensor, fold: Fold, *, twice: bool) -> _Backward:
        """Return b at every y; for BAM also h at every x, all attached to the graph: step 2."""
        indices = [j for j, node in enumerate(tape.outputs) if not node.recorded]
        ys: list[Any] = [tape.outputs[j].edge for j in indices]
        moving = [k for k, node in enumerate(tape.inputs) if node.edge is not None] if twice else []
        xs: list[Any] = [tape.inputs[k].edge for k in moving]
        # a seed that requires a gradient keeps h in the graph where it does not depend on x or
        # theta. One pass needs no seed: with one, torch imports its symbolic shapes, which takes a
        # second. The parameters are asked for because nothing but recorded uses may reach them
        seed = torch.ones_like(total, requires_grad=True) if twice else None
        gradients = torch.autograd.grad(
            total, [*ys, *xs, *self._parameters.values()], grad_outputs=seed, create_graph=twice,
            allow_unused=True,
        )  # fmt: skip
        _check_captured(gradients[len(ys) + len(xs) :], self._parameters)
        b = _spread(gradients[: len(ys)], indices, len(tape.outputs))
        flow = Flow(fold, [node.tensor for node in tape.inputs], b, self._limit)
        at_x = gradients[len(ys) : len(ys) + len(xs)]
        h = {k: t for k, t in zip(moving, at_x, strict=True) if t is not None}
        return _Backward(total, ys, indices, flow, h)


@dataclass(frozen=True)
class _Backward:
    """Results of the first backward pass that the second one needs."""

    total: Tensor
    ys: list[Any]
    indices: list[int]  # of ys on the tape
    flow: Flow
    h: dict[int, Tensor]

    def again(self, tape: Tape, penalty: float) -> tuple[PlainPass, Flow]:
        """Return the plain pass and BAM's flow: steps 3 and 4."""
        plain = collect(tape.uses, self.flow)
        norms, _ = settle(plain.gradients, differentiable=True)
        root, inverse = _safe_root(torch.stack([norm.square for norm in norms]).sum(0))
        objective = self.total + penalty * root.sum()  # sum_u L_u + p |g_u|
        for use in tape.uses:
            use.begin_second_pass()
        wanted = self.ys + list(self.h.values())
        adjoints = torch.autograd.grad(objective, wanted, allow_unused=True)
        for use in tape.uses:
            use.end_second_pass()
        ybar = _spread(adjoints[: len(self.ys)], self.indices, len(self.flow.b))
        hbar = _spread(adjoints[len(self.ys) :], list(self.h), len(self.flow.x))
        norms = [norm.detach() for norm in norms]
        first = PlainPass(plain.detach(), norms, penalty * inverse.detach())
        bam = replace(self.flow, ybar=ybar, hbar=hbar, third_term=first.third_term).detach()
        return first, bam


def _attention_kernels(twice: bool) -> AbstractContextManager[None]:
    """Allow the kernels of attention that are differentiable as often as needed."""
    if twice:
        return sdpa_kernel([SDPBackend.MATH])
    # the one that is excluded needs CUDA, and entering the context takes as long as a small layer
    return sdpa_kernel(_ANY_KERNEL) if torch.cuda.is_available() else nullcontext()


def _spread(values: Sequence[Tensor | None], indices: list[int], size: int) -> list[Tensor | None]:
    by_index = dict(zip(indices, values, strict=True))
    return [by_index.get(i) for i in range(size)]


def _safe_root(squared: Tensor) -> tuple[Tensor, Tensor]:
    """Return (n, 1 / n), both 0 where n = 0: the subgradient of the norm there."""
    positive = squared > 0
    root = torch.where(positive, torch.where(positive, squared, 1.0).sqrt(), 0.0)
    return root, torch.where(positive, 1 / root, 0.0)


def _check_captured(gradients: Sequence[Tensor | None], parameters: Mapping[str, Tensor]) -> None:
    """Refuse a loss that depends on a parameter by another path than the recorded uses."""
    for name, gradient in zip(parameters, gradients, strict=True):
        if gradient is not None:
            raise UnsupportedModelError(
                f"{name} is used by a function that torch hides (a custom one)"
            )

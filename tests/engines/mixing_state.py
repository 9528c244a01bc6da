"""Models through which a record reaches others by what a pass leaves behind, or by foreign code.

The loop engine refuses all of them but those in ``HARMLESS_ALONE``, which mix within a batch only.
"""

from __future__ import annotations

import collections
import threading
from typing import Any

import mixing
import numpy as np
import torch
import torch.nn.functional as F
from catalogue import Net, parameter
from mixing import Mixing, linear, loss, mixes
from torch import Tensor, nn

BANK: list[Tensor] = []
LEVELS: dict[str, float] = {}
BOARD = torch.zeros(5, dtype=torch.float64)
LOCAL = threading.local()


def forget() -> None:
    """Let go of what models kept outside of themselves: an engine would find it there later."""
    BANK.clear()
    LEVELS.clear()
    BOARD.zero_()
    vars(LOCAL).clear()


def simple(m: Net, x: Tensor) -> Tensor:
    return m.head(m.first(x).tanh())


def mean_of(h: Tensor) -> Tensor:
    return h.detach().mean(0)


# --- buffers


@mixes
def buffer_replaced() -> Mixing:
    def call(m: Net, x: Tensor) -> Tensor:
        h = m.first(x)
        m.mean = 0.5 * m.mean + 0.5 * mean_of(h)
        return m.head((h - m.mean).tanh())

    net = linear(call)
    net.register_buffer("mean", torch.zeros(5))
    return Mixing(net)


@mixes
def buffer_written() -> Mixing:
    def call(m: Net, x: Tensor) -> Tensor:
        h = m.first(x)
        out = m.head((h - m.mean).tanh())
        m.mean.mul_(0.5).add_(mean_of(h))
        return out

    net = linear(call)
    net.register_buffer("mean", torch.zeros(5))
    return Mixing(net)


@mixes
def buffer_written_through_data() -> Mixing:
    def call(m: Net, x: Tensor) -> Tensor:
        h = m.first(x)
        out = m.head((h - m.mean).tanh())
        m.mean.data += mean_of(h)
        return out

    net = linear(call)
    net.register_buffer("mean", torch.zeros(5), persistent=False)
    return Mixing(net)


@mixes
def buffer_behind_a_zero_gate() -> Mixing:
    def call(m: Net, x: Tensor) -> Tensor:
        h = m.first(x)
        out = m.head((h - m.gate * m.mean).tanh())
        m.mean.copy_(mean_of(h))
        return out

    net = linear(call, gate=nn.Parameter(torch.zeros(())))
    net.register_buffer("mean", torch.zeros(5))
    return Mixing(net)


@mixes
def power_iteration() -> Mixing:
    """The data's largest direction, followed from step to step."""

    def call(m: Net, x: Tensor) -> Tensor:
        h = m.first(x)
        m.direction = F.normalize(h.detach().t() @ (h.detach() @ m.direction), dim=0)
        return m.head(h - (h @ m.direction)[:, None] * m.direction)

    net = linear(call)
    net.register_buffer("direction", F.normalize(torch.ones(5), dim=0))
    return Mixing(net)


@mixes
def vector_quantisation() -> Mixing:
    """A codebook that moves with the records, as VQ-VAE keeps it."""

    def call(m: Net, x: Tensor) -> Tensor:
        h = m.first(x)
        nearest = (h.detach()[:, None] - m.codes).square().sum(2).argmin(1)
        quantised = h + (m.codes[nearest] - h).detach()
        m.codes = m.codes + 0.5 * F.one_hot(nearest, 3).to(h).t() @ (h.detach() - m.codes[nearest])
        return m.head(quantised)

    net = linear(call)
    net.register_buffer("codes", torch.randn(3, 5))
    return Mixing(net)


# --- attributes


@mixes
def queue_in_a_list() -> Mixing:
    def call(m: Net, x: Tensor) -> Tensor:
        h = m.first(x)
        bank = torch.stack([*m.queue, mean_of(h)]).mean(0)
        m.queue.append(mean_of(h))
        return m.head((h - bank).tanh())

    return Mixing(linear(call, queue=[]))


@mixes
def queue_of_fixed_length() -> Mixing:
    def call(m: Net, x: Tensor) -> Tensor:
        h = m.first(x)
        bank = torch.stack(list(m.queue)).mean(0)
        m.queue.append(mean_of(h))
        return m.head((h - bank).tanh())

    queue = collections.deque([torch.zeros(5, dtype=torch.float64)] * 3, maxlen=3)
    return Mixing(linear(call, queue=queue))


@mixes
def previous_batch() -> Mixing:
    def call(m: Net, x: Tensor) -> Tensor:
        h = m.first(x)
        before = getattr(m, "before", None)
        m.before = h.detach()
        return m.head((h if before is None else h - before.mean(0)).tanh())

    return Mixing(linear(call))


@mixes
def first_batch_for_ever() -> Mixing:
    """Set once: a later pass changes nothing more."""

    def call(m: Net, x: Tensor) -> Tensor:
        h = m.first(x)
        if not hasattr(m, "mean"):
            m.mean = mean_of(h)
        return m.head((h - m.mean).tanh())

    return Mixing(linear(call))


@mixes
def cache_by_shape() -> Mixing:
    def call(m: Net, x: Tensor) -> Tensor:
        h = m.first(x)
        return m.head((h - m.cache.setdefault(tuple(h.shape[1:]), mean_of(h))).tanh())

    return Mixing(linear(call, cache={}))


@mixes
def number_kept() -> Mixing:
    def call(m: Net, x: Tensor) -> Tensor:
        h = m.first(x)
        out = m.head((h * m.scale).tanh())
        m.scale = 1 / (1 + float(h.detach().abs().max()))
        return out

    return Mixing(linear(call, scale=1.0))


@mixes
def array_kept() -> Mixing:
    def call(m: Net, x: Tensor) -> Tensor:
        h = m.first(x)
        out = m.head((h - torch.from_numpy(m.table.copy())).tanh())
        m.table[:] = mean_of(h).numpy()
        return out

    return Mixing(linear(call, table=np.zeros(5)))


@mixes
def counter_that_starts_to_mix() -> Mixing:
    def call(m: Net, x: Tensor) -> Tensor:
        h = m.first(x)
        m.steps += 1
        return m.head((h - h.mean(0) if m.steps > 2 else h).tanh())

    return Mixing(linear(call, steps=0))


@mixes
def class_attribute() -> Mixing:
    class Shared(nn.Module):
        mean = torch.zeros(5, dtype=torch.float64)

        def __init__(self) -> None:
            super().__init__()
            self.first, self.head = nn.Linear(mixing.WIDTH, 5), nn.Linear(5, 3)

        def forward(self, x: Tensor) -> Tensor:
            h = self.first(x)
            out = self.head((h - Shared.mean).tanh())
            Shared.mean = mean_of(h)
            return out

    return Mixing(Shared())


@mixes
def parameter_written() -> Mixing:
    def call(m: Net, x: Tensor) -> Tensor:
        m.first.bias.data -= 0.5 * mean_of(m.first(x))
        return simple(m, x)

    return Mixing(linear(call))


@mixes
def frozen_parameter_written() -> Mixing:
    def call(m: Net, x: Tensor) -> Tensor:
        h = m.first(x)
        out = m.head((h - m.mean).tanh())
        m.mean.copy_(mean_of(h))
        return out

    return Mixing(linear(call, mean=nn.Parameter(torch.zeros(5), requires_grad=False)))


@mixes
def object_that_keeps() -> Mixing:
    class Memory:
        def __init__(self) -> None:
            self.mean = torch.zeros(5, dtype=torch.float64)

    def call(m: Net, x: Tensor) -> Tensor:
        h = m.first(x)
        out = m.head((h - m.memory.mean).tanh())
        m.memory.mean = mean_of(h)
        return out

    return Mixing(linear(call, memory=Memory()))


# --- outside of the model


@mixes
def global_list() -> Mixing:
    def call(m: Net, x: Tensor) -> Tensor:
        h = m.first(x)
        out = m.head((h - torch.stack([*BANK, mean_of(h) * 0]).mean(0)).tanh())
        BANK.append(mean_of(h))
        return out

    BANK.clear()
    return Mixing(linear(call))


@mixes
def global_number_set_once() -> Mixing:
    def call(m: Net, x: Tensor) -> Tensor:
        h = m.first(x)
        return m.head((h - LEVELS.setdefault("first", float(h.detach().mean()))).tanh())

    LEVELS.clear()
    return Mixing(linear(call))


@mixes
def global_tensor_written() -> Mixing:
    def call(m: Net, x: Tensor) -> Tensor:
        h = m.first(x)
        out = m.head((h - BOARD).tanh())
        BOARD.copy_(mean_of(h))
        return out

    BOARD.zero_()
    return Mixing(linear(call))


@mixes
def thread_local() -> Mixing:
    def call(m: Net, x: Tensor) -> Tensor:
        h = m.first(x)
        before = getattr(LOCAL, "mean", 0.0)
        LOCAL.mean = mean_of(h)
        return m.head((h - before).tanh())

    vars(LOCAL).clear()
    return Mixing(linear(call))


@mixes
def closure() -> Mixing:
    kept: list[Tensor] = []

    def call(m: Net, x: Tensor) -> Tensor:
        h = m.first(x)
        before = kept[-1] if kept else 0.0
        kept.append(mean_of(h))
        return m.head((h - before).tanh())

    return Mixing(linear(call))


@mixes
def default_argument() -> Mixing:
    def call(m: Net, x: Tensor, kept: dict[str, float] = {}) -> Tensor:  # noqa: B006
        h = m.first(x)
        before = kept.get("mean", 0.0)
        kept["mean"] = float(h.detach().mean())
        return m.head((h - before).tanh())

    return Mixing(linear(call))


@mixes
def function_attribute() -> Mixing:
    def call(m: Net, x: Tensor) -> Tensor:
        h = m.first(x)
        before = getattr(call, "mean", 0.0)
        call.mean = mean_of(h)  # type: ignore[attr-defined]
        return m.head((h - before).tanh())

    return Mixing(linear(call))


# --- hooks


@mixes
def forward_hook() -> Mixing:
    kept: list[Tensor] = []

    def remember(module: nn.Module, args: Any, h: Tensor) -> Tensor:
        before = kept[-1] if kept else 0.0
        kept.append(mean_of(h))
        return h - before

    net = linear(simple)
    net.first.register_forward_hook(remember)
    return Mixing(net)


@mixes
def hook_that_writes_to_its_module() -> Mixing:
    def remember(module: nn.Module, args: Any, h: Tensor) -> Tensor:
        before = getattr(module, "before", 0.0)
        module.before = mean_of(h)
        return h - before

    net = linear(simple)
    net.first.register_forward_hook(remember)
    return Mixing(net)


@mixes
def pre_hook_of_the_head() -> Mixing:
    kept = {"mean": 0.0}

    def remember(module: nn.Module, args: Any) -> Any:
        before, kept["mean"] = kept["mean"], float(args[0].detach().mean())
        return (args[0] - before,)

    net = linear(simple)
    net.head.register_forward_pre_hook(remember)
    return Mixing(net)


@mixes
def backward_hook() -> Mixing:
    """Adds what it saw of the record before to the gradient."""
    kept: list[Tensor] = []

    def remember(module: nn.Module, gx: Any, gy: Any) -> Any:
        before = kept[-1] if kept else torch.zeros_like(gx[0][0])
        kept.append(gx[0].detach().sum(0))
        return (gx[0] + before,)

    net = linear(simple)
    net.head.register_full_backward_hook(remember)
    return Mixing(net)


@mixes
def hook_on_an_activation() -> Mixing:
    def call(m: Net, x: Tensor) -> Tensor:
        h = m.first(x)
        h.register_hook(lambda g: g - 2 * g.mean(0))
        return m.head(h.tanh())

    return Mixing(linear(call))


@mixes
def hook_on_a_parameter() -> Mixing:
    kept: list[Tensor] = []

    def remember(g: Tensor) -> Tensor:
        before = kept[-1] if kept else torch.zeros_like(g)
        kept.append(g.detach())
        return g + before

    net = linear(simple)
    net.head.weight.register_hook(remember)
    return Mixing(net)


@mixes
def saved_tensors_replaced() -> Mixing:
    """What backward reads is the batch's mean."""

    def call(m: Net, x: Tensor) -> Tensor:
        def pack(t: Tensor) -> Tensor:
            return t.detach().mean(0, keepdim=True).expand_as(t) if t.shape[0] == len(x) else t

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            return simple(m, x)

    return Mixing(linear(call))


# --- code with rules of its own


class Centre(torch.autograd.Function):
    """Its rule for vmap takes the mean over the rows."""

    @staticmethod
    def forward(h: Tensor) -> Tensor:
        return h * 1

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        return None

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g

    @staticmethod
    def vmap(info: Any, in_dims: Any, h: Tensor) -> Any:
        return Centre.apply(h - 2 * h.mean(in_dims[0], keepdim=True)), in_dims[0]


@mixes
def function_with_its_own_vmap_rule() -> Mixing:
    return Mixing(linear(lambda m, x: m.head(Centre.apply(m.first(x)).tanh())))


class MixedBackward(torch.autograd.Function):
    @staticmethod
    def forward(h: Tensor) -> Tensor:
        return h * 1

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        return None

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g - 2 * g.sum(0, keepdim=True)


@mixes
def function_that_mixes_in_backward() -> Mixing:
    return Mixing(linear(lambda m, x: m.head(MixedBackward.apply(m.first(x)).tanh())))


@torch.library.custom_op("dpbam_tests::centre", mutates_args=())
def centre(h: Tensor) -> Tensor:
    return h.clone()


centre.register_autograd(lambda ctx, g: g)


@centre.register_vmap
def _(info: Any, in_dims: Any, h: Tensor) -> Any:
    return h - 2 * h.mean(in_dims[0], keepdim=True), in_dims[0]


@mixes
def operator_with_its_own_vmap_rule() -> Mixing:
    return Mixing(linear(lambda m, x: m.head(centre(m.first(x)).tanh())))


# --- the loss


@mixes
def loss_that_keeps_a_level() -> Mixing:
    level = [torch.zeros((), dtype=torch.float64)]

    def smoothed(out: Tensor, y: Tensor) -> Tensor:
        value = loss(out, y)
        before, level[0] = level[0], 0.5 * level[0] + value.detach().mean()
        return (value - before).square()

    return Mixing(linear(simple), loss=smoothed)


class ClassCounts(nn.Module):
    """Weights classes by how many of each were seen so far."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("counts", torch.ones(3, dtype=torch.float64))

    def forward(self, out: Tensor, y: Tensor) -> Tensor:
        self.counts += F.one_hot(y, 3).sum(0)
        return loss(out, y) * 10 / self.counts[y]


@mixes
def loss_that_counts_classes() -> Mixing:
    return Mixing(linear(simple), loss=ClassCounts())


@mixes
def draws_that_permute_the_rows() -> Mixing:
    return Mixing(linear(lambda m, x: m.head(m.first(x)[torch.randperm(len(x))].tanh())))


@mixes
def numpy_draws_that_permute_the_rows() -> Mixing:
    def call(m: Net, x: Tensor) -> Tensor:
        return m.head(m.first(x)[np.random.permutation(len(x))].tanh())  # noqa: NPY002

    return Mixing(linear(call, unused=parameter(1)))


HARMLESS_ALONE = {
    "hook on an activation", "saved tensors replaced", "function with its own vmap rule",
    "function that mixes in backward", "operator with its own vmap rule",
    "numpy draws that permute the rows", "draws that permute the rows",
}  # fmt: skip
mixing.STATEFUL -= HARMLESS_ALONE

"""Parameters in ordinary code: tied, reused, detached, indexed, in graphs and in losses."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from catalogue import ROWS, Example, Net, example, labels, loss, parameter
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

WIDTH = 5


def vectors(width: int = WIDTH) -> Tensor:
    return torch.randn(ROWS, width)


def two_layers(**parts: Any) -> dict[str, Any]:
    return {"first": nn.Linear(WIDTH, 6), "head": nn.Linear(6, 3), **parts}


def simple(m: Net, x: Tensor) -> Tensor:
    return m.head(m.first(x).tanh())


@example
def one_module_under_two_names() -> Example:
    parts = two_layers()
    return Example(
        Net(lambda m, x: m.head(m.first(x).tanh() + m.again(x)), **parts, again=parts["first"]),
        vectors(),
    )


@example
def tied_weights() -> Example:
    def call(m: Net, x: Tensor) -> Tensor:
        return m.head(m.back(m.first(x).tanh()).tanh() @ m.back.weight)

    net = Net(call, **two_layers(back=nn.Linear(6, 6), again=nn.Linear(6, 6)))
    net.again.weight = net.back.weight
    return Example(net, vectors())


@example
def tied_transposed() -> Example:
    def call(m: Net, x: Tensor) -> Tensor:
        return F.linear(m.first(x).tanh(), m.first.weight.t()).matmul(m.head.weight.t()[:WIDTH])

    return Example(Net(call, **two_layers()), vectors())


@example
def view_as_an_empty_tensor() -> Example:
    def call(m: Net, x: Tensor) -> Tensor:
        weight = m.weight.view_as(torch.empty(6, WIDTH))
        return m.head(F.linear(x, weight).tanh())

    return Example(Net(call, weight=parameter(6 * WIDTH), head=nn.Linear(6, 3)), vectors())


@example
def detached_use() -> Example:
    def call(m: Net, x: Tensor) -> Tensor:
        return m.head(m.first(x).tanh()) * m.scale.detach() + m.scale * x.mean()

    return Example(Net(call, **two_layers(), scale=parameter(3)), vectors())


@example
def use_through_data() -> Example:
    def call(m: Net, x: Tensor) -> Tensor:
        return m.head(F.linear(x, m.first.weight.data).tanh()) + m.first(x)[:, :3]

    return Example(Net(call, **two_layers()), vectors())


@example
def use_under_no_grad() -> Example:
    def call(m: Net, x: Tensor) -> Tensor:
        with torch.no_grad():
            gate = m.first(x).sigmoid()
        return m.head(m.first(x).tanh() * gate)

    return Example(Net(call, **two_layers()), vectors())


@example
def group_norm_under_no_grad() -> Example:
    def call(m: Net, x: Tensor) -> Tensor:
        with torch.no_grad():
            gate = m.norm(m.first(x)).sigmoid() + F.instance_norm(x[:, None]).mean()
        return m.head(m.norm(m.first(x)).tanh() * gate)

    parts = {"norm": nn.GroupNorm(1, two_layers()["first"].out_features)}
    return Example(Net(call, **two_layers(), **parts), vectors())


@example
def stopped_gradient_target() -> Example:
    """SimSiam: one branch is a constant for the gradient."""

    def call(m: Net, a: Tensor, b: Tensor) -> Tensor:
        return F.cosine_similarity(m.head(m.first(a).tanh()), simple(m, b).detach(), dim=1)

    return Example(Net(call, **two_layers()), (vectors(), vectors()), loss=lambda out, y: 1 - out)


@example
def scalar_parameters() -> Example:
    def call(m: Net, x: Tensor) -> Tensor:
        return m.head(m.first(x * m.a).tanh() ** 2 + m.b) / m.a.exp()

    parts = {"a": nn.Parameter(torch.tensor(0.7)), "b": nn.Parameter(torch.tensor(0.1))}
    return Example(Net(call, **two_layers(), **parts), vectors())


@example
def where_cat_and_index() -> Example:
    def call(m: Net, x: Tensor) -> Tensor:
        chosen = torch.where(x > 0, m.up, m.down)
        picked = m.table[(x[:, 0] > 0).long()]
        return m.head(torch.cat([chosen * x, picked], 1))

    parts = {"up": parameter(WIDTH), "down": parameter(WIDTH), "table": parameter(2, 3)}
    return Example(Net(call, **parts, head=nn.Linear(8, 3)), vectors())


@example
def gather_and_scatter() -> Example:
    def call(m: Net, x: Tensor) -> Tensor:
        order = x.argsort(1)
        h = (m.weight * x).gather(1, order)
        return m.head(torch.zeros_like(h).scatter_add(1, order, h.exp()))

    return Example(Net(call, weight=parameter(WIDTH), head=nn.Linear(WIDTH, 3)), vectors())


@example
def einsum() -> Example:
    def call(m: Net, x: Tensor) -> Tensor:
        return torch.einsum("ni,nj,ijk->nk", x, x.tanh(), m.weight)

    return Example(Net(call, weight=parameter(WIDTH, WIDTH, 3)), vectors())


@example
def bilinear() -> Example:
    parts = {"both": nn.Bilinear(WIDTH, 4, 3)}
    return Example(Net(lambda m, a, b: m.both(a, b).tanh(), **parts), (vectors(), vectors(4)))


@example
def matrix_products() -> Example:
    def call(m: Net, x: Tensor) -> Tensor:
        h = torch.addmm(m.bias, x, m.a)
        h = torch.baddbmm(h[:, None], h[:, None], m.b.expand(x.shape[0], -1, -1))[:, 0]
        return h.tanh() @ m.a.t()[:, :3] + torch.matmul(x, m.a)[:, :3]

    return Example(
        Net(call, bias=parameter(4), a=parameter(WIDTH, 4), b=parameter(4, 4)), vectors()
    )


@example
def parameter_list_and_dict() -> Example:
    def call(m: Net, x: Tensor) -> Tensor:
        for weight in m.steps:
            x = x + (x @ weight).tanh()
        return x @ m.named["w"] + m.named["b"]

    steps = nn.ParameterList([parameter(WIDTH, WIDTH) for _ in range(2)])
    named = nn.ParameterDict({"w": parameter(WIDTH, 3), "b": parameter(3)})
    return Example(Net(call, steps=steps, named=named), vectors())


@example
def hypernetwork() -> Example:
    def call(m: Net, x: Tensor, z: Tensor) -> Tensor:
        weight = m.hyper(z).view(-1, 6, WIDTH)
        return m.head(torch.bmm(weight, x[..., None])[..., 0].tanh())

    parts = {"hyper": nn.Linear(2, 6 * WIDTH), "head": nn.Linear(6, 3)}
    return Example(Net(call, **parts), (vectors(), vectors(2)))


@example
def weights_from_a_shared_code() -> Example:
    def call(m: Net, x: Tensor) -> Tensor:
        return m.head(F.linear(x, m.hyper(m.code).view(6, WIDTH)).tanh())

    parts = {"hyper": nn.Linear(2, 6 * WIDTH), "code": parameter(2), "head": nn.Linear(6, 3)}
    return Example(Net(call, **parts), vectors())


@example
def low_rank_adapter() -> Example:
    def call(m: Net, x: Tensor) -> Tensor:
        return m.head((m.first(x) + x @ m.a @ m.b).tanh())

    parts = two_layers(a=parameter(WIDTH, 2), b=parameter(2, 6))
    parts["first"].requires_grad_(False)
    return Example(Net(call, **parts), vectors())


@example
def radial_basis() -> Example:
    def call(m: Net, x: Tensor) -> Tensor:
        return m.head((-torch.cdist(x, m.centres).square() * m.width.exp()).exp())

    parts = {"centres": parameter(6, WIDTH), "width": parameter(6), "head": nn.Linear(6, 3)}
    return Example(Net(call, **parts), vectors())


@example
def random_fourier_features() -> Example:
    net = Net(lambda m, x: m.head(torch.cos(x @ m.frequencies)), head=nn.Linear(6, 3))
    net.register_buffer("frequencies", torch.randn(WIDTH, 6))
    return Example(net, vectors())


@example
def splines() -> Example:
    def call(m: Net, x: Tensor) -> Tensor:
        basis = torch.stack([F.relu(x - k) ** 2 for k in (-1.0, 0.0, 1.0)], -1)
        return torch.einsum("nik,iok->no", basis, m.weight) + m.head(m.first(x))

    return Example(Net(call, **two_layers(), weight=parameter(WIDTH, 3, 3)), vectors())


@example
def triangular_solve() -> Example:
    def call(m: Net, x: Tensor) -> Tensor:
        lower = m.weight.tril(-1) + torch.eye(WIDTH, dtype=x.dtype)
        solved = torch.linalg.solve_triangular(lower, x[..., None], upper=False)
        return m.head(m.first(solved[..., 0]).tanh())

    return Example(Net(call, **two_layers(), weight=parameter(WIDTH, WIDTH)), vectors())


@example
def coupling_flow() -> Example:
    def call(m: Net, x: Tensor) -> tuple[Tensor, Tensor]:
        a, b = x[:, :2], x[:, 2:]
        scale, shift = m.net(a).chunk(2, 1)
        return torch.cat([a, b * scale.tanh().exp() + shift], 1), scale.tanh().sum(1)

    return Example(
        Net(call, net=nn.Sequential(nn.Linear(2, 6), nn.Tanh(), nn.Linear(6, 6))),
        vectors(),
        loss=lambda out, y: out[0].square().sum(1) / 2 - out[1],
    )


@example
def deep_sets() -> Example:
    def call(m: Net, x: Tensor) -> Tensor:
        return m.head(m.first(x).relu().sum(1) + m.first(x).amax(1))

    return Example(Net(call, **two_layers()), torch.randn(ROWS, 4, WIDTH))


# --- graphs: a record is a graph with its adjacency matrix


def graph() -> tuple[Tensor, Tensor]:
    adjacency = (torch.rand(ROWS, 4, 4) > 0.5).float()
    return torch.randn(ROWS, 4, WIDTH), ((adjacency + adjacency.mT) > 0).float()


@example
def graph_convolution() -> Example:
    def call(m: Net, x: Tensor, a: Tensor) -> Tensor:
        a = a / a.sum(-1, keepdim=True).clamp(min=1)
        return m.head((a @ m.first(a @ x)).tanh().mean(1))

    return Example(Net(call, **two_layers()), graph())


@example
def graph_attention() -> Example:
    def call(m: Net, x: Tensor, a: Tensor) -> Tensor:
        h = m.first(x)
        scores = F.leaky_relu((h @ m.left)[..., None] + (h @ m.right)[..., None, :])
        weights = scores.masked_fill(a == 0, -1e9).softmax(-1)
        return m.head((weights @ h).mean(1))

    return Example(Net(call, **two_layers(left=parameter(6), right=parameter(6))), graph())


@example
def messages_along_edges() -> Example:
    def call(m: Net, x: Tensor, a: Tensor) -> Tensor:
        n = x.shape[1]
        pairs = [x[:, :, None].expand(-1, -1, n, -1), x[:, None].expand(-1, n, -1, -1)]
        messages = m.edge(torch.cat(pairs, -1)).relu() * a[..., None]
        return m.head((m.first(x) + messages.sum(2)).tanh().sum(1))

    return Example(Net(call, **two_layers(edge=nn.Linear(2 * WIDTH, 6))), graph())


# --- inputs, outputs and losses


@example
def keyword_inputs_with_None() -> Example:
    def call(m: Net, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return simple(m, x if mask is None else x * mask)

    return Example(Net(call, **two_layers()), {"x": vectors(), "mask": None})


@example
def dictionary_of_outputs() -> Example:
    def call(m: Net, x: Tensor) -> dict[str, Tensor]:
        h = m.first(x).tanh()
        return {"logits": m.head(h), "size": h.square().mean(1)}

    return Example(
        Net(call, **two_layers()), vectors(),
        loss=lambda out, y: loss(out["logits"], y) + 0.1 * out["size"],
    )  # fmt: skip


@example
def dictionary_of_targets() -> Example:
    targets = {"label": labels(), "weight": torch.rand(ROWS, dtype=torch.float64)}
    return Example(
        Net(simple, **two_layers()), vectors(), targets,
        lambda out, y: loss(out, y["label"]) * y["weight"],
    )  # fmt: skip


@example
def multi_label() -> Example:
    def binary(out: Tensor, y: Tensor) -> Tensor:
        return F.binary_cross_entropy_with_logits(out, y.to(out), reduction="none").mean(1)

    return Example(Net(simple, **two_layers()), vectors(), torch.randint(0, 2, (ROWS, 3)), binary)


@example
def focal_loss() -> Example:
    def focal(out: Tensor, y: Tensor) -> Tensor:
        value = loss(out, y)
        return (1 - (-value).exp()) ** 2 * value

    return Example(Net(simple, **two_layers()), vectors(), None, focal)


@example
def huber_regression() -> Example:
    def huber(out: Tensor, y: Tensor) -> Tensor:
        return F.huber_loss(out[:, 0], y.to(out), reduction="none")

    return Example(Net(simple, **two_layers()), vectors(), torch.randn(ROWS), huber)


@example
def loss_linear_in_the_output() -> Example:
    def linear(out: Tensor, y: Tensor) -> Tensor:
        return -out.gather(1, y[:, None])[:, 0]

    return Example(Net(simple, **two_layers()), vectors(), None, linear)


@example
def loss_linear_after_a_softmax() -> Example:
    def call(m: Net, x: Tensor) -> Tensor:
        return simple(m, x).log_softmax(1)

    def linear(out: Tensor, y: Tensor) -> Tensor:
        return -out.gather(1, y[:, None])[:, 0]

    return Example(Net(call, **two_layers()), vectors(), None, linear)


@example
def parameter_in_the_loss() -> Example:
    net = Net(simple, **two_layers(), margin=parameter(3))
    return Example(net, vectors(), None, lambda out, y: loss(out + net.margin.tanh(), y))


@example
def parameter_only_in_the_loss() -> Example:
    net = Net(simple, **two_layers(), temperature=nn.Parameter(torch.tensor(0.3)))
    return Example(net, vectors(), None, lambda out, y: loss(out * net.temperature.exp(), y))


class Uncertainty(nn.Module):
    """Two tasks weighted by their learnt variances."""

    def __init__(self, log_variance: nn.Parameter) -> None:
        super().__init__()
        self.log_variance = log_variance

    def forward(self, out: Tensor, y: Tensor) -> Tensor:
        tasks = torch.stack([loss(out, y), out.square().mean(1)], 1)
        return (tasks * (-self.log_variance).exp() + self.log_variance).sum(1)


@example
def uncertainty_weighting() -> Example:
    net = Net(simple, **two_layers(), log_variance=parameter(2))
    return Example(net, vectors(), None, Uncertainty(net.log_variance))


@example
def loss_times_a_parameter() -> Example:
    net = Net(simple, **two_layers(), scale=nn.Parameter(torch.tensor(1.3)))
    return Example(net, vectors(), None, lambda out, y: loss(out, y) * net.scale)


@example
def weight_decay_in_the_loss() -> Example:
    net = Net(simple, **two_layers())
    return Example(
        net, vectors(), None, lambda out, y: loss(out, y) + 0.1 * net.first.weight.square().sum()
    )


@example
def units_of_several_rows() -> Example:
    return Example(Net(simple, **two_layers()), vectors(), per_unit=2)


# --- what vmap cannot run


@example
def branch_on_the_data() -> Example:
    def call(m: Net, x: Tensor) -> Tensor:
        h = m.first(x)
        return m.head(h.tanh() if float(x.sum()) > 0 else h.sigmoid())

    return Example(Net(call, **two_layers()), vectors())


@example
def shape_that_depends_on_the_data() -> Example:
    def call(m: Net, x: Tensor) -> Tensor:
        h = m.first(x)
        return m.head(h.tanh()) * (1 + h[h > 0].square().sum())

    return Example(Net(call, **two_layers()), vectors())


@example
def checkpointing() -> Example:
    def call(m: Net, x: Tensor) -> Tensor:
        return m.head(checkpoint(lambda t: m.first(t).tanh(), x, use_reentrant=False))

    return Example(Net(call, **two_layers()), vectors())


class Square(torch.autograd.Function):
    """Old style: the context is an argument of forward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return x.square() * w

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor]:
        x, w = ctx.saved_tensors
        return 2 * x * w * g, (x.square() * g).sum(0)


@example
def old_style_function_on_activations() -> Example:
    def call(m: Net, x: Tensor) -> Tensor:
        return m.head(Square.apply(m.first(x), torch.ones(6, dtype=x.dtype)))

    return Example(Net(call, **two_layers()), vectors())


@example
def old_style_function_on_a_parameter() -> Example:
    def call(m: Net, x: Tensor) -> Tensor:
        return m.head(Square.apply(m.first(x), m.weight))

    return Example(Net(call, **two_layers(), weight=parameter(6)), vectors())


@example
def gradient_inside_forward() -> Example:
    """Forces: minus the gradient of the energy by the positions."""

    def call(m: Net, x: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        energy = m.head(m.first(x).tanh()).square().sum()
        return -torch.autograd.grad(energy, x, create_graph=True)[0]

    return Example(
        Net(call, **two_layers()), vectors(), torch.randn(ROWS, WIDTH, dtype=torch.float64),
        lambda out, y: (out - y).square().mean(1),
    )  # fmt: skip


@example
def gradient_penalty() -> Example:
    def call(m: Net, x: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        out = m.head(m.first(x).tanh())
        (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        return out + slope.square().sum(1, keepdim=True)

    return Example(Net(call, **two_layers()), vectors())


@example
def jacobian_by_torch_func() -> Example:
    def call(m: Net, x: Tensor) -> Tensor:
        def energy(point: Tensor) -> Tensor:
            return m.head(m.first(point).tanh()).square().sum()

        return m.head(m.first(x)) + torch.func.grad(energy)(x)[:, :3]

    return Example(Net(call, **two_layers()), vectors())

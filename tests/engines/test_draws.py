"""Keyed draws: a row's draws depend on its key alone; what cannot be keyed is refused.

Statistical tests draw from fixed keys: they cannot fail by chance.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import grad, vmap
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

from dpbam.engines.decomposed.recurrent import DECOMPOSED
from dpbam.engines.draws import KEYED, REFUSED, KeyedDraws, OnlyKeyedDraws
from dpbam.privacy.randomness import derive, keyed_bits, keyed_uniform

N = 5
KEYS = derive(torch.arange(N), 0)
MANY = 40_000


def row(f: Callable[[Tensor], Tensor], x: Tensor, key: Tensor) -> Tensor:
    """The model on a batch of one row, as the engines run it."""
    with KeyedDraws(key):
        return f(x[None])[0]


def module(make: Callable[[], nn.Module]) -> Callable[[Tensor], Tensor]:
    torch.manual_seed(0)
    made = make()

    def run(x: Tensor) -> Tensor:
        out = made(x)
        return out[0] if isinstance(out, tuple) else out

    return run


def heads(x: Tensor, *args: Any, **options: Any) -> Tensor:
    return F.scaled_dot_product_attention(x[:, None], x[:, None], x[:, None], *args, **options)[
        :, 0
    ]


def self_attention(**options: Any) -> Callable[[Tensor], Tensor]:
    torch.manual_seed(0)
    layer = nn.MultiheadAttention(8, 2, dropout=0.5, batch_first=True, **options)
    return lambda x: layer(x, x, x)[0]


def unbatched_attention() -> Callable[[Tensor], Tensor]:
    attend = self_attention()
    return lambda x: attend(x[0])[None]


def in_place_dropout(x: Tensor) -> Tensor:
    """Its return value is thrown away: x itself has to change."""
    y = 2 * x
    F.dropout(y, 0.4, True, True)
    return y


def drop_path(x: Tensor) -> Tensor:
    """Stochastic depth as timm writes it."""
    keep = x.new_empty((x.shape[0],) + (1,) * (x.ndim - 1)).bernoulli_(0.6)
    keep.div_(0.6)
    return x * keep


def stochastic_depth(x: Tensor) -> Tensor:
    """Stochastic depth as torchvision writes it."""
    size = [x.shape[0]] + [1] * (x.ndim - 1)
    noise = torch.empty(size, dtype=x.dtype, device=x.device)
    noise = noise.bernoulli_(0.6)
    noise.div_(0.6)
    return x * noise


DRAWS: dict[str, Callable[[Tensor], Tensor]] = {
    "F.dropout": lambda x: F.dropout(x, 0.4),
    "torch.dropout": lambda x: torch.dropout(x, 0.4, True),
    "torch.dropout_": lambda x: torch.dropout_(2 * x, 0.4, True),
    "torch.native_dropout": lambda x: torch.native_dropout(x, 0.4, True)[0],
    "F.dropout in place": in_place_dropout,
    "nn.Dropout1d": module(lambda: nn.Dropout1d(0.4)),
    "nn.Dropout2d": lambda x: F.dropout2d(x[..., None], 0.4)[..., 0],
    "nn.Dropout3d": lambda x: F.dropout3d(x[..., None, None], 0.4)[..., 0, 0],
    "F.dropout1d of one sample": lambda x: F.dropout1d(x[0], 0.4)[None],
    "nn.AlphaDropout": module(lambda: nn.AlphaDropout(0.4)),
    "nn.FeatureAlphaDropout": module(lambda: nn.FeatureAlphaDropout(0.4)),
    "two in a row": module(lambda: nn.Sequential(nn.Dropout(0.3), nn.Dropout(0.3))),
    "DropPath": drop_path,
    "StochasticDepth": stochastic_depth,
    "rrelu": lambda x: F.rrelu(x, training=True),
    "rrelu in place": lambda x: F.rrelu(2 * x, training=True, inplace=True),
    "gumbel_softmax": lambda x: F.gumbel_softmax(x),
    "hard gumbel_softmax": lambda x: F.gumbel_softmax(x, hard=True, dim=1),
    "rand": lambda x: x * torch.rand(4, 8),
    "rand of a tuple": lambda x: x * torch.rand((4, 8), dtype=torch.float64, generator=None),
    "rand_like": lambda x: x + torch.rand_like(x, dtype=torch.float64),
    "randn": lambda x: x * torch.randn(x.shape),
    "randn_like": lambda x: x + torch.randn_like(x),
    "randint": lambda x: x * torch.randint(7, (4, 8)),
    "randint by name": lambda x: x * torch.randint(low=-9, high=7, size=(4, 8)),
    "randint_like": lambda x: x * torch.randint_like(x, 1, 5),
    "randperm": lambda x: x[:, torch.randperm(4)],
    "bernoulli": lambda x: torch.bernoulli(x.sigmoid()),
    "Tensor.bernoulli": lambda x: x * x.bernoulli(0.3),
    "bernoulli_ with a tensor": lambda x: torch.empty_like(x).bernoulli_(x.sigmoid()),
    "bernoulli_ of bool": lambda x: x * torch.empty(4, 8, dtype=torch.bool).bernoulli_(0.5),
    "normal": lambda x: torch.normal(x, 2.0),
    "normal of a size": lambda x: x + torch.normal(1.0, 2.0, (4, 8)),
    "normal_": lambda x: x + torch.empty_like(x).normal_(1, 2),
    "uniform_": lambda x: x + x.new_empty(4, 8).uniform_(-1, to=3),
    "exponential_": lambda x: x + torch.empty_like(x).exponential_(2.0),
    "log_normal_": lambda x: x + torch.empty_like(x).log_normal_(),
    "cauchy_": lambda x: x + torch.empty_like(x).cauchy_(),
    "random_": lambda x: x + torch.empty(4, 8).random_(3, 9),
    "multinomial": lambda x: x + torch.multinomial(x[0].exp(), 3).sum(),
    "multinomial with replacement": lambda x: x + torch.multinomial(x[0].exp(), 9, True).sum(),
    "a distribution": lambda x: torch.distributions.Normal(x, x.exp(), False).rsample(),
    "attention by name": lambda x: heads(x, dropout_p=0.5),
    "attention by place": lambda x: heads(x, None, 0.5),
    "causal attention": lambda x: heads(x, dropout_p=0.5, is_causal=True),
    "nn.MultiheadAttention": self_attention(),
    "MultiheadAttention without a batch axis": unbatched_attention(),
    "bias_k and a zero source": self_attention(add_bias_kv=True, add_zero_attn=True),
    "nn.TransformerEncoderLayer": module(
        lambda: nn.TransformerEncoderLayer(8, 2, 16, dropout=0.3, batch_first=True)
    ),
    "nn.LSTM": module(lambda: nn.LSTM(8, 6, 3, dropout=0.4, batch_first=True)),
    "nn.GRU": module(lambda: nn.GRU(8, 6, 2, dropout=0.4, batch_first=True, bidirectional=True)),
}


def batch() -> tuple[Tensor, Tensor]:
    return torch.linspace(-2, 2, N * 32).view(N, 4, 8), KEYS


@pytest.mark.parametrize("name", DRAWS)
def test_draws_depend_on_the_rows_key_alone(name: str) -> None:
    """Alone, in a batch under vmap, in another order; another key gives other draws."""
    f, (x, keys) = DRAWS[name], batch()

    def one(x: Tensor, key: Tensor) -> Tensor:
        return row(f, x, key)

    alone = torch.stack([one(x[n], keys[n]) for n in range(N)])
    order = [3, 0, 4]
    close = {"rtol": 0, "atol": 1e-5}  # the matrix products of a batch are in another order
    torch.testing.assert_close(vmap(one, randomness="error")(x, keys), alone, **close)
    torch.testing.assert_close(vmap(one)(x[order], keys[order]), alone[order], **close)
    assert not torch.allclose(vmap(one)(x, keys + 1), alone)


@pytest.mark.parametrize("name", DRAWS)
def test_gradients_under_vmap_equal_a_loop(name: str) -> None:
    """Differentiated inside vmap, as the functional engine does, and outside, as the fused one."""
    f, (x, keys) = DRAWS[name], batch()
    x.requires_grad_()

    def loss(x: Tensor, key: Tensor) -> Tensor:
        return row(f, x, key).square().sum() + 0 * x.sum()

    wanted = torch.autograd.grad(sum(loss(x[n], keys[n]) for n in range(N)), x)[0]  # type: ignore
    outside = torch.autograd.grad(vmap(loss)(x, keys).sum(), x)[0]
    torch.testing.assert_close(outside, wanted, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(vmap(grad(loss))(x, keys), wanted, rtol=1e-4, atol=1e-4)


def test_two_draws_of_a_pass_differ_and_a_second_pass_repeats_them() -> None:
    def passes() -> Tensor:
        with KeyedDraws(KEYS[0]):
            return torch.stack([torch.rand(8), torch.rand(8)])

    first = passes()
    assert not (first[0] == first[1]).any()
    assert torch.equal(first, passes())


def draw(f: Callable[[], Tensor]) -> Tensor:
    with KeyedDraws(torch.tensor(7)):
        return f().double()


def full(dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(MANY, dtype=dtype)


MOMENTS: dict[str, tuple[Callable[[], Tensor], float, float]] = {  # draws, mean, variance
    "rand": (lambda: torch.rand(MANY), 1 / 2, 1 / 12),
    "rand, float64": (lambda: torch.rand(MANY, dtype=torch.float64), 1 / 2, 1 / 12),
    "rand, bfloat16": (lambda: torch.rand(MANY, dtype=torch.bfloat16), 1 / 2 - 2**-9, 1 / 12),
    "uniform_": (lambda: full().uniform_(-1, 3), 1, 16 / 12),
    "randn": (lambda: torch.randn(MANY), 0, 1),
    "randn, float64": (lambda: torch.randn(MANY, dtype=torch.float64), 0, 1),
    "normal_": (lambda: full().normal_(3, 2), 3, 4),
    "exponential_": (lambda: full().exponential_(2), 1 / 2, 1 / 4),
    "log_normal_": (lambda: full().log_normal_(0, 0.5).log(), 0, 0.25),
    "randint": (lambda: torch.randint(2, 7, (MANY,)), 4, 2),
    "bernoulli_": (lambda: full().bernoulli_(0.3), 0.3, 0.21),
    "multinomial": (lambda: torch.multinomial(torch.tensor([1.0, 3.0]), MANY, True), 3 / 4, 3 / 16),
    "dropout": (lambda: F.dropout(torch.ones(MANY), 0.2), 1, 1 / 4),
    "alpha dropout of a normal": (lambda: F.alpha_dropout(torch.randn(MANY), 0.3, True), 0, 1),
    "rrelu": (lambda: -F.rrelu(-torch.ones(MANY), 0, 1, True), 1 / 2, 1 / 12),
    "gumbel_softmax": (
        lambda: F.gumbel_softmax(torch.tensor([[0.0, math.log(3)]] * MANY), hard=True)[:, 1],
        3 / 4,
        3 / 16,
    ),
}


@pytest.mark.parametrize("name", MOMENTS)
def test_draws_have_their_mean_and_variance(name: str) -> None:
    f, mean, variance = MOMENTS[name]
    values = draw(f)
    assert abs(values.mean() - mean) < 5 * math.sqrt(variance / MANY)
    assert abs(values.var() / variance - 1) < 0.05
    assert abs(values.mean() - (mean + 0.1 * math.sqrt(variance))) > 5 * math.sqrt(variance / MANY)


def test_normal_draws_follow_the_normal_distribution() -> None:
    values = draw(lambda: torch.randn(MANY)).sort().values
    ranks = (torch.arange(MANY, dtype=torch.float64) + 0.5) / MANY
    distance = (torch.special.ndtr(values) - ranks).abs().max()
    assert distance < 1.95 / math.sqrt(MANY)  # Kolmogorov and Smirnov, level 1e-3
    assert (torch.special.ndtr(1.05 * values) - ranks).abs().max() > 1.95 / math.sqrt(MANY)


def test_exponential_and_uniform_draws_are_within_their_range() -> None:
    """Gumbel takes the logarithm of an exponential draw; half precision must not round to 1."""
    assert (draw(lambda: torch.empty(1 << 22).exponential_()) > 0).all()
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        values = draw(lambda dtype=dtype: torch.rand(1 << 18, dtype=dtype))  # type: ignore[misc]
        assert values.min() >= 0
        assert values.max() < 1


def test_a_permutation_and_samples_without_replacement_have_no_repeats() -> None:
    assert torch.equal(draw(lambda: torch.randperm(50)).sort().values, torch.arange(50.0).double())
    assert len(draw(lambda: torch.multinomial(torch.ones(50), 50)).unique()) == 50


def test_masks_are_those_of_keyed_uniform() -> None:
    """A dropout mask is the documented hash, so that other code can reproduce it."""
    kept = draw(lambda: F.dropout(torch.ones(3, 4), 0.4)) > 0
    assert torch.equal(kept, keyed_uniform(derive(torch.tensor(7), 0), (3, 4)) >= 0.4)


def test_keyed_uniform_is_the_top_of_the_keyed_bits() -> None:
    keys = torch.tensor([[3, -4], [5, 2**62]])
    assert torch.equal(keyed_uniform(keys, (2, 3)), keyed_bits(keys, (2, 3), 24).float() / 2**24)
    assert torch.equal(keyed_bits(keys, (2, 3), 53) >> 29, keyed_bits(keys, (2, 3), 24))
    by_rows = vmap(vmap(lambda key: keyed_bits(key, (2, 3), 53)))(keys)
    assert torch.equal(by_rows, keyed_bits(keys, (2, 3), 53))


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"attn_mask": torch.randn(2, 1, 5, 6).double()},
        {
            "attn_mask": torch.arange(30).view(5, 6) % 7 < torch.arange(5)[:, None]
        },  # first row: none
        {"is_causal": True, "scale": 0.3},
    ],
    ids=["plain", "additive", "boolean", "causal"],
)
@pytest.mark.parametrize("gqa", [False, True])
def test_decomposed_attention_equals_torch(options: dict[str, Any], gqa: bool) -> None:
    """With a dropout that drops nothing, values and gradients are torch's."""
    torch.manual_seed(0)
    shapes = [(2, 4, 5, 8)] + [(2, 2 if gqa else 4, 6, 8)] * 2
    qkv = [torch.randn(s, dtype=torch.float64, requires_grad=True) for s in shapes]
    expected = F.scaled_dot_product_attention(*qkv, enable_gqa=gqa, **options)
    with KeyedDraws(KEYS[0]):
        got = F.scaled_dot_product_attention(*qkv, dropout_p=1e-30, enable_gqa=gqa, **options)
    torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)
    for a, b in zip(
        *(torch.autograd.grad(t.square().sum(), qkv) for t in (got, expected)), strict=True
    ):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("batched", [True, False], ids=["batch axis", "no batch axis"])
@pytest.mark.parametrize("padding", [True, False])
@pytest.mark.parametrize("mask", [None, "causal", "per head"])
def test_decomposed_multi_head_equals_torch(batched: bool, padding: bool, mask: str | None) -> None:
    """With learned and zero sources, with a dropout that drops nothing."""
    torch.manual_seed(0)
    layer = nn.MultiheadAttention(8, 2, 1e-30, add_bias_kv=True, add_zero_attn=True, kdim=6, vdim=5)
    layer, n = layer.double(), 3 if batched else 1
    q, k, v = (torch.randn(t, n, w, dtype=torch.float64) for t, w in ((4, 8), (5, 6), (5, 5)))
    options: dict[str, Any] = {}
    if padding:
        options["key_padding_mask"] = torch.arange(5) > 1 + torch.arange(n)[:, None]
    if mask:
        options["attn_mask"] = torch.randn(2 * n, 4, 5).double()
        if mask == "causal":
            options["attn_mask"] = torch.ones(4, 5, dtype=torch.bool).triu(1)
    if padding and mask == "per head":
        options["key_padding_mask"] = options["key_padding_mask"].double()
    if not batched:
        q, k, v = (t.squeeze(1) for t in (q, k, v))
        if padding:
            options["key_padding_mask"] = options["key_padding_mask"][0]
    for average in (True, False):
        expected = layer.eval()(q, k, v, average_attn_weights=average, **options)
        with KeyedDraws(KEYS[0]):
            got = layer.train()(q, k, v, average_attn_weights=average, **options)
        for a, b in zip(got, expected, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def test_recurrent_dropout_does_not_depend_on_the_decomposing_mode() -> None:
    """The loop engine runs torch's LSTM, the others the decomposed one."""

    class Decompose(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            if func in DECOMPOSED:
                with self:
                    return DECOMPOSED[func](*args, **(kwargs or {}))
            return func(*args, **(kwargs or {}))

    f, (x, keys) = DRAWS["nn.LSTM"], batch()
    alone = row(f, x[0], keys[0])
    with Decompose():
        torch.testing.assert_close(row(f, x[0], keys[0]), alone)
    with KeyedDraws(keys[0]), Decompose():
        torch.testing.assert_close(f(x[:1])[0], alone)


OFF: dict[str, Callable[[Tensor], Tensor]] = {
    "eval": module(lambda: nn.Sequential(nn.Dropout(), nn.AlphaDropout(), nn.RReLU()).eval()),
    "p = 0": lambda x: F.dropout(x, 0.0),
    "alpha dropout is off by default": lambda x: F.alpha_dropout(x, 0.5),
    "attention": lambda x: heads(x, dropout_p=0.0),
    "nn.LSTM": module(lambda: nn.LSTM(8, 6, 3, dropout=0.4).eval()),
}


@pytest.mark.parametrize("name", OFF)
def test_calls_without_draws_return_torchs_result(name: str) -> None:
    f, (x, keys) = OFF[name], batch()
    with KeyedDraws(keys[0]):
        got = f(x)
    assert torch.equal(got, f(x))


def test_dropout_with_p_1_gives_zero() -> None:
    x = torch.ones(4)
    with KeyedDraws(KEYS[0]):
        for out in F.dropout(x, 1.0), F.alpha_dropout(x, 1.0, True):
            assert torch.equal(out, 0 * x)


@pytest.mark.parametrize(
    "draws",
    [
        lambda x: torch.poisson(x),
        lambda x: torch.distributions.Gamma(x, x, False).rsample(),
        lambda x: torch.empty_like(x).geometric_(0.5),
        lambda x: torch.empty_like(x).random_(),
        lambda x: nn.init.normal_(torch.empty_like(x)),
        lambda x: torch.ops.aten.bernoulli(x),
        lambda x: torch.ops.aten.rand_like.default(x),
        lambda x: torch.rand(4, 8, out=torch.zeros(4, 8)),
        lambda x: nn.FractionalMaxPool2d(2, 2)(x[:, None]),
    ],
)
def test_a_draw_that_cannot_be_keyed_is_refused(draws: Callable[[Tensor], Tensor]) -> None:
    with pytest.raises(ValueError, match=r"draws random numbers with .* put the model in eval"):
        row(draws, torch.ones(4, 8), KEYS[0])


def test_drawing_into_a_tensor_that_rows_share_is_refused() -> None:
    shared = torch.zeros(4, 8)
    with pytest.raises(ValueError, match=r"normal_ into a tensor that all rows share"):
        vmap(lambda x, key: row(lambda x: x + shared.normal_(), x, key))(*batch())
    assert not shared.any()


def again(x: Tensor, p: float) -> Tensor:
    """Backward needs the input of the sine, and computes it again."""
    both = x[None, None]
    attended = F.scaled_dot_product_attention(both, both, both)[0, 0]
    return checkpoint(lambda x: F.dropout(x, p).sin(), attended, use_reentrant=False).sum()


@pytest.mark.parametrize(
    "backward",
    [torch.autograd.backward, torch.autograd.grad, Tensor.backward],
    ids=["autograd.backward", "autograd.grad", "Tensor.backward"],
)
def test_dropout_in_a_recomputed_segment_is_refused(backward: Any) -> None:
    x = torch.ones(4, 3, requires_grad=True)
    given = (x,) if backward is torch.autograd.grad else ()
    with OnlyKeyedDraws(), KeyedDraws(KEYS[0]):
        backward(again(x, 0.0), *given)
        total = again(x, 0.5)
        with pytest.raises(ValueError, match="gradient checkpointing"):
            backward(total, *given)


def test_draws_by_operators_called_directly_are_refused() -> None:
    with OnlyKeyedDraws(), pytest.raises(ValueError, match="cannot be keyed"):
        torch.rand(3)
    with OnlyKeyedDraws(), KeyedDraws(KEYS[0]):
        assert torch.rand(3).shape == (3,)


def test_skipping_a_layer_with_probability_zero_runs_under_vmap() -> None:
    """As BART, OPT and others write it: the branch is taken at p = 0 as well."""

    def skip(p: float) -> Callable[[Tensor, Tensor], Tensor]:
        return lambda x, key: row(lambda x: x if torch.rand([]) < p else 2 * x, x, key)

    x, keys = batch()
    assert torch.equal(vmap(skip(0.0))(x, keys), 2 * x)
    with pytest.raises(RuntimeError, match="data-dependent"):
        vmap(skip(0.5))(x, keys)
    alone = [torch.equal(skip(0.5)(x[0], key), x[0]) for key in derive(torch.arange(40), 0)]
    assert 5 < sum(alone) < 35


def test_comparison_of_a_modified_draw_uses_its_values() -> None:
    def signs(x: Tensor) -> Tensor:
        changed, viewed = torch.rand(9), torch.rand(9)
        changed.sub_(1)
        viewed[2:].sub_(1)
        return torch.stack([changed < 0, viewed < 0, torch.rand(9) - 1 < 0, torch.rand(9) < 0])[
            None
        ]

    x, keys = batch()
    wanted = torch.ones(4, 9, dtype=torch.bool)
    wanted[1, :2] = wanted[3] = False
    assert torch.equal(row(signs, x[0], keys[0]), wanted)
    assert (vmap(lambda x, key: row(signs, x, key))(x, keys) == wanted).all()


def test_every_random_operator_of_torch_is_keyed_or_refused() -> None:
    """Torch tags them; those of one backend that torch calls by itself have no public name."""
    handled = {getattr(f, "__name__", "") for f in {*KEYED, *REFUSED, *DECOMPOSED}}
    handled |= {"scaled_dot_product_attention"}
    tagged = set()
    for name in torch._C._dispatch_get_all_op_names():
        base = name.removeprefix("aten::").split(".")[0]
        packet = getattr(torch.ops.aten, base, None) if name.startswith("aten::") else None
        overloads = [] if packet is None else [getattr(packet, o) for o in packet.overloads()]
        if any(torch.Tag.nondeterministic_seeded in o.tags for o in overloads):
            tagged.add(base)
    public = {n for n in tagged if hasattr(torch, n) or hasattr(Tensor, n)}
    unknown = {n for n in public - handled if not n.startswith("_")}
    assert len(tagged) > 40
    assert unknown <= {"miopen_rnn", "random"}  # a backend's; Python's module torch.random

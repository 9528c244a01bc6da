"""Keyed dropout: a row's mask hangs on its key alone; every other draw is refused."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from reference import make_batch
from torch import Tensor, nn
from zoo import loss

from dpbam.engines import FunctionalEngine
from dpbam.engines.dropout import KeyedDropout
from dpbam.methods import BAM, DPSGD
from dpbam.randomness import derive

N = 6
KEYS = derive(torch.arange(N), 0)


def keyed(f: Callable[[Tensor], Tensor], x: Tensor, keys: Tensor = KEYS) -> Tensor:
    with KeyedDropout(keys):
        return f(x)


def attention(x: Tensor, **options: float) -> Tensor:
    heads = x[:, None]
    return F.scaled_dot_product_attention(heads, heads, heads, **options)[:, 0]


def module(make: Callable[[], nn.Module]) -> Callable[[Tensor], Tensor]:
    torch.manual_seed(0)
    made = make()
    return lambda x: made(x)


def self_attention(**options: bool) -> Callable[[Tensor], Tensor]:
    torch.manual_seed(0)
    layer = nn.MultiheadAttention(8, 2, dropout=0.5, batch_first=True)
    return lambda x: layer(x, x, x, **options)[0]


DROPOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "F.dropout": lambda x: F.dropout(x, 0.4),
    "torch.dropout": lambda x: torch.dropout(x, 0.4, True),
    "nn.Dropout": module(lambda: nn.Dropout(0.3)),
    "nn.Dropout1d": module(lambda: nn.Dropout1d(0.3)),
    "two in a row": module(lambda: nn.Sequential(nn.Dropout(0.3), nn.Dropout(0.3))),
    "attention by name": lambda x: attention(x, dropout_p=0.5),
    "attention by place": lambda x: F.scaled_dot_product_attention(
        x[:, None], x[:, None], x[:, None], None, 0.5
    )[:, 0],
    "causal attention": lambda x: attention(x, dropout_p=0.5, is_causal=True),
    "nn.MultiheadAttention": self_attention(),
    "nn.MultiheadAttention, fast": self_attention(need_weights=False),
    "nn.TransformerEncoderLayer": module(
        lambda: nn.TransformerEncoderLayer(8, 2, 16, dropout=0.3, batch_first=True)
    ),
}


@pytest.mark.parametrize("name", DROPOUTS)
def test_a_rows_mask_hangs_on_its_key_alone(name: str) -> None:
    f, x = DROPOUTS[name], torch.randn(N, 4, 8)
    whole = keyed(f, x)
    assert torch.equal(whole, keyed(f, x))
    for rows in ([2], [5, 0], [1, 2, 3]):
        assert torch.allclose(keyed(f, x[rows], KEYS[rows]), whole[rows], atol=1e-6)
    assert not torch.allclose(keyed(f, x, KEYS + 1), whole)


@pytest.mark.parametrize("name", DROPOUTS)
def test_the_same_under_vmap(name: str) -> None:
    """As the functional engine runs it: one unit at a time."""
    f, x = DROPOUTS[name], torch.randn(N, 4, 8)

    def one(x: Tensor, key: Tensor) -> Tensor:
        with KeyedDropout(key[None]):
            return f(x[None])[0]

    mapped = torch.func.vmap(one, randomness="error")(x, KEYS)
    assert torch.allclose(mapped, keyed(f, x), atol=1e-6)


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_rate_and_scale(p: float) -> None:
    out = keyed(lambda x: F.dropout(x, p), torch.ones(N, 4000))
    dropped = float((out == 0).double().mean())
    assert abs(dropped - p) < 4 * (p * (1 - p) / (N * 4000)) ** 0.5
    assert float(out.max()) == pytest.approx(1 / (1 - p))


def test_channels_are_dropped_whole() -> None:
    out = keyed(lambda x: F.dropout2d(x, 0.5), torch.ones(N, 40, 3, 3))
    sums = out.sum((2, 3))
    assert sorted(sums.unique().tolist()) == [0.0, 18.0]


def test_nothing_is_dropped_in_eval_or_at_rate_zero_and_all_at_one() -> None:
    x = torch.randn(N, 8)
    assert torch.equal(keyed(lambda x: F.dropout(x, 0.5, training=False), x), x)
    assert torch.equal(keyed(lambda x: torch.dropout(x, p=0.5, train=False), x), x)
    assert torch.equal(keyed(lambda x: F.dropout(x, 0.0), x), x)
    assert torch.equal(keyed(lambda x: F.alpha_dropout(x, 0.5), x), x)  # off unless training
    assert not keyed(lambda x: F.dropout(x, 1.0), x).any()


def test_two_dropouts_of_one_pass_have_masks_of_their_own() -> None:
    one, two = keyed(lambda x: torch.stack([F.dropout(x), F.dropout(x)]), torch.ones(N, 50))
    assert not torch.equal(one, two)


def test_attention_without_dropout_is_torchs_own() -> None:
    x = torch.randn(N, 4, 8)
    mask = torch.rand(4, 4) > 0.2
    mask.fill_diagonal_(True)
    for options in ({}, {"is_causal": True}, {"attn_mask": mask}, {"scale": 0.3}):
        expected = attention(x, **options)
        tiny = keyed(lambda x, o=options: attention(x, dropout_p=1e-9, **o), x)
        assert torch.allclose(tiny, expected, atol=1e-6)
        assert torch.equal(keyed(lambda x, o=options: attention(x, **o), x), expected)


def test_multi_head_attention_taken_apart_is_torchs_own() -> None:
    torch.manual_seed(0)
    layer, x = nn.MultiheadAttention(8, 2, dropout=1e-9, batch_first=True), torch.randn(N, 4, 8)
    padding = torch.zeros(N, 4, dtype=torch.bool)
    padding[:, 3] = True
    causal = nn.Transformer.generate_square_subsequent_mask(4)
    for options in ({}, {"key_padding_mask": padding}, {"attn_mask": causal}):
        with KeyedDropout(KEYS):
            found, weights = layer(x, x, x, **options)
        layer.eval()
        expected, expected_weights = layer(x, x, x, **options)
        layer.train()
        assert torch.allclose(found, expected, atol=1e-6)
        assert torch.allclose(weights, expected_weights, atol=1e-6)


DRAWS = {
    "rand": lambda x: x + torch.rand(3),
    "randn_like": lambda x: x + torch.randn_like(x),
    "bernoulli_": lambda x: x * torch.empty(3).bernoulli_(0.5),
    "alpha_dropout": lambda x: F.alpha_dropout(x, 0.5, training=True),
    "rrelu": lambda x: F.rrelu(x, training=True),
    "gumbel_softmax": lambda x: F.gumbel_softmax(x),
    "multinomial": lambda x: torch.multinomial(x.softmax(-1), 1),
    "lstm": lambda x: nn.LSTM(3, 3, num_layers=2, dropout=0.5)(x)[0],
}


@pytest.mark.parametrize("name", DRAWS)
def test_other_draws_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match=r"draws random numbers with \w+.*use torch.nn.Dropout"):
        keyed(DRAWS[name], torch.randn(N, 3))


def test_an_lstm_without_dropout_is_let_through() -> None:
    for made in (nn.LSTM(3, 3, num_layers=2), nn.GRU(3, 3, num_layers=2, dropout=0.5).eval()):
        assert keyed(lambda x, made=made: made(x)[0], torch.randn(N, 3)).shape == (N, 3)


def test_attention_that_cannot_be_keyed_is_refused() -> None:
    with pytest.raises(ValueError, match="grouped-query"):
        keyed(lambda x: attention(x, dropout_p=0.5, enable_gqa=True), torch.randn(N, 4, 8))


def test_the_batch_axis_comes_first() -> None:
    with pytest.raises(ValueError, match="must count the 6 samples"):
        keyed(F.dropout, torch.randn(5, N))


def test_both_of_bams_gradients_have_the_same_mask() -> None:
    """With lambda towards 0, BAM tends to the plain gradient only if the mask is the same."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 20), nn.Dropout(0.5), nn.Tanh(), nn.Linear(20, 3)).double()
    batch = make_batch(torch.randn(N, 5).double(), torch.arange(N) % 3, N)
    engine = FunctionalEngine(model, loss)
    plain = engine.directions(batch, DPSGD(), 0.0).norms()
    for method in (BAM(1e-9), BAM(1e-9, exact=True)):
        assert torch.allclose(engine.directions(batch, method, 1e-9).norms(), plain, rtol=1e-6)

"""The lens against gradients by ordinary autograd, for every method and engine."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dpbam import PrivacyPlan
from dpbam.app.runs.files import append_json_line, read_json_lines
from dpbam.bias import BiasLens, BiasRecord
from dpbam.contenders.clippings import QuantileClipping
from dpbam.contenders.disk import DiSK
from dpbam.engines.materialised import MaterialisedDirections
from dpbam.methods import BAM, DPSAT, DPSGD, SAM, SGD, Method, Penalised
from dpbam.nn import build_model
from planting import Mistake
from support import (
    CLIPPINGS,
    METHODS,
    SERVED,
    cross_entropy,
    each_gradient,
    flat,
    in_turn,
    private_plan,
    quiet_plan,
    samples,
    sized_oracle,
    smooth_net,
)

L = 10  # the expected batch size of the plans here
LAM = 0.3


def measure(
    model: nn.Module, plan: PrivacyPlan, method: Method, x: Any, y: Any, *, steps: int = 2,
    observer: BiasLens | None = None, **options: Any,
) -> list[BiasRecord]:  # fmt: skip
    lens = observer or BiasLens(eta=True, plain=True)
    options.setdefault("physical_batch_size", 64)
    oracle = sized_oracle(model, cross_entropy, plan, method, observers=lens, **options)
    for _ in range(steps):
        oracle.backward(x.clone(), y)
    return lens.records


def stacked(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """[N, d] plain gradients."""
    return torch.stack([flat(g) for g in each_gradient(model, x, y)])


@pytest.mark.parametrize(("engine", "method", "size"), in_turn(SERVED, [64, 3]))
def test_the_theorem_on_every_method_and_engine(engine: str, method: str, size: int) -> None:
    """One physical batch takes a from the eta_i, several by linearity: both the same."""
    model, (x, y) = smooth_net(), samples(9)
    records = measure(
        model, private_plan(clip_norm=0.3), METHODS[method](LAM), x, y, engine=engine,
        physical_batch_size=size, seed=3,
    )  # fmt: skip
    for record in records:
        for reading in (record.non_private_against_own, record.non_private_against_plain):
            assert reading.a_from_eta == (size == 64)
            assert abs(reading.orthogonality) < 1e-6
            assert reading.magnitude_share + reading.direction_share == pytest.approx(1, abs=1e-6)
            assert 0 < reading.a < 1
    again = measure(
        model, private_plan(clip_norm=0.3), METHODS[method](LAM), x, y, engine=engine,
        physical_batch_size=4, seed=3,
    )  # fmt: skip
    for one, other in zip(records, again, strict=True):
        for name in ("non_private_against_own", "non_private_against_plain"):
            for key, value in vars(getattr(one, name)).items():
                if key not in ("a_from_eta", "orthogonality"):
                    assert vars(getattr(other, name))[key] == pytest.approx(value, rel=1e-6)


@pytest.mark.parametrize(("engine", "method"), SERVED)
def test_the_plain_reading_is_against_autograd(engine: str, method: str) -> None:
    model, (x, y) = smooth_net(), samples(9)
    g_hat = stacked(model, x, y).sum(0) / L
    plan = quiet_plan(0.3)
    record = measure(model, plan, METHODS[method](LAM), x, y, engine=engine)[-1]
    clipped = flat({n: p.grad for n, p in model.named_parameters()})  # no noise: it is g_clip
    reading = record.non_private_against_plain
    assert reading.reference_norm == pytest.approx(float(g_hat.norm()), rel=1e-6)
    assert reading.bias == pytest.approx(float((clipped - g_hat).norm()), rel=1e-6)
    cosine = float(clipped @ g_hat / clipped.norm() / g_hat.norm())
    assert reading.cosine == pytest.approx(cosine, rel=1e-6)
    assert reading.private_cosine == pytest.approx(cosine, rel=1e-6)
    assert reading.noise_share == 0


class Ahead(Method):
    """A user's own, which never asks for the gradient at theta."""

    def direction(self, grad, theta, lam):
        return grad({name: t + lam for name, t in theta.items()})


class Overwriting(Method):
    """A user's own, which changes in place what it was handed."""

    def direction(self, grad, theta, lam):
        g = grad(theta)
        for values in g.values():
            values.neg_()
        return g


def shifting(method: Method) -> bool:
    return method.name in ("dp-sat", "sam") or (method.name == "disk" and method._one_gradient)


ALL: dict[str, Method] = {
    "dp-sgd": DPSGD(),
    "sgd": SGD(),
    "bam": BAM(LAM),
    "bam-exact": BAM(LAM, exact=True),
    "dp-sat": DPSAT(LAM),
    "sam": SAM(LAM),
    **{
        f"disk-{gamma}-{inner!r}": DiSK(0.2, gamma, inner)
        for inner in (DPSGD(), BAM(0.05), BAM(0.05, exact=True))
        for gamma in (None, 1.0)
    },
    "ahead": Ahead(LAM),
    "overwriting": Overwriting(LAM),
    "ahead in disk": DiSK(0.2, inner=Ahead(LAM)),
}


def check_plain_readings(name: str, engine: str) -> None:
    """Over four steps: g_hat is at the theta where the step began, by autograd on each record."""
    model, (x, y) = smooth_net(), samples(9)
    lens, method = BiasLens(plain=True), ALL[name]
    oracle = sized_oracle(model, cross_entropy, quiet_plan(0.3), method, observers=lens,
                          engine=engine, physical_batch_size=4)  # fmt: skip
    optimizer = torch.optim.SGD(model.parameters(), lr=2.0)
    for step in range(4):
        g = stacked(model, x, y)  # [N, d]
        g_hat, shift = g.sum(0) / L, shifting(method) and (step > 0 or name == "sam")
        oracle.filter = None  # .grad is g_clip
        oracle.backward(x.clone(), y)
        clipped = flat({n: p.grad for n, p in model.named_parameters()})
        record = lens.records[step]
        reading = record.non_private_against_plain
        assert reading is not None
        assert abs(reading.reference_norm - float(g_hat.norm())) < 1e-9
        assert abs(reading.bias - float((clipped - g_hat).norm())) < 1e-9
        plain_norms = record.non_private_plain_norms
        if plain_norms is not None:
            assert not shift, "the norms of this pass are not at theta"
            assert abs(plain_norms.mean - float(g.norm(dim=1).mean())) < 1e-9
        slack = record.non_private_flatness_slack
        if slack is not None:
            mean = float(g.norm(dim=1).sum()) / L
            assert abs(slack - record.lam * (mean - float(g_hat.norm()))) < 1e-9
        regularised = name.startswith("bam") or ("None-BAM" in name and not shift)
        assert (slack is not None) == regularised
        optimizer.step()


#: the fused engine computes declared forms alone; the loop engine has no forward mode
UNSERVED = {
    "fused": ("1.0", "ahead", "overwriting"),
    "functional": (),
    "loop": ("1.0-BAM(lam=0.05, exact=True)",),
}
ENGINES_OF = [
    (name, engine)
    for name in ALL
    for engine, unserved in UNSERVED.items()
    if not any(word in name for word in unserved)
]


@pytest.mark.parametrize(
    ("name", "engine"),
    [
        pytest.param(*cell, marks=[] if k % 3 == 1 or "None" in cell[0] else pytest.mark.slow)
        for k, cell in enumerate(ENGINES_OF)
    ],
)
def test_the_plain_gradient_is_at_theta_for_every_method(name: str, engine: str) -> None:
    check_plain_readings(name, engine)


def from_the_shifted_pass(right: Any) -> Any:
    def begin(lens: BiasLens, facts: Any) -> bool:
        watched = right(lens, facts)
        lens.wants_plain = lens._tally.form != Penalised(0.0)
        return watched

    return begin


@pytest.mark.parametrize("exact", [False, True])
def test_the_check_of_the_plain_gradient_catches(
    exact: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The mistake: with a shift, g_hat was taken from the step's own pass."""
    name = f"disk-None-{BAM(0.05, exact=exact)!r}"
    mistake = Mistake(
        lambda: check_plain_readings(name, "functional"), BiasLens, "begin", from_the_shifted_pass
    )
    mistake.catch(monkeypatch)


def test_the_alignment_is_that_of_the_shift_which_was_made() -> None:
    """A method that goes the other way has the other sign."""

    class Back(DPSAT):
        remembers = 1

        def ascent(self, lam, previous, batch_gradient):
            shift = super().ascent(lam, previous, batch_gradient)
            return None if shift is None else {n: -s for n, s in shift.items()}

    model, (x, y) = smooth_net(), samples(9)
    both = [measure(model, quiet_plan(0.3), m, x, y)[1] for m in (DPSAT(LAM), Back(LAM))]
    there, back = (record.non_private_alignment for record in both)
    assert there == pytest.approx(-back)
    assert abs(there) > 0.1


def test_a_method_that_declares_no_ascent_has_no_alignment_and_no_slack() -> None:
    model, (x, y) = smooth_net(), samples(9)
    record = measure(model, quiet_plan(0.3), Ahead(LAM), x, y, engine="functional")[0]
    assert (record.method, record.non_private_alignment) == ("Ahead", None)
    assert record.non_private_flatness_slack is None


def test_the_clip_norm_of_a_record_is_that_of_its_step() -> None:
    """With an adaptive clipping it moves, also under a plan without noise."""
    model, (x, y), clipping = smooth_net(), samples(9), QuantileClipping(0.3)
    lens = BiasLens()
    oracle = sized_oracle(model, cross_entropy, quiet_plan(0.3), observers=lens, clipping=clipping)
    expected = []
    for _ in range(3):
        expected.append(clipping.sensitivity)
        oracle.backward(x.clone(), y)
    assert [record.clip_norm for record in lens.records] == expected
    assert len(set(expected)) == 3


def test_units_that_are_lengthened_are_not_counted_as_clipped() -> None:
    model, (x, y) = smooth_net(), samples(9)
    norms = stacked(model, x, y).norm(dim=1)
    middle = float(norms.sort().values[3:5].mean())
    record = measure(model, quiet_plan(middle, clipping="normalised"), DPSGD(), x, y)[0]
    assert record.non_private_clip_share == pytest.approx(5 / 9)


@pytest.mark.parametrize(("engine", "method", "clip_norm"), in_turn(SERVED, [0.05, 0.4, 1e3]))
def test_lemma_2_as_corrected(engine: str, method: str, clip_norm: float) -> None:
    """Against its own gradient: at most the mean excess, and zero when no norm exceeds C."""
    model, (x, y) = smooth_net(), samples(9)
    plan = quiet_plan(clip_norm)
    record = measure(model, plan, METHODS[method](LAM), x, y, engine=engine)[-1]
    own = record.non_private_against_own
    assert own.bias <= record.non_private_lemma2_bound + 1e-9
    assert (own.bias < 1e-9) == (clip_norm == 1e3)
    assert record.non_private_clip_share == (0 if clip_norm == 1e3 else 1)


def test_against_the_plain_gradient_lemma_2_does_not_hold_for_bam() -> None:
    """Nothing is clipped, and BAM still differs from the plain gradient: two readings."""
    model, (x, y) = smooth_net(), samples(9)
    record = measure(model, quiet_plan(1e3), METHODS["bam-exact"](LAM), x, y)[0]
    assert record.non_private_against_own.bias < 1e-9 < record.non_private_against_plain.bias
    assert record.non_private_lemma2_bound == 0


@pytest.mark.parametrize("method", ["dp-sgd", "dp-sat"])
def test_lemma_1_noise_leaves_the_bias_alone(method: str) -> None:
    """Seeds change the released gradient, never the bias (of a first step, for DP-SAT)."""
    model, (x, y) = smooth_net(), samples(9)
    plan, make = private_plan(clip_norm=0.3), METHODS[method]
    records = [measure(model, plan, make(LAM), x, y, steps=1, seed=s)[0] for s in range(3)]
    biases = {round(r.non_private_against_plain.bias, 12) for r in records}
    cosines = {round(r.non_private_against_plain.private_cosine, 12) for r in records}
    assert (len(biases), len(cosines)) == (1, 3)
    assert records[0].noise_norm == pytest.approx(0.3 / L * 51**0.5)  # sigma C sqrt(d) / l


@pytest.mark.parametrize("engine", ["functional", "fused"])
def test_alignment_of_bam_is_the_mean_cosine(engine: str) -> None:
    model, (x, y) = smooth_net(), samples(9)
    g = stacked(model, x, y)
    g_hat = g.sum(0)
    expected = float((g @ g_hat / g.norm(dim=1) / g_hat.norm()).mean())
    record = measure(
        model, quiet_plan(0.3), METHODS["bam-exact"](LAM), x, y, engine=engine,
        physical_batch_size=4,
    )[0]  # fmt: skip
    assert record.non_private_alignment == pytest.approx(expected, rel=1e-6)
    assert record.non_private_alignment < 0.95
    slack = LAM * float(g.norm(dim=1).sum() - g_hat.norm()) / L
    assert record.non_private_flatness_slack == pytest.approx(slack, rel=1e-6)


def test_alignment_of_dp_sat_is_with_the_previous_private_gradient() -> None:
    model, (x, y) = smooth_net(), samples(9)
    lens = BiasLens(plain=True)
    oracle = sized_oracle(
        model,
        cross_entropy,
        private_plan(clip_norm=0.3),
        METHODS["dp-sat"](LAM),
        observers=lens,
        seed=0,
    )
    oracle.backward(x, y)
    previous = flat({n: p.grad for n, p in model.named_parameters()})
    g_hat = stacked(model, x, y).sum(0)
    oracle.backward(x.clone(), y)
    first, second = lens.records
    expected = float(previous @ g_hat / previous.norm() / g_hat.norm())
    assert first.non_private_alignment is None  # nothing to ascend along yet
    assert second.non_private_alignment == pytest.approx(expected, rel=1e-6)


def test_dp_sat_without_a_further_pass_has_no_plain_reading() -> None:
    model, (x, y) = smooth_net(), samples(9)
    plan, method = private_plan(clip_norm=0.3), METHODS["dp-sat"](LAM)
    records = measure(model, plan, method, x, y, observer=BiasLens())
    assert records[0].non_private_against_plain is not None  # the first step is not shifted
    assert records[1].non_private_against_plain is None
    assert records[1].non_private_alignment is None


@pytest.mark.parametrize("clipping", CLIPPINGS)
@pytest.mark.parametrize("engine", ["functional", "fused"])
def test_layers_share_the_norm_and_the_bias(engine: str, clipping: str) -> None:
    model, (x, y) = smooth_net(), samples(9)
    g = stacked(model, x, y)  # the first layer has 30 entries, the second 21
    plan = quiet_plan(0.3, clipping=clipping)
    record = measure(model, plan, METHODS["dp-sgd"](0.0), x, y, engine=engine)[0]
    layers = record.non_private_layers
    assert list(layers) == ["0", "2"]
    first = g[:, :30].norm(dim=1)
    assert layers["0"].norms.mean == pytest.approx(float(first.mean()), rel=1e-6)
    assert layers["0"].norms.quantiles[3] == pytest.approx(float(first.median()), rel=1e-6)
    share = float(first.square().sum() / g.square().sum())
    assert layers["0"].share == pytest.approx(share, rel=1e-6)
    squares = sum(layer.bias**2 for layer in layers.values())
    assert squares == pytest.approx(record.non_private_against_own.bias**2, rel=1e-6)
    assert record.non_private_norms.quantiles[-1] == pytest.approx(float(g.norm(dim=1).max()))


def test_a_broken_sample_is_counted_and_left_out() -> None:
    model, (x, y) = smooth_net(), samples(9)
    kept = measure(model, quiet_plan(0.3), METHODS["bam-exact"](LAM), x[1:], y[1:])[0]
    x[0] = float("nan")
    record = measure(model, quiet_plan(0.3), METHODS["bam-exact"](LAM), x, y)[0]
    assert (record.non_private_units, record.non_private_broken) == (9, 1)
    assert record.non_private_against_plain.bias == pytest.approx(
        kept.non_private_against_plain.bias
    )
    assert record.non_private_alignment == pytest.approx(kept.non_private_alignment)


def test_an_empty_batch_is_measured_as_noise_alone(tmp_path) -> None:
    model, (x, y) = smooth_net(), samples(9)
    record = measure(model, private_plan(), METHODS["bam-exact"](LAM), x[:0], y[:0], steps=1)[0]
    assert record.non_private_units == 0
    assert record.non_private_against_own.bias == 0
    append_json_line(tmp_path / "bias.jsonl", asdict(record))  # NaN becomes null
    (line,) = read_json_lines(tmp_path / "bias.jsonl")
    assert line["non_private_against_own"]["cosine"] is None


def test_every_nth_step_is_measured_and_the_others_cost_nothing(monkeypatch) -> None:
    calls: list[int] = []
    right = MaterialisedDirections.weighted_sum
    monkeypatch.setattr(
        MaterialisedDirections,
        "weighted_sum",
        lambda self, factors, span=None: (calls.append(1), right(self, factors))[1],
    )
    model, (x, y) = smooth_net(), samples(9)
    lens = BiasLens(every=3)
    measure(model, private_plan(), METHODS["dp-sgd"](0.0), x, y, steps=5, observer=lens,
            engine="functional")  # fmt: skip
    assert [record.step for record in lens.records] == [0, 3]
    assert len(calls) == 5 + 2  # one clipped sum a step, one more where it is measured


def test_measuring_does_not_change_the_step() -> None:
    model, (x, y) = smooth_net(), samples(9)
    found = []
    for lens in ((), BiasLens(eta=True, plain=True)):
        oracle = sized_oracle(
            model, cross_entropy, private_plan(clip_norm=0.3), METHODS["dp-sat"](LAM),
            observers=lens, seed=4,
        )  # fmt: skip
        for _ in range(3):
            oracle.backward(x.clone(), y)
        found.append(flat({n: p.grad for n, p in model.named_parameters()}))
    assert torch.equal(*found)


def test_what_is_not_private_says_so() -> None:
    model, (x, y) = smooth_net(), samples(9)
    record = measure(model, private_plan(), METHODS["bam-exact"](LAM), x, y)[0]
    public = {k for k in asdict(record) if not k.startswith("non_private")}
    assert public == {
        "step", "method", "lam", "clip_norm", "batch_size", "noise_multiplier", "noise_norm",
    }  # fmt: skip


@pytest.mark.parametrize("method", ["dp-sgd", "dp-sat", "bam-exact"])
@pytest.mark.slow
def test_the_theorem_in_float32_on_a_resnet(method: str) -> None:
    """Both engines and both routes on a convolutional net with norms and standardised weights."""
    model = build_model("resnet9", in_channels=3, image_size=8, num_classes=4, width=0.125, seed=0)
    x, y = torch.randn(6, 3, 8, 8), torch.arange(6) % 4
    plan = private_plan(clip_norm=1.0, batch_size=6)
    biases = []
    for engine, size in (("functional", 64), ("fused", 64), ("fused", 4)):
        record = measure(
            model,
            plan,
            METHODS[method](0.02),
            x,
            y,
            engine=engine,
            physical_batch_size=size,
            seed=1,
        )[-1]
        assert abs(record.non_private_against_own.orthogonality) < 1e-6
        assert abs(record.non_private_against_plain.orthogonality) < 1e-6
        assert record.non_private_against_own.bias <= record.non_private_lemma2_bound * (1 + 1e-6)
        biases.append(record.non_private_against_plain.bias)
    assert biases == pytest.approx([biases[0]] * 3, rel=1e-4)

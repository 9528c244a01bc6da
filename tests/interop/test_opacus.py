"""From Opacus: equal trainings at equal noise, an equal epsilon, and what cannot be taken over."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import opacus
import pytest
import torch
from opacus.accountants import GaussianAccountant, PRVAccountant, RDPAccountant
from torch import Tensor, nn
from torch.utils.data import DataLoader, Subset, TensorDataset

from dpbam import BAM, DPSGD, Ledger, PrivacyPlan, PrivateGradientOracle
from dpbam.interop.opacus import charges, from_opacus, record
from dpbam.privacy.accounting import Charge, total_epsilon
from dpbam.privacy.noise import GaussianNoise
from dpbam.privacy.randomness import Randomness
from support import cross_entropy, poisson_batches, smooth_net

N, L, SEED, CLIP = 60, 12, 11, 0.6
PLAN = PrivacyPlan(n=N, batch_size=L, steps=8, noise_multiplier=0.9, delta=1e-3, clip_norm=CLIP)


def data() -> TensorDataset:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(N, 4, generator=generator, dtype=torch.float64)
    return TensorDataset(x, torch.randint(0, 3, (N,), generator=generator))


def made_private(
    accountant: str = "rdp", dataset: Any = None, **options: Any
) -> tuple[nn.Module, nn.Module, Any, Any, Any]:
    """(the plain net, Opacus's model, optimiser and loader, the engine)."""
    net = smooth_net()
    engine = opacus.PrivacyEngine(accountant=accountant)
    private = engine.make_private(
        module=net, optimizer=torch.optim.Adam(net.parameters(), lr=0.05),
        data_loader=DataLoader(dataset or data(), batch_size=L),
        noise_multiplier=PLAN.noise_multiplier, max_grad_norm=CLIP, **options,
    )  # fmt: skip
    return net, *private, engine


def planted(parameters: int, seed: int) -> Any:
    """Opacus's noise function, drawing what our noise draws: by step, in the parameters' order."""
    calls, ours, start = iter(range(10**9)), GaussianNoise(Randomness(seed)), 0

    def noise(std: float, reference: Tensor, **_: Any) -> Tensor:
        nonlocal start
        step, parameter = divmod(next(calls), parameters)
        start = 0 if parameter == 0 else start
        zeros = {"w": torch.zeros(reference.shape, dtype=torch.float64)}
        start += reference.numel()
        return ours.add(zeros, std, step, start=start - reference.numel())["w"]

    return noise


def opacus_weights(monkeypatch: pytest.MonkeyPatch, batches: list[Any], seed: int) -> list[Tensor]:
    net, model, optimizer, _, _ = made_private()
    noise = planted(len(list(net.parameters())), seed)
    monkeypatch.setattr("opacus.optimizers.optimizer._generate_noise", noise)
    for x, y in batches:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    return [p.detach() for p in net.parameters()]


def our_weights(batches: list[Any]) -> list[Tensor]:
    net = smooth_net()
    optimizer = torch.optim.Adam(net.parameters(), lr=0.05)
    oracle = PrivateGradientOracle(
        net, cross_entropy, PLAN, DPSGD(), seed=SEED, sampling="poisson-elsewhere"
    )
    for x, y in batches:
        oracle.backward(x, y)
        optimizer.step()
    return [p.detach() for p in net.parameters()]


def far(a: list[Tensor], b: list[Tensor]) -> float:
    return max(float((x - y).detach().abs().max()) for x, y in zip(a, b, strict=True))


@pytest.fixture
def batches() -> list[Any]:
    return [(x, y) for x, y, _ in poisson_batches(PLAN, data(), seed=SEED)]


def test_training_equals_opacus_at_the_same_noise(
    monkeypatch: pytest.MonkeyPatch, batches: list[Any]
) -> None:
    """Eight steps of Adam, weights equal to 1e-5: Opacus divides by norms plus 1e-6."""
    ours = our_weights(batches)
    assert far(ours, opacus_weights(monkeypatch, batches, SEED)) < 1e-5
    assert far(ours, opacus_weights(monkeypatch, batches, SEED + 1)) > 1e-2  # other noise
    assert far(ours, list(smooth_net().parameters())) > 1e-2  # it trained


HISTORIES = [[(1.0, 0.01, 500)], [(0.8, 0.1, 20), (1.5, 0.05, 100)], [(4.0, 0.02, 300)]]


@pytest.mark.parametrize("history", HISTORIES)
def test_epsilon_of_the_history_is_opacus_rdp(history: list[Any]) -> None:
    """Within 1e-3: the two libraries minimise over different orders of Renyi's divergence."""
    theirs = RDPAccountant()
    theirs.history = list(history)
    ledger = record(Ledger(1e-5, "rdp"), charges(theirs), run="first")
    assert ledger.epsilon() == pytest.approx(theirs.get_epsilon(1e-5), rel=1e-3)


@pytest.mark.filterwarnings("ignore:GDP accounting is experimental")
@pytest.mark.parametrize("kind", [RDPAccountant, PRVAccountant, GaussianAccountant])
def test_every_accountant_has_a_history(kind: Any) -> None:
    accountant = kind()
    for _ in range(3):
        accountant.step(noise_multiplier=1.3, sample_rate=0.2)
    expected = [Charge(1.3, 0.2, 3)]
    assert charges(accountant) == charges(accountant.state_dict()) == expected


def steps_with_opacus(model: Any, optimizer: Any, loader: Any) -> int:
    taken = 0
    for x, y in loader:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        taken += 1
    return taken


def test_going_on_with_bam_within_one_budget() -> None:
    net, *private, engine = made_private("prv")
    steps = steps_with_opacus(*private)
    moments = copy.deepcopy(private[1].original_optimizer.state_dict()["state"][0])
    taken = from_opacus(*private, engine)
    assert taken.model is net
    assert sum(c.steps for c in taken.charges) == steps
    assert not any(m._forward_hooks or m._backward_hooks for m in net.modules())
    torch.testing.assert_close(taken.optimizer.state_dict()["state"][0], moments)

    before = total_epsilon(taken.charges, 1e-3, accountant="rdp")
    plan = PrivacyPlan.calibrate(epsilon=before + 2, delta=1e-3, n=N, batch_size=L, steps=3,
                                 clip_norm=CLIP, accountant="rdp", spent=taken.charges)  # fmt: skip
    ledger = record(plan.ledger(), taken.charges, run="first")
    oracle = PrivateGradientOracle(
        taken.model, cross_entropy, plan, BAM(0.02), ledger=ledger, sampling="poisson-elsewhere"
    )
    at_start = [p.detach().clone() for p in net.parameters()]
    for x, y, ids in poisson_batches(plan, taken.dataset):
        oracle.backward(x, y, ids)
        taken.optimizer.step()
    assert oracle.engine.name == "fused"
    assert far(at_start, list(net.parameters())) > 0
    assert before + 1.9 < ledger.epsilon() <= before + 2
    assert len(ledger) == steps + 3


@pytest.mark.parametrize("steps", [300.9, -5])
def test_a_history_has_a_whole_number_of_steps(steps: float) -> None:
    with pytest.raises(ValueError, match="steps"):
        charges({"history": [(1.1, 0.01, steps)]})


def test_a_history_of_negative_steps_is_not_recorded() -> None:
    with pytest.raises(ValueError, match="steps must be at least 0, got -5"):
        record(Ledger(1e-5), [Charge(1.0, 0.1, -5)], run="first")


def test_a_history_is_charged_once_under_one_name(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    spent = [Charge(1.0, 0.1, 5), Charge(2.0, 0.1, 2)]
    for _ in range(2):  # a script that is run again
        ledger = record(Ledger(1e-5, path=path), spent, run="first")
    assert ledger.charges() == spent
    record(ledger, [*spent, Charge(2.0, 0.1, 1)], run="first")  # that training went on
    assert len(ledger) == 8
    record(ledger, spent, run="second")
    assert len(ledger) == 15
    with pytest.raises(ValueError, match="with other values"):
        record(ledger, [Charge(1.0, 0.2, 5)], run="first")
    with pytest.raises(ValueError, match="run must name the training"):
        record(ledger, spent, run="")


def test_steps_without_noise_make_epsilon_infinite() -> None:
    assert record(Ledger(1e-5), [Charge(0.0, 0.1, 1)], run="first").epsilon() == math.inf


def test_a_loader_that_is_not_poisson_is_refused() -> None:
    _, *private, engine = made_private(poisson_sampling=False)
    with pytest.raises(ValueError, match="does not draw Poisson samples"):
        from_opacus(*private, engine)


def test_a_repeated_record_is_refused() -> None:
    """Opacus charges each of its rows, and the record has spent more."""
    _, *private, engine = made_private(dataset=Subset(data(), [*range(N), 0]))
    with pytest.raises(ValueError, match=f"rows 0 and {N} of the Subset are one record"):
        from_opacus(*private, engine)


def foreign() -> Iterator[tuple[int, Any, str]]:
    yield 0, nn.Linear(2, 2), "Linear is no model that Opacus made private"
    optimizer = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)
    yield 1, optimizer, "SGD is no optimiser that Opacus made private"
    yield 3, object(), "object has no history"
    yield 3, {"history": [(1.0, 0.1)]}, "dict has no history of"


@pytest.mark.parametrize(("position", "given", "words"), list(foreign()))
def test_what_is_not_opacus_is_refused(position: int, given: Any, words: str) -> None:
    _, *private = made_private()
    private[position] = given
    with pytest.raises(TypeError, match=words):
        from_opacus(*private)


def test_hooks_without_a_wrapper_are_removed_too() -> None:
    net, *private = made_private(wrap_model=False)
    assert from_opacus(*private).model is net
    assert not hasattr(next(net.parameters()), "grad_sample")

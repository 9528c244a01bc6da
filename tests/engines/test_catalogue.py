"""Every engine that serves a model agrees with the loop engine, over four steps."""

from __future__ import annotations

import warnings

import pytest
from catalogue import (
    ENGINES,
    METHODS,
    STEPS,
    differences,
    first_step,
    load,
    make,
    reference,
    steps,
    trainable,
)

from dpbam.compute import Compute, Runner
from support import in_turn

# torch's advice on its own kernels, once in a process
pytestmark = [
    pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN"),
    pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths"),
]
#: of each kind some, a second each
SAMPLE = [
    "mlp", "group norm after a frozen layer", "conv2d depthwise", "LSTM", "flattened tokens",
    "encoder layer, causal mask", "tied weights", "detached use", "parameter only in the loss",
    "loss linear in the output", "weight norm", "dropout twice", "branch on the data",
    "one module under two names", "view as an empty tensor", "units of several rows",
]  # fmt: skip
#: torch has no second derivative of these
WITHOUT_REFERENCE = {("embedding bag", "exact BAM"), ("radial basis", "exact BAM")}


def check(name: str, method: str) -> None:
    if (name, method) in WITHOUT_REFERENCE:
        assert "derivative" in first_step(name, "loop", method)
        return
    wanted = reference(name, method)
    assert len(wanted) == STEPS
    tolerance = make(name).tolerance
    for engine in ENGINES:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            if first_step(name, engine, method):
                continue  # refused, as the table in the documentation says
            made = make(name)
            serving = Runner(
                Compute(engine=engine),
                made.model,
                made.loss,
                dict.fromkeys(trainable(made.model), 0),
            )
            found = list(steps(serving, made, method))
        for step, (a, b) in enumerate(zip(found, wanted, strict=True)):
            apart = differences(a, b, half=tolerance > 1e-3)
            worst = max(apart, key=apart.__getitem__)
            assert apart[worst] <= tolerance, (engine, step, worst, apart[worst])


@pytest.mark.parametrize(("name", "method"), in_turn(SAMPLE, ["DP-SGD", "BAM", "exact BAM"]))
def test_engines_agree_with_the_loop_engine_on_a_sample(name: str, method: str) -> None:
    check(name, method)


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", [n for n in load() if n not in SAMPLE])
def test_engines_agree_with_the_loop_engine(name: str, method: str) -> None:
    check(name, method)


def test_catalogue_has_eighty_models() -> None:
    assert len(load()) >= 80

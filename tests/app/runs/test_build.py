import pytest
import torch
from safetensors.torch import save_file

from dpbam.app.runs import ConfigError, RunConfig
from dpbam.app.runs.build import (
    lam_at_the_end,
    load_initial,
    make_augment,
    make_average,
    make_device,
    make_method,
    make_model,
    make_optimizer,
    make_schedule,
)
from dpbam.data import load
from dpbam.methods import SHARE
from dpbam.nn import build_model

DIGITS = load("digits")


def config(**values):
    return RunConfig(noise_multiplier=1.0, model="mlp", seed=0, **values)


def mlp(classes=10, **options):
    return build_model("mlp", in_channels=1, image_size=8, num_classes=classes, **options)


@pytest.mark.parametrize(
    ("values", "shown"),
    [
        ({"method": "dp-sgd"}, "DPSGD()"),
        ({"method": "dp-sat", "lam": 0.1}, "DPSAT(lam=0.1)"),
        ({"method": "bam", "lam": 0.1}, "BAM(lam=0.1, exact=False)"),
        ({"method": "bam", "gradient": "exact"}, f"BAM(lam=Relative(share={SHARE}), exact=True)"),
        ({"method": "bam", "lam_share": 1e-3}, "BAM(lam=Relative(share=0.001), exact=False)"),
        ({"method": "dp-sat"}, "DPSAT(lam=0.02)"),
        (
            {"method": "dp-sat", "method_options": {"warmup": 0.3}},
            "DPSAT(lam=WarmUp(lam=0.02, steps=3))",
        ),
    ],
)
def test_methods(values, shown):
    assert repr(make_method(config(**values), 10)) == shown


@pytest.mark.parametrize(
    "values",
    [
        {"method": "bam"},
        {"method": "bam", "lam": 0.1},
        {"method": "bam", "method_options": {"warmup": 0.5}},
        {"method": "disk", "method_options": {"inner": "bam"}},
        {"method": "dp-sat"},
    ],
)
def test_lambda_at_the_end_is_the_methods_own(values):
    made, model = config(**values), mlp()
    method = make_method(made, 10)
    assert lam_at_the_end(made, model, 10) == method.lam_at(10, dict(model.named_parameters()))


@pytest.mark.parametrize("name", ["nadam", "sgd", "adam", "adamw"])
def test_optimisers_see_the_trainable_parameters_alone(name):
    made = config(optimizer=name, train="head", lr=0.3, weight_decay=0.1)
    optimizer = make_optimizer(made, make_model(made, DIGITS))
    assert type(optimizer).__name__.lower() == name
    (group,) = optimizer.param_groups
    assert (group["lr"], group["weight_decay"]) == (0.3, 0.1)
    assert [tuple(p.shape) for p in group["params"]] == [(10, 128), (10,)]


def test_a_seed_gives_the_same_initial_weights():
    one, two, other = (
        make_model(config().replace(seed=seed), DIGITS).head.weight for seed in (0, 0, 1)
    )
    assert torch.equal(one, two)
    assert not torch.equal(one, other)


@pytest.mark.parametrize("name", ["constant", "cosine", "linear"])
def test_schedules_start_at_one_and_never_rise(name):
    factors = [make_schedule(name, 20)(t) for t in range(20)]
    assert factors[0] == 1
    assert factors == sorted(factors, reverse=True)
    assert factors[-1] > 0


def test_averages():
    model = mlp()
    assert make_average(config(), model, 100) is None
    assert make_average(config(ema=0.9), model, 100) is not None
    assert make_average(config(swa=0.75), model, 100)._weight(75) == 1.0
    assert make_average(config(swa=0.75), model, 100)._weight(76) == 0.5


def test_no_augmentation_maps_to_float_alone():
    images, _ = DIGITS.batch(torch.arange(4))
    keys = torch.arange(4)
    plain = make_augment(config())(images, keys)
    assert torch.allclose(plain, images.float() / 127.5 - 1, atol=1e-6)
    views = make_augment(config(augment_multiplicity=1, augment_probability=1.0))(images, keys)
    assert not torch.equal(views, plain)


def test_public_weights_are_loaded_and_a_new_head_keeps_its_own(tmp_path):
    public = mlp(classes=100)
    save_file(public.state_dict(), tmp_path / "public.safetensors")
    model = mlp()
    head = model.head.weight.detach().clone()
    assert load_initial(model, tmp_path / "public.safetensors") == ["head.weight", "head.bias"]
    assert torch.equal(model.body[0].weight, public.body[0].weight)
    assert torch.equal(model.head.weight, head)


def test_weights_that_do_not_fit_are_refused(tmp_path):
    save_file(mlp(hidden=(7,)).state_dict(), tmp_path / "other.safetensors")
    with pytest.raises(ConfigError, match=r"body.0.weight has shape \[7, 64\], not \[128, 64\]"):
        load_initial(mlp(), tmp_path / "other.safetensors")
    save_file({"x": torch.zeros(1)}, tmp_path / "none.safetensors")
    with pytest.raises(ConfigError, match=r"body.0.weight is missing"):
        load_initial(mlp(), tmp_path / "none.safetensors")
    (tmp_path / "broken.safetensors").write_bytes(b"abc")
    for name in ("broken", "absent"):
        with pytest.raises(ConfigError, match="cannot be read as safetensors"):
            load_initial(mlp(), tmp_path / f"{name}.safetensors")


@pytest.mark.parametrize("name", ["cuda:99", "gpu", "meta:x"])
def test_a_device_that_is_not_there(name):
    with pytest.raises(ConfigError, match="is not available here"):
        make_device(name)

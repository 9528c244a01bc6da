"""Makes what a configuration asks for: model, method, optimiser, schedule, average."""

from __future__ import annotations

import inspect
import math
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.optim import SGD as TorchSGD
from torch.optim import NAdam, Optimizer
from torch.optim.adam import Adam
from torch.optim.adamw import AdamW

from dpbam._names import load_function
from dpbam.app.runs.config import ConfigError, RunConfig
from dpbam.app.runs.documents import PublicWeights
from dpbam.app.runs.feature_model import FeatureModel, build_feature_model
from dpbam.bias import PrivateStatistics, ReleasedStatistics
from dpbam.catalogue import CLIPPINGS, FILTERS, METHODS, Arguments, Kind
from dpbam.data import DataSet, ShiftFlip, to_float
from dpbam.filters import Filter
from dpbam.heads import (
    MomentHead,
    MomentLoss,
    bounded_targets,
    check_closed_form_plan,
    class_targets,
    finding_targets,
)
from dpbam.methods import Method, Relative, Schedule, WarmUp
from dpbam.nn import build_model, freeze, train_part
from dpbam.nn.encoders import PublicEncoder, file_digest
from dpbam.oracle import PrivateGradientOracle
from dpbam.params import device_of, evaluating, trainable
from dpbam.privacy.clipping import Clipping
from dpbam.privacy.plan import PrivacyPlan
from dpbam.tasks.base import Task, make_task
from dpbam.tasks.regression import Regression
from dpbam.tasks.single_label import SingleLabel
from dpbam.training.adam_bc import AdamBC
from dpbam.training.averaging import WeightAverage, dense, exponential
from dpbam.training.trainer import augmentation

_KINDS: dict[str, type] = {"method": Method, "clipping": Clipping, "filter": Filter}


def make_device(name: str) -> torch.device:
    """Return the device called ``name``; "auto" is a GPU where there is one."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.zeros(1, device=device)
    except (RuntimeError, AssertionError, NotImplementedError):  # torch without CUDA asserts
        raise ConfigError(f"device {name!r} is not available here: try cpu, or auto") from None
    return device


def make_model(config: RunConfig, train: DataSet) -> nn.Module:
    """Return the model for this data, with its initial weights, frozen as asked, on its device.

    Unseeded weights are drawn with a new seed from the operating system, not with the state of
    torch's generator, which what the process did before, perhaps with the data, may have changed.
    """
    if config.fixed_features:
        return _make_feature_model(config, train)
    model = build_model(
        config.model,
        in_channels=train.shape[0],
        image_size=(train.shape[1], train.shape[2]),
        num_classes=train.num_classes,
        seed=secrets.randbits(48) if config.seed is None else config.seed,
        **model_options(config),
    )
    if config.init is not None:
        load_initial(model, config.init)
    train_part(model, config.trained)
    if config.freeze:
        freeze(model, config.freeze)
    return model.to(make_device(config.device))


def _make_feature_model(config: RunConfig, train: DataSet) -> FeatureModel:
    if config.model_options:
        raise ConfigError(f"model {config.model} has no options: leave model_options out")
    channels, height, width = train.shape
    model = build_feature_model(
        config.model, image_shape=(channels, height, width), num_outputs=train.num_classes
    )
    if config.release_centre is not None:
        model = model.add_centre()
    if config.in_closed_form:
        task = config.task or train.task
        model = model.in_closed_form(
            MomentHead(model.extractor.width, train.num_classes, task=task, balance=config.balance)
        )
    train_part(model, "head")
    return model.to(make_device(config.device))


def set_moment_noise(model: nn.Module, plan: PrivacyPlan) -> None:
    """Tell a head in closed form how much noise its moments get, which its regulariser follows."""
    assert isinstance(model, FeatureModel)
    assert isinstance(model.head, MomentHead)
    check_closed_form_plan(plan)
    model.head.noise_std = plan.noise_multiplier * plan.clip_norm / plan.batch_size


def make_loss(config: RunConfig, task: Task) -> nn.Module:
    """Return the loss of a record that is trained by: the task's, or that of second moments."""
    if not config.in_closed_form:
        return task
    if isinstance(task, Regression):
        low, high = task.low, task.high
        return MomentLoss(lambda values: bounded_targets(values, low, high))
    if task.several_labels:
        return MomentLoss(finding_targets)
    classes = len(task.class_names)
    return MomentLoss(lambda labels: class_targets(labels, classes))


def task_of(config: RunConfig, train: DataSet, model: nn.Module) -> Task:
    """Return the task on the model's device; refuse a model without the outputs that it needs."""
    task = make_task(
        config.task or train.task, train.class_names, class_weights=config.class_weights,
        focal=config.focal, target_range=config.target_range,
    )  # fmt: skip
    _check_weighted(config, train, task)
    if config.balance and not config.in_closed_form:
        if not isinstance(task, SingleLabel):
            raise ConfigError(f"balance is for one class per record, and the task is {task.name}")
        task.adjusted = True
    device = device_of(model)
    blank = torch.zeros(1, *train.shape, dtype=torch.uint8, device=device)
    with torch.no_grad(), evaluating(model):
        task.check_output(model(to_float(blank)), blank)
    return task.to(device)


def _check_weighted(config: RunConfig, train: DataSet, task: Task) -> None:
    """Refuse weights that would have no effect, or no classes."""
    if config.release_counts is not None and not task.has_classes:
        raise ConfigError("release_counts cannot be used: a regression has no classes")
    unit = train.chosen_unit(config.unit)
    counts = config.release_counts if not config.balance else None  # offsets act at any length
    weighted = config.class_weights or config.focal or counts
    normalised = config.clipping in ("automatic", "normalised") and unit == "record"
    if weighted and normalised and task.name == "single-label":
        raise ConfigError(
            f"clipping {config.clipping} gives every record's gradient one length, so that weights "
            "of its class and focal loss have no effect: choose flat clipping, or leave them out"
        )


def model_options(config: RunConfig) -> Arguments:
    """Return the options that the model is built with; low-rank updates have rank 8."""
    lora = {"lora_rank": 8} if config.trained == "lora" else {}
    return {**lora, **config.model_options}


def public_weights(config: RunConfig, model: nn.Module) -> PublicWeights | None:
    """Return the source of the weights that training starts from, and SHA-256 of each file."""
    if isinstance(model, PublicEncoder | FeatureModel):
        return PublicWeights(**model.weights) if model.weights else None
    if config.init is None:
        return None
    name = config.init.name
    return PublicWeights(source=name, files={name: file_digest(config.init)})


def load_initial(model: nn.Module, path: Path) -> list[str]:
    """Load the weights of a safetensors file; return the names that keep their own weights.

    Every parameter must be in the file, in its shape, but for the last layer's: pre-training had
    other classes. What else the file holds is ignored.
    """
    try:
        stored = load_file(path)
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"init {path} cannot be read as safetensors: {error}") from None
    initial = model.state_dict()
    fits = {k: v for k, v in stored.items() if k in initial and v.shape == initial[k].shape}
    missing = [name for name in initial if name not in fits]
    # the last module with parameters of its own
    head = [name.rpartition(".")[0] for name, _ in model.named_parameters()][-1]
    strangers = [name for name in missing if name.rpartition(".")[0] != head]
    if strangers:
        wrong = next((n for n in strangers if n in stored), strangers[0])
        got = f"has shape {list(stored[wrong].shape)}" if wrong in stored else "is missing"
        raise ConfigError(
            f"init {path} does not fit the model: {wrong} {got}, not {list(initial[wrong].shape)}; "
            "give the model that it was saved from (its name and its model_options)"
        )
    model.load_state_dict({**initial, **fits})
    return missing


def make_method(config: RunConfig, steps: int) -> Method:
    """Return the method of a run of ``steps`` steps.

    Of the settings, its class gets those that it takes: lambda as ``lam``, whether the gradient is
    exact as ``exact``, and another method as ``inner``.
    """
    options, make = dict(config.method_options), _class(METHODS, config.method)
    taken = inspect.signature(make).parameters
    warmup = {"warmup": options.pop("warmup")} if _has_warmup(config) else {}
    if "inner" in taken:
        inner = options.get("inner", "dp-sgd")
        if ":" in str(inner):  # it would be imported, and a file may have set it
            raise ConfigError(
                f"disk's inner must be dp-sgd or bam, got {inner}: code of your own is named by "
                "--method alone"
            )
        options["inner"] = make_method(config.replace(method=inner, method_options=warmup), steps)
    if "lam" in taken:
        options = {"lam": make_lambda(config, steps), **options}
    if "exact" in taken and config.method in METHODS:
        options["exact"] = config.gradient == "exact"
    method: Method = _make_part("method", config.method, make, **options)
    return method


def make_lambda(config: RunConfig, steps: int) -> float | Schedule:
    """Return the configured lambda(t) of a run of ``steps`` steps."""
    lam: float | Schedule = 0.02 if config.lam is None else config.lam
    names = (config.method, str(config.method_options.get("inner")))
    by_share = any(name in METHODS and METHODS[name].lam == "share" for name in names)
    if by_share and config.lam is None:
        lam = Relative(config.lam_share)
    if not _has_warmup(config):
        return lam
    share = config.method_options["warmup"]
    if not isinstance(share, int | float) or not 0 <= share <= 1:
        raise ConfigError(f"the method option warmup must be a share from 0 to 1, got {share!r}")
    return WarmUp(lam, round(share * steps))


def _has_warmup(config: RunConfig) -> bool:
    """Whether lambda rises over the first steps: an option of the methods that have a lambda."""
    lam = config.method in METHODS and "lam" in METHODS[config.method].settings
    return lam and "warmup" in config.method_options


def lam_at_the_end(config: RunConfig, model: nn.Module, steps: int) -> float:
    """Return lambda after ``steps`` steps, at the model's present parameters."""
    lam = make_lambda(config, steps)
    return lam(steps, dict(trainable(model))) if callable(lam) else lam


def _class(kind: Kind[Any], name: str) -> Callable[..., Any]:
    """Return the class of a name in the catalogue, or of ``module:Name``."""
    return load_function(name) if ":" in name else kind.load(name)


def make_clipping(config: RunConfig) -> Clipping | None:
    """Return the clipping; None without privacy, where nothing is clipped."""
    if not config.private:
        return None
    make, options = _class(CLIPPINGS, config.clipping), config.clipping_options
    clipping: Clipping = _make_part("clipping", config.clipping, make, config.clip_norm, **options)
    return clipping


def make_filter(config: RunConfig) -> Filter | None:
    if config.filter == "none":
        return None
    make = _class(FILTERS, config.filter)
    gradient_filter: Filter = _make_part("filter", config.filter, make, **config.filter_options)
    return gradient_filter


def _make_part(what: str, name: str, make: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """Call ``make``; refuse options that it does not take, and what is not of the right class."""
    if inspect.isabstract(make):
        raise ConfigError(f"{what} {name} is abstract: name a class that defines what it does")
    try:
        inspect.signature(make).bind(*args, **options)
    except TypeError as error:
        raise ConfigError(f"{what} {name} cannot be made: {error} ({what}_options)") from None
    instance, kind = make(*args, **options), _KINDS[what]
    if not isinstance(instance, kind):
        raise ConfigError(
            f"{what} {name} makes a {type(instance).__name__}: it must be a subclass of "
            f"{kind.__module__}.{kind.__name__}"
        )
    return instance


def make_optimizer(
    config: RunConfig, model: nn.Module, oracle: PrivateGradientOracle | None = None
) -> Optimizer:
    """Return the optimiser; with ``correct_noise`` it reads the noise's deviation of ``oracle``."""
    trained = [p for p in model.parameters() if p.requires_grad]
    lr, decay = config.lr, config.weight_decay
    if config.optimizer == "sgd":
        return TorchSGD(trained, lr=lr, weight_decay=decay, momentum=config.momentum)
    if config.correct_noise:
        assert oracle is not None
        return AdamBC(trained, oracle, kind=config.optimizer, lr=lr, weight_decay=decay)
    classes: dict[str, type[NAdam] | type[Adam] | type[AdamW]] = {
        "nadam": NAdam,
        "adam": Adam,
        "adamw": AdamW,
    }
    return classes[config.optimizer](trained, lr=lr, weight_decay=decay)


def make_schedule(name: str, steps: int) -> Callable[[int], float]:
    """Return the factor on the learning rate by step; T = ``steps``.

    Example:
        >>> [round(make_schedule("cosine", 4)(t), 3) for t in range(4)]
        [1.0, 0.854, 0.5, 0.146]
        >>> make_schedule("linear", 4)(1)
        0.75
    """
    schedules: dict[str, Callable[[int], float]] = {
        "constant": lambda t: 1.0,
        "cosine": lambda t: 0.5 * (1 + math.cos(math.pi * t / steps)),
        "linear": lambda t: 1 - t / steps,
    }
    return schedules[name]


def make_average(config: RunConfig, model: nn.Module, steps: int) -> WeightAverage | None:
    if config.ema is not None:
        return WeightAverage(model, exponential(config.ema))
    if config.swa is not None:
        return WeightAverage(model, dense(round(config.swa * steps)))
    return None


def make_augment(config: RunConfig) -> Callable[[Tensor, Tensor], Tensor]:
    """Return what turns uint8 images into views and floats."""
    return augmentation(_views(config))


def make_mask_augment(config: RunConfig, task: Task) -> Callable[[Tensor, Tensor], Tensor] | None:
    """Return what moves the masks of a segmentation with their images."""
    draw = _views(config)
    if draw is None or not task.targets_are_images:
        return None
    return lambda masks, keys: draw(masks[:, None], keys)[:, 0]


def _views(config: RunConfig) -> ShiftFlip | None:
    if config.augment_multiplicity == 0:
        return None
    flip = None if config.flip == "none" else config.flip
    return ShiftFlip(config.shift, flip, config.augment_probability)


def make_release(
    config: RunConfig, sink: Callable[[ReleasedStatistics], None] | None = None
) -> PrivateStatistics | None:
    """Return what is released with the gradients, if anything. Norms are counted between C 2^k."""
    if config.release_norms is None:
        return None
    thresholds = [config.clip_norm * 2.0**k for k in range(-4, 9)]
    return PrivateStatistics(thresholds, noise_multiplier=config.release_norms, sink=sink)

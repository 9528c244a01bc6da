"""One entry for each thing that users name, with everything that is known about it.

Methods, clippings, filters, tasks, models, families of encoders, data sources, figures and commands
are added here or by a plug-in, and nowhere else: the command line, configurations, statements,
reports and searches take names, help and facts from these entries. An entry names its class or
function as ``module:Name``, so that reading names imports neither torch nor the module.

A plug-in is a package with an entry point in the group of its kind, such as ``dpbam.methods``,
whose value is an entry; :meth:`Kind.register` does the same within one process. Privacy does not
depend on what an entry says: sensitivity, noise and accounting come from the objects that it names,
which are checked as code of the user's own is, and a statement names every part that is not
dpbam's.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from importlib import import_module
from typing import Any, Generic, TypeVar

from dpbam._names import did_you_mean
from dpbam.errors import ArgumentError

BUILT_IN = "dpbam"
_SHIPPED = "dpbam.contenders:ENTRIES"  # plug-ins that come with dpbam, by group
#: keyword arguments of a class or function that users name, such as the options of a model
Arguments = dict[str, Any]
_SAME_COST = "that of DP-SGD"
_FREE = "none: it sees released gradients alone"


@dataclass(frozen=True)
class Entry:
    """What every entry has.

    Attributes:
        name: what users write.
        target: ``module:Name`` of its class or function.
        summary: one sentence, or the condition under which to use it.
        origin: the package that it comes from.
    """

    name: str
    target: str
    summary: str = ""
    origin: str = BUILT_IN

    def load(self) -> Any:
        """Import the class or function."""
        return load(self.target)


def load(target: str) -> Any:
    """Import what ``module:Name`` names."""
    module, _, name = target.partition(":")
    return getattr(import_module(module), name)


@dataclass(frozen=True)
class Part(Entry):
    """A part of the private step: a method, clipping or filter.

    Attributes:
        formula: what it computes.
        reference: where it was published.
        cost: in privacy, next to DP-SGD.
    """

    formula: str = ""
    reference: str = ""
    cost: str = _SAME_COST


@dataclass(frozen=True)
class Method(Part):
    """A method.

    Attributes:
        label: as people write it.
        private: whether it gives privacy; others are references.
        settings: of a run's configuration that it has.
        lam: its lambda where none is given; "share": a share of the parameters' norm; None: it has
            none of its own.
    """

    label: str = ""
    private: bool = True
    settings: tuple[str, ...] = ()
    lam: float | str | None = None


@dataclass(frozen=True)
class Task(Entry):
    """A task; its class has everything else that is known about it.

    Attributes:
        metric_labels: pairs of a metric's name and how people write it, where they differ.
    """

    metric_labels: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class Model(Entry):
    """A model.

    Attributes:
        pattern: of names that it serves in addition to its own; groups are arguments of the class.
    """

    pattern: str = ""

    def arguments(self, name: str) -> dict[str, int] | None:
        """Return the arguments that ``name`` determines; None if it is not this model's name."""
        match = re.fullmatch(self.pattern, name) if self.pattern else None
        if match is not None:
            return {key: int(value) for key, value in match.groupdict().items()}
        return {} if name == self.name else None


@dataclass(frozen=True)
class Encoder(Entry):
    """A family of public encoders; its name is transformers' ``model_type``, its target the class.

    Attributes:
        output: of the class, what a head is trained on: ``logits`` of a classifier without its last
            layer, or ``pooler_output`` of an image tower.
    """

    output: str = "logits"


@dataclass(frozen=True)
class Source(Entry):
    """A kind of data source: a function of (argument, options) that returns a table per split.

    Attributes:
        spec: how to ask for it.
        named: whether it is asked for by its name; others by a path or a function.
        public: everyone has these records, so that figures on them may be published. Of a plug-in
            it counts for nothing: whose records it reads, only its operator knows.
        downloads: whether it can be fetched.
        first: the first argument of the function, where several sources share one.
    """

    spec: str = ""
    named: bool = True
    public: bool = False
    downloads: bool = False
    first: str = ""


@dataclass(frozen=True)
class Figure(Entry):
    """A figure of the report: a function of the groups of runs.

    Attributes:
        section: of the report.
        sentence: ``module:function`` of what it means: a sentence about the runs of one setting.
    """

    section: str = ""
    sentence: str = ""


E = TypeVar("E", bound=Entry)


class Kind(Mapping[str, E], Generic[E]):
    """The entries of one kind by name: built-in ones first, then plug-ins.

    Args:
        noun: the kind, for messages.
        group: the group of entry points that holds plug-ins.
        entries: built in.

    Example:
        >>> METHODS["bam"].label, METHODS.find("bamm")
        Traceback (most recent call last):
        dpbam.errors.ArgumentError: method 'bamm' is unknown: did you mean 'bam'?
    """

    def __init__(self, noun: str, group: str, *entries: E) -> None:
        self.noun, self.group = noun, group
        self._entries = {entry.name: entry for entry in entries}
        self._plugins_loaded = False

    def register(self, entry: E) -> E:
        """Add an entry of the user's own; its name must be new."""
        if entry.name in self:
            raise ArgumentError(f"there is a {self.noun} {entry.name!r} already: choose a new name")
        module = entry.target.partition(":")[0].partition(".")[0]
        # what others wrote is named as theirs in every statement, whatever the entry claims
        entry = replace(entry, origin=module if entry.origin == BUILT_IN else entry.origin)
        self._entries[entry.name] = entry
        return entry

    def remove(self, name: str) -> None:
        """Remove an entry that was registered."""
        if self[name].origin == BUILT_IN:
            raise ArgumentError(f"{self.noun} {name!r} is built in and cannot be removed")
        del self._entries[name]

    def find(self, name: str) -> E:
        """Return the entry called ``name``, or raise with the nearest name."""
        if name not in self:
            raise ArgumentError(f"{self.noun} {name!r} is unknown: {did_you_mean(name, self)}")
        return self[name]

    def load(self, name: str) -> Any:
        """Import the class or function called ``name``."""
        return self.find(name).load()

    def is_own_code(self, name: str) -> bool:
        """Whether ``name`` is ``module:Name`` of the user, or an entry that is not dpbam's."""
        return ":" in name or (name in self and self[name].origin != BUILT_IN)

    def __getitem__(self, name: str) -> E:
        return self._all()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._all())

    def __len__(self) -> int:
        return len(self._all())

    # a kind is one object, not its present entries: annotations that hold it are hashed
    __eq__ = object.__eq__
    __hash__ = object.__hash__

    def _all(self) -> dict[str, E]:
        """Return the entries, after plug-ins were looked for once."""
        if not self._plugins_loaded:
            self._plugins_loaded = True  # first: registering looks names up
            from importlib.metadata import entry_points

            for entry in load(_SHIPPED).get(self.group, ()):
                self.register(entry)
            for point in entry_points(group=self.group):
                try:
                    entry = point.load()
                    origin = point.dist.name if point.dist else point.module
                    self.register(replace(entry, origin=origin))
                except Exception as error:  # whatever the plug-in's module raises
                    raise ArgumentError(
                        f"the plug-in {point.value} of {self.group} cannot be loaded ({error}): "
                        "fix it, or uninstall its package"
                    ) from error
        return self._entries


METHODS: Kind[Method] = Kind(
    "method",
    "dpbam.methods",
    Method("dp-sgd", "dpbam.methods:DPSGD", "the baseline", label="DP-SGD", formula="g_i",
           reference="Abadi et al. 2016"),
    Method("dp-sat", "dpbam.methods:DPSAT", "flat minima at the speed of dp-sgd", label="DP-SAT",
           formula="g_i(theta + lambda u), u the previous private gradient",
           reference="Park et al. 2023", settings=("lam",), lam=0.02),
    Method("bam", "dpbam.methods:BAM", "most units are clipped, and noise does not dominate",
           label="BAM", formula="g_i(theta + lambda g_i / |g_i|)", reference="the paper, Eq. 12",
           cost=f"{_SAME_COST}; two gradients", settings=("lam", "lam_share", "gradient"),
           lam="share"),
    Method("sgd", "dpbam.methods:SGD", "a reference", label="SGD",
           formula="g_i, neither clipped nor noised", cost="no privacy", private=False),
    Method("sam", "dpbam.methods:SAM", "a reference", label="SAM",
           formula="g_i(theta + lambda u), u the batch gradient", reference="Foret et al. 2021",
           cost="no privacy", private=False, settings=("lam",), lam=0.02),
)  # fmt: skip

CLIPPINGS: Kind[Part] = Kind(
    "clipping",
    "dpbam.clippings",
    Part("flat", "dpbam.privacy.clipping:FlatClipping", "C is known, for example from dpbam bias",
         formula="min(1, C / |d|) d", reference="Abadi et al. 2016"),
    Part("automatic", "dpbam.privacy.clipping:AutomaticClipping", "C is unknown: only lr C matters",
         formula="C d / (|d| + gamma)", reference="Bu et al. 2023"),
    Part("per-layer", "dpbam.privacy.clipping:PerLayerClipping", "one layer outweighs the others",
         formula="each of G layers clipped to C / sqrt(G)", reference="McMahan et al. 2018"),
)  # fmt: skip

FILTERS: Kind[Part] = Kind(
    "filter",
    "dpbam.filters",
    Part("exponential", "dpbam.filters:Exponential", "sgd without momentum",
         formula="m = beta m + (1 - beta) g, divided by 1 - beta^t",
         reference="Kingma and Ba 2015", cost=_FREE),
    Part("doppler", "dpbam.filters:LowPass", "noise well above the signal; not with momentum",
         formula="m = sum_k b_k g_(t-k) - sum_k a_k m_(t-k)", reference="Zhang et al. 2024",
         cost=_FREE),
)  # fmt: skip

#: The correction of Adam's second moment, a setting of the optimiser and no part of its own.
CORRECTION = Part(
    "nadam, adam, adamw", "dpbam.training.adam_bc:AdamBC",
    "Adam where noise dominates; refused with a filter", reference="DP-AdamBC, Tang et al. 2023",
    formula="m / sqrt(max(v - noise's variance, floor))", cost="none: the variance is public",
)  # fmt: skip

TASKS: Kind[Task] = Kind(
    "task",
    "dpbam.tasks",
    Task("single-label", "dpbam.tasks.single_label:SingleLabel", "one class per record"),
    Task("multi-label", "dpbam.tasks.multi_label:MultiLabel", "any subset of findings per record",
         metric_labels=(("auc", "AUC"), ("micro_auc", "micro AUC"))),
    Task("regression", "dpbam.tasks.regression:Regression", "one value per record",
         metric_labels=(("r2", "R2"), ("mae", "MAE"), ("spearman", "Spearman"))),
    Task("segmentation", "dpbam.tasks.segmentation:Segmentation", "one class per pixel",
         metric_labels=(("dice", "Dice"), ("iou", "IoU"))),
)  # fmt: skip

MODELS: Kind[Model] = Kind(
    "model",
    "dpbam.models",
    Model("resnet9", "dpbam.nn.models:ResNet9"),
    Model("wrn-16-4", "dpbam.nn.models:WideResNet", "any wrn-D-K: depth D, factor K",
          pattern=r"wrn-(?P<depth>\d+)-(?P<widen>\d+)"),
    Model("small-cnn", "dpbam.nn.models:SmallCNN"),
    Model("mlp", "dpbam.nn.models:MLP"),
    Model("unet", "dpbam.nn.models:UNet", "scores per pixel, for segmentation"),
)  # fmt: skip

SOURCES: Kind[Source] = Kind(
    "data source",
    "dpbam.sources",
    Source("digits", "dpbam.data.built_in:open_digits",
           "scikit-learn digits, 1,797 grey 8x8 images, 10 classes, embedded",
           spec="digits", public=True),
    Source("cifar10", "dpbam.data.built_in:open_cifar",
           "CIFAR-10, 60,000 colour 32x32 images, 10 classes",
           spec="cifar10[:PATH]", public=True, downloads=True, first="cifar10"),
    Source("cifar100", "dpbam.data.built_in:open_cifar", "CIFAR-100, the same size, 100 classes",
           spec="cifar100[:PATH]", public=True, downloads=True, first="cifar100"),
    Source("imagenet32", "dpbam.data.built_in:open_imagenet32",
           "ImageNet at 32x32, 1,331,167 colour images, 1,000 classes, official npz files",
           spec="imagenet32[:PATH]", public=True),
    Source("npz", "dpbam.data.npz:open_npz",
           "a MedMNIST file, or any .npz of uint8 images and labels", spec="FILE.npz", named=False),
    Source("folder", "dpbam.data.folder:open_folder",
           "images or DICOM files, one folder per class or a labels.csv",
           spec="FOLDER", named=False),
    Source("hf", "dpbam.data.huggingface:open_huggingface",
           "a Hugging Face set or local parquet files (needs dpbam[hf])",
           spec="hf:NAME or hf:FILE.parquet", downloads=True),
    Source("function", "dpbam.data.arrays:open_user",
           "your own function of the split, returning (images, labels)",
           spec="MODULE:FUNCTION", named=False),
)  # fmt: skip

#: At most 14, in the order of the report.
FIGURES: Kind[Figure] = Kind(
    "figure",
    "dpbam.figures",
    Figure("differences", "dpbam.app.report.tables:differences",
           "what a setting gains over the first one, seed by seed", section="Quality"),
    Figure("accuracy", "dpbam.app.report.training_figures:accuracy",
           "the main metric over training and over the budget", section="Quality",
           sentence="dpbam.app.report.training_figures:of_accuracy"),
    Figure("classes", "dpbam.app.report.evaluation_figures:classes",
           "the main metric by class", section="Quality",
           sentence="dpbam.app.report.evaluation_figures:of_classes"),
    Figure("confusion", "dpbam.app.report.evaluation_figures:confusion",
           "which class is taken for which", section="Quality",
           sentence="dpbam.app.report.evaluation_figures:of_confusion"),
    Figure("roc", "dpbam.app.report.evaluation_figures:roc",
           "ROC curves of findings", section="Quality",
           sentence="dpbam.app.report.evaluation_figures:of_roc"),
    Figure("predicted", "dpbam.app.report.evaluation_figures:predicted",
           "predicted against true values", section="Quality",
           sentence="dpbam.app.report.evaluation_figures:of_predicted"),
    Figure("groups", "dpbam.app.report.evaluation_figures:subgroups",
           "the main metric by sub-group", section="Quality",
           sentence="dpbam.app.report.evaluation_figures:of_subgroups"),
    Figure("bias", "dpbam.app.report.training_figures:bias",
           "length of the bias over training, in two readings", section="Clipping bias",
           sentence="dpbam.app.report.training_figures:of_bias"),
    Figure("direction", "dpbam.app.report.training_figures:direction",
           "what the error is made of: length, direction, noise", section="Clipping bias",
           sentence="dpbam.app.report.training_figures:of_direction"),
    Figure("released-norms", "dpbam.app.report.norm_figures:released_norms",
           "histograms of the norms, as released", section="Released with noise",
           sentence="dpbam.app.report.norm_figures:of_released"),
    Figure("released-clipping", "dpbam.app.report.norm_figures:released_clipping",
           "share clipped and the bias, as released", section="Released with noise",
           sentence="dpbam.app.report.norm_figures:of_released"),
    Figure("norms", "dpbam.app.report.norm_figures:norms",
           "quantiles of the norms over training", section="Gradients and loss",
           sentence="dpbam.app.report.norm_figures:of_norms"),
    Figure("loss", "dpbam.app.report.training_figures:loss",
           "training loss", section="Gradients and loss",
           sentence="dpbam.app.report.training_figures:of_loss"),
    Figure("layers", "dpbam.app.report.norm_figures:layers",
           "norms and cosines by layer", section="Gradients and loss",
           sentence="dpbam.app.report.norm_figures:of_layers"),
)  # fmt: skip

_CLASSIFIER = "transformers:AutoModelForImageClassification"

#: Families of public encoders whose features were tested. The image towers of CLIP and SigLIP are
#: taken from a file of both towers too, and give what these models compare with a text.
ENCODERS: Kind[Encoder] = Kind(
    "family of encoders",
    "dpbam.encoders",
    Encoder("clip", "transformers:CLIPVisionModel", "CLIP, image tower", output="pooler_output"),
    Encoder("clip_vision_model", "transformers:CLIPVisionModel", "the same as a file of its own",
            output="pooler_output"),
    Encoder("convnext", _CLASSIFIER, "ConvNeXt"),
    Encoder("convnextv2", _CLASSIFIER, "ConvNeXt V2"),
    Encoder("dinov2", _CLASSIFIER, "DINOv2"),
    Encoder("dinov2_with_registers", _CLASSIFIER, "DINOv2 with registers"),
    Encoder("dinov3_convnext", "transformers:DINOv3ConvNextModel", "DINOv3, ConvNeXt",
            output="pooler_output"),
    Encoder("dinov3_vit", "transformers:DINOv3ViTModel", "DINOv3, ViT", output="pooler_output"),
    Encoder("efficientnet", _CLASSIFIER, "EfficientNet"),
    Encoder("resnet", _CLASSIFIER, "ResNet"),
    Encoder("siglip", "transformers:SiglipVisionModel", "SigLIP, image tower",
            output="pooler_output"),
    Encoder("siglip_vision_model", "transformers:SiglipVisionModel",
            "the same as a file of its own", output="pooler_output"),
    Encoder("swin", _CLASSIFIER, "Swin"),
    Encoder("vit", _CLASSIFIER, "ViT"),
)  # fmt: skip

#: Commands: a function of the command line, or a dict of functions for a group of commands.
COMMANDS: Kind[Entry] = Kind(
    "command",
    "dpbam.commands",
    Entry("train", "dpbam.app.cli.train:train",
          "Train a model with differential privacy, and write a privacy statement."),
    Entry("compare", "dpbam.app.cli.compare:compare_methods",
          "Train several methods with paired seeds, and compare their accuracy."),
    Entry("search", "dpbam.app.cli.search:search",
          "Search for hyper-parameters at random, and release the best model alone."),
    Entry("evaluate", "dpbam.app.cli.evaluate:evaluate",
          "Evaluate a run's model on labelled data, as a whole, by class and by sub-group."),
    Entry("predict", "dpbam.app.cli.evaluate:predict",
          "Predict images with a run's model: a label and the probability of every class."),
    Entry("export", "dpbam.app.cli.export:export",
          "Write a run's model as ONNX, for Hugging Face, or as safetensors, and check it."),
    Entry("report", "dpbam.app.cli.report:report",
          "Write one self-contained HTML page about one run, or several side by side."),
    Entry("plot", "dpbam.app.cli.report:plot",
          "Draw one figure of one run or several, or write its data."),
    Entry("audit", "dpbam.app.cli.audit:audit",
          "Check a finished run, or attack its model."),
    Entry("sign", "dpbam.app.cli.export:sign",
          "Sign a run's privacy statement, which names the model's digest, with the operator's "
          "key."),
    Entry("bias", "dpbam.app.cli.bias:bias",
          "Measure the bias that clipping puts into a model's gradients: its length and "
          "direction."),
    Entry("demo", "dpbam.app.cli.demo:demo",
          "Compare DP-SGD, DP-SAT, BAM and training without privacy on digits, in a few minutes."),
    Entry("epsilon", "dpbam.app.cli.calculators:epsilon",
          "Calculate the epsilon of a training with a given noise multiplier."),
    Entry("calibrate", "dpbam.app.cli.calculators:calibrate",
          "Find the least noise multiplier for a number of steps; or, given one, the most steps."),
    Entry("methods", "dpbam.app.cli.methods:methods",
          "List methods, clippings, filters and corrections, with formula, privacy cost and use."),
    Entry("data", "dpbam.app.cli.data:COMMANDS", "List, fetch and check data sets."),
)  # fmt: skip


def is_built_in(definition: object) -> bool:
    """Whether a class or function comes with dpbam, and is no code of a user or another package.

    Example:
        >>> is_built_in(Kind), is_built_in(re.compile)
        (True, False)
    """
    module: str = getattr(definition, "__module__", None) or ""
    return module.partition(".")[0] == BUILT_IN


def is_private(method: object) -> bool:
    """Whether the method of this name gives privacy; an unknown name counts as one that does.

    Example:
        >>> is_private("bam"), is_private("sam")
        (True, False)
    """
    name = str(method)
    return name not in METHODS or METHODS[name].private

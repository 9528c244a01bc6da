"""Models for private training, standardised convolutions, model checks and repairs."""

from dpbam.nn.encoders import PublicEncoder, load_encoder
from dpbam.nn.freeze import freeze, head_only, train_part
from dpbam.nn.models import MLP, ResNet9, SmallCNN, UNet, WideResNet
from dpbam.nn.registry import build_model
from dpbam.nn.repair import check_model, check_trainable, replace_batch_norm
from dpbam.nn.standardise import StandardisedConv1d, StandardisedConv2d, StandardisedConv3d

__all__ = [
    "MLP",
    "PublicEncoder",
    "ResNet9",
    "SmallCNN",
    "StandardisedConv1d",
    "StandardisedConv2d",
    "StandardisedConv3d",
    "UNet",
    "WideResNet",
    "build_model",
    "check_model",
    "check_trainable",
    "freeze",
    "head_only",
    "load_encoder",
    "replace_batch_norm",
    "train_part",
]

"""Models of timm, random weights, on digits; the smallest of each family, or one made smaller by its options."""

from __future__ import annotations

import functools
import importlib
from typing import Any

from torch import nn

from benchmarks.harness.batches import CLASSES, cross_entropy, digits
from benchmarks.harness.workarounds import mend_torchvision
from benchmarks.zoo.registry import ZooModel

IMAGES, SIZE = 8, 32
NORMED = 32  # images where batch norms see one value of each: the statistics of few are noise
SMALL: dict[str, Any] = {"img_size": SIZE, "patch_size": 8, "embed_dim": 128, "depth": 2, "num_heads": 4}
PATCHES: dict[str, Any] = {"img_size": SIZE, "patch_size": 4, "embed_dim": 128, "num_blocks": 2}


def of_timm(name: str, model: str, size: int = SIZE, rows: int = IMAGES, **options: Any) -> ZooModel:
    """A classifier of digits by timm's name for it."""

    def make() -> nn.Module:
        mend_torchvision()
        import timm  # type: ignore

        made = timm.create_model(model, pretrained=False, num_classes=CLASSES, **options)
        assert isinstance(made, nn.Module)
        return without_dropout(made)

    return ZooModel(f"timm_{name}", "timm", make, functools.partial(digits, rows=rows, size=size), cross_entropy)


def of_class(name: str, module: str, cls: str, rows: int = IMAGES, **options: Any) -> ZooModel:
    """A classifier of digits by its class, in sizes that timm's names have not; a class of its module may be named."""

    def make() -> nn.Module:
        mend_torchvision()
        found = importlib.import_module(f"timm.models.{module}")
        given = {key: _named(found, value) for key, value in options.items()}
        made = getattr(found, cls)(num_classes=CLASSES, **given)
        assert isinstance(made, nn.Module)
        return without_dropout(made)

    return ZooModel(f"timm_{name}", "timm", make, functools.partial(digits, rows=rows, size=SIZE), cross_entropy)


def _named(module: Any, value: Any) -> Any:
    if isinstance(value, tuple):
        return tuple(_named(module, each) for each in value)
    return getattr(module, value, value) if isinstance(value, str) else value


def without_dropout(model: nn.Module) -> nn.Module:
    """The model with each of its rates of dropout, also of whole paths, 0."""
    for module in model.modules():
        for rate in ("p", "drop_prob"):
            if "rop" in type(module).__name__ and isinstance(getattr(module, rate, None), float):
                setattr(module, rate, 0.0)
    return model


MODELS: tuple[ZooModel, ...] = (
    of_timm("vit", "vit_tiny_patch16_224", **SMALL),
    of_timm("deit3", "deit3_small_patch16_224", **SMALL),
    of_timm("eva02", "eva02_tiny_patch14_224", **SMALL),
    of_timm("beit", "beit_base_patch16_224", **SMALL),
    of_timm("cait", "cait_xxs24_224", **SMALL),
    of_timm("xcit", "xcit_nano_12_p16_224", size=64, img_size=64, depth=2),
    of_timm(
        "swin",
        "swin_tiny_patch4_window7_224",
        img_size=SIZE,
        patch_size=2,
        window_size=4,
        embed_dim=64,
        depths=(1, 1),
        num_heads=(2, 4),
    ),
    of_timm("resnet18", "resnet18", rows=NORMED, channels=(16, 32, 64, 128)),
    of_timm("resnext", "resnext50_32x4d", rows=NORMED, layers=(1, 1, 1, 1), channels=(16, 32, 64, 128)),
    of_timm("seresnet", "seresnet18", rows=NORMED, channels=(16, 32, 64, 128)),
    of_timm("regnet", "regnety_002", rows=NORMED),
    of_timm("densenet", "densenet121", rows=NORMED, growth_rate=16, block_config=(2, 2, 2)),
    of_timm("mobilenetv3", "mobilenetv3_small_050", rows=NORMED),
    of_timm("ghostnet", "ghostnet_050", rows=NORMED, drop_rate=0.0),
    of_timm("convnext", "convnext_atto", depths=(1, 1, 1, 1), dims=(32, 64, 128, 128)),
    of_timm("convnextv2", "convnextv2_atto", depths=(1, 1, 1, 1), dims=(32, 64, 128, 128)),
    of_timm("edgenext", "edgenext_xx_small", size=64),
    of_timm("mobilevit", "mobilevit_xxs", size=64),
    of_timm(
        "coat", "coat_lite_tiny", size=64, img_size=64, embed_dims=(32, 64, 128, 128), serial_depths=(1, 1, 1, 1)
    ),
    of_timm("hgnet", "hgnetv2_b0", rows=NORMED),
    of_class("mixer", "mlp_mixer", "MlpMixer", **PATCHES),
    of_class("resmlp", "mlp_mixer", "MlpMixer", **PATCHES, block_layer="ResBlock", mlp_ratio=4),
    of_class(
        "gmlp",
        "mlp_mixer",
        "MlpMixer",
        **PATCHES,
        block_layer="SpatialGatingBlock",
        mlp_layer="GatedMlp",
        mlp_ratio=4,
    ),
    of_class("convmixer", "convmixer", "ConvMixer", rows=NORMED, dim=128, depth=2, kernel_size=3, patch_size=4),
    of_class(
        "pit",
        "pit",
        "PoolingVisionTransformer",
        img_size=SIZE,
        patch_size=4,
        stride=2,
        stem_type="overlap",
        base_dims=(32, 32),
        depth=(1, 1),
        heads=(2, 4),
        mlp_ratio=4,
    ),
)

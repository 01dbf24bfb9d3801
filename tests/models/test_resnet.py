"""ResNet, compared with torchvision's: parameter counts, names, a forward pass and its gradients."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from farandole.models.resnet import (
    CONFIGS,
    BasicBlock,
    Bottleneck,
    ResNetConfig,
    build_resnet,
    from_torchvision_names,
    resnet_config,
)
from tests.torchvision_models import torchvision_models

PUBLISHED = {
    "resnet18": 11_689_512,
    "resnet34": 21_797_672,
    "resnet50": 25_557_032,
    "resnet101": 44_549_160,
    "resnet152": 60_192_808,
}
TARGETS = torch.tensor([3, 700])


def make_images() -> Tensor:
    return torch.sin(torch.arange(2 * 3 * 64 * 64, dtype=torch.float64) * 0.37).view(2, 3, 64, 64)


def fill(name: str, tensor: Tensor) -> None:
    """Fill a tensor of torchvision's state with values that depend only on its name and shape."""
    if not tensor.dtype.is_floating_point:
        return
    wave = torch.sin(torch.arange(tensor.numel(), dtype=torch.float64) * 0.7 + len(name)).view(tensor.shape)
    if tensor.dim() > 1:
        wave *= math.sqrt(2 / tensor[0].numel())
    elif name.endswith(("running_var", "weight")):
        wave = 1 + 0.1 * wave
    tensor.copy_(wave)


# Results of torchvision 0.28 with these weights and images, in fp64 and training mode: every 250th logit of both
# images, the cross-entropy to TARGETS, and the norms of some gradients (by torchvision's names).
REFERENCE: dict[str, dict[str, Any]] = {
    "resnet18": {
        "logits": [
            -4.02498234,
            9.219819914,
            -0.098654317,
            -10.640975656,
            -4.181217178,
            8.777325932,
            0.239227899,
            -10.33718507,
        ],
        "loss": 17.529621320543768,
        "grads": {
            "conv1.weight": 7.47181108,
            "layer1.0.conv1.weight": 0.409665643,
            "layer2.0.downsample.0.weight": 10.2326673,
            "layer4.1.bn2.bias": 0.808145864,
            "fc.weight": 18.8723845,
        },
    },
    "resnet50": {
        "logits": [
            -9.931702853,
            21.166299424,
            38.63103143,
            31.295961921,
            -11.628296617,
            17.095406689,
            34.814292,
            30.197728974,
        ],
        "loss": 24.290543481363663,
        "grads": {
            "conv1.weight": 12839.6113,
            "layer1.0.conv1.weight": 1918.21881,
            "layer2.0.downsample.0.weight": 2588.53586,
            "layer4.1.bn2.bias": 0.346867319,
            "fc.weight": 52.1765295,
        },
    },
}


def build_filled(name: str) -> nn.Sequential:
    """Return our model with reproducible weights, which depend on torchvision's names."""
    model = build_resnet(resnet_config(name)).double()
    with torch.no_grad():
        for theirs, tensor in torchvision_names(model).items():
            fill(theirs, tensor)
    return model


def torchvision_names(model: nn.Sequential) -> dict[str, Tensor]:
    """Return our model's state by torchvision's names, found by inverting `from_torchvision_names`."""
    config = CONFIGS[next(name for name in PUBLISHED if CONFIGS[name].parameters == count(model))]
    ours = model.state_dict(keep_vars=True)
    prefixes = ["", *(f"layer{s + 1}.{b}." for s in range(4) for b in range(config.layers[s])), ""]
    theirs = {}
    for name, tensor in ours.items():
        block, rest = name.split(".", 1)
        theirs[prefixes[int(block)] + rest] = tensor
    renamed = from_torchvision_names(theirs)
    assert list(renamed) == list(ours) and all(renamed[name] is ours[name] for name in ours)
    return theirs


def count(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize("name", CONFIGS)
def test_parameter_count(name):
    config = resnet_config(name)
    with torch.device("meta"):
        model = build_resnet(config)
    assert count(model) == config.parameters == PUBLISHED.get(name, config.parameters)


@pytest.mark.parametrize("name", REFERENCE)
def test_logits_and_gradients_match_recorded_torchvision(name):
    expected = REFERENCE[name]
    model = build_filled(name)
    logits = model(make_images())
    loss = F.cross_entropy(logits, TARGETS)
    loss.backward()
    torch.testing.assert_close(
        logits[:, ::250].flatten(),
        torch.tensor(expected["logits"], dtype=torch.float64),
        rtol=1e-7,
        atol=1e-7,
    )
    assert loss.item() == pytest.approx(expected["loss"], rel=1e-9)
    named = torchvision_names(model)
    for parameter, norm in expected["grads"].items():
        grad = named[parameter].grad
        assert grad is not None and grad.norm().item() == pytest.approx(norm, rel=1e-6), parameter


@pytest.mark.parametrize("name", ["resnet18", "resnet50"])
def test_outputs_match_torchvision(name):
    theirs = getattr(torchvision_models(), name)().double()
    ours = build_resnet(resnet_config(name)).double()
    ours.load_state_dict(from_torchvision_names(theirs.state_dict()))
    torch.testing.assert_close(ours(make_images()), theirs(make_images()))
    ours.eval(), theirs.eval()
    torch.testing.assert_close(ours(make_images()), theirs(make_images()))


def test_ddp_prefix_is_removed_and_unknown_names_are_refused():
    state = {
        "module.conv1.weight": torch.ones(1),
        "module.layer4.1.bn2.bias": torch.ones(2),
        "fc.bias": torch.ones(3),
    }
    assert list(from_torchvision_names(state)) == ["0.conv1.weight", "2.bn2.bias", "3.fc.bias"]
    with pytest.raises(
        ValueError, match="unexpected name 'classifier.weight'; expected torchvision's ResNet names"
    ):
        from_torchvision_names({"classifier.weight": torch.ones(1)})


@pytest.mark.parametrize("name", ["resnet18", "resnet50"])
def test_initial_weights_have_the_variance_of_the_paper(name):
    torch.manual_seed(0)
    for module in build_resnet(resnet_config(name)).modules():
        if isinstance(module, nn.Conv2d):
            weight = module.weight
            expected = math.sqrt(2 / weight[0].numel())
            assert weight.std().item() == pytest.approx(expected, rel=5 / math.sqrt(2 * weight.numel()))


def test_zero_last_norm_makes_blocks_return_their_shortcut():
    torch.manual_seed(0)
    model = build_resnet(resnet_config("tiny-bottleneck"), zero_last_norm=True)
    block, x = model[2], torch.randn(2, 32, 8, 8)
    assert isinstance(block, Bottleneck)
    torch.testing.assert_close(block(x), block.downsample(x).relu())
    assert not any((b.last_norm.weight != 0).any() for b in model if isinstance(b, BasicBlock | Bottleneck))


@pytest.mark.parametrize("name", ["tiny", "tiny-bottleneck"])
@pytest.mark.parametrize("size", [(32, 32), (33, 65)])
def test_odd_image_sizes_and_memory_formats(name, size):
    model = build_resnet(resnet_config(name, classes=7)).eval()
    images = torch.randn(2, 3, *size)
    logits = model(images)
    assert logits.shape == (2, 7)
    torch.testing.assert_close(model(images.contiguous(memory_format=torch.channels_last)), logits)


def test_invalid_configurations_are_refused():
    with pytest.raises(ValueError, match="unknown model 'resnet5'; nearest: resnet50"):
        resnet_config("resnet5")
    with pytest.raises(ValueError, match=r"unknown model 'xyz' \(known: resnet18, "):
        resnet_config("xyz")
    with pytest.raises(ValueError, match="expected block basic or bottleneck, got 'wide'"):
        ResNetConfig("wide", (1, 1, 1, 1))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="four stages"):
        ResNetConfig("basic", (1, 1, 0, 1))

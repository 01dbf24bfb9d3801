"""The blocks of a model, by name."""

from __future__ import annotations

import torch
from torch import nn

from farandole.memory.blocks import blocks_of, group_by_block
from farandole.models.gpt import GPTConfig, build_gpt
from farandole.models.resnet import BasicBlock, build_resnet, resnet_config


def names(module: nn.Module) -> list[str]:
    blocks = blocks_of(module)
    assert all(module.get_submodule(name) is block for name, block in blocks)
    return [name for name, _ in blocks]


class Holder(nn.Module):
    def __init__(self, **parts: nn.Module) -> None:
        super().__init__()
        for name, part in parts.items():
            self.add_module(name, part)


def linear() -> nn.Module:
    return nn.Linear(2, 2)


def test_children_of_a_sequential() -> None:
    assert names(build_gpt(GPTConfig(vocabulary=8, context=4, layers=2, heads=1, width=4))) == [
        "0",
        "1",
        "2",
        "3",
    ]
    assert names(nn.Sequential(nn.Sequential(linear(), linear()), linear())) == ["0", "1"]


def test_members_of_the_outermost_lists() -> None:
    block = Holder(mlp=nn.Sequential(linear(), linear()))
    model = Holder(transformer=Holder(wte=linear(), h=nn.ModuleList([block, linear()]), ln=linear()))
    assert names(model) == ["transformer.h.0", "transformer.h.1"]
    assert names(Holder(a=nn.ModuleList([linear()]), b=nn.Sequential(linear()))) == ["a.0", "b.0"]


def test_members_of_containers_that_cannot_be_called() -> None:
    inner = nn.ModuleList([linear(), nn.ModuleDict({"x": linear()})])
    assert names(Holder(h=nn.ModuleList([inner, linear()]))) == ["h.0.0", "h.0.1.x", "h.1"]
    assert names(nn.ModuleDict({"t": nn.ModuleList([linear()])})) == ["t.0"]


def test_a_module_without_lists_is_its_own_block() -> None:
    for module in (linear(), nn.Sequential(), Holder(a=linear()), Holder(a=nn.ModuleList())):
        assert names(module) == [""]


def test_shared_blocks_appear_once() -> None:
    one = linear()
    assert names(nn.Sequential(one, nn.ReLU(), one)) == ["0", "1"]
    assert names(Holder(a=nn.ModuleList([one]), b=nn.ModuleList([one, linear()]))) == ["a.0", "b.1"]


def test_blocks_of_torch_and_of_meta_models() -> None:
    with torch.device("meta"):
        encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2), 3, enable_nested_tensor=False)
        resnet = build_resnet(resnet_config("resnet18"))
    assert names(encoder) == ["layers.0", "layers.1", "layers.2"]
    assert sum(isinstance(block, BasicBlock) for _, block in blocks_of(resnet)) == 8


class Tied(nn.Module):
    """Two blocks that share a weight, an embedding outside of the blocks, and a block without parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(3, 2)
        self.blocks = nn.ModuleList([nn.Linear(2, 2), nn.Tanh(), nn.Linear(2, 2), nn.Linear(2, 2)])
        self.blocks[2].weight = self.blocks[0].weight


def test_parameters_are_grouped_by_their_only_block() -> None:
    model = Tied()
    first, activation, third, last = model.blocks
    groups, needs = group_by_block(model)
    wanted = [
        [first.bias],
        [],
        [third.bias],
        [last.weight, last.bias],
        [model.embedding.weight, first.weight],
    ]
    assert [list(map(id, group)) for group in groups] == [list(map(id, group)) for group in wanted]
    assert needs == [(first, [0, 4]), (activation, []), (third, [2, 4]), (last, [3]), (model, [4])]
    alone = nn.Linear(2, 2)
    groups, needs = group_by_block(alone)
    assert list(map(len, groups)) == [2, 0] and needs == [(alone, [0])]

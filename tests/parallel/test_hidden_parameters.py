"""Parameters whose values are not on this rank: metadata can be read, and values cannot."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn

from farandole.parallel.zero.hidden_parameters import hide, is_hidden, show


@pytest.fixture
def hidden() -> Iterator[nn.Parameter]:
    parameter = nn.Parameter(torch.full((), torch.nan).expand(4, 3))
    hide(parameter, "0.weight")
    yield parameter
    show(parameter)
    assert type(parameter) is nn.Parameter


READS: dict[str, Callable[[nn.Parameter], object]] = {
    "square": lambda p: p.square(),
    "data": lambda p: p.data.sum(),
    "detach": lambda p: p.detach().clone(),
    "index": lambda p: p[0],
    "item": lambda p: float(p.max()),
    "T": lambda p: p.T,
    "lerp_": lambda p: torch.zeros(4, 3).lerp_(p.detach(), 0.5),
    "add_": lambda p: torch.zeros(4, 3).add_(p.data, alpha=0.5),
    "foreach": lambda p: torch._foreach_norm([p]),
    "parameters_to_vector": lambda p: nn.utils.parameters_to_vector([p]),
    "linear": lambda p: nn.functional.linear(torch.ones(2, 3), p),
    "init": nn.init.zeros_,
    "mul_": lambda p: p.data.mul_(2),
    "numpy": lambda p: p.detach().numpy(),
    "double": lambda p: p.double(),
    "deepcopy": copy.deepcopy,
    "pickle": pickle.dumps,
}


@pytest.mark.parametrize("read", READS)
def test_values_cannot_be_read_or_changed(hidden: nn.Parameter, read: str) -> None:
    with pytest.raises(
        RuntimeError, match=r"of 0\.weight: this rank has only its shard .* engine\.whole_param"
    ):
        READS[read](hidden)


def test_metadata_can_be_read(hidden: nn.Parameter) -> None:
    assert is_hidden(hidden) and isinstance(hidden, nn.Parameter) and is_hidden(hidden.data)
    assert (hidden.shape, hidden.ndim, len(hidden), hidden.numel(), hidden.nbytes) == ((4, 3), 2, 4, 12, 48)
    assert (hidden.dtype, hidden.device.type, hidden.data.size(1)) == (torch.float32, "cpu", 3)
    assert hidden.is_leaf and hidden.requires_grad and hidden.grad is None
    assert torch.is_floating_point(hidden) and not hidden.is_cuda
    assert torch.equal(torch.zeros_like(hidden), torch.zeros(4, 3))
    assert "0.weight" in repr(hidden) and "nan" not in f"{hidden}"
    hidden.grad = torch.ones(4, 3)
    torch.optim.AdamW([hidden]).zero_grad()
    assert hidden.grad is None


def test_conversions_that_change_nothing(hidden: nn.Parameter) -> None:
    module = nn.Linear(3, 4, bias=False)
    module.weight = hidden
    assert module.to("cpu").float().to(torch.float32).weight is hidden
    with pytest.raises(RuntimeError, match=r"engine\."):
        module.half()


def test_a_shown_parameter_has_values_again() -> None:
    parameter = nn.Parameter(torch.ones(3))
    hide(parameter, "weight")
    show(parameter)
    total: Tensor = parameter.sum()
    assert total == 3 and "name_of_hidden" not in vars(parameter)

"""The chunked cross-entropy, compared with torch's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from farandole.models import loss as module
from farandole.models.loss import head_loss, next_token_loss


@settings(max_examples=40, deadline=None)
@given(rows=st.integers(1, 40), vocabulary=st.integers(2, 70), outer=st.sampled_from([1.0, 0.25, 1024.0]))
def test_value_and_gradient_match_torch(rows: int, vocabulary: int, outer: float) -> None:
    torch.manual_seed(rows * 100 + vocabulary)
    logits = (3 * torch.randn(rows, vocabulary)).requires_grad_()
    targets = torch.randint(0, vocabulary, (rows,))
    reference = logits.detach().clone().requires_grad_()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "CHUNK_BYTES", 1 << 10)  # several chunks even for these sizes
        ours = next_token_loss(logits, targets)
        (ours * outer).backward()
    theirs = F.cross_entropy(reference, targets)
    (theirs * outer).backward()
    torch.testing.assert_close(ours, theirs)
    torch.testing.assert_close(logits.grad, reference.grad)


def test_bf16_gradients_are_rounded_from_fp32() -> None:
    torch.manual_seed(0)
    logits = torch.randn(4, 8, 33, dtype=torch.bfloat16, requires_grad=True)
    targets = torch.randint(0, 33, (4, 8))
    loss = next_token_loss(logits, targets)
    loss.backward()
    reference = logits.detach().float().requires_grad_()
    F.cross_entropy(reference.view(-1, 33), targets.view(-1)).backward()
    assert loss.dtype == torch.float32
    assert logits.grad is not None
    assert logits.grad.dtype == torch.bfloat16
    assert reference.grad is not None
    torch.testing.assert_close(logits.grad, reference.grad.bfloat16())


def test_value_is_the_same_without_gradients() -> None:
    logits, targets = torch.randn(5, 7), torch.randint(0, 7, (5,))
    with_gradient = next_token_loss(logits.clone().requires_grad_(), targets)
    torch.testing.assert_close(next_token_loss(logits, targets), with_gradient.detach())


@settings(max_examples=40, deadline=None)
@given(windows=st.integers(1, 6), positions=st.integers(1, 9), share=st.sampled_from([0.0, 0.2, 1.0]))
def test_sums_divided_by_counts_match_torchs_mean(windows: int, positions: int, share: float) -> None:
    torch.manual_seed(windows * 10 + positions)
    head = nn.Linear(5, 31)
    hidden = torch.randn(windows, positions, 5, requires_grad=True)
    targets = torch.where(torch.rand(windows, positions) < share, 7, -100)
    sums, count = [], 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "CHUNK_BYTES", 1 << 9)
        for part, wanted in zip(hidden.split(2), targets.split(2), strict=True):  # micro-batches
            total, some = head_loss(part, wanted, head.weight, head.bias, chunk_bytes=1 << 9)
            sums.append(total)
            count += some
        (torch.stack(sums).sum() / max(1, count)).backward()
    assert count == (targets >= 0).sum()
    got = [hidden.grad, head.weight.grad, head.bias.grad]
    assert all(gradient is not None for gradient in got)
    if count == 0:
        assert not any(gradient.any() for gradient in got if gradient is not None)
        return
    loss = F.cross_entropy(head(hidden).flatten(0, 1), targets.flatten())
    expected = torch.autograd.grad(loss, [hidden, head.weight, head.bias])
    for one, two in zip(got, expected, strict=True):
        torch.testing.assert_close(one, two)
    with torch.no_grad():
        total, _ = head_loss(hidden, targets, head.weight, head.bias)
    torch.testing.assert_close(total / count, loss.detach())


def test_head_sees_only_positions_with_a_target() -> None:
    rows: list[int] = []

    def before(x: torch.Tensor) -> torch.Tensor:
        rows.append(len(x))
        return x

    weight, targets = torch.randn(31, 5), torch.full((4, 10), -100)
    targets[1, 3] = targets[2, 9] = 0  # token 0 is a target
    _, count = head_loss(torch.randn(4, 10, 5), targets, weight, before=before)
    assert rows == [count] == [2]
    with pytest.raises(ValueError, match=r"\(4, 9, 5\) do not match targets \(4, 10\)"):
        head_loss(torch.randn(4, 9, 5), targets, weight)


@pytest.mark.parametrize("rows", [40, 9])  # in several chunks, and less than the width
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_head_loss_in_other_types(dtype: torch.dtype, rows: int) -> None:
    torch.manual_seed(0)
    hidden, weight = torch.randn(rows, 16), 0.2 * torch.randn(33, 16)
    targets = torch.randint(0, 33, (rows,))
    own = [each.to(dtype).requires_grad_() for each in (hidden, weight)]
    reference = [each.detach().double().requires_grad_() for each in own]
    total, count = head_loss(own[0], targets, own[1], chunk_bytes=33 * 2 * 9)
    scale = 1024.0 if dtype == torch.float16 else 1.0
    (total * scale / count).backward()
    expected = F.cross_entropy(reference[0] @ reference[1].T, targets)
    expected.backward()
    tolerance = {torch.float64: 1e-6, torch.bfloat16: 2e-2, torch.float16: 3e-3}[dtype]
    assert total.item() / count == pytest.approx(expected.item(), rel=tolerance)
    for got, wanted in zip(own, reference, strict=True):
        assert got.grad is not None and wanted.grad is not None
        error = (got.grad.double() / scale - wanted.grad).norm() / wanted.grad.norm()
        assert error < tolerance


class _Largest(TorchDispatchMode):
    """Records the bytes of the largest tensor that an operation creates."""

    def __init__(self) -> None:
        super().__init__()
        self.nbytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and not func.is_view:
            self.nbytes = max(self.nbytes, result.nbytes)
        return result


def test_memory_of_the_head_loss_does_not_grow_with_the_number_of_positions() -> None:
    hidden, weight = torch.randn(2000, 8), torch.randn(5000, 8, requires_grad=True)
    with _Largest() as largest:
        head_loss(hidden, torch.zeros(2000, dtype=torch.int64), weight, chunk_bytes=1 << 20)[0].backward()
    assert largest.nbytes <= 1 << 20  # all logits are 40 MB


def test_gradient_of_the_weight_is_computed_in_the_backward_pass_if_there_are_few_targets() -> None:
    hidden, weight = torch.randn(100, 64), torch.randn(1000, 64, requires_grad=True)
    targets = torch.full((100,), -100)
    targets[:15] = 1
    with _Largest() as largest:
        total, _ = head_loss(hidden, targets, weight)
    assert largest.nbytes == 15 * 1000 * 4  # the logits; the gradient of the weight has 256,000 bytes
    total.backward()
    assert weight.grad is not None


def test_factor_is_not_rounded_to_bf16() -> None:
    logits = torch.randn(7, 33, dtype=torch.bfloat16, requires_grad=True)
    targets = torch.randint(0, 33, (7,))
    loss = next_token_loss(logits, targets)
    factor = 1 + 3 * 2**-10  # rounds to 1 in bf16
    (plain,) = torch.autograd.grad(loss, logits, retain_graph=True)
    (scaled,) = torch.autograd.grad(loss * factor, logits)
    assert torch.equal(scaled, (plain.float() * factor).bfloat16())
    assert not torch.equal(scaled, plain)

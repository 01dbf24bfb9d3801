"""The cross-entropy in pieces against torch's own."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from farandole.models import loss as module
from farandole.models.loss import next_token_loss


@settings(max_examples=40, deadline=None)
@given(rows=st.integers(1, 40), vocabulary=st.integers(2, 70), outer=st.sampled_from([1.0, 0.25, 1024.0]))
def test_value_and_gradient_are_those_of_torch(rows: int, vocabulary: int, outer: float) -> None:
    torch.manual_seed(rows * 100 + vocabulary)
    logits = (3 * torch.randn(rows, vocabulary)).requires_grad_()
    targets = torch.randint(0, vocabulary, (rows,))
    reference = logits.detach().clone().requires_grad_()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "PIECE_BYTES", 1 << 10)  # several pieces even here
        ours = next_token_loss(logits, targets)
        (ours * outer).backward()
    theirs = F.cross_entropy(reference, targets)
    (theirs * outer).backward()
    torch.testing.assert_close(ours, theirs)
    torch.testing.assert_close(logits.grad, reference.grad)


def test_bf16_logits_get_bf16_gradients_of_fp32_quality() -> None:
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


def test_without_gradients_the_value_is_the_same() -> None:
    logits, targets = torch.randn(5, 7), torch.randint(0, 7, (5,))
    with_gradient = next_token_loss(logits.clone().requires_grad_(), targets)
    torch.testing.assert_close(next_token_loss(logits, targets), with_gradient.detach())

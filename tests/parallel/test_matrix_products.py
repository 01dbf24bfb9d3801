"""Matrix products in fp32 with oneDNN, whose kernels are replaced in a separate process."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from farandole.bench.resident import peak_bytes, start_peak
from farandole.parallel.matrix_products import multiplies_faster_with_onednn, replace_kernels
from farandole.parallel.processor import Processor
from tests.forking import CONTEXT

pytestmark = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="torch has no oneDNN")

Run = Callable[..., Any]


@pytest.fixture(scope="module")
def replaced() -> Iterator[Run]:
    """Yield a function that calls another function in a process with replaced kernels."""
    with ProcessPoolExecutor(1, CONTEXT, initializer=_prepare) as pool:
        yield lambda function, *arguments: pool.submit(function, *arguments).result()


def _prepare() -> None:
    torch.set_num_threads(1)
    replace_kernels()


def _layouts(rows: int, columns: int) -> Iterator[Tensor]:
    """Yield random matrices with every kind of strides."""
    yield torch.randn(rows, columns)
    yield torch.randn(columns, rows).t()
    yield torch.randn(rows, columns + 5)[:, 2:-3]
    yield torch.randn(2 * rows, columns)[::2]
    yield torch.randn(rows, 2 * columns)[:, ::2]
    yield torch.randn(rows, 1).expand(rows, columns)
    yield torch.randn(1, columns).expand(rows, columns)
    yield torch.randn(()).expand(rows, columns)


def _check(rows: int, inner: int, columns: int) -> None:
    for a, b in itertools.product(_layouts(rows, inner), _layouts(inner, columns)):
        bias, total = torch.randn(columns), torch.randn(rows, columns)
        exact = a.double() @ b.double()
        for found, expected in (
            (a @ b, exact),
            (torch.addmm(bias, a, b), exact + bias),
            (torch.addmm(total, a, b, beta=2, alpha=3), 2 * total + 3 * exact),
            (torch.addmm(bias[:1], a, b), exact + bias[:1]),
            (total.clone().addmm_(a, b), total + exact),
            (total.t().clone().t().addmm_(a, b), total + exact),
        ):
            # every element has a rounding error of a few times 2^-24 per addition
            torch.testing.assert_close(found.double(), expected.double(), rtol=1e-5, atol=2e-6 * inner)


@pytest.mark.parametrize(
    "sizes", [(256, 64, 256), (3000, 7, 201), (4500, 256, 9), (3, 5, 7), (0, 4, 8), (4, 0, 8)]
)
def test_products_are_exact_up_to_rounding_for_all_strides(
    replaced: Run, sizes: tuple[int, int, int]
) -> None:
    replaced(_check, *sizes)


def _operators() -> list[str]:
    with torch.profiler.profile() as profile:
        x = torch.randn(4, 64, 256, requires_grad=True)
        layer = nn.Linear(256, 512)
        layer(x).square().sum().backward()
        with torch.backends.mkldnn.flags(enabled=False):
            layer(x)
        layer(x[:, :1])
        layer.double()(x.double())
    return [event.name for event in profile.events() if event.name == "mkldnn::_linear_pointwise"]


def test_large_products_use_onednn_unless_it_is_disabled(replaced: Run) -> None:
    assert len(replaced(_operators)) == 3  # the output and the gradients of the weight and the input


def _gradients() -> list[list[float]]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64, bias=False))
    x, target = torch.randn(512, 64), torch.randn(512, 64)
    found = []
    for enabled in (True, False):
        model.zero_grad()
        with torch.backends.mkldnn.flags(enabled=enabled):
            F.mse_loss(model(x), target).backward()
        found.append([float(p.grad.norm()) for p in model.parameters() if p.grad is not None])
    return found


def _temporary_bytes() -> int:
    gradient, inputs = torch.randn(64, 64 << 10), torch.randn(64, 32)  # 16 MiB, and 8 MiB of the result
    gradient.t() @ inputs  # creates the kernel
    start_peak()
    before = peak_bytes()
    result = gradient.t() @ inputs
    return peak_bytes() - before - result.nbytes


@pytest.mark.skipif(sys.platform != "linux", reason="reads the memory from /proc")
def test_the_gradient_of_a_large_weight_needs_little_temporary_memory(replaced: Run) -> None:
    assert replaced(_temporary_bytes) < 6 << 20  # a copy of the gradient of the output has 16 MiB


def test_gradients_equal_those_of_torch(replaced: Run) -> None:
    ours, torchs = replaced(_gradients)
    assert ours == pytest.approx(torchs, rel=1e-5)


def test_wrong_shapes_raise_the_errors_of_torch(replaced: Run) -> None:
    with pytest.raises(RuntimeError, match="cannot be multiplied"):
        replaced(torch.mm, torch.randn(256, 256), torch.randn(128, 256))


@pytest.mark.parametrize(
    ("processor", "faster"),
    [
        (Processor("AuthenticAMD", 26, frozenset({"avx512f"})), True),
        (Processor("AuthenticAMD", 26, frozenset({"avx2"})), False),
        (Processor("AuthenticAMD", 25, frozenset({"avx512f"})), False),
        (Processor("GenuineIntel", 6, frozenset({"avx512f"})), False),
        (Processor(), False),
    ],
)
def test_the_choice_depends_on_the_processor(processor: Processor, faster: bool) -> None:
    assert multiplies_faster_with_onednn(processor) == faster

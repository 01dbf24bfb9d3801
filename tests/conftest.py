"""What all tests share: ranks from the pool, and a collector that leaves alone what was there before the first test."""

from __future__ import annotations

import gc
import signal
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import pytest

from tests import torchvision_models  # noqa: F401 - before transformers is imported

if TYPE_CHECKING:
    from tests.pool import Pool, Ranks

gc.disable()  # while torch and the tests are imported there is no garbage


def pytest_collection_finish() -> None:
    """All modules are there."""
    gc.freeze()
    gc.enable()


@pytest.fixture(scope="session", autouse=True)
def default_sigint() -> Iterator[None]:
    """Let Ctrl-C interrupt the session and its child processes, even if SIGINT was inherited as ignored.

    SIGINT is ignored under nohup and in the background jobs of a shell, and a child process inherits that.
    """
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    """Compute in one thread, as the ranks of the pool do.

    The results are those of a rank to the bit.  The idle threads of OpenMP would spin on the cores that the ranks
    and the other sessions of xdist need.
    """
    import torch

    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    """The processes of the session."""
    from tests.pool import Pool

    pool = Pool()
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def ranks(pool: Pool) -> Callable[..., Ranks]:
    """`ranks(n).run(function, *args)` calls function(rank, size, *args) in n processes; see `tests/pool.py`.

    `ranks(n, "gloo")` asks for another backend than the package's own.
    """
    from tests.pool import Ranks

    def borrow(size: int, backend: str | None = None) -> Ranks:
        return Ranks(pool, size, backend or "farandole")

    return borrow

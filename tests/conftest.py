"""What all tests share: ranks from the pool, and a collector that leaves alone what was there before the first test."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.pool import Pool, Ranks

gc.disable()  # while torch and the tests are imported there is no garbage


def pytest_collection_finish() -> None:
    """All modules are there."""
    gc.freeze()
    gc.enable()


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

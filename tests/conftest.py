"""What all tests share: ranks from the pool."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.pool import Pool, Ranks


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    """The processes of the session."""
    pool = Pool()
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def ranks(pool: Pool) -> Callable[..., Ranks]:
    """`ranks(n).run(function, *args)` calls function(rank, size, *args) in n processes; see `tests/pool.py`.

    `ranks(n, "gloo")` asks for another backend than the package's own.
    """

    def borrow(size: int, backend: str | None = None) -> Ranks:
        return Ranks(pool, size, backend or "farandole")

    return borrow

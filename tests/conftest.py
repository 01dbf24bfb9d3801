"""Shared fixtures: ranks from the pool, one thread, and no garbage collection of imported modules."""

from __future__ import annotations

import gc
import os
import shutil
import signal
import tempfile
from collections.abc import Callable, Iterator
from multiprocessing.util import Finalize
from typing import TYPE_CHECKING

import pytest

from tests import torchvision_models  # noqa: F401 - before transformers is imported

if TYPE_CHECKING:
    from tests.pool import Pool, Ranks

# All processes compute in one thread, so that results are bitwise equal, and no idle thread of OpenMP spins on a core
# that other processes need.  OpenMP reads the variable when torch is loaded, and applies it to all threads.
os.environ["OMP_NUM_THREADS"] = "1"

gc.disable()  # importing torch and the tests produces no garbage


def pytest_configure(config: pytest.Config) -> None:
    """Keep the temporary files of all processes in one folder, because libraries and killed processes leave theirs."""
    if hasattr(config, "workerinput"):
        return  # a worker of pytest-xdist, which has inherited the folder
    usual, folder = tempfile.gettempdir(), tempfile.mkdtemp(prefix="tests-")
    os.chmod(folder, 0o755)  # some tests become another user
    os.environ["TMPDIR"] = tempfile.tempdir = folder
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", usual)  # pytest removes older `tmp_path` folders itself
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", f"{usual}/torchinductor")  # used again by later sessions
    # after multiprocessing has removed its own folder, which has priority -100
    Finalize(None, shutil.rmtree, (folder,), {"ignore_errors": True}, exitpriority=-101)


def pytest_collection_finish() -> None:
    """Exclude the objects of all imported modules from garbage collection."""
    gc.freeze()
    gc.enable()


@pytest.fixture(scope="session", autouse=True)
def default_sigint() -> Iterator[None]:
    """Let Ctrl-C interrupt the session and its child processes, even if SIGINT was inherited as ignored.

    A shell's background job ignores SIGINT, and child processes inherit this setting.
    """
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    """Yield the process pool of the session."""
    from tests.pool import Pool

    pool = Pool()
    yield pool
    pool.close(patience_s=10)


@pytest.fixture(scope="session")
def ranks(pool: Pool) -> Callable[..., Ranks]:
    """Return a function such that `ranks(n).run(function, *args)` calls `function(rank, size, *args)` in n processes.

    `ranks(n, "gloo")` uses Gloo instead of the package's own backend (see `tests/pool.py`).  A test with another size
    or backend than the previous test changes the process group, so the last `parametrize` of a test, which varies most
    slowly, has the size and the backend.
    """
    from tests.pool import Ranks

    def world(size: int, backend: str | None = None) -> Ranks:
        return Ranks(pool, size, backend or "farandole")

    return world

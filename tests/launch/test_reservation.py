"""Test that jobs of a host see each other's reservations, and that reservations end with their jobs."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Iterator

import pytest

from farandole.launch.cores import CoreReservation
from tests.launch.jobs import LIMIT_S, environment, finish, ours, start, wait_for_lines, write

pytestmark = pytest.mark.skipif(
    sys.platform != "linux", reason="reservations are names in Linux's abstract sockets"
)

FAR = range(100_000, 100_004)
"""Processors that no machine has, because jobs of other tests reserve real processors."""

HOLD = """
import sys, time
from farandole.launch.cores import CoreReservation
reservation = CoreReservation()
reservation.reserve(range(100_000, 100_002))
print(sorted(reservation.held), flush=True)
time.sleep(60)
"""

RESERVE_AS_NOBODY = """
import os
from farandole.launch.cores import CoreReservation
os.setuid(65534)
reservation = CoreReservation()
reservation.reserve(range(100_000, 100_004))
print(reservation.reserved_by_others)
"""

WAIT = """
import os, sys, time
with open(sys.argv[1], "a") as file:
    file.write(f"{sorted(os.sched_getaffinity(0))}\\n")
time.sleep(60)
"""


@pytest.fixture
def reserve() -> Iterator[Callable[[Collection[int]], CoreReservation]]:
    """Return a function that reserves processors until the test ends."""
    made = []

    def make(processors: Collection[int]) -> CoreReservation:
        made.append(CoreReservation())
        made[-1].reserve(processors)
        return made[-1]

    yield make
    for reservation in made:
        reservation.release()


def test_a_second_job_reserves_released_processors(reserve):
    first = reserve(FAR)
    first.keep_only(FAR[:2])
    second = reserve(FAR)
    assert (second.held, second.reserved_by_others) == (frozenset(FAR[2:]), set(FAR[:2]))


def test_the_kernel_releases_the_reservation_of_a_killed_job(reserve):
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLD], stdout=subprocess.PIPE, text=True, env=environment()
    )
    assert holder.stdout is not None
    assert holder.stdout.readline() == "[100000, 100001]\n"
    second = reserve(FAR)
    assert second.reserved_by_others == {100_000, 100_001}
    second.release()
    holder.kill()
    holder.communicate()
    assert reserve(FAR).held == frozenset(FAR)


@pytest.mark.skipif(os.getuid() != 0, reason="needs a second user")
def test_another_user_sees_reservations(reserve):
    reserve(FAR[:2])
    other = subprocess.run(
        [sys.executable, "-c", RESERVE_AS_NOBODY], capture_output=True, text=True, env=environment()
    )
    assert other.stdout == "{100000, 100001}\n", other.stderr


def test_a_job_that_cannot_see_reservations_keeps_the_error(reserve):
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    with open(os.devnull) as file:
        lowest_free = file.fileno()
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest_free + 1, limits[1]))
    try:
        reservation = reserve(FAR)
        assert "Too many open files" in str(reservation.error)
        assert reservation.reserved_by_others == set()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def _start_pinned(program, path):
    """Start a job that gets both cores; retry, because jobs of other tests may reserve the cores for seconds."""
    deadline = time.monotonic() + LIMIT_S
    while time.monotonic() < deadline:
        job = start(ours("-n", "2", program, str(path)))
        if set(wait_for_lines(path, 2)) == {"[0]", "[1]"}:
            return job
        job.kill()
        job.communicate()
        path.unlink()
    raise AssertionError(f"no job got both cores within {LIMIT_S} s")


def test_two_jobs_do_not_take_the_same_cores(tmp_path):
    """The second job does not pin while the first job has reserved every core; the third job pins afterwards."""
    if os.sched_getaffinity(0) != {0, 1}:
        pytest.skip("needs exactly the cores 0 and 1")
    program = write(tmp_path, WAIT)
    first = _start_pinned(program, tmp_path / "first")
    second = start(ours("-n", "2", program, str(tmp_path / "second")))
    assert set(wait_for_lines(tmp_path / "second", 2)) == {"[0, 1]"}
    second.send_signal(signal.SIGTERM)
    assert "not pinned: other jobs have reserved 2 cores" in finish(second)[2]
    first.kill()
    first.communicate()
    third = _start_pinned(program, tmp_path / "third")
    third.kill()
    third.communicate()

"""Two jobs of a host see each other's processors, whatever becomes of the jobs."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import time

import pytest

from farandole.launch.claims import claim
from tests.launch.jobs import LIMIT_S, environment, finish, ours, start, wait_for_lines, write

pytestmark = pytest.mark.skipif(
    sys.platform != "linux", reason="claims are names in Linux's abstract sockets"
)

FAR = range(100_000, 100_004)
"""Processors that no machine has: the jobs of other tests claim the real ones."""

HOLD = """
import sys, time
from farandole.launch.claims import claim
with claim(range(100_000, 100_002)) as claims:
    print(sorted(claims.held), flush=True)
time.sleep(60)
"""

LOOK_AS_NOBODY = """
import os
from farandole.launch.claims import claim
os.setuid(65534)
with claim(range(100_000, 100_004)) as claims:
    print(claims.taken)
"""

WAIT = """
import os, sys, time
with open(sys.argv[1], "a") as file:
    file.write(f"{sorted(os.sched_getaffinity(0))}\\n")
time.sleep(60)
"""


def test_what_one_job_holds_another_finds_taken():
    with claim(FAR) as first:
        first.keep(FAR[:2])
    with claim(FAR) as second:
        assert (second.held, second.taken) == (frozenset(FAR[2:]), set(FAR[:2]))
    first.close()
    second.close()


def test_the_kernel_takes_back_what_a_killed_job_held():
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLD], stdout=subprocess.PIPE, text=True, env=environment()
    )
    assert holder.stdout is not None
    assert holder.stdout.readline() == "[100000, 100001]\n"
    with claim(FAR) as claims:
        assert claims.taken == {100_000, 100_001}
    claims.close()
    holder.kill()
    holder.communicate()
    with claim(FAR) as claims:
        assert claims.held == frozenset(FAR)
    claims.close()


@pytest.mark.skipif(os.getuid() != 0, reason="needs a second user")
def test_another_user_sees_them_too():
    with claim(FAR[:2]) as claims:
        pass
    told = subprocess.run(
        [sys.executable, "-c", LOOK_AS_NOBODY], capture_output=True, text=True, env=environment()
    )
    claims.close()
    assert told.stdout == "{100000, 100001}\n", told.stderr


def test_a_launcher_that_cannot_see_says_so():
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    with open(os.devnull) as file:
        lowest_free = file.fileno()
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest_free + 2, limits[1]))
    try:
        with claim(FAR) as claims:
            assert "Too many open files" in str(claims.blind)
            assert claims.taken == set()
        claims.close()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def _start_pinned(program, path):
    """A job that got both cores: jobs of other tests hold them now and then, for seconds."""
    deadline = time.monotonic() + LIMIT_S
    while time.monotonic() < deadline:
        job = start(ours("-n", "2", program, str(path)))
        if set(wait_for_lines(path, 2)) == {"[0]", "[1]"}:
            return job
        job.kill()
        job.communicate()
        path.unlink()
    raise AssertionError(f"no job was given both cores within {LIMIT_S} s")


def test_two_jobs_do_not_take_the_same_cores(tmp_path):
    """The second does not pin where the first has every core; when it is gone the third does."""
    if os.sched_getaffinity(0) != {0, 1}:
        pytest.skip("the numbers below are those of two cores")
    program = write(tmp_path, WAIT)
    first = _start_pinned(program, tmp_path / "first")
    second = start(ours("-n", "2", program, str(tmp_path / "second")))
    assert set(wait_for_lines(tmp_path / "second", 2)) == {"[0, 1]"}
    second.send_signal(signal.SIGTERM)
    assert "not pinned: other jobs keep 2 of them for their ranks" in finish(second)[2]
    first.kill()
    first.communicate()
    third = _start_pinned(program, tmp_path / "third")
    third.kill()
    third.communicate()

"""Test the limits on the number of ranks, the warning for many ranks, and the message for a kill for lack of memory."""

from __future__ import annotations

import os
import re
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from farandole.launch.control_groups import MOUNT
from farandole.launch.limits import oversubscription_warning
from tests.launch.jobs import ours, run, write

EAT = """
import os
import farandole
with farandole.init() as runtime:
    if runtime.rank == 1:
        eaten = [b"x" * (1 << 24) for _ in range(128)]  # two GiB
    runtime.comm.barrier()
"""

KILL = """
import os, signal, time
if os.environ["RANK"] == "1":
    os.kill(os.getpid(), signal.SIGKILL)
time.sleep(60)
"""

MIB = 1 << 20


@pytest.fixture
def memory_group(request: pytest.FixtureRequest) -> Iterator[Path]:
    """Create an empty control group with a memory limit of 700 MiB, or of the parameter in MiB."""
    first_version = MOUNT / "memory"
    group = (first_version if first_version.is_dir() else MOUNT) / f"farandole-test-{uuid.uuid4().hex[:8]}"
    try:
        group.mkdir()
    except OSError as error:
        pytest.skip(f"no memory control group can be made here: {error}")
    try:
        limit = group / ("memory.limit_in_bytes" if first_version.is_dir() else "memory.max")
        if not limit.exists():
            pytest.skip("the control groups here do not limit memory")
        limit.write_text(str(getattr(request, "param", 700) * MIB))
        yield group
    finally:
        group.rmdir()


def inside(group: Path, *command: str) -> list[str]:
    return ["sh", "-c", f'echo $$ > {group}/cgroup.procs && exec "$@"', "sh", *command]


@pytest.mark.parametrize(
    "memory_group", [1300], indirect=True
)  # enough for rank 1 to become the largest process
def test_the_message_for_a_rank_that_the_kernel_killed_for_memory(tmp_path, memory_group):
    status, _, err = run(inside(memory_group, *ours("-n", "2", write(tmp_path, EAT))))
    assert status == 128 + 9
    assert "was killed by SIGKILL\nThe kernel killed the rank because memory ran out" in err


def test_the_message_for_a_rank_that_a_user_killed(tmp_path, memory_group):
    status, _, err = run(inside(memory_group, *ours("-n", "2", write(tmp_path, KILL))))
    assert status == 128 + 9
    assert "sent the signal (kill -9)" in err


def test_the_memory_of_a_control_group_limits_the_ranks(tmp_path, memory_group):
    status, _, err = run(inside(memory_group, *ours("-n", "16", write(tmp_path, ""))))
    assert status == 2
    assert "--ranks 16: the ranks need 2.2 GiB of memory for Python and torch alone (140 MiB each)" in err
    assert "use at most --ranks 4" in err


@pytest.mark.parametrize(
    ("limit", "ranks", "message"),
    [
        ("ulimit -n 100", "60", "may open only 100 files (ulimit -n); use at most --ranks 36"),
        ("true", "1000000", "of memory for Python and torch alone"),
    ],
)
def test_too_many_ranks_are_refused(tmp_path, limit, ranks, message):
    shell = ["sh", "-c", f'{limit} && exec "$@"', "sh"]
    status, out, err = run([*shell, *ours("-n", ranks, write(tmp_path, ""))])
    assert status == 2
    assert message in err
    assert len(err.splitlines()) == 1


def test_many_ranks_per_core_cause_a_warning():
    assert oversubscription_warning(8, 2) is None
    warning = oversubscription_warning(100, 2)
    assert warning is not None
    assert warning.startswith(
        "warning: 100 ranks on 2 cores take about 100 s and 13.7 GiB of memory to start"
    )
    assert warning.endswith("use --ranks 2 for one rank per core")


def test_many_ranks_per_core_run_with_a_warning(tmp_path):
    ranks = str(4 * (os.cpu_count() or 1) + 1)
    if int(ranks) > 17:
        pytest.skip("too many processes for a quick test")
    status, out, err = run(ours("-n", ranks, write(tmp_path, "import os\nprint(os.environ['RANK'])\n")))
    assert status == 0
    assert sorted(map(int, out.split())) == list(range(int(ranks)))
    assert re.search(r"not pinned: .*\nwarning: ", err)

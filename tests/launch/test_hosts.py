"""Test jobs on several hosts that are started from one host; network namespaces of this machine simulate hosts."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from benchmarks import namespaces
from farandole.launch.hosts import Host, assign_ranks, is_this_host, parse_hosts, read_hostfile
from farandole.launch.placement import LaunchError
from farandole.launch.remote import RemoteShell
from tests.launch.jobs import Job, all_ended, finish, ours, run, start, wait_for_lines, write

HELLO = """
import os, sys
import farandole
for backend in sys.argv[1:]:
    with farandole.init(backend) as runtime:
        import torch
        total = torch.ones(1) * (runtime.rank + 1)
        runtime.comm.all_reduce(total)
        network = os.readlink("/proc/self/ns/net")
        row = (backend, runtime.rank, runtime.size, runtime.local_rank, runtime.local_size, int(total), network)
        sys.stdout.write("|".join(map(str, row)) + "\\n")
"""

WAIT = """
import os, sys, time
pids = sys.argv[1] + "/pids"
with open(pids, "a") as file:
    file.write(f"{os.getpid()}\\n")
while len(open(pids).readlines()) < 3:
    time.sleep(0.01)
if sys.argv[2] == "raise" and os.environ["RANK"] == "2":
    raise ValueError("on the other host")
time.sleep(100)
"""


@dataclass(frozen=True)
class TwoHosts:
    """Two connected network namespaces; jobs are started in the first."""

    first: namespaces.Host
    second: namespaces.Host

    def start(self, *arguments: str, ignored: Collection[int] = ()) -> Job:
        """Start `farandole launch` with one rank on the first host and two ranks on the second host."""
        command = ours("--hosts", f"localhost:1,{self.second.name}:2", *arguments)
        return start(command, ignored=ignored, enter=self.first.enter, FARANDOLE_REMOTE_SHELL="ip netns exec")


@pytest.fixture(scope="module")
def two_hosts() -> Iterator[TwoHosts]:
    if (reason := namespaces.why_not()) is not None:
        pytest.skip(reason)
    with namespaces.two_hosts() as (first, second):
        yield TwoHosts(first, second)


def test_ranks_on_two_hosts_reduce(tmp_path, two_hosts):
    status, out, err = finish(two_hosts.start("--verbose", write(tmp_path, HELLO), "farandole", "gloo"))
    assert status == 0, err
    for backend in ("farandole", "gloo"):
        rows = sorted(line.split("|")[1:] for line in out.splitlines() if line.startswith(backend))
        assert [row[:5] for row in rows] == [
            ["0", "3", "0", "1", "6"],
            ["1", "3", "0", "2", "6"],
            ["2", "3", "1", "2", "6"],
        ]
        assert rows[0][5] != rows[1][5] == rows[2][5]
    second = two_hosts.second.name
    assert f"{second}: 2 ranks, started by ip netns exec {second} env" in err
    assert f"{second}: 2 ranks on" in err


def test_a_named_interface(tmp_path, two_hosts):
    first, second = two_hosts.first, two_hosts.second
    status, _, err = finish(two_hosts.start("--nics", first.interface, write(tmp_path, HELLO), "gloo"))
    assert status == 2
    assert f"on {second.name}: --network-interface {first.interface}: this host" in err
    assert f"choose from: lo (127.0.0.1), {second.interface} ({second.address})" in err


def test_a_failure_on_another_host_is_reported_once(tmp_path, two_hosts):
    status, _, err = finish(two_hosts.start(write(tmp_path, WAIT), str(tmp_path), "raise"))
    assert status == 1
    assert err.count("ValueError: on the other host") == 1
    assert "rank 2 (pid" in err
    assert err.splitlines()[-1] == f"the job ended on {two_hosts.second.name} with exit status 1"
    assert all_ended([int(line) for line in wait_for_lines(tmp_path / "pids", 3)])


@pytest.mark.parametrize(("ignored", "number"), [([], signal.SIGINT), ([signal.SIGHUP], signal.SIGKILL)])
def test_all_processes_end_when_the_job_is_stopped(tmp_path, two_hosts, ignored, number):
    job = two_hosts.start(write(tmp_path, WAIT), str(tmp_path), "wait", ignored=ignored)
    pids = [int(line) for line in wait_for_lines(tmp_path / "pids", 3)]
    for each in ignored:
        job.send_signal(each)
        assert not all_ended(pids, 0.5)
    job.send_signal(number)
    _, _, err = finish(job)
    if number == signal.SIGINT:
        assert job.returncode == 128 + number
        assert err.splitlines()[-1] == "stopped by Ctrl-C (SIGINT)"
        assert err.count("stopped by") == 1
    assert all_ended(pids)


def test_names_of_this_host_need_no_remote_shell(tmp_path):
    command = ours("-np", "3", "-H", "localhost:2,127.0.0.1:2", write(tmp_path, HELLO), "gloo")
    status, out, err = run(command, FARANDOLE_REMOTE_SHELL="false")
    assert status == 0, err
    assert sorted(line.split("|")[1:6] for line in out.splitlines()) == [
        ["0", "3", "0", "2", "6"],
        ["1", "3", "1", "2", "6"],
        ["2", "3", "0", "1", "6"],
    ]


def test_a_host_that_cannot_be_reached(tmp_path):
    shell = write(tmp_path, "#!/bin/sh\necho no route to $1 >&2\nexit 255\n", "shell")
    Path(shell).chmod(0o755)
    started = time.monotonic()
    status, _, err = run(ours("-H", "localhost,far-away", "--remote-shell", shell, write(tmp_path, HELLO)))
    assert status == 255
    assert "no route to far-away" in err
    assert "the remote shell could not connect to far-away" in err
    assert time.monotonic() - started < 30


def test_a_host_without_this_python(tmp_path):
    shell = write(tmp_path, '#!/bin/sh\nshift 3\nexec env /no/such/python "$@"\n', "shell")
    Path(shell).chmod(0o755)
    status, _, err = run(ours("-H", "bare", "--remote-shell", shell, write(tmp_path, HELLO)))
    assert status == 127
    assert f"bare has no {sys.executable}; install the same Python" in err


def test_missing_hosts_are_reported_after_the_timeout(tmp_path):
    shell = write(tmp_path, "#!/bin/sh\nexec cat > /dev/null\n", "shell")
    Path(shell).chmod(0o755)
    command = ours("-H", "localhost,slow", "--start-timeout", "1", write(tmp_path, HELLO))
    status, _, err = run(command, FARANDOLE_REMOTE_SHELL=shell)
    assert status == 2
    assert "some are missing after 1 s: node 1" in err


def test_a_remote_shell_that_does_not_exist(tmp_path):
    status, _, err = run(ours("-H", "far-away", "--remote-shell", "no-such-shell", write(tmp_path, HELLO)))
    assert status == 2
    assert "cannot run 'no-such-shell' to reach far-away: No such file or directory" in err


def test_a_hostfile_is_read(tmp_path):
    file = tmp_path / "hosts"
    file.write_text("# the cluster\nnode0 slots=4\n\nnode1:2  # the small one\nnode2\n")
    hosts = read_hostfile(file)
    assert hosts == [Host("node0", 4), Host("node1", 2), Host("node2", 1)]
    assert assign_ranks(hosts, None) == hosts
    assert assign_ranks(hosts, 5) == [Host("node0", 4), Host("node1", 1)]


def test_a_hostfile_must_be_utf_8(tmp_path):
    file = tmp_path / "hosts"
    file.write_bytes(b"node0 slots=4\n\xff")
    with pytest.raises(LaunchError, match="hosts: byte 14 is not UTF-8; save"):
        read_hostfile(file)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a:0", "'a:0' is not HOST:SLOTS"),
        ("a:2,,b", "'' is not HOST:SLOTS"),
        ("-oProxyCommand=x:2", "is not HOST:SLOTS"),
        ("a:2,a:3", "duplicate hosts a;"),
    ],
)
def test_invalid_hosts_are_refused(text, message):
    with pytest.raises(LaunchError, match=message):
        parse_hosts(text)


def test_too_many_ranks_for_the_hosts():
    with pytest.raises(LaunchError, match=r"--ranks 7: the hosts have only 6 slots in total \(a:4, b:2\)"):
        assign_ranks(parse_hosts("a:4,b:2"), 7)


def test_names_of_this_host_are_recognized():
    assert is_this_host("localhost")
    assert is_this_host("127.0.0.1")
    assert not is_this_host("192.0.2.77")  # an address that is reserved for documentation


def test_options_are_passed_to_ssh_only():
    words = RemoteShell("ssh", 2222, Path("/keys/id")).command_on("node1", ["env", "A=b c", "python"])
    assert words == [
        *("ssh", "-o", "BatchMode=yes", "-p", "2222", "-i", "/keys/id", "node1"),
        *("env", "'A=b c'", "python"),
    ]
    with pytest.raises(LaunchError, match="--remote-shell is empty"):
        RemoteShell("").command_on("node1", ["true"])
    with pytest.raises(LaunchError, match="the remote shell is 'rsh'"):
        RemoteShell("rsh", 2222).command_on("node1", ["true"])

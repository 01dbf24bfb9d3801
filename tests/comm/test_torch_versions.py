"""Versions of torch other than the version with which the tests usually run."""

from __future__ import annotations

import itertools
import json
import logging
import os
import subprocess
import sys
from collections.abc import Iterable
from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d

from farandole import _torch_versions
from farandole.comm.backend import default_backend

# ---- a torch that lacks what registration needs ----

IMPORT_TORCH = """
import torch, torch.distributed as dist
{change}
torch._import_device_backends()  # what `import torch` does last
print("imported")
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
dist.destroy_process_group()
print("gloo works")
dist.init_process_group({backend!r}, store=dist.HashStore(), rank=0, world_size=1)
"""

OTHER_ARGUMENTS = """
register = dist.Backend.register_backend
def refuse(name, *args, **options):
    if "farandole" in name:
        raise TypeError(f"register_backend() got unexpected arguments {sorted(options)}")
    return register(name, *args, **options)
dist.Backend.register_backend = refuse
"""

BROKEN = {
    "other arguments": (
        OTHER_ARGUMENTS,
        "TypeError: register_backend() got unexpected arguments ['devices', ",
    ),
    "no function": ("del dist.register_rendezvous_handler", "has no attribute 'register_rendezvous_handler'"),
}


RUN_FORKS = """
import json, os, sys, traceback
import torch, torch.distributed

results = []
for program in json.load(sys.stdin):
    files = [os.memfd_create(name) for name in ("out", "err")]
    pid = os.fork()
    if pid == 0:
        for number, file in enumerate(files, 1):
            os.dup2(file, number)
        status = 0
        try:
            exec(program, {})
        except BaseException:
            traceback.print_exc()
            status = 1
        sys.stdout.flush()
        os._exit(status)
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    results.append([status, *(os.pread(file, 1 << 20, 0).decode() for file in files)])
print(json.dumps(results))
"""


def run(programs: Iterable[str]) -> list[tuple[int, str, str]]:
    """Run each program in a fork of one interpreter that has imported torch without backends of other packages.

    Returns:
        The exit status, standard output and standard error of each program.
    """
    environment = os.environ | {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    done = subprocess.run(
        [sys.executable, "-c", RUN_FORKS],
        input=json.dumps(list(programs)),
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_a_failed_registration_is_reported_without_stopping_torch():
    cases = list(itertools.product(BROKEN.values(), ["farandole", "cpu:farandole-mpi"]))
    programs = [IMPORT_TORCH.format(change=change, backend=backend) for (change, _), backend in cases]
    for ((_, cause), backend), (status, out, err) in zip(cases, run(programs), strict=True):
        assert out.splitlines() == ["imported", "gloo works"], backend
        warning, *trace = err.splitlines()
        assert warning.startswith(f"farandole: cannot register its backends with torch {torch.__version__}: ")
        assert cause in warning and "tested with torch 2.11 to 2.15" in warning
        assert status == 1
        assert any("RuntimeError: farandole: cannot register" in line and cause in line for line in trace)


# ---- versions that nobody has tested ----

MAKE_GROUPS = """
import torch, torch.distributed as dist
torch._import_device_backends()  # what `import torch` does last
torch.__version__ = {version!r}
for _ in range(2):
    dist.init_process_group("farandole", store=dist.HashStore(), rank=0, world_size=1)
    dist.new_group([0])
    dist.destroy_process_group()
"""


def test_untested_versions_are_reported_once_when_a_group_is_made():
    tested = ["2.11.0", "2.15.2+cu132", "2.15.0a0+git1234"]
    untested = ["2.99.0+cpu", "2.10.1", "next"]
    versions = tested + untested
    for version, (status, _, err) in zip(
        versions, run(MAKE_GROUPS.format(version=each) for each in versions), strict=True
    ):
        assert status == 0, err
        if version in tested:
            assert err == ""
        else:
            (line,) = err.splitlines()
            assert line.startswith(f"farandole: torch {version} is untested")
            assert "2.11 to 2.15" in line


def test_only_rank_0_reports_an_untested_version(monkeypatch, caplog):
    monkeypatch.setattr(torch, "__version__", "3.0.0")
    monkeypatch.setattr(_torch_versions, "_reported", False)
    with caplog.at_level(logging.WARNING, "farandole"):
        _torch_versions.report_untested(1)
        assert not caplog.records
        _torch_versions.report_untested(0)
        _torch_versions.report_untested(0)
    assert len(caplog.records) == 1


# ---- what torch asks a group for while it makes it ----


def check_default_backend(rank: int, size: int) -> None:
    """torch 2.15 attaches its flight recorder to a new group, which needs the group's default backend."""
    group = dist.new_group()  # the default group has already been used by other tests
    assert group.rank() == rank and group.size() == size
    for question in ("supports_abort_hooks", "supports_completion_hooks", "supports_window"):
        if hasattr(dist.ProcessGroup, question):
            assert getattr(group, question) is False
    if hasattr(dist, "get_backend_impl"):
        assert dist.get_backend_impl(group).name() == "farandole"
        assert dist.get_backend_impl(group, torch.device("cpu")).name() == "farandole"
    assert group._fallback._group is None  # none of these queries creates it
    dist.destroy_process_group(group)


def test_default_backend(ranks):
    ranks(2).run(check_default_backend)


def test_default_backend_is_registered_where_python_can_make_one(monkeypatch):
    """Python can create a backend with torch 2.14 and later; the test simulates this for earlier versions."""

    class Backend:
        def __init__(self, rank: int, size: int) -> None:
            self.place = rank, size

    class Group(dist.ProcessGroup):
        def __init__(self) -> None:
            super().__init__(1, 3)
            self.calls = []

        def _register_backend(self, device, kind, backend):
            self.calls.append((device.type, kind, backend.place, backend.getBackendName()))

        def _set_default_backend(self, kind):
            self.calls.append(kind)

    monkeypatch.setattr(default_backend, "c10d", SimpleNamespace(Backend=Backend))
    default_backend._backend_class.cache_clear()
    try:
        group, custom = Group(), dist.ProcessGroup.BackendType.CUSTOM
        default_backend.register_default_backend(group, 1, 3, "farandole")
    finally:
        default_backend._backend_class.cache_clear()
    assert group.calls == [("cpu", custom, (1, 3), "farandole"), custom]


def check_capabilities(rank: int, size: int) -> None:
    """A single rank can query every optional feature of a backend, without the other ranks."""
    if rank == 0:
        backend = dist.group.WORLD._get_backend(torch.device("cpu"))
        capabilities = [
            name for name in dir(_distributed_c10d.Backend) if name.lstrip("_").startswith("supports_")
        ]
        assert len(capabilities) >= 3
        for name in capabilities:
            value = getattr(backend, name)
            assert (value(torch.device("cpu")) if callable(value) else value) is False, name
    assert dist.group.WORLD._fallback._group is None


def test_capabilities_are_answered_without_a_gloo_group(ranks):
    ranks(2).run(check_capabilities)

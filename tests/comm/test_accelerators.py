"""CUDA tensors: which group receives them, and what happens if ranks share a device.  No GPU is needed."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from farandole.comm import accelerators, dense
from farandole.comm.accelerators import must_share, visible_devices
from farandole.comm.communicator import Communicator
from farandole.comm.dispatcher import Dispatcher
from farandole.comm.fallback import TorchCore


@pytest.mark.parametrize(
    ("hosts", "shares"),
    [
        ([[["0"], ["0"]]], True),
        ([[["0", "1"], ["0", "1"]]], False),
        ([[["0", "1"]] * 3], True),
        ([[["GPU-a"], ["GPU-b"]]], False),  # one device for each rank, as Slurm gives them
        ([[[], []]], False),
        ([[["0", "1"], ["0", "1"]], [["0"], ["0"]]], True),
        ([[["0"]], [["0"]]], False),  # the devices of two hosts
    ],
)
def test_ranks_share_devices_if_a_host_has_fewer_devices_than_ranks(
    hosts: list[list[list[str]]], shares: bool
) -> None:
    assert must_share(hosts) == shares


@pytest.mark.parametrize(
    ("variable", "count", "names"),
    [
        (None, 2, ["0", "1"]),
        ("", 0, []),
        ("3,1", 2, ["3", "1"]),
        ("3, 9", 1, ["3"]),  # torch counts the devices before the first one that does not exist
        ("GPU-a", 1, ["GPU-a"]),
    ],
)
def test_names_of_visible_devices(
    monkeypatch: pytest.MonkeyPatch, variable: str | None, count: int, names: list[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    if variable is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", variable)
    assert visible_devices() == names


def _tensor(**fields: Any) -> Any:
    values = {"is_cpu": False, "is_cuda": True, "layout": torch.strided, "device": torch.device("cuda", 0)}
    return SimpleNamespace(**values | fields)


def test_staging_waits_for_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    awaited: list[Any] = []
    monkeypatch.setattr(accelerators, "wait_for_kernels", awaited.append)
    tensors = [_tensor(), torch.zeros(1)]
    assert accelerators.staged(tensors)
    assert awaited == [tensors]
    assert not accelerators.staged([_tensor(layout=torch.sparse_coo)])
    assert not accelerators.staged([_tensor(is_cuda=False)])  # another device
    monkeypatch.setattr(dense, "reachable", {"cpu", "cuda"})
    assert not accelerators.staged(tensors)
    assert len(awaited) == 1


class RecordingGroup:
    """Records the calls that torch's group for a device gets."""

    def __init__(self, coalesces: bool) -> None:
        self.calls: list[Any] = []
        self._coalesces = coalesces

    def _get_backend(self, device: torch.device) -> Any:
        return SimpleNamespace(supports_coalescing=self._coalesces)

    def _start_coalescing(self, device: torch.device) -> None:
        self.calls.append("start")

    def _end_coalescing(self, device: torch.device) -> str:
        self.calls.append("end")
        return "work of the batch"

    def send(self, tensors: list[Any], peer: int, tag: int) -> str:
        self.calls.append(("send", peer, tag))
        return "sent"

    def recv(self, tensors: list[Any], peer: int, tag: int) -> str:
        self.calls.append(("recv", peer, tag))
        return "received"


def test_a_batch_of_device_messages_is_coalesced() -> None:
    group: Any = RecordingGroup(coalesces=True)
    core = TorchCore(lambda: group, 0, 2, "nccl")
    assert core.post_batch([(True, _tensor(), 1, 0), (False, _tensor(), 1, 3)]) == ["work of the batch"]
    assert group.calls == ["start", ("send", 1, 0), ("recv", 1, 3), "end"]


def test_groups_without_coalescing_send_messages_one_by_one() -> None:
    group: Any = RecordingGroup(coalesces=False)
    core = TorchCore(lambda: group, 0, 2, "gloo")
    assert core.post_batch([(True, _tensor(), 1, 0), (False, _tensor(), 1, 3)]) == ["sent", "received"]


def test_torchs_function_posts_device_messages_together(monkeypatch: pytest.MonkeyPatch) -> None:
    posted: list[Any] = []
    group = SimpleNamespace(post_batch=lambda messages: posted.append(messages) or ["work"])
    send, receive = (object.__new__(dist.P2POp) for _ in range(2))
    for message, op in ((send, dist.isend), (receive, dist.irecv)):
        message.op, message.tensor, message.group = op, _tensor(), group
        message.group_peer, message.tag = 1, 7
    assert dist.batch_isend_irecv([send, receive]) == ["work"]
    assert posted == [[(True, send.tensor, 1, 7), (False, receive.tensor, 1, 7)]]


def test_errors_in_a_batch_come_from_torch() -> None:
    for mistake in ([], [3], None):
        with pytest.raises((ValueError, TypeError, IndexError)):
            dist.batch_isend_irecv(mistake)  # type: ignore[arg-type]


def test_device_tensors_use_a_separate_group() -> None:
    def made(kind: str) -> Any:
        return TorchCore(
            lambda: pytest.fail(f"the {kind} group was made"), 0, 2, kind, cpu_only=kind == "cpu"
        )

    fallback, devices = made("cpu"), made("device")
    dispatcher = Dispatcher(fallback, "test", fallback, devices)
    assert dispatcher.core_for([_tensor()]) is devices
    assert dispatcher.core_for([torch.zeros(1)]) is fallback
    assert dispatcher.core_for([torch.zeros(1), _tensor()]) is devices
    assert dispatcher.core_for([]) is fallback


def _routes(rank: int, size: int) -> list[str]:
    assert dist.group.WORLD is not None
    dispatcher = Communicator(dist.group.WORLD).dispatcher
    core: Any = dispatcher.core
    found = [core.takes_devices]
    found.append(dispatcher.core_for([_tensor()]) is dispatcher.device_fallback)
    core.takes_devices = True
    try:
        accelerators.wait_for_kernels, kept = (lambda tensors: None), accelerators.wait_for_kernels
        found.append(dispatcher.core_for([_tensor()]) is core)
        group: Any = dist.group.WORLD
        found.append(group._get_backend(torch.device("cuda")).name())
    finally:
        core.takes_devices, accelerators.wait_for_kernels = False, kept
    return found


def test_ranks_that_share_a_device_use_the_core(ranks: Any) -> None:
    assert ranks(2).run(_routes) == [[False, True, True, "farandole"]] * 2


def test_cuda_tensors_without_nccl_raise_an_error() -> None:
    from datetime import timedelta

    from farandole.comm.fallback import has_nccl, torch_device_group

    if has_nccl():
        pytest.skip("there is NCCL")
    with pytest.raises(
        RuntimeError,
        match="expected CPU tensors, got CUDA tensors; .* because this build of torch has no NCCL",
    ):
        torch_device_group(dist.HashStore(), 0, 1, timedelta(seconds=5), "test")


def _with_a_default_device(rank: int, size: int) -> list[Any]:
    assert dist.group.WORLD is not None
    comm = Communicator(dist.group.WORLD)
    before = torch.get_default_device()
    torch.set_default_device("meta")  # stands for "cuda": a device whose memory the core cannot reach
    try:
        objects = comm.all_gather_object(rank)
        comm.barrier()
        shared = comm.empty(4)
        return [objects, shared.device.type, dense.writable(torch.zeros(4, 2, device="cpu").t()).device.type]
    finally:
        torch.set_default_device(before)


def test_buffers_of_the_group_ignore_the_default_device(ranks: Any) -> None:
    assert ranks(2).run(_with_a_default_device) == [[[0, 1], "cpu", "cpu"]] * 2

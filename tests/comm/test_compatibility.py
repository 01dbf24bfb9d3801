"""Backend names, ways to create groups, debug modes and other parts of torch that user programs rely on."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed._shard.sharded_tensor import Shard, ShardMetadata, init_from_local_shards

from tests.comm.programs import run_program, start_program
from tests.launch.jobs import run


def check_sharded_tensor(rank: int, size: int) -> None:
    """`ShardedTensor.gather` uses the device that the backend prefers."""
    metadata = ShardMetadata(shard_offsets=[2 * rank, 0], shard_sizes=[2, 3], placement=f"rank:{rank}/cpu")
    tensor = init_from_local_shards([Shard(torch.full((2, 3), rank + 1.0), metadata)], (2 * size, 3))
    whole = torch.zeros(2 * size, 3) if rank == 0 else None
    tensor.gather(0, whole)
    if whole is not None:
        assert whole[:, 0].tolist() == [r + 1.0 for r in range(size) for _ in range(2)]
    dist.barrier()


@pytest.mark.parametrize("size", [2, 3])
def test_sharded_tensors_are_gathered_on_the_cpu(ranks, size):
    if torch.cuda.is_available():
        pytest.skip("for machines without CUDA")
    ranks(size).run(check_sharded_tensor)


def check_local_synchronization(rank: int, size: int) -> None:
    """Only the members of a group call `new_group`; torch expects the same number of groups on every rank."""
    for division in ([[0, 1], [2]], [[0], [1, 2]], [[0, 2], [1]]):
        members = next(each for each in division if rank in each)
        group = dist.new_group(members, use_local_synchronization=True)
        total = torch.full((3,), float(rank))
        dist.all_reduce(total, group=group)
        assert total.tolist() == [float(sum(members))] * 3
    dist.barrier()


def test_groups_with_local_synchronization(ranks):
    ranks(3).run(check_local_synchronization)


NAMES = """
store, rank = dist.distributed_c10d._get_default_store(), dist.get_rank()  # outlives its groups
dist.destroy_process_group()
for number, name in enumerate(("FARANDOLE", "Farandole", "cpu:FARANDOLE,cuda:nccl", "cpu:gloo,cuda:farandole")):
    dist.init_process_group(name, store=dist.PrefixStore(f"{number}/", store), rank=rank, world_size=2)
    total = torch.ones(2)
    dist.all_reduce(total)
    assert total.tolist() == [2, 2]
    assert dist.get_backend() == name.lower(), dist.get_backend()
    sub = dist.new_group([0, 1], backend=name)
    dist.all_reduce(total, group=sub)
    assert total.tolist() == [4, 4]
    dist.barrier()
    dist.destroy_process_group()
"""
DEBUG = """
assert dist.get_debug_level() == dist.DebugLevel.DETAIL
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(3, 2))
model(torch.full((2, 3), 1.0 + dist.get_rank())).sum().backward()
assert torch.equal(model.module.weight.grad, torch.full((2, 3), 3.0)), model.module.weight.grad
gathered = [None, None]
dist.all_gather_object(gathered, dist.get_rank())
assert gathered == [0, 1]
dist.monitored_barrier()
dist.destroy_process_group()
"""


def test_names_of_backends_in_any_case(tmp_path):
    for status, errors in run_program(tmp_path, 2, NAMES):
        assert status == 0, errors


def test_debug_mode_detail(tmp_path, monkeypatch):
    monkeypatch.setitem(os.environ, "TORCH_DISTRIBUTED_DEBUG", "DETAIL")
    for status, errors in run_program(tmp_path, 2, DEBUG):
        assert status == 0, errors


RESTARTED = """
import os, signal, torch, torch.distributed as dist
attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
if attempt == 0:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # torchrun ends rank 0 too, perhaps before it has printed its error
dist.init_process_group("farandole")
total = torch.ones(3)
dist.all_reduce(total)
if attempt == 0 and dist.get_rank() == 1:
    os.kill(os.getpid(), 9)
dist.all_reduce(total)
dist.barrier()
if dist.get_rank() == 0:
    print(attempt, total.tolist(), flush=True)
dist.destroy_process_group()
"""


def test_an_elastic_restart(tmp_path):
    """torchrun starts the ranks again after one was killed; the new ranks use the same store."""
    Path(tmp_path, "restarted.py").write_text(RESTARTED)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += ["--max-restarts", "1", "--monitor-interval", "0.2", "restarted.py"]
    status, out, err = run(command, tmp_path, fork_ranks=True)
    assert status == 0, err[-3000:]
    assert out.split("\n")[0] == "1 [4.0, 4.0, 4.0]"
    assert "RankDied: rank 1 (process" in err


REPLACED = """
import torch, torch.distributed as dist

def check(backend):
    assert dist.get_backend() == backend, dist.get_backend()
    total = torch.ones(2)
    dist.all_reduce(total)
    assert total.tolist() == [2, 2]
    dist.barrier()
    dist.destroy_process_group()

dist.init_process_group()
store, rank = dist.distributed_c10d._get_default_store(), dist.get_rank()
check("farandole")
for asked, backend in {"gloo": "farandole", "GLOO": "farandole", "cpu:gloo": "cpu:farandole"}.items():
    dist.init_process_group(asked, store=dist.PrefixStore(asked, store), rank=rank, world_size=2)
    check(backend)
"""


def test_gloo_is_replaced_on_demand(tmp_path, monkeypatch):
    if torch.cuda.is_available():
        pytest.skip("for machines without CUDA")
    monkeypatch.setitem(os.environ, "FARANDOLE_REPLACE_GLOO", "1")
    script = tmp_path / "replaced.py"
    script.write_text(REPLACED)
    for process in start_program(tmp_path, 2, [str(script)]):
        _, errors = process.communicate(timeout=60)
        assert process.returncode == 0, errors

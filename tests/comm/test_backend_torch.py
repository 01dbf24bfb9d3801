"""Features that torch builds on process groups, over the backend: meshes, sharding, functional collectives, pipelines.

Each is compared with one process, or with Gloo.
"""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from farandole.comm.backend.process_group import FarandoleProcessGroup
from farandole.comm.communicator import Communicator
from tests.comm.next_to_gloo import gloo_group, same_on_both

WIDTH = 32


def make_model(layers: int = 3) -> nn.Sequential:
    torch.manual_seed(5)
    blocks = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(layers)]
    return nn.Sequential(*blocks)


def batch(rank: int, rows: int = 4) -> torch.Tensor:
    return torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(rank))


def gradients_alone(size: int) -> list[torch.Tensor]:
    model = make_model()
    model(torch.cat([batch(rank) for rank in range(size)])).square().mean().backward()
    return [p.grad for p in model.parameters()]


def full(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


# ---- sharding ----


def check_fsdp2(rank: int, size: int) -> None:
    expected = gradients_alone(size)
    for policy, tolerance in (
        (MixedPrecisionPolicy(), {"rtol": 1e-5, "atol": 1e-7}),
        (MixedPrecisionPolicy(torch.bfloat16, torch.float32), {"rtol": 0.05, "atol": 1e-3}),
        (MixedPrecisionPolicy(torch.bfloat16), {"rtol": 0.05, "atol": 1e-3}),
    ):
        model = make_model()
        for block in model:
            fully_shard(block, mp_policy=policy)
        fully_shard(model, mp_policy=policy)
        for _ in range(2):
            model.zero_grad()
            model(batch(rank)).float().square().mean().backward()
        for p, grad in zip(model.parameters(), expected, strict=True):
            torch.testing.assert_close(p.grad.full_tensor(), grad, **tolerance)


def check_hybrid_fsdp2(rank: int, size: int) -> None:
    mesh = init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("replicate", "shard"))
    model = make_model()
    for block in model:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    model(batch(rank)).square().mean().backward()
    for p, grad in zip(model.parameters(), gradients_alone(size), strict=True):
        torch.testing.assert_close(p.grad.full_tensor(), grad, rtol=1e-5, atol=1e-7)


def check_fsdp1(rank: int, size: int) -> None:
    model = FullyShardedDataParallel(make_model(), device_id=torch.device("cpu"), use_orig_params=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(batch(rank)).square().mean().backward()
    optimizer.step()
    alone = make_model()
    for p, grad in zip(alone.parameters(), gradients_alone(size), strict=True):
        p.data -= 0.1 * grad
    with FullyShardedDataParallel.summon_full_params(model):
        for p, other in zip(model.parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(p.detach(), other.detach(), rtol=1e-5, atol=1e-6)


def check_dtensor(rank: int, size: int) -> None:
    mesh = init_device_mesh("cpu", (size,))
    whole = torch.arange(float(6 * size * 4)).view(6 * size, 4)
    uneven = torch.arange(float(7 * 3)).view(7, 3)
    for tensor in (whole, uneven):
        rows = distribute_tensor(tensor, mesh, [Shard(0)])
        columns = rows.redistribute(mesh, [Shard(1)])
        torch.testing.assert_close(columns.full_tensor(), tensor)
        replica = columns.redistribute(mesh, [Replicate()])
        torch.testing.assert_close(replica.to_local(), tensor)
        product = rows.t() @ rows  # a partial sum, reduced
        torch.testing.assert_close(product.full_tensor(), tensor.t() @ tensor)


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.relu(self.up(x)))


def check_tensor_parallel(rank: int, size: int) -> None:
    alone = Gated()
    model = parallelize_module(
        copy.deepcopy(alone),
        init_device_mesh("cpu", (size,)),
        {"up": ColwiseParallel(), "down": RowwiseParallel()},
    )
    expected, found = alone(batch(0)), model(batch(0))
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    expected.square().mean().backward()
    found.square().mean().backward()
    for p, other in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(full(p.grad), other.grad, rtol=1e-5, atol=1e-6)


def check_meshes(rank: int, size: int) -> None:
    mesh = init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("a", "b"))
    for axis in ("a", "b"):
        group = mesh[axis].get_group()
        assert isinstance(group, FarandoleProcessGroup)
        tensor = torch.tensor([float(rank)])
        dist.all_reduce(tensor, group=group)
        assert tensor == sum(mesh[axis].mesh.tolist())
    flat = mesh["a", "b"]._flatten()
    assert flat.size() == size and mesh.get_local_rank("a") == rank // (size // 2)
    tensor = torch.ones(1)
    dist.all_reduce(tensor, group=flat.get_group())
    assert tensor == size


# ---- functional collectives ----


def functions(group: dist.ProcessGroup, rank: int, size: int) -> list[torch.Tensor]:
    own = torch.arange(4.0 * size).view(2 * size, 2) + rank
    uneven = [(rank + r) % 3 for r in range(size)]
    results = [
        functional.all_reduce(own, "sum", group),
        functional.all_reduce(own, "max", group),
        functional.all_reduce(own.t(), "sum", group),
        functional.all_gather_tensor(own, 0, group),
        functional.all_gather_tensor(own, 1, group),
        functional.reduce_scatter_tensor(own, "sum", 0, group),
        functional.reduce_scatter_tensor(own.t().contiguous(), "sum", 1, group),
        functional.all_to_all_single(own, None, None, group),
        functional.all_to_all_single(torch.ones(sum(uneven), 3) * rank, uneven, uneven, group),
        functional.broadcast(own, size - 1, group),
        *functional.all_reduce_coalesced([own, own * 2], "sum", group),
        *functional.all_gather_into_tensor_coalesced([own, own * 2], group),
        *functional.reduce_scatter_tensor_coalesced([own, own * 2], "sum", [0, 0], group),
    ]
    return [functional.wait_tensor(result) for result in results]


def differentiable(group: dist.ProcessGroup, rank: int, size: int) -> list[torch.Tensor]:
    weight = torch.arange(4.0 * size).view(2 * size, 2).requires_grad_()
    x = weight * (rank + 1)
    gathered = functional.all_gather_tensor_autograd(x, 0, group)
    scattered = functional.reduce_scatter_tensor_autograd(x, "sum", 0, group)
    exchanged = functional.all_to_all_single_autograd(x, None, None, group)
    loss = (gathered.square().sum() + scattered.square().sum()) + (exchanged * (rank + 2)).sum()
    loss.backward()
    return [loss, weight.grad]


def check_functional(rank: int, size: int) -> None:
    gloo = gloo_group()
    same_on_both(gloo, lambda group: functions(group, rank, size))
    same_on_both(gloo, lambda group: differentiable(group, rank, size))


def step_of_tensor_parallel(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    x = functional.all_reduce(torch.relu(x), "sum", group)
    gathered = functional.all_gather_tensor(x + 1, 0, group)
    scattered = functional.reduce_scatter_tensor(gathered, "sum", 0, group)
    return functional.all_to_all_single(scattered, None, None, group) * 2


def check_compiled(rank: int, size: int, backend: str) -> None:
    torch._dynamo.reset()
    # precompiling the C++ headers takes longer than compiling these kernels
    torch._inductor.config.cpp_cache_precompile_headers = False
    # otherwise Inductor compiles a program for each instruction set, and loads it in a new interpreter
    torch._inductor.config.cpp.vec_isa_ok = True
    group = dist.group.WORLD
    compiled = torch.compile(step_of_tensor_parallel, backend=backend, fullgraph=True)
    for scale in (1.0, 2.0):
        x = (torch.arange(8.0).view(4, 2) - 3) * scale + rank
        torch.testing.assert_close(compiled(x, group), step_of_tensor_parallel(x, group) + 0)

    @torch.compile(backend=backend)
    def plain_calls(x: torch.Tensor) -> torch.Tensor:
        dist.all_reduce(x)  # rewritten to the functional form
        return x * 2

    assert (plain_calls(torch.ones(3)) == 2 * size).all()


def check_calls_in_compiled_code(rank: int, size: int) -> None:
    """Calls that Dynamo does not rewrite run as they are, between the compiled parts of the function."""
    torch._dynamo.reset()

    @torch.compile(backend="aot_eager")
    def mixed(x: torch.Tensor, comm: Communicator) -> torch.Tensor:
        y = x + 1
        dist.broadcast(y, size - 1)
        dist.all_reduce(y, async_op=True).wait()
        z = y * 2
        comm.all_reduce(z, "max")
        gathered = torch.empty(size * len(z))
        comm.all_gather(gathered, z)
        return gathered + 1

    for value in (1.0, 2.0):
        expected = 2 * size * (value + size) + 1
        found = mixed(torch.full((3,), value + rank), Communicator(dist.group.WORLD))
        torch.testing.assert_close(found, torch.full((3 * size,), expected))


# ---- checkpoints ----


def check_checkpoints(rank: int, size: int, folder: str) -> None:
    for kind in ("save", "async_save"):
        path = Path(folder, kind)
        model = make_model()
        for block in model:
            fully_shard(block)
        fully_shard(model)
        model(batch(rank)).square().mean().backward()
        torch.optim.SGD(model.parameters(), lr=0.1).step()
        state = {"model": get_model_state_dict(model), "step": 7}
        if kind == "save":
            dcp.save(state, checkpoint_id=path)
        else:
            dcp.async_save(state, checkpoint_id=path).result()
        dist.barrier()
        expected = [p.full_tensor() for p in model.parameters()]

        restored = nn.Sequential(*make_model())  # unsharded, on every rank
        state = {"model": restored.state_dict(), "step": 0}
        dcp.load(state, checkpoint_id=path)
        assert state["step"] == 7
        for p, other in zip(state["model"].values(), expected, strict=True):
            torch.testing.assert_close(p, other, rtol=0, atol=0)


# ---- pipelines ----


def check_pipelines(rank: int, size: int) -> None:
    alone = make_model(size)
    inputs, target = batch(0, 8), batch(1, 8)

    def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return (output - target).square().mean()

    expected = loss(alone(inputs), target)
    expected.backward()
    for schedule in (ScheduleGPipe, Schedule1F1B):
        block = make_model(size)[rank]
        stage = PipelineStage(block, rank, size, torch.device("cpu"))
        pipeline = schedule(stage, n_microbatches=4, loss_fn=loss)
        losses: list[torch.Tensor] = []
        if rank == 0:
            pipeline.step(inputs)
        elif rank == size - 1:
            pipeline.step(target=target, losses=losses)
            torch.testing.assert_close(torch.stack(losses).mean(), expected)
        else:
            pipeline.step()
        for p, other in zip(block.parameters(), alone[rank].parameters(), strict=True):
            torch.testing.assert_close(p.grad, other.grad, rtol=1e-5, atol=1e-6)
    dist.barrier()


@pytest.mark.parametrize(
    "check",
    [
        check_fsdp2,
        check_fsdp1,
        check_dtensor,
        check_tensor_parallel,
        check_meshes,
        check_functional,
        check_pipelines,
    ],
)
@pytest.mark.parametrize("size", [2, 4])
def test_features_of_torch(ranks, size, check):
    ranks(size).run(check)


def test_hybrid_sharding(ranks):
    ranks(4).run(check_hybrid_fsdp2)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled(ranks, backend):
    ranks(2).run(check_compiled, backend, timeout_s=180)


def test_calls_in_compiled_code(ranks):
    ranks(2).run(check_calls_in_compiled_code, timeout_s=180)


def test_checkpoints(ranks, tmp_path):
    ranks(2).run(check_checkpoints, str(tmp_path))

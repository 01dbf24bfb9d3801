"""Compare predicted bytes with the bytes of real ranks, and test the order of plans."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._tools.mem_tracker import MemTracker
from torch.utils.flop_counter import FlopCounterMode

from farandole.comm.communicator import Communicator
from farandole.layout import Layout, Shard
from farandole.memory.disk import Bandwidth
from farandole.memory.dry_run import saved_bytes
from farandole.memory.recompute import apply_recompute
from farandole.memory.swap import BEHIND_BYTES
from farandole.memory.tracker import MemoryTracker
from farandole.mesh import Mesh
from farandole.models.gpt import GPTConfig, build_gpt
from farandole.models.loss import next_token_loss
from farandole.parallel.parallelize import parallelize
from farandole.plan import LoRA, Plan, PlanError
from farandole.planner import (
    Estimate,
    Machine,
    Workload,
    bytes_per_parameter,
    estimate,
    estimate_workload,
    plan_candidates,
    state_bytes,
    trace,
)
from tests.comm.hosts import hierarchical_group
from tests.memory.models import CASES, small_gpt, small_resnet

GPT = GPTConfig(vocabulary=64, context=16, layers=2, heads=2, width=32)
MACHINE = Machine(memory=1 << 34, flops={"fp32": 1e9, "bf16": 1e9, "fp16": 1e9}, stream=1e9, bandwidth=1e9)


def _loss(logits: Tensor) -> Tensor:
    return next_token_loss(logits, torch.zeros(logits.shape[:-1], dtype=torch.int64, device=logits.device))


def _workload(**more: Any) -> Workload:
    with torch.device("meta"):
        return Workload(
            model=build_gpt(GPT), example=torch.empty(2, 16, dtype=torch.int64), loss=_loss, **more
        )


# ---- closed formulas ----


def _formulas(p: float, z: int, d: int, k_l: int = 2, k_h: int = 4) -> dict[str, float]:
    """Return the bytes of p parameters on d ranks (Rajbhandari et al., 2020, "ZeRO", section 3).

    A value has k_l bytes in low and k_h bytes in high precision.
    """
    return {
        "weights": k_l * p / (d if z == 3 else 1),
        "gradients": k_h * p / (d if z >= 2 else 1),  # gradients are reduced in the type of master weights
        "optimizer": 3 * k_h * p / (d if z >= 1 else 1),
    }


@pytest.mark.parametrize("z", [0, 1, 2, 3])
def test_state_bytes_match_the_zero_paper(z: int) -> None:
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(4096, 4096) for _ in range(8)))
    workload = Workload(model=model, example=None)
    found = state_bytes(workload, Plan(zero=z, precision="bf16"), 64, replace(MACHINE, shared=False))
    expected = _formulas(sum(p.numel() for p in model.parameters()), z, 64)
    assert found.weights == pytest.approx(expected["weights"], rel=0.01)
    assert found.gradients == pytest.approx(expected["gradients"], rel=0.01)
    assert found.optimizer == pytest.approx(expected["optimizer"], rel=0.01)


def test_ranks_keep_one_copy_of_divided_and_shared_state() -> None:
    together, apart = replace(MACHINE, shared=True), replace(MACHINE, shared=False)
    plans = [Plan(zero=zero) for zero in range(4)]  # type: ignore[arg-type]
    assert [bytes_per_parameter(plan, 4, together) for plan in plans] == [64, 28, 16, 16]
    assert [bytes_per_parameter(plan, 4, apart) for plan in plans] == [64, 40, 28, 16]
    assert [bytes_per_parameter(plan, 4, together, checkpoints=True) for plan in plans] == [48, 12, 12, 12]


def test_activation_bytes_match_korthikanti() -> None:
    """Compare with s b h (34 + 5 a s / h) bytes per layer in 16 bits (their equation 1): 34 s b h with fused attention.

    Their formula includes dropout masks, and no rotated copies of queries and keys.
    """
    s, b, h, layers = 256, 2, 256, 3
    with torch.device("meta"):
        blocks = list(build_gpt(GPTConfig(vocabulary=64, context=s, layers=layers, heads=4, width=h)))[1:-1]
        workload = Workload(model=nn.Sequential(*blocks), example=torch.empty(b, s, h))
    saved = workload.trace(Plan(precision="bf16")).saved
    assert saved == pytest.approx(34 * s * b * h * layers, rel=0.2)


# ---- a pass on fake tensors ----


@pytest.mark.parametrize("mode", ["none", "block", "selective"])
@pytest.mark.parametrize("case", ["gpt", "resnet"])
def test_the_peak_matches_torchs_memory_tracker(case: str, mode: Any) -> None:
    model, example = CASES[case]()
    apply_recompute(model, mode, example=example)
    traced = trace(model, example)
    for parameter in model.parameters():  # as the engine does
        parameter.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))
    tracker = MemTracker()
    tracker.track_external(model, example)
    with tracker:
        model(example).sum().backward()
    ((_, peaks),) = tracker.get_tracker_snapshot("peak").items()
    living = sum(t.nbytes for t in (*model.parameters(), *model.buffers(), example))
    assert traced.peak == pytest.approx(peaks["Total"] - living, rel=0.02)


@pytest.mark.parametrize("mode", ["none", "block", "selective"])
@pytest.mark.parametrize("case", list(CASES))
def test_saved_bytes_match_the_measurement(case: str, mode: Any) -> None:
    model, example = CASES[case]()
    apply_recompute(model, mode, example=example)
    measured = saved_bytes(model, example).total
    # recomputation restores buffers from copies
    copies = sum(buffer.nbytes for buffer in model.buffers()) if mode != "none" else 0
    if case == "gpt" and mode != "none":
        copies += 2 * 32 * 8 * 4  # the blocks share sines and cosines, which are not recomputed
    assert measured <= trace(model, example).saved <= 1.01 * measured + copies + 600


def test_flops_match_torchs_counter() -> None:
    model, example = small_resnet()
    counter = FlopCounterMode(display=False)
    with counter:
        model(example).sum().backward()
    assert trace(model, example).flops == counter.get_total_flops()


def test_recomputation_repeats_the_operations_of_the_forward_pass() -> None:
    model, example = small_gpt()
    counter = FlopCounterMode(display=False)
    with counter, torch.no_grad():
        model(example)
    once = trace(model, example).flops
    apply_recompute(model, "block")
    more = trace(model, example).flops - once
    assert 0.5 * counter.get_total_flops() < more <= 1.1 * counter.get_total_flops()


def test_the_first_half_of_a_tied_gradient_counts() -> None:
    class Tied(nn.Module):
        def __init__(self, tied: bool) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(256, 256, bias=False), nn.Linear(256, 256, bias=False)
            if tied:
                self.last.weight = self.first.weight

        def forward(self, x: Tensor) -> Tensor:
            return self.last(self.first(x))

    x = torch.randn(1, 256)
    assert trace(Tied(True), x).peak - trace(Tied(False), x).peak > 0.9 * 256 * 256 * 4


def test_an_estimate_does_not_change_the_model() -> None:
    model, example = small_gpt()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state = torch.get_rng_state()
    estimate(model, Plan(zero=1, recompute="block", precision="bf16"), 2, example=example, machine=MACHINE)
    assert torch.equal(state, torch.get_rng_state())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None and not parameter.is_meta for parameter in model.parameters())


# ---- bytes of real ranks ----


def _storages(tensors: Any) -> int:
    return sum({t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}.values())


def _bytes_on_a_rank(rank: int, size: int, plan: Plan) -> dict[str, int]:
    torch.manual_seed(0)
    model = build_gpt(GPT)
    assert dist.group.WORLD is not None
    comm = Communicator(dist.group.WORLD)
    engine = parallelize(model, plan, comm)
    optimizer = engine.optimizer(torch.optim.AdamW(model.parameters()))
    _loss(engine(torch.zeros(2, 16, dtype=torch.int64))).backward()
    optimizer.step()
    states = [v for s in optimizer.state.values() for v in s.values() if v.dim()]
    weights = [each.weights for each in engine.shards_of_buckets if each.weights]
    masters = [each.master for each in weights if each.has_master_copy]
    common = any(each.shared for each in weights)
    own = [w.shard for w in engine.weights] if engine._gatherer else list(model.parameters())
    whole = _storages(own)
    pools = {bucket._pool for bucket in engine.buckets if bucket._pool}
    found = {
        "weights": whole // size if common else whole,
        "gradients": _storages(bucket.reduced for bucket in engine.buckets),
        "optimizer": _storages([*states, *masters]),
        "pools": sum(pool.nbytes for pool in pools),
    }
    engine.close()
    return found


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@pytest.mark.parametrize("backend", ["farandole", "gloo"])
def test_parts_match_real_ranks(ranks: Any, zero: int, precision: Any, backend: str) -> None:
    plan = Plan(zero=zero, precision=precision)
    seen = ranks(2, backend).run(_bytes_on_a_rank, plan)
    machine = replace(MACHINE, shared=backend == "farandole")
    found = state_bytes(_workload(), plan, 2, machine)
    assert found.gradients == seen[0]["gradients"]
    assert found.pools == pytest.approx(seen[0]["pools"], abs=8192)  # shared memory is allocated in pages
    assert found.weights == pytest.approx(seen[0]["weights"], rel=0.01, abs=4096)
    # the optimizer's tensors end at the ends of parameters, and a shard may end with padding
    assert found.optimizer == pytest.approx(seen[0]["optimizer"], rel=0.02)


def _two_layers() -> nn.Module:
    return nn.Sequential(nn.Linear(256, 512), nn.Linear(512, 512))


def _compression_bytes_on_a_rank(rank: int, size: int, names: list[Any]) -> list[int]:
    comm = Communicator(hierarchical_group([each * 2 // size for each in range(size)], rank))
    found = []
    for name in names:
        model = _two_layers()
        engine = parallelize(model, Plan(compression=name), comm)
        optimizer = engine.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        engine.backward(engine(torch.randn(4, 256)).square().sum())
        optimizer.step()
        found.append(sum(value.nbytes for value in engine.compression_state().values()))
        engine.close()
    return found


@pytest.mark.parametrize("size", [2, 4])
def test_compression_bytes_match_real_ranks(ranks: Any, size: int) -> None:
    names: list[Any] = ["bf16", "int8", "topk", "powersgd"]
    machine = replace(MACHINE, hosts=2, shared=False)
    for rank, seen in enumerate(ranks(size).run(_compression_bytes_on_a_rank, names)):
        workload = Workload(model=_two_layers(), example=None, rank=rank)
        found = [state_bytes(workload, Plan(compression=name), size, machine).compression for name in names]
        assert found == seen
    one_host = replace(machine, hosts=1)
    assert state_bytes(workload, Plan(compression="topk"), size, one_host).compression == 0


# ---- layouts ----


def test_states_follow_the_layouts_of_a_mesh() -> None:
    """Tensor ranks divide matrices, and data ranks divide their states; only the data ranks divide a norm."""
    with torch.device("meta"):
        local = nn.Sequential(nn.LayerNorm(64, bias=False), nn.Linear(64, 512, bias=False))
    layouts = {
        "0.weight": Layout("0.weight", (64,), same=frozenset({"tensor"})),
        "1.weight": Layout("1.weight", (1024, 64), shards=(("tensor", Shard(0)),)),
    }
    mesh = Mesh.box(4, data=2, tensor=2)
    workload = Workload(model=local, example=None, mesh=mesh, layouts=layouts, rank=1)
    local_count = 64 + 512 * 64
    for shared, zero, weights, gradients in ((False, 1, 4, 4), (False, 2, 4, 2), (True, 1, 2, 4)):
        machine = replace(MACHINE, shared=shared)
        found = state_bytes(workload, Plan(zero=zero), 4, machine)  # type: ignore[arg-type]
        assert found.sharding.trained[0].ranks.shards == (1, 3)
        assert found.weights == weights * local_count
        assert found.gradients == gradients * local_count
        assert found.optimizer == 8 * local_count // 2


def test_parameters_outside_of_buckets_count() -> None:
    with torch.device("meta"):
        model = nn.Linear(64, 64, bias=False)
    quantized = nn.Parameter(torch.empty(1000, dtype=torch.int8, device="meta"), requires_grad=False)
    model.register_parameter("quantized", quantized)
    for zero in (0, 1):
        found = state_bytes(
            Workload(model=model, example=None), Plan(zero=zero), 1, replace(MACHINE, shared=False)
        )
        assert found.weights == 4 * 64 * 64 + 1000


def test_gradients_outside_of_blocks_keep_their_buffer() -> None:
    """The embedding and the last norm are in no block, so their buffer is in use during the whole backward pass."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.norm = nn.Embedding(100, 64), nn.LayerNorm(64)
            self.blocks = nn.ModuleList(nn.Linear(64, 64) for _ in range(4))

    with torch.device("meta"):
        model = Model()
    plan, machine = Plan(zero=3), replace(MACHINE, shared=False)
    found = state_bytes(Workload(model=model, example=None), plan, 2, machine)
    block, rest = 4 * (64 * 64 + 64), 4 * (100 * 64 + 128)
    assert [sum(p.nbytes for p in b.parameters) for b in found.sharding.trained] == [*[block] * 4, rest]
    assert found.pools == pytest.approx(rest + block + block, rel=0.01)
    assert found.gathered == pytest.approx(rest + 2 * block, rel=0.01)


def _large_gpt() -> nn.Module:
    with torch.device("meta"):
        return build_gpt(GPTConfig(vocabulary=50257, context=1024, layers=24, heads=16, width=1792))


@pytest.mark.parametrize("ranks", [2, 1024])
def test_a_billion_parameters_are_divided_in_seconds(ranks: int) -> None:
    workload = Workload(model=_large_gpt(), example=None)
    assert sum(p.numel() for p in workload.model.parameters()) > 1e9
    machine = replace(MACHINE, shared=False, hosts=max(1, ranks // 8))
    plans = [Plan(zero=zero) for zero in range(4)]  # type: ignore[arg-type]
    if ranks > 2:
        plans.append(Plan(zero=1, data_shard="host"))
    started = time.process_time()
    for plan in plans:
        state_bytes(workload, plan, ranks, machine)
    assert time.process_time() - started < 5


def _seconds_to_parallelize(rank: int, size: int) -> float:
    model = _large_gpt()
    assert dist.group.WORLD is not None
    torch.set_default_device("meta")  # the device on which ranks keep their parts
    try:
        started = time.process_time()
        engine = parallelize(
            model,
            Plan(zero=2, precision="bf16"),
            Communicator(dist.group.WORLD),
            initialize=lambda name, block: None,
        )
        seconds = time.process_time() - started
    finally:
        torch.set_default_device(None)
    engine.close()
    return seconds


def test_a_billion_parameters_are_parallelized_in_seconds(ranks: Any) -> None:
    assert max(ranks(1, "gloo").run(_seconds_to_parallelize)) < 5


# ---- plans ----


def test_plans_that_fit_come_first_by_time() -> None:
    machine = replace(MACHINE, process=0, libraries=0, host=False, shared=False)
    plans = [Plan(zero=z, recompute=r) for z in (0, 2) for r in ("none", "block")]  # type: ignore[arg-type]
    workload = _workload()
    every = plan_candidates(workload, 2, machine, plans)
    assert every[0].plan.recompute == "none" and every[0].seconds == min(one.seconds for one in every)
    need = sorted(one.peak for one in every)
    tight = replace(machine, memory=need[1])
    ordered = plan_candidates(workload, 2, tight, plans)
    assert [one.fits(tight.memory) for one in ordered] == [True, True, False, False]
    assert ordered[0].outcome(tight.memory) == "fits"
    assert ordered[-1].outcome(tight.memory).startswith("does not fit (needs ")
    assert ordered[2].peak <= ordered[3].peak


def test_states_on_a_disk_save_memory_and_cost_time() -> None:
    machine = replace(MACHINE, disk=Bandwidth(1e9, 5e8, "made up"))
    here = estimate_workload(_workload(), Plan(zero=1), 2, machine)
    there = estimate_workload(_workload(), Plan(zero=1, offload="disk:."), 2, machine)
    assert there.seconds > here.seconds and there.times["offload"] > 0
    assert there.outcome(1 << 40) == "fits with offload"
    with pytest.raises(PlanError, match="requires a machine with a disk; pass Machine"):
        estimate_workload(_workload(), Plan(offload="disk:."), 2, MACHINE)


def test_states_in_the_hosts_memory_are_not_on_the_accelerator() -> None:
    machine = replace(MACHINE, host=False, shared=False)
    assert estimate_workload(_workload(), Plan(offload="host"), 2, machine).parts["optimizer"] == 0
    on_host = estimate_workload(_workload(), Plan(offload="host"), 2, MACHINE)
    assert on_host.parts["optimizer"] == 8 * GPT.parameters


def test_offloaded_gradients_and_parameters_are_not_in_memory() -> None:
    machine = replace(MACHINE, disk=Bandwidth(1e9, 5e8, "made up"))
    found = {
        offloaded: estimate_workload(
            _workload(), Plan(zero=3, offload="disk:.", offloaded=offloaded), 2, machine
        )
        for offloaded in ("optimizer", "gradients", "parameters")
    }
    assert found["gradients"].parts["gradients"] == 0 < found["optimizer"].parts["gradients"]
    assert found["parameters"].parts["weights"] == 0 < found["gradients"].parts["weights"]
    seconds = [one.times["offload"] for one in found.values()]
    assert seconds == sorted(seconds) and len(set(seconds)) == 3
    plan, accelerator = found["gradients"].plan, replace(machine, host=False)
    with pytest.raises(PlanError, match="use offload='host' or offloaded='optimizer'"):
        estimate_workload(_workload(), plan, 2, accelerator)


def test_stochastic_rounding_needs_no_masters() -> None:
    nearest, stochastic = (
        estimate_workload(_workload(), Plan(precision="bf16", rounding=rounding), 2, MACHINE).parts
        for rounding in ("nearest", "stochastic")
    )
    assert nearest["optimizer"] - stochastic["optimizer"] == pytest.approx(4 * GPT.parameters, rel=0.02)


def test_swap_keeps_the_largest_amount_that_may_wait() -> None:
    with torch.device("meta"):
        model, example = nn.Sequential(*(nn.Sigmoid() for _ in range(9))), torch.empty(1 << 24)
        example.requires_grad_()
    machine = replace(MACHINE, disk=Bandwidth(1e8, 1e8, "made up"))
    workload = Workload(model=model, example=example)
    kept, swapped = (estimate_workload(workload, Plan(swap=swap), 1, machine) for swap in ("none", "disk:."))
    # each layer saves its output; the last output is also the input of the loss, so it is not swapped
    assert kept.parts["activations"] >= 9 << 26
    assert kept.parts["activations"] - swapped.parts["activations"] == (8 << 26) - BEHIND_BYTES
    assert kept.times.keys() < swapped.times.keys() and swapped.seconds > kept.seconds
    assert swapped.outcome(1 << 40) == "fits with swap"
    with pytest.raises(PlanError, match="use swap='disk:FOLDER'"):
        estimate_workload(workload, Plan(swap="host"), 1, machine)


def test_a_missing_speed_is_an_error() -> None:
    with pytest.raises(PlanError, match="Machine.flops=. has no entry for precision='bf16', only for fp32"):
        estimate_workload(_workload(), Plan(precision="bf16"), 2, replace(MACHINE, flops={"fp32": 1e9}))


def test_activations_stay_within_their_budget() -> None:
    everything = estimate_workload(_workload(), Plan(), 2, MACHINE).parts["activations"]
    budget = everything * 3 // 4
    some = estimate_workload(_workload(), Plan(recompute="auto", activation_bytes=budget), 2, MACHINE)
    assert 0.3 * everything < some.parts["activations"] <= 1.01 * budget


def test_hybrid_divides_within_a_host() -> None:
    machine = replace(MACHINE, hosts=2)
    hybrid = estimate_workload(_workload(), Plan(zero=1, data_shard="host"), 4, machine)
    alone = estimate_workload(_workload(), Plan(zero=1), 2, MACHINE)
    assert hybrid.parts["optimizer"] == alone.parts["optimizer"]
    assert hybrid.parts["weights"] == alone.parts["weights"]
    assert hybrid.times["communication"] > alone.times["communication"]
    assert hybrid == replace(
        estimate_workload(_workload(), Plan(zero=1, data_shard=2), 4, machine), plan=hybrid.plan
    )
    with pytest.raises(PlanError, match="3 ranks cannot be split equally over 2 hosts"):
        estimate_workload(_workload(), Plan(), 3, machine)


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_hybrid_divides_on_one_host(zero: Any) -> None:
    """A rank has the same states as in a job with only the ranks of its group; only gradients pass between groups."""
    for machine in (MACHINE, replace(MACHINE, shared=False)):
        alone = estimate_workload(_workload(), Plan(zero=zero), 2, machine)
        hybrid = estimate_workload(_workload(), Plan(zero=zero, data_shard=2), 4, machine)
        for part in ("weights", "gradients", "optimizer", "buffers"):
            assert hybrid.parts[part] == alone.parts[part]
        shards = alone.parts["gradients"] // (1 if zero >= 2 else 2)
        more = hybrid.times["communication"] - alone.times["communication"]
        assert more == pytest.approx(shards / machine.bandwidth, rel=0.01)


def test_communication_that_overlaps_the_backward_pass_takes_no_time() -> None:
    slow = replace(MACHINE, bandwidth=1e6)
    with torch.device("meta"):
        model, example = nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(4))), torch.empty(64, 1024)
    overlapped, blocking = (
        estimate(model, Plan(), 4, example=example, machine=replace(slow, overlap=overlap)).times
        for overlap in (True, False)
    )
    everything = 2 * 3 / 4 * 4 * sum(parameter.numel() for parameter in model.parameters()) / 1e6
    assert blocking["communication"] == pytest.approx(everything, rel=0.01)
    hidden = blocking["communication"] - overlapped["communication"]
    assert hidden == pytest.approx(2 / 3 * blocking["compute"], rel=0.01)


def test_ranks_of_a_host_share_its_traffic_to_other_hosts() -> None:
    """With 4 ranks on each of 2 hosts, 4 network adapters carry the traffic of a group."""
    hosts = replace(MACHINE, hosts=2, shared=False)
    plan = Plan(zero=1)
    seconds = [
        estimate_workload(_workload(), plan, 8, replace(hosts, host_bandwidth=bandwidth)).times
        for bandwidth in (None, 1e9, 5e7)
    ]
    one, same, slow = (each["communication"] for each in seconds)
    assert same == one  # at most 1e9, as within a host
    assert slow == pytest.approx(5 * one)
    assert hosts.bandwidth_among([0, 4], 8) == 1e9
    assert replace(hosts, host_bandwidth=5e7).bandwidth_among([0, 4], 8) == 5e7
    assert replace(hosts, host_bandwidth=5e7).bandwidth_among([4, 5], 8) == 1e9


@pytest.mark.parametrize(
    ("compression", "fraction"), [("bf16", 0.5), ("int8", 0.254), ("topk", 0.02), ("powersgd", 0.0208)]
)
def test_compression_reduces_the_bytes_between_hosts(compression: Any, fraction: float) -> None:
    machine = replace(MACHINE, hosts=2, shared=False, host_bandwidth=1e6)
    plans = [Plan(), Plan(compression=compression)]
    with torch.device("meta"):
        workload = Workload(model=_two_layers(), example=torch.empty(4, 256))
    plain, compressed = plan_candidates(workload, 2, machine, plans)[::-1]
    assert (plain.plan, compressed.plan) == tuple(plans)
    assert compressed.times["communication"] == pytest.approx(
        fraction * plain.times["communication"], rel=0.1
    )
    assert (compressed.parts["buffers"] > 0) == (compression != "bf16")


def test_in_place_products_count() -> None:
    a, b, total = torch.ones(4, 8), torch.ones(8, 16), torch.zeros(4, 16)
    with MemoryTracker([]) as tracker:
        total.addmm_(a, b)
    assert tracker.flops == 2 * 4 * 8 * 16


def test_states_of_adapters_only() -> None:
    base, plan = _workload(), Plan(lora=LoRA(rank=4, targets="*.qkv"))
    found = estimate_workload(base, plan, 1, MACHINE)
    adapters = GPT.layers * 4 * (GPT.width + 3 * GPT.width)
    assert found.parts["optimizer"] == pytest.approx(8 * adapters, abs=1024)
    assert found.parts["gradients"] == pytest.approx(4 * adapters, abs=512)
    assert all(parameter.requires_grad for parameter in base.model.parameters())
    with pytest.raises(PlanError, match="nearest plan: base=None"):
        estimate_workload(base, Plan(lora=LoRA(base="int8")), 1, MACHINE)


def test_more_micro_batches_take_more_time_and_no_more_activations() -> None:
    one, four = (estimate_workload(_workload(micro_batches=n), Plan(), 2, MACHINE) for n in (1, 4))
    assert four.times["compute"] == pytest.approx(4 * one.times["compute"], rel=0.05)
    assert four.parts["activations"] == one.parts["activations"]


def test_the_start_counts_if_it_needs_more_than_a_step() -> None:
    found = Estimate(Plan(), {"process": 5, "weights": 1}, start=9, times={"compute": 1.0})
    assert found.peak == 9 and not found.fits(8)

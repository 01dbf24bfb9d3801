"""Who divides what: all ranks of a group, or those of each host among themselves.

Divided among the ranks of a host only, states are kept once on every host, and what a step gathers stays inside one;
between hosts there is an all-reduce of a rank's shard of the gradients (Zhao et al., 2023, "PyTorch FSDP", hybrid sharding).
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import torch.distributed as dist

from farandole.comm import endpoint
from farandole.comm.communicator import Communicator
from farandole.comm.fallback import local_group
from farandole.plan import PlanError


@dataclass(frozen=True)
class Division:
    """`shards` are the ranks that divide states, `replicas` those that have the same shard as this one, if any."""

    shards: Communicator
    replicas: Communicator | None = None


def divide(comm: Communicator, *, hybrid: bool) -> Division:
    """The division of `comm`: by all, or with `hybrid` by the ranks of each host.  Called by all ranks.

    Raises `PlanError` on all of them where hosts have different numbers of ranks.
    """
    if not hybrid:
        return Division(comm)
    hosts = comm.all_gather_object(endpoint.host_identity())
    counts = Counter(hosts)
    if len(counts) == 1:
        return Division(comm)
    if len(set(counts.values())) > 1:
        raise PlanError(
            f"hybrid=True with {', '.join(map(str, counts.values()))} ranks on the hosts: all need equally many; nearest "
            f"plan: hybrid=False"
        )
    members = [[rank for rank, host in enumerate(hosts) if host == name] for name in counts]
    shards = _mine(comm, members)
    replicas = _mine(comm, [list(ranks) for ranks in zip(*members, strict=True)])
    return Division(shards, replicas)


def _mine(comm: Communicator, groups: list[list[int]]) -> Communicator:
    """A communicator of those among `groups`, which are ranks of `comm`, that have this rank.

    It is over a group of torch, unlike those of `split`, so that CUDA tensors go through NCCL.
    """
    own = next(ranks for ranks in groups if comm.rank in ranks)
    return Communicator(local_group(comm.group, [dist.get_global_rank(comm.group, rank) for rank in own]))

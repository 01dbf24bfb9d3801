"""Who divides what: all ranks of a group, or those of each host among themselves.

Divided among the ranks of a host only, states are kept once on every host, and what a step gathers stays inside one;
between hosts there is an all-reduce of a rank's shard of the gradients (Zhao et al., 2023, "PyTorch FSDP", hybrid sharding).
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from farandole.comm import endpoint
from farandole.comm.communicator import Communicator
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
    host, place = next((h, ranks.index(comm.rank)) for h, ranks in enumerate(members) if comm.rank in ranks)
    shards, replicas = comm.split(host), comm.split(place)
    assert shards is not None and replicas is not None  # every rank is in both
    return Division(shards, replicas)

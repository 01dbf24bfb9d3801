"""Groups whose ranks simulate several hosts on one machine; the connections between hosts are real."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch.distributed as dist

from farandole.comm import Options, endpoint


@contextmanager
def on_hosts(host_of: Sequence[int | str], rank: int) -> Iterator[None]:
    """Make groups that are created in this context treat rank r as a rank on host `host_of[r]`."""
    identity, name = endpoint.host_identity, endpoint.gethostname
    endpoint.host_identity = lambda: f"{identity()}-{host_of[rank]}"
    name_here = host_of[rank] if isinstance(host_of[rank], str) else f"host{host_of[rank]}"
    endpoint.gethostname = lambda: name_here
    try:
        yield
    finally:
        endpoint.host_identity, endpoint.gethostname = identity, name


def hierarchical_group(host_of: Sequence[int], rank: int, **options) -> dist.ProcessGroup:
    """Return a group of the first ranks, with rank r on host `host_of[r]`."""
    with on_hosts(host_of, rank):
        group = dist.new_group(list(range(len(host_of))), backend="farandole", pg_options=Options(**options))
    assert rank >= len(host_of) or group._host.consensus is not None
    return group

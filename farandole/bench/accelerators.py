"""Published speeds of accelerators, for planning on a machine that lacks these accelerators.

The figures are peak values from the vendors' data sheets: FLOP/s without sparsity, and link bandwidths per direction.
Measured speeds are lower.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from farandole.data.wording import short, size

GIB = 1 << 30


@dataclass(frozen=True, kw_only=True)
class Accelerator:
    """The published specifications of an accelerator, and of the host in which it is sold.

    Args:
        memory: the memory that the driver reports, in bytes.
        flops: maps each precision to the FLOP/s of matrix products.
        stream: the bandwidth of the accelerator's memory, in bytes per second.
        bandwidth: the bandwidth to the other accelerators in the host, in bytes per second.
        host_bandwidth: the network bandwidth to other hosts, per accelerator, in bytes per second.
        per_host: the number of accelerators in a host.
        source: the data sheets with these figures.
    """

    name: str
    memory: int
    flops: Mapping[str, float]
    stream: float
    bandwidth: float
    host_bandwidth: float
    per_host: int
    source: str

    def hosts(self, ranks: int) -> int:
        """Return the smallest number of hosts among which `ranks` accelerators can be divided equally."""
        least = -(-ranks // self.per_host)
        return next(count for count in range(least, ranks + 1) if ranks % count == 0)


def _speeds(half: float, single: float) -> dict[str, float]:
    return {"fp32": single, "bf16": half, "fp16": half}


_A100 = Accelerator(
    name="a100",
    memory=80 * GIB,
    flops=_speeds(312e12, 19.5e12),
    stream=2.04e12,
    bandwidth=300e9,
    host_bandwidth=25e9,
    per_host=8,
    source="data sheets of NVIDIA A100 80 GB SXM and DGX A100",
)
_H100 = Accelerator(
    name="h100",
    memory=79 * GIB,
    flops=_speeds(989e12, 67e12),
    stream=3.35e12,
    bandwidth=450e9,
    host_bandwidth=50e9,
    per_host=8,
    source="data sheets of NVIDIA H100 SXM and DGX H100",
)
_H200 = replace(
    _H100,
    name="h200",
    memory=140 * GIB,
    stream=4.8e12,
    source="data sheets of NVIDIA H200 SXM and DGX H200",
)
_MI300X = Accelerator(
    name="mi300x",
    memory=191 * GIB,
    flops=_speeds(1307e12, 163e12),
    stream=5.3e12,
    bandwidth=448e9,
    host_bandwidth=50e9,
    per_host=8,
    source="data sheet of AMD Instinct MI300X; 400 Gbit/s to other hosts per accelerator",
)

ACCELERATORS = {one.name: one for one in (_A100, _H100, _H200, _MI300X)}
"""The known accelerators, keyed by name."""

DEFAULT = "h100"
"""The name of the accelerator whose figures are used if the user does not name an accelerator."""


def described(
    accelerator: Accelerator,
    *,
    memory: bool,
    flops: bool,
    stream: bool,
    bandwidth: bool,
    host_bandwidth: bool,
) -> str:
    """Return a line with the selected published values and their source, or "" if no value is selected."""
    values = {
        f"{size(accelerator.memory)} of memory": memory,
        f"{short(accelerator.flops['bf16'])}FLOP/s in bf16": flops,
        f"{short(accelerator.stream)}B/s of memory traffic": stream,
        f"{short(accelerator.bandwidth)}B/s between ranks of a host": bandwidth,
        f"{short(accelerator.host_bandwidth)}B/s to other hosts": host_bandwidth,
    }
    if not any(values.values()):
        return ""
    chosen = ", ".join(text for text, is_chosen in values.items() if is_chosen)
    return f"Published peaks of {accelerator.name}: {chosen} ({accelerator.source}); specify measured speeds if available"

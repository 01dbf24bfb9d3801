"""Update the algorithm table in farandole/comm/algorithms/table.json.  Requires root, ip and tc.

    python -m benchmarks.tables

Both links are simulated on this machine: a 1 Gbit/s link between two network namespaces, and loopback between four
hosts (UTS namespaces) that share one network.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks.measure import arguments
from benchmarks.namespaces import two_hosts, why_not
from farandole.comm.algorithms.table import Table

TABLE = Path(__file__).parent.parent / "farandole" / "comm" / "algorithms" / "table.json"
PORT = 29555
TIMEOUT_S = 900

Start = Callable[[Sequence[str]], subprocess.Popen]


def measure(starts: list[Start], address: str, link: str) -> Table:
    """Run `farandole tune` on one host for each function in `starts`, and return the measured table."""
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder, "table.json")
        processes = []
        for number, start in enumerate(starts):
            command = [
                sys.executable,
                "-m",
                "farandole",
                "launch",
                "--nproc-per-node",
                "1",
                "--nodes",
                str(len(starts)),
            ]
            command += ["--node-rank", str(number), "--rendezvous", f"{address}:{PORT}", "-m", "farandole"]
            processes.append(start([*command, "tune", "--output", str(output), "--link", link]))
        try:
            statuses = [process.wait(TIMEOUT_S) for process in processes]
        finally:
            for process in processes:
                process.kill()
        if any(statuses):
            raise SystemExit(
                f"farandole tune failed: expected exit status 0 on all hosts, got {statuses}; see the output above"
            )
        return Table.read(str(output))


def main() -> None:
    """Measure both links and write the table."""
    if reason := why_not():
        raise SystemExit(f"cannot simulate hosts on this machine: {reason}")
    with two_hosts(rate="1gbit") as hosts:
        slow = measure([host.start for host in hosts], hosts[0].address, "1 Gbit/s, 2 network namespaces")
    alone = ["unshare", "--uts"]
    fast = measure(
        [lambda command: subprocess.Popen([*alone, *command])] * 4,
        "127.0.0.1",
        "loopback, 4 hosts on a machine",
    )
    TABLE.write_text(Table((*slow.links, *fast.links)).dump())
    print(f"table written to {TABLE}")


if __name__ == "__main__":
    arguments(__doc__).parse_args()
    main()

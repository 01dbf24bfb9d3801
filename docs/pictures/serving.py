"""Draw the pictures of `farandole serve`'s pages: screenshots of servers whose small models have random weights."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from pathlib import Path

from playwright.sync_api import Route

from farandole.serve.http import page as pages

WORDS = "red|green|blue|one|two|three|cat|dog|bird|sun|moon"
ANSWER = f"(({WORDS}) ){{40}}({WORDS})\\."


def drawings() -> dict[str, tuple[list[Path], Callable[[Path], None]]]:
    """Return the files of each page and the function that draws the page, by the picture's name."""
    folder = Path(pages.__file__).parent / "pages"
    return {
        name: ([folder / file for file in (f"{page}.html", "common.js", "style.css")], draw)
        for name, page, draw in (
            ("serving", "generation", draw_page),
            ("encoder", "encoder", draw_encoder_page),
        )
    }


def draw_page(path: Path) -> None:
    """Write the picture."""
    from farandole.serve.request import Sampling
    from tests.serve.browser import running_browser
    from tests.serve.server import eventually, serving, write_folder

    def constrain(route: Route) -> None:
        """Let the model with random weights answer in words."""
        body = route.request.post_data_json
        assert isinstance(body, dict)
        route.continue_(post_data=json.dumps({**body, "regex": ANSWER}))

    folder = write_folder(Path(tempfile.mkdtemp()))
    with (
        serving(folder, store="slots", max_running=8) as (address, service),
        running_browser(1100, 800) as context,
    ):
        page = context.new_page()
        page.route("**/v1/chat/completions", constrain)
        page.goto(address)
        long = Sampling(max_tokens=1500, ignore_eos=True)
        short = Sampling(max_tokens=30, ignore_eos=True)
        for number in range(9):
            service.submit([([3 + number] * (20 + 23 * number), short if number % 4 == 1 else long)])
        page.locator("#prompt").fill("Which animal sees the moon?")
        page.locator("#prompt").press("Enter")
        page.locator("#log .note", has_text="tokens").wait_for(timeout=60_000)
        eventually(lambda: service.engine.metrics.generated_tokens > 2000, 60)
        page.wait_for_timeout(1000)  # for the next data, and the movement of a slot
        page.screenshot(path=path)


def draw_encoder_page(path: Path) -> None:
    """Write the picture of the page of an encoder."""
    from tests.serve.browser import running_browser
    from tests.serve.test_embeddings import serving, write_encoder

    texts = ["red cat", "red dog", "green bird", "one two three", "one two", "say sun and moon"]
    folder = write_encoder(Path(tempfile.mkdtemp()))
    with serving(folder) as (address, _), running_browser(1100, 640) as context:
        page = context.new_page()
        page.goto(address)
        page.locator("#texts").fill("\n".join(texts))
        page.get_by_role("status").get_by_text("connected").wait_for(timeout=60_000)
        for _ in range(5):
            page.get_by_role("button", name="Embed").click()
            page.locator("#matrix td").first.wait_for(timeout=60_000)
            page.wait_for_timeout(700)
        page.screenshot(path=path)

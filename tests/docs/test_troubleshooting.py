"""Each message on the page of troubleshooting is one that the package prints."""

from __future__ import annotations

import re

import pytest

from tests.docs.prose import ROOT, tracked

PAGE = (ROOT / "docs" / "troubleshooting.md").read_text()
OTHERS = {"not available, please use gloo": "Accelerate"}
HEADINGS = [
    title
    for title in re.findall(r"^### (.*)", PAGE, re.MULTILINE)
    if not title.startswith(("The ", "needs X")) and title not in OTHERS
]
SOURCE = re.sub(r'"\s*f?"', "", "\n".join(path.read_text() for path in tracked("farandole/*.py")))


@pytest.mark.parametrize("heading", HEADINGS)
def test_a_message_exists(heading: str) -> None:
    message = heading.replace("[train]", "[{extra}]")
    assert message in SOURCE, f"no message contains {message!r}: update docs/troubleshooting.md"

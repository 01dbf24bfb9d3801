"""Every picture of the documentation is as new as its data and the code that draws it."""

from __future__ import annotations

import re

import pytest

from docs.pictures import draw
from tests.docs.prose import tracked


@pytest.mark.parametrize("picture", draw.pictures(), ids=lambda picture: picture.path.name)
def test_a_picture_is_up_to_date(picture) -> None:
    assert picture.stored_digest() == picture.digest(), "run: make pictures"


def test_every_picture_is_drawn_and_shown() -> None:
    drawn = {picture.path for picture in draw.pictures()}
    assert set(tracked("docs/*.png")) == drawn
    shown = set()
    for page in tracked("README.md", "docs/*.md"):
        shown |= {
            (page.parent / name).resolve()
            for name in re.findall(r"!\[[^]]*\]\(([^)]+\.png)\)", page.read_text())
        }
    assert shown == drawn

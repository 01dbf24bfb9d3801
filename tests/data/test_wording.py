"""Formatting of numbers and sizes."""

from __future__ import annotations

import pytest

from farandole.data.wording import counted, short, size


@pytest.mark.parametrize(("number", "text"), [(0, "0 tokens"), (1, "1 token"), (12345, "12,345 tokens")])
def test_counted(number: int, text: str) -> None:
    assert counted(number, "token") == text


@pytest.mark.parametrize(
    ("number", "text"), [(850, "850"), (42_300, "42 k"), (2_600_000, "2.6 M"), (48 * 10**12, "48.0 T")]
)
def test_short(number: int, text: str) -> None:
    assert short(number) == text


@pytest.mark.parametrize(
    ("count", "text"), [(0, "0 bytes"), (1536, "1.5 KiB"), (20 << 30, "20.0 GiB"), (10**22, "8,673.6 EiB")]
)
def test_size(count: int, text: str) -> None:
    assert size(count) == text

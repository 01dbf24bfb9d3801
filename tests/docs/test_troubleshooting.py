"""The sections of the troubleshooting page and the messages of the package refer to each other."""

from __future__ import annotations

import ast
import functools
import re

import pytest

from farandole._troubleshooting import PAGE, Documented, see
from farandole.cli.explain import name_of
from tests.docs.prose import ROOT, tracked

TEXT = (ROOT / PAGE).read_text()
HEADINGS = re.findall(r"^### (.*)", TEXT, re.MULTILINE)
SOURCE = re.sub(r'"\s*f?"', "", "\n".join(path.read_text() for path in tracked("farandole/*.py")))

SYMPTOMS = {"The loss is NaN", "The training is slower than with Gloo"}
"""Sections that describe an observation instead of a message."""

NOT_LINKED = {
    "not available, please use gloo": "Accelerate prints this message",
    "The training is slower than with Gloo": "no message reports that a run is slow",
}
"""Sections to which no message refers."""


@functools.cache
def linked_sections() -> dict[str, str]:
    """Return the sections to which the code refers, each with a place in the code."""
    found = {}
    for path in tracked("farandole/*.py"):
        if path.stem == "_troubleshooting":
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            match node:
                case ast.Call(func=ast.Name("see"), args=[ast.Constant(str(section))]):
                    found[section] = f"{path.relative_to(ROOT)}:{node.lineno}"
                case ast.Assign(targets=[ast.Name("_section")], value=ast.Constant(str(section))):
                    found[section] = f"{path.relative_to(ROOT)}:{node.lineno}"
    return found


@pytest.mark.parametrize("heading", sorted({*HEADINGS} - SYMPTOMS - NOT_LINKED.keys()))
def test_a_message_exists(heading: str) -> None:
    assert heading in SOURCE, f"no message contains {heading!r}: update {PAGE}"


def test_every_link_in_the_code_leads_to_a_section() -> None:
    names = {name_of(heading) for heading in HEADINGS}
    missing = {section: place for section, place in linked_sections().items() if section not in names}
    assert not missing


def test_every_section_is_linked_from_a_message() -> None:
    linked = linked_sections()
    assert {heading for heading in HEADINGS if name_of(heading) not in linked} == NOT_LINKED.keys()


def test_sections_are_ordered_and_listed_by_message() -> None:
    for area in TEXT.split("\n## ")[1:]:
        headings = re.findall(r"^### (.*)", area, re.MULTILINE)
        assert headings == sorted(headings, key=str.lower), area.partition("\n")[0]
    assert re.findall(r"^\| \[(.*?)\]\(#(.*?)\)", TEXT, re.MULTILINE) == [
        (heading, name_of(heading)) for heading in sorted(HEADINGS, key=str.lower)
    ]


class _Error(Documented, ValueError):
    _section = "configerror"


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        ("wrong", "wrong; see 'farandole explain configerror'"),
        ("line 1\nline 2", "line 1\nline 2\nSee 'farandole explain configerror'"),
        ("key or word?", "key or word? See 'farandole explain configerror'"),
        (f"full{see('dataerror')}", "full; see 'farandole explain dataerror'"),
        (f"full{see('dataerror')} (rank 1)", "full (rank 1); see 'farandole explain dataerror'"),
        (f"plan: {_Error('wrong')}", "plan: wrong; see 'farandole explain configerror'"),
        ("", ""),
    ],
)
def test_a_message_ends_with_one_link(message: str, expected: str) -> None:
    assert str(_Error(message)) == expected
    assert str(_Error(str(_Error(message)))) == expected


def test_an_error_without_a_section_has_no_link() -> None:
    class Plain(Documented, RuntimeError):
        pass

    assert str(Plain("failed")) == "failed"

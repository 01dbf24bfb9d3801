"""`farandole explain` prints the sections of the troubleshooting page."""

from __future__ import annotations

import re

import pytest
from typer.testing import CliRunner, Result

from farandole.cli.explain import causes, complete_sections, name_of, sections
from farandole.cli.main import app
from farandole.comm.errors import RankDied


def _explain(*words: str) -> Result:
    return CliRunner().invoke(app, ["explain", *words])


def test_the_list_contains_all_sections() -> None:
    result = _explain()
    assert result.exit_code == 0
    listed = {line.partition(" ")[0] for line in result.stdout.splitlines() if not line.startswith(" ")}
    assert listed == set(map(name_of, sections()))
    assert set(causes()) == set(sections())


@pytest.mark.parametrize("title", sections())
def test_a_section_is_found_by_its_name_and_within_a_message(title: str) -> None:
    own = _explain(name_of(title)).stdout
    assert own.split()[: len(title.split())] == title.split()
    assert "](" not in own
    assert own in _explain("error:", *title.split(), "(rank 1)").stdout


def test_the_section_that_a_message_refers_to() -> None:
    found = re.search(r"'farandole (explain [\w-]+)'$", str(RankDied("rank 1 died")))
    assert found is not None
    result = CliRunner().invoke(app, found[1].split())
    assert "it was killed, crashed, or ran out of memory" in " ".join(result.stdout.split())


@pytest.mark.parametrize(
    ("words", "hint"),
    [("rankdie", "did you mean rankdied?"), ("no such text", "farandole explain lists all sections")],
)
def test_an_unknown_section(words: str, hint: str) -> None:
    result = _explain(*words.split())
    assert result.exit_code == 2
    assert result.stderr == f"farandole explain: no section explains {words!r}; {hint}\n"


def test_completion() -> None:
    assert complete_sections("rankd") == ["rankdied"]

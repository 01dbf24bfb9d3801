"""Words that readers stumble over, each with the word to use, and misspelled words."""

from __future__ import annotations

import re

import pytest

from tests.docs.prose import ROOT, prose

WORDS = {
    r"anew": "again",
    r"beside(?! the point)": "next to, compared with, or in addition to",
    r"mend(s|ed|ing)?": "fix",
    r"(leave|left|leaving)s? away": "omit",
    r"whoever|whomever|whichever": "name the subject",
    r"of which there (is|are)": "with",
    r"as ever": "as usual",
    r"thereby|therein|thereof|hereby|wherein|whereby|henceforth|hitherto|thence|whence": "plain words",
    r"lender|loan(s|ed)?|lend(s|ing)?|lent": "buffer pool, acquire, release",
    r"rehears(e|es|ed|al|als)": "dry run",
    r"contender(s)?": "implementation",
    r"troupe(s)?": "process set",
    r"roster": "membership",
    r"mailbox(es)?|envelope(s)?": "unexpected message, header",
    r"verdict(s)?": "failure consensus, result",
    r"remark(s|ed)?": "warning, note",
    r"settle(s|d)?": "wait",
    r"hang(s)? up": "close",
    r"bestow|amiss|nought|ere|lest|twofold|threefold": "plain words",
}
PATTERN = re.compile(r"\b(?:" + "|".join(f"(?:{word})" for word in WORDS) + r")\b", re.IGNORECASE)


def test_prose_uses_the_words_of_the_field() -> None:
    found = []
    for place, line in prose():
        if place.startswith("tests/docs/") or place.startswith("CHANGELOG.md"):
            continue
        for match in PATTERN.finditer(line):
            use = next(use for word, use in WORDS.items() if re.fullmatch(word, match[0], re.IGNORECASE))
            found.append(f"{place}: {match[0]!r}, use: {use}")
    if found:
        pytest.fail(f"{len(found)} words to replace:\n" + "\n".join(found), pytrace=False)


def test_words_are_spelled_correctly() -> None:
    """With codespell, which knows common misspellings; those words that are right here are in pyproject.toml."""
    from codespell_lib import main

    assert main(*(str(ROOT / name) for name in ("README.md", "docs", "farandole", "benchmarks", "labs"))) == 0

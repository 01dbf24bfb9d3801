"""References to sections of docs/troubleshooting.md, for error messages and warnings.

`farandole explain SECTION` prints a section.
"""

from __future__ import annotations

import re
from pathlib import Path

PAGE = "docs/troubleshooting.md"

_REFERENCE = re.compile(r"(?:;? |\n)[sS]ee 'farandole explain ([\w-]+)'")


def see(section: str) -> str:
    """Return a reference to `section` of the troubleshooting page, in the form "; see ...", to append to a message."""
    return f"; see 'farandole explain {section}'"


def page() -> str:
    """Return the text of the troubleshooting page."""
    package = Path(__file__).parent
    copy = package / Path(PAGE).name
    return (copy if copy.exists() else package.parent / PAGE).read_text(encoding="utf-8")


class Documented:
    """A base class for exceptions whose messages end with a reference to the troubleshooting page.

    The class attribute `_section` names the section.  If the message already contains references, for example in
    the quoted message of another error, the first reference is moved to the end and the others are removed.
    """

    _section = ""

    def __str__(self) -> str:
        message = super().__str__()
        references = _REFERENCE.findall(message)
        section = references[0] if references else self._section
        if not message or not section:
            return message
        message, reference = _REFERENCE.sub("", message), see(section)
        sentence = reference.removeprefix("; ").capitalize()
        if "\n" in message:
            return f"{message}\n{sentence}"
        return f"{message} {sentence}" if message.endswith(("?", ".")) else message + reference

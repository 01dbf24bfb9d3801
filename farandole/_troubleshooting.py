"""Links from error messages and warnings to the sections of docs/troubleshooting.md."""

from __future__ import annotations

import re

PAGE = "docs/troubleshooting.md"

_LINK = re.compile(rf"(?:;? |\n)[sS]ee {re.escape(PAGE)}#([\w-]+)")


def see(section: str) -> str:
    """Return a link to `section` of the troubleshooting page, in the form "; see ...", to append to a message."""
    return f"; see {PAGE}#{section}"


class Documented:
    """A base class for exceptions whose messages end with a link to the troubleshooting page.

    The link refers to the section `_section`.  If the message already contains links, for example in the quoted message
    of another error, the first of them is moved to the end of the message instead, and the others are removed.
    """

    _section = ""

    def __str__(self) -> str:
        message = super().__str__()
        links = _LINK.findall(message)
        section = links[0] if links else self._section
        if not message or not section:
            return message
        message = _LINK.sub("", message)
        if "\n" in message:
            return f"{message}\nSee {PAGE}#{section}"
        return f"{message} See {PAGE}#{section}" if message.endswith(("?", ".")) else message + see(section)

"""Links from error messages and warnings to the sections of docs/troubleshooting.md."""

from __future__ import annotations

import re

PAGE = "docs/troubleshooting.md"

_LINK = re.compile(rf"(?:;? |\n)[sS]ee {re.escape(PAGE)}#([\w-]+)")


def see(section: str) -> str:
    """Return the end of a message that refers to a section of the troubleshooting page."""
    return f"; see {PAGE}#{section}"


class Documented:
    """A base of exceptions whose messages end with a link to the troubleshooting page.

    The link refers to the section that the message already contains, for example in the message of another error, or
    else to `_section`.
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

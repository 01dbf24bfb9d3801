"""The page at `/`: a self-contained document that shows the server's state, and offers a chat or compares texts.

The page polls `/stats` while the page is visible, and stores the history in the browser.  While no page is open, the
server does no work for the page.

The Content-Security-Policy allows the page's own script and style, and connections to the same server.  Trusted types
make the browser refuse to interpret text as HTML, so that the output of a model cannot add elements to the document.
"""

from __future__ import annotations

import base64
import hashlib
import re
from pathlib import Path


def read_page(name: str) -> tuple[str, dict[str, str]]:
    """Return a document from `pages/`, and the HTTP headers to send with the document.

    The page header, the style sheet and the script are inlined in the document.
    """
    folder = Path(__file__).parent / "pages"

    def read(file: str) -> str:
        return (folder / file).read_text(encoding="utf-8")

    text = re.sub(r"<!-- (\S+\.html) -->\n", lambda found: read(found[1]), read(f"{name}.html"))
    text = re.sub(
        r'<link rel="stylesheet" href="(.*?)">', lambda found: f"<style>\n{read(found[1])}</style>", text
    )
    text = re.sub(r'<script src="(.*?)">', lambda found: f"<script>\n{read(found[1])}", text)
    policy = (
        "default-src 'none'",
        f"script-src {_hashes(text, 'script')}",
        f"style-src {_hashes(text, 'style')}",
        "connect-src 'self'",
        "img-src data:",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
    )
    headers = {
        "content-security-policy": "; ".join(policy),
        "x-content-type-options": "nosniff",
        "referrer-policy": "no-referrer",
        "cache-control": "no-cache",
    }
    return text, headers


def _hashes(text: str, tag: str) -> str:
    """Return the Content-Security-Policy sources that permit the inline elements with the name `tag` in a document."""
    digests = [
        hashlib.sha256(content.encode()).digest()
        for content in re.findall(rf"<{tag}>(.*?)</{tag}>", text, re.DOTALL)
    ]
    return " ".join(f"'sha256-{base64.b64encode(digest).decode()}'" for digest in digests)

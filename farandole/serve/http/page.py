"""The page at `/`: the server's state, and a chat or, for an encoder, a comparison of texts.

The page polls `/stats` while visible, and keeps recent states in the browser.

The Content-Security-Policy allows the page's own script and style, and connections to the same server.  Trusted Types
prevent the browser from interpreting a model's output as HTML.
"""

from __future__ import annotations

import base64
import hashlib
import re
from pathlib import Path


def read_page(name: str) -> tuple[str, dict[str, str]]:
    """Return a page from `pages/`, with its style sheet and script inlined, and the HTTP headers of the page."""
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
    """Return the Content-Security-Policy sources that permit the inline `tag` elements of a document."""
    digests = [
        hashlib.sha256(content.encode()).digest()
        for content in re.findall(rf"<{tag}>(.*?)</{tag}>", text, re.DOTALL)
    ]
    return " ".join(f"'sha256-{base64.b64encode(digest).decode()}'" for digest in digests)

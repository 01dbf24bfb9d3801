"""The page at `/`: a self-contained document that shows the state of the server and a chat.

The page requests `/stats` while the page is visible, and keeps the history itself.  The server computes nothing for the
page while no page is open.

The Content-Security-Policy allows the page's own script and style, and connections to the same server.  Trusted types
make the browser refuse to interpret text as HTML, so that the output of a model cannot become part of the document.
"""

from __future__ import annotations

import base64
import hashlib
import re
from pathlib import Path


def read_page() -> tuple[str, dict[str, str]]:
    """Return the document, and its HTTP headers."""
    text = (Path(__file__).parent / "page.html").read_text(encoding="utf-8")
    policy = (
        "default-src 'none'",
        f"script-src {_hash(text, 'script')}",
        f"style-src {_hash(text, 'style')}",
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


def _hash(text: str, tag: str) -> str:
    """Return the source expression that permits an inline element in the Content-Security-Policy header."""
    (content,) = re.findall(rf"<{tag}>(.*?)</{tag}>", text, re.DOTALL)
    return f"'sha256-{base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()}'"

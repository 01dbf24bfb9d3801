"""Check API keys, and limit the size and the transfer time of request bodies."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
from collections.abc import Awaitable, Callable, MutableMapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from farandole.serve.request import RequestError

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

PUBLIC = ("/", "/health")
"""The paths that clients may request without a key."""


@dataclass(frozen=True)
class Limits:
    """Limits on requests.

    Args:
        body_bytes: the maximum size of a body.
        body_s: the maximum time in seconds to receive a body.
        request_s: the maximum time in seconds for a whole request.
    """

    body_bytes: int = 8 << 20
    body_s: float = 30.0
    request_s: float = 600.0


def read_keys(path: Path) -> list[bytes]:
    """Read the SHA-256 hashes of API keys from a file that contains one hexadecimal hash per line.

    Raises:
        RequestError: if the file cannot be read, contains no hash, or contains a line that is not a hash.
    """
    try:
        lines = [line.split()[0] for line in path.read_text().splitlines() if line.strip()]
    except OSError as error:
        raise RequestError(
            "api_keys", f"cannot read {path}: {error.strerror}; check the path and the permissions"
        ) from None
    except UnicodeDecodeError:
        raise RequestError("api_keys", f"{path} is not text: expected one SHA-256 hash per line") from None
    for number, line in enumerate(lines, 1):
        if len(line) != 64 or not all(digit in "0123456789abcdefABCDEF" for digit in line):
            raise RequestError(
                "api_keys",
                f"line {number} of {path} is not a SHA-256 hash of 64 digits; hash a key with: printf %s KEY | sha256sum",
            )
    if not lines:
        raise RequestError("api_keys", f"{path} has no keys: expected one SHA-256 hash per line")
    return [bytes.fromhex(line) for line in lines]


class Guard:
    """Middleware that rejects requests without a valid key, and bodies that are too large or arrive too slowly."""

    def __init__(self, app: Any, limits: Limits, keys: Sequence[bytes]) -> None:
        self._app, self._limits, self._keys = app, limits, list(keys)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Reject a request, or pass it to the application."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = {name.lower(): value for name, value in scope["headers"]}
        if (
            self._keys
            and scope["path"] not in PUBLIC
            and not self._is_known(headers.get(b"authorization", b""))
        ):
            await _refuse(
                send, 401, "expected the header Authorization: Bearer KEY with a valid key", "invalid_api_key"
            )
            return
        limit = self._limits.body_bytes
        length = headers.get(b"content-length", b"0")
        if length.isdigit() and int(length) > limit:
            await _refuse(
                send, 413, f"body: expected at most {limit} bytes, got {int(length)}", "body_too_large"
            )
            return
        try:
            body = await self._read(receive, limit) if scope["method"] in ("POST", "PUT", "PATCH") else b""
        except TimeoutError:
            message = f"body: expected the complete body within {self._limits.body_s:g} s"
            await _refuse(send, 408, message, "body_timeout")
            return
        if body is None:
            await _refuse(send, 413, f"body: expected at most {limit} bytes, got more", "body_too_large")
            return
        sent = False

        async def again() -> MutableMapping[str, Any]:
            nonlocal sent
            if sent:
                return await receive()
            sent = True
            return {"type": "http.request", "body": body, "more_body": False}

        await self._app(scope, again, send)

    def _is_known(self, header: bytes) -> bool:
        """Check in constant time whether an Authorization header contains a valid key."""
        scheme, _, key = header.partition(b" ")
        digest = hashlib.sha256(key.strip()).digest()
        found = [hmac.compare_digest(digest, each) for each in self._keys]
        return any(found) and scheme.lower() == b"bearer"

    async def _read(self, receive: Receive, limit: int) -> bytes | None:
        """Return the body, b"" if the client disconnects, or None if the body is larger than `limit`."""
        parts, size = [], 0
        async with asyncio.timeout(self._limits.body_s):
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    return b""
                parts.append(message.get("body", b""))
                size += len(parts[-1])
                if size > limit:
                    return None
                if not message.get("more_body", False):
                    return b"".join(parts)


async def _refuse(send: Send, status: int, message: str, code: str) -> None:
    kind = "authentication_error" if status == 401 else "invalid_request_error"
    body = json.dumps({"error": {"message": message, "type": kind, "param": None, "code": code}}).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    if status == 401:
        headers.append((b"www-authenticate", b"Bearer"))
    if status in (408, 413):
        headers.append((b"connection", b"close"))
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})

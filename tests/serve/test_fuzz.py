"""Random requests never get an answer with status 500, and leave nothing in the engine."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import hypothesis
import pytest
import requests
import schemathesis
from hypothesis import HealthCheck, Phase, settings

from farandole.serve.http.guard import Limits
from tests.serve.server import NAME, eventually, serving, write_folder
from tests.serve.test_embeddings import serving as serving_encoder
from tests.serve.test_embeddings import write_encoder

EXAMPLES = 40
JSON = {"content-type": "application/json"}
COMPLETIONS, CHAT, EMBEDDINGS = "POST /v1/completions", "POST /v1/chat/completions", "POST /v1/embeddings"
VALID: dict[str, tuple[tuple[str, ...], Any]] = {
    "model": ((COMPLETIONS, CHAT, EMBEDDINGS), NAME),
    "max_tokens": ((COMPLETIONS, CHAT), 4),
    "prompt": ((COMPLETIONS, "POST /tokenize"), "say"),
    "input": ((EMBEDDINGS,), "say"),
    "messages": ((CHAT,), [{"role": "user", "content": "say"}]),
}
"""The operations that have each required field, and a valid value for the field."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(tmp_path_factory.mktemp("model"))


def statuses_of(made: Any) -> set[int]:
    """Send random requests for an operation, and return the statuses of the answers."""
    statuses: set[int] = set()
    strategies = [made.as_strategy(mode) for mode in schemathesis.GenerationMode]

    @settings(
        max_examples=EXAMPLES,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @hypothesis.seed(0)
    @hypothesis.given(hypothesis.strategies.one_of(*strategies), hypothesis.strategies.data())
    def send(case: schemathesis.Case, data: hypothesis.strategies.DataObject) -> None:
        body: Any = case.body
        if isinstance(body, dict) and body and data.draw(hypothesis.strategies.booleans()):
            # nearly all bodies with many random fields are invalid: keep one, and complete the others
            field = data.draw(hypothesis.strategies.sampled_from(sorted(body, key=str)))
            required = {name: value for name, value in VALID.items() if made.label in value[0]}
            case.body = {name: value for name, (_, value) in required.items()} | {field: body[field]}
        response = case.call(timeout=30)
        statuses.add(response.status_code)
        assert response.status_code < 500 or response.status_code == 504, response.text
        if 400 <= response.status_code < 500:
            assert response.json()["error"]["message"]

    send()
    return statuses


def all_statuses(address: str) -> dict[str, set[int]]:
    """Return the statuses of the answers to random requests, by operation."""
    operations = schemathesis.openapi.from_url(address + "/openapi.json").get_all_operations()
    return {made.label: statuses_of(made) for made in (operation.ok() for operation in operations)}


def test_random_requests_for_embeddings_never_get_500(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.ERROR)
    with serving_encoder(write_encoder(tmp_path), limits=Limits(request_s=2)) as (address, _):
        assert {200, 400} <= all_statuses(address)[EMBEDDINGS]
        for text in ("\\ud800", "\\u0000", "a" * 5000):
            for value in (f'"{text}"', f'["{text}"]', "[" * 20000, "[[]]", "[-1]", "[99999999999999999999]"):
                body = f'{{"model": "{NAME}", "input": {value}}}'
                answer = requests.post(address + "/v1/embeddings", body.encode(), timeout=30, headers=JSON)
                assert answer.status_code in (200, 400), (value[:200], answer.text)
    assert not caplog.records, caplog.text


def test_random_requests_never_get_500(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.ERROR)
    limits = Limits(request_s=2)
    with serving(folder, limits=limits, context=64) as (address, service):
        seen = all_statuses(address)
        assert {COMPLETIONS, CHAT, "GET /metrics"} <= seen.keys()
        assert {200, 400} <= seen[COMPLETIONS] & seen[CHAT], seen
        for text in ("\\ud800", "\\u0000", "a" * 5000):
            for path, body in (
                ("/v1/completions", f'{{"model": "{NAME}", "prompt": "{text}"}}'),
                (
                    "/v1/chat/completions",
                    f'{{"model": "{NAME}", "messages": [{{"role": "user", "content": "{text}"}}]}}',
                ),
                ("/v1/completions", f'{{"model": "{NAME}", "prompt": "a", "stop": "{text}"}}'),
                ("/v1/completions", f'{{"model": "{NAME}", "prompt": "a", "regex": "{text}"}}'),
                ("/tokenize", f'{{"prompt": "{text}"}}'),
                ("/v1/completions", f'{{"model": "{NAME}", "prompt": {"[" * 20000}'),
                ("/v1/completions", f'{{"model": "{NAME}", "prompt": "a", "temperature": NaN}}'),
            ):
                status = requests.post(address + path, body.encode(), timeout=30, headers=JSON).status_code
                assert status in (200, 400), (path, body[:200], status)
        eventually(lambda: not service.engine.has_work)
        service.engine.check_idle()
    assert not caplog.records, caplog.text

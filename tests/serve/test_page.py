"""The page at `/` in a real browser, and its data."""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import BrowserContext, Page, Route, expect

from farandole.serve.http.service import Service
from farandole.serve.llm import LLM
from farandole.serve.request import Sampling
from tests.serve.browser import find_browser, running_browser
from tests.serve.server import NAME, command, eventually, serving, write_folder
from tests.serve.test_embeddings import TEXTS, expected, write_encoder
from tests.serve.test_embeddings import serving as serving_encoder
from tests.serve.test_server import get

expect.set_options(timeout=60_000)
LONG = Sampling(max_tokens=1800, ignore_eos=True)
HTML = '<img src="x" onerror="document.title=1"><script>document.title=2</script>'

in_browser = pytest.mark.skipif(
    find_browser() is None, reason="Chromium is not installed; `make test` installs it with apt-get as root"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def browser() -> Iterator[BrowserContext]:
    with running_browser() as context:
        yield context


@pytest.fixture
def page(browser: BrowserContext) -> Iterator[Page]:
    """Yield a new page, on which no error may occur."""
    page = browser.new_page()
    errors: list[Any] = []
    page.on("pageerror", lambda error: errors.append(error))
    yield page
    page.close()
    assert not errors


def open_page(page: Page, address: str) -> None:
    page.goto(address)
    expect(page.get_by_role("status")).to_have_text("connected")


def ask(page: Page, text: str, most: int) -> None:
    page.get_by_label("Maximum tokens").fill(str(most))
    page.get_by_label("Temperature").fill("0")
    page.locator("#prompt").fill(text)
    page.locator("#prompt").press("Enter")


@contextmanager
def steps_of(service: Service) -> Iterator[threading.Semaphore]:
    """Yield a semaphore that each step of the engine acquires, so that no request ends before the browser sees it."""
    gate, run = threading.Semaphore(0), service.engine.runner.run

    def gated(*arguments: Any) -> Any:
        gate.acquire()
        return run(*arguments)

    service.engine.runner.run = gated  # type: ignore[method-assign]
    try:
        yield gate
    finally:
        gate.release(1_000_000)


def test_stats(folder: Path) -> None:
    with serving(folder, store="slots") as (address, service), steps_of(service) as steps:
        before = json.loads(get(address, "/stats")[1])
        (replica,) = before["replicas"]
        assert (before["running"], replica["sequences"], replica["kv"]["blocks"]) == (0, [], 0)
        service.submit([([3] * 20, LONG)])
        steps.release(5)
        eventually(lambda: service.engine.metrics.generated_tokens == 5)
        stats = json.loads(get(address, "/stats")[1])
        (replica,) = stats["replicas"]
        (sequence,) = replica["sequences"]
        assert (sequence["prompt"], sequence["most"], sequence["blocks"]) == (20, 1800, [0])
        assert (sequence["generated"], sequence["stored"], replica["kv"]["used"]) == (5, 24, 24)
        assert sum(stats["latencies"]["first_token"]["counts"]) == 1
        assert stats["model"] == NAME


@in_browser
def test_the_page_loads_nothing_else_and_refuses_html(folder: Path, page: Page) -> None:
    requests: list[str] = []
    page.on("request", lambda request: requests.append(request.url))
    with serving(folder) as (address, _):
        answer = page.goto(address)
        assert answer is not None
        policy = answer.headers["content-security-policy"]
        assert "default-src 'none'" in policy and "unsafe" not in policy
        expect(page.get_by_role("status")).to_have_text("connected")
        expect(page.get_by_role("heading", level=1)).to_have_text(NAME)
        refused = (
            "try { document.body.innerHTML = '<b></b>'; false } catch (error) { error instanceof TypeError }"
        )
        assert page.evaluate(refused)
    assert {url for url in requests if not url.startswith("data:")} == {address + "/", address + "/stats"}


@in_browser
def test_chat(folder: Path, page: Page) -> None:
    llm = LLM(folder)
    messages = []
    with serving(folder) as (address, service):
        open_page(page, address)
        for content in ("say <b>red</b> cat", "two"):  # the second request contains the first answer
            messages.append({"role": "user", "content": content})
            ask(page, content, 30)
            expected = llm.generate([llm.render(messages)], max_tokens=30, temperature=0)[0].text
            answer = page.locator("#log .assistant").last
            expect(answer.locator(".note")).to_contain_text("30 tokens")
            assert answer.locator("span").first.text_content() == expected
            messages.append({"role": "assistant", "content": expected})
        expect(page.locator("#log .user").first).to_have_text("say <b>red</b> cat")
        expect(page.locator("#finished b")).to_have_text("2")
        expect(page.locator("#ttft small")).to_contain_text("95 %")
        page.get_by_role("button", name="Clear").click()
        expect(page.locator("#log")).to_be_empty()
        ask(page, "x" * 3000, 30)  # does not fit in the context
        expect(page.get_by_role("alert")).to_contain_text("does not fit")
        assert not service.engine.has_work


@in_browser
def test_stop_frees_the_slot(folder: Path, page: Page) -> None:
    with serving(folder) as (address, service), steps_of(service) as steps:
        open_page(page, address)
        ask(page, "say", 1900)
        steps.release(5)
        expect(page.locator("#sequences td").nth(2)).to_have_text("5")
        page.get_by_role("button", name="Stop").click()
        expect(page.locator("#log .note")).to_have_text("stopped")
        eventually(lambda: steps.release() or not service.engine.has_work)  # type: ignore[func-returns-value]
        assert service.engine.metrics.requests == {"cancelled": 1}


@in_browser
def test_output_of_the_model_is_text(folder: Path, page: Page) -> None:
    """Let the model write HTML, with a constraint that the browser adds to the request."""

    def constrain(route: Route) -> None:
        body = route.request.post_data_json
        route.continue_(post_data=json.dumps({**body, "regex": re.escape(HTML)}))

    page.route("**/v1/chat/completions", constrain)
    with serving(folder) as (address, _):
        open_page(page, address)
        ask(page, HTML, 200)
        answer = page.locator("#log .assistant")
        expect(answer.locator(".note")).to_contain_text("ended by stop")
        assert answer.locator("span").first.text_content() == HTML
        assert page.locator("img").count() == 0
        assert page.title() == "farandole serve"


@in_browser
def test_slots_grow_and_are_compacted(folder: Path, page: Page) -> None:
    with (
        serving(folder, store="slots", max_running=4) as (address, service),
        steps_of(service) as steps,
    ):
        open_page(page, address)
        tickets = [service.submit([([3 + number] * 200, LONG)])[0] for number in range(3)]
        steps.release(10)
        expect(page.locator("#sequences tr")).to_have_count(3)
        expect(page.locator(".slot")).to_have_count(4)
        expect(page.locator("#memory")).to_contain_text("slots of 256 positions")
        steps.release(60)
        expect(page.locator("#memory")).to_contain_text("slots of 512 positions, in chunks of 256")
        bar = page.locator(".sequence", has_text="request 2")
        expect(bar).to_have_attribute("data-slot", "2")
        service.cancel(tickets[:1])
        steps.release()
        expect(bar).to_have_attribute("data-slot", "0")
        expect(page.locator("#moves")).to_contain_text(
            "1 compaction moves; last: request 2 from slot 2 to slot 0"
        )
        expect(page.locator(".sequence")).to_have_count(2)
        service.cancel(tickets)
        steps.release()
        expect(page.locator(".slot")).to_have_count(0)


@in_browser
def test_pages(folder: Path, page: Page) -> None:
    with serving(folder, max_running=4) as (address, service), steps_of(service) as steps:
        open_page(page, address)
        expect(page.locator("#memory")).to_contain_text("512 pages of 16 positions")
        service.submit([([3] * 200, LONG)])
        steps.release(3)
        eventually(lambda: service.engine.metrics.generated_tokens == 3)
        service.submit([([3] * 200, LONG)])
        steps.release(2)  # the second request joins after the step that has begun
        expect(page.locator("#sequences tr")).to_have_count(2)
        expect(page.locator("#moves")).to_contain_text("12 pages shared")
        assert page.locator("#map canvas").bounding_box() is not None


@in_browser
def test_replicas(page: Page, tmp_path: Path) -> None:
    folder = write_folder(tmp_path, context=1 << 13)  # so that the request does not end before it is stopped
    with command(folder, "--replicas", "2") as (address, _):
        open_page(page, address)
        expect(page.get_by_label("Replica")).to_have_value("0")
        ask(page, "say", 8000)
        expect(page.locator("#sequences tr")).to_have_count(1)
        expect(page.locator("#running b")).to_have_text("1")
        page.get_by_label("Replica").select_option("1")
        expect(page.locator("#sequences tr")).to_have_count(0)
        page.get_by_role("button", name="Stop").click()
        expect(page.locator("#log .note")).to_have_text("stopped")


@in_browser
def test_an_api_key(folder: Path, page: Page) -> None:
    with serving(folder, keys=(hashlib.sha256(b"one").digest(),)) as (address, service):
        assert get(address, "/stats")[0] == 401
        page.goto(address)
        status = page.get_by_role("status")
        expect(status).to_have_text("API key required")
        page.get_by_label("API key").fill("one")
        page.get_by_role("button", name="Use key").click()
        expect(status).to_have_text("connected")
        expect(page.get_by_label("API key")).to_be_hidden()
        ask(page, "say", 5)
        expect(page.locator("#log .note")).to_contain_text("5 tokens")
        assert service.engine.metrics.requests == {"length": 1}


@in_browser
def test_a_model_without_a_chat_template(folder: Path, page: Page, tmp_path: Path) -> None:
    plain = tmp_path / "plain"
    plain.mkdir()
    for file in folder.iterdir():
        (plain / file.name).write_bytes(file.read_bytes())
    (plain / "tokenizer_config.json").write_text("{}")
    expected = LLM(plain).generate(["say red"], max_tokens=20, temperature=0)[0].text
    with serving(plain) as (address, _):
        open_page(page, address)
        expect(page.get_by_role("heading", name="Completion")).to_be_visible()
        ask(page, "say red", 20)
        expect(page.locator("#log .note")).to_contain_text("20 tokens")
        assert page.locator("#log .assistant span").first.text_content() == expected


# ---- encoders ----


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_encoder(tmp_path_factory.mktemp("encoder"))


@in_browser
def test_similarities(encoder: Path, page: Page) -> None:
    texts = [*TEXTS, HTML[:10]]
    urls: list[str] = []
    page.on("request", lambda request: urls.append(request.url))
    with serving_encoder(encoder) as (address, service):
        open_page(page, address)
        expect(page.get_by_role("heading", level=1)).to_have_text(NAME)
        page.get_by_label("One text per line").fill("\n".join([texts[0], "  ", *texts[1:]]))
        page.get_by_role("button", name="Embed").click()
        expect(page.locator("#matrix tr")).to_have_count(len(texts) + 1)
        tokenizer = service.encoder.tokenizer
        own = [tokenizer.encode(text).ids for text in texts]
        vectors = expected(encoder, own)
        for number, row in enumerate(page.locator("#matrix tr").all()[1:]):
            assert row.locator("th").text_content() == f"{number + 1} {texts[number]}"
            values = [float(text) for text in row.locator("td").all_text_contents()]
            assert values == pytest.approx((vectors[number] @ vectors.T).tolist(), abs=0.006)
        expect(page.locator("#result")).to_contain_text(f"{len(texts)} texts, {sum(map(len, own))} tokens in")
        expect(page.locator("#computed b")).to_have_text(str(len(texts)))
        expect(page.locator("#computed small")).to_contain_text(f"{sum(map(len, own))} tokens")
        expect(page.locator("#batches b")).to_have_text("1")
        stats = json.loads(get(address, "/stats")[1])
        assert (stats["inputs"], stats["waiting"], stats["width"]) == (len(texts), 0, vectors.shape[1])
        page.get_by_label("One text per line").fill("x " * 200)  # does not fit in the context
        page.get_by_role("button", name="Embed").click()
        expect(page.get_by_role("alert")).to_contain_text("does not fit in the context")
        page.get_by_label("One text per line").fill("a\n" * 51)
        page.get_by_role("button", name="Embed").click()
        expect(page.get_by_role("alert")).to_have_text("expected at most 50 texts, got 51")
        expect(page.get_by_role("button", name="Embed")).to_be_enabled()
    own_urls = {address + path for path in ("/", "/stats", "/v1/embeddings")}
    assert {url for url in urls if not url.startswith("data:")} == own_urls


@in_browser
def test_an_api_key_of_an_encoder(encoder: Path, page: Page) -> None:
    with serving_encoder(encoder, keys=(hashlib.sha256(b"one").digest(),)) as (address, _):
        assert get(address, "/stats")[0] == 401
        page.goto(address)
        expect(page.get_by_role("status")).to_have_text("API key required")
        page.get_by_label("API key").fill("one")
        page.get_by_role("button", name="Use key").click()
        page.get_by_label("One text per line").fill("a\nb")
        expect(page.get_by_role("status")).to_have_text("connected")
        page.get_by_role("button", name="Embed").click()
        expect(page.locator("#matrix tr")).to_have_count(3)

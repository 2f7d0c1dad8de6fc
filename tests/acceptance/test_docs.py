"""The page `/docs` in a real Chromium without a network: authorize, create a mask job, see it finish.

`PERMILLE_CHROMIUM` is the path of the browser. By default, it is `chromium`, `chromium-browser` or
`google-chrome` on the PATH. If `PERMILLE_SCREENSHOTS` is set, screenshots are saved in this folder.
"""

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from playwright.sync_api import Locator, Page, Request, Route

from tests.chromium import chromium
from tests.running_service import Running, running_service
from tests.tiny_model import write_corpus, write_model

FINISH_S = 240.0


@pytest.fixture(scope="module")
def up(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """Run API and worker, with a model folder and a corpus file below their roots."""
    folder = tmp_path_factory.mktemp("docs")
    write_model(folder / "models" / "tiny")
    write_corpus(folder / "corpora" / "texts.jsonl")
    roots = ("--model-root", str(folder / "models"), "--corpus-root", str(folder / "corpora"))
    with running_service(folder, *roots) as running:
        yield running


@pytest.fixture
def foreign() -> list[str]:
    """Requests of the page to other hosts. All are blocked, and the page should make none."""
    return []


@pytest.fixture
def page(up: Running, foreign: list[str]) -> Iterator[Page]:
    """A page of a headless browser that reaches only the service."""
    home = urlsplit(up.url).netloc

    def only_home(route: Route, request: Request) -> None:
        target = urlsplit(request.url)
        if target.scheme == "data" or target.netloc == home:
            route.continue_()
        else:
            foreign.append(request.url)
            route.abort()

    with chromium() as browser:
        opened = browser.new_page(viewport={"width": 1280, "height": 1600})
        opened.route("**/*", only_home)
        opened.set_default_timeout(60_000)
        yield opened


def find_operation(page: Page, name: str) -> Locator:
    """Scroll to an operation. The page renders only operations in sight."""
    block = page.locator(f"[id$='-{name}']")
    page.mouse.move(300, 300)
    page.evaluate("window.scrollTo(0, 0)")
    for _ in range(200):
        if block.count():
            break
        page.mouse.wheel(0, 400)
        page.wait_for_timeout(50)
    return block


def open_operation(page: Page, name: str) -> Locator:
    block = find_operation(page, name)
    block.locator(".opblock-summary-control").click()
    block.locator("button.execute").wait_for()
    return block


def execute(block: Locator) -> tuple[int, Any]:
    """Press Execute. Return the status and the JSON of the answer."""
    clear = block.locator("button.btn-clear")
    if clear.count():
        clear.click()
    block.locator("button.execute").click()
    shown = block.locator(".live-responses-table .response")
    shown.wait_for()
    status = int(shown.locator(".response-col_status").inner_text().split()[0])
    text = shown.locator(".highlight-code").first.inner_text()
    return status, json.loads(text[text.index("{") :])


def keep_picture(page: Page, name: str) -> None:
    """Save a screenshot if the environment asks for it."""
    folder = os.environ.get("PERMILLE_SCREENSHOTS")
    if folder:
        page.screenshot(path=Path(folder) / f"{name}.png", full_page=True)


@pytest.mark.slow
def test_operator_creates_a_mask_on_the_page_and_sees_it_finish(
    up: Running, page: Page, foreign: list[str]
) -> None:
    errors: list[str] = []
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.on("console", lambda message: errors.append(message.text) if message.type == "error" else None)
    with up.client() as client:
        source: dict[str, str] = {"kind": "folder", "path": "tiny"}
        model = client.post("/v1/models", json={"name": "tiny", "source": source}).json()
        source = {"kind": "file", "path": "texts.jsonl"}
        corpus = client.post("/v1/corpora", json={"name": "texts", "source": source}).json()

    page.goto(f"{up.url}/docs")
    page.locator(".opblock").first.wait_for()
    keep_picture(page, "docs")
    assert errors == []

    block = open_operation(page, "create_mask")
    body = {"method": "fisher", "model_id": model["id"], "corpus_id": corpus["id"]}
    body |= {"sequences": 4, "length": 16}
    block.locator("textarea.body-param__text").fill(json.dumps(body))
    assert execute(block)[0] == 401, "nobody is authorized yet"

    page.locator("button.authorize").first.click()
    page.locator(".auth-container input").fill(up.token)
    page.locator(".auth-container button.authorize").click()
    page.locator(".auth-container button.btn-done").click()
    block = find_operation(page, "create_mask")
    block.locator("textarea.body-param__text").fill(json.dumps(body))
    status, job = execute(block)
    assert status == 202
    assert (job["kind"], job["state"]) == ("mask", "queued")
    keep_picture(page, "created")

    block.locator(".opblock-summary-control").click()
    block = open_operation(page, "get_job")
    block.locator("tr[data-param-name='job_id'] input").fill(job["id"])
    deadline = time.monotonic() + FINISH_S
    while job["state"] in ("queued", "running") and time.monotonic() < deadline:
        time.sleep(1)
        status, job = execute(block)
        assert status == 200
    keep_picture(page, "finished")
    assert (job["state"], job["error"]) == ("succeeded", None)
    with up.client() as client:
        mask = client.get(job["result"]).json()
        assert mask["k"] > 0
        report = client.get(f"{job['result']}/report").json()
        assert report["k"] == mask["k"]
    assert foreign == []

"""The pages below `/ui` in a real Chromium.

A view needs at most three requests, all to the service. Views are readable without scripts, and live with
them. Names from devices and operators are never markup.
"""

from collections.abc import Iterator
from urllib.parse import urlsplit

import pytest
from playwright.sync_api import Browser, Page, expect

from permille.store.jobs import queue
from permille_console import assets
from tests.chromium import chromium
from tests.console.page_site import Stocked, sign_in, site, views
from tests.running_service import Running

MOST_REQUESTS = 3
MOST_ASSET_BYTES = 100 * 1024


@pytest.fixture(scope="module")
def looking(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Running, Stocked, Browser]]:
    """A service with data, and a browser."""
    with site(tmp_path_factory.mktemp("page")) as (running, stocked), chromium() as browser:
        yield running, stocked, browser


def watch(page: Page) -> tuple[list[str], list[str]]:
    """Collect the page's requests and its errors, including violations of its content security policy."""
    asked, errors = list[str](), list[str]()
    page.on("request", lambda request: asked.append(request.url))
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.on("console", lambda message: errors.append(message.text) if message.type == "error" else None)
    return asked, errors


@pytest.mark.slow
@pytest.mark.attack(14, "markup in what workers, devices and operators send, shown on the page")
def test_each_view_is_whole_in_three_requests_and_takes_no_name_for_markup(
    looking: tuple[Running, Stocked, Browser],
) -> None:
    running, stocked, browser = looking
    state = sign_in(browser.new_context(), running).context.storage_state()
    failed = "/ui/jobs?state=failed"
    for path in (*views(stocked).values(), failed):
        page = browser.new_context(storage_state=state).new_page()  # a new context has an empty cache
        asked, errors = watch(page)
        page.goto(running.url + path)
        page.wait_for_function("document.documentElement.classList.contains('scripted')")
        assert errors == [], path
        assert len(asked) <= MOST_REQUESTS, asked
        assert {urlsplit(url).netloc for url in asked} == {urlsplit(running.url).netloc}
        assert page.title().endswith("permille"), f"{path}: a script of another ran"
        if path == failed:
            expect(page.locator(".words .bad")).to_contain_text("<script>")
        if path == "/ui/fleet":
            expect(page.locator(".chart canvas")).to_have_count(1)
        page.context.close()


@pytest.mark.slow
def test_views_are_readable_without_scripts(looking: tuple[Running, Stocked, Browser]) -> None:
    running, stocked, browser = looking
    page = sign_in(browser.new_context(java_script_enabled=False), running)
    page.goto(running.url + "/ui/releases/notes")
    expect(page.locator(".verdict")).to_contain_text("Version 4 makes devices worse than version 3")
    page.goto(running.url + "/ui/releases/notes?version=1")
    expect(page.locator("main")).to_contain_text("version 1 has no earlier version")
    page.goto(running.url + "/ui/models")
    expect(page.locator("main")).to_contain_text("made sparse, of tiny")
    page.click("text=made sparse")
    expect(page.locator("main")).to_contain_text("Perplexity 14.2 → 17.1, not held out:")
    expect(page.locator("table.rows tbody tr")).to_have_count(2 + 3 + 1)
    page.goto(running.url + views(stocked)["mask"])
    expect(page.locator("svg.curve polyline")).to_have_count(1)
    page.goto(running.url + "/ui/fleet")
    expect(page.locator("details table")).to_be_attached()
    stocked.progress(0.42, "scoring sequence 42 of 100")
    page.goto(running.url + views(stocked)["job"])
    expect(page.locator("progress")).to_have_attribute("value", "0.42")
    page.click("text=Sign out")
    page.goto(running.url + "/ui/fleet")
    expect(page.locator("h1")).to_have_text("Sign in")


@pytest.mark.slow
def test_a_job_is_followed_live_and_cancelled_by_a_click(looking: tuple[Running, Stocked, Browser]) -> None:
    running, stocked, browser = looking
    page = sign_in(browser.new_context(), running)
    _, errors = watch(page)
    page.goto(running.url + views(stocked)["job"])
    stocked.progress(0.63, "scoring sequence 63 of 100")
    expect(page.locator(".big")).to_contain_text("scoring sequence 63 of 100")
    page.click("button.danger")
    expect(page.locator(".big")).to_contain_text("stopping")
    assert page.url.endswith(stocked.held.job_id), "the page is the same"
    with stocked.database.read() as session:
        tenant_id = stocked.held.tenant_id
        events = queue.events_after(session, tenant_id=tenant_id, job_id=stocked.held.job_id)
    assert any(event.data.get("message") == "cancel requested" for event in events)
    assert errors == []


@pytest.mark.slow
def test_what_goes_wrong_is_told_on_the_page_that_stays(looking: tuple[Running, Stocked, Browser]) -> None:
    running, _, browser = looking
    page = sign_in(browser.new_context(), running)
    page.goto(f"{running.url}/ui/jobs")
    page.route("**/ui/jobs", lambda route: route.abort())
    expect(page.locator("#notice")).to_contain_text("does not answer")
    expect(page.locator("table.rows tbody tr").first).to_be_visible()
    page.unroute("**/ui/jobs")
    expect(page.locator("#notice")).to_be_empty()
    page.goto(f"{running.url}/ui/masks/none")
    expect(page.locator("nav")).to_be_visible()
    expect(page.locator("h1")).to_have_text("It does not exist, or you may not see it")


@pytest.mark.slow
def test_every_view_fits_a_telephone(looking: tuple[Running, Stocked, Browser]) -> None:
    running, stocked, browser = looking
    page = sign_in(browser.new_context(viewport={"width": 390, "height": 844}), running)
    for name, path in views(stocked).items():
        page.goto(running.url + path)
        wide = page.evaluate("document.scrollingElement.scrollWidth")
        assert wide <= 390, f"{name}: {wide} pixels"


@pytest.mark.slow
def test_an_operator_publishes_rolls_back_and_is_told_what_is_wrong_without_scripts(
    looking: tuple[Running, Stocked, Browser],
) -> None:
    running, stocked, browser = looking
    page = sign_in(browser.new_context(java_script_enabled=False), running)
    page.goto(f"{running.url}/ui/packages/{stocked.package_digest}")
    page.click("text=Publish")
    page.fill("#name", "Not A Name")
    page.click("button:has-text('Publish')")
    expect(page.locator(".wrong")).to_contain_text("should match pattern")
    expect(page.locator("#name")).to_have_value("Not A Name")
    page.fill("#name", "notes")
    page.fill("#alias", "stable")
    page.click("button:has-text('Publish')")
    expect(page.locator("main")).to_contain_text("300 devices: devices that follow the alias")
    page.click("text=Change it")
    expect(page.locator("#alias")).to_have_value("stable")
    page.click("button:has-text('Publish')")
    page.click("button:has-text('Publish')")
    expect(page.locator("h1")).to_have_text("notes")
    assert page.url.endswith("/ui/releases/notes?version=5")
    page.locator("a:has-text('Roll back to it')").first.click()
    page.click("button:has-text('Roll back')")
    page.click("button:has-text('Roll back')")
    assert page.url.endswith("/ui/releases/notes?version=6")
    page.goto(f"{running.url}/ui/audit?action=create_release")
    expect(page.locator("table.rows tbody tr")).to_have_count(2)


def test_styles_and_scripts_are_small() -> None:
    loaded = assets.load()
    assert sum(len(asset.body) for asset in loaded) <= MOST_ASSET_BYTES
    assert sum(len(asset.packed) for asset in loaded) <= MOST_ASSET_BYTES // 2

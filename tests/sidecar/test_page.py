"""The page at `/`, in a real browser without a network: it shows what /status says."""

from __future__ import annotations

import json
import re
import signal
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from sidecar.protocol import LoadChunk, LoadJob, Outcome
from sidecar.protocol.prompts import PromptOutcome, PromptRecord, Prompts
from tests.browser import browser as new_browser
from tests.harness.sidecars import SidecarProcess
from tests.sidecar.client import (
    WAIT_SECONDS_MAX,
    RunningSidecar,
    Scheduler,
    Worker,
    config_in,
    key_of,
)

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page, Route

pytestmark = pytest.mark.promise("page")

PAGE_BYTES_MAX = 100_000
HOSTILE = "<img src=x onerror=alert(1)>"
LATER_ROUND = 'body[data-rounds]:not([data-rounds="1"])'
"""Any: on a machine that pauses, several may be over before the next look."""


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with new_browser() as browser:
        yield browser


@pytest.fixture
def sidecar(short_directory: Path) -> Iterator[RunningSidecar]:
    """One that stored and loaded two chunks, and heard of two prompts."""
    keys = [key_of("prompt", number) for number in range(2)]
    config = config_in(short_directory, store={"url": f"file://{short_directory}/bucket"})
    with (
        RunningSidecar(config) as sidecar,
        Scheduler(sidecar.path) as scheduler,
        Worker(sidecar.path) as worker,
    ):
        for number, key in enumerate(keys):
            blocks = range(4 * number, 4 * number + 4)
            assert worker.store(number, key, blocks, bytes(32)) is Outcome.OK
        scheduler.lease(5, keys)
        chunks = [LoadChunk(key, 0, [4 * n + b for b in range(4)]) for n, key in enumerate(keys)]
        worker.submit(loads=[LoadJob(5, chunks)])
        assert worker.outcome(5) is Outcome.OK
        tokens = {PromptOutcome.HOST: 1600, PromptOutcome.EVICTED: 400, PromptOutcome.TAIL: 10}
        records = [
            PromptRecord("cmpl-1", tokens, bytes(32), 1600, load_us=10_000, saved_us=2_000_000),
            PromptRecord(HOSTILE, {PromptOutcome.LOCAL: 100, PromptOutcome.NEW: 100}),
        ]
        scheduler.send(Prompts(scheduler.epoch, records))
        sidecar.wait_until(
            lambda now: (
                now["prompts"]["prompts"] == now["counters"]["chunks_written"] == 2
                and now["tiers"]["store"]["state"] == "ok"
            )
        )
        yield sidecar


@pytest.fixture
def opened(browser: Browser, sidecar: RunningSidecar) -> Iterator[Callable[..., Page]]:
    """Opens the page and waits until it shows something.

    It may ask nobody but the sidecar, and the browser may find no fault with it.
    """
    asked: list[str] = []
    faults: list[str] = []

    def open_page(**options: Any) -> Page:
        page = browser.new_page(**options)
        page.set_default_timeout(1000 * WAIT_SECONDS_MAX)
        page.on("pageerror", lambda error: faults.append(str(error)))
        page.on("console", lambda message: faults.append(message.text))
        page.on("request", lambda request: asked.append(request.url))
        page.goto(sidecar.info.http_url)
        page.wait_for_selector("body[data-rounds]")
        return page

    yield open_page
    assert faults == []
    assert all(url.startswith(sidecar.info.http_url) for url in asked)


def figure(page: Page, name: str) -> int:
    return int(page.locator(f'[data-figure="{name}"]').inner_text().replace(",", ""))


def test_its_figures_are_those_of_the_status(
    opened: Callable[..., Page], sidecar: RunningSidecar
) -> None:
    page = opened()
    status = sidecar.status()
    tokens = status["prompts"]["tokens"]
    shown = {name: figure(page, f"1h.{name}") for name in ("local", "host", "store", "computed")}
    computed = tokens["evicted"] + tokens["new"]
    assert shown == {"local": 100, "host": tokens["host"], "store": 0, "computed": computed}
    for name in ("bytes_loaded", "bytes_stored", "bytes_written", "chunks_evicted"):
        assert figure(page, name) == status["counters"][name]
    assert figure(page, "chunks_in_host") == status["tiers"]["host"]["chunks"] == 2
    assert figure(page, "chunks_in_store") == status["tiers"]["store"]["chunks"] == 2
    assert page.locator(".sentence").all_inner_texts() == status["prompts"]["sentences"]
    assert page.locator("#state").inner_text() == status["state"]
    losses = page.locator("#losses tbody tr").all_inner_texts()
    assert losses[0].startswith("evicted\t18%\t400\tthey had left host memory")


def test_what_it_draws(opened: Callable[..., Page]) -> None:
    page = opened()
    bars = [one.text_content() or "" for one in page.locator("#stream rect title").all()]
    stored = "store, because a request computed them"
    written = "write, because it was stored (store.write"
    assert sorted(text.partition(":")[0] for text in bars) == [
        *("load, because a request needs them", stored, stored, written, written)
    ]
    (load,) = (text for text in bars if text.startswith("load"))
    assert re.search(r" in [\d.]+ ms, .+/s; tests/tiny; 2 chunks, engine ", load)
    page.get_by_text("As a table, newest first").click()
    listed = page.locator("#transfer-list tbody tr").all_inner_texts()
    assert len(listed) == len(bars)
    assert [text.split("\t")[-1] for text in listed].count("a request computed them") == 2
    first, second = page.locator("#request-list tbody tr").all_inner_texts()
    assert first.startswith(HOSTILE), "what a client says is text"
    assert "host 1,600" in second
    assert "evicted 400, tail 10" in second
    assert "at token 1,600" in second
    assert page.locator("#curve-tokens polygon, #curve-bytes polyline").count() > 0


def test_what_is_in_host_memory_by_age_and_depth(
    opened: Callable[..., Page], sidecar: RunningSidecar
) -> None:
    page = opened()
    (held,) = json.loads(sidecar.get("/host"))["namespaces"]
    for kind in ("ages", "depths"):
        shown = page.locator(f'[data-figure^="{kind}."]').all()
        names = [str(one.get_attribute("data-figure")).partition(".")[2] for one in shown]
        assert names == list(held[kind])
        counts = [int(one.inner_text()) for one in shown]
        assert counts == [one["chunks"] for one in held[kind].values()]
        assert sum(counts) == 2
    assert page.locator("#ages tbody tr").first.inner_text().split("\t")[:2] == ["1 min", "2"]


def history_of(**columns: list[float]) -> dict[str, Any]:
    """The document of /history for three samples, five seconds apart, that all ended just now."""
    document: dict[str, Any] = {
        "kept_seconds": 3600.0,
        "seconds_ago": [10.0, 5.0, 0.0],
        "seconds": [5.0] * 3,
        "prompts": [1, 1, 1],
        "tokens": {"host": [500, 0, 100], "new": [0, 250, 0], "tail": [5, 5, 5]},
        "gpu_seconds_saved": [0.0] * 3,
        "bytes": {way: [0] * 3 for way in ("stored", "loaded", "written", "read")},
        "chunks_evicted": [0] * 3,
        "host_bytes": [1 << 20, 2 << 20, 3 << 20],
        "write_queue_bytes": [0] * 3,
    }
    return document | columns


@pytest.fixture
def pictured(opened: Callable[..., Page]) -> Callable[[dict[str, Any]], Page]:
    """Opens the page with a document of /history of its own."""

    def open_page(history: dict[str, Any]) -> Page:
        page = opened()
        began = time.monotonic()

        def answer(route: Route) -> None:
            passed = time.monotonic() - began
            ages = [age + passed for age in history["seconds_ago"]]
            route.fulfill(json=history | {"seconds_ago": ages})

        page.route("**/history", answer)
        page.reload()
        page.wait_for_selector("body[data-rounds]")
        return page

    return open_page


def test_savings_below_zero_are_drawn_there(pictured: Callable[..., Page]) -> None:
    """A cache that costs time looked like one that saves nothing."""
    page = pictured(history_of(gpu_seconds_saved=[5.0, 0.0, -10.0]))
    points = page.locator("#curve-saved polyline").get_attribute("points") or ""
    first, zero, last = (float(point.split(",")[1]) for point in points.split())
    assert first < zero < last, "SVG counts downwards"
    assert scale(page) == ["-2.00", "0.00", "1.00"]


def test_the_numbers_of_a_scale_do_not_lie_on_one_another(pictured: Callable[..., Page]) -> None:
    page = pictured(history_of(gpu_seconds_saved=[5.0, 0.0, -0.01]))
    assert scale(page) == ["0.00", "1.00"]
    page = pictured(history_of(gpu_seconds_saved=[0.0, 0.0, -5.0]))
    assert scale(page) == ["-1.00", "0.00"]
    assert scale(pictured(history_of())) == ["0.00"]


def scale(page: Page) -> list[str]:
    """The numbers beside the curve of savings."""
    shown = page.locator('#curve-saved text[text-anchor="end"]').all_text_contents()
    return [text for text in shown if text != "now"]


@pytest.mark.parametrize(
    ("first", "count", "title", "axis", "listed"),
    [
        (1, 50, "Transfers of the last minute", "60s ago", "newest first"),
        (1, 700, "The last 600 transfers", "12s ago", "the newest 100"),
        # The sidecar keeps fewer than a minute has.
        (901, 500, "The last 500 transfers", "10s ago", "the newest 100"),
    ],
)
def test_transfers_that_are_not_drawn_leave_no_idle_time(
    opened: Callable[..., Page], first: int, count: int, title: str, axis: str, listed: str
) -> None:
    """The axis began a minute ago, so that a busy sidecar looked idle until its oldest bar."""
    page = opened()
    now = time.time()
    one = {"kind": "load", "model": "m", "seconds": 0.01, "num_bytes": 1, "about": "", "cause": ""}
    transfers = [
        one | {"number": first + index, "began": now - (count - index) / 50}
        for index in range(count)
    ]
    document = {"transfers": transfers, "last": first + count - 1, "now": now}
    # A second poll finds nothing new.
    page.route("**/transfers?*", lambda route: route.fulfill(json=document | {"transfers": []}))
    page.route("**/transfers?after=0", lambda route: route.fulfill(json=document))
    page.reload()
    page.wait_for_selector("body[data-rounds]")
    assert page.locator("#transfers-title").inner_text() == title
    assert page.locator("#stream text").all_text_contents()[-2:] == [axis, "now"]
    assert page.locator("#transfers-listed").inner_text() == f"As a table, {listed}"
    shown = page.locator("#stream rect")
    assert shown.count() == min(count, 600)
    if title.startswith("The last"):
        assert float(shown.first.get_attribute("x") or "") == pytest.approx(50, abs=1)


def test_a_curve_tells_its_values_to_the_mouse(pictured: Callable[..., Page]) -> None:
    page = pictured(history_of())
    picture = page.locator("#curve-host svg")
    box = picture.bounding_box()
    assert box is not None
    value = page.locator("#curve-host-value")
    assert value.inner_text() == ""
    picture.hover(position={"x": box["width"] - 1, "y": 10})
    assert re.fullmatch(r"\d\d:\d\d:\d\d: 3 MiB", value.inner_text())
    assert page.locator("#curve-host .mark").count() == 1
    # It stays when the curves are drawn again.
    page.evaluate("document.querySelector('#curve-host svg').id = 'old'")
    page.wait_for_selector("#curve-host svg:not(#old)")
    assert value.inner_text().endswith(": 3 MiB")
    page.mouse.move(0, 0)
    assert value.inner_text() == ""
    assert page.locator("#curve-host .mark").count() == 0


def test_a_curve_tells_its_values_to_the_keyboard(pictured: Callable[..., Page]) -> None:
    page = pictured(history_of())
    curve, value = page.locator("#curve-tokens"), page.locator("#curve-tokens-value")
    curve.focus()
    shown: list[str] = []
    for key in ("ArrowLeft", "ArrowLeft", "Home", "ArrowLeft", "ArrowRight", "End"):
        page.keyboard.press(key)
        clock, _, values = value.inner_text().partition(": ")
        assert re.fullmatch(r"\d\d:\d\d:\d\d", clock)
        shown.append(values)
    old, middle, new = (
        f"host memory {host}, computed {computed}"
        for host, computed in ((100, 0), (0, 50), (20, 0))
    )
    assert shown == [new, middle, old, old, middle, new]
    page.keyboard.press("Escape")
    assert value.inner_text() == ""
    page.keyboard.press("End")
    page.keyboard.press("Tab")
    assert value.inner_text() == "", "it is left"


def test_it_says_what_is_switched_off(
    opened: Callable[..., Page], browser: Browser, short_directory: Path
) -> None:
    names = ("gone_keys_max", "prompts_kept", "transfers_kept", "curve_keys_max", "history_seconds")
    directory = short_directory / "off"
    directory.mkdir()
    with RunningSidecar(config_in(directory, limits=dict.fromkeys(names, 0))) as sidecar:
        asked: list[str] = []
        page = browser.new_page()
        page.on("request", lambda request: asked.append(request.url))
        page.goto(sidecar.info.http_url)
        page.wait_for_selector(LATER_ROUND, timeout=1000 * WAIT_SECONDS_MAX)
        text = page.locator("main").inner_text()
        assert [name for name in names if f"limits.{name} is 0" not in text] == []
        assert not page.locator("#curves").is_visible()
        assert not page.locator("#stream").is_visible()
        assert not any("/transfers" in url or "/history" in url for url in asked)


def test_it_goes_on_and_pauses(opened: Callable[..., Page]) -> None:
    page = opened()
    page.wait_for_selector(LATER_ROUND)
    page.keyboard.press("p")
    assert page.locator("#pause").get_attribute("aria-pressed") == "true"
    shown = int(page.locator("body").get_attribute("data-rounds") or 0)
    page.get_by_role("button", name="Go on (p)").click()
    # The next one may have begun before the pause.
    one, next_one = (f'[data-rounds="{number}"]' for number in (shown, shown + 1))
    page.wait_for_selector(f"body:not({one}, {next_one})")


def test_the_keyboard_is_enough(opened: Callable[..., Page]) -> None:
    page = opened()
    for number, place in enumerate(
        ("helps", "healthy", "contents", "hour", "transfers", "requests"), 1
    ):
        page.keyboard.press(str(number))
        # The browser follows a link in a task of its own, after the key's handler.
        page.wait_for_url(re.compile(f"#{place}$"))
        assert page.locator(f'nav a[href="#{place}"]').evaluate(
            "one => one === document.activeElement"
        )


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_can_be_read_in_both_schemes(opened: Callable[..., Page], scheme: str) -> None:
    page = opened(color_scheme=scheme)
    for back in (brightness(page, one, "background-color") for one in ("body", "section")):
        for selector in ("h1", ".sentence", ".dim", "#state", "td", "nav a", "button"):
            front = brightness(page, selector, "color")
            lighter, darker = max(front, back), min(front, back)
            assert (lighter + 0.05) / (darker + 0.05) >= 4.5, f"{selector}: too low a contrast"


def brightness(page: Page, selector: str, what: str) -> float:
    """Relative luminance of a colour, as WCAG defines it."""
    style = page.locator(selector).first.evaluate(
        "(one, what) => getComputedStyle(one).getPropertyValue(what)", what
    )
    parts = [int(part) / 255 for part in re.findall(r"\d+", style)[:3]]
    red, green, blue = (
        part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts
    )
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def test_a_narrow_window_does_not_scroll_sideways(opened: Callable[..., Page]) -> None:
    page = opened(viewport={"width": 360, "height": 640})
    assert page.evaluate("document.documentElement.scrollWidth") <= 360


def test_it_says_when_the_sidecar_is_gone(browser: Browser, short_directory: Path) -> None:
    with RunningSidecar(config_in(short_directory)) as sidecar:
        page = browser.new_page()
        page.goto(sidecar.info.http_url)
        page.wait_for_selector("body[data-rounds]")
        assert "no prompt in the last hour" in page.locator("#sentences").inner_text()
    page.get_by_text("no answer from the sidecar").wait_for(timeout=1000 * WAIT_SECONDS_MAX)
    assert page.title() == f"no answer - kvlake {page.locator('#name').inner_text()}"


def test_it_says_when_the_sidecar_hangs(browser: Browser, short_directory: Path) -> None:
    """It stayed green for ever: the next poll waited for an answer that never came."""
    with SidecarProcess(short_directory / "s", {"host": {"size": "8MiB"}}) as sidecar:
        page = browser.new_page()
        page.set_default_timeout(1000 * WAIT_SECONDS_MAX)
        # The limit is 10 seconds.
        page.add_init_script(
            "const timeout = AbortSignal.timeout;"
            "AbortSignal.timeout = (milliseconds) => timeout.call(AbortSignal, milliseconds / 5);"
        )
        page.goto(sidecar.http_url)
        page.wait_for_selector("body[data-rounds]")
        assert sidecar.process is not None
        sidecar.process.send_signal(signal.SIGSTOP)
        try:
            page.get_by_text("no answer from the sidecar").wait_for()
            assert page.title() == f"no answer - kvlake {sidecar.name}"
        finally:
            sidecar.process.send_signal(signal.SIGCONT)
        page.locator("#state.good").wait_for()
        assert page.title() == f"ok - kvlake {sidecar.name}"


def test_it_asks_for_the_token(browser: Browser, short_directory: Path) -> None:
    token = short_directory / "token"
    token.write_text("the-right-token-of-it\n")
    token.chmod(0o600)
    config = config_in(short_directory, http={"token_file": str(token)})
    with RunningSidecar(config) as sidecar:
        page = browser.new_page()
        page.set_default_timeout(1000 * WAIT_SECONDS_MAX)
        page.goto(sidecar.info.http_url)
        page.get_by_label("Token", exact=True).fill("another-token-of-it")
        page.get_by_role("button", name="Show").click()
        page.get_by_text("The sidecar takes another token.").wait_for()
        assert not page.locator("main").is_visible()
        page.get_by_label("Token", exact=True).fill("the-right-token-of-it")
        page.keyboard.press("Enter")
        page.wait_for_selector("body[data-rounds]")
        assert page.locator("main").is_visible()
        assert "the-right-token-of-it" not in page.content()
        # As after a change of the token: it stayed green.
        page.route("**/status", lambda route: route.fulfill(status=401))
        page.get_by_label("Token", exact=True).wait_for()
        assert page.locator("#state").inner_text() == "the sidecar asks for its token"
        assert page.title() == f"no answer - kvlake {page.locator('#name').inner_text()}"


def test_transfers_of_a_restarted_sidecar_are_drawn(opened: Callable[..., Page]) -> None:
    """It counts from 1, and the page asked for those after the last of the one before."""
    from playwright.sync_api import expect

    page = opened()
    now = time.time()
    one = {"kind": "load", "model": "m", "seconds": 1, "num_bytes": 1, "about": "", "cause": ""}

    def answer(after: int, last: int) -> dict[str, Any]:
        numbers = range(after + 1, last + 1)
        transfers = [one | {"number": number, "began": now - 5} for number in numbers]
        return {"transfers": transfers, "last": last, "now": now}

    page.route("**/transfers?after=0", lambda route: route.fulfill(json=answer(0, 7)))
    page.reload()
    bars = page.locator("#stream rect")
    expect(bars).to_have_count(7, timeout=1000 * WAIT_SECONDS_MAX)
    page.route("**/transfers?*", lambda route: route.fulfill(json=answer(3, 3)))
    page.route("**/transfers?after=0", lambda route: route.fulfill(json=answer(0, 3)))
    expect(bars).to_have_count(3, timeout=1000 * WAIT_SECONDS_MAX)


def test_the_file_is_small_and_locked(sidecar: RunningSidecar) -> None:
    with urllib.request.urlopen(sidecar.info.http_url) as answer:
        body, headers = answer.read(), answer.headers
    assert len(body) < PAGE_BYTES_MAX
    policy = headers["Content-Security-Policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert "frame-ancestors 'none'" in policy
    assert headers["Content-Type"].startswith("text/html")
    assert not re.search(rb"https?://(?!www\.w3\.org/2000/svg)", body), "nothing from elsewhere"
    history = json.loads(sidecar.get("/history"))
    assert history.keys() >= {"seconds_ago", "tokens", "bytes", "host_bytes"}

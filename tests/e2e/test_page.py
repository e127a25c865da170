"""The page beside a real engine under load: its figures are those of the status and of vLLM.

With `KVLAKE_SCREENSHOTS` set to a folder, it also makes the picture of the documentation there.
"""

from __future__ import annotations

import os
import random
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import pytest

from tests.browser import browser
from tests.e2e.arms import idle, words
from tests.e2e.setups import SMALL, attached, folder_store, sidecar_in
from tests.e2e.waiting import until
from tests.harness.engine import EngineProcess, EngineSpec

if TYPE_CHECKING:
    from collections.abc import Iterator

    from playwright.sync_api import Page

    from tests.harness.sidecars import SidecarProcess

pytestmark = [pytest.mark.engine, pytest.mark.promise("connector", "suite-figures", "page")]

SCREENSHOTS: Final = "KVLAKE_SCREENSHOTS"
CHATS: Final = 6
TURNS: Final = 4
TURN_TOKENS: Final = 160
SYSTEM_TOKENS: Final = 512
ROUNDS_MS: Final = 60_000
WIDTH: Final = 1280
PICTURED_REQUESTS: Final = 12
PICTURED: Final = 30
"""Times the same, for curves of a minute or more."""


@pytest.fixture(scope="module")
def engine(folder: Path, model: str) -> Iterator[EngineProcess]:
    socket = sidecar_in(folder).socket
    with EngineProcess(
        EngineSpec(model, socket, SMALL | {"served_model_name": "tiny"}), folder / "engine.log"
    ) as engine:
        yield engine.wait_ready()


def chat(engine: EngineProcess, times: int = 1) -> None:
    """Conversations with one system prompt, in turn, so that each has left the engine's memory."""
    chooser = random.Random(7)
    system = words(SYSTEM_TOKENS, 1)
    for time in range(times):
        histories = [list(system) for _ in range(CHATS)]
        for turn in range(TURNS):
            for number, history in enumerate(histories):
                history += words(TURN_TOKENS, 1000 * time + 100 * turn + number)
                engine.generate(list(history), max_tokens=4)
                if chooser.random() < 0.3:
                    engine.reset_prefix_cache()


def figures(page: Page) -> dict[str, int]:
    """All numbers of the page that have a name."""
    shown = page.locator("[data-figure]").all()
    return {
        str(one.get_attribute("data-figure")): int(one.inner_text().replace(",", "").rstrip("%"))
        for one in shown
    }


def rounds(page: Page) -> int:
    return int(page.locator("body").get_attribute("data-rounds") or 0)


def redrawn(page: Page) -> None:
    """Wait until the page shows what it asked for after now."""
    wanted = rounds(page) + 2
    until("the page goes on", lambda: rounds(page) >= wanted)


def test_the_page_of_an_engine_under_load(folder: Path, engine: EngineProcess) -> None:
    host, store = {"size": "32MiB"}, folder_store(folder / "bucket")
    with attached(folder, engine, host=host, store=store) as sidecar, browser() as chromium:
        before = engine.counter("vllm:prompt_tokens")
        tokens_before = sum(sidecar.status()["prompts"]["tokens"].values())
        page = chromium.new_page(viewport={"width": WIDTH, "height": 900})
        faults: list[str] = []
        asked: list[str] = []
        page.on("pageerror", lambda error: faults.append(str(error)))
        page.on("request", lambda request: asked.append(request.url))
        page.goto(sidecar.http_url)
        page.wait_for_selector("body[data-rounds]", timeout=ROUNDS_MS)
        load = threading.Thread(
            target=chat, args=(engine, PICTURED if SCREENSHOTS in os.environ else 1)
        )
        load.start()
        try:
            while load.is_alive():
                redrawn(page)
        finally:
            load.join()
        sidecar.wait("everything ended", idle)
        prompt_tokens = engine.counter("vllm:prompt_tokens") - before
        until("all prompts are reported", lambda: _total(sidecar) - tokens_before == prompt_tokens)
        redrawn(page)
        _check(page, sidecar.status())
        # They say how long the time is that they are about.
        until(
            "the sidecar's sentences",
            lambda: (
                page.locator(".sentence").all_inner_texts()
                == sidecar.status()["prompts"]["sentences"]
            ),
        )
        requests = page.locator("#request-list tbody tr").all_inner_texts()
        assert requests[0].startswith("request-"), "vLLM's own ids"
        page.locator("#stream rect").first.wait_for(timeout=ROUNDS_MS)
        if SCREENSHOTS in os.environ:
            _photograph(page, Path(os.environ[SCREENSHOTS]))
        assert faults == []
        assert all(url.startswith(sidecar.http_url) for url in asked), "nothing from elsewhere"


def _total(sidecar: SidecarProcess) -> int:
    return sum(sidecar.status()["prompts"]["tokens"].values())


def _check(page: Page, status: dict[str, Any]) -> None:
    shown, tokens = figures(page), status["prompts"]["tokens"]
    for name in ("local", "host", "store"):
        assert shown[f"1h.{name}"] == tokens.get(name, 0)
    assert tokens["host"] > 0
    computed = sum(
        count for name, count in tokens.items() if name not in ("local", "host", "store", "tail")
    )
    assert shown["1h.computed"] == computed
    for name in ("bytes_loaded", "bytes_stored", "bytes_written", "chunks_evicted"):
        assert shown[name] == status["counters"][name]
    assert status["counters"]["chunks_evicted"] > 0, "the load is larger than host memory"
    assert shown["chunks_in_host"] == status["tiers"]["host"]["chunks"]
    assert shown["chunks_in_store"] == status["tiers"]["store"]["chunks"]
    expected = status["tiers"]["host"]["expected_hit_ratio"]
    assert list(expected) == ["0.5x", "1x", "2x", "4x"]
    for factor, ratio in expected.items():
        assert abs(shown[f"expected_hit_ratio.{factor}"] - 100 * ratio) <= 0.5


def _photograph(page: Page, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    # Some of the last requests are enough.
    row = page.locator("#request-list tbody tr").nth(PICTURED_REQUESTS - 1).bounding_box()
    assert row is not None
    page.screenshot(
        path=folder / "page.png",
        full_page=True,
        clip={"x": 0.0, "y": 0.0, "width": WIDTH, "height": row["y"] + row["height"]},
    )

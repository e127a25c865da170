"""`kvlake record`: the chunks of prompts, as a running sidecar keeps them."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import pytest

from sidecar.cli import main
from sidecar.cli.client import SidecarClient
from sidecar.cli.console import NoAnswer
from sidecar.cli.explain import Recording
from sidecar.protocol import Use
from sidecar.service import uses
from sidecar.service.uses import NAME_BYTES, UseLog
from sidecar.sessions.session import Session
from tests import places
from tests.sidecar.client import RunningSidecar, Scheduler, config_in, key_of

if TYPE_CHECKING:
    from pathlib import Path

REALMS = [
    SimpleNamespace(model_name="org/m", block_tokens=16, blocks_per_chunk=4),
    SimpleNamespace(model_name="org/m", block_tokens=16, blocks_per_chunk=1),
]
SESSION = cast("Session", SimpleNamespace(realms=REALMS))


def use(count: int, tokens: int = 0, groups: list[int] | None = None) -> Use:
    return Use(1, [key_of("use", n) for n in range(count)], tokens or 64 * count, groups or [])


def test_the_last_prompts_are_kept() -> None:
    log = UseLog(2)
    for count in (1, 2, 3):
        log.add(SESSION, use(count))
    assert [(one.number, len(one.keys)) for one in log.last] == [(2, 2), (3, 3)]
    (one,) = [one for one in log.last if one.number == 2]
    assert (one.num_tokens, one.tokens_per_key, one.model) == (128, 64, "org/m")
    assert one.keys == [key_of("use", n)[:NAME_BYTES].hex() for n in range(2)]


def test_the_keys_of_all_prompts_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(uses, "KEYS_MAX", 10)
    log = UseLog(1000)
    for _ in range(20):
        log.add(SESSION, use(4))
        assert sum(len(one.keys) for one in log.last) <= 10
    log.add(SESSION, use(50))
    assert [len(one.keys) for one in log.last] == [50], "the newest stays whole"


def test_an_answer_has_a_part_of_many_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(uses, "ANSWER_KEYS_MAX", 10)
    log = UseLog(1000)
    for count in (4, 4, 4, 50, 4):
        log.add(SESSION, use(count))
    found: list[tuple[list[int], bool]] = []
    last, more = 0, True
    while more:
        prompts, more = log.after(last)
        last = prompts[-1].number
        found.append(([one.number for one in prompts], more))
    assert found == [([1, 2, 3], True), ([4], True), ([5], False)]
    assert log.after(5) == ([], False)


def test_of_several_groups_the_one_with_most_chunks_is_kept() -> None:
    log = UseLog(2)
    log.add(SESSION, use(5, tokens=1000, groups=[0, 0, 0, 1, 1]))
    log.add(SESSION, use(5, tokens=48, groups=[0, 0, 1, 1, 1]))
    assert [(len(one.keys), one.tokens_per_key, one.num_tokens) for one in log.last] == [
        (3, 64, 192),
        (3, 16, 48),
    ]


class DoubleClient:
    """Answers as a sidecar would, without one."""

    def __init__(self, *answers: dict[str, Any] | None) -> None:
        self.answers = list(answers)
        self.asked: list[str] = []

    def get(self, path: str) -> dict[str, Any]:
        self.asked.append(path)
        answer = self.answers.pop(0)
        if answer is None:
            raise NoAnswer("gone")
        return answer


def answer(*numbers: int, last: int = 0, more: bool = False, epoch: int = 1) -> dict[str, Any]:
    one = {"at": 1.0, "model": "m", "tokens": 64, "tokens_per_key": 64, "keys": ["ab"]}
    found = [{"number": n, **one} for n in numbers]
    return {"uses": found, "last": max(numbers, default=last), "more": more, "epoch": epoch}


RESTARTED = "; the sidecar restarted (1), and its last prompts may be missing"


def recording(*answers: dict[str, Any] | None) -> tuple[Recording, DoubleClient]:
    client = DoubleClient(*answers)
    return Recording(cast("SidecarClient", client)), client


def test_what_came_too_fast_is_counted() -> None:
    record, client = recording(answer(4, 5), answer(8, 9))
    file = io.StringIO()
    record.poll(file)
    record.poll(file)
    assert client.asked == ["/uses?after=0", "/uses?after=5"]
    assert record.summary("f") == (
        "4 prompts are in f, 2 came too fast to be recorded: raise limits.prompts_kept"
    )


def test_a_sidecar_that_was_restarted_counts_from_one_again() -> None:
    record, client = recording(answer(7), answer(last=2, epoch=2), answer(1, 2, epoch=2))
    file = io.StringIO()
    record.poll(file)
    record.poll(file)
    assert client.asked[-1] == "/uses?after=0"
    assert record.summary("f") == f"3 prompts are in f{RESTARTED}"


def test_a_sidecar_that_was_restarted_may_have_counted_further() -> None:
    """Its first prompts were skipped, and not counted as lost."""
    record, client = recording(answer(5), answer(6, 7, epoch=2), None)
    file = io.StringIO()
    record.poll(file)
    with pytest.raises(NoAnswer):
        record.poll(file)
    client.answers = [answer(6, 7, epoch=2), answer(3, 4, 5, 6, 7, epoch=2)]
    record.poll(file)
    assert client.asked[-2:] == ["/uses?after=5", "/uses?after=0"]
    assert record.summary("f") == (
        "6 prompts are in f, 2 came too fast to be recorded: raise limits.prompts_kept" + RESTARTED
    )


def test_prompts_of_several_answers_are_recorded_at_once() -> None:
    record, client = recording(answer(1, 2, more=True), answer(3, more=True), answer(4))
    record.run(io.StringIO(), 0.0, record.ask())
    assert client.asked == [f"/uses?after={after}" for after in (0, 2, 3)]
    assert record.summary("f") == "4 prompts are in f"


def test_a_running_sidecar_is_recorded(
    tmp_path_factory: pytest.TempPathFactory,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(uses, "ANSWER_KEYS_MAX", 2)
    folder: Path = tmp_path_factory.mktemp("s")
    with RunningSidecar(config_in(folder)) as sidecar:
        url = sidecar.info.http_url
        with Scheduler(sidecar.path) as scheduler:
            scheduler.use(key_of("a"), key_of("b"), num_tokens=100)
            scheduler.use(key_of("c"), num_tokens=50)
            sidecar.wait_until(lambda now: now["sockets"]["frames_received"] >= 2)
            first = json.loads(sidecar.get("/uses"))
            assert (len(first["uses"]), first["last"], first["more"]) == (1, 1, True)
            assert first["epoch"] == sidecar.info.epoch
            trace = folder / "trace.jsonl"
            assert main(["record", str(trace), "--seconds", "0.01", "--url", url]) == 0
            lines = [json.loads(one)["keys"] for one in trace.read_text().splitlines()]
            names = {one: key_of(one)[:NAME_BYTES].hex() for one in ("a", "b", "c")}
            assert lines == [[names["a"], names["b"]], [names["c"]]]
            assert main(["record", str(trace), "--seconds", "0.01", "--url", url]) == 2
            assert "name a new file" in capsys.readouterr().err
            command = [sys.executable, *places.program(), "record", "-", "--url", url]
            with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as run:
                assert run.stdout is not None
                assert run.stderr is not None
                # As `| head` does.
                run.stdout.close()
                assert (run.wait(60), run.stderr.read()) == (0, b"")

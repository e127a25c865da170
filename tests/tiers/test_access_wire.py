"""Settings of a site, as they are on the wire: real servers, with a proxy that notes each request.

Every test runs once for each client. What a client cannot do is refused by name; that is in
`test_access.py`. What S3 has in its own way is in `test_access_wire_s3.py`.
"""

from __future__ import annotations

import contextlib
import socket
import ssl
from pathlib import Path
from typing import TYPE_CHECKING, Final
from urllib.parse import unquote

import pytest
import trustme

from tests.faulty_proxy import Fault, faulty_proxy
from tests.object_servers import ACCOUNT, place
from tests.tiers.tier_suite import NAME, image_of, slot
from tests.tiers.wire import backend, replaced, tier_of, written
from tiers.errors import TierUnavailable
from tiers.store.access import Access, Credentials, Tls
from tiers.store.object_tier import UrlObjects

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.harness.servers import S3Server
    from tests.object_servers import AzureServer, GcsServer
    from tiers.store.access import Backend

    Server = S3Server | GcsServer | AzureServer

__all__ = ["backend"]

pytestmark = pytest.mark.promise("store-wire")

PROVIDERS: Final = ["s3", "gcs", "azure"]


@pytest.fixture(params=PROVIDERS)
def server(request: pytest.FixtureRequest) -> Server:
    """One of each kind. For S3 it is moto, which takes any credentials and host."""
    found: Server = request.getfixturevalue({"s3": "moto"}.get(request.param, request.param))
    return found


# --- what is the same everywhere -----------------------------------------------------------------


async def test_names_are_below_the_prefix(server: Server, backend: Backend) -> None:
    url = place(server)
    prefix = url.split("://", 1)[1].split("/", 1)[1]
    async with faulty_proxy(server.endpoint) as watch:
        put = await written(url, server.access_at(watch.endpoint, backend), watch)
    # gcsfs has the name in the body, so there the answer to the read has to do.
    if not (backend == "fsspec" and url.startswith("gs://")):
        assert f"/{prefix}/{NAME}" in unquote(put.target)
    async with tier_of(url.rsplit("/", 1)[0], server.access_at(backend=backend)) as above:
        assert [one.name for one in await above.list("")] == [f"some.where/{NAME}"]


async def test_clients_never_retry_by_themselves(server: Server, backend: Backend) -> None:
    async with (
        faulty_proxy(server.endpoint) as watch,
        tier_of(place(server), server.access_at(watch.endpoint, backend)) as tier,
    ):
        for fault in (Fault.SLOW_DOWN, Fault.TOO_MANY, Fault.BROKEN, Fault.FORBIDDEN):
            await watch.become(fault)
            for call in (
                lambda: tier.write(NAME, image_of(10)),
                lambda: tier.read(NAME, slot()),
            ):
                before = len(watch.exchanges)
                with pytest.raises(TierUnavailable) as info:
                    await call()
                assert info.value.retryable is (fault is not Fault.FORBIDDEN)
                assert len(watch.exchanges) == before + 1, fault


async def test_a_silent_server_meets_the_read_timeout(server: Server, backend: Backend) -> None:
    async with faulty_proxy(server.endpoint) as watch:
        access = server.access_at(watch.endpoint, backend)
        hasty = replaced(access, read_timeout=0.2)
        await watch.become(Fault.STALL)
        async with tier_of(place(server), hasty) as tier:
            for call in (lambda: tier.write(NAME, image_of(10)), lambda: tier.read(NAME, slot())):
                with pytest.raises(TierUnavailable, match="no answer in time") as info:
                    await call()
                assert info.value.retryable
        await watch.become(Fault.PASS)


@pytest.fixture
def unaccepting() -> Iterator[str]:
    """An address whose connections never come about: its queue of them is full."""
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.socket())
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        address = listener.getsockname()
        for _ in range(4):
            waiting = stack.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(address)
        yield f"http://127.0.0.1:{address[1]}"


async def test_a_server_that_does_not_accept_meets_the_connect_timeout(
    server: Server, backend: Backend, unaccepting: str
) -> None:
    access = server.access_at(unaccepting, backend)
    hasty = replaced(access, connect_timeout=0.2)
    async with tier_of(place(server), hasty) as tier:
        with pytest.raises(TierUnavailable, match="no answer in time") as info:
            await tier.read(NAME, slot())
    assert info.value.retryable


# --- TLS and proxies -----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def authority() -> trustme.CA:
    return trustme.CA()


@pytest.fixture(scope="module")
def ca_file(authority: trustme.CA, tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("ca") / "ca.pem"
    authority.cert_pem.write_to_path(path)
    return str(path)


@pytest.fixture(scope="module")
def tls(authority: trustme.CA) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("127.0.0.1").configure_cert(context)
    return context


async def test_a_custom_authority_is_trusted(
    server: Server, backend: Backend, tls: ssl.SSLContext, ca_file: str
) -> None:
    async with faulty_proxy(server.endpoint, tls) as watch:
        access = server.access_at(watch.endpoint, backend)
        trusting = replaced(access, tls=Tls(ca_file=Path(ca_file)))
        await written(place(server), trusting, watch)


async def test_obstore_trusts_the_systems_authorities_too(
    server: Server,
    backend: Backend,
    tls: ssl.SSLContext,
    ca_file: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As docs/how-to/object-stores.md says: fsspec trusts `tls.ca_file` instead of them."""
    trustme.CA().cert_pem.write_to_path(tmp_path / "other.pem")
    monkeypatch.setenv("SSL_CERT_FILE", ca_file)
    async with faulty_proxy(server.endpoint, tls) as watch:
        access = server.access_at(watch.endpoint, backend)
        access = replaced(access, tls=Tls(ca_file=tmp_path / "other.pem"))
        if backend == "obstore":
            await written(place(server), access, watch)
            return
        async with tier_of(place(server), access) as tier:
            with pytest.raises(TierUnavailable, match="not trusted"):
                await tier.read(NAME, slot())


async def test_an_unknown_authority_is_refused_unless_told_otherwise(
    server: Server, backend: Backend, tls: ssl.SSLContext
) -> None:
    async with faulty_proxy(server.endpoint, tls) as watch:
        access = server.access_at(watch.endpoint, backend)
        async with tier_of(place(server), access) as tier:
            with pytest.raises(TierUnavailable, match=r"not trusted.*store\.tls\.ca_file") as info:
                await tier.read(NAME, slot())
        assert not info.value.retryable
        assert watch.exchanges == []
        careless = replaced(access, tls=Tls(verify=False))
        await written(place(server), careless, watch)


async def test_requests_go_through_the_proxy(server: Server, backend: Backend) -> None:
    async with faulty_proxy(server.endpoint) as watch:
        access = replaced(server.access_at(backend=backend), proxy=watch.endpoint)
        put = await written(place(server), access, watch)
        assert put.target.startswith(f"{server.endpoint.split('/kvlake')[0]}/")


async def test_tls_goes_through_a_proxy_as_a_tunnel(
    server: Server, backend: Backend, tls: ssl.SSLContext, ca_file: str
) -> None:
    """Nobody listens at the endpoint: only the proxy gets there. The certificate is the store's."""
    async with (
        faulty_proxy(server.endpoint, tls) as behind,
        faulty_proxy(behind.endpoint) as watch,
    ):
        access = replaced(
            server.access_at("https://127.0.0.1:8443", backend),
            tls=Tls(ca_file=Path(ca_file)),
            proxy=watch.endpoint,
        )
        async with tier_of(place(server), access) as tier:
            await tier.write(NAME, image_of(10))
        assert {one.method for one in watch.exchanges} == {"CONNECT"}
        assert watch.exchanges[0].target == "127.0.0.1:8443"
        assert [one.fields["host"] for one in behind.exchanges] == ["127.0.0.1:8443"]


# --- GCS and Azure -------------------------------------------------------------------------------


class TestGcs:
    async def test_a_bearer_token(self, gcs: GcsServer, backend: Backend) -> None:
        async with faulty_proxy(gcs.endpoint) as watch:
            put = await written(place(gcs), gcs.access_at(watch.endpoint, backend), watch)
        assert put.fields["authorization"] == "Bearer any-token"

    async def test_anonymous_requests_are_not_signed(
        self, gcs: GcsServer, backend: Backend
    ) -> None:
        async with faulty_proxy(gcs.endpoint) as watch:
            access = replaced(
                gcs.access_at(watch.endpoint, backend), credentials=Credentials(kind="anonymous")
            )
            async with tier_of(place(gcs), access) as tier:
                await tier.list("")
            assert "authorization" not in watch.exchanges[0].fields

    async def test_storage_class(self, gcs: GcsServer) -> None:
        async with faulty_proxy(gcs.endpoint) as watch:
            access = gcs.access_at(watch.endpoint, "obstore")
            colder = replaced(access, storage_class="NEARLINE")
            put = await written(place(gcs), colder, watch)
        assert put.fields["x-goog-storage-class"] == "NEARLINE"


class TestAzure:
    async def test_a_key_signs(self, azure: AzureServer, backend: Backend) -> None:
        async with faulty_proxy(azure.endpoint) as watch:
            put = await written(place(azure), azure.access_at(watch.endpoint, backend), watch)
        assert put.fields["authorization"].startswith(f"SharedKey {ACCOUNT}:")

    @pytest.mark.parametrize("whole", [False, True], ids=["key", "connection string"])
    async def test_credentials_in_storage_options(self, azure: AzureServer, *, whole: bool) -> None:
        options: dict[str, object] = {"account_key": azure.account_key}
        if whole:
            text = f"AccountName={ACCOUNT};AccountKey={azure.account_key};"
            options = {"connection_string": f"{text}BlobEndpoint={azure.endpoint};"}
        tier = UrlObjects(
            place(azure),
            Access(endpoint=azure.endpoint, account=ACCOUNT, storage_options=options),
        )
        await tier.write(NAME, image_of(10))
        assert await tier.read(NAME, slot()) == 10
        await tier.close()

    async def test_a_shared_access_signature(self, azure: AzureServer, backend: Backend) -> None:
        import datetime as dt

        from azure.storage.blob import AccountSasPermissions, ResourceTypes, generate_account_sas

        sas = generate_account_sas(
            ACCOUNT,
            azure.account_key,
            ResourceTypes(service=True, container=True, object=True),
            AccountSasPermissions(read=True, write=True, list=True, create=True, delete=True),
            dt.datetime.now(dt.UTC) + dt.timedelta(hours=1),
        )
        async with faulty_proxy(azure.endpoint) as watch:
            access = replaced(
                azure.access_at(watch.endpoint, backend),
                credentials=Credentials(kind="static", sas_token=sas),
            )
            put = await written(place(azure), access, watch)
        assert "authorization" not in put.fields
        assert "sig=" in put.target

    async def test_storage_class(self, azure: AzureServer, backend: Backend) -> None:
        async with faulty_proxy(azure.endpoint) as watch:
            access = azure.access_at(watch.endpoint, backend)
            colder = replaced(access, storage_class="Cool")
            put = await written(place(azure), colder, watch)
        assert put.fields["x-ms-access-tier"] == "Cool"

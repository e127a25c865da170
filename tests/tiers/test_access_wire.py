"""Settings of a site, as they are on the wire: real servers, with a proxy that notes each request.

Every test runs once for each client. What a client cannot do is refused by name; that is in
`test_access.py`.
"""

from __future__ import annotations

import contextlib
import socket
import ssl
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal
from urllib.parse import unquote

import anyio
import numpy as np
import pytest
import trustme

from tests import places
from tests.faulty_proxy import Exchange, Fault, FaultyProxy, faulty_proxy
from tests.object_servers import ACCOUNT, place
from tests.tiers.tier_suite import NAME, image_of, slot
from tiers.errors import TierUnavailable
from tiers.store.access import Access, Credentials, Encryption, Tls
from tiers.store.object_tier import UrlObjects

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Iterator

    from tests.harness.servers import S3Server
    from tests.object_servers import AzureServer, GcsServer
    from tiers.store.access import Backend

    Server = S3Server | GcsServer | AzureServer

pytestmark = pytest.mark.promise("store-wire")

PROVIDERS: Final = ["s3", "gcs", "azure"]
AWS_HOST: Final = "s3.amazonaws.com"
ACCOUNT_ID: Final = "123456789012"


@pytest.fixture(params=["obstore", "fsspec"])
def backend(request: pytest.FixtureRequest) -> Backend:
    chosen: Backend = request.param
    return chosen


@pytest.fixture(params=PROVIDERS)
def server(request: pytest.FixtureRequest) -> Server:
    """One of each kind. For S3 it is moto, which takes any credentials and host."""
    found: Server = request.getfixturevalue({"s3": "moto"}.get(request.param, request.param))
    return found


@contextlib.asynccontextmanager
async def tier_of(url: str, access: Access) -> AsyncGenerator[UrlObjects]:
    tier = UrlObjects(url, access)
    try:
        yield tier
    finally:
        await tier.close()


def replaced(access: Access, **settings: object) -> Access:
    """A copy with other settings, which are checked."""
    return Access.model_validate({**dict(access), **settings})


async def written(url: str, access: Access, watch: FaultyProxy) -> Exchange:
    """Write one object and read it back; the request that wrote it."""
    image, into = image_of(5000), slot()
    async with tier_of(url, access) as tier:
        await tier.write(NAME, image)
        (put,) = watch.exchanges
        assert await tier.read(NAME, into) == image.nbytes
    assert np.array_equal(into[: image.nbytes], image)
    return put


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


# --- S3 ------------------------------------------------------------------------------------------


class TestS3:
    async def put(self, moto: S3Server, backend: Backend, **settings: Any) -> Exchange:
        async with faulty_proxy(moto.endpoint) as watch:
            access = replaced(moto.access_at(watch.endpoint, backend), **settings)
            return await written(place(moto), access, watch)

    async def test_a_bucket_is_in_the_path(self, moto: S3Server, backend: Backend) -> None:
        for addressing in ("path", "auto"):
            put = await self.put(moto, backend, addressing=addressing)
            assert put.target.startswith("/kvlake/")
            assert put.fields["host"].startswith("127.0.0.1:")

    async def test_a_bucket_is_in_the_host(self, moto: S3Server, backend: Backend) -> None:
        async with faulty_proxy(moto.endpoint) as watch:
            access = replaced(
                moto.access_at(f"http://{AWS_HOST}", backend),
                addressing="virtual",
                proxy=watch.endpoint,
            )
            put = await written(place(moto), access, watch)
        assert put.target.startswith(f"http://kvlake.{AWS_HOST}/")
        assert not put.target.startswith(f"http://kvlake.{AWS_HOST}/kvlake/")
        assert put.fields["host"] == f"kvlake.{AWS_HOST}"

    async def test_without_an_endpoint_it_is_aws_in_the_region(
        self, moto: S3Server, backend: Backend
    ) -> None:
        async with faulty_proxy(moto.endpoint) as watch:
            access = replaced(
                moto.access_at(backend=backend),
                endpoint=None,
                region="eu-central-1",
                proxy=watch.endpoint,
            )
            async with tier_of(place(moto), access) as tier:
                # No TLS behind the proxy: what counts is where the client wanted to go.
                with pytest.raises(TierUnavailable):
                    await tier.read(NAME, slot())
        assert {one.target for one in watch.exchanges} == {
            "kvlake.s3.eu-central-1.amazonaws.com:443"
        }

    @pytest.mark.usefixtures("profiles")
    async def test_the_region_of_a_profile_is_signed(
        self, moto: S3Server, backend: Backend, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        (tmp_path / "config").write_text("[profile team]\nregion = eu-west-3\n")
        monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
        for name in ("AWS_REGION", "AWS_DEFAULT_REGION"):
            monkeypatch.delenv(name, raising=False)
        team = Credentials(kind="profile", profile="team")
        put = await self.put(moto, backend, credentials=team, region=None)
        assert "/eu-west-3/s3/" in put.fields["authorization"]

    async def test_the_region_is_signed(self, moto: S3Server, backend: Backend) -> None:
        put = await self.put(moto, backend, region="eu-central-1")
        assert "/eu-central-1/s3/aws4_request" in put.fields["authorization"]

    @pytest.mark.parametrize(
        ("encryption", "fields"),
        [
            (Encryption(), {}),
            (Encryption(algorithm="AES256"), {"": "AES256"}),
            (Encryption(algorithm="aws:kms"), {"": "aws:kms"}),
            (
                Encryption(algorithm="aws:kms", kms_key="alias/kv"),
                {"": "aws:kms", "-aws-kms-key-id": "alias/kv"},
            ),
            (
                Encryption(algorithm="aws:kms:dsse", kms_key="k"),
                {"": "aws:kms:dsse", "-aws-kms-key-id": "k"},
            ),
        ],
    )
    async def test_encryption(
        self, moto: S3Server, backend: Backend, encryption: Encryption, fields: dict[str, str]
    ) -> None:
        put = await self.put(moto, backend, encryption=encryption)
        start = "x-amz-server-side-encryption"
        sent = {k[len(start) :]: v for k, v in put.fields.items() if k.startswith(start)}
        sent.pop("-bucket-key-enabled", None)
        assert sent == fields

    async def test_storage_class(self, moto: S3Server, backend: Backend) -> None:
        put = await self.put(moto, backend, storage_class="STANDARD_IA")
        assert put.fields["x-amz-storage-class"] == "STANDARD_IA"
        assert "x-amz-storage-class" not in (await self.put(moto, backend)).fields

    async def test_static_credentials(
        self, moto: S3Server, backend: Backend, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        # A token of the environment belongs to the keys of the environment.
        monkeypatch.setenv("AWS_SESSION_TOKEN", "of-somebody-else")
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKOTHER")
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "other")
        for token in (None, "the-token"):
            keys = Credentials(
                kind="static", access_key="AKSTATIC", secret_key="secret", session_token=token
            )
            put = await self.put(moto, backend, credentials=keys)
            assert "Credential=AKSTATIC/" in put.fields["authorization"]
            assert put.fields.get("x-amz-security-token") == token

    async def test_anonymous_requests_are_not_signed(
        self, moto: S3Server, backend: Backend, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKOTHER")
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "other")
        async with faulty_proxy(moto.endpoint) as watch:
            access = replaced(
                moto.access_at(watch.endpoint, backend), credentials=Credentials(kind="anonymous")
            )
            async with tier_of(place(moto), access) as tier:
                with contextlib.suppress(TierUnavailable):
                    await tier.write(NAME, image_of(10))
            assert "authorization" not in watch.exchanges[0].fields

    @pytest.fixture
    def profiles(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        text = "".join(
            f"[{name}]\naws_access_key_id = AK{name.upper()}\naws_secret_access_key = s\n"
            for name in ("default", "team")
        )
        (tmp_path / "credentials").write_text(text)
        monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
        monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE"):
            monkeypatch.delenv(name, raising=False)

    @pytest.mark.usefixtures("profiles")
    async def test_credentials_of_a_profile(self, moto: S3Server, backend: Backend) -> None:
        team = Credentials(kind="profile", profile="team")
        for keys, name in ((team, "AKTEAM"), (Credentials(kind="auto"), "AKDEFAULT")):
            put = await self.put(moto, backend, credentials=keys)
            assert f"Credential={name}/" in put.fields["authorization"]

    @pytest.mark.usefixtures("profiles")
    @pytest.mark.parametrize("kind", ["profile", "auto"])
    async def test_credentials_renewed_in_their_file_are_read_again(
        self,
        moto: S3Server,
        backend: Backend,
        kind: Literal["profile", "auto"],
        monkeypatch: pytest.MonkeyPatch,
        tmp_path: Path,
    ) -> None:
        places.patch(monkeypatch, "REREAD_SECONDS", 0.2)
        keys = Credentials(kind=kind, profile="default" if kind == "profile" else None)
        file = tmp_path / "credentials"
        async with faulty_proxy(moto.endpoint) as watch:
            access = replaced(moto.access_at(watch.endpoint, backend), credentials=keys)
            async with tier_of(place(moto), access) as tier:
                image = image_of(10)
                await tier.write(NAME, image)
                assert "AKDEFAULT" in watch.exchanges[-1].fields["authorization"]
                file.write_text(file.read_text().replace("AKDEFAULT", "AKRENEWED"))
                for verb in (lambda: tier.write(NAME, image), lambda: tier.read(NAME, slot())):
                    with anyio.fail_after(30):
                        while "AKRENEWED" not in watch.exchanges[-1].fields["authorization"]:
                            await verb()
                    watch.exchanges[-1] = watch.exchanges[0]
                # Half-written, it says nothing.
                file.write_text("[defau")
                await anyio.sleep(0.3)
                await tier.write(NAME, image)
                assert "AKRENEWED" in watch.exchanges[-1].fields["authorization"]

    @pytest.mark.usefixtures("profiles")
    async def test_credentials_of_a_role(
        self, moto: S3Server, backend: Backend, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        role = Credentials(
            kind="role",
            role_arn=f"arn:aws:iam::{ACCOUNT_ID}:role/kv",
            profile="team",
            role_session_name="kv-test",
            external_id="outside",
        )
        async with faulty_proxy(moto.endpoint) as sts:
            monkeypatch.setenv("AWS_ENDPOINT_URL_STS", sts.endpoint)
            put = await self.put(moto, backend, credentials=role)
            (asked,) = sts.exchanges
        assert "Credential=AKTEAM/" in asked.fields["authorization"]
        assert "Credential=ASIA" in put.fields["authorization"]
        assert put.fields["x-amz-security-token"]

    @pytest.mark.usefixtures("profiles")
    async def test_credentials_of_a_web_identity(
        self, moto: S3Server, backend: Backend, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        token = tmp_path / "token"
        token.write_text("signed-by-the-cluster")
        role = Credentials(
            kind="role",
            role_arn=f"arn:aws:iam::{ACCOUNT_ID}:role/kv",
            web_identity_token_file=str(token),
        )
        async with faulty_proxy(moto.endpoint) as sts:
            monkeypatch.setenv("AWS_ENDPOINT_URL_STS", sts.endpoint)
            put = await self.put(moto, backend, credentials=role)
            (asked,) = sts.exchanges
        assert "authorization" not in asked.fields
        assert "Credential=ASIA" in put.fields["authorization"]


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

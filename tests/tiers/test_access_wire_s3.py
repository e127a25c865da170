"""Settings of a site that only S3 has, or has in its own way, as they are on the wire.

The others are in `test_access_wire.py`.
"""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

import anyio
import pytest

from tests import places
from tests.faulty_proxy import Exchange, Fault, faulty_proxy
from tests.object_servers import place
from tests.tiers.tier_suite import NAME, image_of, slot
from tests.tiers.wire import backend, replaced, tier_of, written
from tiers.errors import TierUnavailable
from tiers.store.access import Access, Credentials, Encryption
from tiers.store.aws_credentials import AwsCredentials

if TYPE_CHECKING:
    from tests.harness.servers import S3Server
    from tiers.store.access import Backend

__all__ = ["backend"]

pytestmark = pytest.mark.promise("store-wire")

AWS_HOST: Final = "s3.amazonaws.com"
ACCOUNT_ID: Final = "123456789012"


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
        token.unlink()
        access = replaced(moto.access_at(moto.endpoint, backend), credentials=role)
        async with tier_of(place(moto), access) as tier:
            with pytest.raises(TierUnavailable, match="token"):
                await tier.read(NAME, slot())
            # Behind what obstore says, its name may be cut.
            with pytest.raises(TierUnavailable, match="a file of this machine is missing"):
                await tier.delete([NAME])

    @pytest.mark.usefixtures("profiles")
    async def test_a_profile_assumes_its_role_with_keys_that_were_renewed(
        self, moto: S3Server, backend: Backend, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        role = f"arn:aws:iam::{ACCOUNT_ID}:role/kv"
        (tmp_path / "none").write_text(
            f"[profile assumed]\nrole_arn = {role}\nsource_profile = team\n"
        )
        keys, file = Credentials(kind="profile", profile="assumed"), tmp_path / "credentials"
        async with faulty_proxy(moto.endpoint) as sts:
            monkeypatch.setenv("AWS_ENDPOINT_URL_STS", sts.endpoint)
            access = replaced(moto.access_at(moto.endpoint, backend), credentials=keys)
            async with tier_of(place(moto), access) as tier:
                await sts.become(Fault.EXPIRED)
                with pytest.raises(TierUnavailable):
                    await tier.write(NAME, image_of(10))
                file.write_text(file.read_text().replace("AKTEAM", "AKRENEWED"))
                await sts.become(Fault.PASS)
                await tier.write(NAME, image_of(10))
        assert "AKRENEWED" in sts.exchanges[-1].fields["authorization"]

    @pytest.mark.usefixtures("profiles")
    async def test_sts_is_reached_through_the_stores_proxy(
        self, moto: S3Server, backend: Backend, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        """Also by what botocore finds itself, such as the identity of a pod."""
        (tmp_path / "token").write_text("signed-by-the-cluster")
        (tmp_path / "credentials").unlink()
        monkeypatch.setenv("AWS_WEB_IDENTITY_TOKEN_FILE", str(tmp_path / "token"))
        monkeypatch.setenv("AWS_ROLE_ARN", f"arn:aws:iam::{ACCOUNT_ID}:role/kv")
        monkeypatch.setenv("AWS_ENDPOINT_URL_STS", moto.endpoint)
        async with faulty_proxy(moto.endpoint) as watch:
            access = replaced(
                moto.access_at(backend=backend),
                proxy=watch.endpoint,
                credentials=Credentials(kind="auto"),
            )
            async with tier_of(place(moto), access) as tier:
                await tier.write(NAME, image_of(10))
        assert [one.line for one in watch.exchanges][:1] == ["POST /"], "what STS is asked"


def test_another_way_to_credentials_is_taken_when_it_is_found_twice() -> None:
    """A file that is being replaced is missing for a moment, and an instance has a role, too."""

    class Way:
        def __init__(self, method: str) -> None:
            self.method = method

    file, again, instance = (
        Way("shared-credentials-file"),
        Way("shared-credentials-file"),
        Way("iam"),
    )
    provider = AwsCredentials(Access())
    for found, taken in ((file, file), (instance, file), (again, again), (None, again)):
        provider._source = provider._confirmed(found)  # noqa: SLF001
        assert provider._source is taken  # noqa: SLF001
    for taken in (again, instance):
        provider._source = provider._confirmed(instance)  # noqa: SLF001
        assert provider._source is taken  # noqa: SLF001

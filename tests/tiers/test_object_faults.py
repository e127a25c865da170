"""Object tiers and what goes wrong: on the way to a real server, at its door, in its settings."""

from __future__ import annotations

import asyncio
import os
import socket
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.faulty_proxy import Fault, FaultyProxy
from tests.harness.servers import S3Server
from tests.tiers.tier_suite import NAME, image_of, slot
from tiers.errors import ChunkCorrupt, ChunkMissing, TierUnavailable
from tiers.store.access import Access
from tiers.store.middleware import Deadline
from tiers.store.object_tier import UrlObjects


async def every_verb(tier: UrlObjects) -> list[BaseException]:
    """What each verb raises, and it must raise."""
    raised: list[BaseException] = []
    for call in (
        lambda: tier.write(NAME, image_of(100_000)),
        lambda: tier.read(NAME, slot()),
        lambda: tier.list("v1"),
        lambda: tier.delete([NAME]),
        lambda: tier.write(NAME, image_of(10), create=True),
        lambda: tier.quarantine(NAME),
        tier.probe,
    ):
        with pytest.raises((TierUnavailable, ChunkCorrupt, ChunkMissing)) as info:
            await call()
        raised.append(info.value)
    return raised


class TestFaultsOnTheWay:
    @pytest.mark.parametrize(
        ("fault", "retryable", "words"),
        [
            (Fault.REFUSE, True, "refused"),
            (Fault.HANG_UP, True, "connection"),
            (Fault.SLOW_DOWN, True, "busy"),
            (Fault.FORBIDDEN, False, "denied"),
        ],
    )
    async def test_every_verb_says_what_happened(
        self,
        behind_proxy: UrlObjects,
        proxy: FaultyProxy,
        seaweed: S3Server,
        fault: Fault,
        retryable: bool,
        words: str,
    ) -> None:
        await behind_proxy.write(NAME, image_of(10))
        await proxy.become(fault)
        for error in await every_verb(behind_proxy):
            assert isinstance(error, TierUnavailable)
            assert error.retryable is retryable
            assert behind_proxy.url in str(error)
            assert words in str(error)
            assert seaweed.secret_key not in str(error)
        await proxy.become(Fault.PASS)
        await behind_proxy.probe()
        assert await behind_proxy.read(NAME, slot()) == 10

    async def test_a_store_without_conditional_writes_passes_the_probe(
        self, behind_proxy: UrlObjects, proxy: FaultyProxy
    ) -> None:
        await proxy.become(Fault.NO_CONDITIONS)
        assert (await behind_proxy.probe()).creates is False
        assert await behind_proxy.list("probe") == []

    async def test_a_body_that_ends_early_is_retryable(
        self, behind_proxy: UrlObjects, proxy: FaultyProxy
    ) -> None:
        await behind_proxy.write(NAME, image_of(100_000))
        await proxy.become(Fault.TRUNCATE, times=1)
        with pytest.raises(TierUnavailable) as info:
            await behind_proxy.read(NAME, slot())
        assert info.value.retryable
        assert await behind_proxy.read(NAME, slot()) == 100_000

    async def test_wrong_bytes_are_left_to_the_checksum_but_fail_the_probe(
        self, behind_proxy: UrlObjects, proxy: FaultyProxy
    ) -> None:
        image, into = image_of(100_000), slot()
        await behind_proxy.write(NAME, image)
        await proxy.become(Fault.WRONG_BYTES, times=1)
        assert await behind_proxy.read(NAME, into) == 100_000
        assert np.count_nonzero(into[:100_000] != image) == 1
        await proxy.become(Fault.WRONG_BYTES)
        with pytest.raises(TierUnavailable, match=r"differ from the 4096 written.*proxy") as info:
            await behind_proxy.probe()
        assert not info.value.retryable
        await proxy.become(Fault.PASS)
        assert await behind_proxy.list("probe") == []

    @pytest.mark.parametrize("fault", [Fault.STALL, Fault.STALL_BODY])
    async def test_a_stalled_server_meets_the_deadline(
        self, behind_proxy: UrlObjects, proxy: FaultyProxy, fault: Fault
    ) -> None:
        image, into = image_of(100_000), slot()
        await behind_proxy.write(NAME, image)
        await proxy.become(fault)
        hasty = Deadline(behind_proxy, seconds_max=0.2)
        with pytest.raises(TierUnavailable, match="deadline_seconds_max") as info:
            await hasty.read(NAME, into)
        assert info.value.retryable
        await proxy.become(Fault.PASS)
        assert np.array_equal(into, slot())
        # Without the deadline: a machine may be slow.
        assert await behind_proxy.read(NAME, into) == 100_000


class TestProbeOfS3:
    async def probe(self, url: str, options: dict[str, object]) -> TierUnavailable:
        tier = UrlObjects(url, Access(storage_options=options))
        try:
            with pytest.raises(TierUnavailable) as info:
                await tier.probe()
        finally:
            await tier.close()
        message = str(info.value)
        assert url in message
        assert str(options.get("secret", "no secret")) not in message
        return info.value

    @pytest.mark.parametrize("field", ["key", "secret"])
    async def test_wrong_credentials(self, seaweed: S3Server, field: str) -> None:
        options = {**seaweed.storage_options, field: "completely-wrong"}
        error = await self.probe(seaweed.url, options)
        assert not error.retryable
        assert "credentials were refused" in str(error)
        assert "store.credentials" in str(error)
        assert "completely-wrong" not in str(error)

    async def test_no_credentials(
        self, seaweed: S3Server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        for name in [name for name in os.environ if name.startswith("AWS_")]:
            monkeypatch.delenv(name)
        monkeypatch.setenv("HOME", str(tmp_path))
        monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
        error = await self.probe(seaweed.url, {"endpoint_url": seaweed.endpoint})
        assert not error.retryable
        assert "no credentials were found" in str(error)

    async def test_no_bucket(self, seaweed: S3Server) -> None:
        error = await self.probe("s3://not-there/prefix", seaweed.storage_options)
        assert not error.retryable
        assert "bucket does not exist" in str(error)
        assert "create it" in str(error)

    async def test_no_bucket_is_not_an_empty_listing(self, seaweed: S3Server) -> None:
        tier = UrlObjects("s3://not-there/prefix", Access(storage_options=seaweed.storage_options))
        with pytest.raises(TierUnavailable, match="bucket does not exist"):
            await tier.list("v1")
        with pytest.raises(TierUnavailable, match="bucket does not exist"):
            await tier.read(NAME, slot())
        await tier.close()

    async def test_nobody_listens(self, seaweed: S3Server) -> None:
        with socket.socket() as bound:
            bound.bind(("127.0.0.1", 0))
            port = bound.getsockname()[1]
            error = await self.probe(seaweed.url, seaweed.options_at(f"http://127.0.0.1:{port}"))
        assert "refused" in str(error)
        assert "store.endpoint" in str(error)
        assert str(port) in str(error)

    async def test_https_to_a_server_without_tls(self, seaweed: S3Server) -> None:
        endpoint = seaweed.endpoint.replace("http:", "https:")
        error = await self.probe(seaweed.url, seaweed.options_at(endpoint))
        assert not error.retryable
        assert "http:// rather than https://" in str(error)

    async def test_an_untrusted_certificate(self, seaweed: S3Server, tmp_path: Path) -> None:
        async with SelfSignedServer(tmp_path) as endpoint:
            error = await self.probe(seaweed.url, seaweed.options_at(endpoint))
        assert not error.retryable
        assert "certificate is not trusted" in str(error)
        assert "store.tls.ca_file" in str(error)

    async def test_an_unknown_option(self, seaweed: S3Server) -> None:
        options: dict[str, object] = {**seaweed.storage_options, "bogus_option": 1}
        error = await self.probe(seaweed.url, options)
        assert not error.retryable
        assert "bogus_option" in str(error)


class SelfSignedServer:
    """TLS on the loopback address, with a certificate that only vouches for itself."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    async def __aenter__(self) -> str:
        context = _self_signed_context(self._folder)
        self._server = await asyncio.start_server(
            lambda reader, writer: writer.close(), "127.0.0.1", 0, ssl=context
        )
        port = self._server.sockets[0].getsockname()[1]
        return f"https://127.0.0.1:{port}"

    async def __aexit__(self, *exc_info: object) -> None:
        self._server.close()
        await self._server.wait_closed()


def _self_signed_context(folder: Path) -> Any:
    import datetime as dt
    import ipaddress
    import ssl

    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "kvlake test")])
    now = dt.datetime.now(dt.UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - dt.timedelta(hours=1))
        .not_valid_after(now + dt.timedelta(hours=1))
        .add_extension(
            x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]),
            critical=False,
        )
        .sign(key, hashes.SHA256())
    )
    file = folder / "server.pem"
    file.write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
        + certificate.public_bytes(serialization.Encoding.PEM)
    )
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(file)
    return context

"""Where requests for S3 go, by the settings and by the environment, for each client."""

# ruff: noqa: SLF001
# pyright: reportPrivateUsage=false

from __future__ import annotations

import datetime as dt
from typing import TYPE_CHECKING, Any

import obstore
import pytest

from sidecar.config.store import StoreSettings
from sidecar.errors import StartError
from sidecar.logs import LOGGER
from sidecar.service.store_stack import open_store
from tests.tiers.wire import backend
from tiers.store.access import Access, with_endpoint
from tiers.store.object_tier import UrlObjects
from tiers.store.obstore_client import ObstoreClient

if TYPE_CHECKING:
    from tiers.store.access import Backend

__all__ = ["backend"]

SERVICE, ANY, OTHER = "AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT"
IGNORE = "AWS_IGNORE_CONFIGURED_ENDPOINT_URLS"
MINIO = "http://minio:9000"
OWN = (
    "https://s3.eu-west-3.amazonaws.com",
    "https://s3.cn-north-1.amazonaws.com.cn",
    "https://s3.dualstack.eu-west-3.amazonaws.com/",
    "https://s3-fips.us-gov-west-1.amazonaws.com",
    "https://bucket.vpce-1a2b-5c6d.s3.us-east-1.vpce.amazonaws.com",
)
OTHERS = (
    "https://amazonaws.com.example.org",
    "http://ec2-1-2-3-4.compute-1.amazonaws.com:9000",
    "https://internal-ceph-1.us-east-1.elb.amazonaws.com",
)
AWS = "https://models.s3.eu-west-3.amazonaws.com/kvlake/name"


@pytest.fixture(autouse=True)
def _no_endpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (SERVICE, ANY, OTHER, IGNORE, "HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.delenv(name, raising=False)


def objects(**settings: Any) -> UrlObjects:
    """The store as a sidecar makes it."""
    keys = {"kind": "static", "access_key": "AK", "secret_key": "secret"}
    store = {"url": "s3://models", "prefix": "kvlake", "region": "eu-west-3", "credentials": keys}
    found = open_store(StoreSettings.model_validate({**store, **settings})).objects
    assert isinstance(found, UrlObjects)
    return found


def signed(**settings: Any) -> str:
    """Where obstore would get an object."""
    client = objects(backend="obstore", **settings).store
    assert isinstance(client, ObstoreClient)
    return obstore.sign(client.client, "GET", "name", dt.timedelta(seconds=60)).split("?")[0]


@pytest.mark.parametrize(
    ("environment", "settings", "place"),
    [
        ({}, {}, AWS),
        ({SERVICE: MINIO}, {}, f"{MINIO}/models/kvlake/name"),
        ({ANY: MINIO}, {}, f"{MINIO}/models/kvlake/name"),
        ({OTHER: MINIO}, {}, f"{MINIO}/models/kvlake/name"),
        ({SERVICE: MINIO, ANY: "http://a", OTHER: "http://b"}, {}, f"{MINIO}/models/kvlake/name"),
        ({SERVICE: "", ANY: MINIO, OTHER: "http://b"}, {}, f"{MINIO}/models/kvlake/name"),
        ({SERVICE: ""}, {}, AWS),
        ({SERVICE: MINIO}, {"addressing": "virtual"}, "http://models.minio:9000/kvlake/name"),
        ({ANY: f"{MINIO}/"}, {"addressing": "virtual"}, "http://models.minio:9000/kvlake/name"),
        ({SERVICE: f"{MINIO}/"}, {}, f"{MINIO}/models/kvlake/name"),
        ({SERVICE: "http://a"}, {"endpoint": MINIO}, f"{MINIO}/models/kvlake/name"),
        ({SERVICE: MINIO, OTHER: MINIO, IGNORE: "True"}, {}, AWS),
        ({SERVICE: MINIO, IGNORE: "false"}, {}, f"{MINIO}/models/kvlake/name"),
    ],
)
def test_the_bucket_stays_in_the_url(
    environment: dict[str, str],
    settings: dict[str, str],
    place: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert signed(**settings) == place


def test_an_endpoint_of_the_environment_is_no_aws(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may not know bulk deletes, and is read directly."""
    there = objects(backend="obstore")
    monkeypatch.setenv(ANY, MINIO)
    here = objects(backend="obstore")
    assert (there.names_per_removal, here.names_per_removal) == (1000, 1)
    assert isinstance(there.store, ObstoreClient)
    assert isinstance(here.store, ObstoreClient)
    assert there.store._direct is None
    assert here.store._direct is not None
    for own in OWN:
        monkeypatch.setenv(ANY, own)
        assert objects(backend="obstore").names_per_removal == 1000
    for other in OTHERS:
        monkeypatch.setenv(ANY, other)
        assert objects(backend="obstore").names_per_removal == 1


def test_the_log_names_the_variable(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", LOGGER)
    monkeypatch.setenv(ANY, MINIO)
    objects()
    assert f"the S3 endpoint is that of {ANY}" in caplog.text


def test_s3fs_goes_to_the_same_place(monkeypatch: pytest.MonkeyPatch) -> None:
    # A variable of obstore's alone.
    monkeypatch.setenv(OTHER, "http://b")
    monkeypatch.setenv(ANY, MINIO)
    client: Any = objects(backend="fsspec").store
    assert client.fs.endpoint_url == MINIO
    assert client.fs.config_kwargs["s3"] == {"addressing_style": "path"}


def test_other_stores_and_options_of_the_driver_come_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SERVICE, MINIO)
    driver: dict[str, Any]
    for driver in ({"endpoint_url": "http://a"}, {"client_kwargs": {"endpoint_url": "http://a"}}):
        access = Access(storage_options=driver)
        assert with_endpoint("s3://b", access) is access
    plain = Access()
    assert with_endpoint("gs://b", plain) is plain
    assert with_endpoint("s3a://b", plain).endpoint == MINIO


def test_an_endpoint_that_is_no_url_is_named(
    backend: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(SERVICE, "user:hunter2@minio:9000")
    with pytest.raises(
        StartError, match=f"{SERVICE}.*'minio:9000' has no scheme.*endpoint"
    ) as info:
        objects(backend=backend)
    assert "hunter2" not in str(info.value)

"""The signature of a GET, against the example that AWS publishes."""

from __future__ import annotations

import datetime as dt

import pytest
from botocore import auth

from tiers.store.s3_direct import signed

KEYS = {
    "access_key_id": "AKIAIOSFODNN7EXAMPLE",
    "secret_access_key": "wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY",
    "token": None,
    "expires_at": None,
}
FIELDS = {"host": "examplebucket.s3.amazonaws.com", "range": "bytes=0-9"}


@pytest.fixture(autouse=True)
def _then(monkeypatch: pytest.MonkeyPatch) -> None:
    moment = dt.datetime(2013, 5, 24, tzinfo=dt.UTC)
    monkeypatch.setattr(auth, "get_current_datetime", lambda: moment)


def test_the_example_of_the_documentation() -> None:
    fields = signed(FIELDS, "/test.txt", KEYS, "us-east-1")
    assert fields["Authorization"] == (
        "AWS4-HMAC-SHA256 Credential=AKIAIOSFODNN7EXAMPLE/20130524/us-east-1/s3/aws4_request, "
        "SignedHeaders=host;range;x-amz-content-sha256;x-amz-date, "
        "Signature=f0e8bdb87c964420e857bd35b5d6ed310bd44f0170aba48dd91039c6036bdb41"
    )
    assert fields["X-Amz-Date"] == "20130524T000000Z"
    assert {name: fields[name] for name in FIELDS} == FIELDS


def test_the_token_of_temporary_keys_is_sent_and_signed() -> None:
    fields = signed(FIELDS, "/test.txt", {**KEYS, "token": "a token"}, "us-east-1")
    assert fields["X-Amz-Security-Token"] == "a token"
    assert "x-amz-security-token" in fields["Authorization"]

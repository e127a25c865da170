"""The signature of a GET, against the example that AWS publishes."""

from __future__ import annotations

import datetime as dt

from tiers.store.sigv4 import Keys, sign_get

NOW = dt.datetime(2013, 5, 24, tzinfo=dt.UTC)
KEYS = Keys("AKIAIOSFODNN7EXAMPLE", "wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY")
FIELDS = {"host": "examplebucket.s3.amazonaws.com", "range": "bytes=0-9"}


def test_the_example_of_the_documentation() -> None:
    signed = sign_get(FIELDS, "/test.txt", keys=KEYS, region="us-east-1", now=NOW)
    assert signed["authorization"] == (
        "AWS4-HMAC-SHA256 Credential=AKIAIOSFODNN7EXAMPLE/20130524/us-east-1/s3/aws4_request, "
        "SignedHeaders=host;range;x-amz-content-sha256;x-amz-date, "
        "Signature=f0e8bdb87c964420e857bd35b5d6ed310bd44f0170aba48dd91039c6036bdb41"
    )
    assert signed["x-amz-date"] == "20130524T000000Z"


def test_the_token_of_temporary_keys_is_sent_and_signed() -> None:
    keys = Keys(KEYS.access_key, KEYS.secret_key, "a token")
    signed = sign_get(FIELDS, "/test.txt", keys=keys, region="us-east-1", now=NOW)
    assert signed["x-amz-security-token"] == "a token"
    assert "x-amz-security-token" in signed["authorization"]


def test_keys_are_in_no_repr() -> None:
    assert KEYS.access_key not in repr(KEYS)
    assert KEYS.secret_key not in repr(KEYS)

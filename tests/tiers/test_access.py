"""How a store is reached: which client serves what, and which settings make sense where."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests import places
from tiers.store.access import (
    Access,
    AccessError,
    Credentials,
    Encryption,
    Folder,
    Tls,
    azure_account,
    check,
    chosen_backend,
    provider_of,
)

ROLE = "arn:aws:iam::123456789012:role/kvlake"


@pytest.mark.parametrize(
    ("url", "provider"),
    [
        ("s3://b/p", "s3"),
        ("S3A://b", "s3"),
        ("gs://b", "gcs"),
        ("gcs://b", "gcs"),
        ("az://c", "azure"),
        ("abfs://c@a.dfs.core.windows.net/p", "azure"),
        ("file:///x", "folder"),
        ("/x", "folder"),
        ("memory://", "other"),
        ("http://host/", "other"),
    ],
)
def test_the_scheme_names_the_provider(url: str, provider: str) -> None:
    assert provider_of(url) == provider


@pytest.mark.parametrize(
    ("url", "choice", "options", "backend"),
    [
        ("s3://b", "auto", {}, "obstore"),
        ("gs://b", "auto", {}, "obstore"),
        ("az://b", "auto", {}, "obstore"),
        ("s3://b", "auto", {"requester_pays": True}, "fsspec"),
        ("s3://b", "fsspec", {}, "fsspec"),
        ("s3://b", "obstore", {}, "obstore"),
        ("file:///x", "auto", {}, "fsspec"),
        ("memory://", "auto", {}, "fsspec"),
    ],
)
def test_obstore_serves_what_it_can(
    url: str, choice: Any, options: dict[str, object], backend: str
) -> None:
    assert chosen_backend(url, Access(backend=choice, storage_options=options)) == backend


def test_without_obstore_auto_means_fsspec(monkeypatch: pytest.MonkeyPatch) -> None:
    places.patch(monkeypatch, "installed", lambda name: name != "obstore")
    assert chosen_backend("s3://b", Access()) == "fsspec"
    with pytest.raises(AccessError, match=r"obstore is not installed.*\.\[s3\]"):
        chosen_backend("s3://b", Access(backend="obstore"))


@pytest.mark.parametrize(
    ("url", "options", "words"),
    [
        ("s3://b", {"key": "hunter2"}, "store.backend: fsspec"),
        ("file:///x", {}, "write store.backend: fsspec"),
        ("memory://", {}, "write store.backend: fsspec"),
    ],
)
def test_what_obstore_cannot_do_names_fsspec(
    url: str, options: dict[str, object], words: str
) -> None:
    with pytest.raises(AccessError, match=words) as info:
        chosen_backend(url, Access(backend="obstore", storage_options=options))
    assert "hunter2" not in str(info.value)
    assert not info.value.retryable


def test_what_fsspec_cannot_do_names_obstore() -> None:
    access = Access(storage_class="NEARLINE")
    check("gs://b", access, "obstore")
    with pytest.raises(AccessError, match=r"store\.storage_class: gcsfs.*store\.backend: obstore"):
        check("gs://b", access, "fsspec")


def credentials(kind: Any, **fields: str) -> Access:
    return Access(credentials=Credentials(kind=kind, **fields), account=None)


@pytest.mark.parametrize(
    ("url", "access"),
    [
        ("s3://b", credentials("auto")),
        ("s3://b", credentials("anonymous")),
        ("s3://b", credentials("static", access_key="a", secret_key="s")),
        ("s3://b", credentials("static", access_key="a", secret_key="s", session_token="t")),
        ("s3://b", credentials("profile", profile="team")),
        ("s3://b", credentials("role", role_arn=ROLE)),
        ("s3://b", credentials("role", role_arn=ROLE, profile="base", external_id="x")),
        ("s3://b", credentials("role", role_arn=ROLE, web_identity_token_file="/t")),
        ("gs://b", credentials("static", key_file="/k")),
        ("gs://b", credentials("static", token="t")),
        ("abfs://c@a.dfs.core.windows.net", credentials("static", account_key="k")),
        ("abfs://c@a.dfs.core.windows.net", credentials("static", sas_token="k")),
        (
            "abfs://c@a.dfs.core.windows.net",
            credentials("static", tenant_id="t", client_id="c", client_secret="s"),
        ),
        ("abfs://c@a.dfs.core.windows.net", credentials("role")),
        ("abfs://c@a.dfs.core.windows.net", credentials("role", client_id="c")),
        (
            "abfs://c@a.dfs.core.windows.net",
            credentials("role", tenant_id="t", client_id="c", web_identity_token_file="/t"),
        ),
        ("file:///x", Access(folder=Folder(direct=False, fsync=True))),
        (
            "s3://b",
            Access(
                encryption=Encryption(algorithm="aws:kms", kms_key="key"),
                storage_class="STANDARD_IA",
            ),
        ),
    ],
)
def test_valid_settings_pass(url: str, access: Access) -> None:
    for backend in ("obstore", "fsspec"):
        check(url, access, backend)


@pytest.mark.parametrize(
    ("url", "access", "words"),
    [
        ("s3://b", credentials("static", access_key="a"), "needs access_key and secret_key"),
        ("s3://b", credentials("auto", access_key="hunter2"), "access_key: kind=auto"),
        ("s3://b", credentials("anonymous", profile="p"), "takes no further field"),
        ("s3://b", credentials("profile"), "needs profile"),
        ("s3://b", credentials("role", profile="p"), "needs role_arn"),
        ("s3://b", credentials("static", account_key="hunter2"), "account_key"),
        ("gs://b", credentials("role"), "auto, static or anonymous"),
        ("gs://b", credentials("static", key_file="/k", token="hunter2"), "either key_file or"),
        ("az://b", credentials("profile"), "auto, static, role or anonymous"),
        ("abfs://c@a.x", credentials("static", client_id="c"), "client_secret"),
        ("abfs://c@a.x", credentials("role", tenant_id="c"), "workload identity"),
        ("az://c", Access(), r"store\.account: Azure needs"),
        ("s3://b", Access(account="a"), r"store\.account: only Azure"),
        ("gs://b", Access(region="r"), r"store\.region"),
        ("gs://b", Access(addressing="path"), r"store\.addressing"),
        ("gs://b", Access(encryption=Encryption(algorithm="AES256")), r"store\.encryption"),
        ("s3://b", Access(encryption=Encryption(algorithm="AES256", kms_key="k")), "kms_key"),
        ("s3://b", Access(encryption=Encryption(kms_key="k")), "kms_key"),
        ("s3://b", Access(storage_class="DEEP_ARCHIVE"), "restored for hours"),
        ("abfs://c@a.x", Access(storage_class="Archive"), "restored for hours"),
        ("abfs://c@a.x", Access(storage_class="COOL"), "Hot, Cool, Cold"),
        ("s3://b", Access(tls=Tls(ca_file=Path(__file__), verify=False)), r"store\.tls"),
        ("file:///x", Access(endpoint="http://h"), r"store\.endpoint.*leave it out for a folder"),
        ("file:///x", Access(read_timeout=1.0), r"store\.read_timeout"),
        ("memory://", Access(proxy="http://me:hunter2@h"), r"store\.proxy.*storage_options"),
        ("memory://", credentials("anonymous"), r"store\.credentials"),
    ],
)
def test_invalid_settings_are_refused(url: str, access: Access, words: str) -> None:
    with pytest.raises(AccessError, match=words) as info:
        check(url, access, "obstore")
    assert "hunter2" not in str(info.value)


def test_a_profile_needs_the_package_that_reads_it(monkeypatch: pytest.MonkeyPatch) -> None:
    places.patch(monkeypatch, "installed", lambda name: name != "botocore")
    with pytest.raises(AccessError, match=r"botocore.*\.\[s3\]"):
        check("s3://b", credentials("profile", profile="p"), "obstore")


def test_secrets_are_not_in_a_repr() -> None:
    shown = repr(
        Access(
            credentials=Credentials(
                kind="static", access_key="AKIA", secret_key="hunter2", session_token="token-value"
            )
        )
    )
    assert not any(word in shown for word in ("AKIA", "hunter2", "token-value"))


@pytest.mark.parametrize(
    ("access", "bucket", "virtual"),
    [
        (Access(), "b", True),
        (Access(), "a.b", False),
        (Access(endpoint="http://h"), "b", False),
        (Access(endpoint="http://h", addressing="virtual"), "b", True),
        (Access(addressing="path"), "b", False),
    ],
)
def test_how_a_bucket_is_named(access: Access, bucket: str, virtual: bool) -> None:
    assert access.virtual_hosted(bucket) is virtual


def test_an_azure_url_may_name_its_account() -> None:
    assert azure_account("abfs://c@team.dfs.core.windows.net/p") == "team"
    assert azure_account("az://c/p") is None

"""docs/how-to/object-stores.md: every example is a configuration that the sidecar takes."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from sidecar.config.model import loads
from sidecar.service.store_stack import open_store
from tests import places
from tiers import errors
from tiers.errors import TierError
from tiers.store.errors import CONDITIONS

PAGE = places.page("object-stores.md")
EXAMPLES = re.findall(r"```yaml\n(store:\n.*?)```", PAGE.read_text(), re.DOTALL)
SECRETS = {
    "KVLAKE_S3_KEY": "key", "KVLAKE_S3_SECRET": "secret",
    "AZURE_STORAGE_KEY": "a2V5", "EXTERNAL_ID": "outside",
}  # fmt: skip


def test_every_kind_of_store_has_an_example() -> None:
    urls = [re.search(r"url: (\w+)://", text) for text in EXAMPLES]
    assert {url[1] for url in urls if url} == {"s3", "gs", "az", "abfs", "file"}
    assert PAGE.read_text().count("```yaml") == len(EXAMPLES)


@pytest.mark.parametrize("backend", ["auto", "fsspec"])
@pytest.mark.parametrize("text", EXAMPLES, ids=range(len(EXAMPLES)))
async def test_an_example_opens(
    text: str, backend: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # gcsfs looks for credentials when it is made.
    key_file = _file_for("/etc/kvlake/gcs.json", tmp_path)
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(key_file))
    if backend == "fsspec" and "gs://" in text and "storage_class" in text:
        # The page says that this one needs obstore.
        backend = "obstore"
    # Files that exist on the reader's machine.
    for name in ("/etc/kvlake/gcs.json", "/etc/ssl/certs/ca-certificates.crt"):
        text = text.replace(name, str(_file_for(name, tmp_path)))
    config = loads(f"{text}  backend: {backend}\n", environment=SECRETS)
    assert config.store is not None
    await open_store(config.store).close()


def test_every_cause_of_a_failure_is_in_the_table() -> None:
    causes = set(CONDITIONS)
    kinds = [one for one in vars(errors).values() if isinstance(one, type)]
    causes |= {one.cause for one in kinds if issubclass(one, TierError)}
    [table] = re.findall(r"^\| cause .*?\n(?=\n)", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    first = [line.split("|")[1] for line in table.splitlines()]
    told = re.findall(r"`(\w+)`", " ".join(first[2:]))
    assert sorted(told) == sorted(causes)


def _file_for(name: str, folder: Path) -> Path:
    import json

    import trustme
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric import rsa

    path = folder / Path(name).name
    if path.suffix == ".crt":
        trustme.CA().cert_pem.write_to_path(path)
        return path
    key = rsa.generate_private_key(public_exponent=65537, key_size=2048).private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )
    account = {
        "type": "service_account", "project_id": "p", "private_key_id": "k",
        "private_key": key.decode(), "client_email": "kv@p.iam.gserviceaccount.com",
        "client_id": "1", "token_uri": "https://oauth2.example/token",
    }  # fmt: skip
    path.write_text(json.dumps(account))
    return path

"""S3 credentials by profile, role, environment and instance, the same for every client.

Owns finding, assuming and renewing credentials, and the forms in which clients take them. botocore
knows every way that AWS documents; obstore alone knows fewer, and its own botocore providers
neither read a file again nor reach STS through the store's proxy.

Invariants: credentials are looked up when a request first needs them, and a role's again shortly
before they end; those that somebody else renews in a file are read again within `REREAD_SECONDS`;
STS is reached with the same proxy and authorities as the store.
"""

import contextlib
import datetime as dt
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import anyio.to_thread

from tiers.store.access import Access

Credential = dict[str, Any]
"""As obstore takes it: access_key_id, secret_access_key, token, expires_at (None: never)."""
Provider = Callable[[], Credential]
"""Blocks while it asks STS or another service."""
SESSION_NAME: Final = "kvlake"
REGION_DEFAULT: Final = "us-east-1"
REREAD_SECONDS: Final = 60
"""How soon credentials of a file are read again: botocore itself reads them once."""
OBSTORE_AHEAD_SECONDS: Final = 300
"""How long before their end obstore asks for new ones."""


def credential_provider(access: Access) -> Provider | None:
    """Credentials for `access`; None for anonymous requests."""
    credentials = access.credentials
    match credentials.kind:
        case "anonymous":
            return None
        case "static":
            # A callback, because obstore mixes keys of its configuration with a session token that
            # it finds in the environment.
            keys = {
                "access_key_id": credentials.access_key,
                "secret_access_key": credentials.secret_key,
                "token": credentials.session_token,
                "expires_at": None,
            }
            return lambda: keys
        case _:
            return AwsCredentials(access)


class AwsCredentials:
    """What botocore finds, or a role that it assumes. Any thread may ask."""

    def __init__(self, access: Access) -> None:
        self._access = access
        self._looking = threading.Lock()
        self._source: Any = None
        self._found: Credential | None = None
        self._other = ""
        """Another way that the last look found, in place of the one of `_source`."""
        self._reread_at = dt.datetime.now(dt.UTC)

    def __call__(self) -> Credential:
        """Credentials that are good now. Raises botocore's errors."""
        found = self._found
        if found is None:
            self._looking.acquire()
        # While another thread asks, what it found before may be good still.
        elif dt.datetime.now(dt.UTC) < self._reread_at or not self._looking.acquire(blocking=False):
            return found
        try:
            if self._found is None or dt.datetime.now(dt.UTC) >= self._reread_at:
                keys = self._look_up()
                self._reread_at = dt.datetime.now(dt.UTC) + dt.timedelta(seconds=REREAD_SECONDS)
                ends = self._reread_at + dt.timedelta(seconds=OBSTORE_AHEAD_SECONDS)
                self._found = {
                    "access_key_id": keys.access_key,
                    "secret_access_key": keys.secret_key,
                    "token": keys.token,
                    "expires_at": ends,
                }
            return self._found
        finally:
            self._looking.release()

    def _look_up(self) -> Any:
        from botocore.credentials import DeferredRefreshableCredentials, RefreshableCredentials
        from botocore.exceptions import NoCredentialsError

        if self._access.credentials.kind == "role":
            if self._source is None:
                # botocore renews it from a quarter of an hour before its end.
                self._source = DeferredRefreshableCredentials(self._assume, "assume-role")
        elif not isinstance(self._source, RefreshableCredentials):
            found = None
            try:
                found = _session(self._access).get_credentials()
            except Exception:
                # A file that is being written may be empty, or half of one. What was found before
                # may be good still; if not, the store says so.
                if self._source is None:
                    raise
            self._source = self._confirmed(found)
            if self._source is None:
                raise NoCredentialsError
        try:
            return self._source.get_frozen_credentials()
        except Exception:
            if self._access.credentials.kind != "role":
                # The keys that a profile assumes a role with may have been renewed in their file.
                self._source = None
            raise

    def _confirmed(self, found: Any) -> Any:
        """What was found now, or before: while a file is replaced, another way may seem to be left.

        An instance's role, for example, is renewed for ever, and no file is read again.
        """
        before, other = self._source, self._other
        self._other = ""
        if found is None or before is None or found.method in (before.method, other):
            return found or before
        self._other = found.method
        return before

    def _assume(self) -> dict[str, Any]:
        from botocore import UNSIGNED
        from botocore.config import Config

        access, role = self._access, self._access.credentials
        config: dict[str, Any] = {}
        verb = "assume_role"
        name = role.role_session_name or SESSION_NAME
        asked = {"RoleArn": role.role_arn, "RoleSessionName": name}
        if role.external_id is not None:
            asked["ExternalId"] = role.external_id
        if role.web_identity_token_file is not None:
            verb = "assume_role_with_web_identity"
            asked["WebIdentityToken"] = Path(role.web_identity_token_file).read_text()
            config["signature_version"] = UNSIGNED
        sts = _session(access).create_client(
            "sts", region_name=region_of(access), config=Config(**config)
        )
        keys = getattr(sts, verb)(**asked)["Credentials"]
        return {
            "access_key": keys["AccessKeyId"],
            "secret_key": keys["SecretAccessKey"],
            "token": keys["SessionToken"],
            "expiry_time": keys["Expiration"].isoformat(),
        }


def _session(access: Access) -> Any:
    from botocore.config import Config
    from botocore.session import Session

    session: Any = Session(profile=access.credentials.profile)
    # Also for the clients that botocore makes itself, to assume the role of a profile.
    session.set_default_client_config(Config(**client_config(access)))
    if (authorities := verify(access)) is not None:
        session.set_config_variable("ca_bundle", authorities)
    if access.region is not None:
        session.set_config_variable("region", access.region)
    return session


def aio_session(access: Access) -> Any:
    """An aiobotocore session, for s3fs, with the credentials of `access`."""
    from aiobotocore.credentials import AioDeferredRefreshableCredentials
    from aiobotocore.session import AioSession

    provider = AwsCredentials(access)

    async def fetch() -> dict[str, Any]:
        found = await anyio.to_thread.run_sync(provider, abandon_on_cancel=True)
        return {
            "access_key": found["access_key_id"],
            "secret_key": found["secret_access_key"],
            "token": found["token"],
            "expiry_time": found["expires_at"].isoformat(),
        }

    credentials = AioDeferredRefreshableCredentials(fetch, "kvlake")

    async def get_credentials() -> Any:
        return credentials

    session: Any = AioSession(profile=access.credentials.profile)
    session.get_credentials = get_credentials
    return session


def verify(access: Access) -> bool | str | None:
    """What botocore calls `verify`: a file of authorities, False, or None for its own default."""
    if not access.tls.verify:
        return False
    return None if access.tls.ca_file is None else str(access.tls.ca_file)


def client_config(access: Access) -> dict[str, Any]:
    """Timeouts and proxy as botocore's `Config` takes them, for the store and for STS alike."""
    config: dict[str, Any] = {
        "connect_timeout": access.connect_timeout,
        "read_timeout": access.read_timeout,
    }
    if access.proxy is not None:
        config["proxies"] = {"http": access.proxy, "https": access.proxy}
    return config


def region_of(access: Access) -> str:
    """The settings' region, else the environment's, else the profile's, else AWS's first."""
    found = access.region or os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION")
    # No profile without botocore; a missing profile is reported with the credentials.
    with contextlib.suppress(ImportError):
        from botocore.exceptions import BotoCoreError

        with contextlib.suppress(BotoCoreError):
            found = found or _session(access).get_config_variable("region")
    return found or REGION_DEFAULT

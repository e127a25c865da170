"""S3 credentials by profile, role, environment and instance, the same for both clients.

Owns the aiobotocore session that finds, assumes and renews credentials, and the callback that
hands them to obstore. botocore knows every way that AWS documents (profiles with sources, single
sign-on, web identity, containers, instances); obstore alone knows fewer and reads no profile.

Does not own static and anonymous credentials: the clients take those as they are.

Invariants: a role's credentials are asked for when a request first needs them and again shortly
before they end; those that somebody else renews in a file are read again within `REREAD_SECONDS`;
STS is reached with the same proxy and authorities as the store.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import inspect
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

import anyio

from tiers.store.sigv4 import Keys

if TYPE_CHECKING:
    from tiers.store.access import Access

Provider = Callable[[], Any]
"""Returns credentials as obstore takes them, or an awaitable of them."""
SESSION_NAME: Final = "kvlake"
REGION_DEFAULT: Final = "us-east-1"
REREAD_SECONDS: Final = 60
"""How soon credentials of a file are read again: botocore itself reads them once."""
REFRESH_SECONDS: Final = 300 + REREAD_SECONDS
"""What obstore is told that credentials are good for: it asks again 300 seconds before."""


def session_for(access: Access) -> Any:
    """An aiobotocore session whose `get_credentials` follows `access.credentials`."""
    from aiobotocore.session import AioSession  # here: only S3 needs it

    credentials = access.credentials

    def make() -> Any:
        made: Any = AioSession(profile=credentials.profile)
        if access.region is not None:
            made.set_config_variable("region", access.region)
        return made

    base = make()
    base.get_credentials = _Rereading(make)
    if credentials.kind != "role":
        return base

    session = make()
    # What the session itself would look up is not the role: its lookup is replaced.
    session.get_credentials = _Assuming(base, access)
    return session


class _Rereading:
    """What a session finds; what has no end of its own is looked for again from time to time.

    Temporary keys in a file are renewed by whoever wrote them, and no session looks twice.
    """

    def __init__(self, make: Callable[[], Any]) -> None:
        self._make = make
        self._credentials: Any = None
        self._last: Any = None

    async def __call__(self) -> Any:
        from aiobotocore.credentials import AioRefreshableCredentials
        from botocore.credentials import RefreshableCredentials

        if self._credentials is None:
            found = await self._make().get_credentials()
            if found is not None and not isinstance(found, RefreshableCredentials):
                self._last = await found.get_frozen_credentials()
                found = AioRefreshableCredentials.create_from_metadata(
                    _for_a_while(self._last),
                    refresh_using=self._again,
                    method=found.method,
                    advisory_timeout=0,
                    mandatory_timeout=0,
                )
            self._credentials = found
        return self._credentials

    async def _again(self) -> dict[str, Any]:
        # While a file is being written it may be empty, or half of one: those before it may be
        # good still, and if not, the store says so.
        with contextlib.suppress(Exception):
            found = await self._make().get_credentials()
            if found is not None:
                self._last = await found.get_frozen_credentials()
        return _for_a_while(self._last)


def _for_a_while(keys: Any) -> dict[str, Any]:
    until = dt.datetime.now(dt.UTC) + dt.timedelta(seconds=REREAD_SECONDS)
    return {
        "access_key": keys.access_key,
        "secret_key": keys.secret_key,
        "token": keys.token,
        "expiry_time": until.isoformat(),
    }


class _Assuming:
    """Assumes the role when it is first needed; botocore renews it from then on."""

    def __init__(self, base: Any, access: Access) -> None:
        self._base = base
        self._access = access
        self._credentials: Any = None

    async def __call__(self) -> Any:
        if self._credentials is None:
            self._credentials = await _assumed(self._base, self._access)
        return self._credentials


async def _assumed(base: Any, access: Access) -> Any:
    from aiobotocore.credentials import (
        AioAssumeRoleCredentialFetcher,
        AioAssumeRoleWithWebIdentityCredentialFetcher,
        AioDeferredRefreshableCredentials,
    )
    from botocore.exceptions import NoCredentialsError
    from botocore.utils import FileWebIdentityTokenLoader

    credentials = access.credentials
    extra: dict[str, str] = {"RoleSessionName": credentials.role_session_name or SESSION_NAME}
    if credentials.external_id is not None:
        extra["ExternalId"] = credentials.external_id
    fetcher: Any
    if credentials.web_identity_token_file is not None:
        fetcher = AioAssumeRoleWithWebIdentityCredentialFetcher(
            client_creator=_sts_creator(base, access),
            web_identity_token_loader=FileWebIdentityTokenLoader(
                credentials.web_identity_token_file
            ),
            role_arn=credentials.role_arn,
            extra_args=extra,
        )
        method = "assume-role-with-web-identity"
    else:
        source = await base.get_credentials()
        if source is None:
            raise NoCredentialsError
        fetcher = AioAssumeRoleCredentialFetcher(
            client_creator=_sts_creator(base, access),
            source_credentials=source,
            role_arn=credentials.role_arn,
            extra_args=extra,
        )
        method = "assume-role"
    return AioDeferredRefreshableCredentials(refresh_using=fetcher.fetch_credentials, method=method)


def _sts_creator(base: Any, access: Access) -> Any:
    from aiobotocore.config import AioConfig

    own = AioConfig(**client_config(access))

    def create(service: str, **options: Any) -> Any:
        given = options.pop("config", None)
        config = own if given is None else own.merge(given)
        return base.create_client(service, config=config, verify=verify(access), **options)

    return create


def verify(access: Access) -> bool | str | None:
    """What botocore calls `verify`: a file of authorities, False, or None for its own default."""
    if not access.tls.verify:
        return False
    return access.tls.ca_file


def client_config(access: Access) -> dict[str, Any]:
    """The part of botocore's `Config` that is about the way, for the store and for STS alike."""
    config: dict[str, Any] = {
        "connect_timeout": access.connect_seconds_max,
        "read_timeout": access.read_seconds_max,
    }
    if access.proxy is not None:
        config["proxies"] = {"http": access.proxy, "https": access.proxy}
    return config


class SessionCredentials:
    """obstore's `credential_provider`: asks an aiobotocore session."""

    def __init__(self, access: Access) -> None:
        self._session = session_for(access)

    async def __call__(self) -> Any:
        """Credentials as obstore takes them. Raises botocore's `NoCredentialsError`."""
        from botocore.exceptions import NoCredentialsError

        found = await self._session.get_credentials()
        if found is None:
            raise NoCredentialsError
        frozen = await found.get_frozen_credentials()
        # botocore renews what ends; obstore only has to come back for it.
        until = dt.datetime.now(dt.UTC) + dt.timedelta(seconds=REFRESH_SECONDS)
        return {
            "access_key_id": frozen.access_key,
            "secret_access_key": frozen.secret_key,
            "token": frozen.token,
            "expires_at": until,
        }


def static_credentials(access: Access) -> Provider:
    """Obstore's `credential_provider` for keys that were given.

    As a callback, because obstore mixes keys of its configuration with a session token that it
    finds in the environment.
    """
    credentials = access.credentials

    def provide() -> Any:
        return {
            "access_key_id": credentials.access_key,
            "secret_access_key": credentials.secret_key,
            "token": credentials.session_token,
            "expires_at": None,
        }

    return provide


def credential_provider(access: Access) -> Provider | None:
    """What obstore calls `credential_provider`, for `access`; None for anonymous requests."""
    match access.credentials.kind:
        case "anonymous":
            return None
        case "static":
            return static_credentials(access)
        case _:
            return SessionCredentials(access)


class SigningKeys:
    """The keys of a provider, for requests that are signed here."""

    def __init__(self, provider: Provider) -> None:
        self._provider = provider
        self._lock = anyio.Lock()
        self._keys: Keys | None = None
        self._until: dt.datetime | None = None

    async def __call__(self) -> Keys:
        """Keys that are good now. Raises what the provider raises."""
        # Every read comes here, and hardly one has to wait.
        if self._keys is not None and not self._ended():
            return self._keys
        async with self._lock:
            if self._keys is None or self._ended():
                found = self._provider()
                if inspect.isawaitable(found):
                    found = await found
                self._keys = Keys(
                    found["access_key_id"], found["secret_access_key"], found["token"]
                )
                self._until = found["expires_at"]
                if self._until is not None:
                    soon = dt.datetime.now(dt.UTC) + dt.timedelta(seconds=REREAD_SECONDS)
                    self._until = min(self._until, soon)
            return self._keys

    def _ended(self) -> bool:
        return self._until is not None and dt.datetime.now(dt.UTC) >= self._until


def region_of(access: Access) -> str:
    """The settings' region, else the environment's, else the profile's, else AWS's first."""
    return (
        access.region
        or os.environ.get("AWS_REGION")
        or os.environ.get("AWS_DEFAULT_REGION")
        or _region_of_profile(access.credentials.profile)
        or REGION_DEFAULT
    )


def _region_of_profile(profile: str | None) -> str | None:
    # No profile without botocore, and one that is not there is told with the credentials.
    with contextlib.suppress(ImportError):
        from botocore.exceptions import BotoCoreError
        from botocore.session import Session

        with contextlib.suppress(BotoCoreError):
            found: Any = Session(profile=profile).get_config_variable("region")
            return str(found) if found else None
    return None

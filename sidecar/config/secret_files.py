"""Files that hold one secret: refused if another user could have read it, created for one user.

Invariants: no message has any of the content; a secret that was read is masked in all output from
then on; an existing file is never replaced.
"""

import errno
import os
import stat
from pathlib import Path
from typing import Final

from sidecar.errors import StartError
from tiers.redaction import conceal

SECRET_BYTES_MAX: Final = 4096


def read_secret(path: Path, setting: str) -> str:
    """The secret in a file, without surrounding white space. `setting` names it in errors.

    Raises `StartError`: it is missing, empty or too large, or others can read or write it.
    """
    place = f"{setting}={path}"
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise StartError(
            f"{place}: cannot be read: {error.strerror}; {_remedy(error, path)}"
        ) from error
    try:
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode):
            raise StartError(f"{place}: is not a file")
        # A secret that an orchestrator mounts belongs to root, and is read by its group.
        mounted = found.st_uid == 0 and os.geteuid() != 0
        if stat.S_IMODE(found.st_mode) & (0o027 if mounted else 0o077):
            raise StartError(
                f"{place}: with mode {stat.S_IMODE(found.st_mode):04o} other users can read or "
                f"change it; consider the secret compromised: replace it, then chmod 600 {path}"
            )
        data = os.read(fd, SECRET_BYTES_MAX + 1)
    finally:
        os.close(fd)
    if len(data) > SECRET_BYTES_MAX:
        raise StartError(f"{place}: has more than {SECRET_BYTES_MAX} bytes; is it that file?")
    try:
        text = data.decode("ascii").strip()
    except UnicodeDecodeError:
        raise StartError(f"{place}: is not plain text; is it that file?") from None
    if not text:
        raise StartError(f"{place}: is empty")
    conceal([text])
    return text


def _remedy(error: OSError, path: Path) -> str:
    """What to do about a file that cannot be opened."""
    if error.errno == errno.ENOENT:
        return f"correct the path, or create the file: kvlake keygen --out {path}"
    if error.errno in (errno.EACCES, errno.EPERM):
        uid = os.geteuid()
        return (
            f"run this as the owner of the file, or give it to this user: chown {uid} {path}; "
            f"chmod 600 {path}; user {uid} must also be allowed to enter its folders"
        )
    return "correct the path"


def write_secret(path: Path, text: str) -> None:
    """Create a file that only its owner can read. Raises `StartError` if it exists."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
    try:
        fd = os.open(path, flags, 0o600)
    except FileExistsError as error:
        raise StartError(
            f"{path} exists, and is not replaced: what uses it would stop working; choose another "
            "place, or remove it first"
        ) from error
    except OSError as error:
        raise StartError(
            f"{path} cannot be written: {error.strerror}; make its folder first, or choose another "
            "place"
        ) from error
    with os.fdopen(fd, "w", encoding="ascii") as file:
        # Not left to the umask, which may forbid its owner too.
        os.fchmod(fd, 0o600)
        file.write(f"{text}\n")

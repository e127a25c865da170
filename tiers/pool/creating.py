"""Whether a file or a directory could be made, without making it.

Owns the trial. Does not own what is made later, nor how the error is worded for an operator.

Invariant: no name appears that was not there, except for a moment on file systems without unnamed
files, and then none that anybody looks for.
"""

from __future__ import annotations

import errno
import os
import tempfile
from pathlib import Path
from typing import Final

_NO_UNNAMED_FILES: Final = (errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL)


def missing(path: Path) -> list[Path]:
    """What has to be made for `path` to be there, outermost first."""
    found: list[Path] = []
    while not os.path.lexists(path):
        found.insert(0, path)
        path = path.parent
    return found


def require_creatable(path: Path, *, directory: bool = False) -> None:
    """Raise the `OSError` with which a file, or a directory, could not be made. Makes none."""
    try:
        _try(path.parent, directory=directory)
    except OSError as error:
        code = error.errno or errno.EIO
        raise OSError(code, os.strerror(code), str(path)) from error


def _try(parent: Path, *, directory: bool) -> None:
    try:
        # A file without a name: nobody sees it, and closing it removes it.
        os.close(os.open(parent, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600))
    except OSError as error:
        if error.errno not in _NO_UNNAMED_FILES:
            raise
        _try_with_a_name(parent, directory=directory)


def _try_with_a_name(parent: Path, *, directory: bool) -> None:
    if directory:
        Path(tempfile.mkdtemp(prefix=".kvlake-", dir=parent)).rmdir()
    else:
        fd, name = tempfile.mkstemp(prefix=".kvlake-", dir=parent)
        os.close(fd)
        Path(name).unlink()

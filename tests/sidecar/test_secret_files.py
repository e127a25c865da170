"""Files with one secret: what an operator is told where one cannot be read."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from sidecar.config.secret_files import read_secret
from sidecar.errors import StartError


@pytest.mark.parametrize(
    ("code", "said", "unsaid"),
    [
        (errno.ENOENT, "create the file: kvlake keygen --out ", "chown"),
        (errno.EACCES, f"chown {os.geteuid()} ", "keygen"),
        (errno.ENAMETOOLONG, "correct the path", "keygen"),
    ],
)
def test_the_remedy_for_a_token_file_fits_the_error(
    monkeypatch: pytest.MonkeyPatch, code: int, said: str, unsaid: str
) -> None:
    def refused(path: Path, *_: object) -> int:
        raise OSError(code, os.strerror(code), str(path))

    # A double, because root may read any file.
    with monkeypatch.context() as patch:
        patch.setattr(os, "open", refused)
        with pytest.raises(StartError) as caught:
            read_secret(Path("/etc/kvlake/token"), "http.token_file")
    text = str(caught.value)
    assert text.startswith(
        f"http.token_file=/etc/kvlake/token: cannot be read: {os.strerror(code)}"
    )
    assert said in text
    assert unsaid not in text

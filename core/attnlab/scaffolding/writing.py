"""New files that come all or none, and take no other file's place. Needs only the standard library."""

from __future__ import annotations

import errno
import os
import secrets
import shutil
from collections.abc import Mapping
from pathlib import Path

from attnlab._files import write_text_atomic
from attnlab.errors import InvalidInput


def write_files(new: Mapping[Path, str], changed: Mapping[Path, tuple[bytes, str]]) -> None:
    """Make the files `new`, then replace those of `changed`, given as what they held and what they shall hold.

    A failure takes back what was made. Raises `FileExistsError`, `InvalidInput` where a file no longer holds what
    it held, and `OSError`. At most one file is changed, last, so that nothing is left half done.
    """
    assert len(changed) <= 1, "a second replacement could fail after the first"
    made: list[Path] = []
    try:
        for path, text in new.items():
            _create(path, text)
            made.append(path)
        for path, (before, text) in changed.items():
            if path.read_bytes() != before:
                raise InvalidInput(f"new: {path} was changed at this moment; run the command again")
            write_text_atomic(path, text)
    except BaseException:
        # Whatever ends it, an interrupt too: what was made goes, and the error passes on.
        for path in made:
            path.unlink(missing_ok=True)
        raise


def write_folder(folder: Path, files: Mapping[str, str]) -> None:
    """Make `folder` with `files` by relative path: under another name first, so that it is whole or not there.

    Raises `FileExistsError` and `OSError`.
    """
    require_free(folder)
    scratch = _scratch(folder)
    scratch.mkdir()
    try:
        for name, text in files.items():
            write_text_atomic(scratch / name, text)
        require_free(folder)  # POSIX would replace an empty folder
        os.rename(scratch, folder)
    except BaseException:
        # As above: the half-made folder goes, and the error passes on.
        shutil.rmtree(scratch, ignore_errors=True)
        raise


def _create(path: Path, text: str) -> None:
    """A new file at `path`, whole at once."""
    require_free(path)
    scratch = _scratch(path)
    write_text_atomic(scratch, text)
    try:
        try:
            os.link(scratch, path)  # which, unlike a rename, never takes another file's place
        except FileExistsError:
            raise
        except OSError:  # a file system without links
            require_free(path)
            os.replace(scratch, path)
    finally:
        scratch.unlink(missing_ok=True)


def _scratch(path: Path) -> Path:
    return path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}.new")


def require_free(path: Path) -> None:
    """`FileExistsError` where there is anything at `path`, a link that leads nowhere included."""
    if os.path.lexists(path):
        raise FileExistsError(errno.EEXIST, "it exists already", str(path))

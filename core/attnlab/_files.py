"""Files that are whole or absent: atomic writes, durable appends, bounded reads and the user's own folder.

Needs only the standard library; anything in attnlab may import it.
"""

from __future__ import annotations

import errno
import os
import secrets
import stat
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

LOCK_PATIENCE = 30.0  # seconds that a lock of another process is waited for


def write_text_atomic(path: str | os.PathLike[str], text: str) -> None:
    """Replace the file at `path` by `text` (UTF-8): readers see the old or the new, whole.

    Line ends stay as given. Missing parent folders are made. A symbolic link keeps pointing at the file,
    which is replaced. What fails half way leaves the old file and no other. Raises `OSError`.
    """
    target = Path(os.path.realpath(path))
    target.parent.mkdir(parents=True, exist_ok=True)
    scratch = target.with_name(f".{target.name}.{os.getpid()}.{secrets.token_hex(4)}.tmp")
    try:
        # "x" through open() honours the umask, which tempfile's 0600 would not.
        with open(scratch, "x", encoding="utf-8", newline="") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        with suppress(OSError):
            os.chmod(scratch, target.stat().st_mode & 0o777)
        os.replace(scratch, target)
    except BaseException:
        # Whatever ends it, an interrupt too: the scratch file goes, and the error passes on.
        scratch.unlink(missing_ok=True)
        raise
    _sync_folder(target.parent)


def append_line_durable(path: str | os.PathLike[str], line: str) -> None:
    """Add `line` and a newline to the file at `path`, on disk when this returns.

    A last line that a killed process left without its newline is ended first, so a torn record can
    spoil only itself. Missing parent folders are made. `line` must hold no line break (`ValueError`).
    """
    if "\n" in line or "\r" in line:
        raise ValueError(f"append_line_durable: a line must hold no line break, got {line[:60]!r}")
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    with open(target, "ab+", buffering=0) as file:
        size = file.seek(0, os.SEEK_END)
        torn = False
        if size:
            file.seek(size - 1)
            torn = file.read(1) != b"\n"
        data = memoryview((b"\n" if torn else b"") + line.encode("utf-8") + b"\n")
        while data:
            data = data[file.write(data) :]
        os.fsync(file.fileno())


@contextmanager
def locked(path: str | os.PathLike[str], patience: float = LOCK_PATIENCE) -> Iterator[None]:
    """While the body runs, no other process or thread is in a `locked` of the same path. Missing folders are made.

    The lock is the system's, on a file `PATH.lock` that stays: it ends with the process, however that ends. Where the file
    system has no such locks, a file that only one can make is the lock. Raises `TimeoutError`, an `OSError`, after `patience`.
    """
    target = Path(f"{os.fspath(path)}.lock")
    target.parent.mkdir(parents=True, exist_ok=True)
    until = time.monotonic() + patience
    with open(target, "ab", opener=_without_waiting) as file:  # a pipe would be waited for
        while (got := _try_lock(file)) is False:
            _wait(until, target)
        exclusive = target.with_name(f"{target.name}.exclusive")
        if got is None:
            while not _made(exclusive):
                _wait(until, exclusive)
        try:
            yield
        finally:
            if got is None:
                exclusive.unlink(missing_ok=True)
            # Closing the file ends the system's lock.


def _try_lock(file: IO[bytes]) -> bool | None:
    """Whether this process has the lock on an open file now; None where the system or the file system has no locks."""
    try:
        if sys.platform == "win32":
            import msvcrt

            file.seek(0)
            msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK, 1)
        else:
            import fcntl

            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except ImportError:
        return None
    except OSError as error:
        taken = (errno.EAGAIN, errno.EACCES, errno.EDEADLK)
        return False if error.errno in taken else None
    return True


def _made(path: Path) -> bool:
    try:
        os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY))
    except FileExistsError:
        return False
    return True


def _wait(until: float, lock: Path) -> None:
    if time.monotonic() > until:
        raise TimeoutError(
            errno.ETIMEDOUT, f"another process holds the lock {lock}; end it, or remove the file if there is none", lock
        )
    time.sleep(0.02)


def read_regular(path: str | os.PathLike[str], limit: int) -> bytes:
    """The bytes of the regular file at `path`, `limit` at most.

    Raises `OSError`, whose `strerror` says what is wrong: a folder, a pipe or a device (which might never end) in
    the place of a file, a link that leads nowhere, more than `limit` bytes, or what the system says.
    """
    try:
        mode = os.stat(path).st_mode
    except FileNotFoundError:
        if not os.path.islink(path):
            raise FileNotFoundError(errno.ENOENT, "there is no such file", path) from None
        why = f"it is a link to {os.readlink(path)}, which does not exist"
        raise FileNotFoundError(errno.ENOENT, why, path) from None
    except ValueError as error:  # a NUL in the path, or text that the system's encoding lacks
        raise OSError(errno.EINVAL, f"no file can have this path: {error}", path) from None
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, "expected a file, got a folder", path)
    # Opening a pipe would wait for ever, and a device may never end.
    if not stat.S_ISREG(mode):
        raise OSError(errno.EINVAL, "expected a regular file, got a pipe, socket or device", path)
    with open(path, "rb", opener=_without_waiting) as file:
        data: bytes | None = file.read(limit + 1)
    if data is None:
        raise OSError(errno.EINVAL, "expected a regular file, got one that makes its reader wait", path)
    if len(data) > limit:
        raise OSError(errno.EFBIG, f"it is larger than {limit / 2**20:g} MiB, the most that is read", path)
    return data


def config_dir(environ: Mapping[str, str] | None = None) -> Path | None:
    """The folder of the user's `registry.yaml` and `trust.json`, made by nobody until something is written.

    `$ATTNLAB_HOME` wins; else `$XDG_CONFIG_HOME/attnlab` or `~/.config/attnlab`,
    `~/Library/Application Support/attnlab` on macOS, `%APPDATA%\\attnlab` on Windows. None where the
    user has no home folder.
    """
    env = os.environ if environ is None else environ
    if env.get("ATTNLAB_HOME"):
        return Path(os.path.expanduser(env["ATTNLAB_HOME"]))
    if sys.platform == "win32" and env.get("APPDATA"):
        return Path(env["APPDATA"]) / "attnlab"
    # The XDG specification tells to ignore a relative path.
    if sys.platform not in ("win32", "darwin") and os.path.isabs(env.get("XDG_CONFIG_HOME", "")):
        return Path(env["XDG_CONFIG_HOME"]) / "attnlab"
    try:
        home = Path.home()
    except RuntimeError:
        return None
    if sys.platform == "win32":
        return home / "AppData" / "Roaming" / "attnlab"
    if sys.platform == "darwin":
        return home / "Library" / "Application Support" / "attnlab"
    return home / ".config" / "attnlab"


def _without_waiting(path: str, flags: int) -> int:
    """Open so that reading never waits, where the system has a way: some of what looks like a file would."""
    return os.open(path, flags | getattr(os, "O_NONBLOCK", 0))


def _sync_folder(folder: Path) -> None:
    """Make a rename in `folder` durable where the system can (Windows cannot open a folder)."""
    with suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)

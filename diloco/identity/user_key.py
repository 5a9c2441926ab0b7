"""The key of this user: the secret of a run on loopback whose operator gave none. It keeps a machine's other users out.

A file in the user's state folder, made by the first process of the user that needs it. Whoever joins a run, or asks a
member something, and has no secret, tries this key and then none, as a run founded with `--insecure` has none.
"""

from __future__ import annotations

import errno
import logging
import os
import re
import secrets
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Final

from diloco.base.errors import DilocoError, ResourceError, UsageError
from diloco.base.files import make_folders, sync_path
from diloco.identity.keys import VARIABLE, secret_from_environment, secret_in

logger = logging.getLogger(__name__)

_KEY: Final = re.compile(r"[0-9a-f]{64}")


def secrets_to_try(insecure: bool = False, joins: bool = True, private: bool = False) -> tuple[str, ...]:
    """Secrets that a run may have, in the order in which they are tried. A run that is founded has the first.

    The one in the environment; else this user's key, and none; with `insecure` the other way round. `private`: it is a
    run that had a secret, and that is asked at the addresses which a folder remembers. Another user of this machine may
    listen there by now: none is not tried, unless `insecure` says so.

    A joiner whose key cannot be had is warned and goes on without; for a founder, and for a run that is private, that
    raises UsageError or ResourceError. Raises UsageError, too, as `secret_from_environment`.
    """
    if secret := secret_from_environment():
        return (secret,)
    try:
        key = user_key()
    except DilocoError as error:
        if not insecure and (private or not joins):
            raise
        if not insecure:
            logger.warning("%s: trying without a key", error.cause)
        return ("",)
    if insecure:
        return ("", key)
    return (key,) if private else (key, "")


def user_key() -> str:
    """This user's key: 256 random bits, in hex. Made where there is none; processes that do so at once get the same.

    Raises ResourceError where it cannot be made, and UsageError where it cannot be read, others can, or it is no key.
    """
    fix = f"export {VARIABLE}, the same for every peer, or let all users of this machine in (--insecure)"
    try:
        path = key_path()
        if not path.exists():
            _make(path)
    except (OSError, RuntimeError) as error:  # RuntimeError: this user has no home
        raise ResourceError(f"no key that keeps other users of this machine out: {error}", fix) from error
    key = secret_in(path, f"remove it, and start all peers again; or {fix}", by_others=0o7777)
    if not _KEY.fullmatch(key):
        raise UsageError(f"{path} holds no key", f"remove it, and start all peers again; or {fix}")
    return key


def key_path() -> Path:
    """The file of this user's key. Raises RuntimeError where this user has no home."""
    state = Path(os.environ.get("XDG_STATE_HOME", ""))
    return (state if state.is_absolute() else Path.home() / ".local" / "state") / "diloco" / "key"


def _make(path: Path) -> None:
    """Make a key at `path`, whole from the first moment, unless another process was first. Raises OSError."""
    make_folders(path.parent, 0o700)
    descriptor, beside = tempfile.mkstemp(dir=path.parent)  # of mode 0600
    try:
        with open(descriptor, "w") as file:
            file.write(secrets.token_hex(32) + "\n")
            file.flush()
            os.fsync(descriptor)
        with suppress(FileExistsError):
            _link(beside, path)
        sync_path(path.parent)
    finally:
        os.unlink(beside)


def _link(beside: str, path: Path) -> None:
    """Give a file a second name that no other has. Raises OSError. Where the file system knows no second names, make a
    copy: another process may see it empty for a moment."""
    try:
        os.link(beside, path)
    except OSError as error:
        if error.errno not in (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK):
            raise
        with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(Path(beside).read_text())

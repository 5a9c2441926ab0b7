"""The private key that all peers of a run share, and its certificate: mutual TLS for every connection.

The key is made from the secret that the run's operators share (`DILOCO_SECRET`). Without the secret nobody can connect
or pose as a member. Everybody who connects gets the certificate, and can test guesses of the secret against it. So weak
secrets are refused, and for one that is not random digits each guess takes 0.3 s of a core and 128 MB.

A run without any secret (`--insecure`) has a key that everybody can make. It keeps nobody out, but who only listens
reads nothing (TLS 1.3 keys are ephemeral), and bytes that are damaged on the way are found below gRPC, whose HTTP/2
reader has no checksum and aborts on some of them.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Final

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from cryptography.hazmat.primitives.kdf.scrypt import Scrypt

from diloco.base.errors import UsageError

VARIABLE: Final = "DILOCO_SECRET"
FILE_VARIABLE: Final = "DILOCO_SECRET_FILE"
"""Names a file that holds the secret, in place of the secret itself."""
SERVER_NAME: Final = "peer.diloco"
"""Subject of the certificate, in place of a host name: peers have many addresses, and these change."""
MIN_SECRET_CHARS: Final = 16
MIN_NEW_CHARS: Final = 12
"""Characters of a secret that do not follow from those before them, at least."""
MIN_DIFFERENT_CHARS: Final = 6
MAX_SECRET_BYTES: Final = 4096

_P256_ORDER: Final = 0xFFFFFFFF00000000FFFFFFFFFFFFFFFFBCE6FAADA7179E84F3B9CAC2FC632551
_RANDOM: Final = re.compile(r"(?=.*[0-9])(?=.*[a-f])[0-9a-f]{32,}", re.IGNORECASE)
"""A secret as `openssl rand -hex` prints it, of 128 bits or more: nobody guesses it, however cheap a guess is."""
_KEYBOARD: Final = ("1234567890", "qwertyuiop", "asdfghjkl", "zxcvbnm")


@dataclass(frozen=True)
class Keys:
    """Private key and certificate of a run's peers as PEM. The certificate is also the only authority trusted."""

    private_key: bytes = field(repr=False)
    certificate: bytes


@cache
def keys_of(secret: str) -> Keys:
    """Private key and certificate made from the run's secret, the same bytes on every machine.

    HKDF-SHA256 makes a P-256 key of the secret, after scrypt where it is not random; the signature is deterministic.
    """
    derive = HKDF(hashes.SHA256(), length=48, salt=None, info=b"diloco peer key 1")
    number = int.from_bytes(derive.derive(_stretched(secret) or b"public")) % (_P256_ORDER - 1) + 1
    key = ec.derive_private_key(number, ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, SERVER_NAME)])
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(datetime(2020, 1, 1))  # fixed: the certificate must not depend on a clock
        .not_valid_after(datetime(2120, 1, 1))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(SERVER_NAME)]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256(), ecdsa_deterministic=True)
    )
    return Keys(
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()),
        certificate.public_bytes(serialization.Encoding.PEM),
    )


def secret_from_environment() -> str:
    """The run's secret, in `DILOCO_SECRET` or in the file that `DILOCO_SECRET_FILE` names; empty where neither is set.

    Raises UsageError where both are set, the file cannot be read or others can read it, or it is easily guessed.
    """
    secret, path = os.environ.get(VARIABLE, "").strip(), os.environ.get(FILE_VARIABLE, "")
    if secret and path:
        raise UsageError(f"{VARIABLE} and {FILE_VARIABLE} are both set", "unset one of them")
    where = FILE_VARIABLE if path else VARIABLE
    fix = f"name a file by {FILE_VARIABLE} that holds the secret, and that this user alone can read (chmod 600)"
    secret = secret_in(Path(path), fix) if path else secret
    if (secret or path) and (why := weakness(secret)):
        raise UsageError(f"{where} {why}", "make one with `openssl rand -hex 32`, the same for every peer of the run")
    return secret


def secret_in(path: Path, fix: str, by_others: int = 0o037) -> str:
    """The run's secret in a file that this user alone can read, or that another one, such as a supervisor's, lets this
    user's group read: `by_others` are the bits that the mode of another one's file must not have. Raises UsageError."""
    try:
        with path.open("rb") as file:
            status, data = os.fstat(file.fileno()), file.read(MAX_SECRET_BYTES + 1)
        secret = data.decode().strip()
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is no text"
        raise UsageError(f"cannot read the secret in {path}: {why}", fix) from None
    if status.st_mode & (0o077 if status.st_uid == os.getuid() else by_others):
        about = f"mode {status.st_mode & 0o777:03o}, owned by user {status.st_uid}"
        cause = f"others can read or change the secret in {path} ({about})"
        raise UsageError(cause, fix)
    if len(data) > MAX_SECRET_BYTES:
        raise UsageError(f"{path} has more than {MAX_SECRET_BYTES} bytes: that is no secret", fix)
    return secret


def without_secret(variables: Mapping[str, str]) -> dict[str, str]:
    """Environment variables for a process that has no use for the run's secret."""
    return {name: value for name, value in variables.items() if name not in (VARIABLE, FILE_VARIABLE)}


def weakness(secret: str) -> str:
    """Why a secret is easily guessed; empty where nothing is seen. It does not know the words of any language."""
    if len(secret) < MIN_SECRET_CHARS:
        return f"has {len(secret)} characters, at least {MIN_SECRET_CHARS} keep guesses out"
    if (different := len(set(secret.lower()))) < MIN_DIFFERENT_CHARS:
        return f"has {different} different characters, at least {MIN_DIFFERENT_CHARS} keep guesses out"
    new = min(step * _new_chars(secret.lower()[::step]) for step in (1, 2))  # 2: "0a1b2c", "001122"
    if new < MIN_NEW_CHARS:
        return f"repeats itself or counts: {new} of its characters are new, at least {MIN_NEW_CHARS} keep guesses out"
    return ""


def _new_chars(text: str) -> int:
    """Characters that neither repeat three or more of the text, nor go on as the two before them on a keyboard do."""
    rows = "".join(f" {row} {row[::-1]} " for row in _KEYBOARD)
    new = at = 0
    while at < len(text):
        length = 3
        while at + length <= len(text) and text[at : at + length] in text[: at + length - 1]:
            length += 1
        if length > 3:
            at += length - 1
            continue
        last = text[max(at - 2, 0) : at + 1]
        steps = {ord(after) - ord(before) for before, after in pairwise(last)}
        follows = len(last) == 3 and (steps in ({0}, {1}, {-1}) or last in rows)
        new, at = new + (not follows), at + 1
    return new


def _stretched(secret: str) -> bytes:
    """Bytes of a secret for its key: those of a passphrase by scrypt, so that a guess takes 0.3 s of a core."""
    if not secret or _RANDOM.fullmatch(secret):
        return secret.encode()
    return Scrypt(salt=b"diloco peer key 1", length=32, n=2**17, r=8, p=1).derive(secret.encode())

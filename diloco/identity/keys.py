"""The private key that all peers of a run share, and its certificate: mutual TLS for every connection.

The key is made from the secret that the run's operators share (`DILOCO_SECRET`). Without the secret nobody can connect
or pose as a member. A run without a secret has a key that everybody can make. It keeps nobody out, but who only listens
reads nothing (TLS 1.3 keys are ephemeral), and bytes that are damaged on the way are found below gRPC, whose HTTP/2
reader has no checksum and aborts on some of them.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import datetime
from typing import Final

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from diloco.base.errors import UsageError

VARIABLE: Final = "DILOCO_SECRET"
SERVER_NAME: Final = "peer.diloco"
"""Subject of the certificate, in place of a host name: peers have many addresses, and these change."""
MIN_SECRET_CHARS: Final = 16

_P256_ORDER: Final = 0xFFFFFFFF00000000FFFFFFFFFFFFFFFFBCE6FAADA7179E84F3B9CAC2FC632551


@dataclass(frozen=True)
class Keys:
    """Private key and certificate of a run's peers as PEM. The certificate is also the only authority trusted."""

    private_key: bytes
    certificate: bytes


def keys_of(secret: str) -> Keys:
    """Private key and certificate made from the run's secret, the same bytes on every machine.

    HKDF-SHA256 makes a P-256 key of the secret; the signature is deterministic.
    """
    derive = HKDF(hashes.SHA256(), length=48, salt=None, info=b"diloco peer key 1")
    number = int.from_bytes(derive.derive(secret.encode() or b"public")) % (_P256_ORDER - 1) + 1
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
    """The run's secret in `DILOCO_SECRET`, empty where none is set. Raises UsageError when it is too short."""
    secret = os.environ.get(VARIABLE, "").strip()
    if secret and len(secret) < MIN_SECRET_CHARS:
        cause = f"{VARIABLE} has {len(secret)} characters, at least {MIN_SECRET_CHARS} keep guesses out"
        raise UsageError(cause, f"export {VARIABLE}=$(openssl rand -hex 32), the same for every peer of the run")
    return secret

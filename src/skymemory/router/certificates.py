"""A certificate for a picker that was given none, signed by itself, good until it stops.

Gateways of the inference extension speak TLS with their picker and do not check its name: what they need is that nobody
reads along. Whoever wants more gives a certificate of an authority.
"""

from __future__ import annotations

import datetime
import ipaddress
from pathlib import Path

from skymemory.errors import InvalidInput, MissingExtra
from skymemory.files import read_bounded
from skymemory.router.ext_proc_server import Certificate

DAYS = 365


def self_signed(names: tuple[str, ...] = ("localhost", "127.0.0.1")) -> Certificate:
    """For ``names``, host names or addresses."""
    try:
        from cryptography import x509
        from cryptography.hazmat.primitives import hashes, serialization
        from cryptography.hazmat.primitives.asymmetric import ec
        from cryptography.x509.oid import NameOID
    except ImportError as error:
        raise MissingExtra(
            "a certificate of its own needs the extra `secure`: pip install 'skymemory[secure]'"
        ) from error
    key = ec.generate_private_key(ec.SECP256R1())
    who = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "skymemory endpoint picker")])
    now = datetime.datetime.now(datetime.UTC)
    alternatives: list[x509.GeneralName] = []
    for name in names:
        try:
            alternatives.append(x509.IPAddress(ipaddress.ip_address(name)))
        except ValueError:
            alternatives.append(x509.DNSName(name))
    signed = (
        x509.CertificateBuilder()
        .subject_name(who)
        .issuer_name(who)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(minutes=5))
        .not_valid_after(now + datetime.timedelta(days=DAYS))
        .add_extension(x509.SubjectAlternativeName(alternatives), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .sign(key, hashes.SHA256())
    )
    secret = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    return Certificate(signed.public_bytes(serialization.Encoding.PEM), secret)


def from_files(chain: Path, key: Path, clients_ca: Path | None = None) -> Certificate:
    """
    Raises:
        InvalidInput: a file cannot be read, or is no PEM.
    """
    parts = []
    for path, word in ((chain, b"CERTIFICATE"), (key, b"PRIVATE KEY"), (clients_ca, b"CERTIFICATE")):
        if path is None:
            continue
        try:
            parts.append(read_bounded(path))
        except OSError as error:
            raise InvalidInput(f"{str(path)!r} cannot be read: {error.strerror}") from error
        if b"-----BEGIN " not in parts[-1] or word not in parts[-1]:
            raise InvalidInput(f"{str(path)!r}: expected PEM with a {word.decode().lower()}")
    return Certificate(*parts)

"""TLS contexts and API keys, towards clients and servers."""

from __future__ import annotations

import datetime
import ipaddress
import re
import ssl
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from skymemory.errors import InvalidInput, missing_extra, os_reason
from skymemory.files import check_readable, read_bounded
from skymemory.router.tasks import Stamp, stamp

_KEY = re.compile(rb"[!-~]{1,4096}")
_MAX_KEY_BYTES = 8192
CERTIFICATE_DAYS = 365


class Certificate:
    """Certificate of the HTTP proxy, reloaded for new connections."""

    def __init__(self, chain: Path, key: Path) -> None:
        """Load the certificate."""
        self.context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self.context.minimum_version = ssl.TLSVersion.TLSv1_2
        self.context.set_alpn_protocols(["http/1.1"])
        self.load(chain, key)

    def load(self, chain: Path, key: Path) -> None:
        # Check first: a context with the new chain and the old key could serve no client.
        self.check(chain, key)
        _load(self.context, chain, key)

    @staticmethod
    def check(chain: Path, key: Path) -> None:
        _load(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), chain, key)


def _load(context: ssl.SSLContext, chain: Path, key: Path) -> None:
    for path in (chain, key):
        check_readable(path)  # OpenSSL would wait for a pipe's writer
    try:
        context.load_cert_chain(chain, key)
    except ssl.SSLError as error:
        raise InvalidInput(
            f"door: tls_cert {str(chain)!r} and tls_key {str(key)!r} are not a pair in PEM: {error.reason or error}"
        ) from error
    except OSError as error:
        raise InvalidInput(f"door: tls_cert {str(chain)!r}, tls_key {str(key)!r}: {os_reason(error)}") from error


class Access(NamedTuple):
    """TLS context and API key for a server."""

    tls: ssl.SSLContext | None = None  # None: plain HTTP
    key: str = ""  # empty: none

    @property
    def headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.key}"} if self.key else {}


class Authorities:
    """Cache of TLS contexts for servers, by file of trusted certificates (None: the system's)."""

    def __init__(self) -> None:
        self._known: dict[Path | None, tuple[Stamp | None, ssl.SSLContext]] = {}

    def access(self, url: str, ca: Path | None, key_file: Path | None) -> Access:
        """Return the access by the current files."""
        return Access(self.context(url, ca), "" if key_file is None else _key_in(key_file))

    def context(self, url: str, ca: Path | None) -> ssl.SSLContext | None:
        """Return the context, the same until the file changes; None for plain HTTP."""
        if not url.startswith("https:"):
            return None
        try:
            current = None if ca is None else stamp(ca)
            known = self._known.get(ca)
            if known is None or known[0] != current:
                known = self._known[ca] = current, ssl.create_default_context(cafile=ca)
        except OSError as error:  # SSLError is a subclass
            why = os_reason(error) if not isinstance(error, ssl.SSLError) else "it has no certificate in PEM"
            raise InvalidInput(f"ca {str(ca)!r}: {why}") from error
        return known[1]


def _key_in(file: Path) -> str:
    try:
        key = read_bounded(file, _MAX_KEY_BYTES).strip()
    except OSError as error:
        raise InvalidInput(f"api_key_file {str(file)!r}: {os_reason(error)}") from error
    if not _KEY.fullmatch(key):
        raise InvalidInput(f"api_key_file {str(file)!r}: expected the server's key on one line, in ASCII")
    return key.decode("ascii")


# Certificate of the endpoint picker, which Envoy sees


@dataclass(frozen=True, slots=True)
class PemCertificate:
    """Certificate of the picker (PEM). With ``clients_ca``, clients need a certificate by it."""

    chain: bytes
    key: bytes
    clients_ca: bytes | None = None


def grpc_context(certificate: PemCertificate) -> ssl.SSLContext:
    """Return a server context for HTTP/2."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.set_alpn_protocols(["h2"])
    try:
        # Python's ssl reads chain and key from files only. This file is private, and deleted at once.
        with tempfile.NamedTemporaryFile(suffix=".pem") as file:
            file.write(certificate.key + b"\n" + certificate.chain)
            file.flush()
            context.load_cert_chain(file.name)
        if certificate.clients_ca is not None:
            context.verify_mode = ssl.CERT_REQUIRED
            context.load_verify_locations(cadata=certificate.clients_ca.decode("ascii", "replace"))
    except (ssl.SSLError, OSError, ValueError) as error:
        raise InvalidInput(f"the certificate and its key cannot be used: {error}") from error
    return context


def self_signed(names: tuple[str, ...] = ("localhost", "127.0.0.1")) -> PemCertificate:
    """Return a self-signed certificate, enough for gateways that do not verify the picker's name."""
    try:
        from cryptography import x509
        from cryptography.hazmat.primitives import hashes, serialization
        from cryptography.hazmat.primitives.asymmetric import ec
        from cryptography.x509.oid import NameOID
    except ImportError as error:
        raise missing_extra("a self-signed certificate", "cryptography", "secure") from error
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "skymemory endpoint picker")])
    now = datetime.datetime.now(datetime.UTC)
    alternatives: list[x509.GeneralName] = []
    for name in names:
        try:
            alternatives.append(x509.IPAddress(ipaddress.ip_address(name)))
        except ValueError:
            alternatives.append(x509.DNSName(name))
    signed = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(minutes=5))
        .not_valid_after(now + datetime.timedelta(days=CERTIFICATE_DAYS))
        .add_extension(x509.SubjectAlternativeName(alternatives), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .sign(key, hashes.SHA256())
    )
    secret = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    return PemCertificate(signed.public_bytes(serialization.Encoding.PEM), secret)


def from_files(chain: Path, key: Path, clients_ca: Path | None = None) -> PemCertificate:
    """Read PEM files."""
    parts = []
    for path, word in ((chain, b"CERTIFICATE"), (key, b"PRIVATE KEY"), (clients_ca, b"CERTIFICATE")):
        if path is None:
            continue
        try:
            parts.append(read_bounded(path))
        except OSError as error:
            raise InvalidInput(f"{str(path)!r} cannot be read: {os_reason(error)}") from error
        if b"-----BEGIN " not in parts[-1] or word not in parts[-1]:
            raise InvalidInput(f"{str(path)!r}: expected PEM with a {word.decode().lower()}")
    return PemCertificate(*parts)

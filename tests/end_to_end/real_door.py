"""`skymemory route` as it is put before clients: real engines behind it, TLS, API keys and CORS at its door."""

from __future__ import annotations

import datetime
import ipaddress
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.router.processes import PATIENCE_S, ROOT, Process

ENGINE_PATIENCE_S = 120.0
"""It imports torch, and where nothing is compiled yet compiles it."""
NAMES = ("localhost", "127.0.0.1")


class Authority:
    """Signs certificates that the strictest of clients take."""

    def __init__(self, folder: Path) -> None:
        from cryptography.hazmat.primitives.asymmetric import ec

        self._key = ec.generate_private_key(ec.SECP256R1())
        self.file = folder / "authority.pem"
        self._name, signed = "test authority", self._signed("test authority", self._key, True)
        self.file.write_bytes(signed)

    def issue(self, chain: Path, key: Path) -> None:
        """Another certificate for ``NAMES``. The chain is written first, as certbot does it."""
        from cryptography.hazmat.primitives import serialization
        from cryptography.hazmat.primitives.asymmetric import ec

        made = ec.generate_private_key(ec.SECP256R1())
        chain.write_bytes(self._signed("localhost", made, False))
        key.write_bytes(
            made.private_bytes(
                serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
            )
        )

    def _signed(self, name: str, key: object, is_authority: bool) -> bytes:
        from cryptography import x509
        from cryptography.hazmat.primitives import hashes, serialization
        from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

        def called(name: str) -> x509.Name:
            return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])

        public, issuer = key.public_key(), self._key.public_key()  # type: ignore[attr-defined]
        now = datetime.datetime.now(datetime.UTC)
        building = (
            x509.CertificateBuilder()
            .subject_name(called(name))
            .issuer_name(called("test authority"))
            .public_key(public)
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - datetime.timedelta(minutes=5))
            .not_valid_after(now + datetime.timedelta(days=2))
            .add_extension(x509.BasicConstraints(ca=is_authority, path_length=0 if is_authority else None), True)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(public), False)
            .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(issuer), False)
            .add_extension(
                x509.KeyUsage(
                    digital_signature=True,
                    key_cert_sign=is_authority,
                    crl_sign=is_authority,
                    content_commitment=False,
                    key_encipherment=False,
                    data_encipherment=False,
                    key_agreement=False,
                    encipher_only=False,
                    decipher_only=False,
                ),
                True,
            )
        )
        if not is_authority:
            names = [x509.DNSName(NAMES[0]), x509.IPAddress(ipaddress.ip_address(NAMES[1]))]
            building = building.add_extension(x509.SubjectAlternativeName(names), False)
            building = building.add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), False)
        return building.sign(self._key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)


@dataclass
class Door:
    process: Process
    port: int
    folder: Path
    authority: Authority
    keys: dict[str, str]
    """Of tenants by name."""
    engines: list[str]

    @property
    def url(self) -> str:
        return f"https://localhost:{self.port}"

    @property
    def key_file(self) -> Path:
        return self.folder / "keys.toml"

    @property
    def certificate(self) -> tuple[Path, Path]:
        return self.folder / "door.pem", self.folder / "door.key"


def new_key(file: Path, tenant: str) -> str:
    """By the command that an operator gives."""
    said = subprocess.run(
        [sys.executable, "-m", "skymemory", "keys", "api", str(file), tenant],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=True,
    )
    return said.stdout.strip()


@contextmanager
def real_engines(number: int, *words: str) -> Iterator[list[str]]:
    """Their addresses."""
    with ExitStack() as stack:
        started: list[Process] = []
        for _ in range(number):
            process = Process("-m", "skymemory", "serve", "--listen", "127.0.0.1:0", "--cache", "16MiB", *words)
            stack.callback(process.close)
            started.append(process)
        yield [process.says(r"http://127\.0\.0\.1:\d+", ENGINE_PATIENCE_S)[0] for process in started]


@contextmanager
def real_door(folder: Path, engines: list[str], tenants: str, settings: str = "", *words: str) -> Iterator[Door]:
    """``tenants``: the TOML of the file of keys, before keys are added; ``settings`` goes above the backends."""
    authority = Authority(folder)
    chain, key, key_file = folder / "door.pem", folder / "door.key", folder / "keys.toml"
    authority.issue(chain, key)
    key_file.write_text(tenants)
    names = [line.strip()[len("[tenants.") : -1] for line in tenants.splitlines() if line.startswith("[tenants.")]
    keys = {name: new_key(key_file, name) for name in names}
    file = folder / "router.toml"
    file.write_text(settings + "".join(f'\n[[backends]]\nurl = "{url}"\n' for url in engines))
    process = Process(
        "-m",
        "skymemory",
        "route",
        "--listen",
        "127.0.0.1:0",
        "--settings",
        str(file),
        "--api-keys",
        str(key_file),
        "--tls-cert",
        str(chain),
        "--tls-key",
        str(key),
        *words,
    )
    try:
        port = int(process.says(r"listening on https://127\.0\.0\.1:(\d+)")[1])
        yield Door(process, port, folder, authority, keys, engines)
    finally:
        process.close()

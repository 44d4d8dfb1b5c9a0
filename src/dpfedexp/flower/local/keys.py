"""Certificates and node keys for a deployment on one machine, so that trying TLS and node authentication takes no preparation."""

from __future__ import annotations

import datetime
import ipaddress
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat
from cryptography.x509.oid import NameOID

_LIFE = datetime.timedelta(days=30)


@dataclass(frozen=True)
class Certificates:
    """An authority of this deployment's own, and a server certificate for loopback that it signed."""

    authority: Path
    certificate: Path
    key: Path


def make_certificates(folder: Path, host: str = "127.0.0.1") -> Certificates:
    """For loopback, and for the address of it that nodes connect to."""
    authority_key, server_key = ec.generate_private_key(ec.SECP256R1()), ec.generate_private_key(ec.SECP256R1())
    authority = _certificate("dpfedexp local authority", authority_key, None, authority_key)
    server = _certificate("localhost", server_key, authority, authority_key, {"127.0.0.1", host})
    paths = Certificates(folder / "ca.crt", folder / "server.pem", folder / "server.key")
    paths.authority.write_bytes(authority.public_bytes(Encoding.PEM))
    paths.certificate.write_bytes(server.public_bytes(Encoding.PEM))
    _write_secret(paths.key, server_key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    return paths


def make_node_key(folder: Path, name: str) -> tuple[Path, Path]:
    """A key pair with which a SuperNode proves who it is: the private file, and the public one that is registered."""
    key = ec.generate_private_key(ec.SECP384R1())
    private, public = folder / name, folder / f"{name}.pub"
    _write_secret(private, key.private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption()))
    public.write_bytes(key.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH) + b"\n")
    return private, public


def _certificate(
    name: str,
    key: ec.EllipticCurvePrivateKey,
    issuer: x509.Certificate | None,
    signer: ec.EllipticCurvePrivateKey,
    addresses: Iterable[str] = (),
) -> x509.Certificate:
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    now = datetime.datetime.now(datetime.UTC)
    builder = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject if issuer is None else issuer.subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(minutes=5))
        .not_valid_after(now + _LIFE)
        .add_extension(x509.BasicConstraints(ca=issuer is None, path_length=None), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key()), critical=False)
    )
    if issuer is None:
        usage = x509.KeyUsage(False, False, False, False, False, True, True, False, False)
        return builder.add_extension(usage, critical=True).sign(signer, hashes.SHA256())
    names = [x509.DNSName("localhost"), *(x509.IPAddress(ipaddress.ip_address(one)) for one in addresses)]
    return builder.add_extension(x509.SubjectAlternativeName(names), critical=False).sign(signer, hashes.SHA256())


def _write_secret(path: Path, data: bytes) -> None:
    path.touch(mode=0o600)
    path.write_bytes(data)

"""A CA of the lab's own and a certificate by it: certificates.py FOLDER ADDRESS writes ca.pem and front.pem.

What is there already is kept, unless it ends within 30 days.
"""

from __future__ import annotations

import datetime as dt
import ipaddress
import sys
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

DAYS, LEFT = 365, 30


def made(
    name: str,
    issuer: tuple[x509.Certificate, ec.EllipticCurvePrivateKey] | None,
    *extensions: x509.ExtensionType,
) -> tuple[x509.Certificate, ec.EllipticCurvePrivateKey]:
    """A certificate and its key, signed by the issuer or by itself."""
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    now = dt.datetime.now(dt.UTC)
    builder = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer[0].subject if issuer else subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - dt.timedelta(hours=1))
        .not_valid_after(now + dt.timedelta(days=DAYS))
        .add_extension(x509.BasicConstraints(ca=issuer is None, path_length=None), critical=True)
    )
    for extension in extensions:
        builder = builder.add_extension(extension, critical=False)
    return builder.sign(issuer[1] if issuer else key, hashes.SHA256()), key


def is_fresh(path: Path) -> bool:
    """Whether a certificate is there that does not end soon."""
    if not path.exists():
        return False
    ends = x509.load_pem_x509_certificate(path.read_bytes()).not_valid_after_utc
    return ends - dt.datetime.now(dt.UTC) > dt.timedelta(days=LEFT)


def main() -> None:
    """Write both, and say so."""
    folder, address = Path(sys.argv[1]), sys.argv[2]
    if is_fresh(folder / "ca.pem") and is_fresh(folder / "front.pem"):
        return
    folder.mkdir(parents=True, exist_ok=True)
    authority = made("vllm-fleet lab CA", None)
    names = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address(address))])
    certificate, key = made("vllm-fleet lab front", authority, names)
    pem = serialization.Encoding.PEM
    secret = key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    (folder / "front.pem").touch(mode=0o600)
    (folder / "front.pem").write_bytes(certificate.public_bytes(pem) + secret)
    (folder / "ca.pem").write_bytes(authority[0].public_bytes(pem))
    sys.stdout.write("written\n")


if __name__ == "__main__":
    main()

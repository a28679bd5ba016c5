"""Certificates for tests of nodes, made anew each time."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

_CURVE = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
_DAYS = ("-days", "2")


def _openssl(folder: Path, *arguments: str) -> None:
    subprocess.run(["openssl", *arguments], cwd=folder, check=True, capture_output=True)


def sign(folder: Path, name: str, names: str | None, authority: str = "ca") -> None:
    """Make a key and a certificate for ``names``, signed by an authority of the folder."""
    request = ("-keyout", f"{name}.key", "-out", f"{name}.csr", "-subj", f"/CN={name}")
    _openssl(folder, "req", *_CURVE, *request)
    (folder / f"{name}.ext").write_text(f"subjectAltName={names}" if names else "basicConstraints=CA:FALSE")
    by = ("-CA", f"{authority}.pem", "-CAkey", f"{authority}.key", "-CAcreateserial")
    given = ("-in", f"{name}.csr", "-out", f"{name}.pem", "-extfile", f"{name}.ext")
    _openssl(folder, "x509", "-req", *given, *by, *_DAYS)


def make_certificates(folder: Path) -> None:
    """Authorities (``ca``, ``other-ca``), a node for loopback, replicas, and a stranger: of each a .pem and a .key."""
    if shutil.which("openssl") is None:
        pytest.skip("no server: openssl is not installed, and certificates cannot be made")
    for authority in ("ca", "other-ca"):
        out = ("-keyout", f"{authority}.key", "-out", f"{authority}.pem")
        _openssl(folder, "req", "-x509", *_CURVE, *out, *_DAYS, "-subj", f"/CN={authority}")
    sign(folder, "node", "DNS:localhost,IP:127.0.0.1")
    sign(folder, "replica-1", None)
    sign(folder, "by-other-name", "DNS:replica-2,DNS:more")
    sign(folder, "stranger", None, "other-ca")

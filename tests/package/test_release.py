"""A release is signed, and neither its files nor its checksums can be changed without notice."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parents[2] / "scripts"
LOCK = SCRIPTS.parent / "requirements" / "all.lock"


@pytest.fixture
def key(tmp_path: Path) -> Path:
    if not shutil.which("ssh-keygen"):
        pytest.skip("ssh-keygen is not installed")
    path = tmp_path / "key"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "test", "-f", str(path)], check=True)
    return path


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "dist"
    folder.mkdir()
    (folder / "a.whl").write_bytes(b"wheel")
    (folder / "SHA256SUMS").write_text(f"{hashlib.sha256(b'wheel').hexdigest()}  a.whl\n")
    return folder


def sign(folder: Path, key: Path) -> subprocess.CompletedProcess[str]:
    command = [str(SCRIPTS / "sign.sh"), str(folder), str(key)]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)


def verified(folder: Path, signer: Path) -> bool:
    """As docs/versions.md says."""
    allowed = folder.parent / "allowed_signers"
    allowed.write_text(f'me namespaces="strandline-release" {signer.with_suffix(".pub").read_text()}')
    command = ["ssh-keygen", "-Y", "verify", "-f", str(allowed), "-I", "me", "-n", "strandline-release"]
    with (folder / "SHA256SUMS").open() as sums:
        done = subprocess.run([*command, "-s", str(folder / "SHA256SUMS.sig")], stdin=sums, check=False, timeout=120)
    return done.returncode == 0


def test_a_signed_release_is_verified_and_a_changed_one_is_not(folder: Path, key: Path) -> None:
    assert sign(folder, key).returncode == 0
    assert sign(folder, key).returncode == 0, "a second time replaces the signature"
    assert verified(folder, key)
    (folder / "SHA256SUMS").write_text(f"{hashlib.sha256(b'other').hexdigest()}  a.whl\n")
    assert not verified(folder, key)


def test_another_key_is_not_the_signer_s(folder: Path, key: Path, tmp_path: Path) -> None:
    assert sign(folder, key).returncode == 0
    other = tmp_path / "other"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "test", "-f", str(other)], check=True)
    assert not verified(folder, other)


def test_files_that_do_not_match_their_checksums_are_not_signed(folder: Path, key: Path) -> None:
    (folder / "a.whl").write_bytes(b"another wheel")
    assert sign(folder, key).returncode != 0
    assert not (folder / "SHA256SUMS.sig").exists()


def listed(tmp_path: Path, names: list[str]) -> subprocess.CompletedProcess[str]:
    """Dependencies written into a list of these parts."""
    parts = [{"name": name, "bom-ref": f"ref-{name}"} for name in names]
    root = {"name": "strandline", "bom-ref": "root"}
    (tmp_path / "bom.json").write_text(json.dumps({"metadata": {"component": root}, "components": parts}))
    command = [sys.executable, str(SCRIPTS / "sbom.py"), str(tmp_path / "bom.json"), str(LOCK)]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)


def test_the_list_of_parts_says_which_part_needs_which(tmp_path: Path) -> None:
    names = re.findall(r"(?m)^([\w.-]+)==", LOCK.read_text())
    assert listed(tmp_path, names).returncode == 0
    dependencies = json.loads((tmp_path / "bom.json").read_text())["dependencies"]
    needs = {each["ref"]: each.get("dependsOn", []) for each in dependencies}
    project = tomllib.loads((SCRIPTS.parent / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    everything = [*project["dependencies"], *(one for name in extras if name != "dev" for one in extras[name])]
    direct = {re.split(r"[^\w.-]", one)[0] for one in everything} - {"strandline"}
    assert needs["root"] == sorted(f"ref-{name}" for name in direct)
    assert "ref-arro3-core" in needs["ref-deltalake"]
    reached, waiting = set[str](), ["root"]
    while waiting:
        reached.add(found := waiting.pop())
        waiting += set(needs[found]) - reached
    assert reached == {"root", *(f"ref-{name}" for name in names)}


def test_a_list_that_lacks_a_part_of_the_lock_is_an_error(tmp_path: Path) -> None:
    done = listed(tmp_path, ["typer"])
    assert done.returncode == 1
    assert "the list of parts lacks" in done.stderr


def test_an_interpreter_is_found_by_its_version_or_missing_in_one_sentence() -> None:
    version = f"{sys.version_info[0]}.{sys.version_info[1]}"
    command = [str(SCRIPTS / "python.sh"), version]
    environment = {"PYTHON": sys.executable, "PATH": "/usr/bin:/bin", "HOME": "/nowhere"}
    found = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=120)
    assert found.stdout.strip() == sys.executable
    missing = subprocess.run(
        [command[0], "3.99"], env=environment, capture_output=True, text=True, check=False, timeout=120
    )
    assert (missing.returncode, missing.stdout) == (1, "")
    assert missing.stderr.startswith("There is no Python 3.99 here: install it")

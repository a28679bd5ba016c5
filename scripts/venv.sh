#!/usr/bin/env bash
# Usage: venv.sh VENV LOCK [tools]
# Creates VENV if it is missing, installs exactly what LOCK pins (hashes checked), then this project, editable; with
# "tools" without this project.
# Needs a Python of at least 3.11 (PYTHON=... chooses one) and plain pip; old pips are fine.
set -euo pipefail
cd "$(dirname "$0")/.."
venv=$1
lock=$2

say() { printf '%s: %s\n' "$venv" "$1"; }

fits() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; }

find_python() {
    local candidate
    for candidate in ${PYTHON:-} python3 python3.11 python3.12 python3.13 python3.14; do
        if fits "$candidate"; then
            command -v "$candidate"
            return
        fi
    done
    echo "Strandline needs Python 3.11 or newer: install one, or name it with PYTHON=/path/to/python3." >&2
    return 1
}

# A half-made environment (interrupted, or its Python was removed) is worth nothing: start over.
if ! fits "$venv/bin/python" || ! "$venv/bin/python" -m pip --version >/dev/null 2>&1; then
    python=$(find_python)
    say "creating it with $("$python" --version) ($python)"
    rm -rf "$venv"
    if ! "$python" -m venv "$venv" >/dev/null; then
        rm -rf "$venv"
        echo "$python cannot create virtual environments: install its venv module (Debian: apt-get install python3-venv)." >&2
        exit 1
    fi
fi

export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_INPUT=1
say "installing $(grep -c '==' "$lock") pinned packages from $lock (the first time takes a minute or two)"
"$venv/bin/python" -m pip install --quiet --require-hashes -r "$lock"
if [ "${3:-}" = tools ]; then
    say "ready"
    exit
fi
say "installing strandline, editable"
# The lock brings the build backend along, so this step asks no registry for anything.
"$venv/bin/python" -m pip install --quiet --no-deps --no-build-isolation -e .
say "ready"

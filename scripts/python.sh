#!/usr/bin/env bash
# Usage: python.sh VERSION
# Prints the path of a CPython of that version (3.14): PYTHON if it is one, else one on the PATH, of pyenv or of uv.
set -euo pipefail
version=$1

fits() {
    "$1" -c 'import sys; sys.exit("%d.%d" % sys.version_info[:2] != sys.argv[1])' "$version" >/dev/null 2>&1
}

candidates() {
    [ -z "${PYTHON:-}" ] || echo "$PYTHON"
    command -v "python$version" python3 || true
    ls -d "${PYENV_ROOT:-$HOME/.pyenv}/versions/$version".*/bin/python 2>/dev/null || true
    ! command -v uv >/dev/null || uv python find "$version" 2>/dev/null || true
}

while read -r candidate; do
    if fits "$candidate"; then
        echo "$candidate"
        exit
    fi
done < <(candidates)
echo "There is no Python $version here: install it (pyenv install $version, uv python install $version), or name it with PYTHON=/path." >&2
exit 1

#!/usr/bin/env bash
# Writes requirements/*.lock from pyproject.toml: one resolution for every platform, with hashes and no addresses,
# so that any index or mirror can serve it. uv comes from the index into an environment of its own.
set -euo pipefail
cd "$(dirname "$0")/.."
if [ ! -x .venv-lock/bin/uv ]; then
    echo "lock: installing uv"
    rm -rf .venv-lock
    python3 -m venv .venv-lock
    .venv-lock/bin/pip install --quiet --disable-pip-version-check uv
fi
for name in dev spark42; do
    echo "lock: resolving requirements/$name.lock"
    .venv-lock/bin/uv pip compile pyproject.toml "requirements/$name.txt" --extra dev \
        --universal --python-version 3.11 --generate-hashes --no-emit-index-url --no-emit-find-links \
        --no-emit-package strandline --custom-compile-command "make lock" \
        --quiet --output-file "requirements/$name.lock" "$@"
done
echo "lock: resolving requirements/release.lock, requirements/all.lock"
compile=(.venv-lock/bin/uv pip compile --universal --python-version 3.11 --generate-hashes --no-emit-index-url
    --no-emit-find-links --custom-compile-command "make lock" --quiet)
"${compile[@]}" requirements/release.txt --output-file requirements/release.lock "$@"
# What users of every extra install, in the versions that were tested: the list of parts (SBOM) names these.
"${compile[@]}" pyproject.toml --extra all --constraints requirements/dev.lock --no-emit-package strandline \
    --output-file requirements/all.lock "$@"
if grep -nE '://|^--' requirements/*.lock; then
    echo "lock: the lines above carry an address; a lock must not." >&2
    exit 1
fi

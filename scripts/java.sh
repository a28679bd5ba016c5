#!/usr/bin/env bash
# Prints the JAVA_HOME of a Java that Spark can run on (17 or 21). Looks at JAVA_HOME, PATH and the usual folders;
# if there is none, asks the system's package manager where that is permitted; else says what to install and fails.
# Only the answer goes to standard output.
set -euo pipefail

major() { "$1/bin/java" -version 2>&1 | sed -nE 's/.* version "([0-9]+).*/\1/p' | head -n 1; }

fits() {
    [ -x "$1/bin/java" ] || return 1
    case "$(major "$1")" in 17 | 21) return 0 ;; *) return 1 ;; esac
}

# java on PATH is usually a chain of symbolic links, and on macOS a stub that knows the real home.
home_on_path() {
    local java
    java=$(command -v java) || return 0
    "$java" -XshowSettings:properties -version 2>&1 | sed -nE 's/^ *java\.home = (.*)$/\1/p'
}

find_java() {
    local home
    for home in "${JAVA_HOME:-}" "$(home_on_path)" /usr/lib/jvm/* /opt/java/* /Library/Java/JavaVirtualMachines/*/Contents/Home \
        /opt/homebrew/opt/openjdk@17 /opt/homebrew/opt/openjdk@21 /usr/local/opt/openjdk@17 /usr/local/opt/openjdk@21; do
        if [ -n "$home" ] && fits "$home"; then
            echo "$home"
            return 0
        fi
    done
    return 1
}

install_java() {
    if [ "$(uname)" = Darwin ]; then
        command -v brew >/dev/null && brew install --quiet openjdk@17
    elif [ "$(id -u)" != 0 ]; then
        return 1
    elif command -v apt-get >/dev/null; then
        apt-get update -qq || true
        DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends openjdk-17-jre-headless ||
            DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends openjdk-21-jre-headless
    elif command -v dnf >/dev/null; then
        dnf install -y -q java-17-openjdk-headless || dnf install -y -q java-21-openjdk-headless
    elif command -v apk >/dev/null; then
        apk add --quiet openjdk17-jre-headless
    else
        return 1
    fi
}

if find_java; then
    exit 0
fi
echo "java: none found that Spark can run on (17 or 21); asking the package manager" >&2
if install_java >&2 && find_java; then
    exit 0
fi
echo "Spark needs Java 17 or 21: install one (Debian: openjdk-17-jre-headless) or point JAVA_HOME at it." >&2
exit 1

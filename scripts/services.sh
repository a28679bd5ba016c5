#!/usr/bin/env bash
# Starts the servers that tests talk to, and waits until each answers. A new one gets a function here, listens on
# loopback only, keeps its files under .services/, and does nothing when it is already up. Tests that need a server
# which is not there skip with a reason that starts with "no server:"; with CI set such a skip is a failure.
set -euo pipefail
cd "$(dirname "$0")/.."
echo "services: none needed, every test runs on files, memory and a local Spark"

#!/usr/bin/env bash
# Installs the peers of the benchmark suite that cannot live in .venv into environments of their own, .venv-peers/NAME.
# Called by `make bench-peers`; safe to run again at any time: what is there with the pinned versions is left alone.
#   usage: scripts/bench_peers.sh PYTHON
# Userkv is not installed there: the suite runs it from src/.
set -euo pipefail
cd "$(dirname "$0")/.."

python=$1
torch_index=https://download.pytorch.org/whl/cpu

say() { printf 'bench-peers: %s\n' "$*"; }

peer() {
    local name=$1 check=$2 venv=.venv-peers/$1 lock=requirements/$1.txt
    # Written last, so a failed installation is never taken for a complete one.
    local stamp=$venv/.stamp-$(cat "$lock" requirements/torch-cpu.txt scripts/bench_peers.sh | sha256sum | cut -c1-16)
    if [ -e "$stamp" ]; then
        say "$name is there"
        return
    fi
    say "installing $name (packages of $lock), minutes"
    rm -rf "$venv"
    "$python" -m venv "$venv"
    local pip=("$venv/bin/python" -m pip --disable-pip-version-check --no-input --quiet --quiet)
    "${pip[@]}" install --no-deps --requirement requirements/torch-cpu.txt 2>"$venv/torch.log" ||
        "${pip[@]}" install --no-deps --requirement requirements/torch-cpu.txt --extra-index-url "$torch_index"
    "${pip[@]}" install --no-deps --requirement "$lock"
    "$venv/bin/python" -c "$check" >/dev/null 2>"$venv/import.log" || {
        say "$name is installed but does not import:"
        cat "$venv/import.log" >&2
        exit 1
    }
    touch "$stamp"
}

peer lmcache 'import vllm, lmcache.integration.vllm.lmcache_mp_connector'
say "done"

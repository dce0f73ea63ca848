#!/usr/bin/env bash
# Usage: test_install.sh UV DIRECTORY TORCH NEWEST_TORCH. Installs the wheel and the sdist, as a user
# does, with the oldest Python here that TORCH supports, and with the newest Python and torch, and
# runs the command line of each; with the newest, also the tests that torch may break.
# UV: path of the program. DIRECTORY: for environments and files. TORCH, NEWEST_TORCH: versions.
set -euo pipefail
uv=$1 directory=$2 torch=$3 newest_torch=$4
rm -rf "$directory"
"$uv" build -q --out-dir "$directory/dist" .

pythons=()
pyenv=$(pyenv versions --bare 2> /dev/null | paste -sd: || true)
for version in 3.10 3.11 3.12 3.13 3.14; do
    # pyenv runs only the versions that this variable names.
    find=("$uv" python find --no-python-downloads "$version")
    python=$(PYENV_VERSION=$pyenv "${find[@]}" 2> /dev/null) || continue
    pythons+=("$python")
done
environment=$directory/python
try() { # PYTHON TORCH
    "$uv" venv -q --clear --python "$1" "$environment"
    install=("$uv" pip install -q --cache-dir "$directory/cache" --python "$environment")
    "${install[@]}" "torch==$2" "$directory"/dist/*.whl
    OMP_NUM_THREADS=1 "$environment/bin/gated-delta" check --backend reference --limit 8 > /dev/null
    "${install[@]}" --no-deps --reinstall "$directory"/dist/*.tar.gz
    version=$("$environment/bin/gated-delta" --version)
    echo "$("$environment/bin/python" --version), torch $2: wheel and sdist of $version run"
}
try "${pythons[0]}" "$torch"
try "${pythons[-1]}" "$newest_torch"
"${install[@]}" numpy pytest
OMP_NUM_THREADS=1 "$environment/bin/pytest" tests/test_library.py tests/test_call_cache.py
rm -rf "$environment" "$directory/cache" # gigabytes

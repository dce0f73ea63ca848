#!/usr/bin/env bash
# Usage: test_install.sh UV DIRECTORY TORCH. Installs the wheel and the sdist, as a user does, with
# the oldest and the newest Python here that torch supports, and runs the command line of each.
# UV: path of the program. DIRECTORY: for environments and files. TORCH: a version.
set -euo pipefail
uv=$1 directory=$2 torch=$3
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
for python in $(printf '%s\n' "${pythons[0]}" "${pythons[-1]}" | uniq); do
    "$uv" venv -q --clear --python "$python" "$environment"
    install=("$uv" pip install -q --cache-dir "$directory/cache" --python "$environment")
    "${install[@]}" "torch==$torch" "$directory"/dist/*.whl
    OMP_NUM_THREADS=1 "$environment/bin/gated-delta" check --backend reference --limit 1 > /dev/null
    "${install[@]}" --no-deps --reinstall "$directory"/dist/*.tar.gz
    version=$("$environment/bin/gated-delta" --version)
    echo "$("$environment/bin/python" --version), torch $torch: wheel and sdist of $version run"
done
rm -rf "$environment" "$directory/cache" # gigabytes

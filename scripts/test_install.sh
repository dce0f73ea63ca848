#!/usr/bin/env bash
# Usage: test_install.sh DIRECTORY TORCH. Installs the wheel and the sdist, as a user does, under the
# oldest and the newest Python here that torch has wheels for, and runs the command line of each.
# DIRECTORY is a virtual environment with uv; TORCH is a version.
set -euo pipefail
directory=$1 torch=$2
uv=$directory/bin/uv
"$uv" build -q --out-dir "$directory/dist" .

found=()
pyenv=$(pyenv versions --bare 2> /dev/null | paste -sd: || true)
for version in 3.10 3.11 3.12 3.13 3.14; do
    # pyenv runs only the versions that this variable names.
    python=$(PYENV_VERSION=$pyenv "$uv" python find --no-python-downloads "$version" 2> /dev/null) ||
        continue
    found+=("$python")
done
for python in $(printf '%s\n' "${found[0]}" "${found[-1]}" | uniq); do
    place=$directory/python
    "$uv" venv -q --clear --python "$python" "$place"
    install=("$uv" pip install -q --cache-dir "$directory/cache" --python "$place")
    "${install[@]}" "torch==$torch" "$directory"/dist/*.whl
    OMP_NUM_THREADS=1 "$place/bin/gated-delta" check --backend reference --limit 1 > /dev/null
    "${install[@]}" --no-deps --reinstall "$directory"/dist/*.tar.gz
    ran=$("$place/bin/gated-delta" --version)
    echo "$("$place/bin/python" --version), torch $torch: the wheel and the sdist of $ran run"
done
rm -rf "$place" "$directory/cache" # gigabytes

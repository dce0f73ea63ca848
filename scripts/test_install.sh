#!/usr/bin/env bash
# Usage: test_install.sh DIRECTORY TORCH. Installs the wheel and the sdist, as a user does, under the
# oldest and the newest installed Python that torch has wheels for, and runs the command line of
# each. DIRECTORY is a virtual environment with uv; TORCH is a version.
set -euo pipefail
directory=$1 torch=$2
uv=$directory/bin/uv
"$uv" build -q --out-dir "$directory/dist" .

pythons=()
pyenv=$(pyenv versions --bare 2> /dev/null | paste -sd: || true)
for version in 3.10 3.11 3.12 3.13 3.14; do
    # pyenv runs only the versions named by this variable.
    python=$(PYENV_VERSION=$pyenv "$uv" python find --no-python-downloads "$version" 2> /dev/null) ||
        continue
    pythons+=("$python")
done
for python in $(printf '%s\n' "${pythons[0]}" "${pythons[-1]}" | uniq); do
    environment=$directory/python
    "$uv" venv -q --clear --python "$python" "$environment"
    install=("$uv" pip install -q --cache-dir "$directory/cache" --python "$environment")
    "${install[@]}" "torch==$torch" "$directory"/dist/*.whl
    OMP_NUM_THREADS=1 "$environment/bin/gated-delta" check --backend reference --limit 1 > /dev/null
    "${install[@]}" --no-deps --reinstall "$directory"/dist/*.tar.gz
    ran=$("$environment/bin/gated-delta" --version)
    echo "$("$environment/bin/python" --version), torch $torch: the wheel and the sdist of $ran run"
done
rm -rf "$environment" "$directory/cache" # gigabytes

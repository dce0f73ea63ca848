#!/usr/bin/env bash
# The wheel and the sdist as a user installs them, with torch from pip's index, by the oldest and the newest Python that is here
# of those that torch has wheels for. Both run the command line. make test-install: DIRECTORY has uv; TORCH is a version.
set -euo pipefail
directory=$1 torch=$2
uv=$directory/bin/uv
"$uv" build -q --out-dir "$directory/dist" .

found=()
pyenv=$(pyenv versions --bare 2> /dev/null | paste -sd: || true)
for version in 3.10 3.11 3.12 3.13 3.14; do
    if python=$(PYENV_VERSION=$pyenv "$uv" python find --no-python-downloads "$version" 2> /dev/null); then
        found+=("$python")
    fi
done
for python in $(printf '%s\n' "${found[0]}" "${found[-1]}" | uniq); do
    place=$directory/python
    "$uv" venv -q --clear --python "$python" "$place"
    "$uv" pip install -q --cache-dir "$directory/cache" --python "$place" "torch==$torch" "$directory"/dist/*.whl
    OMP_NUM_THREADS=1 "$place/bin/gated-delta" check --backend reference --limit 1 > /dev/null
    "$uv" pip install -q --cache-dir "$directory/cache" --python "$place" --no-deps --reinstall "$directory"/dist/*.tar.gz
    echo "$("$place/bin/python" --version), torch $torch: the wheel and the sdist of $("$place/bin/gated-delta" --version) run"
done
rm -rf "$place" "$directory/cache" # gigabytes

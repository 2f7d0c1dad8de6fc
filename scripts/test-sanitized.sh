#!/usr/bin/env bash
# Run the tests of the kernels in a copy of the library. Its kernels are built with AddressSanitizer and UBSan. An
# access outside an array, or undefined arithmetic, ends the run.
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
copy=$(mktemp -d)
trap 'rm -rf "$copy"' EXIT
cp -r "$root/permille" "$root/tests" "$root/pyproject.toml" "$copy"
cd "$copy"
"$root/.venv/bin/python" - <<'PYTHON'
from pathlib import Path
from permille.native.build import LIBRARY_NAME, build
flags = "-g -fno-omit-frame-pointer -fsanitize=address,undefined -fno-sanitize-recover=all"
print(build(Path("permille/native") / LIBRARY_NAME, compiler="gcc", flags=flags))
PYTHON
export LD_PRELOAD="$(gcc -print-file-name=libasan.so) $(gcc -print-file-name=libubsan.so)"
export ASAN_OPTIONS=detect_leaks=0:allocator_may_return_null=1 OMP_NUM_THREADS=1
"$root/.venv/bin/python" -m pytest -q -p no:randomly tests/unit/native/test_weights.py tests/unit/native/test_products.py tests/unit/native/test_int8.py \
  tests/unit/native/test_directions.py tests/unit/engines/test_light_layers.py "$@"

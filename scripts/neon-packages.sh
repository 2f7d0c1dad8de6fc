#!/usr/bin/env bash
# Install the cross compiler and the emulator for `make test-neon` (about 550 MB). If this does not run as root,
# or apt-get is missing, print the command to type.
set -euo pipefail
packages=(gcc-aarch64-linux-gnu libc6-dev-arm64-cross qemu-user-static)
command -v aarch64-linux-gnu-gcc >/dev/null 2>&1 && command -v qemu-aarch64-static >/dev/null 2>&1 && exit 0
if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null 2>&1; then
  echo "installing ${packages[*]}"
  export DEBIAN_FRONTEND=noninteractive
  apt-get update -qq
  apt-get install -y -qq --no-install-recommends "${packages[@]}" >/dev/null
else
  echo "the test needs: ${packages[*]}. Type: sudo apt-get install ${packages[*]}" >&2
  exit 1
fi

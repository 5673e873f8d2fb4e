#!/bin/sh
# The kernels' tests on a build with all checks: bounds checks in Cython, assertions in C, UBSan (trapping) and
# AddressSanitizer. Build and installation are in a temporary folder. The environment whose python and meson are first on
# PATH provides the packages, but not quire. Arguments are passed to pytest.
set -eu
cd "$(dirname "$0")/../.."
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
[ $# -gt 0 ] || set -- tests/kernels tests/runtime/model

python -m venv --without-pip "$scratch/env"
site=$("$scratch/env/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' > "$site/packages.pth" # no .pth files are read there

meson setup "$scratch/build" -Dchecks=true -Damx_twin=true -Db_sanitize=address -Db_lundef=false \
  -Dpython.platlibdir="$site" -Dpython.purelibdir="$site" > "$scratch/setup.log" 2>&1 || { cat "$scratch/setup.log"; exit 1; }
ninja -C "$scratch/build" --quiet
meson install -C "$scratch/build" --quiet --no-rebuild

# Python's own capture only: the sanitizer reports on file descriptor 2 and ends the process. An allocation that is too
# large returns NULL as it does without the sanitizer: some tests expect the MemoryError.
asan=$(ldd "$site"/quire/kernels/program*.so | awk '/libasan/ { print $3 }')
LD_PRELOAD=$asan ASAN_OPTIONS=detect_leaks=0:allocator_may_return_null=1 PYTHONMALLOC=malloc \
  "$scratch/env/bin/python" -m pytest -q --capture=sys -p no:cacheprovider "$@"

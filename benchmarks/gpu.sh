#!/usr/bin/env bash
# Everything that needs a GPU, in named parts of at most nine minutes. Each goes on where it was cut off: run it again.
#
#   bash benchmarks/gpu.sh [first|then|tests|kernels|layers|e2e|parity ...] [--device cpu]
#
#   first     what is most wanted, in one lease of nine minutes (first_contact.py); then: what comes next, in one of four.
#             SECONDS_IN_ALL bounds each. Peers: pip install --no-deps --target /FOLDER WHEELS; PYTHONPATH=/FOLDER
#   tests     tests/gpu
#   kernels, layers, e2e    the benchmarks of that part (fp8compile bench --list), one process each, each row with a limit
#   parity    a 1B-shaped run on real text beside its BF16 twin
#
# No argument: all but first and then, in turn. --device cpu: toy sizes, to try this script where there is no GPU. Needs no network and installs
# nothing: the package is put together in build/gpu, with passes/ where the wheel has it and a written dist-info.
# Results: benchmarks/results/<device>-<date>.json, .md and plots. With $OUT set, they are written there as they come, and
# copied to benchmarks/results at the end.
set -uo pipefail
cd "$(dirname "$0")/.."

MINUTES=${MINUTES:-8.5}   # a part ends by itself
HARD=525                  # and is ended after so many seconds, killed ten later
PYTHON=${PYTHON:-python3}
ROOT=$PWD
BUILD=$ROOT/build/gpu
RESULTS=${OUT:-$ROOT/benchmarks/results}
KNOWN="first then tests kernels layers e2e parity"

device=cuda parts=()
while [ $# -gt 0 ]; do
  case $1 in
    --device) device=${2:-}; shift ;;
    --device=*) device=${1#*=} ;;
    first | then | tests | kernels | layers | e2e | parity) parts+=("$1") ;;
    *) echo "gpu.sh: there is no part '$1'. Known: $KNOWN; --device cpu|cuda" >&2; exit 2 ;;
  esac
  shift
done
case $device in
  cuda) pattern="nvidia-*" size=() steps=2000 log=nvidia-tests.txt ;;
  cpu) pattern="cpu-tiny-*" size=(--tiny) steps=12 log=cpu-tiny-tests.txt ;;
  *) echo "gpu.sh: --device is cpu or cuda, not '$device'" >&2; exit 2 ;;
esac
[ ${#parts[@]} -gt 0 ] || read -ra parts <<<"${KNOWN#first then }"

put_together() { # a copy, so that no file appears in the tree
  rm -rf "$BUILD" && mkdir -p "$BUILD/benchmarks" || return
  cp -r fp8compile passes tests pyproject.toml README.md "$BUILD" || return
  cp -r benchmarks/*.py benchmarks/{harness,first,kernels,layers,e2e,studies} "$BUILD/benchmarks" || return
  [ -e "$BUILD/fp8compile/passes" ] || ln -s ../passes "$BUILD/fp8compile/passes"
  local version info
  version=$(sed -n 's/^__version__ = "\(.*\)"/\1/p' fp8compile/_version.py)
  info=$BUILD/fp8compile-$version.dist-info
  mkdir -p "$info" && printf 'Metadata-Version: 2.1\nName: fp8compile\nVersion: %s\n' "$version" >"$info/METADATA"
  printf '[torch_dynamo_backends]\nfp8compile = fp8compile.compiler.entry:fp8compile\n' >"$info/entry_points.txt"
}

limited() { timeout --kill-after=10 "$HARD" "$@"; }

run_part() {
  case $1 in
    first | then)
      local plan=(--plan "$1") seconds=520
      [ "$1" = first ] || seconds=230
      [ "$device" = cuda ] || plan=(--plan tiny)
      limited "$PYTHON" benchmarks/first_contact.py "${plan[@]}" --device "$device" "${size[@]}" --out "$RESULTS" \
        --seconds "${SECONDS_IN_ALL:-$seconds}" ;;
    tests) # -o: the suite's own options need packages that may not be there
      set -o pipefail
      limited "$PYTHON" -m pytest -o addopts="" -o timeout=300 -p no:cacheprovider -v -rs tests/gpu 2>&1 |
        tee "$RESULTS/$log" ;;
    kernels | layers | e2e)
      limited "$PYTHON" -m fp8compile bench "$1" --device "$device" "${size[@]}" --out "$RESULTS" --minutes "$MINUTES" ;;
    parity)
      limited "$PYTHON" benchmarks/studies/parity.py --device "$device" "${size[@]}" --out "$RESULTS" --minutes "$MINUTES" \
        --steps "$steps" --checkpoint "$ROOT/build/parity-$device.pt" ;;
  esac
}

copy_back() {
  [ -n "${OUT:-}" ] && cp "$RESULTS"/$pattern "$ROOT/benchmarks/results/" 2>/dev/null
  return 0
}

mkdir -p "$RESULTS"
if [ -n "${OUT:-}" ]; then # go on from the newest results that the tree holds
  for kind in json jsonl; do
    newest=$(ls "$ROOT"/benchmarks/results/$pattern.$kind 2>/dev/null | sort | tail -1)
    [ -z "$newest" ] || [ -e "$RESULTS/${newest##*/}" ] || cp "$newest" "$RESULTS/"
  done
fi
export BENCHMARKED_COMMIT=${BENCHMARKED_COMMIT:-$(git describe --always --dirty 2>/dev/null || echo unknown)}
export PYTHONPATH=$BUILD${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1 TORCHINDUCTOR_CACHE_DIR=${TORCHINDUCTOR_CACHE_DIR:-$ROOT/build/cache}
put_together || { echo "gpu.sh: the package could not be put together in $BUILD" >&2; exit 1; }
cd "$BUILD"
trap copy_back EXIT
trap 'exit 143' TERM
trap 'exit 130' INT

failed=()
for part in "${parts[@]}"; do
  echo "== $part =="
  run_part "$part" || failed+=("$part ($?)")
done
[ "$device" = cpu ] || echo "README's tables: python benchmarks/readme_tables.py; kernels: python -m benchmarks.kernel_table --read"
[ ${#failed[@]} -eq 0 ] && exit 0
echo "gpu.sh: not all well in: ${failed[*]}" >&2
exit 1

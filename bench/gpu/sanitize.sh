#!/usr/bin/env bash
# compute-sanitizer on one op's cases: bench/gpu/sanitize.sh OP [CASE ...] [-- more compute-sanitizer arguments]
#   bench/gpu/sanitize.sh linear_act                          the small test cases, memcheck
#   bench/gpu/sanitize.sh linear_act -- --tool racecheck      or initcheck, synccheck
# torch's caching allocator hides out-of-bounds accesses from the tool, so it is switched off.
# Runs the tree as it stands, with .venv or else python3 (PYTHON to choose another).
set -euo pipefail
if [ $# -lt 1 ]; then
    echo "usage: $0 OP [CASE ...] [-- more compute-sanitizer arguments]" >&2
    exit 2
fi
command -v compute-sanitizer >/dev/null || { echo "compute-sanitizer is not on the PATH: install CUDA's tools" >&2; exit 2; }

op=$1
shift
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
export PYTHONPATH="$root/src${PYTHONPATH:+:$PYTHONPATH}" PYTHONSAFEPATH=1
python=${PYTHON:-$(ls "$root"/.venv/bin/python 2>/dev/null || echo python3)}
one=("$python" -m shardfuse.bench.harness.one "$op")
cases=()
while [ $# -gt 0 ] && [ "$1" != "--" ]; do
    cases+=("$1")
    shift
done
[ "${1:-}" = "--" ] && shift

export PYTORCH_NO_CUDA_MEMORY_CACHING=1
exec compute-sanitizer --target-processes all --error-exitcode 1 "$@" \
    "${one[@]}" "${cases[@]}" --tag test

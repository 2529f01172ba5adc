#!/usr/bin/env bash
# compute-sanitizer on one op's cases: bench/sanitize.sh OP [CASE ...] [-- more compute-sanitizer arguments]
#   bench/sanitize.sh linear_act                          the small test cases, memcheck
#   bench/sanitize.sh linear_act -- --tool racecheck      or racecheck, initcheck, synccheck
# torch's caching allocator hides out-of-bounds accesses from the tool, so it is switched off.
set -euo pipefail
if [ $# -lt 1 ]; then
    echo "usage: $0 OP [CASE ...] [-- more compute-sanitizer arguments]" >&2
    exit 2
fi
command -v compute-sanitizer >/dev/null || { echo "compute-sanitizer is not on the PATH: install CUDA's tools" >&2; exit 2; }

op=$1
shift
cases=()
while [ $# -gt 0 ] && [ "$1" != "--" ]; do
    cases+=("$1")
    shift
done
[ "${1:-}" = "--" ] && shift

export PYTORCH_NO_CUDA_MEMORY_CACHING=1
exec compute-sanitizer --target-processes application-only --error-exitcode 1 "$@" \
    python -m shardfuse.bench.one "$op" "${cases[@]}" --tag test

#!/usr/bin/env bash
# Nsight Compute on one op's case: bench/gpu/ncu.sh OP [CASE] [more ncu arguments, after --]
#   bench/gpu/ncu.sh linear_act gpt3-13b-tp4-t16384-d5120-f5120-bf16-gelu_tanh
# Profiles the second run only, so that compilation and first-touch stay out. Writes OP.ncu-rep beside you (NCU_OUT).
# Runs the tree as it stands, with .venv or else python3 (PYTHON to choose another).
# Clocks are left as they are: what is reported is the machine as found.
set -euo pipefail
if [ $# -lt 1 ]; then
    echo "usage: $0 OP [CASE] [-- more ncu arguments]" >&2
    exit 2
fi
command -v ncu >/dev/null || { echo "ncu is not on the PATH: install Nsight Compute" >&2; exit 2; }

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

# Compile and warm first, in a process of its own: Triton's cache on disk serves the profiled one.
"${one[@]}" "${cases[@]}" --limit 1
exec ncu --set full --clock-control none --target-processes all \
    --kernel-name-base function --kernel-name 'regex:^_' \
    --force-overwrite --export "${NCU_OUT:-$op}" "$@" \
    "${one[@]}" "${cases[@]}" --limit 1

#!/bin/sh
# Kernel correctness on the GPU, then the layer step of Llama-3.1-8B's shapes, in under 8 minutes on one H100 or H200.
# Needs a Python with PyTorch, Triton, numpy and pandas; nothing of this project is installed.
#
#   scripts/gpu_check.sh OUT [--device cuda|cpu] [--quick]      PYTHON=... chooses the Python
#
# OUT receives rows.csv, environment.json, spec.json and the two logs. `--device cpu --quick` tries the script itself.
set -u
usage="usage: scripts/gpu_check.sh OUT [--device cuda|cpu] [--quick]"
out="" device=cuda quick=""
while [ $# -gt 0 ]; do
    case $1 in
        --device) device=${2:?"$usage"}; shift ;;
        --quick) quick=--quick ;;
        -*) echo "$usage" >&2; exit 2 ;;
        *) out=$1 ;;
    esac
    shift
done
[ -n "$out" ] || { echo "$usage" >&2; exit 2; }
case $device in
    cuda|cpu) ;;
    *) echo "$usage" >&2; exit 2 ;;
esac

python=${PYTHON:-python3}
root=$(CDPATH= cd -- "$(dirname -- "$0")/.." && pwd)
mkdir -p "$out" || exit 2
out=$(CDPATH= cd -- "$out" && pwd)
cd "$root" || exit 2
PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH}
PYTHONUNBUFFERED=1
export PYTHONPATH PYTHONUNBUFFERED

# A step ends itself between two cases; `timeout` is for a kernel that hangs.
bounded() {
    if command -v timeout >/dev/null; then timeout -k 5 "$@"; else shift; "$@"; fi
}

echo "== kernels against float64 on $device"
bounded 170 "$python" -m experiments.layer_step.kernel_check --device "$device" --budget-s 120 >"$out/kernels.log" 2>&1
kernels=$?
tail -n 12 "$out/kernels.log"

echo "== layer step on $device"
bounded 270 "$python" -m experiments.layer_step --out "$out" --device "$device" --models llama-3.1-8b \
    --budget-s 220 --no-table $quick >"$out/layer_step.log" 2>&1
steps=$?
tail -n 25 "$out/layer_step.log"

echo "== exit status: kernels $kernels, layer step $steps (0: right; 124: ran out of time)"
"$python" -m experiments.layer_step.rows "$out"
[ $kernels -eq 0 ] && [ $steps -eq 0 ]

#!/bin/bash
# Checks and measures the CUDA kernels on the device of this machine, in one run of bounded time.
#
#     bash benchmarks/gpu_check.sh
#     BASE_CUDA=../old/ops/cuda VARIANTS="-DA=1;-DA=1 -DB=2" STEPS="1 2 3" bash benchmarks/gpu_check.sh
#
# Steps: 0 machine, 1 build, 2 quick checks, 3 timings, 4 PyTorch, 5 TensorFlow's operations without TensorFlow,
# 6 full checks, 7 compute-sanitizer, 8 Nsight Compute. The table comes last. Without a device the script takes the
# steps that a processor can take, and says "no device".
#
# A step that fails is reported, and so is a step for which no time is left. Neither stops the others. The exit code is
# 1 if any step failed. Needs python3 with NumPy, absl-py and pytest; steps whose tools are missing are left out.
# The script changes no settings of the card.
#
# Environment variables:
#   OUT                The folder for results, at most seven small files. The default is a new temporary folder.
#   STEPS              The steps to take. The default is all.
#   BUDGET             Seconds for everything. The default is 300.
#   BASE_CUDA          Another version of the folder ops/cuda, beside its ops/kernels. It is measured as "base".
#   VARIANTS           Options of nvcc, separated by semicolons. Each makes a further version: "v1", "v2", ...
#   SIZES, DATA        Those to measure with, as benchmark_cuda.py takes them. The default is all.
#   TIMING_SECONDS     Seconds for step 3. The default is 60.
#   PYTHON             The interpreter. The default is python3.
#   PROCESSOR_LIBRARY  The kernels for processors. The default is to build them.

set -u
cd "$(dirname "$0")/.." || exit 1
export PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1
PYTHON=${PYTHON:-python3}
STEPS=${STEPS:-0 1 2 3 4 5 6 7 8}
BUDGET=${BUDGET:-300}
TIMING_SECONDS=${TIMING_SECONDS:-60}
NUM_SHARDS=12
BEGIN=$(date +%s)
WORK=$(mktemp -d)
trap 'rm -rf "$WORK"' EXIT
OUT=$(realpath "${OUT:-$(mktemp -d)}")
mkdir -p "$OUT" "$WORK/failed" "$WORK/logs"
LIBRARIES=()

elapsed() { echo $(($(date +%s) - BEGIN)); }

report() { printf '%4ss  %s\n' "$(elapsed)" "$*"; }

wanted() { [[ " $STEPS " == *" $1 "* ]]; }

has() { command -v "$1" >/dev/null; }

# fail NAME MESSAGE: steps that run at the same time count failures in files.
fail() {
  report "FAILED   $1: $2" | tee "$WORK/failed/${1//[ \/]/_}"
}

# run NAME LIMIT COMMAND...: runs a command for at most LIMIT seconds, and reports if it fails.
run() {
  local name=$1 limit=$2 log="$WORK/logs/${1//[ \/]/_}" left=$((BUDGET - $(elapsed) - 3)) code
  shift 2
  ((left < limit)) && limit=$left
  if ((limit < 5)); then
    fail "$name" "skipped, no time is left"
    return 1
  fi
  timeout --kill-after=5 "$limit" "$@" >"$log" 2>&1 </dev/null
  code=$?
  case $code in
    0) report "ok       $name" ;;
    124 | 137) fail "$name" "stopped after $limit s" ;;
    *) fail "$name" "exit code $code: $(grep -v '^ *$' "$log" | tail -n 1 | cut -c1-200)" ;;
  esac
  return $code
}

# logs NAME...: the logs of steps whose names begin so. Only the ends of those that did not fail.
logs() {
  local prefix log name
  for prefix in "$@"; do
    for log in "$WORK/logs/$prefix"*; do
      [[ -f $log ]] || continue
      name=$(basename "$log")
      printf '\n== %s\n' "$name"
      if [[ -f $WORK/failed/$name ]]; then
        tail -c 30000 "$log"
      else
        tail -n 8 "$log"
      fi
    done
  done
}

find_device() {
  timeout 60 "$PYTHON" - 2>&1 <<'EOF'
import sys
sys.path.insert(0, "ops/cuda")
import harness
try:
    device = harness.Device()
    print(device.architecture, device.name)
except RuntimeError as error:
    sys.exit(f"no device: {error}")
EOF
}

# 0. The machine.

machine() {
  local tool
  run "python" 30 "$PYTHON" -c 'import sys, numpy, absl, pytest; print(sys.version, "NumPy", numpy.__version__)'
  has nvidia-smi && run "nvidia-smi" 20 nvidia-smi -q -d CLOCK,MEMORY,PERFORMANCE
  {
    date -u
    uname -a
    echo "$(nproc) processors"
    for tool in "$PYTHON" nvcc g++ cuobjdump compute-sanitizer ncu; do
      echo "$tool: $(command -v "$tool" || echo none)"
    done
    cat "$WORK/logs/python" "$WORK/logs/nvidia-smi"
  } 2>/dev/null >>"$OUT/build.txt"
}

# 1. Builds, all at once.

# build NAME SOURCES OPTIONS...: puts a library into $WORK/NAME.
build() {
  local name=$1 sources=$2
  shift 2
  mkdir -p "$WORK/$name"
  run "build $name" 100 "$NVCC" "--options-file=$sources/nvcc.options" --threads=0 -Werror=all-warnings \
    "-arch=sm_$ARCHITECTURE" -lineinfo -Xptxas=-v "$@" -o "$WORK/$name/libhop_tf_cuda.so" "$sources"/*.cu
}

build_for_processors() {
  if [[ -n ${PROCESSOR_LIBRARY:-} ]]; then
    cp "$PROCESSOR_LIBRARY" "$WORK/libhop_tf_kernels.so"
  else
    run "build for processors" 100 g++ -O3 -std=c++17 -fPIC -shared -fvisibility=hidden -ffp-contract=off -pthread \
      -o "$WORK/libhop_tf_kernels.so" ops/kernels/*.cc
  fi
}

build_all() {
  local names=(today) variants=() options name
  build_for_processors &
  NVCC=$(command -v nvcc || command -v "${CUDA_HOME:-/usr/local/cuda}/bin/nvcc")
  if [[ -z $NVCC ]]; then
    report "left out: build for CUDA, because there is no nvcc"
  else
    build today ops/cuda &
    if [[ -n ${BASE_CUDA:-} ]]; then
      names+=(base)
      build base "$BASE_CUDA" &
    fi
    IFS=';' read -ra variants <<<"${VARIANTS:-}"
    for options in ${variants[@]+"${variants[@]}"}; do
      name="v$((++NUM_VARIANTS))"
      names+=("$name")
      report "version $name: $options"
      # shellcheck disable=SC2086  # The options are several words.
      build "$name" ops/cuda $options &
    done
  fi
  wait
  for name in "${names[@]}"; do
    [[ -f $WORK/$name/libhop_tf_cuda.so ]] && LIBRARIES+=("--library=$name=$WORK/$name/libhop_tf_cuda.so")
    describe_build "$name" >>"$OUT/build.txt"
  done
}

# Registers and spills of each kernel, and how often it has the instructions that matter.
describe_build() {
  local filter=cat
  has c++filt && filter=c++filt
  echo "== $1"
  grep -E 'Compiling entry|registers|spill|error' "$WORK/logs/build_$1" 2>/dev/null | $filter
  if has cuobjdump && [[ -f $WORK/$1/libhop_tf_cuda.so ]]; then
    timeout 60 cuobjdump -sass "$WORK/$1/libhop_tf_cuda.so" | awk '
      function show() { if (name) print loads " LDG.128, " atomics " ATOMS, " locals " LDL or STL: " name }
      /Function :/ { show(); name = $3; loads = atomics = locals = 0 }
      /LDG\.E[.A-Z]*\.128/ { ++loads }
      / ATOMS/ { ++atomics }
      / (LDL|STL)/ { ++locals }
      END { show() }' | $filter
  fi
}

# 2 to 8.

# The name in an option --library=NAME=PATH.
version() { echo "$1" | cut -d= -f2; }

benchmark() {
  local name=$1 limit=$2
  shift 2
  run "$name" "$limit" "$PYTHON" benchmarks/benchmark_cuda.py "--processor=$WORK/libhop_tf_kernels.so" "$@"
}

# Each version in a process of its own: after a bad memory access the device refuses everything else that a process
# asks for. Versions that fail are not measured, except the first.
quick_checks() {
  local sound=("${LIBRARIES[0]}") library name
  for library in "${LIBRARIES[@]}"; do
    name=$(version "$library")
    benchmark "quick checks $name" 60 --checks=quick --sizes= "$library" &
  done
  wait
  for library in "${LIBRARIES[@]:1}"; do
    name=$(version "$library")
    [[ -f $WORK/failed/quick_checks_$name ]] || sound+=("$library")
  done
  LIBRARIES=("${sound[@]}")
}

timings() {
  local arguments=("--json=$OUT/run.json" "--seconds=$TIMING_SECONDS" --checks=none)
  [[ -n ${SIZES:-} ]] && arguments+=("--sizes=$SIZES")
  [[ -n ${DATA:-} ]] && arguments+=("--data=$DATA")
  benchmark "timings" $((TIMING_SECONDS + 45)) "${arguments[@]}" "${LIBRARIES[@]}"
}

full_checks() {
  local i
  for ((i = 0; i < NUM_SHARDS; ++i)); do
    TEST_TOTAL_SHARDS=$NUM_SHARDS TEST_SHARD_INDEX=$i run "tests, shard $i" 150 \
      "$PYTHON" tests/ops/ops_cuda_test.py &
  done
  [[ -n $DEVICE ]] && benchmark "full checks" 150 --checks=full --sizes= "${LIBRARIES[0]}" &
  wait
}

stand_in() {
  if [[ -f tests/ops/tensorflow_stand_in_test.py ]]; then
    run "operations without TensorFlow" 120 "$PYTHON" tests/ops/tensorflow_stand_in_test.py
  else
    report "left out: operations without TensorFlow, because there is no such test"
  fi
}

# initcheck would see nothing, because the checks fill all memory.
sanitize() {
  local tool
  if ! has compute-sanitizer; then
    report "left out: compute-sanitizer, which is not installed"
    return
  fi
  for tool in memcheck racecheck synccheck; do
    run "sanitizer $tool" 120 compute-sanitizer --tool "$tool" --target-processes all --error-exitcode 9 \
      --print-limit 20 "$PYTHON" benchmarks/benchmark_cuda.py "--processor=$WORK/libhop_tf_kernels.so" \
      --checks=quick --check_sizes=1,513,5000 --check_data=gaussian,many_bins,patterns --sizes= "${LIBRARIES[0]}" &
  done
  wait
  logs sanitizer >"$OUT/sanitizer.txt"
}

profile() {
  if ! has ncu; then
    report "left out: Nsight Compute, which is not installed"
    return
  fi
  run "profile" 60 ncu --clock-control none --target-processes all --csv --log-file "$OUT/ncu.csv" \
    --section SpeedOfLight --section MemoryWorkloadAnalysis --section WarpStateStats \
    --kernel-name 'regex:CountBins|CountHalves|RefineBins|CountParts|AssignKeys|WriteBuckets|LookUp' \
    "$PYTHON" benchmarks/benchmark_cuda.py --once --sizes=100M \
    --data=gaussian,half_equal,narrow,many_bins,fp16,fp16_in_fp32 "${LIBRARIES[0]}"
}

# 9. The table.

table() {
  local failures
  failures=$(find "$WORK/failed" -type f | wc -l)
  [[ -f $WORK/logs/PyTorch ]] && echo "PyTorch:" && tail -n 30 "$WORK/logs/PyTorch" | tail -c 4000
  [[ -f $OUT/run.json ]] && "$PYTHON" benchmarks/benchmark_cuda.py "--show=$OUT/run.json"
  cat "$WORK"/failed/* 2>/dev/null | cut -c1-300
  echo "$failures failed, $(elapsed) s, results in $OUT"
  [[ -n $DEVICE ]] || echo "no device"
}

with_device() {
  wanted 2 && quick_checks
  wanted 3 && timings
  if wanted 4; then
    if [[ -f benchmarks/gpu_with_torch.py ]]; then
      run "PyTorch" 80 "$PYTHON" benchmarks/gpu_with_torch.py "--json=$OUT/torch.json"
    else
      report "left out: PyTorch, because there is no such benchmark"
    fi
  fi
  wanted 5 && stand_in &
  wanted 6 && full_checks &
  wanted 7 && sanitize &
  wait
  wanted 8 && profile
}

NUM_VARIANTS=0
NVCC=
DEVICE=
ARCHITECTURE=90
if found=$(find_device); then
  ARCHITECTURE=${found%% *}
  DEVICE=${found#* }
  report "device: $DEVICE, compute capability $ARCHITECTURE"
else
  report "${found##*$'\n'}"
fi
wanted 0 && machine
wanted 1 && build_all
if ((${#LIBRARIES[@]})); then
  export HOP_TF_CUDA_LIBRARY=${LIBRARIES[0]#--library=*=}
fi
if [[ -n $DEVICE ]] && ((${#LIBRARIES[@]})); then
  with_device
elif [[ -n $DEVICE ]]; then
  fail "all other steps" "there is no library for the device"
else
  wanted 5 && stand_in
  wanted 6 && full_checks
fi
logs quick_checks timings PyTorch full_checks tests operations profile >"$OUT/checks.txt"
table | tee "$OUT/table.md"
[[ -z $(ls "$WORK/failed") ]]

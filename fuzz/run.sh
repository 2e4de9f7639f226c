#!/usr/bin/env bash
# Fuzzes one target for some seconds: fuzz/run.sh TARGET [SECONDS]
# Without a nightly Rust the stable one builds it, without the address sanitizer: panics, hangs and memory beyond the limit
# are found all the same.
set -euo pipefail
cd "$(dirname "$0")/.."
if cargo +nightly --version >/dev/null 2>&1; then
    fuzz=(cargo +nightly fuzz run)
else
    fuzz=(env RUSTC_BOOTSTRAP=1 cargo fuzz run --sanitizer none)
fi
mkdir -p "fuzz/corpus/$1"
exec "${fuzz[@]}" "$1" "fuzz/corpus/$1" "fuzz/seeds/$1" -- \
    -max_total_time="${2:-60}" -timeout=10 -rss_limit_mb=2048 -max_len=65536 -print_final_stats=1

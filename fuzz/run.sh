#!/bin/sh
# Fuzzes one target for some seconds: fuzz/run.sh TARGET [SECONDS]
set -eu
cd "$(dirname "$0")/.."
mkdir -p "fuzz/corpus/$1"
exec cargo +nightly fuzz run "$1" "fuzz/corpus/$1" "fuzz/seeds/$1" -- \
    -max_total_time="${2:-60}" -timeout=10 -rss_limit_mb=2048 -max_len=65536 -print_final_stats=1

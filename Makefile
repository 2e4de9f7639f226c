# Every step of CI is a target that a person can run. `make demo` and `make test` are the two to know.
#
#   make demo        a sharded training run, saved on four ranks and resumed on three
#   make test        Rust tests, then Python tests against real PyTorch and the real trainers (makes .venv on first use)
#   make check       formatting, lints, documentation, dependencies and their licences, Python, spelling
#   make bench       everything measured beside PyTorch; make bench-check compares with committed floors
#   make fuzz        a short run of every fuzz target
#   make test-faults every fault at every request of an S3 server and at every system call (takes long)
#   make doc         the Rust and Python API documentation, in target/doc
#   make wheel       the Python package as a wheel and an sdist, each checked in an environment without torch
#   make test-integrations    the real trainers over the engine, in an environment of their own
#   make test-torch TORCH=2.5.1    the Python tests on another PyTorch
#   make test-fresh  demo, check and test in a minimal Debian made on the spot, as a user and as root

SHELL := /bin/bash
CARGO ?= cargo
PYTHON3 ?= python3
TORCH ?= 2.13.0
VENV ?= .venv
FUZZ_SECONDS ?= 20
# How the Python extension is built: tests share what the Rust tests have compiled, measurements need it optimised.
EXTENSION_PROFILE ?= dev

# An interpreter that already has torch may be given; otherwise a virtual environment is made.
ifdef RESHARD_PYTHON
PY := $(RESHARD_PYTHON)
PY_READY :=
else
PY := $(CURDIR)/$(VENV)/bin/python
PY_READY := $(VENV)/.ready-$(TORCH)
endif
# Also where it was given as empty on the command line, which asks for an environment.
override export RESHARD_PYTHON := $(PY)

# The command speaks s3://, gs://, az:// and https:// as well.
CLI := -p reshard-cli --features reshard-cli/cloud

.PHONY: demo test test-rust test-mpi test-python test-integrations test-browser test-torch test-fresh test-faults check fmt clippy docs-check deps-check licences-check types-check python-check spelling-check portable-check bench bench-check bench-packages fuzz doc wheel build extension s3-server system-packages clean

# Without cloud clients, which outweigh all the rest; cargo shows what it compiles.
demo:
	$(CARGO) run --profile demo -p reshard-cli -- demo

build:
	$(CARGO) build --release $(CLI)

# ---- tests ----------------------------------------------------------------------------------------------------------

test: test-rust test-mpi test-python test-integrations test-browser

test-rust: $(PY_READY)
	$(CARGO) test --workspace --exclude reshard-python --features reshard-cli/cloud

test-mpi: system-packages
	scripts/test-mpi

test-python: extension s3-server
	RESHARD_S3_SERVER="$${CARGO_TARGET_DIR:-$(CURDIR)/target}/debug/examples/s3_server" $(PY) -m pytest -q python/tests --ignore=python/tests/integrations

# The real trainers, in an environment that builds on the first one.
INTEGRATIONS ?= .venv-integrations

test-integrations: extension
	scripts/test-integrations $(PY) $(INTEGRATIONS)

test-browser: system-packages $(PY_READY)
	scripts/test-browser

# README's commands in a Debian with nothing but what README names, as a user and as root (needs root; takes long).
test-fresh:
	scripts/test-fresh

# What `make test` runs at some requests and some system calls, at all of them. Needs strace, and says so where it is not there.
test-faults: extension
	RESHARD_CAMPAIGN=1 $(CARGO) test --workspace --exclude reshard-python --features reshard-cli/cloud --test it -- s3_faults read_faults matrix
	RESHARD_CAMPAIGN=1 $(PY) -m pytest -q -rs python/tests/test_syscalls.py python/tests/test_syscalls_saving.py python/tests/test_processes.py python/tests/test_hostile.py

test-torch:
	$(MAKE) test-python TORCH=$(TORCH) VENV=.venv-torch-$(TORCH) RESHARD_PYTHON=

# ---- what the tests need ----------------------------------------------------------------------------------------------

$(PY_READY): python/requirements-test.txt
	$(PYTHON3) -m venv $(VENV)
	rm -f $(VENV)/.ready-*
	$(VENV)/bin/python -m pip install --quiet --disable-pip-version-check -r python/requirements-test.txt torch==$(TORCH)
	touch $@

# The extension is built in place, so that tests run on what is in the tree.
extension: $(PY_READY)
	PROFILE=$(EXTENSION_PROFILE) PYO3_PYTHON=$(PY) scripts/build-extension

# A real S3 server on loopback, which tests of object stores talk to.
s3-server:
	$(CARGO) build --quiet -p reshard-storage --example s3_server --features reshard-storage/s3

# MPI and a browser, where the system's package manager can give them; tests that need them say so when they are absent.
system-packages:
	scripts/system-packages

# ---- checks -----------------------------------------------------------------------------------------------------------

check: fmt clippy docs-check deps-check licences-check types-check python-check spelling-check

fmt:
	$(CARGO) fmt --all --check

clippy: system-packages
	$(CARGO) clippy --workspace --all-targets --features reshard-cli/cloud$$(scripts/has-mpi && echo ,reshard/mpi) -- -D warnings

docs-check:
	RUSTDOCFLAGS="-D warnings" $(CARGO) doc --workspace --exclude reshard-python --no-deps --quiet

deps-check:
	scripts/check-dependencies

licences-check:
	scripts/check-licences

types-check: $(PY_READY)
	scripts/check-types

python-check: $(PY_READY)
	$(PY) -m ruff check --quiet
	$(PY) -m ruff format --check --quiet

# The wheel holds a program and no module.
spelling-check: $(PY_READY)
	"$$($(PY) -c 'import sysconfig; print(sysconfig.get_path("scripts"))')/typos"

# Library and command for macOS and Windows, as far as compiling goes; not part of `make check`, as it builds everything once more.
portable-check:
	scripts/check-portable

# ---- the rest -----------------------------------------------------------------------------------------------------------

bench bench-check: EXTENSION_PROFILE = release

bench: extension build bench-packages
	$(PY) bench/run.py

bench-check: extension build bench-packages
	$(PY) bench/run.py --check

# Plots, and PyTorch's way to an object store; without them rows say what is missing.
bench-packages: $(PY_READY)
	$(PY) -m pip install --quiet --disable-pip-version-check -r bench/requirements.txt || echo "note: no plots, and PyTorch is not measured on object stores"

fuzz:
	FUZZ_SECONDS=$(FUZZ_SECONDS) scripts/fuzz

# The wheel and the sdist, each installed into an empty environment, where package and command are used.
wheel: $(PY_READY)
	rm -rf target/wheels
	$(PY) -m maturin build --release --sdist --out target/wheels
	PYTHON3=$(PYTHON3) TORCH_PYTHON=$(PY) scripts/check-wheel target/wheels/*

# The Rust API, and the Python API from its docstrings; nothing is fetched.
doc: extension
	$(CARGO) doc --workspace --exclude reshard-python --no-deps
	$(PY) scripts/python-api "$${CARGO_TARGET_DIR:-target}/doc/python"

clean:
	$(CARGO) clean
	rm -rf .venv .venv-integrations .venv-torch-* demo-checkpoint

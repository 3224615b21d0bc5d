# `make` lists the targets. `make run` and `make test` set themselves up on a fresh machine.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
MAKEFLAGS += --no-print-directory

# The environment. VENV= (empty) takes the interpreter PYTHON as it is, with its own torch; only tfla_tk is installed.
VENV ?= .venv
PYTHON ?=
# More arguments for pip (an index, say), for the program behind a target, and for pytest's worker processes.
PIP_ARGS ?=
CONSTRAINTS ?= --constraint constraints.txt
ARGS ?=
WORKERS ?= 2
SANITIZER ?= memcheck
# What is measured, where this is no git checkout (make bench).
COMMIT ?=
# The results that README.md and docs/results.md show, and how a command adds to the results of its GPU.
RECORD := bench/results/h200.json
H100_RECORD := bench/results/h100_80gb_hbm3.json
ON_RECORD = --update-results $(if $(COMMIT),--commit $(COMMIT))

FIND_PYTHON = for candidate in $(PYTHON) python3 python3.13 python3.12 python3.11 python3.10; do \
	if "$$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null; then echo "$$candidate"; break; fi; \
	done

ifeq ($(strip $(VENV)),)
PY := $(shell command -v $(or $(PYTHON),python3))
STAMP := build/.installed$(subst /,-,$(PY))
DEV_STAMP := $(STAMP)
else
PY := $(VENV)/bin/python
STAMP := $(VENV)/.installed
DEV_STAMP := $(VENV)/.installed-dev
endif

.PHONY: help
help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-12s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))

.PHONY: run
run: $(STAMP) ## compare the backends side by side (ARGS="--help" for options)
	@$(PY) -m tfla_tk compare $(ARGS)

# on a CPU: what is tested is small
PYTEST = OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} $(PY) -m pytest -n $(WORKERS) --dist worksteal
.PHONY: test
test: $(STAMP) ## run the tests; those that need a Hopper GPU skip without one (ARGS="-k name")
	@echo "all tests: five to ten minutes on two cores without a GPU; make test-quick takes less than two"
	@$(PYTEST) $(ARGS)

.PHONY: test-quick
test-quick: $(STAMP) ## run one case of each test that needs no GPU and is short: less than two minutes
	@$(PYTEST) tests/cpu --quick $(ARGS)

# a build of torch for CUDA takes 5 GB; the interpreter of the triton beside the oldest one fails with numpy 2.4
OLDEST_TORCH = $(shell sed -n 's/^ *"torch>=\([0-9.]*\)",/\1/p' pyproject.toml)
TORCH_TESTS := tests/cpu/api tests/cpu/reference
.PHONY: matrix
matrix: ## run the tests that depend on torch with the oldest supported and the newest release, in build/torch-*
	@rm -f build/torch-newest/.installed
	@$(MAKE) test VENV=build/torch-oldest CONSTRAINTS= PIP_ARGS="$(PIP_ARGS) torch==$(OLDEST_TORCH).* 'numpy<2.4'" \
		ARGS="$(TORCH_TESTS) $(ARGS)"
	@$(MAKE) test VENV=build/torch-newest CONSTRAINTS= PIP_ARGS="$(PIP_ARGS) --upgrade torch" \
		ARGS="$(TORCH_TESTS) $(ARGS)"

.PHONY: kernels
kernels: $(STAMP) ## compile the kernels that auto takes into the cache (needs nvcc, no GPU; ARGS=--all: every one)
	@$(PY) -m tfla_tk build $(ARGS)

.PHONY: wheel
wheel: $(STAMP) ## a wheel with the kernels compiled, for this platform and CUDA, into dist (ARGS="--dtype bf16")
	@rm -rf build/compiled build/lib.*
	@$(PY) -m tfla_tk build --copy build/compiled $(ARGS)
	@TFLA_TK_COMPILED=build/compiled $(PY) -m pip wheel --quiet --no-deps $(PIP_ARGS) --wheel-dir dist .
	@ls -sh dist/*+cu*.whl

MLSTM := --op mlstm_exp,mlstm_sig
# a named package that serves nothing would end the command
FLASH_QLA = $(shell $(PY) -c "import importlib.util as u; print(',tilelang' * bool(u.find_spec('flash_qla')))")
.PHONY: bench
bench: $(STAMP) ## record the benchmarks of this GPU, the tables and the plots (ARGS="--op mlstm_exp")
	@$(PY) -m tfla_tk compare $(ON_RECORD) $(MLSTM) --pass fwd,fwdbwd --shapes main,sweep,heads,tiny $(ARGS)
	@$(PY) -m tfla_tk compare $(ON_RECORD) $(MLSTM) --pass fwd,fwdbwd --layout bsnd $(ARGS)
	@$(PY) -m tfla_tk compare $(ON_RECORD) $(MLSTM) --pass fwd,fwdbwd --dtype fp16 $(ARGS)
	@$(PY) -m tfla_tk compare $(ON_RECORD) $(MLSTM) --forget-bias 12 $(ARGS)
	@$(PY) -m tfla_tk compare $(ON_RECORD) $(MLSTM) --pass fwd,fwdbwd --shapes packed --backends tk $(ARGS)
	@[ -n "$(findstring --op,$(ARGS))" ] || $(PY) -m tfla_tk compare $(ON_RECORD) \
		--op simple_gla,retention,lightning --pass fwd,fwdbwd --shapes scalar,sweep --backends tk,triton $(ARGS)
	@[ -n "$(findstring --op,$(ARGS))" ] || $(PY) -m tfla_tk compare $(ON_RECORD) \
		--op gla --pass fwd,fwdbwd --shapes gla,sweep --backends tk,triton $(ARGS)
	@[ -n "$(findstring --op,$(ARGS))" ] || $(PY) -m tfla_tk compare $(ON_RECORD) \
		--op gated_delta_rule --pass fwd,fwdbwd --shapes delta,delta_host \
		--backends tk,triton$(FLASH_QLA) $(ARGS)
	@[ -n "$(findstring --op,$(ARGS))" ] || $(PY) -m tfla_tk compare $(ON_RECORD) \
		--op delta_rule --pass fwd,fwdbwd --shapes 8x8192x16x128x128,8x8192x16x128x256 --backends tk,triton $(ARGS)
	@$(PY) -m tfla_tk.bench ablation $(ON_RECORD)
	@$(PY) -m tfla_tk.bench step $(ON_RECORD) --dtype fp32
	@$(PY) -m tfla_tk.bench step $(ON_RECORD) --dtype bf16
	@$(PY) -m tfla_tk.bench step $(ON_RECORD) --op gated_delta_rule,gla,simple_gla,delta_rule,kda
	@$(PY) -m tfla_tk.bench generate $(ON_RECORD)
	@$(PY) -m tfla_tk build
	@$(PY) -m tfla_tk.bench model $(ON_RECORD)
	@[ ! -f $(RECORD) ] || $(MAKE) tables

.PHONY: tables
tables: $(STAMP) ## write README.md's figure and the tables of docs/results.md and docs/results-h100.md from what is on record
	@$(PY) -m tfla_tk.bench readme $(RECORD) README.md docs/results.md
	@$(PY) -m tfla_tk.bench readme $(H100_RECORD) docs/results-h100.md

.PHONY: api
api: $(STAMP) ## write docs/api.md from the docstrings
	@$(PY) -m tfla_tk.bench api docs/api.md

.PHONY: lint
# mypy sees the layout of the installed package: reference/ and bench/ below tfla_tk/
lint: $(DEV_STAMP) ## ruff, mypy and clang-format
	@$(PY) -m ruff check .
	@$(PY) -m ruff format --check .
	@rm -rf build/typing && mkdir -p build/typing && cp -rs "$(CURDIR)/tfla_tk" build/typing
	@for part in reference bench; do cp -rs "$(CURDIR)/$$part" build/typing/tfla_tk; done
	@cd build/typing && $(abspath $(PY)) -m mypy --config-file ../../pyproject.toml --package tfla_tk
	@find kernels -name '*.cu' -o -name '*.cuh' -o -name '*.cpp' -o -name '*.h' | \
		xargs --no-run-if-empty $(dir $(PY))clang-format --dry-run --Werror

.PHONY: sass
sass: $(STAMP) ## write cubin, SASS and ptxas log of every kernel to build/sass
	@$(PY) -m tfla_tk build --sass build/sass $(ARGS)

.PHONY: sass-summary
sass-summary: $(STAMP) ## run the compile gate on every kernel and record registers, wgmmas and waits
	@OMP_NUM_THREADS=1 $(PY) -m pytest -n $(WORKERS) --dist worksteal --quiet --write-sass-summary $(ARGS) \
		tests/cpu/kernels

.PHONY: compilers
compilers: $(STAMP) ## compile every kernel with the oldest and the newest nvcc 13 and by ptxas 12.8: docs/compilers.md
	@OMP_NUM_THREADS=1 $(PY) tests/compilers.py $(ARGS)

.PHONY: ncu
ncu: $(STAMP) ## profile the comparison with Nsight Compute into build/ncu (ARGS choose the shape)
	@mkdir -p build/ncu
	@ncu --set full --import-source yes --force-overwrite --export build/ncu/report $(PY) -m tfla_tk compare $(ARGS)

# racecheck needs a build of its own (kernels/common/sync.cuh); in the usual one it reports races that are none.
# Some kernels spill in that build, which is slower but no less right. PyTorch's kernels are not checked
ifeq ($(SANITIZER),racecheck)
SANITIZED_BUILD = TFLA_TK_PTXAS_GATE=off NVCC_APPEND_FLAGS="$${NVCC_APPEND_FLAGS:-} -DTFLA_EVERY_LANE_ARRIVES"
SANITIZED_KERNELS = --kernel-name kernel_substring=tfla
endif

.PHONY: sanitize
sanitize: $(STAMP) ## run the tests marked sanitize under compute-sanitizer (SANITIZER=racecheck, synccheck, ...)
	@$(SANITIZED_BUILD) compute-sanitizer --tool $(SANITIZER) $(SANITIZED_KERNELS) --error-exitcode 1 \
		$(PY) -m pytest -m sanitize $(ARGS)

.PHONY: clean
clean: ## remove build products and tool caches; .venv and the kernel cache stay
	@rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache
	@find . -name __pycache__ -not -path './.venv*' -prune -exec rm -rf {} +

$(STAMP): pyproject.toml constraints.txt
ifeq ($(strip $(VENV)),)
	@$(PY) -m pip install --quiet --no-deps --no-build-isolation $(PIP_ARGS) --editable .
	@mkdir -p $(@D)
else
	@python="$$($(FIND_PYTHON))"; \
	if [ -z "$$python" ]; then echo "tfla_tk needs Python 3.10 or newer: name one with PYTHON=..." >&2; exit 1; fi; \
	echo "setting up $(VENV) with $$("$$python" --version) (the first time PyTorch is downloaded)"; \
	"$$python" -m venv $(VENV) || \
		{ echo "$$python cannot make a virtual environment: install python3-venv, or name another PYTHON=..." >&2; exit 1; }
	@echo "installing tfla_tk, with what its tests take and the packages that it is compared with:"
	@$(PY) -m pip install $(PIP_ARGS) $(CONSTRAINTS) --editable '.[test,baselines,xlstm]'
endif
	@touch $@

ifneq ($(strip $(VENV)),)
$(DEV_STAMP): $(STAMP)
	@echo "installing ruff, mypy, clang-format and the like:"
	@$(PY) -m pip install $(PIP_ARGS) $(CONSTRAINTS) --editable '.[dev]'
	@touch $@
endif

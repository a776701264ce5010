# `make demo` and `make test` need nothing but Python: each makes .venv on its first run.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
WORKERS ?= auto
MINUTES ?= 25

export HF_HUB_OFFLINE = 1
export OMP_NUM_THREADS ?= 1

.PHONY: demo demo-kernels test smoke test-all test-kernels-versions lint docs bench bench-gpu bench-kernels release-kernels patterns models sweep test-gpu fuzz clean

demo: $(INSTALLED)
	$(BIN)/python examples/demo.py

demo-kernels: $(INSTALLED)
	$(BIN)/python examples/demo_kernels.py

test: $(INSTALLED)
	$(BIN)/python -m pytest -n $(WORKERS) --maxprocesses 8 -m "not slow" --durations 25 --durations-min 5

# a minute's worth: each part of forge once, a model at four sizes, two ops on every executor
SMOKE := tests/ir tests/clang tests/prims tests/test_golden.py tests/transforms tests/executors/test_claim.py \
  tests/executors/test_regions.py tests/capture/test_jit.py tests/capture/test_checks.py tests/cache/test_programs.py \
  tests/hub/test_registration.py tests/test_ops.py tests/test_ops_fused.py --op softmax --op nn.functional.linear \
  "tests/models/test_sizes.py::test_batches_and_lengths_may_change[llama-train]"
smoke: $(INSTALLED)
	$(BIN)/python -m pytest -n $(WORKERS) --maxprocesses 8 -m "not slow" $(SMOKE)

test-all: $(INSTALLED)
	$(BIN)/python -m pytest -n $(WORKERS) --maxprocesses 8

# every model of tests/models, in training, inference and generation
models: $(INSTALLED)
	$(BIN)/python -m pytest -n $(WORKERS) --maxprocesses 8 tests/models

# every entry of torch's operator database, held against eager; writes docs/reference/coverage.md
sweep: $(INSTALLED)
	$(BIN)/python -m tests.sweep --write docs/reference/coverage.md

# OpInfos, programs, attention and models in the default configuration on a GPU, against float64; goes on where it ended
test-gpu: $(INSTALLED)
	$(BIN)/python -m tests.gpu --minutes $(MINUTES) --write docs/reference/verification.md

# random programs in the default configuration against eager: make fuzz MINUTES=60 SEED=0
SEED ?= 0
fuzz: MINUTES = 60
fuzz: $(INSTALLED)
	$(BIN)/python -m tests.fuzz --minutes $(MINUTES) --seed $(SEED)

# downloads each version of the kernels library that pyproject.toml allows
test-kernels-versions: $(INSTALLED)
	$(BIN)/python -m tests.kernels_versions

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports
	$(BIN)/mypy

# the documentation as a site, in build/site
docs: $(INSTALLED)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

bench: $(INSTALLED)
	$(BIN)/python -m bench.zoo --device cpu --jobs 1 --minutes $(MINUTES)
	$(BIN)/python -m bench.overhead
	$(BIN)/python -m bench.processes
	$(BIN)/python -m bench.throughput --device cpu

# 24 models in parts: what `--minutes` ends goes on with the next `make bench-gpu`
bench-gpu: $(INSTALLED)
	$(BIN)/python -m bench.zoo --device cuda --minutes $(MINUTES) --png docs/images/zoo.png \
		--write docs/explanation/performance.md
	$(BIN)/python -m bench.alone

bench-kernels: $(INSTALLED)
	$(BIN)/python -m bench.kernels

release-kernels: $(INSTALLED)
	$(BIN)/python -c 'import sys; from forge.executors.hubex import builtin; sys.exit(not all(map(builtin.release, builtin.FOLDERS)))'

patterns: $(INSTALLED)
	$(BIN)/python -m bench.patterns

clean:
	rm -rf $(VENV) .pytest_cache .ruff_cache .import_linter_cache .hypothesis

$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("forge needs Python 3.11 or later; give one with make PYTHON=...")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[test,hub,docs]'
	touch $@

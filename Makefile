# Two commands do everything on a fresh machine: `make demo` and `make test`.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# The version that the tests are run with; where a CPU build is to be had, it must not bring the CUDA libraries.
TORCH ?= torch==2.13.0
# The versions of torch that `make versions` tests, each in a virtual environment of its own under VERSIONS_DIR: 5 GB where the builds have CUDA.
VERSIONS ?= 2.11.0 2.12.0 2.13.0 2.14.0 2.15.0
VERSIONS_DIR ?= .versions
# What a version of torch can break.
OF_VERSIONS := tests/gpu $(addprefix tests/unit/,api axes capture runtime integrations) \
	$(patsubst %,tests/distributed/test_%.py,law precision state_law schedules split_law random_samples)
# What NCCL could break; the rest sends nothing of its own, or tests how messages fail.
BY_NCCLS_RULES := $(patsubst %,tests/distributed/test_%.py,law schedules split split_law state_law replan precision sums sparse_gradients \
	bridges scattering overlap checkpoint_law split_checkpoint second_owners unlike_replicas perform)
# Two at a time, each file by one of them, for its tests share what they capture; the small files are the last.
SIDE_BY_SIDE := -n 2 --dist loadfile --no-loadscope-reorder
# What is compiled, the tests too, is kept for the next process.
export PYTHONDONTWRITEBYTECODE :=
# One thread for each of those that run side by side, as `.ci/run` has it.
test quick laws versions: export OMP_NUM_THREADS := 1
DEMO_RECIPE ?= strategies/recipes/pipeline_data_parallel.yaml

.PHONY: help demo test quick laws versions gpu lint types bench clean

help:
	@echo "make demo      train a byte-level GPT on 4 CPU ranks"
	@echo "make test      all tests"
	@echo "make quick     the unit tests that take no time"
	@echo "make laws      all tests, each law with many examples, drawn anew; those of what is sent also by the rules of NCCL"
	@echo "make versions  what torch can break, with each version of torch that is admitted (5 GB each with CUDA)"
	@echo "make gpu       what a machine with GPUs can prove, 40 minutes at most; PART=1 to 4 for 10 minutes of it"
	@echo "make lint      ruff"
	@echo "make types     mypy: the package, and with fewer checks the tests"
	@echo "make bench     benchmarks against torch, on the CPU"
	@echo "make clean     remove what these have made"

demo: $(VENV)/installed
	$(BIN)/whale run --ranks 4 --recipe $(DEMO_RECIPE) examples/train_gpt.py --steps 60 --evaluate-every 30 --checkpoint checkpoints/demo

test: $(VENV)/installed_tests
	$(BIN)/python -m pytest $(SIDE_BY_SIDE) tests

quick: $(VENV)/installed_tests
	$(BIN)/python -m pytest $(SIDE_BY_SIDE) -m "not slow" tests/unit

# More examples of each law than `.ci/run` tries, others each time; then by the rules of NCCL those of which `.ci/run` tries a few so.
laws: $(VENV)/installed_tests
	$(BIN)/python -m pytest $(SIDE_BY_SIDE) --hypothesis-profile thorough tests
	WHALE_TEST_NETWORK=strict $(BIN)/python -m pytest $(SIDE_BY_SIDE) $(BY_NCCLS_RULES)

# All of them, also where one fails.
versions: $(VERSIONS:%=$(VERSIONS_DIR)/%/installed)
	@failed=; for version in $(VERSIONS); do echo "== torch $$version"; \
		$(VERSIONS_DIR)/$$version/bin/python -m pytest $(SIDE_BY_SIDE) -m "not slow" $(OF_VERSIONS) || failed="$$failed $$version"; \
	done; test -z "$$failed" || { echo "failed with torch$$failed"; exit 1; }

$(VERSIONS_DIR)/%/installed: setup.cfg
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip install --quiet "torch==$*"
	$(@D)/bin/python -m pip install --quiet --config-settings editable_mode=compat -e ".[test]"
	touch $@

# With the packages that are there: images with CUDA have torch, and a network is not needed.
gpu:
	$(PYTHON) -m tests.gpu.prove $(if $(PART),--part $(PART))

lint: $(VENV)/installed_tests
	$(BIN)/python -m ruff check
	$(BIN)/python -m ruff format --check

types: $(VENV)/installed_tests
	$(BIN)/python -m mypy

bench: $(VENV)/installed
	$(BIN)/python examples/benchmarks/overhead.py
	$(BIN)/python examples/benchmarks/kernels.py
	$(BIN)/python examples/benchmarks/split.py
	$(BIN)/python examples/benchmarks/planning.py
	$(BIN)/python examples/benchmarks/prediction.py

$(VENV)/installed: setup.cfg pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet "$(TORCH)"
	$(BIN)/python -m pip install --quiet --config-settings editable_mode=compat -e .
	touch $@

$(VENV)/installed_tests: $(VENV)/installed
	$(BIN)/python -m pip install --quiet --config-settings editable_mode=compat -e ".[test]"
	touch $@

clean:
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis gpu_proofs

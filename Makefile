# `make demo` and `make test` need only Python 3.11; both create .venv when it is missing (scripts/setup_env.py).
# In an environment of your own (environment.yml): make test PY=python
PY := .venv/bin/python
PYTEST_ARGS ?=
# An engine's start keeps one core busy for most of its time, so two tests at once fill two.
WORKERS ?= 2

.PHONY: help setup demo reference test lint typecheck format traces gpu-check clean distclean

help:
	@echo "make demo       five backends at TP 2 on the CPU, table and figure at the end"
	@echo "make test       lint, types and the whole test set (PYTEST_ARGS='-m \"not engine and not slurm\"' for the quick part)"
	@echo "make reference  the reference results from a clean commit, over three hours on 2 cores (REFERENCE_ARGS=--list)"
	@echo "make setup      only create or repair .venv"
	@echo "make lint       ruff and mypy"
	@echo "make format     let ruff rewrite what it can"
	@echo "make gpu-check  kernels and layer step on a GPU, in any Python with PyTorch (PY=python3 OUT=folder)"
	@echo "make traces     say where the published request traces are, and check their hashes"
	@echo "make clean      remove caches; make distclean: .venv too"

setup:
ifneq ($(origin PY),command line)
	@sh scripts/setup.sh
endif

demo: setup
	$(PY) run.py experiment=tp_scaling tp=2 model=small measure=demo

REFERENCE_ARGS ?=

reference: setup
	$(PY) scripts/reference.py $(REFERENCE_ARGS)

lint: setup
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .

typecheck: setup
	$(PY) -m mypy

# pytest comes last, so that its closing line is the last line.
test: lint typecheck
	$(PY) -m pytest -n $(WORKERS) --durations=30 $(PYTEST_ARGS)

format: setup
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .

traces: setup
	$(PY) -m experiments.workload.traces

OUT ?= results/gpu_check

gpu-check:
	PYTHON=$(if $(filter command line,$(origin PY)),$(PY),python3) sh scripts/gpu_check.sh $(OUT) $(GPU_CHECK_ARGS)

clean:
	rm -rf .pytest_cache .ruff_cache .mypy_cache .hypothesis outputs multirun build *.egg-info
	find . -name __pycache__ -type d -not -path './.venv/*' -prune -exec rm -rf {} +

distclean: clean
	rm -rf .venv .cache

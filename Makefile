# Every target works on a machine with nothing but Python 3.10+, pip and venv: without an active virtual environment
# one is made in .venv. `make demo TORCH=torch==2.10.0` picks another torch.
PYTHON ?= $(shell for p in python3.11 python3 python3.12 python3.13 python3.10; do \
  $$p -c 'import sys, venv; sys.exit(sys.version_info < (3, 10))' 2>/dev/null && echo $$p && break; done)
TORCH ?= torch==2.13.0
# the version that benchmarks/static/kernels.txt was compiled with
TRITON ?= triton==3.9.0
ifdef VIRTUAL_ENV
VENV := $(VIRTUAL_ENV)
else
VENV := .venv
endif
PY := $(VENV)/bin/python
INSTALLED := $(VENV)/.afd-$(shell printf %s "$(CURDIR)" | cksum | cut -d ' ' -f 1)
PYTEST_ARGS ?=
WORKERS ?= 2

# Many processes share few cores in tests and the demo: one thread each is the fastest.
export OMP_NUM_THREADS ?= 1
export TOKENIZERS_PARALLELISM ?= false

.PHONY: help venv install demo test test-gpu lint format typecheck static-update model wheel-check matrix clean

help:
	@echo "make demo         three small models, one attention and two FFN processes each, checked against the whole model"
	@echo "make test         the CPU tests"
	@echo "make test-gpu     the tests that need a GPU"
	@echo "make lint         ruff check and ruff format --check;  make format rewrites"
	@echo "make typecheck    mypy"
	@echo "make static-update  write benchmarks/static/kernels.txt anew: what every kernel takes on every card"
	@echo "make model        search the exchange protocol with spin (needs spin and gcc: apt-get install -y spin gcc)"
	@echo "make wheel-check  build the wheel and try it beside torch and triton alone"
	@echo "make matrix       the CPU tests on the oldest and the newest supported versions, one environment each"

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

venv: $(VENV)/bin/python

$(INSTALLED): pyproject.toml | $(VENV)/bin/python
	$(PY) -m pip install --quiet $(TORCH) $(TRITON)
	$(PY) -m pip install --quiet --editable '.[transformers,dev]'
	@touch $@

install: $(INSTALLED)

demo: install
	$(PY) -m afd_runtime.demo

# The kernels run in Triton's interpreter, which is chosen for a whole process: a run of their own.
PYTEST = -m pytest -n $(WORKERS) --dist worksteal -ra $(PYTEST_ARGS)
define run-tests
@rc=0; \
set -x; \
$(1) $(PYTEST) tests --ignore=tests/gpu --ignore=tests/kernels || rc=1; \
TRITON_INTERPRET=1 $(1) $(PYTEST) tests/kernels || rc=1; \
exit $$rc
endef

test: install
	$(call run-tests,$(PY))

test-gpu: install
	AFD_FORBID_REFERENCE=1 $(PY) -m pytest tests/gpu tests/kernels -ra $(PYTEST_ARGS)

lint: install
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .

format: install
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .

typecheck: install
	$(PY) -m mypy

static-update: install
	$(PY) -m afd_runtime.cli bench static --update

model: $(VENV)/bin/python
	$(PY) models/check.py

wheel-check: install
	$(PY) -m pytest tests/test_packaging.py -ra $(PYTEST_ARGS)

# 2.10 is the oldest torch whose CUDA wheels go with triton 3.6.
MATRIX := oldest newest
matrix-oldest: TORCH = torch==2.10.0
matrix-oldest: TRITON = triton==3.6.0
matrix-newest: TORCH = torch
matrix-newest: TRITON = triton

matrix: $(MATRIX:%=matrix-%)
matrix-%: pyproject.toml
	$(PYTHON) -m venv .venv-$*
	.venv-$*/bin/python -m pip install --quiet $(TORCH) $(TRITON)
	.venv-$*/bin/python -m pip install --quiet --editable '.[transformers,dev]'
	$(call run-tests,.venv-$*/bin/python)

clean:
	rm -rf build dist demo .venv .venv-* *.egg-info .pytest_cache .mypy_cache .ruff_cache

# Two commands: `make demo` and `make test`.  Each makes a virtual environment in $(VENV), installs the package
# with what it needs, and runs.
#
#   make test PYTHON=python3.12             another interpreter
#   make test JAX=0.10.2 VENV=.venv-oldest  another JAX, in an environment of its own
#   make test AOT=1                         also what compiles for a GPU without having one
#   make demo JAX_EXTRA=cuda13              on a GPU

PYTHON ?= python3
VENV ?= .venv
JAX ?=
JAX_EXTRA ?=
AOT ?=
PYTEST_ARGS ?= -n 2
STEPS ?= 1500
OUTPUT ?= super_resolution.png
RUFF ?= 0.17.6

BIN = $(VENV)/bin
INSTALL = $(BIN)/python -m pip install --quiet --disable-pip-version-check --prefer-binary
JAX_REQUIREMENT = jax$(if $(JAX_EXTRA),[$(JAX_EXTRA)])$(if $(JAX),==$(JAX))

.PHONY: demo test lint clean

demo: $(BIN)/python
	$(INSTALL) '.[demo]' '$(JAX_REQUIREMENT)'
	$(BIN)/python examples/super_resolution.py --steps $(STEPS) --output $(OUTPUT)

# Editable, so that the sources in this folder and the built module are the same package to Python.  JAX reads
# the variable when it first looks for devices, which without a GPU must not stop it from loading the compiler.
test: $(BIN)/python
	$(INSTALL) --editable '.[test]' '$(JAX_REQUIREMENT)'
	$(if $(AOT),$(INSTALL) --no-deps $(foreach part,plugin pjrt,jax-cuda12-$(part)==$$($(BIN)/pip list | \
	    awk '$$1 == "jax" {print $$2}')))
	$(if $(AOT),JAX_SKIP_CUDA_CONSTRAINTS_CHECK=1) $(BIN)/python -m pytest $(PYTEST_ARGS)

lint: $(BIN)/python
	$(INSTALL) ruff==$(RUFF)
	$(BIN)/ruff check .

$(BIN)/python:
	$(PYTHON) -c 'import sys; assert sys.version_info >= (3, 11), "needs Python 3.11 or newer: make PYTHON=..."'
	$(PYTHON) -m venv $(VENV)

clean:
	rm -rf $(VENV) build

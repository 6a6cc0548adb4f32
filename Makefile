# `make demo` and `make test` set up all they need: a virtual environment in .venv with hop_tf and its dependencies.
#
#   make demo       four processes train scikit-learn's digits
#   make test       the test suite without its slow tests; TESTS=all runs those, too, TESTS=2/6 the second of six parts
#                   of them; PYTEST_ARGS="-k topology" selects by name
#   make stress     the multi-process tests, REPEAT times with other deaths; and the others with all their variants, more
#                   than 10,000 schedules on the virtual clock among them, SCHEDULES of each kind that is drawn
#   make report     measures all headlines beside other libraries, and writes docs/results.md: 30 minutes, while
#                   nothing else runs on the machine; make report-full: hours; make report-quick: minutes, and it
#                   fails if something is worse than on the page
#   make storm      what it costs if ranks are killed and stopped all the time; a quarter of an hour
#   make docs       the documentation, into build/docs; warnings are errors
#   make lint       ruff's checks and format, and plain English as far as a machine can tell
#   make dist       the source distribution and a wheel for most Linux systems, into dist; CXX chooses the compiler
#   make matrix     that wheel, with each Python, TensorFlow and Keras that is supported: hours
#   make bazel      builds everything and runs the tests with Bazel, offline; TESTS as above
#   make clean      removes the virtual environment and everything that was built
#
# PYTHON chooses the interpreter, for instance `make test PYTHON=python3.12`.

PYTHON ?= python3
PYTEST_ARGS ?=
TESTS ?= quick
REPEAT ?= 20
SCHEDULES ?= 1000
# Three files at a time, also on two cores: most tests wait now and then. In the order of tests/conftest.py.
# Without the last one, tests hang when a worker process dies.
PARALLEL := -n 3 --dist loadfile --no-loadscope-reorder --max-worker-restart=0
BAZEL ?= bazel

VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
PEERS := .venv-peers
PRINT_PEERS := "import tomllib as t; print(*t.load(open('pyproject.toml', 'rb'))['project']['optional-dependencies']['peers'])"

.PHONY: help demo test stress report report-full report-quick storm docs lint dist matrix bazel clean
.DELETE_ON_ERROR:

help:
	@sed -n '3,19s/^# \{0,1\}//p' Makefile

demo: $(INSTALLED)
	TF_CPP_MIN_LOG_LEVEL=1 $(BIN)/python -m hop_tf launch --num_workers=4 examples/digits.py

test: $(INSTALLED)
	HOP_TF_TESTS=$(TESTS) $(BIN)/pytest $(PARALLEL) $(PYTEST_ARGS)

stress: $(INSTALLED)
	for run in $$(seq $(REPEAT)); do \
		echo "run $$run of $(REPEAT)"; \
		HOP_TF_SCHEDULE_SEED=$$run $(BIN)/pytest -q $(PARALLEL) --durations=0 -m multi_process $(PYTEST_ARGS) || exit 1; \
	done
	HOP_TF_SCHEDULE_SEED=0 HOP_TF_NUM_SCHEDULES=$(SCHEDULES) \
		$(BIN)/pytest -q --timeout=7200 $(PARALLEL) -m "not multi_process" $(PYTEST_ARGS)

report: $(PEERS)/.installed
	$(PEERS)/bin/python benchmarks/report.py

report-full report-quick: report-%: $(PEERS)/.installed
	$(PEERS)/bin/python benchmarks/report.py --size=$*

storm: $(INSTALLED)
	$(BIN)/python benchmarks/benchmark_storm.py

docs: $(INSTALLED)
	$(BIN)/python -m pip install --quiet --editable '.[docs]'
	$(BIN)/sphinx-build -W --keep-going -q docs build/docs
	@echo "build/docs/index.html"

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python tests/english.py

# TensorFlow's library comes with TensorFlow, and is not to be packed into the wheel. Kernels for GPUs need a newer system
# than most: who wants them builds from the source distribution.
dist: $(INSTALLED)
	$(BIN)/python -m pip install --quiet --editable '.[release]'
	rm -rf dist
	HOP_TF_CUDA=0 HOP_TF_REQUIRE_NATIVE=1 $(BIN)/python -m build --outdir dist
	PATH="$(abspath $(BIN)):$$PATH" $(BIN)/auditwheel repair --exclude libtensorflow_framework.so.2 --wheel-dir dist dist/*-linux_*.whl
	rm dist/*-linux_*.whl

matrix: dist
	$(BIN)/nox

# Debian packages a Bazel that needs no download. The first command installs it where that is possible.
bazel: $(INSTALLED)
	@command -v $(BAZEL) > /dev/null || { [ "$$(id -u)" = 0 ] && apt-get update && apt-get install -y bazel-bootstrap; } || \
		{ echo "Bazel is missing. On Debian, as root: apt-get install bazel-bootstrap" >&2; exit 1; }
	HOP_TF_PYTHON=$(abspath $(BIN)/python) $(BAZEL) build //...
	HOP_TF_PYTHON=$(abspath $(BIN)/python) $(BAZEL) test --test_env=HOP_TF_TESTS=$(TESTS) //...

clean:
	rm -rf $(VENV) $(PEERS) build dist *.egg-info .nox .pytest_cache .ruff_cache .hypothesis
	rm -f ops/*.so bazel-bin bazel-out bazel-testlogs bazel-$(notdir $(CURDIR))
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# Other libraries have an environment of their own. PyTorch's triton does not load beside TensorFlow.
$(PEERS)/.installed: $(INSTALLED)
	$(BIN)/python -m venv $(PEERS)
	$(PEERS)/bin/python -m pip install --quiet --editable '.[cpu,examples,benchmarks]'
	for package in $$($(BIN)/python -c $(PRINT_PEERS)); do \
		$(PEERS)/bin/python -m pip install --quiet "$$package" || echo "$$package is left out; remove $(PEERS) to try again" >&2; done
	$(PEERS)/bin/python -m pip uninstall --quiet --yes triton
	touch $@

$(INSTALLED): pyproject.toml setup.py $(wildcard ops/*/*.cc ops/*/*.cu ops/*/*.cuh ops/*/*.h ops/*/*.options)
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 14))' || \
		{ echo "hop_tf needs Python 3.11, 3.12 or 3.13. Name one: make PYTHON=python3.12" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' || \
		{ echo "$(PYTHON) cannot make virtual environments. On Debian, as root: apt-get install python3-venv" >&2; exit 1; }
	@echo "Installing hop_tf and its dependencies into $(VENV): a minute or two, about 2 GB"
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --editable '.[cpu,test,examples]'
	touch $@

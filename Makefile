# Each target sets itself up: it needs Python 3.10+ and make, nothing else.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# Half of the time of an installation goes into compiling modules, most of which are never imported: Python does it, and
# keeps it, at the first import. What torch.compile and the tests import takes some 15 seconds to compile: the installation does
# it, once, where each of the processes that run tests would.
PIP := $(BIN)/python -m pip --disable-pip-version-check
unexport PYTHONDONTWRITEBYTECODE
EXTRAS := test,bench,demo,lint,peer
# The framework whose losses this package replaces, a peer in benchmarks too, and two trainers of draft models: the tests that
# hold ours to theirs are skipped without them. Alone, because their own requirements bring in packages that none of this needs.
# trl.trainer needs pandas, pyarrow, datasets, dill, multiprocess and xxhash besides: without them, what runs in TRL's own
# trainers is skipped.
HOSTS := nemo-automodel==0.7.0 specforge==0.2.0 speculators==0.9.0 peft==0.21.2 trl==1.16.0
STAMP := $(VENV)/.installed
DOCS_STAMP := $(VENV)/.docs
ARGS ?=

.PHONY: help test test-exhaustive test-variation demo lint types bench-smoke docs checks dist mutants ci clean
help:
	@echo "make test            before each commit, in minutes: install into $(VENV), the tests, of large products of cases a part"
	@echo "make ci              everything: all that is below but the demo and the mutants"
	@echo "make test-exhaustive  what that leaves out of large products of cases, and every kernel compiled for every GPU"
	@echo "make demo            train a small diffusion LM on real text, reference loss beside ours  (ARGS='--mode block')"
	@echo "make test-variation  the same as an older processor would run them"
	@echo "make lint types      ruff; mypy --strict"
	@echo "make bench-smoke     every benchmark at toy size"
	@echo "make docs            the pages of docs as a site in site/; a broken link or a missing docstring is an error"
	@echo "make checks          lint, types, bench-smoke and docs, two at a time"
	@echo "make dist            what a release holds, built and checked, in dist/"
	@echo "make mutants         break the package in 220 places, one at a time, and list what no test noticed (ARGS='--only collate.py')"

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { echo "Python 3.10 or newer is needed; set PYTHON="; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) install --quiet --no-compile --constraint constraints.txt --editable '.[$(EXTRAS)]'
	for host in $(HOSTS); do \
		$(PIP) install --quiet --no-compile --no-deps $$host || echo "$$host could not be installed: its tests will be skipped"; \
	done
	$(BIN)/python -c 'import torch._inductor.compile_fx'
	$(BIN)/python -W ignore -c 'import hypothesis.strategies, tests.support.distributed_workers, tests.support.trainer_ranks' || true  # peers are optional
	touch $@

test: $(STAMP)
	$(BIN)/python -m pytest -n auto -m "not exhaustive" $(ARGS)

test-exhaustive: $(STAMP)
	$(BIN)/python -m pytest -n auto -m exhaustive $(ARGS)

# What `make test` leaves out, which so runs once in all: on a machine of today everything else has run.
test-variation: export ATEN_CPU_CAPABILITY = default
test-variation: export MKL_CBWR = COMPATIBLE
test-variation: export OMP_NUM_THREADS = 1
test-variation: $(STAMP)
	$(BIN)/python -m pytest -n auto -m exhaustive $(ARGS)

demo: $(STAMP)
	$(BIN)/python -m benchmarks train $(ARGS)

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(STAMP)
	$(BIN)/mypy

bench-smoke: $(STAMP)
	$(BIN)/python -m benchmarks smoke
	$(BIN)/python -m pytest benchmarks --benchmark-only -p no:cacheprovider -q

$(DOCS_STAMP): $(STAMP)
	$(PIP) install --quiet --no-compile --constraint constraints.txt --editable '.[docs]'
	touch $@

docs: export NO_MKDOCS_2_WARNING = 1
docs: $(DOCS_STAMP)
	$(BIN)/mkdocs build --quiet --strict $(ARGS)

dist: $(STAMP)
	rm -rf dist
	$(BIN)/python -m build --outdir dist
	$(BIN)/python -m twine check --strict dist/*

mutants: $(STAMP)
	$(BIN)/python -m tools.mutants $(ARGS)

# What needs one core each, two at a time; their packages are there before the first of them starts.
checks: $(DOCS_STAMP)
	$(MAKE) --jobs=2 $(if $(filter output-sync,$(.FEATURES)),--output-sync=target) bench-smoke types docs lint

ci: test test-variation checks

clean:
	rm -rf $(VENV) build dist site demo-out .pytest_cache .mypy_cache .ruff_cache .hypothesis mutants.jsonl

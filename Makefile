# Every target installs its requirements first. You only need Python 3.10+ and make.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# Compiling all modules to bytecode would take half of the installation time, although most modules are never imported.
# Python compiles and caches a module at its first import. The modules that torch.compile and the tests import take some
# 15 seconds to compile. The installation imports them once, because otherwise every test process would compile them.
PIP := $(BIN)/python -m pip --disable-pip-version-check
unexport PYTHONDONTWRITEBYTECODE
EXTRAS := test,bench,demo,lint,peer,docs
# Frameworks and trainers that the tests compare with; nemo-automodel is also a peer in benchmarks. Tests that need a
# missing one are skipped. They are installed with --no-deps, because the tests need few of their requirements. trl.trainer
# also imports pandas, pyarrow, datasets, dill, multiprocess and xxhash. Without these, the tests that run TRL's trainers
# are skipped.
HOSTS := nemo-automodel==0.7.0 specforge==0.2.0 speculators==0.9.0 peft==0.21.2 trl==1.16.0
STAMP := $(VENV)/.installed
DOCS_STAMP := $(VENV)/.docs
ARGS ?=

.PHONY: help test test-exhaustive test-variation test-every-case kernel ptx demo lint types bench-smoke bench-subjects bench-tests docs checks dist mutants ci clean
help:
	@echo "make test             everyday half of the tests, for each commit: 3 minutes after installing into $(VENV)"
	@echo "make ci               everything that CI runs: test, test-variation, ptx and checks"
	@echo "make test-exhaustive  the other half of the tests: remaining cases, every kernel compiled for two GPUs"
	@echo "make test-variation   test-exhaustive with one thread and the instructions of an older processor"
	@echo "make test-every-case  both halves, and the cases that they omit because others contain them"
	@echo "make kernel           the checks of one file of kernels or of one op, in a minute  (K=row_stats)"
	@echo "make ptx              execute the compiled kernels in the tests, on arrays of all threads (no GPU)"
	@echo "make demo             train a small diffusion LM on real text, plain loss and ours  (ARGS='--mode block')"
	@echo "make lint types       ruff; mypy --strict"
	@echo "make bench-smoke      run every benchmark at toy size"
	@echo "make docs             build docs/ as a site in site/; broken links and missing docstrings are errors"
	@echo "make checks           lint, types, bench-smoke and docs, two at a time"
	@echo "make dist             build and check the release files in dist/"
	@echo "make mutants          break the package in 220 places, one at a time, and list the changes that no test"
	@echo "                      detected  (ARGS='--only collate.py')"
	@echo "make clean            delete $(VENV) and all generated files"

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { echo "Python 3.10 or newer is needed; set PYTHON="; exit 1; }
	$(PYTHON) -m venv --upgrade-deps $(VENV)  # current pip reads the index in half the time of Python 3.11's

$(STAMP): pyproject.toml constraints.txt | $(BIN)/python
	$(PIP) install --quiet --no-compile --constraint constraints.txt --editable '.[$(EXTRAS)]'
	$(BIN)/python -c 'import torch._inductor.compile_fx' & \
	for host in $(HOSTS); do \
		$(PIP) install --quiet --no-compile --no-deps $$host || echo "$$host could not be installed: its tests will be skipped"; \
	done; \
	$(BIN)/python -W ignore -c 'import hypothesis.strategies, tests.support.distributed_workers, tests.support.trainer_ranks' || true; \
	wait $$!  # the import of torch; the other imports need optional peers
	touch $@ $(DOCS_STAMP)

test: $(STAMP)
	$(BIN)/python -m pytest -n auto -m "not exhaustive" $(ARGS)

test-exhaustive: $(STAMP)
	$(BIN)/python -m pytest -n auto --dist loadgroup -m exhaustive $(ARGS)

# The exhaustive half, as an older processor runs it. CI runs this half only in this variation.
test-variation: export ATEN_CPU_CAPABILITY = default
test-variation: export MKL_CBWR = COMPATIBLE
test-variation: export OMP_NUM_THREADS = 1
test-variation: $(STAMP)
	$(BIN)/python -m pytest -n auto --dist loadgroup -m exhaustive $(ARGS)

test-every-case: $(STAMP)
	$(BIN)/python -m pytest -n auto --dist loadgroup --every-case $(ARGS)

kernel: $(STAMP)
	$(BIN)/python -W ignore -m tests.support.one_kernel $(K)

ptx: export OMP_NUM_THREADS = 1
ptx: $(STAMP)
	$(BIN)/python -m tools.ptx $(ARGS)

demo: $(STAMP)
	$(BIN)/python -m benchmarks train $(ARGS)

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(STAMP)
	$(BIN)/mypy

bench-smoke: bench-subjects bench-tests

bench-subjects: $(STAMP)
	$(BIN)/python -m benchmarks smoke

bench-tests: $(STAMP)
	$(BIN)/python -m pytest benchmarks --benchmark-only -p no:cacheprovider -q

# The site alone needs only the package and its own extra, not the requirements of the tests.
$(DOCS_STAMP): pyproject.toml constraints.txt | $(BIN)/python
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

# Each of these needs one core, so two run at a time. Their packages are installed before the first one starts.
checks: $(STAMP)
	$(MAKE) --jobs=2 $(if $(filter output-sync,$(.FEATURES)),--output-sync=target) bench-subjects types docs bench-tests lint

ci: test test-variation ptx checks

clean:
	rm -rf $(VENV) build dist site demo-out .pytest_cache .mypy_cache .ruff_cache .hypothesis mutants*.jsonl

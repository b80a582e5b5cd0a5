# make demo    4 ranks under mpirun on real MoE activations, in each wire format
# make test    the test suite          make lint    ruff, mypy, codespell, clang-format
# make venv    set up .venv alone      make clean   remove what make made
#
# PYTHON=python3.12 chooses the interpreter (>= 3.10), RANKS=2 the ranks of the demo, JOBS=1 the tests
# that run side by side, ARGS=... adds options to the demo or to pytest.  Each of demo, test and lint
# installs into .venv what it needs, once.

PYTHON ?= python3
RANKS ?= 4
JOBS ?= 2
ARGS ?=
VENV := .venv
BIN := $(VENV)/bin

# mpirun refuses to run as root unless told twice; ranks may share cores, and each may use all.
MPIRUN := OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 \
    $(BIN)/mpirun --oversubscribe --bind-to none

.PHONY: demo test lint venv clean

demo: $(VENV)/installed
	@test "$(RANKS)" -ge 1 || { echo 'RANKS: expected at least 1, got $(RANKS)' >&2; exit 2; }
	$(MPIRUN) -n $(RANKS) $(BIN)/fp4comm demo $(ARGS)

test: $(VENV)/installed-test
	$(BIN)/python -m pytest -n $(JOBS) --dist worksteal $(ARGS)

lint: $(VENV)/installed-lint
	! git grep -nE '^(<{7}|>{7}) '  # what a merge left open
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/codespell
	$(BIN)/clang-format --dry-run -Werror cuda/*.cu cuda/*.cuh tests/*.cpp tests/*.h

venv: $(VENV)/installed

# Each stamp is renewed when what it was installed from has changed; a larger set-up holds the smaller.
$(VENV)/installed: extras := mpi
$(VENV)/installed-test: extras := mpi,test
$(VENV)/installed-lint: extras := mpi,test,lint
$(VENV)/installed-test: smaller := $(VENV)/installed
$(VENV)/installed-lint: smaller := $(VENV)/installed $(VENV)/installed-test
$(VENV)/installed $(VENV)/installed-test $(VENV)/installed-lint: $(BIN)/python pyproject.toml constraints.txt
	@echo 'Installing fp4comm[$(extras)] into $(VENV); the first time this downloads PyTorch.'
	$(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt -e '.[$(extras)]'
	@touch $(smaller) $@

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { \
	    echo 'fp4comm needs Python 3.10 or newer; choose one with: make PYTHON=python3.12' >&2; \
	    exit 1; }
	$(PYTHON) -m venv $(VENV) || { rm -f $(BIN)/python; exit 1; }

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache
	find fp4comm tests benchmarks -name __pycache__ -prune -exec rm -rf {} + 2>/dev/null || true

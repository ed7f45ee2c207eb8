# make train    set up .venv, prepare the standard library, train on it for 2.5 minutes, draw the loss, write samples
# make test     the same set-up, then ruff, mypy and the tests that need no GPU, a file to a core at a time
# make test-all the same, then the slow tests: whole grids, compilers for GPUs, Chromium, the lab, trainings, kills
# make mutants  plant wrong lines in a copy, one at a time, and see which test notices
#
# PYTHON chooses the interpreter (3.11 to 3.13). ARGS goes to train.py: make train ARGS="steps=100 attention=naive"

PYTHON ?= python3
BIN := .venv/bin

.PHONY: train test test-all mutants browser clean

train: .venv/installed
	$(BIN)/python train.py $(ARGS)

OTHERS := .venv/triton-3.6.0 .venv/triton-3.9.0
PYTEST := $(BIN)/python -m pytest -n auto --maxprocesses 4 --dist loadfile --no-loadscope-reorder
test: .venv/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(PYTEST) -m "not slow"

test-all: test browser $(OTHERS)
	$(PYTEST) -m slow

mutants: .venv/installed
	$(BIN)/python -m tests.mutants $(ARGS)

# The explorer's tests drive Chromium. Where this may install packages (root on Debian or Ubuntu, as in CI), it does.
APT := timeout 300 apt-get -qq -o Acquire::Retries=0 -o Acquire::http::Timeout=20
browser:
	@command -v chromedriver >/dev/null || { [ "$$(id -u)" = 0 ] && $(APT) update && \
		$(APT) install -y --no-install-recommends chromium chromium-driver; } >/dev/null 2>&1 || \
		echo "no Chromium here: the explorer's tests will be skipped; apt-get install chromium chromium-driver has it"

# The Triton with which the figures in docs were measured, and the newest. The kernels must compile with them too.
$(OTHERS): | .venv/installed
	@rm -rf $@.new
	@$(BIN)/python -m pip install -q --disable-pip-version-check --no-deps --target $@.new triton==$(@:.venv/triton-%=%) \
		&& mv $@.new $@ || echo "$(@F) could not be installed: the test that compiles with it will be skipped"

# Made anew only when requirements.txt changes. The stamp comes last, so an installation cut short is begun again.
.venv/installed: requirements.txt
	@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; sys.exit(None if (3, 11) <= v < (3, 14) else "Python %d.%d cannot run this; use 3.11 to 3.13, for example: make PYTHON=python3.12 train" % v)'
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements.txt
	@touch $@

clean: # removes what set-up made; runs and data stay
	rm -rf .venv .pytest_cache .ruff_cache .mypy_cache

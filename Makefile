# Two commands do it all: `make run` and `make test`. Both make the virtual environment first.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed

.PHONY: install run test check bench lock clean

install: $(STAMP)

$(STAMP): requirements.lock pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit("weatherglass needs Python 3.11 or newer, found %s: set PYTHON=/path/to/python3.11" % sys.version.split()[0] if sys.version_info < (3, 11) else 0)'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --require-hashes -r requirements.lock
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --editable .
	touch $(STAMP)

run: install
	$(BIN)/weatherglass run

test: install check
	$(BIN)/python -m pytest -n auto --durations=25

check: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/ty check --error-on-warning

bench: install
	$(BIN)/python -m benchmarks

# Hashes pin each file; no index address is recorded.
lock:
	UV_CUSTOM_COMPILE_COMMAND="make lock" uv pip compile --universal --generate-hashes --no-strip-extras --no-emit-index-url --extra dev pyproject.toml -o requirements.lock --upgrade

clean:
	rm -rf $(VENV) build dist *.egg-info

# Every target sets up what it needs in .venv by itself; nothing outside this folder is touched.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: quickstart test check bench results reproduce page clean

quickstart: $(VENV)/ready  ## train PRISM and the baseline on copying, a minute
	$(BIN)/prism quickstart

test: $(VENV)/ready  ## the whole suite
	$(BIN)/python -m pytest -n auto --dist loadgroup

check: $(VENV)/ready  ## style and types
	$(BIN)/ruff check .
	$(BIN)/mypy

bench: $(VENV)/ready  ## what this machine does: scans, steps, evaluations, generation
	$(BIN)/prism bench

SEEDS := 0 1 2

results: $(VENV)/ready  ## the README's numbers and figure: the quickstart on three seeds, four minutes
	mkdir -p results/laptop/copy-10
	for seed in $(SEEDS); do \
		$(BIN)/prism quickstart --seed $$seed || exit 1; \
		cp runs/quickstart/prism-seed$$seed/result.json results/laptop/copy-10/local-seed$$seed.json; \
		cp runs/quickstart/sinusoidal-seed$$seed/result.json results/laptop/copy-10/sinusoidal-seed$$seed.json; \
	done
	$(BIN)/prism figures results/laptop/copy-10/local-seed?.json results/laptop/copy-10/sinusoidal-seed?.json \
		--out results/figures

reproduce: $(VENV)/ready  ## train what is missing of the matrix for an hour, then draw it all
	$(BIN)/prism reproduce --minutes 60
	$(BIN)/prism reproduce --figures

page:  ## build the viewer's page from prism/view/web; needs node
	cd prism/view/web && npm ci && npm run build

# On a machine with an NVIDIA GPU the newest torch is right; without one, the tested small CPU set.
$(VENV)/ready: pyproject.toml constraints/cpu.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "PRISM needs Python 3.11 or newer; name one with: make PYTHON=python3.12 ..." >&2; exit 2; }
	$(PYTHON) -m venv $(VENV)
	@if command -v nvidia-smi >/dev/null 2>&1; then constraints=""; else constraints="--constraint constraints/cpu.txt"; fi; \
		echo "setting up $(VENV) $$constraints"; \
		$(BIN)/python -m pip install --quiet --disable-pip-version-check $$constraints --editable '.[dev]'
	@touch $@

clean:  ## remove the environment and caches; runs and results stay
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis

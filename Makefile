# Every target sets up what it needs in .venv by itself; nothing outside this folder is touched.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: quickstart test check bench results ablations clean

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
	for seed in $(SEEDS); do $(BIN)/prism quickstart --seed $$seed || exit 1; done
	mkdir -p results/quickstart
	for run in runs/quickstart/*-seed?; do cp $$run/result.json results/quickstart/$$(basename $$run).json; done
	$(BIN)/prism figures results/quickstart/*.json --out results/figures

# One change each to the quick preset on copying; LOG.md reads them.
CHANGE_gru := --positions.gates gru
CHANGE_gamma2 := --positions.gamma-start 2
CHANGE_reset-half := --positions.reset-start 0.5
CHANGE_rate1e-3 := --optimizer.rate 1e-3
CHANGE_shifts := --encoding sinusoidal --positions.shift 400
CHANGES := gru gamma2 reset-half rate1e-3 shifts

ablations: $(foreach change,$(CHANGES),$(foreach seed,$(SEEDS),results/quick-ablations/$(change)-seed$(seed).json))

results/quick-ablations/%.json: | $(VENV)/ready
	$(BIN)/prism train copy --seed $(lastword $(subst -seed, ,$*)) $(CHANGE_$(firstword $(subst -seed, ,$*))) \
		--evaluation.lengths 10 20 50 100 200 --evaluation.examples 20 --out runs/quick-ablations/$*
	mkdir -p $(@D) && cp runs/quick-ablations/$*/result.json $@

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

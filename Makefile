# make demo · make test · make cases CASES=DIR [SMOLLM2=FILE] · make bench · make lint
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
OUT ?= demo-out
INSTALLED := $(VENV)/.installed

.PHONY: demo test cases bench lint install clean
.DEFAULT_GOAL := help

help:
	@echo "make demo     train softmax, linear and Mamba models, find their induction heads, write $(OUT)/report.html"
	@echo "make test     run every test"
	@echo "make cases CASES=DIR [SMOLLM2=FILE.gguf]   check against a folder of case files"
	@echo "make bench    CPU benchmarks, side by side with Hugging Face and TransformerLens"
	@echo "make lint     ruff"

install: $(INSTALLED)

$(INSTALLED): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(0 if v >= (3, 11) else "beyond-softmax needs Python 3.11 or newer, this is %d.%d; set PYTHON=" % v[:2])'
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "Installing into $(VENV) (several minutes the first time) ..."
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt setuptools wheel
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt torch
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt --no-build-isolation -e '.[full,test]'
	@touch $@

demo: $(INSTALLED)
	@$(BIN)/python -m experiments.demo --out $(OUT)

# Two workers of one thread each fill two cores and keep the results those of one thread.
test: $(INSTALLED)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadgroup

cases: $(INSTALLED)
	@test -n "$(CASES)" || { echo "usage: make cases CASES=DIR [SMOLLM2=FILE.gguf]"; exit 2; }
	@$(BIN)/python -m experiments.cases "$(CASES)" $(if $(SMOLLM2),--smollm2 "$(SMOLLM2)")

bench: $(INSTALLED)
	@$(BIN)/python -m experiments.benchmarks

lint: $(INSTALLED)
	@$(BIN)/ruff check .

clean:
	rm -rf $(OUT)

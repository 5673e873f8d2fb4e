# All targets work in .venv. You can use its `quire` and `pip` directly.
BIN := .venv/bin
SHELL := bash
export PATH := $(CURDIR)/$(BIN):$(PATH)
# Lets the editable install rebuild itself when .venv is not activated.
export CYTHON := $(CURDIR)/$(BIN)/cython
# For this Python only: modules for the stable ABI are those of wheels.
INSTALL_PLAIN := $(BIN)/pip install --disable-pip-version-check --no-build-isolation \
  -Csetup-args=-Dstable_abi=false -Csetup-args=-Dpython.allow_limited_api=false
# The level amx-twin runs the code of the amx level on any AVX-512 machine. It is for tests and never chosen by default.
INSTALL := $(INSTALL_PLAIN) -Csetup-args=-Damx_twin=true --editable
DEV := .venv/dev

demo: $(BIN)/quire
	$(BIN)/quire demo

loadtest: $(DEV)
	$(BIN)/quire loadtest --num-prompts 200 --random-input-len 128 --random-output-len 64 --request-rate 20 --report loadtest.html

dashboard: $(BIN)/quire
	deploy/local.sh

# An editable install compiles every module at each start, unless there are compiled files: 0.17 s of CPU per process.
compiled: $(DEV)
	@$(BIN)/python -m compileall -q -x /demo_ kernels pager scheduler runtime

# Bytecode is written whatever the environment says: pytest rewrites 400 modules in 13 s, and reads them in none.
test: compiled
	PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest --numprocesses 2 --dist worksteal

# The tests that `make test` runs with each pair of parameters, with all combinations.
grids: compiled
	QUIRE_GRIDS=full $(BIN)/python -m pytest --numprocesses 2 --dist worksteal tests/kernels tests/system/test_same_bits_of_families.py

test-ray: $(DEV)
	$(INSTALL) '.[ray]' --quiet
	$(BIN)/python -m pytest -m ray tests/ray

docs: $(DEV)
	$(BIN)/python -m sphinx -W --keep-going -q -b html docs build/docs

check-kernels: $(DEV)
	tests/kernels/check.sh

check-bits: $(DEV)
	$(BIN)/python -m tests.kernels.random_bits $(BITS)
	$(BIN)/python -m tests.system.random_states $(BITS)

check-drafts: $(DEV)
	$(BIN)/python tests/fuzz/check_drafts.py $(DRAFTS)

attack: $(DEV)
	$(BIN)/python tests/fuzz/attack.py $(ATTACK)

attack-http: $(DEV)
	$(BIN)/python tests/fuzz/hostile_http.py $(ATTACK)

kill-servers: compiled
	$(BIN)/python tests/fuzz/kill_servers.py $(KILL)

kill-batches: compiled
	$(BIN)/python tests/fuzz/kill_batches.py $(KILL)

switch-models: compiled
	$(BIN)/python tests/fuzz/switch_models.py $(SWITCH)

kill-at-shutdown: compiled
	$(BIN)/python tests/fuzz/kill_at_shutdown.py $(KILL)

swap-adapters: compiled
	$(BIN)/python -m tests.fuzz.swap_adapters $(SWAP)

fuzz-files: $(DEV)
	$(BIN)/python tests/fuzz/fuzz_files.py $(FUZZ)

check-encoders: $(DEV)
	$(BIN)/python tests/fuzz/random_encoders.py
	$(BIN)/python tests/fuzz/fuzz_encoders.py

check-plan: $(DEV)
	$(BIN)/python -m tests.bench.plan_memory $(PLAN)

fuzz-text-files: $(DEV)
	$(BIN)/python tests/fuzz/fuzz_text_files.py $(FUZZ)

terminate-text-files: compiled
	$(BIN)/python tests/fuzz/terminate_text_files.py $(TERMINATE)

fuzz-images: $(DEV)
	$(BIN)/python tests/fuzz/fuzz_images.py $(FUZZ)

fuzz-grammars: $(DEV)
	$(BIN)/python tests/fuzz/fuzz_grammars.py $(FUZZ)

check-structured: $(DEV)
	$(INSTALL) '.[bench]' --quiet
	$(BIN)/python -m tests.fuzz.parser_divisions
	$(BIN)/python tests/fuzz/structured_generations.py $(GENERATIONS)

check-schemas: $(DEV)
	$(INSTALL) '.[bench]' --quiet
	$(BIN)/python -m tests.fuzz.schema_corpus $(or $(SCHEMAS),1000)

kill-hosts: compiled
	$(BIN)/python tests/fuzz/kill_hosts.py $(KILLS)

kill-nodes: compiled
	$(INSTALL) '.[ray]' --quiet
	$(BIN)/python -m tests.ray.kill_nodes $(KILLS)

fuzz-link: $(DEV)
	$(BIN)/python tests/fuzz/fuzz_link.py $(FUZZ)

bench: $(DEV)
	$(INSTALL) '.[bench]' --quiet
	$(BIN)/python -m pytest -q tests/bench/bench_ops.py $(BENCH)

# The first thing to run on a new machine: at most ten minutes. MACHINE="--json" prints JSON.
bench-machine: $(BIN)/quire
	$(BIN)/quire bench --machine $(MACHINE)

# The image installs the wheel in dist/.
IMAGE ?= quire
image:
	docker build --file deploy/Containerfile --tag $(IMAGE) .

push-image: image
	docker push $(IMAGE)

# A release, step by step; dist/ has the results. Needs GCC, and no .venv. `make wheels` takes five minutes.
sdist:
	python3 deploy/release.py sdist

wheels: sdist
	python3 deploy/release.py wheels

check-wheels:
	python3 deploy/release.py check

try-wheels:
	python3 deploy/release.py try $(TRY)

checksums:
	python3 deploy/release.py checksums

conformance: $(DEV)
	cd deploy/clients/node && npm install --no-audit --no-fund --omit=optional --ignore-scripts
	$(BIN)/python tests/conformance/run.py python
	$(BIN)/python tests/conformance/run.py node

# The packages go to build/clients, where each client has its own versions, and to deploy/clients/ai-sdk/node_modules.
clients: $(DEV)
	for name in langchain litellm; do python3 -m venv build/clients/$$name && \
	  build/clients/$$name/bin/pip install --quiet --disable-pip-version-check -r deploy/clients/$$name/requirements.txt || exit 1; done
	cd deploy/clients/ai-sdk && npm install --no-audit --no-fund --ignore-scripts --no-package-lock
	$(BIN)/python -m pytest -q tests/system/test_client_examples.py

# A demo needs neither the tools of tests nor the level amx-twin. Both installations print each package and each compiled
# file; the whole output is in .venv/install.log.
$(BIN)/quire: pyproject.toml
	$(call install,$(INSTALL_PLAIN) --editable .)
	@touch $@

$(DEV): pyproject.toml
	$(call install,$(INSTALL) '.[dev]')
	@touch $(BIN)/quire $@

define install
@echo 'Creating .venv with the build tools'
@python3 -m venv .venv
@$(BIN)/pip install --quiet --disable-pip-version-check 'meson-python>=0.22,<0.23' 'meson>=1.12,<2' 'cython>=3.3,<3.4' 'ninja>=1.13,<2'
@echo 'Installing packages and compiling the kernels'
@set -o pipefail; $(1) --verbose 2>&1 \
  | tee .venv/install.log | grep --line-buffered -E '^Collecting|^ +\[[0-9]+/[0-9]+\]|^Installing|rror:' \
  || { tail -n 40 .venv/install.log; exit 1; }
endef

.PHONY: demo loadtest dashboard compiled test grids test-ray docs attack attack-http kill-servers kill-batches switch-models kill-at-shutdown swap-adapters fuzz-files fuzz-text-files terminate-text-files fuzz-images fuzz-grammars check-structured check-schemas bench bench-machine check-kernels check-bits check-drafts check-encoders check-plan kill-hosts kill-nodes fuzz-link conformance clients sdist wheels check-wheels try-wheels checksums image push-image

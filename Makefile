# Two commands: `make demo` shows what aiote does, `make test` checks it. `make help` lists the rest.

PYTHON ?= python3
VENV ?= .venv
ARGS ?=

BIN := $(VENV)/bin
# Where tools start others by name (ninja, cython, pycodestyle), the environment's come first.
WITH := PATH="$(abspath $(BIN)):$$PATH"
READY := "$(PYTHON)" tools/environment.py "$(VENV)"
# torch lies beside the environment: what lint and tests say does not depend on it.
WITH_TORCH := PYTHONPATH="$(abspath $(VENV))/torch$${PYTHONPATH:+:$$PYTHONPATH}"

.DEFAULT_GOAL := help
.PHONY: docs docs-links demo demo-weights demo-moe check test test-all durations land soak soak-kvcache soak-rails hostile sanitize fuzz test-wheel test-arm64 mutants idle bench bench-guard bench-peers bench-kvcache bench-service bench-weights bench-moe bench-rails bench-lone paper test-guest test-connectors compare-connectors lint format wheel wheels release-check venv develop system test-system clean distclean peers scale test-versions test-order pins help
.NOTPARALLEL:

demo: system  ## show a KV cache going from one process to another; ARGS="--help" lists what it takes
	@$(READY) run --install
	$(BIN)/aiote demo kvcache $(ARGS)

demo-weights: system  ## see trainers' weights go into inference ranks, step by step; fetches torch (0.2 GB) into $(VENV)/torch
	@$(READY) torch --install
	$(WITH_TORCH) $(BIN)/python examples/weights/moe/run.py $(ARGS)

demo-moe: system  ## see experts in four processes generate while one is killed and replaced; ARGS="--help" lists what it takes
	@$(READY) run --install
	$(BIN)/aiote demo moe $(ARGS)

check: system  ## lint, types and the tests that need no libfabric, in a minute: for between two commits
	@$(READY) dev --install
	$(BIN)/python tools/run_tests.py --check $(ARGS)

test: test-system  ## lint, then every test with the newest libfabric here, again with the system's, and make docs
	@$(READY) dev --install
	@$(if $(ARGS),,$(READY) docs)
	$(BIN)/python tools/run_tests.py $(ARGS)

test-all: test-system  ## every combination of every test at full length, soaks, fuzzing, mutants: an hour or two
	@$(READY) dev --install
	$(BIN)/python tools/run_tests.py --all $(ARGS)
	$(BIN)/python bench/run.py guard --base $(BASE)

land:  ## run .ci/run on a clean clone of this branch and move main to it if that passes; ARGS=--check
	@"$(PYTHON)" tools/land.py $(ARGS)

durations:  ## record how long each file took in the last make test, by which the next one orders them
	@$(READY) dev
	$(BIN)/python tools/test_queue.py

soak: system  ## ten minutes of faults under load; ARGS="--seconds N --seed S --provider local|socket|tcp|shm --memory cuda"
	@$(READY) dev --install
	$(BIN)/python programs/soak/soak.py $(ARGS)

soak-kvcache: system  ## the same of a KV cache's cluster: every page is checked; same ARGS
	@$(READY) dev --install
	$(BIN)/python programs/soak/soak.py --what kvcache $(ARGS)

soak-rails: system  ## cut rails in mid-transfer a thousand times; ARGS="--runs N --first SEED"
	@$(READY) dev --install
	$(BIN)/python programs/soak/cut_rails.py $(ARGS)

# Another program that takes the same options may stand here.
GUEST ?= "$(PYTHON)" tools/guest
test-guest: test-system  ## run what needs RDMA devices or netem, in a guest whose kernel it builds once (minutes)
	@$(READY) dev --install
	@$(GUEST) --build-uml
	$(GUEST) --nics 4 -- $(BIN)/pytest -q -p no:cacheprovider --combinations pairs -m "needs_rdma or needs_netem" $(ARGS)

test-connectors: test-system  ## test the connectors in verl, vLLM, torch and Ray, and numba's, cupy's and cuda.core's arrays, which it installs (7 GB), and what needs torch or Ray; ARGS="verl -- -k killed"
	@$(READY) dev --install
	$(BIN)/python tools/connectors.py $(ARGS)

compare-connectors: test-system  ## measure torch's and Ray's transports, aiote's beside NIXL's, which it installs (4 GB); ARGS="ray"
	@$(READY) dev --install
	$(BIN)/python bench/run.py connectors $(ARGS)

bench-lone: system  ## measure one transfer at a time, hot and cold, beside plain C; ARGS="--provider local --only write"
	@$(READY) bench --install
	$(BIN)/python bench/run.py lone $(ARGS)

bench-rails: test-system  ## measure several rails with a rate limit each, and the loss of one
	@$(READY) dev --install
	$(BIN)/python bench/run.py rails $(ARGS)

hostile: system  ## attack an engine by peers that have its key; ARGS="--seconds 1200 --seed S --loop trio"
	@$(READY) dev --install
	$(BIN)/python programs/malicious_peer/attack.py --pauses $(ARGS)

fuzz: system  ## fuzz all that reads bytes from outside, for a minute; ARGS="--seconds 3600" for longer
	@$(READY) fuzz --install
	$(BIN)/python tools/fuzz.py $(ARGS)

sanitize: test-system  ## native and contract tests with AddressSanitizer and UBSan, then with ThreadSanitizer
	@$(READY) dev --install
	$(BIN)/python tools/sanitize.py $(ARGS)

test-wheel: test-system  ## build the wheel and test what it installs, far from the sources
	@$(READY) dev --install
	$(BIN)/python tools/test_wheel.py $(ARGS)

test-arm64: test-system  ## run the native tests and the contract suite on the arm64 wheel under qemu-user; ARGS="--again tests/native/test_streams.py"
	@$(READY) release
	$(BIN)/python tools/test_arm64.py $(ARGS)

mutants: test-system  ## take out each mechanism and see its tests fail; ARGS="--only NAME", ARGS=--list
	@$(READY) dev --install
	$(BIN)/python tools/mutants.py $(ARGS)

idle: system  ## measure what an engine with nothing to do costs; ARGS="--seconds 60" for longer
	@$(READY) run --install
	$(BIN)/python bench/run.py idle $(ARGS)

peers: system  ## measure one engine with a thousand peers; ARGS="--peers 200 --provider local"
	@$(READY) run --install
	$(BIN)/python bench/run.py many-peers $(ARGS)

scale: system  ## measure one engine with ten thousand simulated peers, in 70,000 descriptors; ARGS="peers --count 1000"
	@$(READY) run --install
	$(BIN)/python bench/run.py scale $(ARGS)

bench: system  ## measure aiote beside plain C, with default settings, then spinning; ARGS="write --runs 9"
	@$(READY) bench --install
	$(BIN)/python bench/run.py compare $(ARGS)

# What bench-guard compares with.
BASE ?= HEAD~1
bench-guard: system  ## fail where this is slower than another commit, in alternating runs; BASE=v0.1, ARGS="--provider tcp shm"
	@$(READY) bench --install
	$(BIN)/python bench/run.py guard --base $(BASE) $(ARGS)

bench-peers: system  ## the same beside NIXL, ucxx, Mooncake, pyzmq and sockets, which it installs (1.5 GB)
	@$(READY) bench --install
	$(BIN)/python bench/install_peers.py install
	$(BIN)/python bench/run.py compare --peers $(ARGS)

bench-kvcache: system  ## measure a KV-cache service beside NIXL, ucxx, pyzmq and sockets, which it installs
	@$(READY) bench --install
	$(BIN)/python bench/install_peers.py install nixl ucxx pyzmq sockets
	$(BIN)/python bench/run.py kvcache $(ARGS)

bench-service: system  ## measure calls beside grpc.aio, pyzmq, sockets, FastAPI and Ray, which it installs
	@$(READY) bench --install
	$(BIN)/python bench/install_peers.py install pyzmq sockets grpc http ray
	$(BIN)/python bench/run.py service $(ARGS)

bench-weights: system  ## measure weight updates beside torch.distributed (gloo) and Ray, which it installs
	@$(READY) weights --install
	$(BIN)/python bench/install_peers.py install ray
	$(WITH_TORCH) $(BIN)/python bench/run.py weights $(ARGS)

bench-moe: system  ## measure dispatch and combine beside gloo's and MPICH's collectives, which it installs (1 GB)
	@$(READY) bench --install
	$(BIN)/python bench/install_peers.py install collectives
	$(BIN)/python bench/run.py moe $(ARGS)

paper: system  ## print the published figures beside ours, cell by cell, and check docs/paper.md; ARGS=--write writes it
	@$(READY) run --install
	$(BIN)/python tools/paper $(ARGS)

docs: test-system  ## build the docs as a site into docs/_build/html, and check it: a warning or a dead link is an error
	@$(READY) docs --install
	$(BIN)/python -P -m sphinx -W --keep-going -b html docs docs/_build/html $(ARGS)
	$(BIN)/python -P tools/check_site.py

docs-links: docs  ## list the links of the docs that leave the site; nothing asks the network for them
	@$(BIN)/python -P tools/check_site.py --outside

test-versions: test-system  ## lint and tests on each Python here, then with the lowest and newest packages; ARGS="3.13 lowest"
	@$(READY) dev
	$(BIN)/python tools/test_versions.py $(ARGS)

test-order: test-system  ## run demo-weights, docs and check in a fresh clone: none changes what another says
	@$(READY) dev
	$(BIN)/python tools/test_order.py

pins:  ## raise the versions in tools/constraints.txt, on each Python here (minutes); commit them by themselves
	"$(PYTHON)" tools/pins.py

lint: system  ## ruff, mypy --strict, cython-lint, and sentences that have to be read twice
	@$(READY) dev
	@status=0; for check in "ruff check ." "ruff format --check ." "mypy" "cython-lint aiote_native" \
		"python -P tools/prose.py --most 1" "python -P tools/prose.py --most 2 docs README.md CONTRIBUTING.md SECURITY.md"; do \
		echo "$(BIN)/$$check"; $(WITH) $(BIN)/$$check || status=1; \
	done; exit $$status

format: system  ## let ruff rewrite what it can
	@$(READY) dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

wheel: system  ## build a wheel into dist/
	@$(READY) run
	find aiote aiote_native -name __pycache__ -prune -exec rm -rf {} +
	$(WITH) $(BIN)/python -m pip wheel --quiet --no-index --no-deps --no-build-isolation --wheel-dir dist .

wheels: system  ## build the sdist and manylinux wheels, for x86-64 and arm64 and each Python, into dist/; ARGS="--machine x86_64 --python 3.13"
	@$(READY) release
	$(BIN)/python tools/wheels.py $(ARGS)

release-check: test-system  ## check what `make wheels` made, and run `make check` against the wheel; ARGS="--only sums links"
	@$(READY) release
	$(BIN)/python tools/release_check.py $(ARGS)

venv: system  ## prepare $(VENV) with everything, aiote built from this checkout included
	@$(READY) dev --install

develop: test-system  ## the same, editable: a changed source is compiled where it is imported, by meson-python
	@$(READY) dev --editable

system:  ## install the Debian packages that are missing, with root or sudo; elsewhere name them
	@sh tools/system.sh "$(PYTHON)"

test-system:  # what only tests need, too
	@sh tools/system.sh "$(PYTHON)" test

clean:  ## remove what was built and what tools cached
	rm -rf build dist docs/_build docs/_generated .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find aiote aiote_native programs tests tools examples -name __pycache__ -prune -exec rm -rf {} + 2>/dev/null || true

distclean: clean  ## remove the environment as well
	rm -rf "$(VENV)"

help:  ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/\1:\2/p' Makefile | while IFS=: read -r target text; do printf "  make %-13s %s\n" "$$target" "$$text"; done
	@echo "  PYTHON=python3.12 chooses the interpreter, VENV=folder its environment, ARGS=... goes to the command"

# The one entry point for people and for CI. `make` alone explains itself.
PYTHON ?= python3
PY := .venv/bin/python
PYTEST := $(PY) -m pytest
FUZZ_S ?= 300
SOAK_S ?= 3600
TRUTH_S ?= 600
# rooms whose tests start no server and no engine
SHORT_TESTS := tests/buffer/wire tests/rolloutmq/config tests/buffer/query/test_query.py tests/buffer/weights \
	tests/consumer/grpo/models $(addprefix tests/producer_workers/,agent_loops datasets judges producer simulation worker)

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-unit test-histories bench fuzz audit images compose lint format type arch check gpu-check chaos soak clean

# `##` before a target's description; `##WORD` puts it into that group of `make help-all`
help:
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  \033[1m%-10s\033[0m %s\n", $$1, $$2}' $(MAKEFILE_LIST)
	@echo "All other targets: make help-all"

.PHONY: help-all
help-all: help
	@awk -F ':.*##' '/^[a-z-]+:.*##[a-z]/ {group = text = $$2; sub(/ .*/, "", group); sub(/^[a-z]+ /, "", text); \
		if (!(group in lines)) order[++n] = group; \
		lines[group] = lines[group] sprintf("  \033[1m%-17s\033[0m %s\n", $$1, text)} \
		END {for (i = 1; i <= n; i++) printf "\n%s\n%s", order[i], lines[order[i]]}' $(MAKEFILE_LIST)

setup: ## make .venv and install everything (CPU or CUDA builds); a second call takes no time
	@$(PYTHON) bootstrap.py

demo: setup ## train a small model over Redis with two real vLLM workers; about 3 minutes on 2 cores
	@.venv/bin/rolloutmq run configs/demo.toml

chaos: setup ##proofs about 280 faults against whole runs, judged from what clients saw; 10 minutes; SEED=N, SERVER=sentinel or cluster
	@$(PY) -m proofs.chaos --standard --servers $(or $(SERVER),single) --seconds 400 --faults 240 $(if $(SEED),--seed $(SEED))

.PHONY: chaos-mutants
chaos-mutants: setup ##proofs the same against builds with one line of a script gone: each must be caught; 15 minutes
	@$(PY) -m proofs.chaos --mutants --seconds 50 --faults 120 --seed $(or $(SEED),4)

.PHONY: model-check
model-check: setup ##proofs every story fails without its line of a script; then every interleaving of small histories, with deaths, lost and late calls; MINUTES=10
	@$(PY) -m proofs.model_check --stories
	@$(PY) -m proofs.model_check --minutes $(or $(MINUTES),10)

.PHONY: chaos-damage
chaos-damage: setup ##proofs every kind of key of a live run deleted, and given another type: made again, and continued; 25 minutes
	@$(PY) -m proofs.chaos --damage --faults 0 --seed $(or $(SEED),1)

soak: setup ##proofs an hour with servers of every kind, then 10 minutes of `make truth`; SOAK_S=36000 for ten; the table: build/chaos/soak.md
	@$(PY) -m proofs.chaos --soak --seconds $(SOAK_S) --faults $$(($(SOAK_S) / 4)) $(if $(SEED),--seed $(SEED))
	@$(MAKE) -s truth

.PHONY: truth
truth: setup ##proofs is what is trained what was sampled? random cases, groups up to 20 MB, batches up to 600 MB; TRUTH_S=600, SEED=N
	@$(PY) -m proofs.truth --seconds $(TRUTH_S) $(if $(SEED),--seed $(SEED))

gpu-check: setup ##gpu a few GRPO steps of a Qwen3-0.6B-shaped model on one CUDA GPU
	@.venv/bin/rolloutmq gpu-check

.PHONY: gpu-day
gpu-day: setup ##gpu all that one CUDA GPU can show in 25 minutes: a report with figures and a verdict for each part
	@$(PY) -m benchmarks.gpu_day

ON_CPUS := not chaos and not gpu and not modes and not agents

test: lint type arch ## lint, types and all tests but the slow ones; 10 minutes on 2 cores
	@$(PYTEST) -m "not slow and $(ON_CPUS)" -n 4 --no-loadscope-reorder

.PHONY: test-slow
test-slow: setup ## longer runs with killed processes, more engines, all kinds of stores, and each property with 4 times as many examples; 15 minutes
	@$(PYTEST) -m "(slow or hypothesis) and $(ON_CPUS)" --hypothesis-profile=thorough -n 4 --no-loadscope-reorder

.PHONY: test-proofs
test-proofs: setup ##tests short parts of the proofs: histories, truth, chaos and their own checkers; minutes
	@$(PYTEST) -p tests.conftest -m "$(ON_CPUS)" -n 4 --no-loadscope-reorder proofs

.PHONY: test-rq
test-rq: setup ##tests the judges and their server user with rq 3, in build/rq3; 1 minute
	@test -d build/rq3/rq || $(PY) -m pip install -q --no-deps --target build/rq3 rq==3.0.0
	@PYTHONPATH=build/rq3 $(PYTEST) tests/pipeline/test_rq_judge.py tests/buffer/redis/server/test_acl.py

CORE := build/core/bin/python
.PHONY: test-core
test-core: ## the queue, the trainer's handle and the worker, without torch, transformers or vLLM; in build/core
	@test -x $(CORE) || { $(PYTHON) -m venv build/core && \
		$(CORE) -m pip install -q -e '.[testing,zstd]' pytest pytest-timeout pytest-xdist hypothesis aiohttp; }
	@$(CORE) -m pytest -n 2 -m "not slow and $(ON_CPUS)" --no-loadscope-reorder --core \
		tests/buffer tests/consumer/handle tests/producer_workers/worker

.PHONY: test-modes
test-modes: setup ##tests vLLM in shards, as pipeline stages and as replicas, or on 2 and 4 GPUs where there are some; 2 minutes
	@$(PYTEST) -m "modes or (gpu and vllm)" tests/producer_workers/engines

test-unit: setup ##tests the quick tests: no engine, no server
	@$(PYTEST) -n 2 -m "not slow" $(SHORT_TESTS) $(addprefix --ignore=tests/producer_workers/,judges/test_process_judge.py agent_loops/test_gateway.py)

.PHONY: test-foreign
test-foreign: setup ##tests workers in other languages against the protocol's tests; installs two npm packages into build/foreign
	@mkdir -p build/foreign && cp tests/foreign/package.json tests/foreign/package-lock.json build/foreign/
	@npm ci --prefix build/foreign --no-audit --no-fund
	@$(PYTEST) tests/pipeline/test_worker_contract.py

.PHONY: test-environments
test-environments: setup ##tests environments of verifiers and OpenEnv against the gateway; installs them into build/environments
	@for package in verifiers==0.4.0 openenv==0.10.0; do \
		venv=build/environments/$$package; \
		test -f $$venv/done || { $(PYTHON) -m venv $$venv && $$venv/bin/pip install -q $$package && \
			$(PY) -c 'import sysconfig as s; print("import site; site.addsitedir(%r)" % s.get_path("purelib"))' > $$venv/rolloutmq.pth && \
			mv $$venv/rolloutmq.pth "$$($$venv/bin/python -c 'import sysconfig as s; print(s.get_path("purelib"))')" && \
			touch $$venv/done; } || exit; \
		$$venv/bin/python -m pytest tests/extensions/environments/test_$${package%%=*}_environment.py || exit; \
	done

# Harbor needs a newer Python than the project: it runs in an environment of its own.
PYTHON312 ?= $(shell for p in python3.13 python3.12 $(HOME)/.pyenv/versions/3.1[2-9]*/bin/python; do \
	$$p -c "" 2>/dev/null && echo $$p && break; done)

build/harbor/.done: requirements/harbor.txt
	@test -n "$(PYTHON312)" || { echo "Harbor needs Python 3.12 or newer: make test-harbor PYTHON312=..."; exit 1; }
	@$(PYTHON312) -m venv build/harbor && build/harbor/bin/pip install -q -r $< && touch $@

.PHONY: test-harbor
test-harbor: setup build/harbor/.done ##tests real trials of Harbor (in build/harbor) without a container engine; 3 minutes
	@$(PYTEST) tests/extensions/environments/test_harbor_trials.py

TRAINERS ?= $(basename $(notdir $(wildcard requirements/trainers/*.txt)))
.PHONY: test-trainers
test-trainers: setup ##tests the adapters for trainers of others, with those trainers' own classes, in build/trainers; one alone: TRAINERS=xtuner
	@for trainer in $(TRAINERS); do \
		venv=build/trainers/$$trainer; needed=requirements/trainers/$$trainer.txt; \
		test $$venv/done -nt $$needed || { $(PYTHON) -m venv $$venv && $$venv/bin/pip install -q $$(sed -n 's/^# pip: //p' $$needed) -r $$needed && \
			$(PY) -c 'import sysconfig as s; print("import site; site.addsitedir(%r)" % s.get_path("purelib"))' > $$venv/rolloutmq.pth && \
			mv $$venv/rolloutmq.pth "$$($$venv/bin/python -c 'import sysconfig as s; print(s.get_path("purelib"))')" && \
			touch $$venv/done; } || exit; \
		$$venv/bin/python -m pytest tests/extensions/trainers/test_$$trainer*.py || exit; \
	done

AGENTS := tests/extensions/real_agents
.PHONY: test-agents
test-agents: setup ##tests Codex, opencode, qwen-code, mini-swe-agent and others, as users start them; installs 1.8 GB into build/agents
	@mkdir -p build/agents && cp $(AGENTS)/package.json build/agents/
	@npm install --prefix build/agents --no-package-lock --no-audit --no-fund
	@$(PYTHON) -m venv build/agents/venv && build/agents/venv/bin/pip install -q -r $(AGENTS)/requirements.txt
	@$(PYTEST) -m agents $(AGENTS)

bench: setup ## measure against raw Redis, PipelineRL's stream and ideal fleets; 12 minutes at most, fills benchmarks/README.md
	@$(PY) -m benchmarks

.PHONY: bench-peers
bench-peers: setup ##measure put and take next to TransferQueue, Ray's queue, PipelineRL's stream and SkyRL's queue, in build/peers; 5 minutes
	@test -x build/peers/bin/python || $(PYTHON) -m venv build/peers
	@for needed in requirements/peers/*.txt; do \
		build/peers/bin/pip install -q --no-deps -r $$needed || echo "could not install $$needed: its queue is left out"; done
	@$(PY) -c 'import sysconfig as s; print("import site; site.addsitedir(%r)" % s.get_path("purelib"))' > \
		"$$(build/peers/bin/python -c 'import sysconfig as s; print(s.get_path("purelib"))')/rolloutmq.pth"
	@OMP_NUM_THREADS=1 TQ_NUM_THREADS=1 TQ_LOGGING_LEVEL=ERROR build/peers/bin/python -m benchmarks.peers

.PHONY: bench-crash
bench-crash: setup ## kill each process of a run at set moments: seconds to the next committed step, what is done again; four minutes
	@$(PY) -m benchmarks.crash --update

.PHONY: bench-turns
bench-turns: setup ## what the gateway costs per turn, 8 to 256 turns, next to tokenizing the conversation again; two minutes
	@$(PY) -m benchmarks.gateway_turns --update

.PHONY: bench-learning
bench-learning: setup ##measure reward by step and wall time for several staleness bounds and losses, and with long answers; about an hour, goes on where it was stopped
	@OMP_NUM_THREADS=1 $(PY) -m benchmarks.learning
	@OMP_NUM_THREADS=1 $(PY) -m benchmarks.learning.long_answers

.PHONY: bench-distill
bench-distill: setup ##measure a student that a teacher scores, and plain GRPO: share of right answers by step; half an hour, goes on where it was stopped
	@OMP_NUM_THREADS=1 $(PY) -m benchmarks.learning.distill

fuzz: setup ##proofs coverage-guided fuzz of the decoder, then of all other entrances, FUZZ_S seconds each (300); see build/fuzz
	@mkdir -p build/fuzz
	@for entrance in decoder entrances; do \
		$(PY) -m proofs.fuzz.$$entrance -max_total_time=$(FUZZ_S) -max_len=8192 -timeout=20 -rss_limit_mb=2048 \
			$(if $(SEED),-seed=$(SEED)) -artifact_prefix=build/fuzz/ build/fuzz/corpus-$$entrance || exit; \
	done

TOOLS := build/tools/bin
LOCK := $(TOOLS)/uv pip compile -q --universal --generate-hashes --no-annotate --no-emit-index-url \
	--python-version 3.11 --custom-compile-command "make lock"

build/tools/.done: requirements/tools.txt
	@$(PYTHON) -m venv build/tools && $(TOOLS)/pip install -q -r $< && touch $@

.PHONY: lock sbom licences wheel
lock: build/tools/.done ##package write requirements/*.lock: every package by version and hash
	@grep -v "^torch==" requirements/cpu.txt | $(LOCK) --no-config --no-deps - -o requirements/cpu.lock
	@# uv prefers the versions that it finds in its output: here those that are tested on CPUs
	@grep "^[a-zA-Z]" requirements/cpu.txt | grep -v "^torch==" > requirements/cuda.lock
	@$(LOCK) --extra vllm-cuda --extra demo --extra dev pyproject.toml -o requirements/cuda.lock

sbom: setup build/tools/.done ##package build/sbom.json: all packages in .venv as CycloneDX
	@$(TOOLS)/cyclonedx-py environment --pyproject pyproject.toml --output-reproducible -o build/sbom.json $(PY)
	@echo build/sbom.json

licences: setup build/tools/.done ##package licences of all packages in .venv
	@$(TOOLS)/pip-licenses --python $(PY) --from mixed --order license --with-urls --format csv

audit: setup ##package known vulnerabilities of all packages in .venv, by pip-audit, which asks pypi.org
	@$(PY) -c 'import urllib.request as u; u.urlopen("https://pypi.org/pypi/pip/json", timeout=20)' 2>/dev/null || \
		{ echo "not audited: the database of vulnerabilities at pypi.org cannot be reached"; exit 3; }
	@$(MAKE) -s build/tools/.done
	@$(TOOLS)/pip-audit --progress-spinner off --path "$$($(PY) -c 'import site; print(site.getsitepackages()[0])')"

wheel: setup ##package the wheel, into dist: the same bytes for the same commit
	@SOURCE_DATE_EPOCH=$$(git log -1 --format=%ct) $(PY) -m hatchling build -t wheel -d dist

.PHONY: dist
dist: setup ## a release: sdist and wheel, into dist
	@rm -rf dist
	@SOURCE_DATE_EPOCH=$$(git log -1 --format=%ct) $(PY) -m hatchling build -d dist

PYTHONS ?= 3.11 3.12 3.13
.PHONY: test-release
test-release: dist ##tests what a first user types, with wheel and sdist in fresh environments of Python 3.11, 3.12 and 3.13
	@for version in $(PYTHONS); do \
		python=$$(for p in python$$version $(HOME)/.pyenv/versions/$$version*/bin/python; do \
			"$$p" -c "" 2>/dev/null && echo "$$p" && break; done); \
		test -n "$$python" || { echo "there is no Python $$version: make test-release PYTHONS='3.11 3.12'"; exit 1; }; \
		for package in dist/*.whl dist/*.tar.gz; do \
			echo "Python $$version, $$package"; tests/first_user.sh "$$python" "$$package" build/release/$$version || exit; \
		done; \
	done

test-histories: setup ##tests 2,000 random histories of a run against a model of it; half an hour, different every time
	@HISTORIES=2000 $(PYTEST) tests/buffer/histories/test_histories.py -k valkey

images: ##docker the CPU image; the CUDA one: make images BUILD=cuda
	@docker build -f docker/Dockerfile --build-arg BUILD=$(or $(BUILD),cpu) -t rolloutmq:$(or $(BUILD),cpu) .

compose: images ##docker a whole run on this host with Docker; docker/README.md
	@docker compose -f docker/compose.yaml up -d

.PHONY: docs
docs: setup ## the docs site, into build/site, with broken links as errors
	@$(PY) -m pip install --quiet --no-deps --requirement requirements/docs.txt
	@NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --config-file docs/mkdocs.yml

lint: setup ## ruff: rules and format
	@$(PY) -m ruff check . && $(PY) -m ruff format --check .

format: setup ## let ruff format, sort imports and fix what it can
	@$(PY) -m ruff check --fix . && $(PY) -m ruff format .

type: setup ##tests mypy, strict
	@$(PY) -m mypy

arch: setup ##tests who may import whom
	@.venv/bin/lint-imports

check: lint type arch test-unit ## before every commit: less than a minute on 2 cores

clean: ## remove caches and build output; keeps .venv and runs
	@rm -rf build dist .mypy_cache .pytest_cache .ruff_cache .import_linter_cache .hypothesis
	@find . -name __pycache__ -not -path './.venv/*' -prune -exec rm -rf {} +

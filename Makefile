# Each target sets up what it needs on a fresh clone.
PY := .venv/bin/python
.DEFAULT_GOAL := help
.PHONY: help setup serve test kills fleet cluster-test check format bench generate requirements wheel images clean

help:  ## list the targets
	@grep -hE '^[a-z-]+:.*##' Makefile | awk -F ':.*## ' '{printf "  make %-13s %s\n", $$1, $$2}'

setup:  ## make .venv with everything that development needs
	@scripts/setup dev

serve:  ## start carrel on http://127.0.0.1:7070 (ARGS="--port 0" for more flags)
	@scripts/setup server
	@$(PY) -m carrel serve $(ARGS)

# The whole suite, in two processes more than there are cores: tests wait for a third of their time, and must bear company
# anyway. A test that fails is run once more; if it then passes it is named UNSTEADY. Property tests take the same examples
# in every run.
WORKERS ?= $(shell expr $$(nproc) + 2)
SUITE := -n $(WORKERS) --dist worksteal --reruns 1 --rerun-show-tracebacks --durations 30 --hypothesis-profile=same

# Some environments forbid Python to write bytecode. Then every process that a test starts would compile carrel again, and
# every worker all tests.
test kills fleet: export PYTHONDONTWRITEBYTECODE :=

test: setup  ## run every test, some at a time (WORKERS=4 for four; ARGS="-k name" to choose some, in one process)
	@$(PY) -m pytest $(if $(ARGS),$(ARGS),$(SUITE))

KILLED := $(addprefix tests/end_to_end/test_,kills.py here_kills.py image_kills.py slot_kills.py event_kills.py event_streams.py job_kills.py) tests/providers/docker/test_slots.py

kills: setup  ## kill the server 200 times under load on each database, with images, slots and jobs, and `carrel here` 200 times; 100 times with NATS and without
	@CARREL_KILLS=$${CARREL_KILLS:-200} CARREL_EVENT_KILLS=$${CARREL_EVENT_KILLS:-100} CARREL_BUS_AWAY_S=$${CARREL_BUS_AWAY_S:-30} \
		$(PY) -m pytest -q $(KILLED) $(ARGS)

fleet: setup  ## end one of two and of three servers every 20 s for 3 minutes, with 100 contexts and 16 clients
	@CARREL_FLEET_S=$${CARREL_FLEET_S:-180} $(PY) -m pytest -q tests/end_to_end/test_fleet_history.py $(ARGS)

cluster-test: setup  ## test on a real Kubernetes, which it builds (once, ten minutes), starts and ends (ARGS="-k name")
	@$(PY) scripts/make_images.py --cached dist/test-images >/dev/null
	@CARREL_IMAGES=$(abspath dist/test-images) scripts/cluster run $(abspath $(PY)) -m pytest -q -p no:cacheprovider tests/cluster $(ARGS)

check: setup  ## format, lint, strict types, import layers, generated files
	@$(PY) -m ruff format --check .
	@$(PY) -m ruff check .
	@$(PY) -m mypy
	@$(PY) scripts/generate.py --check
	@$(PY) -m pytest -q tests/test_architecture.py

format: setup  ## format and mend what can be mended
	@$(PY) -m ruff check --fix --quiet . || true
	@$(PY) -m ruff format .

generate: setup  ## write the files that are made from others (sync client, reference pages)
	@$(PY) scripts/generate.py

bench: setup  ## measure carrel beside its peers (ARGS="start --json" for one)
	@$(PY) -m bench $(ARGS)

COMPILE := $(PY) -m uv pip compile --quiet --universal --python-version 3.11 --generate-hashes --no-emit-index-url --no-emit-find-links --no-header --no-annotate

requirements: setup  ## resolve and pin the dependencies anew
	@$(COMPILE) --group clone --extra dev pyproject.toml -o requirements/dev.txt
	@$(COMPILE) --group clone --extra server -c requirements/dev.txt pyproject.toml -o requirements/server.txt
	@$(COMPILE) --extra server --extra nats --extra otel --extra spiffe -c requirements/dev.txt pyproject.toml -o requirements/image.txt

wheel:  ## build the wheel into dist/
	@scripts/setup server
	@$(PY) -m uv build --quiet --wheel --no-build-isolation --out-dir dist
	@ls dist/*.whl

images: setup  ## make the container images into dist/images, as root on Debian (ARGS="--registry images.example")
	@$(PY) scripts/make_images.py dist/images $(ARGS)

clean:  ## remove what the targets made
	rm -rf .venv dist .pytest_cache .mypy_cache .ruff_cache .hypothesis bench/results

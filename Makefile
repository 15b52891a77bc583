# For users: `make demo` and `make test`; both may be run again at any time. `make help` lists the rest.
SHELL := /bin/bash
export PATH := $(CURDIR)/.venv/bin:$(PATH)
TARGET ?= arm64-cu13
FRONT := http://198.18.40.2:30000
# What `make bundle` packs the image of.
INVENTORY ?= inventory/lab
MEASURED := .state/gpu/out/results.json
SHELL_SCRIPTS := scripts/setup scripts/clean scripts/install roles/container_image/files/save-image .ci/run tests/molecule/run

# One lab: its users take turns.
.NOTPARALLEL:
.PHONY: help demo test .venv setup images image image-test wheelhouse lock lab lint format unit molecule e2e cross gpu benchmark bundle clean

help:  ## This list
	@sed -n 's/^\([a-z0-9-]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 12

demo: lab  ## Set up, build, start the lab, deploy, prove, and show what serves
	ansible-playbook -i inventory/lab playbooks/site.yml
	@echo
	@echo 'The fleet answers at $(FRONT):'
	@echo
	@echo "  curl -s $(FRONT)/v1/completions -H 'Content-Type: application/json' -d '{\"model\": \"tiny\", \"prompt\": \"Hello\", \"max_tokens\": 8}'"

test: lint unit cross molecule e2e  ## All tests, as CI runs them

.venv:
	@scripts/setup --venv

setup:  ## .venv and a docker engine that answers
	@scripts/setup

images: setup  ## The images that are not there yet
	images/build lab-host vllm-nixl:cpu

image: setup  ## The engine image for TARGET: arm64-cu13 (GB200), amd64-cu13 or cpu
	images/build vllm-nixl:$(TARGET)

image-test: setup  ## Judge the image for TARGET again, without running it
	@images/accept $(TARGET)

wheelhouse: setup  ## Download all that an image for TARGET needs; `make image` then needs no network
	images/build --fetch vllm-nixl:$(TARGET)

lock: setup  ## New versions for all lock files; shows what changed
	scripts/lock

lab: images  ## The lab's hosts
	ansible-playbook -i inventory/lab playbooks/lab.yml

lint: setup  ## ansible-lint, yamllint, ruff, mypy, shellcheck
	ansible-lint --offline
	yamllint --strict .
	ruff check .
	ruff format --check .
	mypy
	shellcheck $(SHELL_SCRIPTS)

format: setup  ## Format the Python sources
	ruff check --fix .
	ruff format .

unit: setup  ## Tests without a lab
	pytest tests/unit --numprocesses 2 --dist loadfile

molecule: lab  ## Each role alone, against the lab's hosts with a fleet on them
	ansible-playbook -i inventory/lab playbooks/site.yml
	tests/molecule/run

e2e: lab  ## The life of a fleet in the lab; ends with the fleet removed
	pytest tests/e2e

cross: setup  ## An arm64 image of small wheels, built on this machine and broken on purpose
	pytest tests/images

# Needs no docker. What was measured is kept and reported also where a scenario is not ok.
gpu: .venv  ## What is rendered, run and measured on this machine's NVIDIA GPUs; skipped where there are none
	@mkdir -p .state/gpu && touch .state/gpu/begun
	@pytest -rs tests/gpu; status=$$?; \
	if [ $(MEASURED) -nt .state/gpu/begun ]; then python tests/gpu/report.py $(MEASURED) || exit; fi; exit $$status

benchmark: setup  ## How long validating, planning and controlling take; what router and relay add to a request
	python benchmarks/validate.py
	python benchmarks/plan.py
	python benchmarks/rollout.py
	python benchmarks/relay.py

bundle: setup  ## One file that deploys a fleet without a network: make bundle INVENTORY=inventory/mine
	@scripts/bundle --inventory $(INVENTORY)

clean:  ## Remove all that the commands above made, but for packages of the distribution
	@scripts/clean

# Two commands for users: `make demo` and `make test`. Both may be run again at any time.
SHELL := /bin/bash
BIN := .venv/bin
PLAY := $(BIN)/ansible-playbook
URL := http://198.18.40.2:30000

.PHONY: demo test setup images lab site lint unit molecule e2e clean lock

demo: lab  ## Build, start the lab, deploy the fleet, prove that KV moves, and show it
	$(PLAY) -i inventory/lab playbooks/site.yml
	$(PLAY) -i inventory/lab playbooks/prove.yml playbooks/status.yml
	@echo
	@echo "The fleet answers at $(URL). Try it:"
	@echo "  curl -s $(URL)/v1/completions -H 'Content-Type: application/json' -d '{\"model\": \"tiny\", \"prompt\": \"Hello\", \"max_tokens\": 8}'"

test: lint unit e2e  ## Everything that .ci/run checks

setup:  ## .venv and a docker engine
	@scripts/setup

images: setup  ## The images that are not there yet
	$(BIN)/python images/build lab-host vllm-nixl:cpu

lab: images  ## The lab's hosts
	$(PLAY) -i inventory/lab playbooks/lab.yml

site: ## Deploy the fleet to the lab
	$(PLAY) -i inventory/lab playbooks/site.yml

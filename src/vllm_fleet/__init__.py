"""What a fleet of vLLM engines is, decided from an Ansible inventory: model, rules, plan and command line."""

"""The harness for GPUs: README.md."""

"""Acceptance test of the image `vllm-nixl`, where its architecture is this machine's: it judges itself."""

import os

os.execv("/usr/local/bin/vllm-acceptance", ["vllm-acceptance"])

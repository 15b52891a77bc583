"""The relay in the plan: where it runs, what it is started with, who dials it."""

from __future__ import annotations

import pytest
from fleets import lab

from vllm_fleet.comparison import compare
from vllm_fleet.host_check.reach import dials, listeners
from vllm_fleet.picture import as_svg
from vllm_fleet.relay import controllers, relay_arguments, relay_hosts


"""A proxy in front of an engine that breaks KV transfer the way real faults do.

wrong-kv  In front of a prefill. Requests with kv_transfer_params reach it with one early word changed, so
          the decode pulls the KV of another prompt. Everything else passes untouched: references stay right.
strip     In front of a prefill. Its answers lose their kv_transfer_params, so the decode never hears of them.
ignore    In front of a decode. Requests lose their kv_transfer_params, so it computes the prompt itself: the
          right tokens, and no KV moved.
"""

from __future__ import annotations

import json
from typing import Any

from proxy import Proxy

FAULTS = ("wrong-kv", "strip", "ignore")


def change_early_word(prompt: str) -> str:
    """The same prompt with its fourth word written backwards: in the proof's prompts that is the code."""
    words = prompt.split(" ")
    words[3] = words[3][::-1]
    return " ".join(words)


def alter_request(body: dict[str, Any], fault: str) -> dict[str, Any]:
    if not body.get("kv_transfer_params"):
        return body
    if fault == "wrong-kv":
        return {**body, "prompt": change_early_word(body["prompt"])}
    return without_transfer(body) if fault == "ignore" else body


def alter_answer(body: dict[str, Any], fault: str) -> dict[str, Any]:
    return without_transfer(body) if fault == "strip" else body


def without_transfer(body: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in body.items() if key != "kv_transfer_params"}


class KvProxy(Proxy):
    def __init__(self, upstream: str, fault: str, address: tuple[str, int] = ("127.0.0.1", 0)) -> None:
        if fault not in FAULTS:
            raise ValueError(f"unknown fault {fault!r}, choose from {', '.join(FAULTS)}")
        super().__init__(upstream, address)
        self.fault = fault

    def change_request(self, path: str, body: bytes) -> bytes:
        return json.dumps(alter_request(json.loads(body), self.fault)).encode()

    def change_answer(self, path: str, kind: str, body: bytes) -> bytes:
        if not kind.startswith("application/json") or not body:
            return body
        return json.dumps(alter_answer(json.loads(body), self.fault)).encode()

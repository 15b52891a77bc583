"""What tests/gpu starts, without GPUs: an engine that answers from a hash of the prompt, and a router.

They are run as `vllm serve` and vllm-router are: `stand_ins` has modules of those names, which end up here. Variables of
an engine's environment make trouble: with NO_KV it counts no KV, with SLOW_KV KV is slow, with WRONG_TOKENS a decode says others
than its prefill, with NO_RANKS it takes none that a request names, with NEVER_USED_UP transfers come in as many pieces after
any number of them; HELD is a file that a decode makes with its first transfer and removes with its end, and that keeps other
engines from starting.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import urllib.request
import zlib
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar

import yaml
from scripted_engine import ScriptedEngine

from vllm_fleet.kv import kv_bytes_per_token

KV_TOKENS = 100_000
"""Of an engine's pool; transfers come in more pieces once so many were asked for."""
REMOTE = {"do_remote_prefill": True, "remote_block_ids": [[1, 2]]}


class StandIn(ScriptedEngine):
    """An engine with control endpoints that also completes prompts and counts KV, each of its ranks for itself."""

    def __init__(self, name: str, address: tuple[str, int], bytes_per_token: int, ranks: int) -> None:
        super().__init__(name, [], address)
        self.bytes_per_token = bytes_per_token
        self.finished, self.transfers, self.bytes, self.pieces = ([0] * ranks for _ in range(4))
        self.used = 0

    def _complete(self, _query: Any, body: Any) -> Any:
        prompt, count = body["prompt"], body["max_tokens"]
        length = len(prompt.split() if isinstance(prompt, str) else prompt)
        seed = zlib.crc32(json.dumps(prompt).encode())
        tokens = [3 + (seed >> (number % 24)) % 400 for number in range(count)]
        asked = body.get("kv_transfer_params") or {}
        in_turn = sum(self.finished) % len(self.finished)
        wanted = None if "NO_RANKS" in os.environ else self.asked.headers.get("X-data-parallel-rank")
        rank = int(wanted or in_turn)
        self.finished[rank] += 1
        self.used += length
        if asked.get("do_remote_prefill"):
            if "HELD" in os.environ:
                Path(os.environ["HELD"]).touch()
            if "WRONG_TOKENS" in os.environ:
                tokens = [token + 1 for token in tokens]
            if "NO_KV" not in os.environ:
                self.transfers[rank] += 1
                self.bytes[rank] += length * self.bytes_per_token
                self.pieces[rank] += 36 if self.used < KV_TOKENS or "NEVER_USED_UP" in os.environ else 9000
        choice: dict[str, Any] = {"text": "words", "token_ids": tokens, "finish_reason": "length"}
        if body.get("logprobs"):
            likely = [{f"token_id:{token}": -0.1, f"token_id:{token + 1}": -2.5} for token in tokens]
            choice["logprobs"] = {"top_logprobs": likely}
        usage = {"prompt_tokens": length, "completion_tokens": count}
        if not body.get("stream"):
            params = {**REMOTE, "remote_engine_id": f"stand-in_dp{rank}"}
            more = {"kv_transfer_params": params} if asked.get("do_remote_decode") else {}
            return {"choices": [choice], "usage": usage, **more}
        events = [
            {"choices": [{"text": "w", "token_ids": [token], "finish_reason": None}]} for token in tokens
        ]
        events.append({"choices": [], "usage": usage})
        text = "".join(f"data: {json.dumps(event)}\n\n" for event in events) + "data: [DONE]\n\n"
        return 200, text.encode()

    def _all_metrics(self, query: Any, body: Any) -> Any:
        _, page = self._metrics(query, body)
        speed = 0.4e9 if "SLOW_KV" in os.environ else 100e9
        lines = []
        for rank, finished in enumerate(self.finished):
            counts = {
                "request_success_total": finished,
                "nixl_bytes_transferred_sum": self.bytes[rank],
                "nixl_bytes_transferred_count": self.transfers[rank],
                "nixl_xfer_time_seconds_sum": self.bytes[rank] / speed,
                "nixl_post_time_seconds_sum": 0.0005 * self.transfers[rank],
                "nixl_num_failed_transfers_total": 0,
                "nixl_num_descriptors_sum": self.pieces[rank],
            }
            lines += [f'vllm:{name}{{engine="{rank}"}} {count}' for name, count in counts.items()]
            lines.append(f'vllm:cache_config_info{{engine="{rank}",block_size="16"}} 1')
            if rank:
                lines += [
                    f'vllm:num_requests_{state}{{engine="{rank}"}} 0' for state in ("running", "waiting")
                ]
        return 200, page + "\n".join(["", *lines, ""]).encode()

    GET: ClassVar = ScriptedEngine.GET | {"/health": lambda *_: {}, "/metrics": _all_metrics}
    POST: ClassVar = ScriptedEngine.POST | {
        "/v1/completions": _complete,
        "/collective_rpc": lambda *_: {"results": [None]},
    }


def engine() -> None:
    """`vllm serve --config FILE ...`: serve until it is ended."""
    config = yaml.safe_load(Path(sys.argv[sys.argv.index("--config") + 1]).read_text())
    model = json.loads((Path(config["model"]) / "config.json").read_text())
    print(f"INFO 11-30 09:37:14 [core.py:139] on GPUs {os.environ.get('CUDA_VISIBLE_DEVICES')}")
    print(f"INFO 11-30 09:37:15 [kv_cache_utils.py:2157] GPU KV cache size: {KV_TOKENS:,} tokens", flush=True)
    held = Path(os.environ.get("HELD", "/nonexistent"))
    if held.exists():
        sys.exit("ValueError: Free memory on device cuda:0 is less than desired GPU memory utilization")
    decodes = "consumer" in json.dumps(config.get("kv-transfer-config"))
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(decodes and held.unlink(missing_ok=True)))
    ranks = int(sys.argv[sys.argv.index("--data-parallel-size") + 1])
    StandIn("engine", (config["host"], config["port"]), kv_bytes_per_token(model) or 0, ranks)
    threading.Event().wait()


def router() -> None:
    """vllm-router: prefill and decode in turn, or one worker after the other."""
    words = sys.argv[1:]
    given = list(pairwise(words))
    port = int(dict(given)["--port"])
    prefills, decodes = ([url for flag, url in given if flag == name] for name in ("--prefill", "--decode"))
    workers = words[words.index("--worker-urls") + 1 :] if "--worker-urls" in words else []
    turn = {"next": 0}

    def post(url: str, body: Any) -> bytes:
        request = urllib.request.Request(f"{url}/v1/completions", json.dumps(body).encode())
        with urllib.request.urlopen(request, timeout=10) as answer:
            return bytes(answer.read())

    class Handler(BaseHTTPRequestHandler):
        wbufsize = -1  # as the engine's

        def do_GET(self) -> None:
            self._reply(b"{}")

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            number = turn["next"]
            turn["next"] += 1
            if workers:
                self._reply(post(workers[number % len(workers)], body))
                return
            first = {
                **body,
                "max_tokens": 1,
                "stream": False,
                "kv_transfer_params": {"do_remote_decode": True},
            }
            transfer = json.loads(post(prefills[number % len(prefills)], first))["kv_transfer_params"]
            self._reply(post(decodes[number % len(decodes)], {**body, "kv_transfer_params": transfer}))

        def _reply(self, text: bytes) -> None:
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        def log_message(self, *_: Any) -> None:
            pass

    ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever()

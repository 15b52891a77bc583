#!/usr/bin/python
from __future__ import annotations

DOCUMENTATION = r"""
module: kv_proof
short_description: Prove that KV cache moves from prefill to decode engines, how fast, and rightly
description:
  - For every pair sends a long prompt, unique to pair and run, to the prefill with C(kv_transfer_params), and
    what the prefill answers to the decode, the way a router does. Judges the decode's counters and tokens.
  - The reference is the same prompt on the prefill alone. A second prompt that differs in one early word must
    give other tokens, or the comparison would prove nothing.
  - A pair passes only when the decode's counters show at least the prompt's full KV blocks, no failed
    transfer, a rate over the floor (where enough bytes moved to judge it), and the reference's tokens.
    Counters that other requests may have moved make the pair C(not attributable).
  - The ranks of a data-parallel engine are proved one by one. Every request names its rank in the header
    C(X-data-parallel-rank); the prefill's answer must come from that rank, and the decode's counters are
    that rank's, so pairs of other ranks may run at the same time.
  - Changes nothing on the host, so it runs in check mode too.
options:
  pairs:
    description: The pairs to prove.
    type: list
    elements: dict
    required: true
    suboptions:
      name:
        description: How the pair is called in reports.
        type: str
        required: true
      prefill:
        description: The prefill engine.
        type: dict
        required: true
        suboptions: &engine
          engine:
            description: Its name.
            type: str
            required: true
          url:
            description: Its URL, without a path.
            type: str
            required: true
          rank:
            description:
              - Which of its data-parallel ranks, counted over all its hosts. Unset for an engine that has
                only one; requests then name none, and the counters are the whole engine's.
            type: int
          tensor_parallel_size:
            description: Its TP size. Where the two differ, only O(prefix_tokens) tokens are compared.
            type: int
            default: 1
          pipeline_parallel_size:
            description: Its PP size.
            type: int
            default: 1
      decode:
        description: The decode engine.
        type: dict
        required: true
        suboptions: *engine
  rounds:
    description:
      - Lists of indices into O(pairs). Rounds run one after the other, the pairs of a round at the same time;
        so the pairs of a round must not share an engine, or a rank of a data-parallel one.
    type: list
    elements: list
    required: true
  model:
    description: The name the engines serve the model under.
    type: str
    required: true
  prompt_words:
    description: Length of the prompt's middle part, in words.
    type: int
    default: 1000
  tokens:
    description: How many tokens are generated and compared.
    type: int
    default: 16
  prefix_tokens:
    description: How many of them are compared where prefill and decode differ in TP size.
    type: int
    default: 4
  bytes_per_token:
    description: KV bytes of one token over all layers. Unset, any number of bytes above zero will do.
    type: int
  transport:
    description: The transport the fleet declares, for the message about a low rate.
    type: str
    choices: [nvlink, rdma, tcp]
    required: true
  floor_gbps:
    description: The least rate in GB/s (1e9 bytes) of a pair.
    type: float
    default: 0
  floor_min_bytes:
    description: The rate of fewer bytes than this is not judged.
    type: int
    default: 1000000
  request_timeout:
    description: The most seconds one request may take.
    type: float
    default: 60
  warmups:
    description:
      - The most warm-up requests of a pair. They end with the first that moved KV; failures are reported.
    type: int
    default: 3
  attempts:
    description:
      - The most measured requests of a pair; more than one only when other traffic hid the first, or when its
        first wrong token is one that rounding may have decided.
    type: int
    default: 5
  budget:
    description: The most seconds a pair may take altogether.
    type: float
    default: 300
"""

EXAMPLES = r"""
- name: Prove the pair
  kv_proof:
    model: qwen3-30b-a3b
    transport: nvlink
    floor_gbps: 10
    pairs:
      - name: prefill-rack1-04-0 -> decode-rack1-05-0
        prefill: {engine: prefill-rack1-04-0, url: "http://10.0.0.4:8000"}
        decode: {engine: decode-rack1-05-0, url: "http://10.0.0.5:8000"}
    rounds: [[0]]

- name: Prove the pairs of a decode with two data-parallel ranks
  kv_proof:
    model: qwen3-30b-a3b
    transport: nvlink
    floor_gbps: 10
    pairs:
      - name: prefill-rack1-04-0 -> decode-rack1-05-0 rank 0
        prefill: {engine: prefill-rack1-04-0, url: "http://10.0.0.4:8000"}
        decode: {engine: decode-rack1-05-0, url: "http://10.0.0.5:8000", rank: 0}
      - name: prefill-rack1-04-0 -> decode-rack1-05-0 rank 1
        prefill: {engine: prefill-rack1-04-0, url: "http://10.0.0.4:8000"}
        decode: {engine: decode-rack1-05-0, url: "http://10.0.0.5:8000", rank: 1}
    rounds: [[0], [1]]
"""

RETURN = r"""
pairs:
  description:
    - One entry a pair, with C(name), C(prefill) and C(decode) (each with C(engine) and C(rank)), C(verdict)
      (passed, failed, not attributable), C(reasons), C(prompt_tokens), C(bytes), C(expected_bytes) (null when
      O(bytes_per_token) is unset), C(failed_transfers), C(seconds) of transfer, C(rate_gbps), C(rate_verdict)
      (ok, below the floor, not judged), C(warmups) (each with C(ok), C(seconds), C(seen)), C(attempts),
      C(tokens_equal), C(ttft) of the decode and C(elapsed).
  returned: always
  type: list
  elements: dict
table:
  description:
    - Aligned lines for a person, one a pair. Where two engines have several pairs of ranks, one line for all
      of them with the worst verdict, the lowest rate, the fewest tokens and bytes, all warm-ups and the
      longest TTFT, and one for each that did not pass.
  returned: always
  type: list
  elements: str
"""

import math
import secrets
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from random import SystemRandom
from typing import Any

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.fleet_http import HttpError, fetch, fetch_json, stream_events
from ansible.module_utils.fleet_metrics import MetricsError, Sample, parse
from ansible.module_utils.fleet_proof import (
    COUNTED,
    FAILED,
    NOT_ATTRIBUTABLE,
    Counters,
    Evidence,
    Judgement,
    Terms,
    by_engines,
    judge,
    make_prompts,
    read_counters,
    report,
    tie,
)

SETTLE = 5.0  # for the decode to end what it does
GRACE = 1.0  # for bytes to be counted once the request is
PROMPTS = 3  # tried until an altered one gives other tokens
PAUSE = 0.2
QUICK = 10.0
SLOW_PAGE = 30.0  # vLLM's /metrics costs ranks x API servers, and 64 x 64 are seconds
ROLES = ("prefill", "decode")
RANK_HEADER = "X-data-parallel-rank"
REMOTE_DECODE = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}


class ProofError(Exception):
    """A step of the proof that could not be taken; the text says what was seen."""


FAULTS = (HttpError, MetricsError, ProofError)


@dataclass(frozen=True)
class Generated:
    tokens: list[int]
    text: str
    finish_reason: str | None
    ttft: float


class MetricsPage:
    """An engine's /metrics, asked for by the proofs of several ranks at the same time."""

    def __init__(self, url: str) -> None:
        self.url = f"{url}/metrics"
        self._lock = threading.Lock()
        self._began = -math.inf
        self._outcome: list[Sample] | Exception = []

    def read(self) -> list[Sample]:
        """A page fetched after this call; threads that wait for one meanwhile share the next."""
        called = time.monotonic()
        with self._lock:
            if self._began < called:
                self._began = time.monotonic()
                try:
                    page = fetch(self.url, timeout=SLOW_PAGE).expect_ok().body.decode("utf-8", "replace")
                    # Of 64 ranks these are 30,000, which every thread would go through.
                    self._outcome = [sample for sample in parse(page) if sample.name in COUNTED]
                except FAULTS as fault:
                    self._outcome = fault
            if isinstance(self._outcome, Exception):
                raise self._outcome
            return self._outcome


class PairProof:
    """One pair, from its first request to its verdict."""

    def __init__(self, pair: dict[str, Any], pages: dict[str, MetricsPage], params: dict[str, Any]) -> None:
        self.name: str = pair["name"]
        self.prefill, self.decode = pair["prefill"], pair["decode"]
        self.metrics = pages[self.decode["url"]]
        self.params = params
        self.deadline = time.monotonic() + params["budget"]
        same_tp = self.prefill["tensor_parallel_size"] == self.decode["tensor_parallel_size"]
        self.terms = Terms(
            transport=params["transport"],
            floor_gbps=params["floor_gbps"],
            floor_min_bytes=params["floor_min_bytes"],
            bytes_per_token=params["bytes_per_token"],
            compared_tokens=None if same_tp else params["prefix_tokens"],
            transfers_per_request=max(e["tensor_parallel_size"] for e in (self.prefill, self.decode))
            * self.prefill["pipeline_parallel_size"],
            decode_rank=self.decode["rank"],
        )
        self.warmups: list[dict[str, Any]] = []
        self.attempts = 0
        self.prompt_tokens: int | None = None
        self.ttft: float | None = None

    def run(self) -> dict[str, Any]:
        started = time.monotonic()
        judgement = Judgement(NOT_ATTRIBUTABLE)
        try:
            self._reach()
            self._warm_up()
            again = True
            while again and self.attempts < self.params["attempts"]:
                judgement, again = self._attempt()
        except FAULTS as fault:
            judgement = Judgement(FAILED, [str(fault)])
        if judgement.verdict == FAILED:
            judgement.reasons += self._failed_warmups(judgement.reasons)
        return {
            "name": self.name,
            **{role: {key: getattr(self, role)[key] for key in ("engine", "rank")} for role in ROLES},
            **asdict(judgement),
            "prompt_tokens": self.prompt_tokens,
            "warmups": self.warmups,
            "attempts": self.attempts,
            "ttft": self.ttft,
            "elapsed": round(time.monotonic() - started, 3),
        }

    def _reach(self) -> None:
        for role in ROLES:
            engine = getattr(self, role)
            try:
                fetch(f"{engine['url']}/health", timeout=self._time(QUICK)).expect_ok()
            except HttpError as fault:
                raise ProofError(f"the {role} {engine['engine']} is not there: {fault}") from None

    def _failed_warmups(self, known: list[str]) -> list[str]:
        """What failed warm-ups saw beyond the reasons that are known anyway."""
        seen = [warmup["seen"] for warmup in self.warmups if not warmup["ok"]]
        return [f"a warm-up had failed before: {text}" for text in dict.fromkeys(seen) if text not in known]

    def _warm_up(self) -> None:
        """Bring the pair past its handshake, or past what a restarted peer left behind."""
        while len(self.warmups) < self.params["warmups"] and not (self.warmups and self.warmups[-1]["ok"]):
            began = time.monotonic()
            try:
                before, _ = self._counters()
                generated = self._through_the_pair(self._prompts().original)
                delta = self._settled(before) - before
                ok = delta.bytes > 0 and delta.failed_transfers == 0
                seen = f"{len(generated.tokens)} tokens, {delta.bytes:.0f} KV bytes"
                if delta.failed_transfers:
                    seen += f", {delta.failed_transfers:.0f} failed transfers"
            except FAULTS as fault:
                ok, seen = False, str(fault)
            self.warmups.append({"ok": ok, "seconds": round(time.monotonic() - began, 3), "seen": seen})

    def _attempt(self) -> tuple[Judgement, bool]:
        """Judge one measured request; whether another prompt may tell more."""
        self.attempts += 1
        prompt, evidence = self._measure()
        judgement = judge(evidence, self.terms)
        if judgement.tokens_equal is False and len(judgement.reasons) == 1:
            undecided = tie(evidence, self._likeliest(prompt))
            if undecided:
                judgement.reasons.append(f"{undecided}; {self.attempts} prompts were tried")
                return judgement, True
        return judgement, judgement.verdict == NOT_ATTRIBUTABLE

    def _measure(self) -> tuple[str, Evidence]:
        """Send a prompt alone and through the pair; the prompt, and what was seen."""
        for _ in range(PROMPTS):
            prompts = self._prompts()
            reference, altered = self._alone(prompts.original), self._alone(prompts.altered)
            if reference[: self.terms.compared_tokens] != altered[: self.terms.compared_tokens]:
                break
        before, block_size = self._idle()
        generated = self._through_the_pair(prompts.original)
        self.ttft = round(generated.ttft, 3)
        return prompts.original, Evidence(
            prompt_tokens=self.prompt_tokens or 0,
            block_size=block_size,
            reference=reference,
            altered=altered,
            tokens=generated.tokens,
            text=generated.text,
            finish_reason=generated.finish_reason,
            before=before,
            after=self._settled(before),
        )

    def _alone(self, prompt: str) -> list[int]:
        """The tokens the prefill gives without any transfer, and without leaving a reusable prefix."""
        answer = self._complete(self.prefill, prompt, cache_salt=secrets.token_hex(8))
        try:
            self.prompt_tokens = int(answer["usage"]["prompt_tokens"])
            return _token_ids(answer["choices"][0])
        except (KeyError, IndexError, TypeError, ValueError):
            raise ProofError(
                f"{self.prefill['url']} answered a completion without usage or choices"
            ) from None

    def _likeliest(self, prompt: str) -> list[dict[str, float]]:
        """The two tokens that the prefill alone finds likeliest at each place; none where it does not say."""
        more = {"logprobs": 2, "return_tokens_as_token_ids": True, "cache_salt": secrets.token_hex(8)}
        try:
            answer = self._complete(self.prefill, prompt, **more)
            return list(answer["choices"][0]["logprobs"]["top_logprobs"])
        except (*FAULTS, KeyError, IndexError, TypeError):
            return []

    def _through_the_pair(self, prompt: str) -> Generated:
        answer = self._complete(self.prefill, prompt, kv_transfer_params=REMOTE_DECODE, max_tokens=1)
        transfer = answer.get("kv_transfer_params")
        if not isinstance(transfer, dict):
            raise ProofError(
                f"{self.prefill['url']} answered without kv_transfer_params: the engine does not run as a "
                "prefill (kv_transfer_config), or something between drops them; the decode would compute "
                "everything itself"
            )
        if not transfer.get("do_remote_prefill") or not transfer.get("remote_block_ids"):
            raise ProofError(f"{self.prefill['url']} answered with unusable kv_transfer_params: {transfer}")
        rank, holder = self.prefill["rank"], str(transfer.get("remote_engine_id"))
        if rank is not None and not holder.endswith(f"_dp{rank}"):  # vLLM's name for the rank
            raise ProofError(
                f"{self.prefill['url']} was asked for rank {rank}, but {holder} has the KV: another rank "
                f"took the request (the header {RANK_HEADER} did not reach the engine)"
            )
        return self._stream(prompt, transfer)

    def _stream(self, prompt: str, transfer: dict[str, Any]) -> Generated:
        url = f"{self.decode['url']}/v1/completions"
        payload = self._payload(prompt, stream=True, kv_transfer_params=transfer)
        tokens: list[int] = []
        text, finish_reason, ttft = "", None, None
        began = time.monotonic()
        timeout = self._time(self.params["request_timeout"])
        for event in stream_events(url, payload, timeout, _rank_header(self.decode)):
            if event.get("error"):
                raise ProofError(f"{url} broke off its stream: {event['error']}")
            for choice in event.get("choices") or []:
                new = _token_ids(choice)
                if new and ttft is None:
                    ttft = time.monotonic() - began
                tokens += new
                text += choice.get("text") or ""
                finish_reason = choice.get("finish_reason") or finish_reason
        if ttft is None:
            raise ProofError(f"{url} answered 200 without a single token (finish_reason {finish_reason})")
        return Generated(tokens, text, finish_reason, ttft)

    def _complete(self, engine: dict[str, Any], prompt: str, **more: Any) -> dict[str, Any]:
        url = f"{engine['url']}/v1/completions"
        timeout = self._time(self.params["request_timeout"])
        return fetch_json(url, self._payload(prompt, **more), timeout, _rank_header(engine))

    def _payload(self, prompt: str, **more: Any) -> dict[str, Any]:
        return {
            "model": self.params["model"],
            "prompt": prompt,
            "max_tokens": self.params["tokens"],
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
            "stream": False,
            **more,
        }

    def _counters(self) -> tuple[Counters, int]:
        try:
            return read_counters(self.metrics.read(), self.decode["rank"])
        except MetricsError as fault:
            raise MetricsError(f"{self.metrics.url} cannot be used: {fault}") from None

    def _idle(self) -> tuple[Counters, int]:
        """The counters once the decode has nothing to do, or after a while the counters as they are."""
        began = time.monotonic()
        while True:
            waited = time.monotonic() - began  # before the page is asked for: it may take longer than SETTLE
            counters, block_size = self._counters()
            if counters.idle or waited > SETTLE:
                return counters, block_size
            time.sleep(PAUSE)

    def _settled(self, before: Counters) -> Counters:
        """The counters once they show our request; the engine publishes them after its last step."""
        began = time.monotonic()
        while True:
            waited = time.monotonic() - began
            counters, _ = self._counters()
            delta = counters - before
            finished = delta.finished >= 1 and counters.idle
            if finished and delta.bytes > 0:
                return counters
            if waited > (GRACE if finished else SETTLE):
                return counters
            time.sleep(PAUSE)

    def _prompts(self) -> Any:
        return make_prompts(SystemRandom(), self.params["prompt_words"])

    def _time(self, wanted: float) -> float:
        left: float = self.deadline - time.monotonic()
        if left <= 0:
            raise ProofError(f"the pair's {self.params['budget']:g} s are used up")
        return min(wanted, left)


def _rank_header(engine: dict[str, Any]) -> dict[str, str]:
    return {} if engine["rank"] is None else {RANK_HEADER: str(engine["rank"])}


def _token_ids(choice: dict[str, Any]) -> list[int]:
    tokens = choice.get("token_ids")
    if not isinstance(tokens, list):
        raise ProofError("an engine answered without token_ids: kv_proof needs vLLM's return_token_ids")
    return tokens


def failure(pairs: list[dict[str, Any]]) -> str:
    """Every failed pair with its reasons; ranks of the same engines that failed alike are told once."""
    failed = [pair for pair in pairs if pair["verdict"] == FAILED]
    lines = [f"The KV proof failed for {len(failed)} of {len(pairs)} pairs."]
    for group in by_engines(failed).values():
        alike: dict[str, list[str]] = {}
        for pair in group:
            alike.setdefault("; ".join(pair["reasons"]), []).append(pair["name"])
        for reasons, (name, *others) in alike.items():
            more = f" and {len(others)} more of their rank pairs" if others else ""
            lines.append(f"- {name}{more}: {reasons}")
    return "\n".join(lines)


def check_rounds(pairs: list[dict[str, Any]], rounds: list[list[Any]]) -> str | None:
    indices = [index for one in rounds for index in one]
    if sorted(indices, key=str) != sorted(range(len(pairs)), key=str):
        wanted = f"each of the {len(pairs)} pairs (0 to {len(pairs) - 1}) exactly once"
        return f"rounds must name {wanted}, got {rounds}"
    for one in rounds:
        ends = Counter((pairs[i][role]["url"], pairs[i][role]["rank"]) for i in one for role in ROLES)
        urls = Counter(url for url, _ in ends.elements())
        shared = sorted(
            url if rank is None else f"{url} rank {rank}"
            for (url, rank), count in ends.items()
            if (urls[url] if rank is None else count) > 1  # no rank: the whole engine
        )
        if shared:
            twice = ", ".join(shared)
            return f"the pairs of a round must not share an engine or a rank, but {one} has {twice} twice"
    return None


def main() -> None:
    engine = {
        "type": "dict",
        "required": True,
        "options": {
            "engine": {"type": "str", "required": True},
            "url": {"type": "str", "required": True},
            "rank": {"type": "int"},
            "tensor_parallel_size": {"type": "int", "default": 1},
            "pipeline_parallel_size": {"type": "int", "default": 1},
        },
    }
    module = AnsibleModule(
        argument_spec={
            "pairs": {
                "type": "list",
                "elements": "dict",
                "required": True,
                "options": {"name": {"type": "str", "required": True}, "prefill": engine, "decode": engine},
            },
            "rounds": {"type": "list", "elements": "list", "required": True},
            "model": {"type": "str", "required": True},
            "prompt_words": {"type": "int", "default": 1000},
            "tokens": {"type": "int", "default": 16},
            "prefix_tokens": {"type": "int", "default": 4},
            "bytes_per_token": {"type": "int"},
            "transport": {"type": "str", "choices": ["nvlink", "rdma", "tcp"], "required": True},
            "floor_gbps": {"type": "float", "default": 0},
            "floor_min_bytes": {"type": "int", "default": 1000000},
            "request_timeout": {"type": "float", "default": 60},
            "warmups": {"type": "int", "default": 3},
            "attempts": {"type": "int", "default": 5},
            "budget": {"type": "float", "default": 300},
        },
        supports_check_mode=True,
    )
    params = module.params
    problem = check_rounds(params["pairs"], params["rounds"])
    if problem:
        module.fail_json(msg=problem)

    pages = {pair["decode"]["url"]: MetricsPage(pair["decode"]["url"]) for pair in params["pairs"]}
    pairs: list[dict[str, Any]] = [{}] * len(params["pairs"])
    for indices in params["rounds"]:
        with ThreadPoolExecutor(max_workers=max(len(indices), 1)) as pool:
            proofs = {index: PairProof(params["pairs"][index], pages, params) for index in indices}
            running = {index: pool.submit(proof.run) for index, proof in proofs.items()}
        for index, proof in running.items():
            pairs[index] = proof.result()
    outcome = {"changed": False, "pairs": pairs, "table": report(pairs)}
    if any(pair["verdict"] == FAILED for pair in pairs):
        module.fail_json(msg=failure(pairs), **outcome)
    module.exit_json(**outcome)


if __name__ == "__main__":
    main()

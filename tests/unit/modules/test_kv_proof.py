"""The proof's steps against fake engines: what real ones do when they are sick, and other traffic."""

import json
import re
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from ansible.module_utils.fleet_http import HttpError
from kv_proof import MetricsPage

FAST = {
    "transport": "tcp",
    "model": "tiny",
    "bytes_per_token": 1024,
    "prompt_words": 20,
    "request_timeout": 2,
}
BLOCK, PROMPT_TOKENS = 128, 300


class FakePair:
    """A prefill and a decode that agree, with a switch for each fault."""

    def __init__(self, start):
        self.prefill, self.decode = start(), start()
        self.prefill.answer, self.decode.answer = self._prefill, self._decode
        self.bytes = self.transfers = self.finished = self.failed = 0
        self.fail_first = self.others = self.recompute_first = 0
        self.blind = self.busy = self.late = 0
        self.page_takes, self.old_pages = 0, []
        self.transfer = {"do_remote_prefill": True, "remote_block_ids": [[1, 2, 3]]}
        self.metrics = None
        self.events = None
        self.wrong = 0  # measured requests whose second token is the next one
        self.gap = 0.1  # in nats, by which the prefill prefers its own to that one
        self.tells = True

    def tokens(self, prompt):
        if self.blind > 0:
            self.blind -= 1
            return [7, 7]
        return [sum(prompt.encode()) % 1000, hash(prompt) % 1000]

    def _prefill(self, path, body):
        if path == "/health":
            return 200, b""
        answer = {
            "usage": {"prompt_tokens": PROMPT_TOKENS, "completion_tokens": 2},
            "choices": [
                {"text": "words", "token_ids": self.tokens(body["prompt"]), "finish_reason": "length"}
            ],
        }
        if body.get("kv_transfer_params"):
            answer["kv_transfer_params"] = self.transfer
        if body.get("logprobs"):
            if not self.tells:
                return 400, {"error": {"message": "Requested sample logprobs of 2, which is greater than 1"}}
            assert body["return_tokens_as_token_ids"]
            first, second = self.tokens(body["prompt"])
            likeliest = [{f"token_id:{first}": -0.1, "token_id:0": -4.0}]
            likeliest += [{f"token_id:{second}": -0.5, f"token_id:{second + 1}": -0.5 - self.gap}]
            answer["choices"][0]["logprobs"] = {"top_logprobs": likeliest}
        return 200, answer

    def _decode(self, path, body):
        if path == "/health":
            return 200, b""
        if path == "/metrics":
            time.sleep(self.page_takes)
            return 200, self.metrics or (self.old_pages.pop() if self.old_pages else self._page())
        self.old_pages = [self._page()] * self.late
        assert body["kv_transfer_params"] == self.transfer
        if self.fail_first:
            self.fail_first -= 1
            self.failed += 1
            return 500, {"error": {"message": "Failing 1 request(s) due to KV load failure"}}
        self.finished += 1 + self.others
        if self.recompute_first:
            self.recompute_first -= 1
        else:
            self.bytes += PROMPT_TOKENS * 1024
            self.transfers += 1
        tokens = self.tokens(body["prompt"])
        if self.transfers > 1 and self.wrong:
            self.wrong -= 1
            tokens[1] += 1
        events = self.events or [
            {"choices": [{"text": "w", "token_ids": [token], "finish_reason": None}]} for token in tokens
        ]
        return 200, "".join(f"data: {json.dumps(event)}\n\n" for event in events) + "data: [DONE]\n\n"

    def _page(self):
        running = self.busy > 0
        self.busy -= running
        return (
            f"vllm:nixl_bytes_transferred_sum {self.bytes}\nvllm:nixl_bytes_transferred_count {self.transfers}\n"
            f"vllm:nixl_xfer_time_seconds_sum {self.transfers * 0.01}\nvllm:nixl_post_time_seconds_sum 0\n"
            f"vllm:nixl_num_descriptors_sum {self.transfers * 36}\n"
            f"vllm:request_success_total {self.finished}\n"
            f"vllm:nixl_num_failed_transfers_total {self.failed}\n"
            f"vllm:num_requests_running {running:d}\nvllm:num_requests_waiting 0\n"
            f'vllm:cache_config_info{{block_size="{BLOCK}"}} 1\n'
        )

    def spec(self, name="p -> d"):
        return {
            "name": name,
            "prefill": {"engine": "p", "url": self.prefill.url},
            "decode": {"engine": "d", "url": self.decode.url},
        }


@pytest.fixture
def pair(fake_server):
    return FakePair(fake_server)


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch):
    monkeypatch.setattr("kv_proof.SETTLE", 0.1)
    monkeypatch.setattr("kv_proof.GRACE", 0.05)
    monkeypatch.setattr("kv_proof.PAUSE", 0.01)


@pytest.fixture
def patient(monkeypatch):
    """For what ends by itself, also on a busy machine."""
    monkeypatch.setattr("kv_proof.SETTLE", 10)
    monkeypatch.setattr("kv_proof.GRACE", 10)


@pytest.fixture
def prove(run_module, pair):
    def run(**params):
        return run_module("kv_proof", **{"pairs": [pair.spec()], "rounds": [[0]], **FAST, **params})

    return run


def test_a_sound_pair_passes_after_one_warm_up(prove, pair):
    result = prove()
    [proved] = result["pairs"]
    assert (proved["verdict"], proved["attempts"], proved["tokens_equal"]) == ("passed", 1, True)
    assert (proved["bytes"], proved["expected_bytes"]) == (PROMPT_TOKENS * 1024, 2 * BLOCK * 1024)
    assert [warmup["ok"] for warmup in proved["warmups"]] == [True]
    assert "passed" in result["table"][1]
    assert result["changed"] is False


def test_references_have_a_salt_of_their_own_and_transfers_have_none(prove, pair):
    prove()
    bodies = [body for _, body in pair.prefill.asked if body]
    salts = [body.get("cache_salt") for body in bodies if not body.get("kv_transfer_params")]
    assert len(set(salts)) == 2
    assert all(salts)
    assert all("cache_salt" not in body for body in bodies if body.get("kv_transfer_params"))


def test_no_prompt_is_sent_to_the_decode_twice(prove, pair):
    pair.others = 1
    prove(attempts=3)
    prompts = [body["prompt"] for _, body in pair.decode.asked if body]
    assert len(prompts) == len(set(prompts)) == 4


def test_warm_ups_absorb_what_a_restarted_prefill_leaves_behind(prove, pair):
    pair.fail_first = 2
    [proved] = prove()["pairs"]
    assert proved["verdict"] == "passed"
    assert [warmup["ok"] for warmup in proved["warmups"]] == [False, False, True]
    assert "KV load failure" in proved["warmups"][0]["seen"]


def test_engines_without_ranks_are_asked_for_none(prove, pair, monkeypatch):
    headers = []
    for server in (pair.prefill, pair.decode):

        def noting(path, body, answer=server.answer, request=server.request):
            headers.append(request.headers["X-data-parallel-rank"])
            return answer(path, body)

        monkeypatch.setattr(server, "answer", noting)
    assert prove()["pairs"][0]["verdict"] == "passed"
    assert set(headers) == {None}


def test_a_warm_up_that_moved_no_kv_is_not_taken_for_one_that_did(prove, pair):
    pair.recompute_first = 1
    [proved] = prove()["pairs"]
    assert [warmup["ok"] for warmup in proved["warmups"]] == [False, True]
    assert proved["warmups"][0]["seen"] == "2 tokens, 0 KV bytes"


def test_a_pair_that_stays_broken_fails_with_what_was_seen(prove, pair):
    pair.fail_first = 10
    result = prove()
    assert result["failed"]
    assert "p -> d" in result["msg"]
    assert "answered 500" in result["msg"]
    assert "KV load failure" in result["msg"]
    assert len(result["pairs"][0]["warmups"]) == 3


def test_an_engine_that_is_down_fails_its_pair_only_and_at_once(run_module, pair):
    down = pair.spec("q -> d")
    down["prefill"] = {"engine": "q", "url": "http://127.0.0.1:9"}
    result = run_module("kv_proof", pairs=[down, pair.spec()], rounds=[[0], [1]], **FAST)
    assert "failed for 1 of 2 pairs" in result["msg"]
    assert "q -> d: the prefill q is not there: http://127.0.0.1:9/health refused" in result["msg"]
    assert [one["verdict"] for one in result["pairs"]] == ["failed", "passed"]
    assert result["pairs"][0]["elapsed"] < 1


def test_other_traffic_is_tried_again_and_then_not_attributable(prove, pair):
    pair.others = 2
    result = prove(attempts=3)
    [proved] = result["pairs"]
    assert (proved["verdict"], proved["attempts"]) == ("not attributable", 3)
    assert "not attributable" in result["table"][1]


@pytest.mark.usefixtures("patient")
def test_a_decode_that_is_busy_is_waited_for(prove, pair):
    pair.busy = 3
    [proved] = prove(warmups=0)["pairs"]
    assert (proved["verdict"], proved["attempts"]) == ("passed", 1)


@pytest.mark.usefixtures("patient")
def test_counters_that_come_late_are_waited_for(prove, pair):
    pair.late = 2
    [proved] = prove(warmups=0)["pairs"]
    assert (proved["verdict"], proved["attempts"]) == ("passed", 1)


def test_a_page_that_takes_longer_than_counters_may_be_late_is_asked_for_again(prove, pair):
    pair.late, pair.page_takes = 1, 0.15
    [proved] = prove(warmups=0)["pairs"]
    assert (proved["verdict"], proved["attempts"]) == ("passed", 1)


def test_one_prompt_that_tells_nothing_is_replaced(prove, pair):
    pair.blind = 2
    assert prove(warmups=0)["pairs"][0]["verdict"] == "passed"


def test_a_token_that_rounding_may_have_decided_is_tried_again(prove, pair):
    pair.wrong = 2
    [judged] = prove()["pairs"]
    assert (judged["verdict"], judged["attempts"], judged["tokens_equal"]) == ("passed", 3, True)
    assert judged["reasons"] == []


@pytest.mark.parametrize(("gap", "tells"), [(3.0, True), (0.1, False)], ids=["sure", "untold"])
def test_another_wrong_token_is_not(prove, pair, gap, tells):
    pair.wrong, pair.gap, pair.tells = 2, gap, tells
    [judged] = prove()["pairs"]
    assert (judged["verdict"], judged["attempts"], judged["tokens_equal"]) == ("failed", 1, False)
    assert len(judged["reasons"]) == 1


def test_a_pair_that_rounds_every_prompt_otherwise_fails(prove, pair):
    pair.wrong = 99
    [judged] = prove()["pairs"]
    assert (judged["verdict"], judged["attempts"]) == ("failed", 5)
    assert "by 0.1 nats only, which rounding may turn; 5 prompts were tried" in judged["reasons"][1]


def test_too_little_kv_is_no_matter_of_rounding(prove, pair):
    pair.wrong = 99
    [judged] = prove(bytes_per_token=2048)["pairs"]
    assert judged["attempts"] == 1
    assert len(judged["reasons"]) == 2
    pair.wrong = 0
    prove(bytes_per_token=2048)
    assert not any("logprobs" in (body or {}) for _path, body in pair.prefill.asked)


def test_a_model_whose_tokens_tell_nothing_fails(prove, pair):
    pair.blind = 1000
    assert "the check is blind" in prove()["msg"]


@pytest.mark.parametrize(
    ("transfer", "seen"),
    [
        (None, "answered without kv_transfer_params"),
        ({"do_remote_prefill": True, "remote_block_ids": []}, "unusable kv_transfer_params"),
        ({"do_remote_prefill": False, "remote_block_ids": [[1]]}, "unusable kv_transfer_params"),
    ],
)
def test_a_prefill_that_offers_no_kv_fails(prove, pair, transfer, seen):
    pair.transfer = transfer
    assert seen in prove()["msg"]


@pytest.mark.parametrize(
    ("page", "seen"),
    [
        ("", "lacks vllm:"),
        ("<html>", "is not a Prometheus sample"),
        ("up 1", "vllm:nixl_bytes_transferred_sum"),
    ],
)
def test_metrics_that_cannot_be_used_fail(prove, pair, page, seen):
    pair.metrics = page or "\n"
    message = prove()["msg"]
    assert f"{pair.decode.url}/metrics cannot be used" in message
    assert seen in message


@pytest.mark.parametrize(
    ("events", "seen"),
    [
        ([{"error": {"message": "EngineDeadError"}}], "broke off its stream.*EngineDeadError"),
        ([{"choices": [{"text": "", "token_ids": [], "finish_reason": "error"}]}], "without a single token"),
        ([{"choices": [{"text": "words"}]}], "without token_ids"),
    ],
)
def test_a_stream_that_only_looks_well_fails(prove, pair, events, seen):
    pair.events = events
    result = prove()
    assert result["failed"]
    assert re.search(seen, result["msg"])


def test_the_budget_ends_a_pair(prove, pair):
    assert "0 s are used up" in prove(budget=0)["msg"]


def test_it_runs_in_check_mode(prove, run_module, pair):
    result = run_module("kv_proof", check=True, pairs=[pair.spec()], rounds=[[0]], **FAST)
    assert result["pairs"][0]["verdict"] == "passed"


@pytest.mark.parametrize(
    ("rounds", "seen"),
    [([], "exactly once"), ([[0], [0]], "exactly once"), ([[1]], "exactly once"), ([["a"]], "exactly once")],
)
def test_rounds_must_name_each_pair_once(prove, rounds, seen):
    assert seen in prove(rounds=rounds)["msg"]


@pytest.mark.parametrize(
    ("decodes", "seen"),
    [
        (("same", "same"), "has http://d twice"),
        (("same rank 1", "same rank 1"), "has http://d rank 1 twice"),
        (("same", "same rank 1"), "has http://d twice"),
    ],
)
def test_pairs_of_a_round_must_not_share_an_engine_or_a_rank(run_module, decodes, seen):
    pairs = [
        {
            "name": str(number),
            "prefill": {"engine": "p", "url": f"http://p{number}", "rank": 1},
            "decode": {"engine": "d", "url": "http://d", "rank": 1 if "rank" in decode else None},
        }
        for number, decode in enumerate(decodes)
    ]
    message = run_module("kv_proof", pairs=pairs, rounds=[[0, 1]], **FAST)["msg"]
    assert "must not share an engine or a rank" in message
    assert seen in message


# --- data-parallel engines ---------------------------------------------------------------------------------------


class FakeRanks:
    """A prefill and a decode of several ranks, as vLLM serves them behind one URL with several API servers.

    A request goes to the rank that its header names, through `to_prefill` and `to_decode`. The decode counts for
    each rank, and answers only when `together` requests have arrived and been counted: whoever looks at the
    counters of all ranks sees theirs too. A rank's gauges appear with its first request.
    """

    def __init__(self, start, prefill_ranks=2, decode_ranks=3, together=1):
        self.ranks = {"prefill": prefill_ranks, "decode": decode_ranks}
        self.prefill, self.decode = start(), start()
        self.prefill.answer, self.decode.answer = self._prefill, self._decode
        self.to_prefill = self.to_decode = int
        self.counted = [0] * decode_ranks
        self.transfers = []
        self.asked = {"prefill": [], "decode": []}
        self.lock = threading.Lock()
        self.barrier = threading.Barrier(together)

    def _arrives(self, role, to):
        """The rank the request comes to; vLLM spreads what names none."""
        header = getattr(self, role).request.headers["X-data-parallel-rank"]
        with self.lock:
            self.asked[role].append(header)
            return len(self.asked[role]) % self.ranks[role] if header is None else to(header)

    def _refusal(self, role, rank):
        message = f"data_parallel_rank {rank} is out of range [0, {self.ranks[role]})."
        return (400, {"error": {"message": message}}) if rank >= self.ranks[role] else None

    def _prefill(self, path, body):
        if path == "/health":
            return 200, b""
        rank = self._arrives("prefill", self.to_prefill)
        answer = {
            "usage": {"prompt_tokens": PROMPT_TOKENS},
            "choices": [{"text": "words", "token_ids": tokens_of(body["prompt"]), "finish_reason": "length"}],
        }
        if body.get("kv_transfer_params"):
            answer["kv_transfer_params"] = {
                "do_remote_prefill": True,
                "remote_block_ids": [[1, 2, 3]],
                "remote_engine_id": f"6f1e_dp{rank}",
            }
        return self._refusal("prefill", rank) or (200, answer)

    def _decode(self, path, body):
        if path == "/health":
            return 200, b""
        if path == "/metrics":
            return 200, self._page()
        rank = self._arrives("decode", self.to_decode)
        refusal = self._refusal("decode", rank)
        if refusal:
            return refusal
        with self.lock:
            self.counted[rank] += 1
            self.transfers.append((body["kv_transfer_params"]["remote_engine_id"], rank))
        self.barrier.wait(5)
        events = [
            {"choices": [{"text": "w", "token_ids": [token], "finish_reason": None}]}
            for token in tokens_of(body["prompt"])
        ]
        return 200, "".join(f"data: {json.dumps(event)}\n\n" for event in events) + "data: [DONE]\n\n"

    def _page(self):
        lines = []
        for rank, requests in enumerate(self.counted):
            labels = f'{{engine="{rank}",model_name="tiny"}}'
            lines += [
                f"vllm:nixl_bytes_transferred_sum{labels} {requests * PROMPT_TOKENS * 1024}",
                f"vllm:nixl_bytes_transferred_count{labels} {requests}",
                f"vllm:nixl_xfer_time_seconds_sum{labels} {requests * 0.01}",
                f"vllm:nixl_post_time_seconds_sum{labels} 0",
                f"vllm:nixl_num_descriptors_sum{labels} {requests * 36}",
                f"vllm:request_success_total{labels} {requests}",
                f"vllm:nixl_num_failed_transfers_total{labels} 0",
                f'vllm:cache_config_info{{engine="{rank}",block_size="{BLOCK}"}} 1',
            ]
            if requests:
                lines += [f"vllm:num_requests_{kind}{labels} 0" for kind in ("running", "waiting")]
        return "\n".join(lines) + "\n"

    def pairs(self):
        """Every rank with every rank, as `vllm_fleet.proof` makes them."""
        return [
            {
                "name": f"p rank {p} -> d rank {d}",
                "prefill": {"engine": "p", "url": self.prefill.url, "rank": p},
                "decode": {"engine": "d", "url": self.decode.url, "rank": d},
            }
            for p in range(self.ranks["prefill"])
            for d in range(self.ranks["decode"])
        ]


def tokens_of(prompt):
    return [sum(prompt.encode()) % 1000, hash(prompt) % 1000]


def one_by_one(pairs):
    return {"pairs": pairs, "rounds": [[index] for index in range(len(pairs))]}


def test_every_pair_of_ranks_is_proved_while_others_are(run_module, fake_server):
    fleet = FakeRanks(fake_server, together=2)
    # As `vllm_fleet.proof` orders them: in a round both prefill ranks send, each to another decode rank.
    result = run_module("kv_proof", pairs=fleet.pairs(), rounds=[[0, 4], [1, 5], [2, 3]], **FAST)
    assert not result.get("failed"), result
    assert [pair["verdict"] for pair in result["pairs"]] == ["passed"] * 6
    assert {pair["bytes"] for pair in result["pairs"]} == {PROMPT_TOKENS * 1024}
    # A warm-up and a measured request each, from the rank and to the rank that they name.
    assert sorted(fleet.transfers) == sorted(2 * [(f"6f1e_dp{p}", d) for p in range(2) for d in range(3)])
    assert set(fleet.asked["prefill"]) == {"0", "1"}
    assert set(fleet.asked["decode"]) == {"0", "1", "2"}


def test_every_pair_of_ranks_is_in_the_result_and_one_line_in_the_table(run_module, fake_server):
    fleet = FakeRanks(fake_server)
    result = run_module("kv_proof", **one_by_one(fleet.pairs()), **FAST)
    assert [(pair["prefill"], pair["decode"]) for pair in result["pairs"]] == [
        ({"engine": "p", "rank": p}, {"engine": "d", "rank": d}) for p in range(2) for d in range(3)
    ]
    assert [line.split("  ")[0] for line in result["table"][1:]] == ["p -> d (6 rank pairs)"]


def test_a_decode_that_gives_the_request_to_another_rank_fails(run_module, fake_server):
    fleet = FakeRanks(fake_server)
    fleet.to_decode = lambda header: 0
    result = run_module("kv_proof", **one_by_one(fleet.pairs()), **FAST)
    assert [pair["verdict"] for pair in result["pairs"]] == ["passed", "failed", "failed"] * 2
    told = "- p rank 0 -> d rank 1 and 1 more of their rank pairs: rank 1 of the decode counted no request and no KV"
    assert told in result["msg"]
    assert [line.split("  ")[0] for line in result["table"][2:]] == [""] * 4


def test_a_prefill_that_gives_the_request_to_another_rank_fails(run_module, fake_server):
    fleet = FakeRanks(fake_server, prefill_ranks=12, decode_ranks=2)
    fleet.to_prefill = lambda header: 11
    pairs = [pair for pair in fleet.pairs() if pair["prefill"]["rank"] in {1, 11}]
    result = run_module("kv_proof", **one_by_one(pairs), **FAST)
    assert [pair["verdict"] for pair in result["pairs"]] == ["failed", "failed", "passed", "passed"]
    assert "was asked for rank 1, but 6f1e_dp11 has the KV" in result["pairs"][0]["reasons"][0]


def test_a_prefill_whose_kv_belongs_to_no_rank_fails(run_module, fake_server):
    fleet = FakeRanks(fake_server)
    answer = fleet.prefill.answer

    def without_ranks(path, body):
        status, content = answer(path, body)
        if isinstance(content, dict) and "kv_transfer_params" in content:
            del content["kv_transfer_params"]["remote_engine_id"]
        return status, content

    fleet.prefill.answer = without_ranks
    result = run_module("kv_proof", pairs=fleet.pairs()[:1], rounds=[[0]], **FAST)
    assert "was asked for rank 0, but None has the KV" in result["msg"]


@pytest.mark.parametrize(
    ("role", "seen"),
    [
        ("prefill", "data_parallel_rank 7 is out of range [0, 2)"),
        ("decode", 'engine="7" (the data-parallel rank)'),
    ],
)
def test_a_rank_that_an_engine_does_not_have_fails(run_module, fake_server, role, seen):
    pair = FakeRanks(fake_server).pairs()[0]
    pair[role]["rank"] = 7
    assert seen in run_module("kv_proof", pairs=[pair], rounds=[[0]], **FAST)["msg"]


def test_ranks_that_fail_alike_are_told_once(run_module, fake_server):
    pairs = FakeRanks(fake_server).pairs()
    for pair in pairs:
        pair["decode"]["url"] = "http://127.0.0.1:9"
    result = run_module("kv_proof", **one_by_one(pairs), **FAST)
    first, *lines = result["msg"].splitlines()
    assert "failed for 6 of 6 pairs" in first
    [line] = lines
    assert line.startswith("- p rank 0 -> d rank 0 and 5 more of their rank pairs: the decode d is not there")
    assert len(result["pairs"]) == 6


class TellingLock:
    """A lock that tells who wants it."""

    def __init__(self):
        self.lock = threading.Lock()
        self.entered = threading.Semaphore(0)

    def __enter__(self):
        self.entered.release()
        self.lock.acquire()

    def __exit__(self, *_error):
        self.lock.release()


@pytest.fixture
def page(fake_server):
    """A page, whose fetches are counted and wait for `go`, and a reader for many threads."""
    server = fake_server()
    metrics = MetricsPage(server.url)
    metrics._lock = TellingLock()
    arrived, go = threading.Semaphore(0), threading.Event()

    def answer(_path, _body):
        arrived.release()
        assert go.wait(5)
        return (
            (500, b"broken")
            if server.broken
            else (200, f"vllm:request_success_total {len(server.asked)}\nup 1\n")
        )

    def outcome():
        try:
            return [sample.value for sample in metrics.read()]
        except HttpError as fault:
            return str(fault)

    def by_threads(number):
        """What each thread gets: the first fetches the page, and the others have asked before it has it."""
        go.clear()
        while arrived.acquire(blocking=False):  # those of the time before
            pass
        with ThreadPoolExecutor(number) as pool:
            futures = [pool.submit(outcome)]
            assert arrived.acquire(timeout=5)
            futures += [pool.submit(outcome) for _ in range(number - 1)]
            for _ in range(number):
                assert metrics._lock.entered.acquire(timeout=5)
            go.set()
            return [future.result() for future in futures]

    server.answer, server.broken, server.by_threads = answer, False, by_threads
    return server


def test_threads_that_wait_for_a_page_share_the_next_and_never_get_an_older_one(page):
    assert page.by_threads(5) == [[1.0]] + [[2.0]] * 4
    assert page.by_threads(1) == [[3.0]]


def test_a_page_that_cannot_be_had_is_not_replaced_by_an_older_one(page):
    assert page.by_threads(1) == [[1.0]]
    page.broken = True
    assert page.by_threads(5) == [f"{page.url}/metrics answered 500: broken"] * 5
    assert len(page.asked) == 3
    page.broken = False
    assert page.by_threads(1) == [[4.0]]

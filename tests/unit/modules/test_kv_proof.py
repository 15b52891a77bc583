"""The proof's steps against fake engines: what real ones do when they are sick, and other traffic."""

import json
import re

import pytest

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
        self.blind = 0
        self.transfer = {"do_remote_prefill": True, "remote_block_ids": [[1, 2, 3]]}
        self.metrics = None
        self.events = None

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
        return 200, answer

    def _decode(self, path, body):
        if path == "/health":
            return 200, b""
        if path == "/metrics":
            return 200, self.metrics or self._page()
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
        events = self.events or [
            {"choices": [{"text": "w", "token_ids": [token], "finish_reason": None}]}
            for token in self.tokens(body["prompt"])
        ]
        return 200, "".join(f"data: {json.dumps(event)}\n\n" for event in events) + "data: [DONE]\n\n"

    def _page(self):
        return (
            f"vllm:nixl_bytes_transferred_sum {self.bytes}\nvllm:nixl_bytes_transferred_count {self.transfers}\n"
            f"vllm:nixl_xfer_time_seconds_sum {self.transfers * 0.01}\nvllm:request_success_total {self.finished}\n"
            f"vllm:nixl_num_failed_transfers_total {self.failed}\n"
            "vllm:num_requests_running 0\nvllm:num_requests_waiting 0\n"
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


def test_one_prompt_that_tells_nothing_is_replaced(prove, pair):
    pair.blind = 2
    assert prove(warmups=0)["pairs"][0]["verdict"] == "passed"


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


def test_pairs_of_a_round_must_not_share_an_engine(run_module, pair):
    result = run_module("kv_proof", pairs=[pair.spec("a"), pair.spec("b")], rounds=[[0, 1]], **FAST)
    assert "must not share an engine" in result["msg"]

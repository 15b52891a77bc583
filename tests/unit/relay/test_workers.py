"""Workers, their health, and what only controllers may do."""

import asyncio
import ipaddress
import time
from urllib.parse import quote

import pytest
from aiohttp import web
from pd_relay.stages import COMPLETIONS
from pd_relay.workers import Health, normal_url
from relay_scene import QUICK, Engine, answering, decoded, in_loop, never, prefilled, scene

BODY = {"prompt": "x", "max_tokens": 2}
NOBODY = (ipaddress.ip_network("198.18.0.0/15"),)
CONTROL = (
    ("POST", "/workers"),
    ("DELETE", "/workers/http%3A%2F%2F127.0.0.1%3A1"),
    ("POST", "/abort_requests"),
    ("POST", "/pause"),
    ("POST", "/resume"),
)


@pytest.mark.parametrize(
    ("told", "url"),
    [
        ("http://198.18.40.4:8000", "http://198.18.40.4:8000"),
        ("http://198.18.40.4:8000/", "http://198.18.40.4:8000"),
        ("HTTP://Rack1-04:8000", "http://rack1-04:8000"),
        ("http://[2001:DB8::4]:8000", "http://[2001:db8::4]:8000"),
    ],
)
def test_a_worker_has_one_spelling(told, url):
    assert normal_url(told) == url


@pytest.mark.parametrize(
    "told",
    [None, 7, "", "198.18.40.4:8000", "http://198.18.40.4", "https://a:1", "http://a:0", "http://a:65536",
     "http://a:x", "http://a:1/v1", "http://a:1?x", "http://u:p@a:1", "http://:1", "http://[::1:8000", "file:///etc"],
)  # fmt: skip
def test_what_is_no_worker_is_told(told):
    with pytest.raises(ValueError, match="is not http://HOST:PORT"):
        normal_url(told)


@in_loop
async def test_health_is_that_of_the_workers():
    prefill, decode = Engine(prefilled), Engine(decoded)
    async with scene([prefill], [decode]) as relay:
        status, body, _ = await relay.ask("GET", "/health")
        assert (status, body["status"], body["missing"]) == (200, "ok", [])
        assert (body["prefill"], body["decode"]) == ({"healthy": 1, "total": 1}, {"healthy": 1, "total": 1})
        decode.health = 503
        await relay.until(lambda: not relay.relay.pool.healthy("decode"))
        status, body, _ = await relay.ask("GET", "/health")
        assert (status, body["missing"], body["decode"]) == (503, ["decode"], {"healthy": 0, "total": 1})
        status, body, headers = await relay.post(COMPLETIONS, BODY)
        assert (status, headers["Retry-After"]) == (503, "1")
        assert body["error"]["message"] == "no healthy decode worker"
        assert prefill.asked == []  # nothing was prefilled for nobody
        decode.health = 200
        await relay.until(lambda: bool(relay.relay.pool.healthy("decode")))
        assert (await relay.post(COMPLETIONS, BODY))[0] == 200


@in_loop
async def test_a_worker_that_does_not_answer_gets_no_requests():
    gone, there = Engine(prefilled), Engine(prefilled)
    async with scene([gone, there]) as relay:
        await gone.close()
        await relay.until(lambda: len(relay.relay.pool.healthy("prefill")) == 1)
        assert [(await relay.post(COMPLETIONS, BODY))[0] for _ in range(4)] == [200] * 4
    assert len(there.asked) == 4


@in_loop
async def test_one_late_answer_is_not_yet_a_sick_worker():
    decode = Engine(decoded)
    async with scene(decode=[decode], health=Health(interval=0.2, timeout=0.5, failures=3)) as relay:
        asked = time.monotonic()
        decode.health = 500
        await relay.until(lambda: not relay.relay.pool.healthy("decode"))
        assert time.monotonic() - asked > 0.35
    async with scene(decode=[decode], wait=False, health=Health(interval=0.2, successes=3)) as relay:
        decode.health = 200
        started = time.monotonic()
        await relay.until(lambda: bool(relay.relay.pool.healthy("decode")))
        assert time.monotonic() - started > 0.35


@in_loop
async def test_nobody_is_healthy_before_it_has_said_so():
    prefill = Engine(prefilled, health=503)
    async with scene([prefill], wait=False) as relay:
        assert (await relay.ask("GET", "/health"))[0] == 503
        assert (await relay.post(COMPLETIONS, BODY))[0] == 503


@in_loop
async def test_workers_come_and_go():
    first, second = Engine(decoded), Engine(answering(200, {"second": True}))
    await second.start()
    async with scene(decode=[first]) as relay:
        status, body, _ = await relay.post("/workers", {"url": second.url + "/", "worker_type": "decode"})
        assert (status, body["url"], body["worker_type"]) == (201, second.url, "decode")
        assert (await relay.post("/workers", {"url": second.url, "worker_type": "prefill"}))[0] == 409
        await relay.until(lambda: len(relay.relay.pool.healthy("decode")) == 2)
        status, body, _ = await relay.ask("GET", "/workers")
        assert [(one["url"], one["worker_type"], one["is_healthy"]) for one in body["workers"]][1:] == [
            (first.url, "decode", True),
            (second.url, "decode", True),
        ]
        assert body["total"] == 3
        assert (await relay.ask("DELETE", f"/workers/{quote(first.url, safe='')}"))[0] == 200
        assert (await relay.ask("DELETE", f"/workers/{quote(first.url, safe='')}"))[0] == 404
        looks = first.looks
        for _ in range(3):
            assert (await relay.post(COMPLETIONS, BODY))[1] == {"second": True}
        await asyncio.sleep(5 * QUICK.interval)
        assert first.looks <= looks + 1  # one may have been under way
    assert first.asked == []
    await second.close()


@in_loop
async def test_a_request_to_a_removed_worker_finishes():
    go = asyncio.Event()

    async def waits(request, body):
        await go.wait()
        return await decoded(request, body)

    decode = Engine(waits)
    async with scene(decode=[decode]) as relay:
        running = asyncio.create_task(relay.post(COMPLETIONS, BODY))
        await relay.until(lambda: len(decode.asked) == 1)
        assert (await relay.ask("DELETE", f"/workers/{quote(decode.url, safe='')}"))[0] == 200
        go.set()
        assert (await running)[0] == 200
        assert (await relay.post(COMPLETIONS, BODY))[0] == 503


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ({}, "worker_type None"),
        ({"url": "http://a:1"}, "worker_type None"),
        ({"url": "http://a:1", "worker_type": "mixed"}, "worker_type 'mixed' is not prefill or decode"),
        ({"url": "a:1", "worker_type": "decode"}, "is not http://HOST:PORT"),
        ({"worker_type": "decode"}, "is not http://HOST:PORT"),
        ({"url": "http://a:1", "worker_type": ["decode"]}, "worker_type"),
        ([], "body is not a JSON object"),
    ],
)
@in_loop
async def test_a_wrong_worker_is_400(body, says):
    async with scene() as relay:
        status, answer, _ = await relay.post("/workers", body)
        assert status == 400
        assert says in answer["error"]["message"]
        assert (await relay.ask("DELETE", "/workers/nonsense"))[0] == 400


@in_loop
async def test_a_broadcast_goes_to_all_at_once_and_is_told_by_worker():
    async def slow(_request, _body):
        await asyncio.sleep(0.5)
        return web.json_response({"status": "paused"})

    prefills, decodes = [Engine(slow), Engine(slow)], [Engine(slow)]
    async with scene(prefills, decodes) as relay:
        started = time.monotonic()
        status, body, _ = await relay.post("/pause?mode=keep&clear_cache=false", {})
        assert time.monotonic() - started < 1.2
    assert status == 200
    assert body == {one.url: {"ok": True, "status": 200, "error": None} for one in prefills + decodes}
    assert {tuple(one.paths) for one in prefills + decodes} == {("/pause?mode=keep&clear_cache=false",)}


@in_loop
async def test_a_broadcast_that_fails_at_one_says_which_and_why():
    well, ill, late, gone = (
        Engine(answering(200, b"")),
        Engine(answering(500, {"error": "no"})),
        Engine(never),
        Engine(decoded),
    )
    async with scene([well, ill], [late, gone], control_timeout=0.5) as relay:
        await gone.close()
        status, body, _ = await relay.post("/abort_requests", {"request_ids": ["a"]})
    assert status == 502
    assert body[well.url] == {"ok": True, "status": 200, "error": None}
    assert body[ill.url] == {"ok": False, "status": 500, "error": '{"error": "no"}'}
    assert body[late.url] == {
        "ok": False,
        "status": None,
        "error": "no answer within 0.5 s (--control-timeout)",
    }
    assert not body[gone.url]["ok"]
    assert "Cannot connect" in body[gone.url]["error"]
    assert well.asked == [{"request_ids": ["a"]}]


@in_loop
async def test_a_broadcast_reaches_workers_that_are_not_healthy():
    prefill = Engine(answering(200, {}), health=503)
    async with scene([prefill], wait=False) as relay:
        assert (await relay.post("/resume", {}))[0] == 200
    assert prefill.paths == ["/resume"]


@pytest.mark.parametrize(("method", "path"), CONTROL)
@in_loop
async def test_only_controllers_control(method, path):
    prefill = Engine(prefilled)
    for controllers in ((), NOBODY):
        async with scene([prefill], controllers=controllers) as relay:
            status, body, _ = await relay.ask(method, path, data=b"{}")
            assert (status, body["error"]["type"]) == (403, "PermissionDeniedError")
            assert (await relay.ask("GET", "/workers"))[0] == 200
            assert (await relay.post(COMPLETIONS, BODY))[0] == 200
    assert set(prefill.paths) == {COMPLETIONS}


@in_loop
async def test_its_session_and_watches_end_with_it():
    async with scene() as relay:
        session, watches = relay.relay.session, list(relay.relay.pool._watches.values())
        assert not session.closed
    assert session.closed
    assert all(watch.done() for watch in watches)


def test_the_tests_watch_quicker_than_fleets():
    assert QUICK.interval < Health().interval

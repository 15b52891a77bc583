"""The service between stand-ins for engines: requests, streams, failures, cancelling."""

import asyncio
import gzip
import json
import time

import aiohttp
import pytest
from aiohttp import web
from pd_relay.stages import CHAT, COMPLETIONS, GENERATE, PATHS
from relay_scene import (
    PARAMS,
    Engine,
    answering,
    decoded,
    in_loop,
    never,
    prefilled,
    scene,
    streaming,
)

BODY = {"model": "tiny", "prompt": "A prompt that nobody may log", "max_tokens": 9}
TOKENS = {"token_ids": [1, 2], "sampling_params": {"max_tokens": 9}}
BODIES = {COMPLETIONS: BODY, CHAT: {"messages": [{"role": "user", "content": "x"}]}, GENERATE: TOKENS}


def logged(capsys):
    """What the relay logged of requests."""
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    return [line for line in lines if line["event"] == "request"]


@pytest.mark.parametrize("path", PATHS)
@in_loop
async def test_a_request_goes_to_the_prefill_and_then_to_the_decode(path):
    prefill, decode = Engine(prefilled), Engine(decoded)
    async with scene([prefill], [decode]) as relay:
        status, body, headers = await relay.post(path, BODIES[path])
    assert (status, body) == (200, {"id": "d", "choices": [{"text": " hello"}]})
    assert headers["Content-Type"].startswith("application/json")
    [first], [second] = prefill.asked, decode.asked
    assert first["kv_transfer_params"] == {"do_remote_decode": True, "do_remote_prefill": False}
    assert (first.get("sampling_params") or first)["max_tokens"] == 1
    assert second == BODIES[path] | {"kv_transfer_params": PARAMS}
    assert (prefill.paths, decode.paths) == ([path], [path])


@in_loop
async def test_the_request_id_is_the_clients_and_goes_everywhere(capsys):
    prefill, decode = Engine(prefilled), Engine(decoded)
    async with scene([prefill], [decode]) as relay:
        *_, headers = await relay.post(COMPLETIONS, BODY, headers={"X-Request-Id": "mine-7"})
        await relay.post(COMPLETIONS, BODY | {"request_id": "of-the-body"})
        *_, made = await relay.post(COMPLETIONS, BODY, headers={"X-Request-Id": "has a blank"})
    assert headers["X-Request-Id"] == "mine-7"
    assert len(made["X-Request-Id"]) == 32
    ids = ["mine-7", "of-the-body", made["X-Request-Id"]]
    assert [one["X-Request-Id"] for one in prefill.headers] == ids
    assert [one["X-Request-Id"] for one in decode.headers] == ids
    assert [line["id"] for line in logged(capsys)] == ids


@in_loop
async def test_of_the_clients_headers_only_traces_and_the_session_go_on():
    prefill, decode = Engine(prefilled), Engine(decoded)
    sent = {
        "traceparent": "00-a-b-01",
        "X-Session-ID": "s",
        "Authorization": "Bearer k",
        "X-data-parallel-rank": "1",
    }
    async with scene([prefill], [decode]) as relay:
        await relay.post(COMPLETIONS, BODY, headers=sent)
    for headers in (prefill.headers[0], decode.headers[0]):
        assert (headers["traceparent"], headers["X-Session-ID"]) == ("00-a-b-01", "s")
        assert not {"authorization", "x-data-parallel-rank"} & {name.lower() for name in headers}


@in_loop
async def test_one_line_is_logged_of_a_request_without_its_prompt(capsys):
    prefill, decode = Engine(prefilled), Engine(decoded)
    async with scene([prefill], [decode]) as relay:
        await relay.post(COMPLETIONS, BODY, headers={"Authorization": "Bearer secret-key"})
    [line] = logged(capsys)
    assert (line["path"], line["status"], line["client"]) == (COMPLETIONS, 200, "127.0.0.1")
    assert (line["prefill"], line["decode"]) == (prefill.url, decode.url)
    assert 0 < line["prefill_ms"] <= line["ttft_ms"] <= line["total_ms"]
    assert (line["kv_blocks"], line["kv_tokens"]) == (3, 300)
    assert line["bytes"] == len(json.dumps({"id": "d", "choices": [{"text": " hello"}]}))
    assert "nobody may log" not in json.dumps(line)
    assert "secret-key" not in json.dumps(line)


@in_loop
async def test_workers_take_turns_by_role():
    prefills, decodes = [Engine(prefilled) for _ in range(3)], [Engine(decoded) for _ in range(2)]
    async with scene(prefills, decodes) as relay:
        for _ in range(6):
            await relay.post(COMPLETIONS, BODY)
    assert [len(engine.asked) for engine in prefills] == [2, 2, 2]
    assert [len(engine.asked) for engine in decodes] == [3, 3]


@pytest.mark.parametrize("path", PATHS)
@in_loop
async def test_a_prefill_without_kv_transfer_is_502_with_the_reason(path):
    prefill, decode = Engine(answering(200, {"choices": []})), Engine(decoded)
    async with scene([prefill], [decode]) as relay:
        status, body, _ = await relay.post(path, BODIES[path])
    assert status == 502
    assert "KV transfer is not engaged" in body["error"]["message"]
    assert prefill.url in body["error"]["message"]
    assert decode.asked == []


@in_loop
async def test_an_incomplete_answer_of_the_prefill_never_reaches_the_decode():
    for name in ("remote_engine_id", "remote_host", "remote_port", "remote_block_ids", "remote_request_id"):
        params = {key: value for key, value in PARAMS.items() if key != name}
        decode = Engine(decoded)
        async with scene([Engine(answering(200, {"kv_transfer_params": params}))], [decode]) as relay:
            status, body, _ = await relay.post(COMPLETIONS, BODY)
        assert (status, decode.asked) == (502, [])
        assert f"lacks {name}" in body["error"]["message"]


@pytest.mark.parametrize("status", [400, 404, 429, 500, 503])
@in_loop
async def test_what_the_prefill_answers_instead_of_200_passes_through(status):
    words = b'{"error": {"message":   "as the engine spells it"}}'
    decode = Engine(decoded)
    async with (
        scene([Engine(answering(status, words, "application/problem+json"))], [decode]) as relay,
        relay.client.post(relay.url(COMPLETIONS), json=BODY) as answer,
    ):
        assert (answer.status, await answer.read()) == (status, words)
        assert answer.headers["Content-Type"] == "application/problem+json"
    assert decode.asked == []


@in_loop
async def test_what_the_decode_answers_instead_of_a_stream_passes_through():
    words = b'{"error":"busy"}'
    async with (
        scene(decode=[Engine(answering(503, words))]) as relay,
        relay.client.post(relay.url(COMPLETIONS), json=BODY | {"stream": True}) as answer,
    ):
        assert (answer.status, await answer.read()) == (503, words)


@in_loop
async def test_what_the_decode_has_packed_passes_through_as_it_is():
    """It is asked not to; and an intermediary may."""
    packed = gzip.compress(b'{"choices": []}')

    async def script(_request, _body):
        return web.Response(
            body=packed, headers={"Content-Encoding": "gzip", "Content-Type": "application/json"}
        )

    decode = Engine(script)
    async with (
        scene(decode=[decode]) as relay,
        aiohttp.ClientSession(auto_decompress=False) as client,
        client.post(relay.url(COMPLETIONS), json=BODY) as answer,
    ):
        assert (answer.headers["Content-Encoding"], await answer.read()) == ("gzip", packed)
    assert decode.headers[0]["Accept-Encoding"] == "identity"


@in_loop
async def test_no_connection_is_used_that_an_engine_may_be_about_to_close():
    async with scene() as relay:
        assert relay.relay.session.connector._keepalive_timeout < 5  # vLLM's VLLM_HTTP_TIMEOUT_KEEP_ALIVE


@in_loop
async def test_a_stream_passes_through_byte_for_byte_and_chunk_by_chunk(capsys):
    chunks = [f'data: {{"n": {number}}}\n\n'.encode() for number in range(5)] + [b"data: [DONE]\n\n"]
    async with scene(decode=[Engine(streaming(*chunks, pause=0.1))]) as relay:
        seen, when = [], []
        async with relay.client.post(relay.url(COMPLETIONS), json=BODY | {"stream": True}) as answer:
            assert answer.headers["Content-Type"] == "text/event-stream; charset=utf-8"
            async for chunk in answer.content.iter_any():
                seen.append(chunk)
                when.append(time.monotonic())
        await asyncio.sleep(0.05)
    assert seen == chunks
    assert when[-1] - when[0] > 0.4  # nothing was held back
    [line] = logged(capsys)
    assert line["ttft_ms"] < 100 + line["prefill_ms"]
    assert line["total_ms"] > 500
    assert line["bytes"] == len(b"".join(chunks))


@in_loop
async def test_a_client_that_reads_slowly_slows_the_decode_down():
    sent = 0

    async def script(request, _body):
        nonlocal sent
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for _ in range(2000):
            await response.write(b"x" * 2**16)
            sent += 2**16
        return response

    async with (
        scene(decode=[Engine(script)]) as relay,
        relay.client.post(relay.url(COMPLETIONS), json=BODY | {"stream": True}) as answer,
    ):
        await answer.content.readany()
        await asyncio.sleep(0.5)
        held = sent
        await asyncio.sleep(0.5)
        assert held == sent < 2000 * 2**16  # what the sockets take, and no more
        total = sum([len(chunk) async for chunk in answer.content.iter_any()], 0)
        assert total > 100 * 2**20


@in_loop
async def test_a_decode_that_dies_in_a_stream_is_told_in_the_stream(capsys):
    decode = Engine(streaming(b'data: {"n": 1}\n\n', b'data: {"n"', pause=0.05, cut=True))
    async with (
        scene(decode=[decode]) as relay,
        relay.client.post(relay.url(COMPLETIONS), json=BODY | {"stream": True}) as answer,
    ):
        content = await answer.read()
    events = content.split(b"\n\n")
    assert events[0] == b'data: {"n": 1}'
    assert decode.url in json.loads(events[2].removeprefix(b"data: "))["error"]["message"]
    assert b"[DONE]" not in content
    assert decode.url in logged(capsys)[0]["error"]


@in_loop
async def test_a_decode_that_dies_before_its_end_is_502():
    async def script(request, _body):
        request.transport.abort()
        return web.Response()

    async with scene(decode=[Engine(script)]) as relay:
        status, body, _ = await relay.post(COMPLETIONS, BODY)
    assert (status, body["error"]["type"]) == (502, "BadGatewayError")


@in_loop
async def test_a_worker_that_refuses_connections_is_502_by_its_name():
    for role in ("prefill", "decode"):
        engines = {"prefill": [Engine(prefilled)], "decode": [Engine(decoded)]}
        async with scene(**engines) as relay:
            [gone] = engines[role]
            await gone.close()
            status, body, _ = await relay.post(COMPLETIONS, BODY)
            assert status == 502
            assert f"{role} {gone.url}" in body["error"]["message"]


@in_loop
async def test_the_request_time_out_ends_what_hangs():
    hangs = streaming(b"data: 1\n\n", pause=60)
    for engines, stream in (
        ({"prefill": [Engine(never)]}, False),
        ({"decode": [Engine(never)]}, False),
        ({"decode": [Engine(hangs)]}, True),
    ):
        async with scene(**engines, request_timeout=0.5) as relay:
            started = time.monotonic()
            status, body, _ = await relay.post(COMPLETIONS, BODY | {"stream": stream})
            assert time.monotonic() - started < 3
            if stream:
                body = json.loads(body.split(b"\n\n")[-2].removeprefix(b"data: "))
            else:
                assert status == 504
            assert "--request-timeout" in body["error"]["message"]


@in_loop
async def test_a_client_that_goes_takes_its_prefill_with_it(capsys):
    prefill, decode = Engine(never), Engine(decoded)
    async with scene([prefill], [decode]) as relay:
        with pytest.raises(TimeoutError):
            await relay.post(COMPLETIONS, BODY, timeout=aiohttp.ClientTimeout(total=0.3))
        await relay.until(lambda: prefill.cancelled == 1)
        assert decode.asked == []
        await relay.until(lambda: all(worker.in_flight == 0 for worker in relay.relay.pool.workers.values()))
    [line] = logged(capsys)
    assert (line["status"], line["error"]) == (499, "cancelled")


@pytest.mark.parametrize("script", [never, streaming(*[b"data: 1\n\n"] * 1000, pause=0.05)])
@in_loop
async def test_a_client_that_goes_takes_its_decode_with_it(script, capsys):
    decode = Engine(script)
    async with scene(decode=[decode]) as relay:
        with pytest.raises(TimeoutError):
            await relay.post(COMPLETIONS, BODY, timeout=aiohttp.ClientTimeout(total=0.3))
        await relay.until(lambda: decode.cancelled == 1)
        await relay.until(lambda: all(worker.in_flight == 0 for worker in relay.relay.pool.workers.values()))
    assert [line["status"] for line in logged(capsys)] == [499]


@pytest.mark.parametrize("chunked", [False, True])
@in_loop
async def test_a_body_that_is_too_large_is_413(chunked):
    prefill = Engine(prefilled)
    async with scene([prefill], max_body=10_000) as relay:
        data = json.dumps(BODY | {"prompt": "x" * 10_000}).encode()

        async def parts():
            for start in range(0, len(data), 1000):
                yield data[start : start + 1000]

        status, body, _ = await relay.ask("POST", COMPLETIONS, data=parts() if chunked else data)
        assert status == 413
        assert "10000 bytes (--max-body)" in body["error"]["message"]
        assert (await relay.post(COMPLETIONS, BODY))[0] == 200
    assert len(prefill.asked) == 1


@pytest.mark.parametrize("content", [b"", b"[]", b"{", b'{"prompt": ["a", "b"]}', b'{"n": 3}', b"\xff\xfe"])
@in_loop
async def test_a_wrong_body_is_400_in_openais_form(content):
    prefill = Engine(prefilled)
    async with scene([prefill]) as relay:
        status, body, _ = await relay.post(COMPLETIONS, content)
    assert status == 400
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert (body["error"]["type"], body["error"]["code"]) == ("BadRequestError", 400)
    assert prefill.asked == []


@in_loop
async def test_null_in_extra_args_is_the_engines_to_judge():
    prefill = Engine(prefilled)
    async with scene([prefill]) as relay:
        body = {"token_ids": [1], "sampling_params": {"extra_args": None}}
        assert (await relay.post(GENERATE, body))[0] == 200
    assert prefill.asked[0]["sampling_params"]["extra_args"] is None


@in_loop
async def test_sixty_four_at_once_are_all_answered_and_not_one_after_another():
    async def slow(request, body):
        await asyncio.sleep(0.2)
        return await decoded(request, body)

    async with scene(decode=[Engine(slow)]) as relay:
        started = time.monotonic()
        done = await asyncio.gather(*(relay.post(COMPLETIONS, BODY) for _ in range(64)))
    assert [status for status, *_ in done] == [200] * 64
    assert time.monotonic() - started < 5

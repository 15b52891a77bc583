"""The program: its arguments, its end."""

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import aiohttp
import pytest
from pd_relay.stages import COMPLETIONS
from relay_scene import Engine, in_loop, never, prefilled, streaming

SOURCE = Path(__file__).parents[3] / "images/pd-relay/src"
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(SOURCE)}
COMMAND = [sys.executable, "-m", "pd_relay"]


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def run(*words: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [*COMMAND, *words], env=ENVIRONMENT, capture_output=True, text=True, timeout=30, check=False
    )


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--prefill", "198.18.40.4:8000"], "argument --prefill: '198.18.40.4:8000' is not http://HOST:PORT"),
        (["--controllers", "10.0.0.1/8"], "argument --controllers: 10.0.0.1/8 has host bits set"),
        (["--request-timeout", "0"], "argument --request-timeout: '0' is not a number above 0"),
        (["--max-body", "1.5"], "argument --max-body: '1.5' is not a whole number"),
        (["--port", "x"], "argument --port"),
        (["--nonsense"], "unrecognized arguments: --nonsense"),
        (["--decode", "http://a:1", "--prefill", "http://a:1"], "http://a:1 is given twice"),
    ],
)
def test_a_wrong_argument_is_told_in_one_line(words, says):
    done = run(*words)
    assert (done.returncode, done.stdout) == (2, "")
    assert says in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_a_port_that_is_taken_is_told_without_a_traceback():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        done = run("--port", str(taken.getsockname()[1]))
    assert done.returncode == 1
    assert "cannot listen on 127.0.0.1" in done.stderr
    assert "Traceback" not in done.stderr


async def started(prefill: Engine, decode: Engine, *words: str):
    """The program between two stand-ins, once it is healthy; and its URL."""
    await prefill.start()
    await decode.start()
    port = free_port()
    program = await asyncio.create_subprocess_exec(
        *COMMAND, f"--port={port}", f"--prefill={prefill.url}", f"--decode={decode.url}", *words,
        env=ENVIRONMENT, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    url = f"http://127.0.0.1:{port}"
    for _ in range(200):
        await asyncio.sleep(0.05)
        try:
            async with aiohttp.ClientSession() as client, client.get(f"{url}/health") as answer:
                if answer.status == 200:
                    return program, url
        except aiohttp.ClientError:
            assert program.returncode is None
    raise AssertionError("it did not become healthy")


@in_loop
async def test_sigterm_lets_a_stream_finish_takes_no_new_one_and_ends():
    prefill, decode = Engine(prefilled), Engine(streaming(*[b"data: 1\n\n"] * 10, pause=0.2))
    program, url = await started(prefill, decode, "--drain-timeout=10")
    async with aiohttp.ClientSession() as client:
        async with client.post(url + COMPLETIONS, json={"prompt": "x", "stream": True}) as answer:
            await answer.content.readany()
            program.send_signal(signal.SIGTERM)
            await asyncio.sleep(0.3)
            with pytest.raises(aiohttp.ClientConnectorError):
                async with aiohttp.ClientSession() as other:
                    await other.post(url + COMPLETIONS, json={"prompt": "x"})
            assert (await answer.read()).count(b"data: 1") >= 8
        out, err = await program.communicate()
    assert (program.returncode, err) == (0, b"")
    events = [json.loads(line) for line in out.splitlines()]
    assert [one["event"] for one in events] == [
        "starting",
        "started",
        "healthy",
        "healthy",
        "request",
        "stopped",
    ]
    assert events[4]["status"] == 200
    await prefill.close()
    await decode.close()


@in_loop
async def test_what_outlasts_the_drain_is_cancelled():
    prefill, decode = Engine(prefilled), Engine(never)
    program, url = await started(prefill, decode, "--drain-timeout=0.5")
    async with aiohttp.ClientSession() as client:
        asked = asyncio.create_task(client.post(url + COMPLETIONS, json={"prompt": "x"}))
        while not decode.asked:
            await asyncio.sleep(0.05)
        program.send_signal(signal.SIGTERM)
        begun = time.monotonic()
        with pytest.raises(aiohttp.ClientError):
            await asked
        out, err = await program.communicate()
    assert (program.returncode, err) == (0, b"")
    assert time.monotonic() - begun < 5
    assert decode.cancelled == 1
    assert [one["status"] for one in map(json.loads, out.splitlines()) if one["event"] == "request"] == [499]
    await prefill.close()
    await decode.close()


@in_loop
async def test_a_client_that_goes_takes_its_decode_with_it():
    prefill, decode = Engine(prefilled), Engine(never)
    program, url = await started(prefill, decode)
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=0.5)) as client:
        with pytest.raises(TimeoutError):
            await client.post(url + COMPLETIONS, json={"prompt": "x"})
    while not decode.cancelled:
        await asyncio.sleep(0.05)
    program.send_signal(signal.SIGTERM)
    await program.communicate()
    await prefill.close()
    await decode.close()

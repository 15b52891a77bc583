"""Sick answers become one sentence that names the URL and what was seen."""

import http.client
import socket
import threading
import time
from contextlib import contextmanager

import pytest
from ansible.module_utils.fleet_http import HttpError, fetch, fetch_json, stream_events


@contextmanager
def raw_server(*parts: bytes, pause: float = 0.0, hold: float = 0.0):
    """A server that sends these bytes to its first client, whatever it asks."""
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        client, _ = listener.accept()
        with client:
            client.recv(65536)
            try:
                for part in parts:
                    client.sendall(part)
                    time.sleep(pause)
                time.sleep(hold)
            except OSError:
                return

    threading.Thread(target=serve, daemon=True).start()
    with listener:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}/x"


def http_answer(body: bytes, length: int | None = None) -> bytes:
    return b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (
        len(body) if length is None else length,
        body,
    )


def test_a_refused_connection_says_that_nothing_listens():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    with pytest.raises(HttpError, match=f"127.0.0.1:{port}/x refused the connection: nothing listens there"):
        fetch(f"http://127.0.0.1:{port}/x")


@pytest.mark.parametrize(
    ("body", "seen"),
    [
        (b"", r"not JSON: \(empty body\)"),
        (b"<html>busy</html>", "not JSON: <html>busy</html>"),
        (b'{"half": ', 'not JSON: {"half":'),
        (b"[1]", r"not an object: \[1\]"),
        (b"\xff\xfe", "not JSON"),
    ],
)
def test_a_body_that_is_no_json_object_is_shown(body, seen):
    with raw_server(http_answer(body)) as url, pytest.raises(HttpError, match=seen):
        fetch_json(url)


@pytest.mark.parametrize("sent", [b"", http_answer(b"half", length=100), b"HTTP/1.1 2"])
def test_a_connection_closed_too_early_is_named(sent):
    with raw_server(sent) as url, pytest.raises(HttpError, match=r"closed the connection|not HTTP"):
        fetch(url)


def test_something_that_is_not_http_is_named():
    with raw_server(b"SSH-2.0-OpenSSH_9.2\r\n") as url, pytest.raises(HttpError, match="not HTTP"):
        fetch(url)


def test_a_silent_server_ends_with_the_time_out():
    with raw_server(hold=5) as url, pytest.raises(HttpError, match="did not answer within"):
        fetch(url, timeout=0.2)


def test_a_trickle_does_not_outlive_the_time_out():
    parts = [http_answer(b"", length=1000), *[b"x"] * 50]
    began = time.monotonic()
    with raw_server(*parts, pause=0.1) as url, pytest.raises(HttpError, match="did not answer within"):
        fetch(url, timeout=0.5)
    assert time.monotonic() - began < 2


def test_a_trickle_that_stops_does_not_start_the_time_out_again():
    parts = [http_answer(b"", length=1000), *[b"x"] * 8]
    began = time.monotonic()
    with raw_server(*parts, pause=0.1, hold=5) as url, pytest.raises(HttpError, match="within 1 s"):
        fetch(url, timeout=1)
    assert time.monotonic() - began < 1.5


def test_an_error_status_shows_the_answer():
    sent = b"HTTP/1.1 500 x\r\nContent-Length: 9\r\n\r\nKV failed"
    with raw_server(sent) as url, pytest.raises(HttpError, match="answered 500: KV failed"):
        fetch_json(url)


@pytest.mark.parametrize("url", ["http://127.0.0.1:notaport/x", "http:///x", "http://no.such.host.invalid/x"])
def test_a_url_that_leads_nowhere_is_a_fault(url):
    with pytest.raises(HttpError, match=r"cannot be reached|refused"):
        fetch(url, timeout=2)


def test_events_come_as_objects_until_done():
    with raw_server(http_answer(b'data: {"a": 1}\n\n: comment\n\ndata: {"a": 2}\n\ndata: [DONE]\n\n')) as url:
        assert list(stream_events(url, {}, 5)) == [{"a": 1}, {"a": 2}]


@pytest.mark.parametrize(
    ("body", "seen"),
    [(b'data: {"a": 1}\n\n', r"without \[DONE\]"), (b"data: oops\n\n", "not JSON: oops")],
)
def test_a_stream_that_breaks_off_is_a_fault(body, seen):
    with raw_server(http_answer(body)) as url, pytest.raises(HttpError, match=seen):
        list(stream_events(url, {}, 5))


def test_an_answer_is_whole_where_python_closes_the_socket_with_its_last_byte(monkeypatch):
    """As 3.12.3 and 3.13 do where the peer says `Connection: close`, whatever this Python does."""
    read1 = http.client.HTTPResponse.read1

    def newer(self, n=-1):
        result = read1(self, n)
        if self.length == 0:
            self._close_conn()
        return result

    monkeypatch.setattr(http.client.HTTPResponse, "read1", newer)
    answer = b'HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 8\r\n\r\n{"a": 1}'
    with raw_server(answer) as url:
        assert fetch_json(url) == {"a": 1}

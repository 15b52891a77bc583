"""The program that keeps the members of an engine together: real processes, one loopback address for each member."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

LINK = Path(__file__).parents[2] / "roles/vllm_engine/files/engine-link"
NAMES = ("decode", "decode.1", "decode.2")
ADDRESSES = dict(zip(NAMES, ("127.0.0.2", "127.0.0.3", "127.0.0.4"), strict=True))
STRANGER = "127.0.0.9"
# Leaves its process id and ends with the status that is written into a file. Deaf to SIGTERM where a file says so.
CHILD = """
[ -e $0.deaf ] && trap '' TERM
echo $$ > $0.pid
until [ -e $0.exit ]; do sleep 0.03; done
exit $(cat $0.exit)
"""
# `run` is such a child; `stop` ends it as long as no file says that it fails or hangs.
DOCKER = """#!/bin/sh
echo "$*" >> "$FAKE/calls"
for last; do :; done
case $1 in
run) exec "$FAKE/child" "$FAKE/$last" ;;
stop)
  [ -e "$FAKE/stop-hangs" ] && exec sleep 30
  [ -e "$FAKE/stop-fails" ] && exit 1
  echo 143 > "$FAKE/$last.exit" ;;
kill) kill -KILL "$(cat "$FAKE/$last.pid")" ;;
esac
"""


def eventually(what: Callable[[], object], seconds: float = 10) -> None:
    """Wait until it holds."""
    until = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < until, "this did not become true in time"
        time.sleep(0.02)


def alive(pid: int) -> bool:
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


def free_port(address: str) -> int:
    with socket.create_server(
        (address, 0), family=socket.AF_INET6 if ":" in address else socket.AF_INET
    ) as server:
        return server.getsockname()[1]


class Engine:
    """The members of one engine, all on this machine."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.addresses = dict(ADDRESSES)
        self.port = free_port("127.0.0.2")
        self.settings = {"heartbeat": 0.05, "silence": 10, "grace": 5}
        self.running: dict[str, subprocess.Popen[str]] = {}
        self.all: list[subprocess.Popen[str]] = []
        (folder / "child").write_text(
            f"#!/bin/sh\nset -- $1\neval {shlex.quote(CHILD.replace('$0', '$1'))}\n"
        )
        (folder / "docker").write_text(DOCKER)
        for name in ("child", "docker"):
            (folder / name).chmod(0o755)

    def start(self, *names: str, container: bool = False, command: list[str] | None = None) -> None:
        for name in names:
            for left in ("pid", "exit"):
                (self.folder / f"{name}.{left}").unlink(missing_ok=True)
            words = [sys.executable, str(LINK), f"--member={name}", f"--port={self.port}"]
            words += [f"--head={next(iter(self.addresses.values()))}"]
            words += [f"--peer={peer}={address}" for peer, address in self.addresses.items()]
            words += [f"--state={self.folder / name}.json"]
            words += [f"--{option}={seconds}" for option, seconds in self.settings.items()]
            child = (
                ["docker", "run", "--rm", name]
                if container
                else [str(self.folder / "child"), f"{self.folder}/{name}"]
            )
            words += [f"--container={name}"] if container else []
            with (self.folder / f"{name}.log").open("a") as log:
                self.running[name] = subprocess.Popen(
                    [*words, "--", *(command or child)],
                    stdout=log,
                    stderr=log,
                    env={
                        **os.environ,
                        "PATH": f"{self.folder}:{os.environ['PATH']}",
                        "FAKE": str(self.folder),
                    },
                    text=True,
                    start_new_session=True,
                )
            self.all.append(self.running[name])

    def log(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text()

    def last_line(self, name: str) -> str:
        return self.log(name).splitlines()[-1]

    def child(self, name: str) -> int | None:
        """The process id of the member's command, once it has been started."""
        path = self.folder / f"{name}.pid"
        return int(path.read_text() or 0) if path.exists() else None

    def all_run(self) -> None:
        for name in self.running:
            eventually(lambda name=name: self.child(name))

    def end_child(self, name: str, status: int) -> None:
        partial = self.folder / f"{name}.partial"
        partial.write_text(str(status))
        partial.rename(self.folder / f"{name}.exit")

    def all_end(self, *names: str, seconds: float = 10) -> set[int]:
        """The exit statuses of the members, whose commands have to be gone by then."""
        names = names or tuple(self.running)
        until = time.monotonic() + seconds
        statuses = {self.running[name].wait(max(0.1, until - time.monotonic())) for name in names}
        assert not [name for name in names if (pid := self.child(name)) and alive(pid)]
        return statuses

    def state(self, name: str) -> dict[str, str] | None:
        path = self.folder / f"{name}.json"
        return json.loads(path.read_text()) if path.exists() else None

    def calls(self) -> list[str]:
        return (self.folder / "calls").read_text().splitlines()

    def talk(self, source: str, *words: str) -> socket.socket:
        """A connection to the head that does not come from engine-link."""
        sock = socket.create_connection((self.addresses["decode"], self.port), 5, (source, 0))
        sock.sendall(" ".join(words).encode() + b"\n")
        return sock


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Engine]:
    engine = Engine(tmp_path)
    yield engine
    for process in engine.all:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@pytest.fixture
def running(engine: Engine) -> Engine:
    engine.start(*NAMES)
    engine.all_run()
    return engine


def others(name: str) -> list[str]:
    return [other for other in NAMES if other != name]


# Start together


@pytest.mark.parametrize("last", NAMES)
def test_no_member_starts_before_all_are_there(engine, last):
    engine.start(*others(last))
    for name in others(last):
        eventually(lambda name=name: "[vllm-link] waiting for " in engine.log(name))
    time.sleep(0.5)
    assert not [name for name in NAMES if engine.child(name)]
    engine.start(last)
    engine.all_run()
    for name in NAMES:
        assert engine.last_line(name) == "[vllm-link] all 3 members are there; this one starts"


def test_each_says_who_is_missing(engine):
    engine.start("decode", "decode.1")
    eventually(lambda: "waiting for decode.1, decode.2\n" in engine.log("decode"))
    for name in ("decode", "decode.1"):
        eventually(lambda name=name: "waiting for decode.2\n" in engine.log(name))


def test_a_member_says_that_the_head_is_not_there(engine):
    engine.start("decode.1")
    line = f"[vllm-link] waiting for the head decode on 127.0.0.2 port {engine.port} (Connection refused)\n"
    eventually(lambda: line in engine.log("decode.1"))
    time.sleep(0.5)
    assert engine.log("decode.1").count(line) < 3  # it tries all the time, and tells now and then


def test_very_many_missing_members_can_be_named(engine):
    engine.addresses |= {f"decode-in-a-rack-with-a-long-name.{n}": f"127.0.1.{n}" for n in range(1, 250)}
    engine.start("decode", "decode.1")
    eventually(lambda: engine.log("decode.1").endswith(", decode-in-a-rack-with-a-long-name.249\n"))


def test_the_head_may_be_restarted_before_the_start(engine):
    engine.start("decode", "decode.1")
    eventually(lambda: "waiting for decode.2\n" in engine.log("decode.1"))
    engine.running["decode"].kill()
    engine.running["decode"].wait()
    eventually(lambda: "waiting for the head" in engine.log("decode.1"))
    engine.start("decode", "decode.2")
    engine.all_run()


def test_a_member_that_comes_again_replaces_its_old_connection(engine):
    engine.start("decode")
    eventually(lambda: "waiting for" in engine.log("decode"))
    with engine.talk("127.0.0.3", "hello", "1", "decode.1") as old:
        assert b"alive decode.2\n" in old.recv(100)
        engine.start("decode.1")
        while old.recv(100):
            pass
    assert "silent" not in engine.log("decode")
    engine.start("decode.2")
    engine.all_run()


def test_a_member_that_left_before_the_start_is_waited_for(engine):
    engine.start("decode")
    eventually(lambda: "waiting for" in engine.log("decode"))
    engine.talk("127.0.0.3", "hello", "1", "decode.1").close()
    eventually(
        lambda: "decode.1 on 127.0.0.3 is gone (connection lost); waiting for it\n" in engine.log("decode")
    )
    engine.start("decode.2")
    time.sleep(0.3)
    assert not engine.child("decode")
    engine.start("decode.1")
    engine.all_run()


def test_a_member_that_is_silent_before_the_start_does_not_count(engine):
    engine.settings["silence"] = 0.6
    engine.start("decode")
    eventually(lambda: "waiting for" in engine.log("decode"))
    with engine.talk("127.0.0.3", "hello", "1", "decode.1"):
        eventually(
            lambda: "decode.1 on 127.0.0.3 is gone (silent for 0.6 s); waiting" in engine.log("decode")
        )


# Strangers


def test_a_stranger_is_turned_away_and_told_of_once(engine):
    engine.start("decode")
    eventually(lambda: "waiting for" in engine.log("decode"))
    for _ in range(3):
        with (
            engine.talk(STRANGER, "hello", "1", "decode.1") as sock,
            contextlib.suppress(ConnectionResetError),
        ):
            assert sock.recv(100) == b""
    assert (
        engine.log("decode").count(f"closed a connection from {STRANGER}, where no member is planned\n") == 1
    )
    engine.start("decode.1", "decode.2")
    engine.all_run()


@pytest.mark.parametrize(
    ("source", "words", "why"),
    [
        ("127.0.0.3", "hello 1 decode.2", "no member decode.2 is planned at 127.0.0.3"),
        ("127.0.0.3", "hello 1 decode.3", "no member decode.3 is planned at 127.0.0.3"),
        ("127.0.0.2", "hello 1 decode", "no member decode is planned at 127.0.0.2"),
        ("127.0.0.3", "hello 2 decode.1", "does not speak version 1 of engine-link"),
        ("127.0.0.3", "GET / HTTP/1.1", "does not speak version 1 of engine-link"),
    ],
)
def test_the_head_refuses_who_does_not_fit(engine, source, words, why):
    engine.start("decode")
    eventually(lambda: "waiting for" in engine.log("decode"))
    with engine.talk(source, words) as sock:
        assert why in sock.recv(1000).decode()
        assert sock.recv(1000) == b""
    eventually(lambda: f"refused a connection from {source}: " in engine.log("decode"))
    assert why in engine.last_line("decode")


def test_a_refused_member_says_why(engine):
    engine.start("decode")
    engine.addresses = {"decode": "127.0.0.2", "decode.7": "127.0.0.3"}
    engine.start("decode.7")
    why = "the head decode on 127.0.0.2 refuses this member: no member decode.7 is planned at 127.0.0.3"
    eventually(lambda: why in engine.log("decode.7"))


def test_who_has_said_no_name_ends_no_engine(running):
    with running.talk("127.0.0.3", "died decode.1 of nothing") as sock:
        assert sock.recv(1000).startswith(b"refused")
    time.sleep(0.3)
    assert all(process.poll() is None for process in running.running.values())


# End together


@pytest.mark.parametrize("status", [137, 0])
@pytest.mark.parametrize("dead", NAMES)
def test_one_death_ends_all_and_all_name_it(running, dead, status):
    running.end_child(dead, status)
    assert running.all_end() == {1}
    how = f"exit status {status}"
    assert (
        running.last_line(dead) == f"[vllm-link] this member died first: {how}; this member restarts with it"
    )
    for name in others(dead):
        line = f"[vllm-link] {dead} on {ADDRESSES[dead]} died first: {how}; this member restarts with it"
        assert running.last_line(name) == line
    for name in NAMES:
        assert running.state(name) == {"member": dead, "address": ADDRESSES[dead], "how": how}


def test_a_killed_command_is_named_with_its_signal(running):
    os.kill(running.child("decode.1"), signal.SIGKILL)
    assert running.all_end() == {1}
    assert running.state("decode.2")["how"] == "signal 9"


@pytest.mark.parametrize("dead", NAMES)
def test_a_killed_link_process_ends_all(running, dead):
    running.running[dead].kill()
    assert running.all_end(*others(dead)) == {1}
    for name in others(dead):
        assert f" {dead} on {ADDRESSES[dead]} died first: gone (connection lost); this" in running.last_line(
            name
        )
    assert running.state(dead) is None


def test_members_that_speak_are_not_silent(engine):
    engine.settings["silence"] = 1
    engine.start(*NAMES)
    engine.all_run()
    time.sleep(1.5)
    assert all(process.poll() is None for process in engine.running.values())


@pytest.mark.parametrize("stuck", ["decode", "decode.1"])
def test_a_silent_member_ends_all_and_learns_of_it(engine, stuck):
    engine.settings["silence"] = 2  # so long that a busy machine does not make another one silent
    engine.start(*NAMES)
    engine.all_run()
    engine.running[stuck].send_signal(signal.SIGSTOP)
    assert engine.all_end(*others(stuck)) == {1}
    for name in others(stuck):
        assert f" {stuck} on {ADDRESSES[stuck]} died first: gone (silent for 2 s); this" in engine.last_line(
            name
        )
    engine.running[stuck].send_signal(signal.SIGCONT)
    assert engine.all_end() == {1}
    assert "this member died first: gone (silent for 2 s)" in engine.last_line(stuck)


def test_a_member_that_is_back_before_its_end_was_noticed_has_died(running):
    running.running["decode.1"].send_signal(signal.SIGSTOP)  # as after a power cut: no FIN
    with running.talk("127.0.0.3", "hello", "1", "decode.1"):
        assert running.all_end("decode", "decode.2") == {1}
    assert running.state("decode.2") == {
        "member": "decode.1",
        "address": "127.0.0.3",
        "how": "gone (connection lost)",
    }


def test_deaths_at_the_same_time_have_one_verdict(running):
    for name in NAMES:
        running.end_child(name, 9)
    assert running.all_end() == {1}
    assert running.state("decode")["how"] == "exit status 9"
    assert running.state("decode") == running.state("decode.1") == running.state("decode.2")


@pytest.fixture
def quiet(engine: Engine) -> Engine:
    """A running engine whose members say only what cannot wait for the next heartbeat."""
    engine.settings |= {"heartbeat": 30, "silence": 90}
    engine.start("decode")
    eventually(lambda: "waiting for" in engine.log("decode"))
    engine.start("decode.1", "decode.2")
    engine.all_run()
    return engine


def test_a_death_is_passed_on_between_two_heartbeats(quiet):
    quiet.end_child("decode.1", 1)
    assert quiet.all_end(seconds=5) == {1}


def test_the_first_report_counts(quiet):
    quiet.running["decode"].send_signal(signal.SIGSTOP)
    for name in ("decode.2", "decode.1"):
        quiet.end_child(name, 3)
        eventually(lambda name=name: not alive(quiet.child(name)))
        time.sleep(0.2)
    quiet.running["decode"].send_signal(signal.SIGCONT)
    assert quiet.all_end() == {1}
    assert {quiet.state(name)["member"] for name in NAMES} == {"decode.2"}


def test_head_and_member_killed_at_the_same_time(running):
    for name in ("decode", "decode.1"):
        running.running[name].kill()
    assert running.all_end("decode.2") == {1}
    assert running.state("decode.2")["how"] == "gone (connection lost)"


def test_a_dead_member_of_a_dead_head_names_itself(running):
    running.running["decode"].send_signal(signal.SIGSTOP)
    running.end_child("decode.1", 3)
    time.sleep(0.4)  # its word is on its way, and no answer comes
    assert running.running["decode.1"].poll() is None
    running.running["decode"].kill()
    assert running.all_end("decode.1", "decode.2") == {1}
    assert running.state("decode.1") == {"member": "decode.1", "address": "127.0.0.3", "how": "exit status 3"}


def test_a_command_that_cannot_be_run_ends_all(engine):
    engine.start("decode", "decode.2")
    engine.start("decode.1", command=["/no/such/docker"])
    assert engine.all_end() == {1}
    how = "cannot run /no/such/docker: No such file or directory"
    assert {engine.state(name)["how"] for name in NAMES} == {how}
    assert {engine.state(name)["member"] for name in NAMES} == {"decode.1"}


def test_the_next_round_works_and_overwrites_the_state(running):
    running.end_child("decode.2", 5)
    assert running.all_end() == {1}
    running.start("decode.1", "decode.2", "decode")  # same port
    running.all_run()
    assert running.state("decode")["member"] == "decode.2"  # kept while the engine runs
    running.end_child("decode", 6)
    assert running.all_end() == {1}
    for name in NAMES:
        assert running.state(name) == {"member": "decode", "address": "127.0.0.2", "how": "exit status 6"}


def test_who_is_back_early_waits_until_all_commands_are_gone(running):
    (running.folder / "decode.deaf").touch()
    running.end_child("decode.1", 1)
    running.all_end()
    running.settings["grace"] = 1.5
    running.start(*NAMES)
    running.all_run()
    running.end_child("decode.1", 1)
    running.all_end("decode.1")
    running.start("decode.1")
    time.sleep(0.5)
    assert running.running["decode"].poll() is None  # it waits for its deaf command
    running.all_end("decode", "decode.2")
    eventually(lambda: running.log("decode.1").endswith("(Connection refused)\n"))
    assert running.child("decode.1") is None
    running.start("decode", "decode.2")
    running.all_run()


def test_a_state_file_that_cannot_be_written_stops_nothing(engine):
    (engine.folder / "decode.json").mkdir()
    engine.start(*NAMES)
    engine.all_run()
    engine.end_child("decode.1", 2)
    assert engine.all_end() == {1}
    assert f"cannot write {engine.folder}/decode.json: Is a directory" in engine.log("decode")
    assert "decode.1 on 127.0.0.3 died first: exit status 2" in engine.last_line("decode")


# Stop on purpose


@pytest.mark.parametrize("stopped", NAMES)
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_stop_ends_all_and_is_no_death(running, stopped, number):
    running.running[stopped].send_signal(number)
    assert running.all_end(stopped) == {0}
    assert running.all_end(*others(stopped)) == {1}
    assert running.last_line(stopped) == "[vllm-link] this member was stopped on purpose"
    for name in others(stopped):
        line = f"{stopped} on {ADDRESSES[stopped]} was stopped on purpose; this member restarts with it"
        assert running.last_line(name) == f"[vllm-link] {line}"
    assert not any(running.state(name) for name in NAMES)


def test_a_stop_that_reaches_the_command_too_is_no_death(running):
    os.killpg(running.running["decode.1"].pid, signal.SIGTERM)
    assert running.all_end("decode.1") == {0}
    assert running.all_end() == {0, 1}
    assert "decode.1 on 127.0.0.3 was stopped on purpose" in running.last_line("decode.2")


def test_a_stop_while_a_member_ends_anyway_is_a_success(engine):
    engine.settings["grace"] = 1
    (engine.folder / "decode.2.deaf").touch()
    engine.start(*NAMES)
    engine.all_run()
    engine.end_child("decode.1", 1)
    engine.all_end("decode", "decode.1")
    engine.running["decode.2"].send_signal(signal.SIGTERM)  # it is waiting for its deaf command
    assert engine.all_end("decode.2") == {0}
    assert engine.last_line("decode.2") == "[vllm-link] decode.1 on 127.0.0.3 died first: exit status 1"


@pytest.mark.parametrize("name", ["decode", "decode.1"])
@pytest.mark.parametrize("alone", [True, False])
def test_a_stop_before_the_start_is_immediate(engine, name, alone):
    engine.settings["heartbeat"] = 2
    engine.start(*([name] if alone else ["decode", "decode.1"]))
    eventually(lambda: "waiting for" in engine.log(name))
    began = time.monotonic()
    engine.running[name].terminate()
    assert engine.all_end(name) == {0}
    assert time.monotonic() - began < 1
    if not alone:
        time.sleep(0.2)
        assert all(process.poll() is None for other, process in engine.running.items() if other != name)


# The command


def test_a_deaf_command_is_killed_after_the_grace(engine):
    engine.settings["grace"] = 0.4
    (engine.folder / "decode.deaf").touch()
    engine.start(*NAMES)
    engine.all_run()
    engine.end_child("decode.2", 1)
    assert engine.all_end() == {1}


def test_the_output_of_the_command_is_left_as_it_is(engine):
    engine.addresses = {"decode": "127.0.0.2"}
    engine.start("decode", command=["sh", "-c", r"printf 'out\n'; printf 'err\303\n' >&2; exit 4"])
    engine.all_end()
    lines = (engine.folder / "decode.log").read_bytes().splitlines()
    assert lines[-3:-1] == [b"out", b"err\303"]
    assert lines[-1].startswith(b"[vllm-link] this member died first: exit status 4")


def test_a_container_is_ended_with_docker_stop(engine):
    engine.start(*NAMES, container=True)
    engine.all_run()
    engine.end_child("decode.1", 137)
    assert engine.all_end() == {1}
    # The one that died as well: what ended there may have been the client only.
    assert {f"stop --time 5 {name}" for name in NAMES} <= set(engine.calls())
    assert not [call for call in engine.calls() if call.startswith("kill")]
    assert engine.state("decode")["how"] == "exit status 137"


@pytest.mark.parametrize("trouble", ["stop-fails", "stop-hangs"])
def test_a_container_that_does_not_stop_is_killed(engine, trouble):
    engine.settings["grace"] = 0.4
    engine.start(*NAMES, container=True)
    engine.all_run()
    (engine.folder / trouble).touch()
    engine.running["decode.1"].terminate()
    assert engine.all_end() == {0, 1}
    assert {f"kill {name}" for name in NAMES} <= set(engine.calls())


def test_one_thread_and_no_busy_loop(running):
    def ticks(pid: int) -> int:
        return sum(map(int, Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]))

    pids = [process.pid for process in running.running.values()]
    before = [ticks(pid) for pid in pids]
    time.sleep(1)
    assert all(ticks(pid) - was < os.sysconf("SC_CLK_TCK") / 5 for pid, was in zip(pids, before, strict=True))
    assert all("\nThreads:\t1\n" in Path(f"/proc/{pid}/status").read_text() for pid in pids)


def test_ipv6(engine):
    try:
        engine.port = free_port("::1")
    except OSError:
        pytest.skip("this machine has no IPv6")
    engine.addresses = {"decode": "0:0::1", "decode.1": "::1"}
    engine.start("decode", "decode.1")
    engine.all_run()
    engine.end_child("decode.1", 8)
    assert engine.all_end() == {1}
    assert engine.state("decode") == {"member": "decode.1", "address": "::1", "how": "exit status 8"}


# What an operator can do wrong


def test_a_taken_port(engine):
    with socket.create_server(("127.0.0.2", engine.port)):
        engine.start("decode")
        assert engine.all_end() == {1}
    assert engine.log("decode") == (
        f"[vllm-link] cannot listen on 127.0.0.2 port {engine.port}: another program has the port; "
        f"find it with `ss -ltnp sport = :{engine.port}`\n"
    )


@pytest.mark.parametrize("name", ["decode", "decode.1"])
def test_an_address_of_another_host(engine, name):
    engine.addresses[name] = "192.0.2.1"
    engine.start(name)
    assert engine.all_end() == {1}
    (line,) = engine.log(name).splitlines()
    assert line.startswith("[vllm-link] cannot listen on 192.0.2.1 port ")
    assert line.endswith("this host does not have that address; correct the address of the host")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (["--member=d.9"], "--member d.9 has no --peer; list every member, this one included"),
        (["--head=127.0.0.3"], "--head 127.0.0.3 is not the address of the first --peer, d=127.0.0.2"),
        (["--peer=d.1=127.0.0.4"], "--peer d.1=127.0.0.4: NAME has to be one word that no other --peer has"),
        (["--peer=d 2=127.0.0.4"], "--peer d 2=127.0.0.4: NAME has to be one word that no other --peer has"),
        (["--peer=d.2=rack1-05"], "--peer d.2=rack1-05: give it as NAME=ADDRESS with an IP address"),
        (["--peer=d.2"], "--peer d.2: give it as NAME=ADDRESS with an IP address"),
        (["--port=70000"], "give a --port from 1 to 65535, and the command to run after --"),
        ([], "give a --port from 1 to 65535, and the command to run after --"),
    ],
)
def test_options_that_do_not_fit(change, message):
    words = ["--member=d", "--port=29700", "--head=127.0.0.2", "--peer=d=127.0.0.2", "--peer=d.1=127.0.0.3"]
    command = ["--", "true"] if change else []
    done = subprocess.run(
        [LINK, *words, *change, *command], capture_output=True, text=True, timeout=10, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (1, "", f"[vllm-link] {message}\n")

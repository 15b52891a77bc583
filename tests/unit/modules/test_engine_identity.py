"""What runs, compared with what was planned: containers and /proc are fakes, pages were recorded from real engines."""

import json
import os
import time
from pathlib import Path

import jinja2
import pytest
from ansible.module_utils.fleet_identity import command_line, config_file

ROOT = Path(__file__).parents[3]
NAME, UNIT = "decode-h5-0", "vllm-engine-decode-h5-0.service"
IMAGE = "sha256:" + "1" * 64
STARTED = "2038-01-19T03:14:07.5Z"
STARTED_SECONDS = 2147483647.5
CONFIG = "/etc/vllm-fleet/engine.yaml"
ARGS = {
    "model": "/srv/models/tiny",
    "served_model_name": "tiny",
    "host": "10.0.0.5",
    "port": 8000,
    "gpu_memory_utilization": 0.9,
    "enforce_eager": True,
    "compilation_config.mode": 3,
    "kv_transfer_config": {"kv_connector": "NixlConnector", "kv_role": "kv_consumer"},
}
SIZES = {"tensor": 2, "pipeline": 1, "data": 1}
EXPECTED = {
    "model": "/srv/models/tiny",
    "served_name": "tiny",
    "tensor_parallel_size": 2,
    "pipeline_parallel_size": 1,
    "data_parallel_size": 1,
    "data_parallel_size_local": 1,
    "nnodes": 1,
    "enable_expert_parallel": False,
    "kv_role": "kv_consumer",
    "max_model_len": 4096,
    "version": "0.32.0",
}
ENV = {"TENSOR_PARALLEL_SIZE": "2", "VLLM_HOST_IP": "10.0.0.5"}


def sizes(**given):
    return [
        word for kind, size in {**SIZES, **given}.items() for word in (f"--{kind}-parallel-size", str(size))
    ]


def rendered(args):
    """engine.yaml as the fleet's own template writes it."""
    environment = jinja2.Environment(trim_blocks=True, undefined=jinja2.StrictUndefined)
    environment.filters["to_json"] = json.dumps
    template = environment.from_string((ROOT / "templates" / "engine.yaml.j2").read_text())
    return template.render(member={"args": args}, ansible_managed="Ansible managed")


class FakeHost:
    """Containers as docker and /proc show them."""

    def __init__(self, proc):
        self.proc = proc
        self.containers = {}
        self.fault = ""
        self.commands = []

    def run(self, name=NAME, *, file=None, words=None, env=None, image=IMAGE, init=True, written=-10.0):
        """A running engine; the keywords say in what it is not the planned one."""
        pid = 100 * (len(self.containers) + 1)
        self.containers[f"vllm-engine-{name}"] = {
            "Name": f"/vllm-engine-{name}",
            "Image": image,
            "State": {"Status": "running", "Pid": pid, "StartedAt": STARTED},
            "Config": {
                "Env": [f"{key}={value}" for key, value in (env or ENV | {"HF_TOKEN": "hush"}).items()]
            },
        }
        served = [
            "python3",
            "-m",
            "vllm.entrypoints.cli.main",
            "serve",
            "--config",
            CONFIG,
            *(words or sizes()),
        ]
        served_pid = pid
        if init:
            self._process(
                pid, ["/sbin/docker-init", "--", "/bin/sh", "-c", "exec vllm serve"], [pid + 1, pid + 2]
            )
            self._process(pid + 1, ["sleep", "1"])
            served_pid = pid + 2
        self._process(served_pid, served)
        config = self.proc / str(served_pid) / "root" / CONFIG[1:]
        config.parent.mkdir(parents=True)
        config.write_text(file if isinstance(file, str) else rendered({**ARGS, **(file or {})}))
        os.utime(config, (STARTED_SECONDS + written,) * 2)
        return config

    def _process(self, pid, words, children=()):
        folder = self.proc / str(pid)
        (folder / "task" / str(pid)).mkdir(parents=True)
        (folder / "task" / str(pid) / "children").write_text(" ".join(map(str, children)) + " ")
        (folder / "cmdline").write_bytes(b"".join(word.encode() + b"\0" for word in words))

    def run_command(self, command):
        self.commands.append(command)
        assert command[:4] == ["docker", "inspect", "--type", "container"]
        if self.fault:
            return 1, "[]\n", self.fault
        known = [self.containers[name] for name in command[4:] if name in self.containers]
        missing = [f"error: no such object: {name}" for name in command[4:] if name not in self.containers]
        return bool(missing), json.dumps(known), "\n".join(missing)


@pytest.fixture
def host(tmp_path, monkeypatch):
    fake = FakeHost(tmp_path / "proc")
    monkeypatch.setattr("engine_identity.PROC", fake.proc)
    monkeypatch.setattr("ansible.module_utils.basic.AnsibleModule.run_command", fake.run_command)
    return fake


class FakeEngine:
    def __init__(self, server, data):
        self.server = server
        self.delay = 0.0
        self.status = {}
        self.pages = {
            "/version": {"version": "0.32.0"},
            "/v1/models": json.loads(data("engine-models.json")),
            "/metrics": data("engine-metrics.txt"),
        }
        self.info = json.loads(data("engine-server-info.json"))
        self.info["vllm_config"]["parallel_config"].update(
            tensor_parallel_size=2, data_parallel_size=1, data_parallel_size_local=1
        )
        self.info["vllm_config"]["model_config"]["max_model_len"] = 4096
        server.answer = self._answer

    def dev_mode(self):
        self.pages["/server_info?config_format=json"] = self.info

    def _answer(self, path, _body):
        time.sleep(self.delay)
        if path not in self.pages:
            return 404, {"detail": "Not Found"}
        return self.status.get(path, 200), self.pages[path]

    @property
    def asked(self):
        return [path for path, _ in self.server.asked]


@pytest.fixture
def engine(fake_server, data):
    return FakeEngine(fake_server(), data)


@pytest.fixture
def check(run_module, host, engine):
    """Check the planned engine; keywords replace parts of its plan."""

    def check(**spec):
        defaults = {
            "engine": NAME,
            "url": engine.server.url,
            "container": f"vllm-engine-{NAME}",
            "unit": UNIT,
            "image_id": IMAGE,
            "expected": EXPECTED,
            "args": ARGS,
            "env": ENV,
        }
        return run_module("engine_identity", engines=[{**defaults, **spec}], timeout=5)

    return check


@pytest.fixture
def external(run_module, host, engine):
    def check(expected, **spec):
        spec = {"engine": "elsewhere", "url": engine.server.url, "expected": expected, **spec}
        return run_module("engine_identity", engines=[spec], timeout=5)

    return check


def differences(result):
    assert result["failed"]
    return [line for one in result["engines"] for line in one["differences"]]


# --- engines of the fleet


@pytest.mark.parametrize("init", [True, False])
def test_an_engine_that_is_what_was_planned_passes(check, host, engine, init):
    host.run(init=init)
    result = check()
    assert result["changed"] is False
    assert result["engines"] == [
        {
            "engine": NAME,
            "member": NAME,
            "seen": {**EXPECTED, "image_id": IMAGE, "served_name": "tiny"},
            "differences": [],
            "notes": [],
        }
    ]
    assert engine.asked == ["/version", "/v1/models"]
    assert "hush" not in json.dumps(result)


WRONG = [
    (
        {"image": "sha256:2"},
        f"image_id: the plan says {IMAGE}, the running engine has sha256:2 (from docker inspect)",
    ),
    (
        {"words": sizes(tensor=1)},
        "tensor_parallel_size: the plan says 2, the running engine has 1 (from its command line)",
    ),
    (
        {"env": ENV | {"TENSOR_PARALLEL_SIZE": "1"}},
        "tensor_parallel_size: the plan says 2, the running engine has 1 (from its environment)",
    ),
    (
        {"words": sizes(tensor=1), "env": ENV | {"TENSOR_PARALLEL_SIZE": "1"}},
        "tensor_parallel_size: the plan says 2, the running engine has 1 (from its command line and its environment)",
    ),
    (
        {"words": ["--pipeline-parallel-size", "1", "-dp", "1"]},
        "tensor_parallel_size: the plan says 2, the running engine has 1 (from vLLM's default)",
    ),
    (
        {"words": [*sizes(), "-ep"]},
        "enable_expert_parallel: the plan says false, the running engine has true (from its command line)",
    ),
    (
        {"env": {"TENSOR_PARALLEL_SIZE": "2"}},
        "VLLM_HOST_IP: the plan says 10.0.0.5, the running engine has nothing (from its environment)",
    ),
    (
        {"file": {"model": "/srv/models/other"}},
        f"model: the plan says /srv/models/tiny, the running engine has /srv/models/other (from its {CONFIG})",
    ),
    (
        {"file": {"served_model_name": "big"}},
        f"served_name: the plan says tiny, the running engine has big (from its {CONFIG})",
    ),
    (
        {"file": {"kv_transfer_config": {"kv_connector": "NixlConnector", "kv_role": "kv_both"}}},
        f"kv_role: the plan says kv_consumer, the running engine has kv_both (from its {CONFIG})",
    ),
    (
        {"file": {"kv_transfer_config": {"kv_connector": "Other", "kv_role": "kv_consumer"}}},
        f"kv_transfer_config.kv_connector: the plan says NixlConnector, the running engine has Other (from its {CONFIG})",
    ),
    (
        {"file": {"compilation_config.mode": 0}},
        f"compilation_config.mode: the plan says 3, the running engine has 0 (from its {CONFIG})",
    ),
    (
        {"file": {"enforce_eager": False}},
        f"enforce_eager: the plan says true, the running engine has false (from its {CONFIG})",
    ),
    (
        {"file": {"max_num_seqs": 8}},
        f"max_num_seqs: the plan does not set it, the running engine has 8 (from its {CONFIG})",
    ),
    (
        {"words": [*sizes(), "--max-num-seqs=8"]},
        "max_num_seqs: the plan does not set it, the running engine has 8 (from its command line)",
    ),
    (
        {"words": [*sizes(), "--gpu-memory-utilization", "0.5"]},
        "gpu_memory_utilization: the plan says 0.9, the running engine has 0.5 (from its command line)",
    ),
    (
        {"words": [*sizes(), "--api-key", "hush"]},
        "api_key: the plan does not set it, the running engine has (hidden) (from its command line)",
    ),
]


@pytest.mark.parametrize(("running", "sentence"), WRONG)
def test_each_difference_is_told_with_both_sides(check, host, running, sentence):
    host.run(**running)
    result = check()
    assert differences(result) == [sentence]
    assert f"- {NAME}: {sentence}\n" in result["msg"]
    assert "Run playbooks/site.yml" in result["msg"]
    assert "External" not in result["msg"]
    assert "hush" not in json.dumps(result)


def test_an_argument_that_is_missing_is_a_difference(check, host):
    host.run(file=rendered({key: value for key, value in ARGS.items() if key != "enforce_eager"}))
    assert differences(check()) == [
        "enforce_eager: the plan says true, the running engine has nothing (from its arguments)"
    ]


def test_a_length_that_the_plan_sets_is_looked_for_in_the_arguments_too(check, host):
    host.run()
    assert differences(check(args={**ARGS, "max_model_len": 4096})) == [
        "max_model_len: the plan says 4096, the running engine has nothing (from its arguments)"
    ]


def test_without_arguments_in_the_plan_only_what_is_expected_is_compared(check, host):
    host.run(file={"max_num_seqs": 8})
    assert check(args=None)["engines"][0]["differences"] == []


def test_null_is_not_compared(check, host):
    host.run(words=sizes(tensor=1))
    expected = {**EXPECTED, "tensor_parallel_size": None}
    assert check(expected=expected, env={}, image_id=None)["engines"][0]["differences"] == []


def test_ranks_on_other_hosts_make_an_engine_of_several_hosts(check, host):
    expected = {**EXPECTED, "data_parallel_size": 8, "data_parallel_size_local": 4, "nnodes": 2}
    host.run(words=[*sizes(data=8), "-dpl", "4"])
    assert check(expected=expected)["engines"][0]["seen"]["nnodes"] == 2
    assert differences(check(expected={**expected, "nnodes": 4})) == [
        "nnodes: the plan says 4, the running engine has 2 (from its command line)"
    ]


@pytest.mark.parametrize(("ranks", "local"), [(1, 1), (4, 2)])
def test_nnodes_leaves_the_local_ranks_to_vllm(check, host, ranks, local):
    expected = {**EXPECTED, "data_parallel_size": ranks, "data_parallel_size_local": local, "nnodes": 2}
    args = {**ARGS, "nnodes": 2, "node_rank": 0}
    host.run(file=args, words=sizes(data=ranks))
    assert check(expected=expected, args=args)["engines"][0]["differences"] == []


def test_a_headless_member_is_compared_without_http(run_module, host):
    args = {**ARGS, "headless": True, "nnodes": 2, "node_rank": 1}
    name = f"{NAME}.1"
    spec = {
        "engine": NAME,
        "member": name,
        "container": f"vllm-engine-{name}",
        "expected": {**EXPECTED, "nnodes": 2, "max_model_len": None, "version": None},
        "args": args,
    }
    host.run(name, file=args)
    (result,) = run_module("engine_identity", engines=[spec])["engines"]
    assert (result["member"], result["differences"], result["notes"]) == (name, [], [])

    spec["args"] = {**args, "node_rank": 3}
    result = run_module("engine_identity", engines=[spec])
    assert (
        f"- {name}: node_rank: the plan says 3, the running engine has 1 (from its {CONFIG})" in result["msg"]
    )


def test_a_planned_headless_member_that_runs_as_a_head_is_a_difference(check, host):
    host.run()
    assert differences(check(args=None, expected={"headless": True})) == [
        "headless: the plan says true, the running engine has false (from vLLM's default)"
    ]


def test_a_file_written_after_the_start_says_nothing(check, host):
    host.run(written=0.25)
    (sentence,) = differences(check())
    assert sentence.startswith(f"its {CONFIG} was written after the container's start ({STARTED})")
    assert sentence.endswith(f"; see journalctl -u {UNIT}")


def test_a_file_written_in_the_second_of_the_start_but_before_it_is_the_one_read(check, host):
    host.run(written=-0.25)
    assert check()["engines"][0]["differences"] == []


def test_a_file_that_the_fleet_did_not_write_is_a_difference(check, host):
    host.run(file="# hand-made\nmodel: x: y\n")
    (sentence,) = differences(check())
    assert f"its {CONFIG} cannot be read: line 2 is not `name: JSON value`" in sentence


def test_a_container_that_is_not_there_is_a_difference_and_nobody_is_asked(check, engine):
    assert differences(check()) == [
        f"its container vllm-engine-{NAME} is not on this host; see journalctl -u {UNIT}"
    ]
    assert engine.asked == []


def test_a_container_that_does_not_run_is_a_difference(check, host, engine):
    host.run()
    host.containers[f"vllm-engine-{NAME}"]["State"]["Status"] = "paused"
    assert differences(check(unit=None)) == [f"its container vllm-engine-{NAME} is paused, not running"]
    assert engine.asked == []


def test_a_process_that_went_away_is_a_difference_and_the_rest_is_still_compared(check, host):
    host.run(image="sha256:2").unlink()
    process, image = differences(check())
    assert process.startswith(
        "its process cannot be read; it has just ended, or this is not run as root ([Errno 2]"
    )
    assert image.startswith("image_id: ")


def test_a_container_with_another_program_is_a_difference(check, host):
    host.run()
    (host.proc / "102" / "cmdline").write_bytes(b"sleep\0infinity\0")
    assert differences(check()) == [f"its container runs no `vllm serve`; see journalctl -u {UNIT}"]


def test_without_docker_the_message_says_so(check, host):
    host.fault = "Cannot connect to the Docker daemon at unix:///var/run/docker.sock."
    message = check()["msg"]
    assert (
        "docker inspect tells nothing about the engines of this host: Cannot connect to the Docker daemon"
        in message
    )
    assert "Check that docker runs" in message


# --- what engines answer


@pytest.mark.parametrize(
    ("page", "content", "sentence"),
    [
        (
            "/version",
            {"version": "0.31.0"},
            "version: the plan says 0.32.0, the running engine has 0.31.0 (from /version)",
        ),
        (
            "/v1/models",
            {"data": [{"id": "big", "root": "/srv/models/tiny", "max_model_len": 4096}]},
            'served_name: the plan says tiny, the running engine has ["big"] (from /v1/models)',
        ),
        (
            "/v1/models",
            {"data": [{"id": "big", "root": "/big"}, {"id": "tiny", "root": "/tiny", "max_model_len": 4096}]},
            "model: the plan says /srv/models/tiny, the running engine has /tiny (from /v1/models)",
        ),
        (
            "/v1/models",
            {"data": [{"id": "tiny", "root": "/srv/models/tiny", "max_model_len": 128}]},
            "max_model_len: the plan says 4096, the running engine has 128 (from /v1/models)",
        ),
        ("/v1/models", {"data": None}, "URL/v1/models says nothing: it lists no model"),
    ],
)
def test_what_an_engine_answers_is_compared(check, host, engine, page, content, sentence):
    host.run()
    engine.pages[page] = content
    assert differences(check()) == [sentence.replace("URL", engine.server.url)]


def test_an_engine_that_does_not_answer_is_a_difference(check, host):
    host.run()
    assert differences(check(url="http://127.0.0.1:9")) == [
        "http://127.0.0.1:9/version refused the connection: nothing listens there"
    ]


def test_an_engine_that_answers_an_error_is_a_difference(check, host, engine):
    host.run()
    engine.status["/v1/models"] = 401
    assert "/v1/models answered 401" in differences(check())[0]


def test_dev_mode_tells_all_by_itself(check, host, engine):
    engine.dev_mode()
    host.run()
    assert check(server_info=True)["engines"][0]["differences"] == []

    engine.info["vllm_config"]["parallel_config"]["tensor_parallel_size"] = 4
    assert differences(check(server_info=True)) == [
        "tensor_parallel_size: the plan says 2, the running engine has 4 (from /server_info)"
    ]


def test_the_same_difference_in_two_places_is_one_sentence(check, host, engine):
    engine.dev_mode()
    engine.info["vllm_config"]["parallel_config"]["tensor_parallel_size"] = 1
    host.run(words=sizes(tensor=1))
    assert differences(check(server_info=True)) == [
        "tensor_parallel_size: the plan says 2, the running engine has 1 (from its command line and /server_info)"
    ]


def test_what_vllm_made_of_an_argument_that_is_not_expected_is_not_compared(check, host, engine):
    engine.dev_mode()
    host.run(file={"block_size": 64})
    assert check(args={**ARGS, "block_size": 64}, server_info=True)["engines"][0]["differences"] == []


@pytest.mark.parametrize(
    ("status", "content", "seen"),
    [
        (404, {"detail": "Not Found"}, "answered 404: dev mode is off"),
        (403, {"detail": "no"}, "answered 403: dev mode is off"),
        (500, {"error": "no pip"}, 'answered 500: {"error": "no pip"}'),
        (200, {"vllm_config": "text"}, "says nothing: it has no vllm_config.parallel_config"),
        (200, {"vllm_config": {}}, "says nothing: it has no vllm_config.parallel_config"),
    ],
)
def test_dev_mode_is_required_of_the_fleets_engines_only(
    check, external, host, engine, status, content, seen
):
    page = "/server_info?config_format=json"
    engine.pages[page], engine.status[page] = content, status
    host.run()
    assert differences(check(server_info=True)) == [
        f"the plan has dev mode on, but {engine.server.url}{page} {seen}"
    ]
    (result,) = external({"model": "/srv/models/tiny"}, server_info=True)["engines"]
    assert result["notes"] == [f"{engine.server.url}{page} {seen}."]


# --- engines that somebody else runs


def test_an_external_engine_with_dev_mode_is_compared_in_everything(external, host, engine):
    engine.dev_mode()
    (result,) = external(EXPECTED, server_info=True)["engines"]
    assert result["seen"] == {**EXPECTED, "served_name": ["tiny"]}
    assert (result["differences"], result["notes"]) == ([], [])
    assert host.commands == []
    assert "/metrics" not in engine.asked


def test_an_external_engine_with_another_shape_stops_the_play(external, engine):
    engine.dev_mode()
    result = external({**EXPECTED, "tensor_parallel_size": 8, "kv_role": "kv_producer"}, server_info=True)
    assert result["msg"] == (
        "What runs is not what was planned, so no router gets it:\n"
        "- elsewhere: tensor_parallel_size: the plan says 8, the running engine has 2 (from /server_info)\n"
        "- elsewhere: kv_role: the plan says kv_producer, the running engine has kv_consumer (from /server_info)\n"
        "External engines are never touched: correct the inventory, or the engine where it is run."
    )


def test_data_parallelism_over_hosts_is_seen_in_server_info(external, engine):
    engine.dev_mode()
    engine.info["vllm_config"]["parallel_config"].update(data_parallel_size=8, data_parallel_size_local=2)
    expected = {"data_parallel_size": 8, "data_parallel_size_local": 2, "nnodes": 4}
    assert external(expected, server_info=True)["engines"][0]["differences"] == []


def test_a_field_that_this_vllm_does_not_have_is_named_and_no_difference(external, engine):
    engine.dev_mode()
    del engine.info["vllm_config"]["parallel_config"]["nnodes"]
    del engine.info["vllm_config"]["kv_transfer_config"]
    (result,) = external(EXPECTED, server_info=True)["engines"]
    assert result["notes"] == ["Not visible: kv_role, nnodes."]


def test_an_engine_without_kv_transfer_has_no_role(external, engine):
    engine.dev_mode()
    engine.info["vllm_config"]["kv_transfer_config"] = None
    assert differences(external(EXPECTED, server_info=True)) == [
        "kv_role: the plan says kv_consumer, the running engine has nothing (from /server_info)"
    ]


def test_without_dev_mode_the_metrics_tell_some(external, engine):
    expected = {**EXPECTED, "data_parallel_size": 2, "block_size": 128, "kv_cache_dtype": "auto"}
    (result,) = external(expected)["engines"]
    assert result["differences"] == []
    assert {key: result["seen"][key] for key in ("data_parallel_size", "block_size", "kv_cache_dtype")} == {
        "data_parallel_size": 2,
        "block_size": "128",
        "kv_cache_dtype": "auto",
    }
    (note,) = result["notes"]
    assert note == (
        "Not visible: data_parallel_size_local, enable_expert_parallel, kv_role, nnodes, "
        "pipeline_parallel_size, tensor_parallel_size."
    )
    assert differences(external({"data_parallel_size": 1, "block_size": 64})) == [
        "data_parallel_size: the plan says 1, the running engine has 2 (from /metrics)",
        "block_size: the plan says 64, the running engine has 128 (from /metrics)",
    ]


def test_a_label_that_this_vllm_does_not_have_is_named_and_no_difference(external, engine):
    engine.pages["/metrics"] = 'vllm:cache_config_info{engine="0",cache_dtype="fp8"} 1.0\n'
    (result,) = external({"block_size": 64, "kv_cache_dtype": "fp8"})["engines"]
    assert (result["seen"]["kv_cache_dtype"], result["differences"]) == ("fp8", [])
    assert result["notes"] == ["Not visible: block_size."]


def test_metrics_of_one_host_do_not_contradict_server_info(external, engine):
    engine.dev_mode()
    engine.info["vllm_config"]["parallel_config"].update(data_parallel_size=8, data_parallel_size_local=2)
    expected = {"data_parallel_size": 8, "lora": "of no page"}
    (result,) = external(expected, server_info=True)["engines"]
    assert "/metrics" in engine.asked
    assert result["differences"] == []


def test_an_engine_without_nixl_cannot_have_the_role(external, engine):
    page = engine.pages["/metrics"]
    engine.pages["/metrics"] = "".join(line for line in page.splitlines(keepends=True) if "nixl" not in line)
    assert differences(external({"kv_role": "kv_producer"})) == [
        "kv_role: the plan says kv_producer, the running engine has nothing (from /metrics, which has none of NIXL's)"
    ]


@pytest.mark.parametrize(
    ("content", "seen"),
    [("no metrics here", "is not a Prometheus sample"), ("up 1\n", "it has no vllm:cache_config_info")],
)
def test_metrics_that_say_nothing_are_no_difference(external, engine, content, seen):
    engine.pages["/metrics"] = content
    (result,) = external({"kv_role": "kv_producer"})["engines"]
    assert seen in result["notes"][0]
    assert result["notes"][1] == "Not visible: kv_role."


# --- many engines


def test_all_differences_of_all_engines_are_in_one_message(run_module, host, engine):
    host.run("a", words=sizes(tensor=1), image="sha256:2")
    specs = [
        {
            "engine": name,
            "container": f"vllm-engine-{name}",
            "image_id": IMAGE,
            "expected": {"tensor_parallel_size": 2},
        }
        for name in ("a", "b")
    ]
    specs.append({"engine": "elsewhere", "url": engine.server.url, "expected": {"version": "1"}})
    result = run_module("engine_identity", check=True, engines=specs)
    assert [line[:6] for line in result["msg"].splitlines()[1:5]] == ["- a: i", "- a: t", "- b: i", "- else"]
    assert "Run playbooks/site.yml" in result["msg"]
    assert "External engines are never touched" in result["msg"]
    assert len(host.commands) == 1


def test_many_engines_take_no_longer_than_one(run_module, engine):
    engine.delay = 0.25
    specs = [
        {"engine": f"e{i}", "url": engine.server.url, "expected": {"version": "0.32.0"}} for i in range(36)
    ]
    began = time.monotonic()
    result = run_module("engine_identity", engines=specs)
    assert [one["engine"] for one in result["engines"]] == [f"e{i}" for i in range(36)]
    assert time.monotonic() - began < 9  # one after the other they take 18


def test_an_engine_has_a_url_or_a_container(run_module):
    result = run_module("engine_identity", engines=[{"engine": "e", "expected": {}}])
    assert "url, container" in result["msg"]


# --- reading arguments


@pytest.mark.parametrize(
    ("words", "arguments"),
    [
        ("--tensor-parallel-size 2 --max_model_len=4096", {"tensor_parallel_size": 2, "max_model_len": 4096}),
        (
            "-tp 2 -pp=3 -dpl 1 -n 2 -r 1",
            {
                "tensor_parallel_size": 2,
                "pipeline_parallel_size": 3,
                "data_parallel_size_local": 1,
                "nnodes": 2,
                "node_rank": 1,
            },
        ),
        (
            "--headless -ep --no-enable-prefix-caching",
            {"headless": True, "enable_expert_parallel": True, "enable_prefix_caching": False},
        ),
        ("/srv/m --seed -1", {"model": "/srv/m", "seed": -1}),
        ("--served-model-name a b --x", {"served_name": ["a", "b"], "x": True}),
        (
            '--kv-transfer-config {"kv_role":"kv_both","n":{"m":1}}',
            {"kv_role": "kv_both", "kv_transfer_config.n.m": 1},
        ),
        ("--kv-transfer-config.kv_role kv_both --a-b.c-d=1", {"kv_role": "kv_both", "a_b.c-d": 1}),
        ("", {}),
    ],
)
def test_a_command_line_is_read_as_vllm_does(words, arguments):
    assert command_line(["python3", "/usr/bin/vllm", "serve", *words.split()]) == arguments


def test_a_file_is_read_as_the_fleets_template_writes_it():
    args = {"a_b": [1, {"c_d": None}], "url": "http://h:1", "empty": {}, "c_c.mode": 3, "x_y": {"k_k": "v"}}
    flat = {"a_b": [1, {"c_d": None}], "url": "http://h:1", "empty": {}, "c_c.mode": 3, "x_y.k_k": "v"}
    assert config_file(rendered(args)) == flat

"""What one request becomes, and what is refused before it is sent anywhere."""

import contextlib
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pd_relay import stages
from pd_relay.stages import CHAT, COMPLETIONS, GENERATE, NotEngagedError, RefusedError
from relay_scene import PARAMS

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)
TOKENS = {"token_ids": [1, 2, 3], "sampling_params": {"max_tokens": 9, "seed": 4, "extra_args": None}}


def test_the_prefill_of_a_completion_makes_one_token_and_no_stream():
    body = {
        "prompt": "x",
        "max_tokens": 9,
        "stream": True,
        "stream_options": {"include_usage": True},
        "seed": 4,
    }
    asked = stages.prefill_body(COMPLETIONS, body)
    assert asked == {
        "prompt": "x",
        "max_tokens": 1,
        "min_tokens": 1,
        "stream": False,
        "seed": 4,
        "kv_transfer_params": {"do_remote_decode": True, "do_remote_prefill": False},
    }
    assert body["max_tokens"] == 9
    assert body["stream_options"]


def test_the_prefill_of_a_chat_has_both_spellings_of_its_length():
    asked = stages.prefill_body(CHAT, {"messages": [], "max_completion_tokens": 50})
    assert (asked["max_tokens"], asked["max_completion_tokens"], asked["min_tokens"]) == (1, 1, 1)


def test_token_in_token_out_has_its_length_in_sampling_params_and_the_transfer_on_top():
    asked = stages.prefill_body(GENERATE, TOKENS)
    assert asked["sampling_params"] == {"max_tokens": 1, "min_tokens": 1, "seed": 4, "extra_args": None}
    assert asked["kv_transfer_params"]["do_remote_decode"] is True
    assert "max_tokens" not in asked
    assert TOKENS["sampling_params"]["max_tokens"] == 9


def test_the_decode_gets_what_the_client_asked_for_and_all_that_the_prefill_said():
    body = {"prompt": "x", "stream": True, "kv_transfer_params": {"of": "the client"}}
    assert stages.decode_body(body, PARAMS) == {"prompt": "x", "stream": True, "kv_transfer_params": PARAMS}


@pytest.mark.parametrize(
    ("path", "body", "says"),
    [
        (GENERATE, {"token_ids": [1]}, "sampling_params"),
        (GENERATE, {"token_ids": [1], "sampling_params": None}, "sampling_params"),
        (GENERATE, {"token_ids": [1], "sampling_params": []}, "sampling_params"),
        (GENERATE, {"token_ids": [1], "sampling_params": "x"}, "sampling_params"),
        (GENERATE, {"token_ids": [1], "sampling_params": {"n": 2}}, "n is not 1"),
        (COMPLETIONS, {"prompt": "x", "n": 2}, "n is not 1"),
        (COMPLETIONS, {"prompt": "x", "n": "2"}, "n is not 1"),
        (CHAT, {"messages": [], "n": 4}, "n is not 1"),
        (COMPLETIONS, {"prompt": "x", "use_beam_search": True}, "use_beam_search"),
        (COMPLETIONS, {"prompt": ["a", "b"]}, "several prompts"),
        (COMPLETIONS, {"prompt": [[1, 2], [3]]}, "several prompts"),
        (COMPLETIONS, {"prompt": "a", "prompt_embeds": "AAAA"}, "several prompts"),
    ],
)
def test_what_a_pair_of_engines_would_answer_wrongly_is_refused(path, body, says):
    with pytest.raises(RefusedError, match=says):
        stages.judge(path, body)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (COMPLETIONS, {"prompt": "x", "n": 1, "echo": True, "logprobs": 1, "best_of": 1}),
        (COMPLETIONS, {"prompt": "x", "n": None, "use_beam_search": False}),
        (COMPLETIONS, {"prompt": ["only one"]}),
        (COMPLETIONS, {"prompt": [1, 2, 3]}),
        (COMPLETIONS, {"prompt": [[1, 2, 3]]}),
        (CHAT, {"messages": [{"role": "user", "content": "x"}], "n": 1}),
        (GENERATE, TOKENS),
    ],
)
def test_what_they_answer_rightly_is_not(path, body):
    stages.judge(path, body)


@given(st.sampled_from(stages.PATHS), st.dictionaries(st.text(), JSON) | st.fixed_dictionaries(
    {}, optional={"prompt": JSON, "n": JSON, "sampling_params": JSON, "use_beam_search": JSON, "prompt_embeds": JSON}
))  # fmt: skip
def test_a_body_of_any_content_is_refused_or_built(path, body):
    try:
        stages.judge(path, body)
    except RefusedError:
        return
    asked = stages.prefill_body(path, body)
    assert json.loads(json.dumps(asked))["stream"] is False


@given(st.binary())
def test_any_bytes_are_a_json_object_or_refused(content):
    with contextlib.suppress(RefusedError):
        assert isinstance(stages.read(content), dict)


@pytest.mark.parametrize("content", [b"", b"[1]", b"null", b'"x"', b"{", b"\xff", b"[" * 100_000])
def test_what_is_no_json_object_is_refused(content):
    with pytest.raises(RefusedError, match="body is not"):
        stages.read(content)


def answer(**changed):
    return json.dumps({"kv_transfer_params": {**PARAMS, **changed}}).encode()


def test_the_prefills_words_are_kept_to_the_last():
    assert stages.transfer_params(answer()) == PARAMS
    assert stages.blocks(PARAMS) == 3
    assert stages.blocks({"remote_block_ids": [4, 0]}) == 2


@pytest.mark.parametrize("name", [*stages.NEEDED, "do_remote_prefill"])
@pytest.mark.parametrize("value", [None, "absent"])
def test_an_answer_that_lacks_something_is_told_by_its_name(name, value):
    params = {**PARAMS, name: None}
    if value == "absent":
        del params[name]
    with pytest.raises(NotEngagedError, match=f"lacks {name}"):
        stages.transfer_params(json.dumps({"kv_transfer_params": params}).encode())


@pytest.mark.parametrize("nothing", [[], [[]], [[], []]])
def test_an_answer_without_blocks_would_end_the_decode(nothing):
    with pytest.raises(NotEngagedError, match="lacks remote_block_ids"):
        stages.transfer_params(answer(remote_block_ids=nothing))


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "not JSON"),
        (b"<html>", "not JSON"),
        (b"[]", "not engaged"),
        (b"{}", "not engaged"),
        (b'{"kv_transfer_params": null}', "not engaged"),
        (b'{"kv_transfer_params": "x"}', "not a JSON object"),
    ],
)
def test_an_answer_without_transfer_is_told_as_such(content, says):
    with pytest.raises(NotEngagedError, match=says):
        stages.transfer_params(content)


@given(JSON)
def test_an_answer_of_any_content_is_taken_or_told(params):
    with contextlib.suppress(NotEngagedError):
        stages.blocks(stages.transfer_params(json.dumps({"kv_transfer_params": params}).encode()))

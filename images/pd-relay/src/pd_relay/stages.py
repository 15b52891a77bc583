"""The two requests that one request becomes, and what is refused before the first of them. No I/O.

Sources: vLLM 0.32.0 and 0.33.0 (entrypoints/openai, entrypoints/scale_out/token_in_token_out, the NIXL
connector's pull_scheduler.py), and those engines' answers.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

GENERATE = "/inference/v1/generate"
COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
PATHS = (GENERATE, COMPLETIONS, CHAT)

PARAMS = "kv_transfer_params"
NEEDED = ("remote_engine_id", "remote_request_id", "remote_block_ids", "remote_host", "remote_port")
"""Without one of them a decode computes the prompt again, or dies of an assertion."""


class RefusedError(Exception):
    """A request that cannot be served by a prefill and a decode; the message says why."""


class NotEngagedError(Exception):
    """A prefill answered, and its KV cache cannot be fetched; the message says what it lacks."""


def read(content: bytes) -> dict[str, Any]:
    """A request's body.

    Raises:
        RefusedError: it is no JSON object.

    """
    try:
        body = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise RefusedError(f"the body is not JSON: {error}") from None
    if not isinstance(body, dict):
        raise RefusedError("the body is not a JSON object")
    return body


def judge(path: str, body: Mapping[str, Any]) -> None:
    """Refuse what the engines would take and answer wrongly, and what the prefill's request is built from.

    All else is judged by the engines, the prefill first.

    Raises:
        RefusedError: see the messages.

    """
    sampling: Any = body
    if path == GENERATE:
        sampling = body.get("sampling_params")
        if not isinstance(sampling, Mapping):
            raise RefusedError("sampling_params is not a JSON object")
    if sampling.get("n") not in (None, 1):
        # vLLM 0.32: the tokens were right, and the prefill counted three reads after it had freed the blocks.
        raise RefusedError("n is not 1: the prefill frees the KV cache when the first of n sequences has it")
    if sampling.get("use_beam_search"):
        raise RefusedError("use_beam_search: vLLM's beam search takes no KV cache from a prefill")
    if path == COMPLETIONS and prompts(body) > 1:
        # Measured with vLLM 0.32: 200, and wrong tokens for all prompts but the first.
        raise RefusedError(
            "there are several prompts: the prefill has the KV cache of the first only; send each by itself"
        )


def prompts(body: Mapping[str, Any]) -> int:
    """How many prompts a completion has; a list of token ids is one."""
    told = 0
    for name in ("prompt", "prompt_embeds"):
        value = body.get(name)
        if isinstance(value, list) and any(isinstance(item, str | list) for item in value):
            told += len(value)
        elif value is not None:
            told += 1
    return told


def prefill_body(path: str, body: Mapping[str, Any]) -> dict[str, Any]:
    """The same prompt, for one token that nobody reads."""
    asked = {**body, "stream": False, PARAMS: {"do_remote_decode": True, "do_remote_prefill": False}}
    asked.pop("stream_options", None)
    if path == GENERATE:
        asked["sampling_params"] = {**body["sampling_params"], "max_tokens": 1, "min_tokens": 1}
        return asked
    asked |= {"max_tokens": 1, "min_tokens": 1}
    if path == CHAT:
        asked["max_completion_tokens"] = 1
    return asked


def decode_body(body: Mapping[str, Any], params: Mapping[str, Any]) -> dict[str, Any]:
    """What the client asked for, and where the prompt's KV cache is."""
    return {**body, PARAMS: params}


def transfer_params(content: bytes) -> dict[str, Any]:
    """What the prefill's answer says about the KV cache, as it is given to the decode.

    Raises:
        NotEngagedError: it is not there or incomplete.

    """
    try:
        answer = json.loads(content)
    except (ValueError, RecursionError):
        raise NotEngagedError("its answer is not JSON") from None
    params = answer.get(PARAMS) if isinstance(answer, dict) else None
    if not params:
        raise NotEngagedError(
            f"its answer has no {PARAMS}: KV transfer is not engaged, it is no engine with a NIXL connector"
        )
    if not isinstance(params, dict):
        raise NotEngagedError(f"{PARAMS} in its answer is not a JSON object")
    lacking = [name for name in NEEDED if params.get(name) in (None, "", [])]
    if not params.get("do_remote_prefill"):
        lacking.insert(0, "do_remote_prefill")
    if not lacking and not blocks(params):
        lacking.append("remote_block_ids")
    if lacking:
        raise NotEngagedError(f"{PARAMS} in its answer lacks {', '.join(lacking)}")
    return params


def blocks(params: Mapping[str, Any]) -> int:
    """How many blocks of KV cache the decode fetches; vLLM lists them by groups of layers."""
    told = params["remote_block_ids"]
    groups = told if isinstance(told, list) else []
    return sum(len(group) if isinstance(group, list) else 1 for group in groups)

# SPDX-License-Identifier: Apache-2.0
"""What an attention engine accepts as ``additional_config["afd"]``. Needs no vLLM."""

from __future__ import annotations

import logging
import subprocess
import sys
from typing import Any

import pytest

from afd_runtime.errors import AFDConfigError
from afd_runtime.integrations.vllm.settings import is_configured, parse_settings

TOKENS = 512


def parse(**fields: Any) -> Any:
    return parse_settings({"afd": {"role": "attention", **fields}, "other": 1}, TOKENS)


def test_an_engine_without_the_key_is_not_configured() -> None:
    assert not any(is_configured(value) for value in (None, {}, {"other": {"role": "attention"}}, "afd"))
    assert is_configured({"afd": {}}) and is_configured({"afd": None})


def test_defaults_and_every_field() -> None:
    config = parse()
    assert (config.role, config.connector, config.host, config.max_batch_tokens) == (
        "attention", "p2p", "127.0.0.1", TOKENS,
    )  # fmt: skip
    extra = {"placement": "replicated", "max_batch_tokens": 600, "reply_timeout_s": 3, "doorbells": True}
    config = parse(
        connector="p2p", host="localhost", port=1234, num_attention_ranks=3, num_ffn_ranks=2,
        compute_gate_on_attention=False, connector_extra_config=extra,
    )  # fmt: skip
    assert (config.host, config.port, config.num_attention_ranks, config.num_ffn_ranks) == ("localhost", 1234, 3, 2)
    assert config.placement == "replicated" and config.max_batch_tokens == 600 and config.reply_timeout_s == 3.0
    assert config.doorbells is True and config.compute_gate_on_attention is False


def test_commands_of_another_plugin_start_unchanged(caplog: pytest.LogCaptureFixture) -> None:
    given = {"afd_role": "attention", "afd_connector": "P2pNcclAFDConnector", "afd_host": "localhost", "afd_port": 4321}
    with caplog.at_level(logging.WARNING):
        config = parse_settings({"afd": {**given, "connector_extra_config": {"buffer": 1}}}, TOKENS)
    assert (config.role, config.connector, config.host, config.port) == ("attention", "p2p", "localhost", 4321)
    (record,) = caplog.records
    assert "'P2pNcclAFDConnector'" in record.getMessage() and "['buffer'] is not used" in record.getMessage()
    assert record.name.startswith("vllm."), "vLLM shows the lines of its own loggers only"


REFUSED = [
    ({"prot": 1}, ["afd'].prot is unknown", "did you mean 'port'?"]),
    ({"port": "29650"}, ["port is '29650'"]),
    ({"port": 0}, ["port=0"]),
    ({"port": 70000}, ["port is 70000"]),
    ({"num_ffn_ranks": 1.5}, ["num_ffn_ranks is 1.5"]),
    ({"num_ffn_ranks": True}, ["num_ffn_ranks is True"]),
    ({"role": "decode"}, ["role is 'decode'", "'attention' or 'ffn'"]),
    ({"compute_gate_on_attention": "no"}, ["compute_gate_on_attention is 'no'"]),
    ({"connector": "nixl"}, ["connector is 'nixl'", "'p2p', 'P2pNcclAFDConnector'"]),
    ({"afd_port": 1, "port": 2}, ["port is given twice"]),
    ({"connector_extra_config": [1]}, ["connector_extra_config is [1]"]),
    ({"connector_extra_config": {"num_stages": 2}}, ["connector_extra_config.num_stages is unknown"]),
    ({"connector_extra_config": {"reply_timeout_s": 0}}, ["connector_extra_config.reply_timeout_s is 0"]),
    ({"connector_extra_config": {"max_batch_tokens": 8}}, ["max_batch_tokens=8", "at least 512"]),
    ({"num_ffn_ranks": 2, "connector_extra_config": {"placement": "replicated"}}, ["num_ffn_ranks=2", "sharded"]),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "expected"), REFUSED)
def test_refused_by_name(fields: dict[str, Any], expected: list[str]) -> None:
    with pytest.raises(AFDConfigError) as error:
        parse(**fields)
    assert all(text in str(error.value) for text in expected), error.value


@pytest.mark.parametrize("value", [None, [], "attention", {}])
def test_a_value_that_is_no_group(value: object) -> None:
    with pytest.raises(AFDConfigError, match="role is missing|allowed: an object"):
        parse_settings({"afd": value}, TOKENS)


def test_the_entry_point_imports_neither_torch_nor_vllm() -> None:

    program = (
        "import sys\nimport afd_runtime.integrations.vllm\n"
        "print([m for m in ('torch', 'triton', 'vllm', 'pydantic') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout == "[]\n", done.stderr

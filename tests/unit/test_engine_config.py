"""How an engine was configured, under one name for each thing, and without what is private."""

import shlex

import pytest

from hangwatch.core.engine_config import configuration

LMDEPLOY = shlex.split("""
    lmdeploy serve api_server /data/secret-project/Qwen3-32B --backend pytorch --tp 8
    --cache-max-entry-count 0.8 --max-batch-size=256 --session-len 32768 --eager-mode
    --api-keys sk-planted --server-name 10.1.2.3
""")
VLLM = shlex.split("""
    vllm serve meta-llama/Llama-3.1-8B -tp 2 --gpu_memory_utilization 0.9 --max-num-seqs 128
    --no-enable-prefix-caching
""")
SGLANG = shlex.split("""
    python -m sglang.launch_server --model-path /m/DeepSeek-R1/ --tp-size 8
    --mem-fraction-static 0.85 --speculative-algorithm EAGLE --speculative-num-steps 3
""")


def settings(arguments):
    return configuration(arguments)["settings"]


def test_lmdeploy_is_read_by_its_own_options():
    assert {
        "model": {"argument": "Qwen3-32B"},
        "backend": {"--backend": "pytorch"},
        "tensor_parallel": {"--tp": "8"},
        "cache_ratio": {"--cache-max-entry-count": "0.8"},
        "batch": {"--max-batch-size": "256"},
        "context": {"--session-len": "32768"},
        "eager": {"--eager-mode": True},
    } == settings(LMDEPLOY)


def test_three_engines_have_one_name_for_one_thing():
    names = [settings(engine) for engine in (LMDEPLOY, VLLM, SGLANG)]

    assert ["8", "2", "8"] == [next(iter(each["tensor_parallel"].values())) for each in names]
    assert ["0.8", "0.9", "0.85"] == [next(iter(each["cache_ratio"].values())) for each in names]
    assert {"argument": "Llama-3.1-8B"} == names[1]["model"]
    assert {"--model-path": "DeepSeek-R1"} == names[2]["model"]
    assert {"--speculative-algorithm": "EAGLE", "--speculative-num-steps": "3"} == (
        names[2]["speculation"]
    )


def test_a_setting_in_json_is_taken_apart():
    found = settings(
        [
            "vllm",
            "serve",
            "m",
            "--speculative-config",
            '{"method": "ngram", "model": "/a/b", "n": 4}',
        ]
    )

    assert {"method": "ngram", "model": "b", "n": 4} == found["speculation"]["--speculative-config"]


@pytest.mark.parametrize("value", ["a b c", "x" * 65, "{broken", "'; rm", "ключ и ключ"])
def test_of_a_value_that_is_no_plain_word_only_that_it_was_set_is_kept(value):
    assert {"--dtype": "set"} == settings(["vllm", "--dtype", value])["weights"]


def test_a_negative_number_is_a_value_and_an_option_is_none():
    assert {"--session-len": "-1"} == settings(["x", "--session-len", "-1"])["context"]
    assert {"--session-len": True} == settings(["x", "--session-len", "--tp", "2"])["context"]


def test_what_the_metrics_say_of_the_configuration_is_kept_for_each_engine():
    metrics = (
        b'vllm:cache_config_info{block_size="16",engine="0",num_gpu_blocks="573"} 1.0\n'
        b'vllm:cache_config_info{block_size="16",engine="1",num_gpu_blocks="570"} 1.0\n'
        b'vllm:lora_requests_info{running_lora_adapters="customer-a"} 1.0\n'
        b'python_info{version="3.12"} 1.0\n'
        b'lmdeploy:backend_config_info{backend="pytorch",model="/data/secret/Qwen3"} 1.0\n'
    )

    found = configuration((), metrics)["info"]

    assert ["573", "570"] == [each["num_gpu_blocks"] for each in found["vllm:cache_config_info"]]
    assert [{"backend": "pytorch", "model": "Qwen3"}] == found["lmdeploy:backend_config_info"]
    assert {"vllm:cache_config_info", "lmdeploy:backend_config_info"} == set(found)


def test_where_nothing_is_known_the_parts_are_empty():
    assert {"schema": "hangwatch.engine_config/1", "settings": {}, "info": {}} == configuration(
        ["ray::run_lmdeploy_server_wrapper"]
    )

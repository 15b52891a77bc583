import pytest
from ansible.module_utils.fleet_metrics import MetricsError, label, parse, total
from ansible.module_utils.fleet_proof import read_counters


def test_a_recorded_page_is_read(data):
    counters, block_size = read_counters(parse(data("decode-one-request.txt")))
    assert (counters.bytes, counters.transfers, counters.finished) == (1703936, 1, 1)
    assert counters.seconds == pytest.approx(0.154932)
    assert block_size == 128


def test_values_are_summed_over_the_ranks_of_an_engine():
    samples = parse('x{engine="0"} 2\nx{engine="1"} 3 1700000000\nx{engine="2"} NaN\n')
    assert total(samples, "x") == 5
    assert total(samples, "y") is None


def test_values_of_one_rank_are_summed_over_its_other_labels():
    samples = parse(
        'x{engine="1",reason="stop"} 2\nx{engine="1",reason="length"} 3\nx{engine="10"} 7\nx{engine="2"} NaN\nx 9\n'
    )
    assert total(samples, "x", engine="1") == 5
    assert total(samples, "x", engine="2") is None
    assert total(samples, "x", engine="3") is None


def test_labels_may_hold_anything():
    samples = parse('info{a="x, y=\\"1\\"",b="}"} 1')
    assert label(samples, "info", "b") == "}"
    assert label(samples, "info", "a") == 'x, y=\\"1\\"'


@pytest.mark.parametrize("page", ["<html>", "x{ 1", "x one", "{}", "x"])
def test_garbage_is_refused_with_the_line(page):
    with pytest.raises(MetricsError, match="is not a Prometheus sample"):
        parse(page)


@pytest.mark.parametrize("page", ["", "# nothing\n", "up 1\n"])
def test_a_page_without_the_counters_says_what_is_missing_and_why(page):
    with pytest.raises(MetricsError, match=r"lacks .*vllm:nixl_bytes_transferred_sum.*NixlConnector"):
        read_counters(parse(page))


def page_of_ranks(*ranks):
    """What several API servers publish together: a rank's gauges are there only once it has had a step."""
    lines = []
    for rank, requests in ranks:
        labels = f'engine="{rank}",model_name="tiny"'
        lines += [
            f"vllm:nixl_bytes_transferred_sum{{{labels}}} {requests * 1000}",
            f"vllm:nixl_bytes_transferred_count{{{labels}}} {requests}",
            f"vllm:nixl_xfer_time_seconds_sum{{{labels}}} {requests * 0.5}",
            f"vllm:nixl_post_time_seconds_sum{{{labels}}} {requests * 0.01}",
            f"vllm:nixl_num_descriptors_sum{{{labels}}} {requests * 36}",
            f"vllm:nixl_num_failed_transfers_total{{{labels}}} 0",
            f'vllm:request_success_total{{{labels},finished_reason="stop"}} 0',
            f'vllm:request_success_total{{{labels},finished_reason="length"}} {requests}',
            f'vllm:cache_config_info{{engine="{rank}",block_size="{16 + rank}"}} 1',
        ]
        if requests:
            lines += [f"vllm:num_requests_{kind}{{{labels}}} {rank}" for kind in ("running", "waiting")]
    return parse("\n".join(lines))


def test_the_counters_of_one_rank_are_not_those_of_the_others():
    samples = page_of_ranks((0, 5), (1, 2), (11, 70))
    counters, block_size = read_counters(samples, 1)
    assert (counters.bytes, counters.transfers, counters.seconds, counters.finished) == (2000, 2, 1, 2)
    assert (counters.running, counters.waiting, block_size) == (1, 1, 17)
    assert read_counters(samples, 0)[0].idle
    assert read_counters(samples)[0].finished == 77


def test_a_rank_that_has_done_nothing_yet_is_idle():
    counters, _ = read_counters(page_of_ranks((0, 5), (1, 0)), 1)
    assert counters.idle
    assert (counters.bytes, counters.finished) == (0, 0)


def test_a_rank_that_has_done_something_must_say_whether_it_is_idle():
    samples = [s for s in page_of_ranks((0, 5), (1, 2)) if s.name != "vllm:num_requests_waiting"]
    with pytest.raises(MetricsError, match=r'lacks vllm:num_requests_waiting of engine="1"'):
        read_counters(samples, 1)


def test_a_rank_that_the_engine_does_not_have_is_named():
    with pytest.raises(
        MetricsError, match=r'lacks .*request_success_total.* of engine="2" \(the data-parallel rank\)'
    ):
        read_counters(page_of_ranks((0, 5), (1, 2)), 2)

import pytest
from ansible.module_utils.fleet_metrics import MetricsError, label, parse, total
from ansible.module_utils.fleet_proof import read_counters


def test_a_recorded_page_is_read(data):
    counters, block_size = read_counters(data("decode-one-request.txt"))
    assert (counters.bytes, counters.transfers, counters.finished) == (1703936, 1, 1)
    assert counters.seconds == pytest.approx(0.154932)
    assert block_size == 128


def test_values_are_summed_over_the_ranks_of_an_engine():
    samples = parse('x{engine="0"} 2\nx{engine="1"} 3 1700000000\nx{engine="2"} NaN\n')
    assert total(samples, "x") == 5
    assert total(samples, "y") is None


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
        read_counters(page)

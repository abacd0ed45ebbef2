import numpy as np
import pytest

from specjax import analysis

ACCEPTED, GAMMA = [0, 2, 3], 3


def test_eagle_names_conditional_acceptance_by_self_predicted_inputs():
    assert analysis.to_eagle(ACCEPTED, GAMMA) == pytest.approx(
        {"tau": 8 / 3, "0-alpha": 2 / 3, "1-alpha": 1.0, "2-alpha": 0.5}
    )


def test_vllm_counters_and_rates():
    vllm = analysis.to_vllm(ACCEPTED, GAMMA)
    assert vllm["num_drafts"] == 3
    assert vllm["num_draft_tokens"] == 9
    assert vllm["num_accepted_tokens"] == 5
    assert vllm["num_accepted_tokens_per_pos"] == [2, 2, 1]
    assert vllm["mean_acceptance_length"] == pytest.approx(8 / 3)
    assert vllm["draft_acceptance_rate"] == pytest.approx(5 / 9)
    assert vllm["per_position_acceptance_rate"] == pytest.approx([2 / 3, 2 / 3, 1 / 3])


def test_vllm_counters_come_back():
    positions = analysis.from_vllm(analysis.to_vllm(ACCEPTED, GAMMA))
    np.testing.assert_allclose(positions.conditional, [2 / 3, 1, 1 / 2])
    assert positions.passes == 3


def test_a_published_vllm_run():
    # EAGLE-3 on MT-bench, k = 7: 4816 drafts, 12208 accepted tokens, acceptance length 3.53 (vllm#26191).
    accepted = np.repeat([0, 7], [4816 - 1744, 1744])
    assert accepted.sum() == 12208
    assert analysis.mean_acceptance_length(accepted) == pytest.approx(3.53, abs=0.005)


def test_vllm_counters_that_cannot_be():
    with pytest.raises(ValueError, match=r"lack \['num_accepted_tokens_per_pos'\]"):
        analysis.from_vllm({"num_drafts": 3})
    with pytest.raises(ValueError, match="rise"):
        analysis.from_vllm({"num_drafts": 3, "num_accepted_tokens_per_pos": [2, 3]})


def test_spec_bench_pools_passes_and_divides_means():
    columns = analysis.to_spec_bench(ACCEPTED, [20.0, 20.0], [10.0, 40.0])
    assert columns == pytest.approx({"#Mean accepted tokens": 8 / 3, "Speedup ratio": 0.8})


def test_deepspec_divides_by_offered_passes():
    columns = analysis.to_deepspec([1, 2, 0], gamma=[1, 3, 2])
    assert columns == pytest.approx(
        {
            "acceptance_length": 2.0,
            "verify_rate": 6 / 9,
            "accept_rate@0": 2 / 3,
            "accept_rate@1": 1 / 2,
            "accept_rate@2": 0.0,
        }
    )

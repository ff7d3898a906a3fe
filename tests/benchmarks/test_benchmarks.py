"""The arithmetic of the benchmarks. What they measure is not tested."""

import common
import gpu


class FakeContender:
    """One that takes 1 ms a round, for all that is asked of it."""

    def __init__(self, name, *_):
        self.name = name

    def round(self):
        return 1e-3

    def gpu_memory(self):
        return 2.0

    def close(self):
        return 3.0


def test_mfu_is_the_share_of_the_peak(monkeypatch, capsys):
    shape = common.make_shape("S", "gpt2")
    # 4 layers of 12 x 128^2, and the head of 65 x 128; attention of 64 positions.
    flops = 6 * (4 * 12 * 128**2 + 65 * 128) + 12 * 4 * 128 * 64
    assert shape.flops_per_token == flops
    monkeypatch.setattr(gpu, "Contender", FakeContender)
    peak = flops * 12 * 64 / 1e-3 * 4
    gpu.compare("S", "cuda", peak, 2, 1)
    table = capsys.readouterr().out
    assert "| gptlite, GPT-2's block  | 768,000 (768,000 to 768,000) |" in table
    assert table.count("| 25.0% | 2        |") == 4
    gpu.compare("S", "cpu", None, 2, 1)
    table = capsys.readouterr().out
    assert table.count("| unknown | 3        |") == 4
    assert "%" not in table


def test_the_peak_is_that_of_the_exact_device(capsys):
    assert gpu.find_peak("NVIDIA H100 80GB HBM3", None) == 989.4e12
    assert gpu.find_peak("NVIDIA H100 PCIe", None) is None
    assert "The peak of 'NVIDIA H100 PCIe' is not known." in capsys.readouterr().out
    assert gpu.find_peak("NVIDIA H100 PCIe", 756.0) == 756e12


def test_the_time_to_a_loss_is_that_of_the_first_evaluation_below():
    metrics = [
        {"seconds": 1.0, "step": 10},
        {"seconds": 2.0, "step": 20, "val_loss": 1.5},
        {"seconds": 3.0, "step": 30, "val_loss": 1.4},
        {"seconds": 4.0, "step": 40, "val_loss": 1.3},
    ]
    assert "after 3 s and 30 steps" in gpu.time_to(1.4697, metrics)
    assert "did not reach 1.2: 1.3000 was the best" in gpu.time_to(1.2, metrics)

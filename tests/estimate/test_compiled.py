"""Training steps that NVIDIA's and Google's compilers make, without their devices."""

import dataclasses
import importlib.util
import re

import equinox as eqx
import jax
import pytest

from gptlite.config import ModelConfig, OptimizerConfig, TrainingConfig
from gptlite.estimate.hardware import HARDWARE, describe
from gptlite.estimate.program import Work, work
from gptlite.estimate.report import report
from gptlite.estimate.step import compile_step, size_on_device
from gptlite.inspect.flops import flops_per_token
from gptlite.machine.mesh import make_mesh
from gptlite.models.gpt import GPT
from gptlite.presets import GPT2_SMALL
from gptlite.training.step import TrainSteps

COMPILERS = {"h100:8": "jax_cuda13_plugin", "v5e:2x4": "libtpu"}
# A layer's calls in the forward pass, once more in the backward pass (`remat`), and its gradients.
ATTENTION = {
    "h100:8": {"__cudnn$fmhaSoftmax": 2, "__cudnn$fmhaSoftmaxBackward": 1},
    "v5e:2x4": {
        "splash_mha_fwd_residuals": 2,
        "splash_mha_dq_no_residuals": 1,
        "splash_mha_dkv_no_residuals": 1,
    },
}
DEVICES = 8
MODEL = dataclasses.replace(
    GPT2_SMALL, n_layers=2, n_heads=4, d_model=512, context_length=256, remat="block"
)
VOCAB = 2048


@dataclasses.dataclass
class Program:
    """`state`, `parameters` and `used`: bytes of a device."""

    state: int
    parameters: int
    used: float
    work: Work
    report: str


pytestmark = pytest.mark.peers


@pytest.fixture(scope="module", params=COMPILERS)
def target(request) -> str:
    if importlib.util.find_spec(COMPILERS[request.param]) is None:
        pytest.skip('needs the compilers: pip install "gptlite-jax[aot]"')
    return request.param


def compiled(target: str, config: ModelConfig, fsdp: int, separator: int | None = None) -> Program:
    hardware, devices = describe(target)
    shapes = eqx.filter_eval_shape(GPT, config, VOCAB, separator=separator, key=jax.random.key(0))
    mesh = make_mesh(data=DEVICES // fsdp, fsdp=fsdp, tensor=1, devices=devices)
    training = TrainingConfig(batch_size=DEVICES, accumulation=1)
    steps = TrainSteps(shapes, OptimizerConfig(name="adamw"), training, mesh)
    step = compile_step(shapes, steps)
    state = steps.abstract_state(shapes)
    return Program(
        state=size_on_device(state),
        parameters=size_on_device(state.model),
        used=step.used,
        work=work(step.compiled.as_text(), hardware),
        report=report(step, hardware),
    )


@pytest.fixture(scope="module")
def programs(target):
    """The target, and a program for each size of the mesh's axis `fsdp`."""
    return target, {fsdp: compiled(target, MODEL, fsdp) for fsdp in (1, DEVICES)}


@pytest.mark.parametrize("attention", ["full", "sliding:window=64"])
def test_attention_that_keeps_documents_apart_is_fused(target, attention):
    config = dataclasses.replace(
        MODEL, n_layers=1, remat="none", separate_documents=True, attention=attention
    )
    found = compiled(target, config, 1, separator=0).work
    kernels = {
        "h100:8": {"__cudnn$fmhaScaleBiasSoftmax", "__cudnn$fmhaScaleBiasSoftmaxBackward"},
        "v5e:2x4": {
            "splash_mha_fwd_segmented_residuals",
            "splash_mha_dq_segmented_no_residuals",
            "splash_mha_dkv_segmented_no_residuals",
        },
    }
    assert dict(found.attention) == dict.fromkeys(kernels[target], 1)
    assert found.wide_flops == 0


def test_attention_is_fused(programs):
    target, found = programs
    expected = {name: count * MODEL.n_layers for name, count in ATTENTION[target].items()}
    for program in found.values():
        assert dict(program.work.attention) == expected
        assert program.work.wide_flops == 0
        assert all(f"{count} x {name}" in program.report for name, count in expected.items())


def test_mfu_does_not_count_what_is_computed_again(programs):
    target, found = programs
    shapes = eqx.filter_eval_shape(GPT, MODEL, VOCAB, key=jax.random.key(0))
    forward, _ = flops_per_token(shapes)
    for program in found.values():
        useful = 3 * forward * MODEL.context_length  # a row on each device
        assert useful < 0.9 * program.work.flops
        least = max(program.work.seconds, program.work.link_seconds)
        (percent,) = re.findall(r"MFU at most (\d+)%", program.report)
        peak = HARDWARE[target.split(":")[0]].flops
        assert int(percent) == pytest.approx(100 * useful / peak / least, abs=0.51)


def test_the_state_is_divided_among_the_devices(programs):
    """Within 10 %: norms and biases are kept by all."""
    _, found = programs
    whole, part = found[1], found[DEVICES]
    assert part.state == pytest.approx(whole.state / DEVICES, rel=0.1)
    assert part.used < 1.1 * (whole.used - whole.state + whole.state / DEVICES)


def test_matrices_are_gathered_twice_and_never_more(programs):
    """In bfloat16, for the forward and for the backward pass. Without FSDP there is nothing to
    gather."""
    _, found = programs
    assert set(found[1].work.collectives) == {"all-reduce"}
    once = found[1].parameters / 2 * (DEVICES - 1) / DEVICES
    _, gathered = found[DEVICES].work.collectives["all-gather"]
    assert 1.7 * once < gathered <= 2 * once

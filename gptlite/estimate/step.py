"""A training step that is compiled, and not run."""

import math
import time
from dataclasses import dataclass
from typing import Any

import equinox as eqx
import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from gptlite.estimate.hardware import Hardware
from gptlite.machine.pytrees import is_array
from gptlite.nn.kernels.rows import default_parts, n_row_shards
from gptlite.sharding import MESH_AXES
from gptlite.training.step import TrainSteps

# JAX's default: https://docs.jax.dev/en/latest/gpu_memory_allocation.html
GPU_FRACTION = 0.75


@dataclass(frozen=True)
class CompiledStep:
    """A training step for devices that need not be there."""

    model: Any
    """Or `eqx.filter_eval_shape` of it."""
    steps: TrainSteps
    compiled: Any
    """None if the compiler refuses the step because it does not fit. A TPU's does that."""
    refusal: str
    """The compiler's message if it refuses."""
    seconds: float
    """That it took to compile."""

    @property
    def used(self) -> float:
        """Bytes of a device's memory."""
        if self.compiled is None:
            return math.inf
        analysis = self.compiled.memory_analysis()
        return (
            analysis.argument_size_in_bytes
            + analysis.temp_size_in_bytes
            + analysis.output_size_in_bytes
            - analysis.alias_size_in_bytes
            + analysis.generated_code_size_in_bytes
        )


def size_on_device(tree: Any) -> int:
    """Bytes of what a device has of arrays, or shapes of arrays."""
    leaves = [leaf for leaf in jax.tree.leaves(tree) if is_array(leaf)]
    shards = ((leaf.sharding.shard_shape(leaf.shape), leaf.dtype.itemsize) for leaf in leaves)
    return sum(math.prod(shape) * size for shape, size in shards)


def abstract_batch(shape: tuple[int, ...], mesh: Mesh) -> jax.ShapeDtypeStruct:
    """The shape of batches of ids as `place_batches` places them, or of numbers."""
    spec = PartitionSpec(None, MESH_AXES["batch"]) if len(shape) > 1 else PartitionSpec()
    return jax.ShapeDtypeStruct(shape, np.int32, sharding=NamedSharding(mesh, spec))


def lower_step(steps: TrainSteps, model: Any, context_length: int) -> jax.stages.Lowered:
    """The program of a step on windows of ids. `model`, which may be `eqx.filter_eval_shape` of
    one, and the devices of the mesh need not be there."""
    state, static = eqx.partition(steps.abstract_state(model), is_array)
    windows = abstract_batch((1, steps.training.batch_size, context_length + 1), steps.mesh)
    number, points = abstract_batch((), steps.mesh), abstract_batch((3,), steps.mesh)

    # Not `eqx.filter_jit`, for which a shape is no array.
    def run(data, state):
        return eqx.filter(steps.update(eqx.combine(state, static), *data), eqx.is_array)

    run = jax.jit(run, donate_argnums=1, compiler_options=steps.compiler_options)
    with jax.set_mesh(steps.mesh):
        return run.lower((windows, number, points, number), state)


def rows_at_once(steps: TrainSteps, tokens: int) -> int:
    """The rows, of so many tokens, whose gradient a device computes at once."""
    shape, batch_size = steps.mesh.shape, steps.training.batch_size
    with jax.set_mesh(steps.mesh):
        rows = batch_size // n_row_shards()
        parts = steps.training.accumulation or default_parts(rows, tokens)
    # Devices that cut the parameters share each part's rows.
    return batch_size // (parts * shape["data"] * shape["fsdp"])


def compile_step(model: Any, steps: TrainSteps) -> CompiledStep:
    """A step of `model`, or of `eqx.filter_eval_shape` of one, on windows of its context length."""
    start, compiled, refusal = time.perf_counter(), None, ""
    try:
        compiled = lower_step(steps, model, model.config.context_length).compile()
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        refusal = str(error).splitlines()[0]
    return CompiledStep(model, steps, compiled, refusal, time.perf_counter() - start)


def usable_memory(hardware: Hardware) -> float:
    """Bytes of a device's memory that JAX takes by default."""
    return hardware.memory * (GPU_FRACTION if hardware.gpu else 1)


def memory_share(step: CompiledStep, hardware: Hardware) -> float:
    """Which share of the usable memory a step takes. Up to 1, it fits."""
    share = step.used / usable_memory(hardware)
    # A TPU's compiler refuses a step that does not fit. The figures that it gives of one close to
    # the limit add up to a little more than the memory.
    return share if hardware.gpu or step.compiled is None else min(share, 1.0)

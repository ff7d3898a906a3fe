"""The answer to `python train.py ... --compile-for TARGET`."""

import heapq

from gptlite.estimate.hardware import Hardware
from gptlite.estimate.program import Work, work
from gptlite.estimate.step import CompiledStep, memory_share, usable_memory
from gptlite.models.summary import flops_per_token
from gptlite.sharding import size_on_device

# How many of the longest operations are named.
LONGEST = 5


def report(step: CompiledStep, hardware: Hardware) -> str:
    """What a training step takes on the devices that it is compiled for, which are those of
    `hardware`."""
    model, steps = step.model, step.steps
    context, mesh = model.config.context_length, steps.mesh
    devices, tokens = mesh.size, steps.training.batch_size * context
    shape = ", ".join(f"{name} {size}" for name, size in mesh.shape.items())
    lines = [
        f"A training step for {devices} x {mesh.devices.flat[0].device_kind} (mesh: {shape}), "
        f"{steps.training.batch_size:,} rows of {context:,} tokens. It was compiled, not run.",
        "",
    ]
    if step.compiled is None:
        return "\n".join([*lines, f"It does not fit: {step.refusal}"])
    found = work(step.compiled.as_text(), hardware)
    lines += _memory(step, hardware)
    lines += ["", *_arithmetic(found), *_exchange(found), ""]
    # Model FLOPs utilization (Chowdhery et al., 2022, "PaLM", appendix B): the backward pass counts
    # twice the forward pass, and what is computed once more does not. There, the masked half of
    # attention counts; here, little of it does.
    useful = 3 * flops_per_token(model)[0] * tokens / devices
    lines += _bound(found, hardware, useful)
    lines += ["", f"Compiled in {step.seconds:.0f} s. Peaks: {hardware.source}."]
    return "\n".join(lines)


def _memory(step: CompiledStep, hardware: Hardware) -> list[str]:
    state = step.steps.skeleton(step.model)
    parts = {
        "parameters": size_on_device(state.model),
        "optimizer": size_on_device(state.optimizer_state),
        "activations, gradients": step.compiled.memory_analysis().temp_size_in_bytes,
    }
    total, usable = step.used, usable_memory(hardware)
    if memory_share(step, hardware) <= 1:
        verdict = "it fits"
    elif total <= hardware.memory:
        verdict = (
            f"more than JAX takes by default, {usable / 1e9:.1f} GB: set "
            "XLA_PYTHON_CLIENT_MEM_FRACTION"
        )
    else:
        verdict = "it does not fit"
    return [
        "memory of a device             GB",
        *(f"  {name:<22} {size / 1e9:>8.2f}" for name, size in parts.items()),
        f"  {'in all':<22} {total / 1e9:>8.2f}  of {hardware.memory / 1e9:.1f}: {verdict}",
    ]


def _arithmetic(found: Work) -> list[str]:
    attention = ", ".join(f"{count} x {name}" for name, count in sorted(found.attention.items()))
    return [
        "a step, on each device",
        f"  products               {found.flops / 1e12:>8.2f}  TFLOP, "
        f"{found.wide_flops / 1e12:.2f} of them not in half precision",
        f"  read, written          {found.read / 1e9:>8.2f}  {found.written / 1e9:.2f} GB",
        f"  fused attention        {attention or 'none':>8}",
    ]


def _exchange(found: Work) -> list[str]:
    if not found.collectives:
        return ["  received               nothing"]
    return [
        f"  received, {kind:<18} {size / 1e9:>8.3f}  GB in {count:.0f}"
        for kind, (count, size) in sorted(found.collectives.items())
    ]


def _bound(found: Work, hardware: Hardware, useful: float) -> list[str]:
    least = max(found.seconds, found.link_seconds)
    rows = {
        "products at the peak": found.flops / hardware.flops,
        "reading and writing": (found.read + found.written) / hardware.bandwidth,
        "operation by operation": found.seconds,
        "links": found.link_seconds,
    }
    longest = heapq.nlargest(LONGEST, found.by_operation.items(), key=lambda item: item[1])
    return [
        "at least, at the data sheet's peaks   ms",
        *(f"  {name:<28} {seconds * 1e3:>8.2f}" for name, seconds in rows.items()),
        f"  a step                       {least * 1e3:>8.2f}  MFU at most "
        f"{useful / hardware.flops / least:.0%}",
        "of that, operations with these results",
        *(f"  {seconds * 1e3:>37.2f}  {name}" for name, seconds in longest),
    ]

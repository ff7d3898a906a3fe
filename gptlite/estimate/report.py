"""The answer to `gptlite estimate ... --for TARGET`."""

import heapq

from gptlite.estimate.hardware import Hardware
from gptlite.estimate.program import Work, work
from gptlite.estimate.step import CompiledStep, memory_share, size_on_device, usable_memory
from gptlite.inspect.flops import flops_per_token

# How many of the longest operations are named.
LONGEST = 5


def report(step: CompiledStep, hardware: Hardware) -> str:
    """The memory and time that a training step takes on the devices that it is compiled for,
    which are those of `hardware`."""
    model, steps = step.model, step.steps
    context_length, mesh = model.config.context_length, steps.mesh
    devices, tokens = mesh.size, steps.training.batch_size * context_length
    shape = ", ".join(f"{name} {size}" for name, size in mesh.shape.items())
    lines = [
        f"A training step for {devices} x {mesh.devices.flat[0].device_kind} (mesh: {shape}), "
        f"{steps.training.batch_size:,} rows of {context_length:,} tokens. It was compiled, not "
        "run.",
        "",
    ]
    if step.compiled is None:
        return "\n".join([*lines, f"It does not fit: {step.refusal}"])
    total = work(step.compiled.as_text(), hardware)
    lines += _memory(step, hardware)
    lines += ["", *_arithmetic(total), *_exchange(total), ""]
    # Model FLOPs utilization (Chowdhery et al., 2022, "PaLM", appendix B): the backward pass counts
    # twice the forward pass, and what is computed once more does not. There, the masked half of
    # attention counts; here, little of it does. Frozen parameters have no gradient.
    forward, training = flops_per_token(model)
    spared = training - flops_per_token(model, steps.trainable)[1]
    useful = (3 * forward - spared) * tokens / devices
    lines += _bound(total, hardware, useful)
    lines += ["", f"Compiled in {step.seconds:.0f} s. Peaks: {hardware.source}."]
    return "\n".join(lines)


def _figure(value: float) -> str:
    """With two decimals, or, of a small one, two digits."""
    return f"{value:>8.2f}" if value == 0 or value >= 0.1 else f"{value:>8.2g}"


def _memory(step: CompiledStep, hardware: Hardware) -> list[str]:
    state = step.steps.abstract_state(step.model)
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
        *(f"  {name:<22} {_figure(size / 1e9)}" for name, size in parts.items()),
        f"  {'in all':<22} {_figure(total / 1e9)}  of {hardware.memory / 1e9:.1f}: {verdict}",
    ]


def _arithmetic(total: Work) -> list[str]:
    attention = ", ".join(f"{count} x {name}" for name, count in sorted(total.attention.items()))
    lines = [
        "a step, on each device",
        f"  products               {_figure(total.flops / 1e12)}  TFLOP, "
        f"{_figure(total.wide_flops / 1e12).strip()} of them not in half precision",
        f"  read, written          {_figure(total.read / 1e9)}  "
        f"{_figure(total.written / 1e9).strip()} GB",
        f"  fused attention        {attention or 'none':>8}",
    ]
    if total.unknown_loops:
        lines.append(
            f"  loops                  {total.unknown_loops:>8}  are counted once, for it is not "
            "known how often they run: the true figures are larger"
        )
    return lines


def _exchange(total: Work) -> list[str]:
    if not total.collectives:
        return ["  received               nothing"]
    return [
        f"  received, {kind:<18} {_figure(size / 1e9)}  GB in {count:.0f}"
        for kind, (count, size) in sorted(total.collectives.items())
    ]


def _bound(total: Work, hardware: Hardware, useful: float) -> list[str]:
    least = max(total.seconds, total.link_seconds)
    rows = {
        "products at the peak": total.flops / hardware.flops,
        "reading and writing": (total.read + total.written) / hardware.bandwidth,
        "operation by operation": total.seconds,
        "links": total.link_seconds,
    }
    longest = heapq.nlargest(LONGEST, total.by_operation.items(), key=lambda item: item[1])
    return [
        "at least, at the data sheet's peaks   ms",
        *(f"  {name:<28} {_figure(seconds * 1e3)}" for name, seconds in rows.items()),
        f"  a step                       {_figure(least * 1e3)}  MFU at most "
        f"{useful / hardware.flops / least:.0%}",
        "of that, operations with these results",
        *(f"  {_figure(seconds * 1e3):>37}  {name}" for name, seconds in longest),
    ]

"""Training speed on one GPU against Hugging Face's GPT-2 and plain PyTorch, both under
`torch.compile`, and the time that preset `gpu` takes to nanoGPT's loss: `python benchmarks/gpu.py`.

Same shape, batch, context and optimizer (AdamW), in bfloat16, without dropout. Each contender has a
process of its own. They run in alternation, and all stay in memory: those of shape GPT2 need more
than the 80 GB of an H100. MFU is the share of the device's dense bfloat16 peak, as PaLM's
authors count products. What follows `--` goes to train.py.
"""

import argparse
import dataclasses
import os
import statistics
import sys

import huggingface
from common import (
    Contender,
    interleave,
    make_shape,
    print_machine,
    print_table,
    speedup,
    spread,
)
from quality import train
from train_speed import make_plain_round, make_round

# nanoGPT's README, for its recipe for characters on an A100.
LOSS = 1.4697
STEPS = {"S": 200, "M": 50, "GPT2": 10}


def main() -> None:
    end = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    parser = argparse.ArgumentParser(
        description=__doc__, usage="%(prog)s [options] [-- OPTIONS OF train.py]"
    )
    parser.add_argument("--shapes", nargs="+", default=list(STEPS), choices=list(STEPS))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, help="of a round; chosen by shape, if left out")
    parser.add_argument("--loss", type=float, default=LOSS, help="that preset gpu is to reach")
    parser.add_argument(
        "--peak", type=float, help="TFLOP/s of a device that is not in gptlite/estimate/hardware.py"
    )
    parser.add_argument("--cpu", action="store_true", help="to try this program without a GPU")
    arguments = parser.parse_args(sys.argv[1:end])
    # So that the contenders share the memory.
    os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
    if arguments.cpu:
        os.environ["JAX_PLATFORMS"] = "cpu"
    device = "cpu" if arguments.cpu else "cuda"

    print_machine()
    kind = find_device(device)
    peak = find_peak(kind, arguments.peak)
    for name in arguments.shapes:
        compare(name, device, peak, arguments.rounds, arguments.steps or STEPS[name])
    _, metrics, _ = train("gpu", *sys.argv[end + 1 :])
    print(time_to(arguments.loss, metrics))


def find_device(device: str) -> str:
    """What JAX calls the device.

    **Raises:** `SystemExit` if JAX or PyTorch does not find it.
    """
    import jax
    import torch

    if device == "cuda" and not (jax.default_backend() == "gpu" and torch.cuda.is_available()):
        sys.exit(
            f"JAX must find a GPU, and found {jax.default_backend()}; torch.cuda.is_available() "
            f"must be True, and is {torch.cuda.is_available()}. --cpu tries this program without."
        )
    return jax.devices()[0].device_kind


def find_peak(kind: str, given: float | None) -> float | None:
    """FLOP/s; None, after a message, if they are not known."""
    from gptlite.errors import UserError
    from gptlite.estimate.hardware import peak_flops

    if given is not None:
        print(f"{kind}, with a peak of {given:g} TFLOP/s that was given\n")
        return given * 1e12
    try:
        peak = peak_flops(kind)
    except UserError as error:
        print(f"{error} So no MFU is printed. --peak gives one.\n")
        return None
    print(f"{kind}, with a peak of {peak / 1e12:g} TFLOP/s\n")
    return peak


def compare(name: str, device: str, peak: float | None, rounds: int, steps: int) -> None:
    """One table."""
    gpt2, default = make_shape(name, "gpt2"), make_shape(name, "default")
    # nanoGPT rounds GPT-2's vocabulary up, too.
    padded = dataclasses.replace(gpt2, vocab_size=50_304) if name == "GPT2" else gpt2
    shapes = {
        "plain PyTorch, compiled": padded,
        "Hugging Face, compiled": gpt2,
        "gptlite, GPT-2's block": gpt2,
        "gptlite, default block": default,
    }
    plain, peer, ours, own = shapes
    dtype = "bfloat16"
    contenders = [
        Contender(plain, make_plain_round, padded, dtype, 1, steps, True, device),
        Contender(peer, huggingface.make_train_round, gpt2, dtype, steps, True, device),
        Contender(ours, make_round, gpt2, dtype, steps),
        Contender(own, make_round, default, dtype, steps),
    ]
    seconds = interleave(contenders, rounds)
    memory = [x.close() if device == "cpu" else x.gpu_memory() for x in contenders]
    best = min((plain, peer), key=lambda name: statistics.median(seconds[name]))
    rows = []
    for contender, most in zip(contenders, memory, strict=True):
        shape, times = shapes[contender.name], seconds[contender.name]
        # The same products count for all: those of GPT-2's 50,257 tokens.
        flops = dataclasses.replace(shape, vocab_size=gpt2.vocab_size).flops_per_token
        rate = flops * shape.tokens / statistics.median(times)
        rows.append(
            [
                contender.name,
                spread([shape.tokens / t for t in times]),
                speedup(seconds, best, contender.name, ".2f"),
                "unknown" if peak is None else f"{rate / peak:.1%}",
                f"{most:,.0f}",
            ]
        )
    if device == "cuda":
        for contender in contenders:
            contender.close()
    batch = f"{gpt2.batch_size} x {gpt2.model.context_length}"
    print(f"{name}, {dtype}: batch {batch}, {rounds} rounds of {steps} steps")
    print_table(["", "tokens/s", "times the best peer", "MFU", "peak MiB"], rows)


def time_to(loss: float, metrics: list[dict]) -> str:
    """When the validation loss was `loss` or less for the first time."""
    evaluated = [line for line in metrics if "val_loss" in line]
    for line in evaluated:
        if line["val_loss"] <= loss:
            return (
                f"preset gpu: a validation loss of {line['val_loss']:.4f} (at most {loss}) after "
                f"{line['seconds']:.0f} s and {line['step']:,} steps, with their compilation"
            )
    best = min(line["val_loss"] for line in evaluated)
    return f"preset gpu: its validation loss did not reach {loss}: {best:.4f} was the best"


if __name__ == "__main__":
    main()

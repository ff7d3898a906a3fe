"""What the benchmarks share: contenders in their own processes, run in alternation; the machine's
limits; comparisons; tables."""

import dataclasses
import json
import multiprocessing
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gptlite.config import ModelConfig

ROOT = Path(__file__).resolve().parents[1]
# One round of work, as `seconds = round()`.
Round = Callable[[], float]
MakeRound = Callable[..., Round]


@dataclasses.dataclass(frozen=True)
class Shape:
    """What all contenders train."""

    model: "ModelConfig"
    batch_size: int
    vocab_size: int = 65
    """TinyShakespeare's characters."""

    @property
    def tokens(self) -> int:
        """Tokens in a batch."""
        return self.batch_size * self.model.context_length

    @property
    def weights(self) -> int:
        """Parameters of the blocks' matrices."""
        model = self.model
        return model.n_layers * (4 * model.d_model**2 + 2 * model.d_model * model.d_hidden)

    @property
    def flops_per_token(self) -> float:
        """Forward and backward: 6 a weight and 12 n_layers d_model context for attention (Chowdhery
        et al., 2022, appendix B), which counts what the causal mask discards."""
        model = self.model
        weights = self.weights + self.vocab_size * model.d_model
        return 6 * weights + 12 * model.n_layers * model.d_model * model.context_length


def make_shape(name: str, block: str) -> Shape:
    """`name`: S (nanoGPT's recipe for a CPU), M (for a GPU) or GPT2 (124 M parameters). `block`:
    `gpt2`, with the biases that Hugging Face's has and no dropout; `default`, gptlite's own."""
    # Here, because startup.py's peer must not wait for it.
    from gptlite.config import ModelConfig
    from gptlite.presets import PRESETS

    config = PRESETS[name.lower()][1]
    model = dataclasses.replace(config.model, bias=True, dropout=0.0, attention_dropout=0.0)
    if block == "default":
        model = ModelConfig(
            n_layers=model.n_layers,
            n_heads=model.n_heads,
            d_model=model.d_model,
            context_length=model.context_length,
        )
    vocab_size = 50_257 if name == "GPT2" else Shape.vocab_size
    return Shape(model, config.training.batch_size, vocab_size)


class Contender:
    """A process that makes rounds of one kind when asked. While others run, it waits."""

    def __init__(self, name: str, make: MakeRound, *args: Any):
        """`make(*args)`, run in the process, gives the round, compiled and warm."""
        context = multiprocessing.get_context("spawn")
        self.name = name
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, make, args), daemon=True)
        self._process.start()
        theirs.close()
        self._pipe.recv()

    def round(self) -> float:
        """Seconds that one round took."""
        self._pipe.send("round")
        return self._pipe.recv()

    def memory(self) -> float:
        """MiB that are the process' own now: without pages of files, which the system may take
        back."""
        self._pipe.send("memory")
        return self._pipe.recv()

    def gpu_memory(self) -> float:
        """MiB of the GPU that its arrays took at most, as JAX or PyTorch count them."""
        self._pipe.send("gpu memory")
        return self._pipe.recv()

    def close(self) -> float:
        """End the process. Its peak memory, in MiB."""
        self._pipe.send("close")
        peak = self._pipe.recv()
        self._process.join()
        return peak


def _serve(pipe: Connection, make: MakeRound, args: tuple[Any, ...]) -> None:
    work = make(*args)
    work()  # warm-up, not measured
    pipe.send("ready")
    answers = {
        "round": work,
        "memory": lambda: memory_now("RssAnon"),
        "gpu memory": peak_gpu_memory,
    }
    while (asked := pipe.recv()) != "close":
        pipe.send(answers[asked]())
    # Not getrusage, whose peak begins with that of the process that started this one.
    pipe.send(memory_now("VmHWM"))


def memory_now(field: str, process: int | str = "self") -> float:
    """A line of Linux's status of a process, in MiB: `VmHWM` (the peak), `RssAnon` (its own)."""
    status = Path(f"/proc/{process}/status").read_text(encoding="utf-8")
    (kilobytes,) = (line.split()[1] for line in status.splitlines() if line.startswith(field))
    return int(kilobytes) / 1024


def peak_gpu_memory() -> float:
    if "torch" in sys.modules:
        import torch

        return torch.cuda.max_memory_allocated() / 2**20
    import jax

    return jax.local_devices()[0].memory_stats()["peak_bytes_in_use"] / 2**20


def interleave(contenders: Sequence[Contender], rounds: int) -> dict[str, list[float]]:
    """Each contender's seconds per round, measured in alternation: A B C, A B C, ..."""
    seconds = {contender.name: [] for contender in contenders}
    for _ in range(rounds):
        for contender in contenders:
            seconds[contender.name].append(contender.round())
    return seconds


def timed(work: Callable[[], Any], repeats: int, wait: Callable[[], Any] | None = None) -> float:
    """Mean seconds per call of `work`, over `repeats` calls, and `wait` for the last."""
    start = time.perf_counter()
    for _ in range(repeats):
        work()
    if wait is not None:
        wait()
    return (time.perf_counter() - start) / repeats


def make_matmul(dtype: str) -> Round:
    """A product of 1,024 x 1,024 matrices, in seconds per FLOP: the faster of JAX and PyTorch. It
    is the limit for GFLOP/s."""
    import jax
    import jax.numpy as jnp
    import torch

    x = jnp.ones((1024, 1024), dtype)
    product = jax.jit(lambda x: jnp.matmul(x, x, preferred_element_type=jnp.float32))
    y = torch.ones((1024, 1024), dtype=getattr(torch, dtype))
    flops = 2 * 1024**3
    return lambda: (
        min(timed(lambda: product(x).block_until_ready(), 20), timed(lambda: y @ y, 20)) / flops
    )


def make_memory() -> Round:
    """Seconds per byte of reading 256 MiB from memory."""
    import torch

    x = torch.ones(2**26)
    return lambda: timed(lambda: x.sum(), 5) / (x.numel() * 4)


def spread(values: Sequence[float], form: str = ",.0f") -> str:
    """Median and range."""
    return f"{statistics.median(values):{form}} ({min(values):{form}} to {max(values):{form}})"


def speedup(seconds: dict[str, list[float]], peer: str, name: str, form: str) -> str:
    """The speed of the contender `name` over that of `peer`, round by round."""
    rounds = zip(seconds[peer], seconds[name], strict=True)
    return spread([theirs / ours for theirs, ours in rounds], form)


def compare(folder: Path, *words: str) -> list[dict[str, Any]]:
    """`compare.py` in a folder, and its lines of JSON."""
    command = [sys.executable, str(ROOT / "compare.py"), *words, "--json"]
    done = subprocess.run(command, cwd=folder, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        sys.exit(f"compare.py {' '.join(words)} failed")
    return [json.loads(line) for line in done.stdout.splitlines()]


def corpus_of(options: Sequence[str]) -> list[str]:
    """Those of `options` that name the text."""
    place = options.index("--data.corpus") if "--data.corpus" in options else len(options)
    return list(options[place : place + 2])


def print_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """As Markdown, columns aligned."""
    widths = [max(len(row[i]) for row in [header, *rows]) for i in range(len(header))]
    for row in [header, ["-" * width for width in widths], *rows]:
        cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        print("| " + " | ".join(cells) + " |")
    print(flush=True)


def print_machine() -> None:
    """What the figures below were taken on.

    **Raises:** `SystemExit` if the peers are not installed.
    """
    import jax

    try:
        import torch
        import transformers
    except ImportError as error:
        sys.exit(f'{error}. The benchmarks need their peers: pip install "gptlite-jax[bench]"')

    model = platform.processor()
    if os.path.exists("/proc/cpuinfo"):
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            names = [line.split(":")[1].strip() for line in file if line.startswith("model name")]
        model = names[0] if names else model
    print(
        f"{os.cpu_count()} cores, {model}; Python {platform.python_version()}, JAX "
        f"{jax.__version__}, PyTorch {torch.__version__}, transformers {transformers.__version__}\n"
    )

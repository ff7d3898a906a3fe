"""What the tests share: a small text, the shared corpus, tiny models."""

import contextlib
import dataclasses
import functools
import gc
import importlib.util
import io
import os
import re
import runpy
import shutil
import signal
import sys
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiktoken
from hypothesis import settings

from gptlite import scripts
from gptlite.config import ModelConfig
from gptlite.errors import UserError
from gptlite.models.gpt import GPT
from gptlite.text.tokenizer import PATTERNS

ROOT = Path(__file__).resolve().parents[1]
SHARED = ROOT.parent / "shared"
if (SHARED / "tiktoken_cache").is_dir():
    os.environ.setdefault("TIKTOKEN_CACHE_DIR", str(SHARED / "tiktoken_cache"))

# Compiling dominates the tests, so XLA's code generator runs at level 0, on one thread and, in
# versions that have another one, without the one for fused operations, which takes two thirds of
# the time. JAX reads this at its first computation.
FLAGS = "--xla_backend_optimization_level=0"
if jax.__version_info__ < (0, 11):
    FLAGS += " --xla_cpu_use_fusion_emitters=false --xla_cpu_parallel_codegen_split_count=1"
os.environ.setdefault("XLA_FLAGS", FLAGS)

# On the CPU, also where there is a GPU: the exact comparisons are made for it. (JAX is imported
# already, so that the variable is for the commands that tests start.)
jax.config.update("jax_platforms", os.environ.setdefault("JAX_PLATFORMS", "cpu"))

# Two devices, for this process and the commands that it starts, so that every training test also
# tests data parallelism.
os.environ.setdefault("JAX_NUM_CPU_DEVICES", "2")
jax.config.update("jax_num_cpu_devices", int(os.environ["JAX_NUM_CPU_DEVICES"]))

# All processes, and the next run of the suite, share compiled programs. A suite whose programs have
# been compiled before takes a third less time. `pytest --cache-clear` removes them.
PROGRAMS = ROOT / ".pytest_cache" / "d" / "xla"
for name, value in {
    "jax_compilation_cache_dir": str(PROGRAMS),
    "jax_persistent_cache_min_compile_time_secs": 0.0,
    # Lines of the source, in every program, take a twentieth of the time.
    "jax_traceback_in_locations_limit": 0,
}.items():
    given = os.environ.setdefault(name.upper(), str(value))
    jax.config.update(name, type(value)(given))

# Half of the time is tracing, in Python, of which the search for garbage would take a tenth.
gc.set_threshold(200_000, 20, 100)

# Background jobs and `nohup` ignore these signals, and child processes would inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if hasattr(signal, "SIGHUP") and signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, lambda *_: None)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The slowest files first, so that all processes end at about the same time."""
    slow = (
        "test_processes",
        "test_browser",
        "test_sharding",
        "test_replay",
        "test_ambient",
        "test_engine",
        "test_golden",
        "test_generate",
        "test_seq2seq",
        "test_gpt",
        "test_attention",
        "test_step",
        "test_folder",
        "test_datasets",
        "test_scripts",
        "test_export",
        "test_adapters",
        "test_check_block",
        "test_api",
        "test_checks",
        "test_page",
        "test_fit",
        "test_values",
    )
    place = {name: i for i, name in enumerate(slow)}
    items.sort(key=lambda item: place.get(item.path.stem, len(slow)))


def needs(*packages: str) -> Callable[[Any], Any]:
    """Marks a test that compares with `packages`."""
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    skip = pytest.mark.skipif(bool(missing), reason=f"needs {', '.join(missing)}")
    return lambda test: pytest.mark.peers(skip(test))


MARKS = ("peers", "processes")
# How many tests of each mark were left out.
LEFT_OUT = pytest.StashKey[Counter[str]]()


def pytest_configure(config: pytest.Config) -> None:
    config.stash[LEFT_OUT] = Counter()
    is_worker = hasattr(config, "workerinput")
    if not is_worker and PROGRAMS.is_dir():  # of many versions of the code
        size = sum(path.stat().st_size for path in PROGRAMS.iterdir())
        if size > 2**30:
            shutil.rmtree(PROGRAMS)


def pytest_deselected(items: list[pytest.Item]) -> None:
    for item in items:
        item.config.stash[LEFT_OUT].update(m for m in MARKS if item.get_closest_marker(m))


def pytest_sessionfinish(session: pytest.Session) -> None:
    if (output := getattr(session.config, "workeroutput", None)) is not None:
        output["left_out"] = dict(session.config.stash[LEFT_OUT])
    # At the end, pytest searches for garbage five times, a second or more each, until xdist loses
    # patience and sends an interrupt. What is frozen is not searched.
    gc.freeze()


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    # Each worker has left out the same.
    node.config.stash[LEFT_OUT] = Counter(getattr(node, "workeroutput", {}).get("left_out", {}))


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    for name, count in sorted(config.stash[LEFT_OUT].items()):
        terminalreporter.write_line(f"{count} tests were left out: pytest -m {name}")
    if config.stash[LEFT_OUT]:
        terminalreporter.write_line("all tests: pytest -m ''")


# Memory mappings of a process, of which Linux allows 65,530. Each compiled program takes several,
# and XLA crashes when they run out.
MAX_MAPPINGS = 30_000


@pytest.fixture(scope="module", autouse=True)
def drop_programs():
    """Drop compiled programs at the end of a module, if they are many."""
    yield
    maps = Path("/proc/self/maps")
    if not maps.exists() or maps.read_bytes().count(b"\n") > MAX_MAPPINGS:
        jax.clear_caches()


# No deadline, because compiling is slow; the same examples every time.
settings.register_profile("gptlite", deadline=None, derandomize=True)
settings.load_profile("gptlite")

# 1,400 characters: enough for a tiny model's training and validation windows.
TEXT = (
    "The miller counts his sacks by candle light,\n"
    "and every sack is one that he can lift;\n"
    "the baker counts his loaves before the night,\n"
    "and what is left at dawn he calls a gift.\n"
    "So count with me, he said: one, two, and three;\n"
    "the fourth is yours, the fifth belongs to me.\n\n"
) * 5

# Speakers with enough speeches, for examples/masked.py.
PLAY = "".join(f"SPEAKER {i % 11}:\n{line}\n\n" for i, line in enumerate(TEXT.split("\n") * 4))

VOCAB = 13
TINY = ModelConfig(n_layers=1, n_heads=2, d_model=16, context_length=12)
GPT2 = {
    "norm": "layer",
    "mlp": "gelu",
    "positions": "learned",
    "embed_previous": 0,
    "qk_norm": False,
    "bias": True,
    "tied_head": True,
    "init": "gpt2",
}
# Every block and every way of putting them together, in a few models.
VARIANTS = {
    "default": {"n_layers": 2},
    "gpt2-documents": GPT2 | {"n_layers": 2, "separate_documents": True},
    "sinusoidal-post-grouped-scan": {
        "n_layers": 2,
        "positions": "sinusoidal",
        "block": "post",
        "norm": "layer",
        "bias": True,
        "mlp": "swiglu",
        "n_kv_heads": 1,
        "logit_cap": 3.0,
        "stack": "scan",
        "separate_documents": True,
    },
    "alibi-sliding-parallel": {
        "n_layers": 2,
        "positions": "alibi",
        "attention": "sliding:window=5:output_bias=true",
        "block": "parallel",
        "mlp": "geglu",
        "qk_norm": False,
        "tied_head": True,
        "separate_documents": True,
    },
    "hybrid": {
        "n_layers": 3,
        "attention": "linear",
        "attention_every": "2:full",
        "separate_documents": True,
    },
    "relative-experts-sandwich-scan": {
        "n_layers": 2,
        "positions": "relative",
        "attention": "full:qkv_bias=true:qk_gain=true:qk_eps=0.001",
        "head_size": 6,
        "block": "sandwich",
        "norm": "dyt",
        "mlp": "moe",
        "stack": "scan",
    },
}


def drawn(make: Callable[[Any], Any], scale: float = 1.0) -> Any:
    """`make(key)`, its every parameter drawn at random: nothing is zero, so nothing hides.

    Drawn by NumPy, because to compile a model's own initialisation takes seconds.
    """
    abstract = eqx.filter_eval_shape(make, jax.random.key(0))
    random = np.random.default_rng(0)

    def draw(leaf):
        if not isinstance(leaf, jax.ShapeDtypeStruct):
            return leaf
        std = scale * (leaf.shape or (1,))[-1] ** -0.5
        return jnp.asarray(random.normal(scale=std, size=leaf.shape).astype(leaf.dtype))

    return jax.tree.map(draw, abstract)


@functools.cache
def tiny_model(**changes) -> GPT:
    """A tiny model, drawn. The same object for the same arguments, which shares what is compiled
    for it."""
    config = dataclasses.replace(TINY, **changes)
    separator = 1 if config.separate_documents else None
    return drawn(lambda key: GPT(config, VOCAB, separator=separator, key=key))


def tiny_run(**changes: Any) -> list[str]:
    """The words of a run by train.py in a folder with text.txt. Tests that need some run share it,
    and so what is compiled for it. `changes`: of fields of the config, as `model__n_layers`."""
    fields = {
        "data__corpus": "text.txt",
        "model__n_layers": 1,
        "model__n_heads": 2,
        "model__d_model": 16,
        "model__context_length": 16,
        "training__batch_size": 8,
        "training__steps": 6,
        "training__log_every": 3,
        "training__eval_every": 3,
        "training__sample_tokens": 0,
        "optimizer__name": "adamw",
    }
    return [
        f"--{name.replace('__', '.').replace('_', '-')}={value}"
        for name, value in (fields | changes).items()
    ]


def refusal(parse: Callable[[list[str]], Any], words: list[str]) -> str | None:
    """What a command line is refused with: tyro's own box, unwrapped, or a sentence of ours. None
    if it is accepted."""
    said, code = io.StringIO(), 2
    try:
        with contextlib.redirect_stderr(said), contextlib.redirect_stdout(said):
            parse(words)
    except UserError as error:
        return str(error)
    except SystemExit as stop:
        code = stop.code
    else:
        return None
    assert code == 2
    return " ".join(re.sub(r"[│╭╰╮╯─]|\x1b\[[0-9;]*m", " ", said.getvalue()).split())


def run_script(name: str, *words: str, folder: Path, stdin: str = "") -> SimpleNamespace:
    """Exit code and output of `python name words...`, typed in `folder`, but run in this process,
    which has JAX and compiled programs already. `name`: a script's, from the root of the project;
    or `gptlite`, the command."""
    out, err, code = io.StringIO(), io.StringIO(), 0
    with contextlib.ExitStack() as stack:
        stack.enter_context(contextlib.chdir(folder))
        stack.enter_context(contextlib.redirect_stdout(out))
        stack.enter_context(contextlib.redirect_stderr(err))
        stack.enter_context(mock.patch.object(sys, "argv", [name, *words]))
        typed = io.TextIOWrapper(io.BytesIO(stdin.encode()))
        stack.enter_context(mock.patch.object(sys, "stdin", typed))
        stack.enter_context(mock.patch.dict(os.environ, {"COLUMNS": "200"}))
        if threading.current_thread() is threading.main_thread():
            stack.callback(signal.signal, signal.SIGINT, signal.getsignal(signal.SIGINT))
        try:
            if name == "gptlite":
                scripts.main()
            else:
                runpy.run_path(str(ROOT / name), run_name="__main__")
        except SystemExit as stop:
            code = stop.code or 0
    return SimpleNamespace(code=code, out=out.getvalue(), err=err.getvalue())


@pytest.fixture(scope="session", params=list(VARIANTS))
def variant(request) -> GPT:
    """A model for each entry of VARIANTS."""
    return tiny_model(**VARIANTS[request.param])


@pytest.fixture(scope="session")
def shakespeare() -> str:
    """TinyShakespeare, where a copy is at hand."""
    for path in (
        SHARED / "data" / "tinyshakespeare.txt",
        ROOT / "data" / "tinyshakespeare.txt",
    ):
        if path.is_file():
            return path.read_bytes().decode("utf-8")
    pytest.skip("TinyShakespeare is neither in data/ nor in a shared folder beside the clone")


@pytest.fixture(scope="session")
def tiktoken_gpt2():
    """tiktoken's gpt2 encoding, where its files are at hand."""
    import tiktoken

    if "TIKTOKEN_CACHE_DIR" not in os.environ:
        pytest.skip("tiktoken's files are not in a shared folder beside the clone")
    return tiktoken.get_encoding("gpt2")


def own_encoding() -> tiktoken.Encoding:
    """A byte-pair encoding with three merges, that needs no file."""
    ranks = {bytes([i]): i for i in range(256)} | {b"th": 256, b"the": 257, b" a": 258}
    return tiktoken.Encoding(
        "own", pat_str=PATTERNS[0], mergeable_ranks=ranks, special_tokens={"<|end|>": 300}
    )

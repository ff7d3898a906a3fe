"""Run every command and every Python block in the README and in docs/, with small sizes.

    python tests/soak/docs.py [--nightly] [PAGE.md ...]

Those that train, sample or compare run in this process, one after the other. Benchmarks and soaks
start with --nightly only, each in a process of its own. A command that matches no rule in
tests/support/pages.py is an error, so that a new command gets one.
"""

import argparse
import importlib.util
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
from conftest import run_script  # noqa: E402
from support.pages import GIVEN, PAGES, TRAIN, commands, is_nightly, make_files, shrink  # noqa: E402

MESH = "8"  # the devices of the meshes in the docs


def missing(command: str) -> str | None:
    """What the command needs and this machine lacks."""
    if "tiktoken" in command and "TIKTOKEN_CACHE_DIR" not in os.environ:
        return "tiktoken's files are not in ../shared"
    compilers = ("jax_cuda13_plugin", "libtpu")
    compiles = re.search("compile_for|estimate .*--for", command)
    if compiles and not all(map(importlib.util.find_spec, compilers)):
        return ".[aot] is not installed"
    if "benchmarks/page.py" in command and shutil.which("chromedriver") is None:
        return "there is no chromedriver"
    return None


def run_here(command: str, folder: Path) -> None:
    """**Raises:** `SystemExit` if the command, a Python script in `folder` or `gptlite`, fails."""
    command, _, file = command.partition(" > ")
    typed, _, command = command.rpartition(" | ")
    typed = shlex.split(typed)[-1] if typed else ""
    words = shlex.split(command)
    done = run_script(*words[words[0] == "python" :], folder=folder, stdin=typed)
    if done.code:
        sys.exit(f"{command} failed:\n{done.out[-2000:]}\n{done.err[-4000:]}")
    if file:
        (folder / file).write_text(done.out)


def run_in_process(command: str, folder: Path) -> None:
    """**Raises:** `SystemExit` if the command fails."""
    devices = MESH if "--mesh" in command else "2"
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "JAX_NUM_CPU_DEVICES": devices}
    done = subprocess.run(
        ["bash", "-c", command], cwd=folder, capture_output=True, text=True, env=environment
    )
    if done.returncode:
        sys.exit(f"{command} failed:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")


def serve(command: str, folder: Path) -> None:
    """Serve a run until a signal.

    **Raises:** `SystemExit` if that fails.
    """
    run_here(f"gptlite train {TRAIN} --run NAME", folder)
    process = subprocess.Popen(
        shlex.split(command),
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert process.stdout is not None
    first = process.stdout.readline()
    process.send_signal(signal.SIGTERM)
    rest = process.communicate()[0]
    if process.returncode or "serving NAME" not in first:
        sys.exit(f"{command} failed:\n{first}{rest}")


def forget(folder: Path) -> None:
    """Unload the modules of a page, because the next page has files of the same names."""
    for name, module in list(sys.modules.items()):
        if (getattr(module, "__file__", None) or "").startswith(f"{folder}/"):
            del sys.modules[name]


def run(command: str, folder: Path) -> None:
    if lacking := missing(command):
        print(f"skipped, because {lacking}: {command}", flush=True)
        return
    began = time.monotonic()
    if command.startswith(("python serve.py", "gptlite serve")):
        serve(command, folder)
    elif is_nightly(command) or "--mesh" in command or command.startswith("python -m "):
        run_in_process(command, folder)
    else:
        run_here(command, folder)
    print(f"{time.monotonic() - began:5.1f} s  {command[:120]}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("pages", nargs="*", metavar="PAGE.md", help="only these pages")
    parser.add_argument("--nightly", action="store_true", help="benchmarks and soaks as well")
    arguments = parser.parse_args()
    names = [page.relative_to(ROOT).as_posix() for page in PAGES]
    for name in arguments.pages:
        if name not in names:
            parser.error(f"there is no page {name}; there are {', '.join(names)}")
    done: set[str] = set()
    left_out = 0
    with tempfile.TemporaryDirectory() as name:
        for page, title in zip(PAGES, names, strict=True):
            if arguments.pages and title not in arguments.pages:
                continue
            print(title, flush=True)
            folder = Path(name) / title.removesuffix(".md")
            folder.mkdir(parents=True)
            make_files(folder)
            text = page.read_text(encoding="utf-8")
            for command in filter(None, map(shrink, commands(text))):
                if not is_nightly(command):
                    run(command, folder)
                elif not arguments.nightly:
                    left_out += 1
                elif command not in done:  # it needs nothing of its page
                    run(command, folder)
                    done.add(command)
            blocks = re.findall(r"```py\n(.*?)```", text, flags=re.DOTALL)
            if blocks:
                (folder / "blocks.py").write_text("\n".join([GIVEN, *blocks]))
                sys.path.insert(0, str(folder))
                run(f"python {folder / 'blocks.py'}", folder)
                sys.path.remove(str(folder))
            forget(folder)
    if left_out:
        print(f"{left_out} commands that measure or take long are run with --nightly")


if __name__ == "__main__":
    main()

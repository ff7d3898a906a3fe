"""Which programs does a change change? Lowers the training step, the reading of a prompt and the
generation of a dozen configs as two commits make them, and compares.

    python tests/replay.py main                 # the working tree against main
    python tests/replay.py HEAD~1 HEAD --targets cpu h100:8 v5e:2x4
    python tests/replay.py main --folder replay # keeps the programs, to look at with diff

A program is the same if its text, as JAX lowers it, is the same, or if it is the same once XLA has
compiled it: names, comments and the order of functions do not count. H100 and TPU need their
compilers (pip install "gptlite-jax[aot]"), and no devices. Exit code 1 if a program has changed, 2
if the programs cannot be made.

Each commit makes its programs by its own tests/support/programs.py.
"""

import argparse
import contextlib
import importlib.util
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

ROOT = Path(__file__).resolve().parents[1]
WORKER = Path("tests/support/programs.py")
COMPILERS = {"h100:8": "jax_cuda13_plugin", "v5e:2x4": "libtpu"}
TARGETS = [
    "cpu",
    *(target for target, package in COMPILERS.items() if importlib.util.find_spec(package)),
]


def fail(message: str) -> NoReturn:
    """**Raises:** `SystemExit`, of code 2."""
    print(f"error: {message}", file=sys.stderr)
    sys.exit(2)


@contextlib.contextmanager
def tree_of(commit: str | None) -> Iterator[Path]:
    """The files of a commit; None: those of the working tree.

    **Raises:** `SystemExit` if there is no such commit, or it cannot make its programs.
    """
    if commit is None:
        yield ROOT
        return
    with tempfile.TemporaryDirectory() as name:
        git = ["git", "-C", str(ROOT), "worktree"]
        add = [*git, "add", "--quiet", "--detach", f"{name}/tree", commit]
        done = subprocess.run(add, capture_output=True, text=True)
        if done.returncode:
            fail(f"{commit} cannot be checked out: {done.stderr.strip()}")
        try:
            tree = Path(name) / "tree"
            if not (tree / WORKER).exists():
                fail(f"{commit} is older than {WORKER}, which it needs.")
            yield tree
        finally:
            subprocess.run([*git, "remove", "--force", f"{name}/tree"], check=True)


def make(trees: list[Path], folders: list[Path], words: list[str]) -> None:
    """The programs of two trees, at the same time.

    **Raises:** `SystemExit` if that fails.
    """
    running = []
    for tree, folder in zip(trees, folders, strict=True):
        command = [sys.executable, str(tree / WORKER), str(folder), *words]
        running.append(
            subprocess.Popen(command, cwd=tree, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
        )
    try:
        for process in running:
            _, error = process.communicate()
            if process.returncode:
                fail(f"the programs cannot be made:\n{error.decode()[-3000:]}")
    finally:
        for process in running:
            process.kill()
            process.wait()


def different(folders: list[Path], suffix: str) -> list[str]:
    """The names of the programs that are not the same text in both folders."""
    texts = [
        {path.stem: path.read_bytes() for path in folder.glob(f"*.{suffix}")} for folder in folders
    ]
    names = sorted(texts[0].keys() | texts[1].keys())
    return [name for name in names if texts[0].get(name) != texts[1].get(name)]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("base", help="a commit")
    parser.add_argument("head", nargs="?", help="a commit; default: the working tree")
    parser.add_argument("--configs", nargs="+", help="default: all")
    parser.add_argument("--targets", nargs="+", default=TARGETS, choices=["cpu", *COMPILERS])
    parser.add_argument("--folder", type=Path, help="where the programs are kept; a new folder")
    arguments = parser.parse_args()
    if arguments.folder is not None and arguments.folder.exists():
        parser.error(f"{arguments.folder} exists: name a new folder")
    words = ["--targets", *arguments.targets]
    words += ["--configs", *arguments.configs] if arguments.configs else []
    with (
        tempfile.TemporaryDirectory() as name,
        tree_of(arguments.base) as base,
        tree_of(arguments.head) as head,
    ):
        place = (arguments.folder or Path(name)).absolute()
        folders = [place / "base", place / "head"]
        make([base, head], folders, words)
        count = len(list(folders[1].iterdir()))
        lowered = different(folders, "mlir")
        print(f"{count} programs, of which {len(lowered)} are lowered to another text", flush=True)
        both = [n for n in lowered if all((f / f"{n}.mlir").exists() for f in folders)]
        if both:
            make([base, head], folders, [*words, "--compile", *both])
        changed = [name for name in lowered if name not in both] + different(folders, "hlo")
        for name in lowered:
            print(f"  {name}: {'changed' if name in changed else 'the same once compiled'}")
        kept = f"; they are in {place}" if arguments.folder else ""
        print(f"{len(changed)} of {count} programs have changed{kept}")
    sys.exit(bool(changed))


if __name__ == "__main__":
    main()

"""Does memory grow over a long run? 20,000 steps of a tiny model, evaluations, samples and
checkpoints included; resident memory at a tenth of them and at the end.

    python tests/soak/memory.py
"""

import argparse
import os
import re
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]


def resident(pid: int) -> float:
    """Resident memory in MiB, without pages of files."""
    status = Path(f"/proc/{pid}/status").read_text()
    return sum(
        int(value) for value in re.findall(r"^Rss(?:Anon|Shmem):\s+(\d+) kB", status, re.MULTILINE)
    ) / 1024  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=20_000)
    steps = parser.parse_args().steps
    from conftest import TEXT
    from support.kill_loop import settings, start

    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "text.txt").write_text(TEXT)
        words = [*settings(steps), "--training.save-seconds", "2", "--training.eval-every", "500"]
        words += ["--training.sample-tokens", "32", "--run", "long"]
        # One arena of malloc's for all threads. With one for each, what threads have freed stays
        # where others cannot use it, and memory grows, ever more slowly, by 3 % in 20,000 steps.
        os.environ["MALLOC_ARENA_MAX"] = "1"
        process = start(words, Path(folder))
        assert process.stdout is not None
        seen: dict[int, float] = {}
        for line in process.stdout:
            step = re.match(r"step +(\d+)/", line)
            if step and int(step[1]) % max(500, steps // 20) == 0:
                seen[int(step[1])] = resident(process.pid)
                print(f"step {step[1]}: {seen[int(step[1])]:.1f} MiB", flush=True)
        assert process.wait() == 0
    first = seen[steps // 10]
    last = seen[max(step for step in seen if step < steps)]
    print(f"from step {steps // 10} to the end: {100 * (last / first - 1):+.2f} %")
    sys.exit(abs(last / first - 1) > 0.02)


if __name__ == "__main__":
    main()

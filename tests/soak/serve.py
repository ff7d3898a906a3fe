"""A hostile mix of clients on `serve.py`: `python tests/soak/serve.py --minutes 60`.

64 clients at once, a third of whose requests hang up, end half-way, or are rubbish. Every good
request must be answered with the text that its seed gives on the idle server, every bad one with a
status from 400 to 499 and a sentence. In the end, no row is taken, and threads, open files and
memory must be as they were after the first half: at most 2 more, and 5 % and 20 MiB more.
"""

import argparse
import asyncio
import json
import random
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
from conftest import TEXT  # noqa: E402

TRAIN = (
    "--model.n-layers 2 --model.n-heads 2 --model.d-model 32 --model.context-length 64 "
    "--training.batch-size 8 --training.accumulation 1 --training.steps 20 "
    "--training.eval-every 20 --training.sample-tokens 0 --data.corpus text.txt --run soak"
)
CLIENTS = 64
GOOD = {
    "prompt": ["The miller", "a", "So count with me, he said: one, two, and three;\nthe four"],
    "max_tokens": [1, 7, 40, 150],
    "temperature": [0, 0.7, 1],
    "top_k": [None, 5],
    "top_p": [None, 0.9],
    "n": [1, 1, 1, 3],
    "stop": [None, "e"],
    "logprobs": [None, None, 2],
    "stream": [False, True],
}
BAD: list[Any] = [
    {"prompt": 5},
    {"prompt": [1, "a"]},
    {"prompt": [10**6]},
    {"prompt": "a" * 1000},
    {"prompt": "\ud800"},
    {"prompt": ""},
    {"max_tokens": -1},
    {"max_tokens": "many"},
    {"max_tokens": 10**12},
    {"temperature": float("nan")},
    {"temperature": -1},
    {"n": 10**9},
    {"stop": [[]]},
    {"seed": 2**70},
    {"logprobs": -1},
    {"model": "other"},
    {"nonsense": 1},
    b"",
    b"{",
    b"\xff\xfe",
    b"[" * 50_000,
    b"null",
    b'"' + b"x" * 10_000_000 + b'"',
]


class Mix:
    """The clients, and what they counted."""

    def __init__(self, port: int, log: Path):
        self.port = port
        self.log = log
        self.counts: dict[str, int] = {}
        self.wrong: list[str] = []
        self.wanted: dict[str, Any] = {}
        self.choose = random.Random(0)
        self.waiting = 0

    def good(self) -> dict[str, Any]:
        chosen = {name: self.choose.choice(values) for name, values in GOOD.items()}
        return {"model": "soak", "seed": self.choose.randrange(5)} | chosen

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_connection("127.0.0.1", self.port, limit=2**24)

    def request(self, body: bytes) -> bytes:
        return (
            "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        ).encode() + body

    async def answer(self, content: bytes) -> tuple[int, bytes]:
        """Status and body."""
        reader, writer = await self.connect()
        try:
            writer.write(content)
            whole = await asyncio.wait_for(reader.read(), 120)
        finally:
            writer.close()
        head, _, body = whole.partition(b"\r\n\r\n")
        if b"transfer-encoding: chunked" in head.lower():
            parts, rest = [], body
            while rest:
                size, _, rest = rest.partition(b"\r\n")
                parts.append(rest[: int(size, 16)])
                rest = rest[int(size, 16) + 2 :]
            body = b"".join(parts)
        return int(head.split()[1]), body

    def texts(self, asked: dict[str, Any], body: bytes) -> Any:
        """What an answer says, without what differs from answer to answer."""
        if not asked["stream"]:
            return [(c["text"], c["finish_reason"]) for c in json.loads(body)["choices"]]
        lines = [line[6:] for line in body.split(b"\n") if line.startswith(b"data: ")]
        assert lines[-1] == b"[DONE]", lines[-1]
        found = [["", None] for _ in range(asked["n"])]
        for line in lines[:-1]:
            for choice in json.loads(line)["choices"]:
                found[choice["index"]][0] += choice["text"]
                found[choice["index"]][1] = choice["finish_reason"]
        return [tuple(x) for x in found]

    async def ask_good(self, asked: dict[str, Any] | None = None) -> str:
        """`asked`: default: any."""
        asked = self.good() if asked is None else asked
        status, body = await self.answer(self.request(json.dumps(asked).encode()))
        if status == 429:
            return "told to come again"
        assert status == 200, (status, body[:300])
        found = self.texts(asked, body)
        key = json.dumps(asked | {"stream": False, "logprobs": None})
        wanted = self.wanted.setdefault(key, found)
        assert found == wanted, f"{asked}: {found}, not {wanted}"
        return "answered right"

    async def ask_alone(self, count: int) -> None:
        """Requests that were answered before, now one at a time."""
        keys = list(self.wanted)
        for key in self.choose.sample(keys, min(count, len(keys))):
            await self.ask_good(json.loads(key))

    async def ask_bad(self) -> str:
        bad = self.choose.choice(BAD)
        if isinstance(bad, dict):
            bad = json.dumps({"model": "soak", "prompt": "a"} | bad).encode()
        try:
            status, body = await self.answer(self.request(bad))
        except (ConnectionError, IndexError):
            if len(bad) > 2**22:  # refused while it is sent: the answer may be lost
                return "refused"
            raise
        assert 400 <= status < 500, (status, bad[:100], body[:300])
        assert json.loads(body)["error"]["message"].endswith((".", "...")), body[:300]
        return "refused"

    async def hang_up(self) -> str:
        body = self.request(json.dumps(self.good() | {"max_tokens": 5000}).encode())
        _, writer = await self.connect()
        writer.write(body)
        await asyncio.sleep(self.choose.random() / 5)
        if self.choose.random() < 0.5:
            writer.transport.abort()
        writer.close()
        return "hung up"

    async def send_half(self) -> str:
        body = self.request(json.dumps(self.good()).encode())
        reader, writer = await self.connect()
        writer.write(body[: self.choose.randrange(len(body))])
        if self.choose.random() < 0.05:  # and wait until the server gives up
            await asyncio.wait_for(reader.read(), 60)
        writer.close()
        return "sent half"

    async def client(self, until: float, requests: int | None) -> None:
        bad = [self.ask_bad, self.hang_up, self.send_half]
        while time.monotonic() < until and (
            requests is None or sum(self.counts.values()) < requests
        ):
            ask = self.choose.choice(bad) if self.choose.random() < 1 / 3 else self.ask_good
            try:
                what = await ask()
            except Exception as error:
                what = "WRONG"
                self.wrong.append(f"{ask.__name__}: {error!r}"[:500])
            self.counts[what] = self.counts.get(what, 0) + 1

    async def run(self, seconds: float, requests: int | None = None) -> None:
        until = time.monotonic() + seconds
        await asyncio.gather(*(self.client(until, requests) for _ in range(CLIENTS)))

    async def health(self) -> dict[str, Any]:
        """Once nothing is left to do."""
        record: dict[str, Any] = {}
        for _ in range(300):
            reader, writer = await self.connect()
            writer.write(b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
            record = json.loads((await reader.read()).partition(b"\r\n\r\n")[2])
            writer.close()
            if record == {"status": "ok", "active": 0, "waiting": 0}:
                return record
            await asyncio.sleep(0.1)
        raise AssertionError(f"Texts are left after 30 s: {record}")


def state_of(pid: int) -> dict[str, int]:
    """Threads, open files, and MiB of memory of a process."""
    status = Path(f"/proc/{pid}/status").read_text(encoding="utf-8")
    numbers = {name: int(value) for name, value in re.findall(r"(\w+):\s+(\d+)", status)}
    files = len(list(Path(f"/proc/{pid}/fd").iterdir()))
    return {"threads": numbers["Threads"], "files": files, "MiB": numbers["VmRSS"] // 1024}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument(
        "--requests",
        type=int,
        help="stop after so many, and do not judge the memory, which grows with each program",
    )
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        (folder / "text.txt").write_text(TEXT)
        train = [sys.executable, str(ROOT / "train.py"), *TRAIN.split()]
        subprocess.run(train, cwd=folder, check=True, stdout=subprocess.DEVNULL)
        log = folder / "log"
        with log.open("w") as file:
            server = subprocess.Popen(
                [sys.executable, str(ROOT / "serve.py"), "--port", "0", "--queue", "500"],
                cwd=folder,
                stdout=file,
                stderr=subprocess.STDOUT,
            )
        while not (found := re.search(r"http://.*:(\d+)/v1", log.read_text())):
            assert server.poll() is None, log.read_text()
            time.sleep(0.2)
        mix = Mix(int(found[1]), log)
        tenth = 6 * arguments.minutes
        before = None
        for part in range(10):
            requests = None if arguments.requests is None else arguments.requests * (part + 1) // 10
            asyncio.run(mix.run(tenth, requests))
            asyncio.run(mix.health())
            now = state_of(server.pid)
            print(f"{part + 1}0 %: {mix.counts}, {now}", flush=True)
            before = now if part == 4 else before
        asyncio.run(mix.ask_alone(200))
        time.sleep(21)  # connections that send nothing are closed by now
        after = state_of(server.pid)
        print(f"at the end: {after}")
        server.terminate()
        mix.wrong += [] if server.wait(30) == 0 else ["the server did not exit with 0"]
        said = log.read_text()
        mix.wrong += [said[-2000:]] if "Traceback" in said else []
    assert before is not None
    for name in ("threads", "files"):
        if after[name] > before[name] + 2:
            mix.wrong.append(f"{name}: {before[name]}, then {after[name]}")
    # Programs are compiled in the first minutes, and each takes some MiB.
    if arguments.requests is None and after["MiB"] > 1.05 * before["MiB"] + 20:
        mix.wrong.append(f"memory: {before['MiB']} MiB, then {after['MiB']}")
    print("\n".join(mix.wrong[:20]))
    sys.exit(bool(mix.wrong))


if __name__ == "__main__":
    main()

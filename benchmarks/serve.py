"""Load on `serve.py`, against `transformers serve`: `python benchmarks/serve.py`.

Both serve the same models, in float32, to the same clients, by turns: each client sends a request
as soon as the one before is answered, and reads the answer as a stream. The shapes S and of the
preset `laptop` have GPT-2's block and random weights; more models are given as folders in Hugging
Face's format. Also needs: pip install "gptlite-jax[serve]" "transformers[serving]"
"""

import argparse
import asyncio
import dataclasses
import json
import random
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from common import make_shape, print_machine, print_table, spread

ROOT = Path(__file__).resolve().parents[1]
CHARACTERS = "\n !$&',-.3:;?ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
PEER = "transformers serve"


@dataclasses.dataclass(frozen=True)
class Load:
    """What a client asks for."""

    folder: Path
    prompt_characters: int
    max_tokens: int


@dataclasses.dataclass
class Measured:
    """What the clients saw in one round."""

    seconds: float = 0.0
    requests: int = 0
    tokens: int = 0
    first: list[float] = dataclasses.field(default_factory=list)
    """Seconds from a request to its first text."""
    between: list[float] = dataclasses.field(default_factory=list)
    """Seconds from one text to the next of a request."""


class Server:
    """A server in a process of its own."""

    def __init__(self, command: list[str], port: int, model: str, log: Path):
        self.port, self.model, self.log = port, model, log
        with log.open("w") as file:
            self._process = subprocess.Popen(command, stdout=file, stderr=file)
        end = time.monotonic() + 300
        while time.monotonic() < end:
            try:
                socket.create_connection(("127.0.0.1", port), 1).close()
                return
            except OSError:
                if self._process.poll() is not None:
                    break
                time.sleep(0.2)
        sys.exit(f"{' '.join(command)} did not start: {log.read_text()[-2000:]}")

    def memory(self) -> float:
        """MiB that the process takes now."""
        status = Path(f"/proc/{self._process.pid}/status").read_text(encoding="utf-8")
        (line,) = (line for line in status.splitlines() if line.startswith("VmRSS"))
        return int(line.split()[1]) / 1024

    def close(self) -> None:
        self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()


async def one_request(
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
    body: dict[str, Any],
    measured: Measured,
) -> None:
    """A request on an open connection, and its stream."""
    content = json.dumps(body).encode()
    head = (
        "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(content)}\r\n\r\n"
    )
    last = time.perf_counter()
    writer.write(head.encode() + content)
    answer = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
    assert " 200 " in answer.partition("\r\n")[0], answer + str(await reader.read(2000))
    texts, tokens, rest = 0, None, b""
    while size := int(await reader.readline(), 16):  # a chunk of HTTP
        rest += (await reader.readexactly(size + 2))[:-2]
        *lines, rest = rest.split(b"\n")
        for line in lines:
            if not line.startswith(b"data: {"):
                continue
            record = json.loads(line[6:])
            assert "error" not in record, record
            if record.get("usage"):
                tokens = record["usage"]["completion_tokens"]
            if any(choice["text"] for choice in record["choices"]):
                now = time.perf_counter()
                (measured.between if texts else measured.first).append(now - last)
                last, texts = now, texts + 1
    await reader.readline()
    measured.requests += 1
    measured.tokens += texts if tokens is None else tokens  # the peer sends each token alone


async def load(server: Server, load: Load, clients: int, seconds: float, seed: int) -> Measured:
    """So many clients for about so many seconds: each finishes what it has begun."""
    measured = Measured()
    choose = random.Random(seed)
    begin = time.perf_counter()

    async def client() -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port, limit=2**24)
        while True:
            prompt = "".join(choose.choices(CHARACTERS[14:], k=load.prompt_characters))
            body = {
                "model": server.model,
                "prompt": prompt,
                "max_tokens": load.max_tokens,
                "seed": choose.randrange(2**31),
                "stream": True,
                "stream_options": {"include_usage": True},
            }
            await one_request(reader, writer, body, measured)
            if time.perf_counter() - begin > seconds:
                break
        writer.close()

    await asyncio.gather(*(client() for _ in range(clients)))
    measured.seconds = time.perf_counter() - begin
    return measured


def export_shape(name: str, folder: Path) -> None:
    """A model of that shape with GPT-2's block, in Hugging Face's format."""
    import equinox as eqx
    import jax

    from gptlite.config import Config
    from gptlite.hugging_face.folder import export_run
    from gptlite.models.gpt import GPT
    from gptlite.presets import PRESETS
    from gptlite.runs.run import Run
    from gptlite.text.tokenizer import CharTokenizer

    wanted = PRESETS[name.lower()][1].model
    sizes = ("n_layers", "n_heads", "d_model", "context_length")
    model = dataclasses.replace(
        make_shape("S", "gpt2").model, **{size: getattr(wanted, size) for size in sizes}
    )
    tokenizer = CharTokenizer("".join(sorted(CHARACTERS)))
    gpt = eqx.filter_jit(GPT)(model, tokenizer.vocab_size, key=jax.random.key(0))
    export_run(Run(folder, Config(model=model), tokenizer, gpt), folder)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        return listening.getsockname()[1]


def start(name: str, folder: Path, log: Path) -> Server:
    port = free_port()
    if name == PEER:
        words = [
            "serve",
            "--continuous-batching",
            "--device",
            "cpu",
            "--dtype",
            "float32",
            "--port",
        ]
        command = [str(Path(sys.executable).with_name("transformers")), *words, str(port)]
        return Server([*command, str(folder)], port, str(folder), log)
    words = [str(ROOT / "serve.py"), "--run", f"hf:{folder}", "--port", str(port)]
    return Server([sys.executable, *words], port, folder.name, log)


def milliseconds(values: list[float]) -> str:
    """The 50th and the 99th percentile."""
    if not values:
        return "-"
    cuts = statistics.quantiles(values, n=100, method="inclusive") if len(values) > 1 else values
    return f"{1000 * statistics.median(values):,.1f} / {1000 * cuts[-1]:,.1f}"


def compare(name: str, wanted: Load, clients: list[int], seconds: float, rounds: int) -> None:
    """One table: a model."""
    with tempfile.TemporaryDirectory() as place:
        names = ["gptlite", PEER]
        servers = {
            n: start(n, wanted.folder, Path(place) / f"{i}.log") for i, n in enumerate(names)
        }
        try:
            rows, alone = [], {}
            for count in clients:
                found: dict[str, list[Measured]] = {n: [] for n in names}
                for turn in range(-2, rounds):  # the first two compile, and are not counted
                    for n in names:
                        measured = asyncio.run(load(servers[n], wanted, count, seconds, turn))
                        if turn >= 0:
                            found[n].append(measured)
                for n, list_ in found.items():
                    speeds = [m.tokens / m.seconds for m in list_]
                    alone.setdefault(n, statistics.median(speeds))
                    rows.append(
                        [
                            f"{n}, {count} client{'s' * (count > 1)}",
                            f"{statistics.median(m.requests / m.seconds for m in list_):,.1f}",
                            spread(speeds),
                            f"{statistics.median(speeds) / alone[n]:.1f}",
                            milliseconds([x for m in list_ for x in m.first]),
                            milliseconds([x for m in list_ for x in m.between]),
                            f"{servers[n].memory():,.0f}",
                        ]
                    )
        finally:
            for server in servers.values():
                server.close()
    print(
        f"{name}: prompts of {wanted.prompt_characters} characters, {wanted.max_tokens} new "
        f"tokens; {rounds} rounds of {seconds:g} s"
    )
    header = ["", "requests/s", "tokens/s", "to one", "first, ms", "between, ms", "MiB"]
    print_table(header, rows)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("models", nargs="*", default=["S", "laptop"], help="S, laptop, or folders")
    parser.add_argument("--clients", nargs="+", type=int, default=[1, 8, 64])
    parser.add_argument("--seconds", type=float, default=10.0, help="of a round")
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    print_machine()
    print("first, between: 50th / 99th percentile. A text of gptlite's may have several tokens.\n")
    with tempfile.TemporaryDirectory() as place:
        for name in arguments.models:
            if name in ("S", "laptop"):
                folder = Path(place) / name
                export_shape(name, folder)
                wanted = Load(folder, *((16, 48) if name == "S" else (64, 128)))
            else:
                wanted = Load(Path(name).resolve(), 100, 64)
            compare(name, wanted, arguments.clients, arguments.seconds, arguments.rounds)


if __name__ == "__main__":
    main()

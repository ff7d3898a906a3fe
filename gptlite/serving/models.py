"""The models that are served: one to all clients, and others of the folder of runs to the page."""

import asyncio
import queue
from dataclasses import dataclass
from pathlib import Path

import anyio.to_thread

from gptlite.config import SamplingConfig
from gptlite.custom import Custom
from gptlite.errors import UserError, require
from gptlite.machine.progress import log
from gptlite.models.gpt import GPT
from gptlite.runs.load import load
from gptlite.runs.run import Run
from gptlite.runs.stored import Evaluated, best_step
from gptlite.serving.chat import ChatTemplate, read_chat_template
from gptlite.serving.engine import Engine
from gptlite.serving.text import ServedText
from gptlite.text.tokenizer import Tokenizer

# Other models that are kept, and how many texts each of them generates together.
MAX_OTHERS = 2
OTHERS_ROWS, OTHERS_WAITING = 4, 128


@dataclass(frozen=True)
class Served:
    """A model that the application serves."""

    name: str
    """The name of the model."""
    created: int
    """When the model was made, in seconds since 1970."""
    tokenizer: Tokenizer
    context_length: int
    longest_token: int
    """Bytes of the longest token."""
    chat: ChatTemplate | str
    """Makes a prompt of a chat; or why there is no such thing."""
    model: GPT
    engine: Engine

    @property
    def most_characters(self) -> int:
        """Those of a text that may fit into the context. A longer one is not encoded."""
        return self.context_length * self.longest_token


def serve_run(run: Run, name: str, *, max_rows: int, max_waiting: int) -> Served:
    """Start an engine for the model of `run`, of which a first text is generated, so that the first
    client need not wait for the compiler.

    **Raises:** `UserError` if the model cannot be served.
    """
    try:
        chat = read_chat_template(run.path, run.tokenizer) or "The model has no chat template."
    except UserError as error:
        log(f"chats are not answered: {error}")
        chat = str(error)
    engine = Engine(run.model, max_rows=max_rows, max_waiting=max_waiting)
    try:
        _try(engine, run.tokenizer)
    except BaseException:
        engine.stop()  # its thread has the model
        raise
    return Served(
        name=name,
        created=int(run.path.stat().st_mtime),
        tokenizer=run.tokenizer,
        context_length=run.config.model.context_length,
        longest_token=max(
            len(run.tokenizer.token_bytes(i)) for i in range(run.tokenizer.vocab_size)
        ),
        chat=chat,
        model=run.model,
        engine=engine,
    )


def _try(engine: Engine, tokenizer: Tokenizer) -> None:
    """Generate a first text."""
    engine.check(1, 2)
    ended: queue.SimpleQueue[str] = queue.SimpleQueue()
    text = ServedText(
        [0],
        tokenizer,
        sampling=SamplingConfig(),
        max_new_tokens=2,
        deliver=lambda piece: ended.put(piece.finish_reason) if piece.finish_reason else None,
    )
    engine.submit([text])
    require(ended.get() != "error", "The model cannot generate a first text: see the error above.")


class Models:
    """The model that is served, and other runs, which are loaded when the page asks for them."""

    def __init__(self, main: Served, custom: Custom = ()):
        """`custom`: the files whose classes the runs may have as blocks."""
        self.main, self._custom = main, custom
        self._others: dict[str, tuple[Evaluated | None, Served]] = {}
        self._loading = asyncio.Lock()

    async def load(self, path: Path) -> Served:
        """The model of a run. Only the last few are kept.

        **Raises:** `UserError` if it cannot be loaded.
        """
        async with self._loading:
            best = await anyio.to_thread.run_sync(lambda: best_step(path))
            entry = self._others.pop(path.name, None)
            if entry is not None and entry[0] != best:
                entry[1].engine.stop()
                entry = None
            if entry is None:
                while len(self._others) >= MAX_OTHERS:
                    oldest = next(iter(self._others))
                    self._others.pop(oldest)[1].engine.stop()
                entry = best, await anyio.to_thread.run_sync(lambda: self._serve(path))
            self._others[path.name] = entry  # the newest comes last
            return entry[1]

    def _serve(self, path: Path) -> Served:
        run = load(path, custom=self._custom)
        return serve_run(run, path.name, max_rows=OTHERS_ROWS, max_waiting=OTHERS_WAITING)

    def stop(self) -> None:
        """Let all engines end soon."""
        for served in self._all():
            served.engine.stop()

    def close(self) -> None:
        """`stop`, and wait until they have ended."""
        self.stop()
        for served in self._all():
            served.engine.close()

    def _all(self) -> list[Served]:
        return [self.main, *(served for _, served in self._others.values())]

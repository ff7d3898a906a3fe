"""Several processes that train one run together, on JAX's own distributed runtime.

Each of them executes the same program. Process 0 writes files and the terminal. An error in one of
them ends all, with one message.
"""

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any, NoReturn

from gptlite.errors import UserError, require
from gptlite.machine.fields import MAX_INT32, Between, check_fields
from gptlite.machine.printed import printable
from gptlite.machine.progress import log, print_error, sentence_of

# Where processes publish the errors that end them, in the store of JAX's coordination service.
ERRORS = "gptlite/errors/"
# Characters of such an error.
MAX_ERROR = 2000
# Words of an error that may have its cause in another process.
LOST = re.compile(
    "Gloo|NCCL|[Bb]arrier|[Cc]oordination ?[Ss]ervice|DEADLINE_EXCEEDED|UNAVAILABLE|ABORTED"
)
RESUME = "If the run was saved, resume it with --resume, in every process."
# Seconds between two looks at the others; and that process 0, whose end would end the others
# without a message, outlives an error.
POLL, LINGER = 1.0, 4.0
# Seconds that a process waits for the others when it is done, and for what process 0 finds out: it
# may encode a text meanwhile, and that it is dead is noticed otherwise.
END, FIRST = 600, 30 * 86_400


@dataclass(frozen=True)
class DistributedConfig:
    """Several processes that train one run. Each is started with the same command, but for
    --distributed.process, and with the same folder, which they share. Under SLURM (srun), Open MPI
    and on TPUs, JAX finds all of this by itself."""

    coordinator: str | None = None
    """HOST:PORT, a free port of the machine of process 0, which all processes can reach."""

    processes: Annotated[int | None, Between(1, MAX_INT32)] = None
    """The number of processes."""

    process: Annotated[int | None, Between(0, MAX_INT32)] = None
    """The number of this process: 0, 1, 2, ..."""

    connect_seconds: Annotated[int, Between(1, MAX_INT32)] = 300
    """How long to wait at the start for the other processes."""

    missing_seconds: Annotated[int, Between(1, MAX_INT32)] = 100
    """A process that has not been heard of for so long counts as dead, and the others end."""

    def __post_init__(self):
        check_fields("distributed.", self)
        is_given = [x is not None for x in (self.coordinator, self.processes, self.process)]
        require(
            all(is_given) or not any(is_given),
            "distributed.coordinator, distributed.processes and distributed.process belong "
            "together: give all three, or none.",
        )
        require(
            self.coordinator is None
            or (
                re.fullmatch(r"\S+:\d{1,5}", self.coordinator) is not None
                and 0 < self.address[1] < 2**16
            ),
            "distributed.coordinator must be HOST:PORT, with a port from 1 to 65535, got "
            f"{self.coordinator!r}.",
        )
        require(
            (self.process or 0) < (self.processes or 1),
            f"distributed.process must be below distributed.processes, {self.processes}, got "
            f"{self.process}.",
        )

    @property
    def address(self) -> tuple[str, int]:
        """Host and port of the coordinator, which must be given."""
        host, _, port = str(self.coordinator).rpartition(":")
        return host.strip("[]"), int(port)


@contextlib.contextmanager
def joined(distributed: DistributedConfig, *, debug: bool = False) -> Iterator[None]:
    """Joins the other processes of a run, if there are any. To be entered before JAX computes.

    An error inside ends all processes, with code 2 and one message, by process 0. So does a process
    that is not heard of for `distributed.missing_seconds`. All must leave together. A signal to
    stop is such an error, too, unless what is inside has a handler of its own.

    **Raises:** `UserError` if process 0 cannot listen, or does not answer in time.
    """
    _connect(distributed)
    if process_count() == 1:
        yield
        return
    others = _Others(distributed.missing_seconds)
    for name in ("SIGINT", "SIGTERM", "SIGHUP"):
        number = getattr(signal, name, None)
        if number is not None and signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, _interrupt)
    try:
        yield
    except (Exception, KeyboardInterrupt) as error:
        others.fail(error, debug)
    finally:  # also when a signal has stopped all of them
        others.part()


def _interrupt(number: int, frame: object) -> NoReturn:
    raise KeyboardInterrupt(number)


def _connect(distributed: DistributedConfig) -> None:
    import jax

    # Without this, JAX ends all processes with a stack trace when one is missing.
    jax.config.update("jax_enable_recoverability", True)
    # It would take SIGTERM for itself.
    jax.config.update("jax_enable_preemption_service", False)
    # It tries what it knows, in this order; the run is an ordinary one if it finds nothing.
    warnings.filterwarnings("ignore", "Kubernetes environment detected")
    seconds, process = distributed.connect_seconds, distributed.process
    if distributed.coordinator is not None:
        if process:
            _wait_for(distributed, seconds)
        else:
            _check_port(distributed.address[1])
    # JAX would end the process with a stack trace.
    timer = threading.Timer(seconds, _nobody, [distributed])
    timer.daemon = True
    timer.start()
    try:
        jax.distributed.initialize(
            distributed.coordinator,
            distributed.processes,
            process,
            initialization_timeout=seconds + 60,
            heartbeat_timeout_seconds=distributed.missing_seconds,
        )
    except Exception as error:  # also of libraries that JAX asks
        # There is no cluster, or JAX computes already, as in a notebook.
        alone = ("coordinator_address should be defined", "before any JAX calls")
        # In a container of Kubernetes that is no part of a job of several, as JAX needs it, JAX
        # looks for one whenever the package `kubernetes` is installed.
        places = [frame.filename for frame in traceback.extract_tb(error.__traceback__)]
        is_pod = any("k8s_cluster" in place for place in places)
        is_alone = is_pod and "JOB_COMPLETION_INDEX" not in os.environ
        is_alone |= any(text in str(error) for text in alone)
        if distributed.coordinator is not None or not is_alone:
            raise UserError(f"The processes of the run cannot be joined: {error}") from error
        if is_pod:
            reason = str(error).strip().partition("\n")[0] or type(error).__name__
            log(f"JAX finds no job of Kubernetes here ({reason}): this process trains alone.")
    finally:
        timer.cancel()


def _check_port(port: int) -> None:
    """**Raises:** `UserError` if process 0 cannot listen there, which would crash JAX."""
    try:
        with socket.create_server(("", port)):
            pass
    except OSError as error:
        raise UserError(
            f"Process 0 cannot listen at port {port} of --distributed.coordinator "
            f"({error.strerror or error}): choose another port."
        ) from error


def _wait_for(distributed: DistributedConfig, seconds: float) -> None:
    """Wait until process 0 listens.

    **Raises:** `UserError`.
    """
    end = time.monotonic() + seconds
    while True:
        try:
            socket.create_connection(distributed.address, timeout=seconds).close()
            return
        except OSError as error:
            if time.monotonic() > end:
                raise UserError(
                    f"Process 0 of the run does not answer at {distributed.coordinator} after "
                    f"{seconds:.0f} s ({error.strerror or error}): see that it is started, with "
                    "the same --distributed.coordinator, and that this address can be reached "
                    "from here."
                ) from error
            time.sleep(0.2)


def _nobody(distributed: DistributedConfig) -> NoReturn:
    count = "" if distributed.processes is None else f"{distributed.processes} "
    where = "" if distributed.coordinator is None else f" at {distributed.coordinator}"
    print_error(
        f"Not all of the {count}processes of the run have come after "
        f"{distributed.connect_seconds} s (--distributed.connect-seconds): see that each one is "
        f"started, and can reach process 0{where}."
    )
    os._exit(2)


class _Others:
    """The other processes, watched by two threads: an error of one, or its silence, ends this
    process, whatever it waits for."""

    def __init__(self, missing_seconds: int):
        self._client, self.process, self._count = _runtime()
        self._missing_seconds = missing_seconds
        self._parted = threading.Event()
        self._ending = threading.Lock()
        self._last_words: subprocess.Popen[bytes] | None = None
        # JAX ends this process when process 0 is gone. Then nobody writes to this pipe.
        words = (
            f"error: process {self.process} was killed, or ended by JAX because "
            f"{'process 0' if self.process else 'another one'} is gone or cannot be reached. "
            f"{RESUME}"
        )
        with contextlib.suppress(OSError):  # there is no shell
            self._last_words = subprocess.Popen(
                ["sh", "-c", 'read -r _ || echo "$0" >&2', words],
                stdin=subprocess.PIPE,
                start_new_session=True,
            )
        for look in (self._look_for_errors, self._look_for_silence):
            threading.Thread(target=self._watch, args=[look], daemon=True).start()

    def _watch(self, look: Any) -> None:
        while not self._parted.wait(POLL):
            with contextlib.suppress(Exception):  # process 0 is gone; or there is no error yet
                look()

    def _look_for_errors(self) -> None:
        errors = self._client.key_value_dir_get(ERRORS)
        if errors:
            key, value = min(errors)
            process, (code, said) = key.rpartition("/")[2], value.split(" ", 1)
            self._end(said if process == "0" else f"{said} (process {process})", int(code))

    def _look_for_silence(self) -> None:
        # It returns when all living processes have asked. So this look has a thread of its own.
        living = self._client.get_live_nodes(list(range(self._count)))
        silent = [str(i) for i in range(self._count) if i not in living]
        # Those that are done are silent, too.
        if silent and not self._parted.wait(2 * POLL):
            self._end(
                f"{'Process' if len(silent) == 1 else 'Processes'} {', '.join(silent)} of "
                f"{self._count}: not heard of for {self._missing_seconds} s "
                f"(--distributed.missing-seconds). {RESUME}"
            )

    def fail(self, error: BaseException, debug: bool) -> NoReturn:
        """The end of all processes, because of `error` in this one."""
        sentence, code = sentence_of(error), 2
        if isinstance(error, KeyboardInterrupt):
            sentence = "stopped by a signal, before training began or after its end"
            code = 128 + (error.args[0] if error.args else signal.SIGINT)
        said = f"{type(error).__name__}: {error}" if sentence is None else sentence
        if _may_come_from_another(error):
            log("the connection to another process is lost; waiting until it is known to which")
            time.sleep(self._missing_seconds + 30)  # the threads end it before that
        if debug or sentence is None:
            print(printable(traceback.format_exc()), end="", file=sys.stderr)
        with contextlib.suppress(Exception):
            publish(said, code)
            time.sleep(30)  # the threads end it before that
        self._end(said, code, speaks=True)

    def _end(self, sentence: str, code: int = 2, *, speaks: bool = False) -> NoReturn:
        """The end of this process. Process 0 `speaks` for all."""
        self._ending.acquire()  # by the first thread that comes here
        with contextlib.suppress(Exception):  # a closed terminal, a full disk
            self._keep_silent()
            if self.process == 0 or speaks:
                print_error(sentence)
        # Launchers end the other processes when one ends. So the first is not to be too soon.
        time.sleep(LINGER if self.process == 0 else 2 * POLL)
        with contextlib.suppress(Exception):
            sys.stdout.flush()
        os._exit(code)

    def _keep_silent(self) -> None:
        if self._last_words is not None:
            self._last_words.communicate(b"\n")

    def part(self) -> None:
        """The end of a process that is done: after the others, which it waits for."""
        import jax

        with contextlib.suppress(Exception):  # one is late, or already gone
            self._client.wait_at_barrier("gptlite/end", 1000 * END)
        self._parted.set()
        with contextlib.suppress(Exception):  # what the process is to say, it has said
            self._keep_silent()
            # Process 0 leaves last: without it, JAX would end the others.
            while self.process == 0 and len(self._client.get_live_nodes([*range(self._count)])) > 1:
                time.sleep(0.1)
            jax.distributed.shutdown()


def _may_come_from_another(error: BaseException | None) -> bool:
    """Whether the cause of an error may be that another process is gone."""
    while error is not None:
        if not isinstance(error, UserError | OSError) and LOST.search(str(error)):
            return True
        error = error.__cause__
    return False


def _runtime() -> tuple[Any, int, int]:
    """The client of JAX's coordination service (None without one), the number of this process, and
    their count. JAX has no public names for them; Orbax, for one, uses these."""
    from jax._src.distributed import global_state

    return global_state.client, global_state.process_id, global_state.num_processes


def process_count() -> int:
    """How many processes train the run. JAX need not be initialised."""
    return _runtime()[2]


def publish(sentence: str, code: int = 2) -> None:
    """Ends all processes of the run, if there are several, with this error of one, and with this
    exit code. It returns."""
    client, process, processes = _runtime()
    if processes > 1:
        said = f"{code} {printable(sentence)[:MAX_ERROR]}"
        client.key_value_set(f"{ERRORS}{process}", said, allow_overwrite=True)


def silence_others() -> None:
    """Only the first process writes to the terminal; the others, only errors."""
    if not is_main_process():
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 - open until the end


def is_main_process() -> bool:
    """Whether this process is the one that writes files and the terminal."""
    return _runtime()[1] == 0


def max_over_processes(*numbers: int) -> tuple[int, ...]:
    """The largest that any process has of each of the numbers. Every process must call this."""
    if process_count() == 1:
        return numbers
    import numpy as np
    from jax.experimental import multihost_utils

    gathered = multihost_utils.process_allgather(np.asarray(numbers, np.int32))
    return tuple(gathered.max(axis=0).tolist())


def wait_for_main(what: str) -> None:
    """Wait until process 0 has done `what`, and calls this, too."""
    if process_count() > 1:
        from jax.experimental import multihost_utils

        multihost_utils.sync_global_devices(what)


def broadcast_from_main(what: str, value: str) -> str:
    """The `value` of process 0. Every process must call this, once for each `what`."""
    client, process, processes = _runtime()
    if processes == 1:
        return value
    if process == 0:
        client.key_value_set(f"gptlite/{what}", value)
        return value
    return client.blocking_key_value_get(f"gptlite/{what}", 1000 * FIRST)


def check_same(what: str, values: dict[str, str]) -> None:
    """Every process must call this, once for each `what`.

    **Raises:** `UserError` if one of the values is not that of process 0.
    """
    first, process = json.loads(broadcast_from_main(what, json.dumps(values))), _runtime()[1]
    differing = [
        f"{name} is {first.get(name)} in process 0, and {value} in process {process}"
        for name, value in values.items()
        if first.get(name) != value
    ]
    require(not differing, f"The processes have different {what}: {'; '.join(differing)}.")

"""The work of a compiled program, read from its text (XLA's HLO, after optimisation)."""

import math
import re
from collections import Counter, defaultdict
from dataclasses import dataclass, field, replace

import numpy as np

from gptlite.estimate.hardware import GPUS_PER_HOST, Hardware

SIZES = {
    "pred": 1, "s4": 0.5, "u4": 0.5, "s8": 1, "u8": 1, "s16": 2, "u16": 2, "bf16": 2, "f16": 2,
    "s32": 4, "u32": 4, "f32": 4, "s64": 8, "u64": 8, "f64": 8,
}  # fmt: skip
COLLECTIVES = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute")
# They name what is there, or are part of what another one does.
FREE = {
    "parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "partition-id",
    "replica-id", "opt-barrier", "add-dependency", "iota",
}  # fmt: skip

_HEADER = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{$")
_LINE = re.compile(r"^\s+(?:ROOT )?%?([\w.\-]+) = (.+?) ([a-z][\w\-]*)\((.*)$")
_ARRAY = re.compile(r"\b([a-z]+\d*)\[([\d,]*)\](\{[^}]*\})?")
# The metadata of a Pallas kernel, the only attribute of several lines.
_METADATA = re.compile(r"kernel_metadata=\{\n.*\n\}")
# How many products attention's kernels compute, by their names. cuDNN's backward pass computes all
# gradients, JAX's splash attention those of queries, and of keys and values, one after the other.
_ATTENTION = {"SoftmaxBackward": 5, "Softmax": 2, "_fwd": 2, "_dkv": 4, "_dq": 3}
_TRIPS = re.compile(r'known_trip_count"?:\{"?n"?:"?(\d+)')


@dataclass(frozen=True)
class Result:
    """An array that an operation makes."""

    dtype: str
    shape: tuple[int, ...]
    in_memory: bool
    """Not in the memory on the chip that TPUs copy arrays to before they use them."""

    @property
    def size(self) -> float:
        """Bytes."""
        return SIZES[self.dtype] * math.prod(self.shape)

    @property
    def traffic(self) -> float:
        """Bytes that go through the device's memory."""
        return self.size * self.in_memory


@dataclass(frozen=True)
class Operation:
    """A line of a program."""

    kind: str
    arrays: tuple[Result, ...]
    """The results, without a GPU's scratch memory."""
    operands: tuple[str, ...]
    """Names; of a parameter its number, and of a constant its value."""
    rest: str
    """The text after the operands."""

    @property
    def size(self) -> float:
        """Bytes of the results."""
        return sum(array.size for array in self.arrays)

    @property
    def traffic(self) -> float:
        """As `Result.traffic`."""
        return sum(array.traffic for array in self.arrays)

    def called(self, name: str) -> list[str]:
        """The computations that the attribute `name` lists."""
        match = re.search(name + r"=\{?((?:%[\w.\-]+(?:, )?)+)", self.rest)
        return [] if match is None else re.findall(r"%([\w.\-]+)", match[1])


Computation = dict[str, Operation]


def parse(text: str) -> tuple[dict[str, Computation], str]:
    """The computations of a program, and the name of the one that runs first."""
    computations: dict[str, Computation] = {}
    entry, current = "", {}
    for line in _METADATA.sub("kernel_metadata={}", text).splitlines():
        if match := _HEADER.match(line):
            current = computations[match[2]] = {}
            entry = match[2] if match[1] else entry
        elif match := _LINE.match(line):
            name, results, kind, rest = match.groups()
            operands, rest = _split_operands(rest)
            arrays = [
                Result(dtype, tuple(int(n) for n in shape.split(",") if n), "S(" not in layout)
                for dtype, shape, layout in _ARRAY.findall(results)
                if dtype in SIZES
            ]
            if kind == "custom-call" and len(arrays) > 1 and arrays[-1].dtype in ("s8", "u8"):
                arrays.pop()
            literal = kind in ("parameter", "constant")
            names = (operands,) if literal else re.findall(r"%([\w.\-]+)", operands)
            current[name] = Operation(kind, tuple(arrays), tuple(names), rest)
    return computations, entry


def _split_operands(text: str) -> tuple[str, str]:
    """`text` up to the parenthesis that ends the operands, and what follows."""
    depth = 1
    for place, letter in enumerate(text):
        depth += (letter == "(") - (letter == ")")
        if depth == 0:
            return text[:place], text[place + 1 :]
    return text, ""


@dataclass
class Work:
    """The work of a device. A loop counts as often as it runs; of the branches of a condition, the
    longest counts."""

    flops: float = 0.0
    """Those of products: two for each multiply-add; in attention, those that its mask leaves."""
    wide_flops: float = 0.0
    """Those of products whose factors are not in half precision."""
    read: float = 0.0
    written: float = 0.0
    """Bytes. An operation reads each of its inputs once; caches keep nothing."""
    seconds: float = 0.0
    """Each operation takes as long as its products at the device's peak, or its bytes, whichever
    is longer."""
    attention: Counter = field(default_factory=Counter)
    """Calls of fused attention, by their names."""
    collectives: dict[str, list[float]] = field(
        default_factory=lambda: defaultdict(lambda: [0, 0.0])
    )
    """For each kind: how many, and the bytes that a device receives."""
    link_seconds: float = 0.0
    """That these bytes take, at least."""
    unknown_loops: int = 0
    """Loops that count once, because the program does not say how often they run."""
    by_operation: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    """Seconds, by kind and results."""

    def add(self, other: "Work", times: int = 1) -> None:
        for name in ("flops", "wide_flops", "read", "written", "seconds", "link_seconds"):
            setattr(self, name, getattr(self, name) + times * getattr(other, name))
        self.unknown_loops += other.unknown_loops
        for name in ("attention", "by_operation"):
            for key, count in getattr(other, name).items():
                getattr(self, name)[key] += times * count
        for kind, (count, size) in other.collectives.items():
            self.collectives[kind][0] += times * count
            self.collectives[kind][1] += times * size


def work(text: str, hardware: Hardware) -> Work:
    """The work of a device in a program. A loop without a known count is taken to run once."""
    computations, entry = parse(text)
    return _Reader(computations, hardware).work(entry)


class _Reader:
    def __init__(self, computations: dict[str, Computation], hardware: Hardware):
        self.computations, self.hardware = computations, hardware

    def work(self, name: str) -> Work:
        total, computation = Work(), self.computations[name]
        channels: set[str] = set()
        for operation in computation.values():
            kind = operation.kind
            if kind == "while":
                (body,) = operation.called("body")
                trips = self._trips(operation)
                total.add(self.work(body), trips or 1)
                total.unknown_loops += trips is None
            elif kind == "conditional":
                branches = operation.called("branch_computations") or [
                    *operation.called("true_computation"),
                    *operation.called("false_computation"),
                ]
                works = [self.work(branch) for branch in branches]
                total.add(max(works, key=lambda work: work.seconds))
            elif kind in ("call", "async-start"):
                for called in operation.called("to_apply") + operation.called("calls"):
                    total.add(self.work(called))
            elif kind not in FREE and not kind.endswith(("-done", "-update")):
                total.add(self._one(operation, computation, channels))
        return total

    def _trips(self, loop: Operation) -> int | None:
        """How often a loop runs; None if the program does not say it."""
        if known := _TRIPS.search(loop.rest):
            return int(known[1])
        # A TPU's compiler does not note it: the loop counts from 0 to a constant.
        (condition,), (body,) = (
            [self.computations[name] for name in loop.called(part)]
            for part in ("condition", "body")
        )
        *_, test = condition.values()
        *_, results = body.values()
        if test.kind != "compare" or "direction=LT" not in test.rest:
            return None
        counter, end = (condition[name] for name in test.operands)
        index = re.search(r"index=(\d+)", counter.rest)
        if index is None or end.kind != "constant":
            return None
        count = body[results.operands[int(index[1])]]
        steps = [body[name] for name in count.operands if body[name].kind == "constant"]
        step = int(steps[0].operands[0]) if count.kind == "add" and steps else 1
        return -(-int(end.operands[0]) // step)

    def _one(self, operation: Operation, computation: Computation, channels: set[str]) -> Work:
        """`channels`: those of the collectives so far, which are parts of several fusions if they
        go on while these compute."""
        work = Work()
        kind = operation.kind.removesuffix("-start")
        if kind in COLLECTIVES:
            self._exchange(work, operation, computation, kind)
            return work
        operands = [computation[name] for name in operation.operands if name in computation]
        written, read = operation.traffic, sum(operand.traffic for operand in operands)
        if kind == "fusion":
            (called,) = operation.called("calls")
            body = self.computations[called]
            written, read = _fusion_bytes(operation, body, operands)
            # A TPU's compiler fuses collectives with what it computes while they go on.
            for op in body.values():
                channel = re.search(r"channel_id=(\d+)", op.rest)
                if op.kind in COLLECTIVES and (channel is None or channel[1] not in channels):
                    scattered = "AllReduceScatterFusion" in operation.rest
                    self._exchange(work, op, body, "reduce-scatter" if scattered else op.kind)
                    channels.update(channel.groups() if channel is not None else ())
        elif kind == "dynamic-update-slice":
            written = read = operands[1].traffic
        elif kind in ("dynamic-slice", "slice", "copy"):
            # One that is started lists its input, too.
            result = min(operation.arrays[:2], key=lambda array: array.size)
            written, read = result.traffic, result.size if operands[0].traffic else 0.0
        self._multiply(work, operation, computation)
        work.read, work.written = read, written
        work.seconds = max(
            work.flops / self.hardware.flops, (read + written) / self.hardware.bandwidth
        )
        what = "+".join(f"{array.dtype}{list(array.shape)}" for array in operation.arrays[:3])
        work.by_operation[f"{kind} {what}"] += work.seconds
        return work

    def _multiply(self, work: Work, operation: Operation, computation: Computation) -> None:
        """Adds the products of `operation`."""
        kind, rest = operation.kind, operation.rest
        if kind == "fusion":
            for name in operation.called("calls"):
                body = self.computations[name]
                for op in body.values():
                    self._multiply(work, op, body)
            return
        kernel = re.search(
            r'custom_call_target="(__cudnn\$fmha\w+)"|(splash_\w+)/pallas_call', rest
        )
        if kind == "custom-call" and kernel is not None:
            name = kernel[1] or kernel[2]
            work.attention[name] += 1
            products = next(n for part, n in _ATTENTION.items() if part in name)
            # The queries of splash attention, and cuDNN's first result, which has their shape:
            # [batch, heads, seq, d_head].
            factors = [array for name in operation.operands for array in computation[name].arrays]
            arrays = operation.arrays if kernel[1] else factors
            shape = next(array.shape for array in arrays if array.dtype in ("bf16", "f16"))
            work.flops += products * 2 * math.prod(shape) * _mean_keys(rest, shape[-2])
            return
        contracted = re.search(r"lhs_contracting_dim(?:s=\{|ensions\":\[)([\d,\"]*)", rest)
        if kind == "convolution":
            factor, kernel = (computation[name].arrays[0] for name in operation.operands)
            flops = 2 * _multiplications(
                rest, factor.shape, kernel.shape, operation.arrays[0].shape
            )
        elif contracted is not None and kind in ("dot", "custom-call"):
            factor = computation[operation.operands[0]].arrays[0]
            axes = [int(n) for n in re.findall(r"\d+", contracted[1])]
            length = math.prod(factor.shape[axis] for axis in axes)
            flops = 2 * math.prod(operation.arrays[0].shape) * length
        else:
            return
        work.flops += flops
        if factor.dtype not in ("bf16", "f16"):
            work.wide_flops += flops

    def _exchange(
        self, work: Work, operation: Operation, computation: Computation, kind: str
    ) -> None:
        groups = _groups(operation.rest)
        size, n = sum(computation[name].size for name in operation.operands), len(groups[0])
        # By the size of the inputs: the results of one that is started list its inputs, too. A ring
        # sums up in two rounds.
        received = {
            "all-gather": size * (n - 1),
            "all-reduce": 2 * size * (n - 1) / n,
            "reduce-scatter": size * (n - 1) / n,
            "all-to-all": size * (n - 1) / n,
            "collective-permute": size,
        }[kind]
        work.collectives[kind][0] += 1
        work.collectives[kind][1] += received
        work.link_seconds += max(self._link_seconds(kind, received, group) for group in groups)

    def _link_seconds(self, kind: str, received: float, group: list[int]) -> float:
        """How long it takes, at least, until each device of `group` has received so many bytes."""
        hosts = len({device // GPUS_PER_HOST for device in group})
        if self.hardware.network is None or hosts == 1:
            return received / self.hardware.link
        # Data for all GPUs of a host comes to the host once, in equal parts through their
        # networks, and goes on from GPU to GPU. Data for one of them comes through its own.
        if kind == "all-to-all":
            outside = (len(group) - len(group) / hosts) / (len(group) - 1)
        else:
            outside = (hosts - 1) / (len(group) - 1)
        return received * max(outside / self.hardware.network, (1 - outside) / self.hardware.link)


def _mean_keys(kernel: str, seq: int) -> float:
    """How many of `seq` keys a query of an attention kernel sees on average. With a causal
    mask, half: as many as a kernel multiplies that leaves out nothing but whole blocks above the
    diagonal."""
    window = re.search(r'sliding_window_length": "?([1-9]\d*)|splash_window(\d+)', kernel)
    if window is not None:
        width = min(int(window[1] or window[2]), seq)
        return min(seq / 2, width - width * (width - 1) / (2 * seq))
    return seq / 2 if re.search(r"CAUSAL|splash_causal", kernel) else seq


def _fusion_bytes(
    operation: Operation, body: Computation, operands: list[Operation]
) -> tuple[float, float]:
    """Bytes that a fusion writes and reads: of an array that it only cuts from, or writes to in
    place, the part; nothing of one that it passes on, as those do that wait for a collective."""

    def source(name: str) -> str:
        """The name that `name` stands for."""
        return source(body[name].operands[0]) if body[name].kind == "bitcast" else name

    users = defaultdict(list)
    for op in body.values():
        if op.kind not in ("bitcast", "parameter", "constant"):
            for operand in op.operands:
                users[source(operand)].append(op)
    passed = re.search(r"output_to_operand_aliasing=\{(.*?)\}, calls=", operation.rest)
    if passed is not None and any(op.kind in COLLECTIVES for op in body.values()):
        pairs = re.findall(r"\{(\d*)\}: \((\d+)", passed[1])
        results = {int(result or 0) for result, _ in pairs}
        taken = {int(operand) for _, operand in pairs}
        written = [a for i, a in enumerate(operation.arrays) if i not in results]
        operation = replace(operation, arrays=tuple(written))
        empty = Operation("parameter", (), (), "")
        operands = [empty if i in taken else op for i, op in enumerate(operands)]
    read = 0.0
    parameters = [name for name, op in body.items() if op.kind == "parameter"]
    parameters.sort(key=lambda name: int(body[name].operands[0]))
    for name, operand in zip(parameters, operands, strict=True):
        used = users[name]
        cut = [
            user.size
            for user in used
            if user.kind in ("dynamic-slice", "slice", "gather")
            and source(user.operands[0]) == name
        ]
        in_place = [
            user
            for user in used
            if user.kind == "dynamic-update-slice" and source(user.operands[0]) == name
        ]
        if not used or len(cut) + len(in_place) < len(used):
            read += operand.traffic
        elif operand.traffic:
            read += sum(cut)
    updates = [op for op in body.values() if op.kind == "dynamic-update-slice"]
    if updates and operation.traffic and sum(op.size for op in updates) == operation.size:
        return sum(body[op.operands[1]].size for op in updates), read
    return operation.traffic, read


def _groups(rest: str) -> list[list[int]]:
    """The devices that exchange among each other."""
    pairs = re.search(r"source_target_pairs=\{([\d,{}]*)\}", rest)
    listed = re.search(r"replica_groups=\{(\{[\d,{} ]*\})\}", rest)
    if pairs is not None or listed is not None:
        text = (pairs or listed)[1]  # pyright: ignore[reportOptionalSubscript]
        return [[int(n) for n in group.split(",")] for group in re.findall(r"\{([\d,]+)\}", text)]
    mesh = re.search(
        r"replica_groups=mesh\[([^\]]*)\](?:, device_ids=\((.*?\)?)\))? \{([^}]*)\}", rest
    )
    if mesh is not None:
        axes = {name: int(size) for name, size in re.findall(r"'(\w+)'=(\d+)", mesh[1])}
        names, sizes = list(axes), tuple(axes.values())
        ids = _iota(mesh[2] or f"[{math.prod(sizes)}]").reshape(sizes)
        along = [names.index(name) for name in re.findall(r"'(\w+)'", mesh[3])]
        last = np.moveaxis(ids, along, range(-len(along), 0))
        return last.reshape(-1, math.prod(ids.shape[axis] for axis in along)).tolist()
    short = re.search(r"replica_groups=\[([\d,]+)\]<=(\[[\d,]+\](?:T\([\d,]+\))?)", rest)
    assert short is not None, f"a collective without groups that are known: {rest[:200]}"
    return _iota(short[2]).reshape([int(n) for n in short[1].split(",")]).tolist()


def _iota(text: str) -> np.ndarray:
    """0, 1, 2, ... in a shape, perhaps with its axes in another order: `[16,8]T(1,0)`."""
    shape, order = (
        [int(n) for n in re.findall(r"\d+", part)] for part in (text + "T").split("T")[:2]
    )
    ids = np.arange(math.prod(shape)).reshape(shape)
    return ids.transpose(order) if order else ids


def _multiplications(
    rest: str, shape: tuple[int, ...], kernel: tuple[int, ...], out: tuple[int, ...]
) -> int:
    """Those of a convolution that are not with padding: XLA's TPU compiler writes products with
    several axes as convolutions."""
    labels = re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", rest)
    assert labels is not None, "a convolution without labels"
    count = out[labels[3].index("b")] * out[labels[3].index("f")] * kernel[labels[2].index("i")]
    window = re.search(r"window=\{([^}]*)\}", rest)
    options = dict(word.split("=") for word in window[1].split()) if window is not None else {}

    def option(name: str, axis: int, default: str) -> str:
        return options[name].split("x")[axis] if name in options else default

    for axis in range(len(options.get("size", "").split("x")) if options else 0):
        length, outputs = shape[labels[1].index(str(axis))], out[labels[3].index(str(axis))]
        size, stride = int(option("size", axis, "1")), int(option("stride", axis, "1"))
        low = int(option("pad", axis, "0_0").split("_")[0])
        spread, dilation = (int(option(f"{of}_dilate", axis, "1")) for of in ("lhs", "rhs"))
        places = np.arange(outputs)[:, None] * stride + np.arange(size)[None] * dilation - low
        real = (places >= 0) & (places <= (length - 1) * spread) & (places % spread == 0)
        count *= int(real.sum())
    return count

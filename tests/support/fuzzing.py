"""Hostile input, at random.

Runs of strangers, models in Hugging Face's format and comparisons (each file damaged, forged, or
replaced by a link, a pipe, a folder, a huge file, or another name of a file outside; folders
replaced by links; checkpoints with a forged record and a right digest), tokenizers of any parts,
chat templates, datasets with their cards, datasets whose texts are known, texts, prompts, and
options with extreme values, in processes with all kinds of settings. Every case must end with exit
code 0, or with 2 and one message (or with 1, where `check_block` names a block's mistakes). A
traceback, a wait of more than 20 seconds, more than 2 GB of memory, a control character, a change
outside of the run, the execution of anything from the run, and a text that is read as another one
are findings.

The scripts run in a process of their own, which lives for many cases.
"""

import contextlib
import copy
import csv
import gzip
import io
import json
import os
import random
import re
import resource
import runpy
import shutil
import subprocess
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, get_type_hints
from unittest import mock

import jax.numpy as jnp
import pyarrow
from pyarrow import parquet

from gptlite import scripts

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]  # also for the process that runs the scripts

SECONDS, MEGABYTES = 20.0, 2000
# Where nothing is compiled yet.
COMPILING = 120.0
CASES_PER_WORKER = 60
TINY = (
    "--data.corpus text.txt --model.n-layers 1 --model.n-heads 2 --model.d-model 16 "
    "--model.context-length 16 --training.batch-size 4 --training.log-every 2 --training.steps 6 "
    "--training.eval-every 3 --training.sample-tokens 4 --optimizer.name adamw"
)
TRAIN = TINY.split()
COMPARE = [*TRAIN, "--seeds", "2", "--vary", "model.norm=layer", "--name", "kept"]
CHECK_BLOCK, EXPORT = "check-block", "export"
CHAT, DATASET = "support.chat_once", "support.dataset_once"
ESTIMATE = "estimate"
BLOCK = """
import equinox as eqx
import jax.numpy as jnp


class Mine(eqx.Module):
    linear: eqx.nn.Linear
    by: float

    def __init__(self, config, *, by: float = 1.0, rank: int = 2, on: bool = True, key):
        self.linear = eqx.nn.Linear(config.d_model, config.d_model, key=key)
        self.by = by / rank if on else 1.0

    def __call__(self, x):
        return self.by * x @ self.linear.weight
"""
# What a stranger's file does if it is executed.
CANARY = "from pathlib import Path\nPath('EXECUTED').touch()\n"

EXTREMES: list[Any] = [
    *(None, True, False, 0, -1, 1, 2**31 - 1, 2**31, 2**63, -(2**70), 10**400, 0.5, -0.0, 1e-300),
    *(1e308, float("nan"), float("inf"), "", "a", "\x1b[2J", "\x00", "\u202e", "\ud800", "🙂" * 50),
    *("../..", "/dev/zero", "/etc/passwd", "a" * 5000, "moe:n_experts=10000000", "x.py:X", "hf:x"),
    *([], {}, [[]], {"a": {}}, ["a"], [1e308]),
]
# The same as options.
WORDS = [word for word in map(str, EXTREMES) if "\x00" not in word and "\ud800" not in word]
WORDS += ["nan", "-1e5", "1e5", "0x10", "1_000", " 3", "runs/one", "text.txt", "/dev/null", "."]
# Those that are no large size: these may be trained with.
SMALL_WORDS = [word for word in WORDS if not re.search(r"\d{4}|^1_000$", word)]
PLAUSIBLE = ["0", "1", "2", "4", "0.5", "1e-3", "True", "False", "None", "byte", "layer", "moe"]
TEXTS: list[bytes] = [
    *(b"", b"a", b"ab" * 10, b"\xff\xfe", b"\xef\xbb\xbf", b"\x00" * 100, b"\xed\xa0\x80" * 50),
    *(b"line\r\n" * 100, "🙂é".encode() * 100, b"\x1b]0;x\x07 " * 100, b"a" * 100_000, b"\xf0\x9f"),
]


def fuzz(
    folder: Path, seed: int, more: Callable[[int, float], bool], *, comparisons: bool = True
) -> list[str]:
    """The findings. Cases are drawn from `seed` and run in `folder`, a new one, while `more(cases
    done, seconds passed)`. Without `comparisons`, it begins 12 seconds earlier."""
    folder = folder.resolve()
    folder.mkdir(parents=True)
    made = make_files(folder, comparisons)
    counts: Counter[str] = Counter()
    found, done, began, worker = [], 0, time.monotonic(), None
    while more(done, time.monotonic() - began):
        if worker is None or worker.cases >= CASES_PER_WORKER:
            if worker is not None:
                worker.close()
            worker = Worker(folder, random.Random(f"{seed} {done}").choice(SETTINGS))
        chance = random.Random(f"{seed} {done}")
        restore(folder, made)
        kind, script, argv = draw_case(chance, folder, comparisons)
        before = snapshot(folder)
        # A new variant compiles.
        seconds = COMPILING if script == "compare" else SECONDS
        reply = worker.run(script, argv, seconds)
        problem = judge(script, reply) or outside(folder, before)
        done += 1
        counts[f"{kind}: " + ("finding" if problem else f"exit {reply['code']}")] += 1
        if problem:
            found.append(f"case {done - 1}, {kind}: {script}.py {argv}\n{problem}")
            print(found[-1], flush=True)
            worker.close()
            worker = None
        if done % 200 == 0:
            print(f"{done} cases in {time.monotonic() - began:.0f} s", flush=True)
    if worker is not None:
        worker.close()
    print(f"{done} cases, {len(found)} findings")
    for name in sorted(counts):
        print(f"  {counts[name]:5d}  {name}")
    return found


# Cases.


def draw_case(chance: random.Random, folder: Path, comparisons: bool) -> tuple[str, str, list[str]]:
    """What is attacked, the script, and its arguments."""
    kinds = {of_run: 12, of_options: 6, of_prompt: 2, of_corpus: 2, of_training: 3, of_block: 1}
    kinds |= {of_import: 5, of_tokenizer: 5, of_template: 3, of_dataset: 4, of_texts: 4}
    kinds |= {of_comparison: 3} if comparisons else {}
    return chance.choices(list(kinds), list(kinds.values()))[0](chance, folder)


def of_run(chance: random.Random, folder: Path) -> tuple[str, str, list[str]]:
    run = folder / "runs" / "one"
    script = chance.choice(["sample", "sample", "train", "train", EXPORT])
    names = ["config.json", "tokenizer.json"] * 3
    files = sorted(str(file.relative_to(run)) for file in run.rglob("*") if file.is_file())
    if script == "sample":
        argv = ["--run", "one", "--prompt", "The", "--max-new-tokens", "8"]
    elif script == EXPORT:
        argv = ["one", "runs/one/exported"]
    else:
        argv = ["--resume", "one", "--data.corpus", "text.txt", "--training.steps", "8"]
    if chance.random() < 0.1:
        what = chance.choice([forge_record, link_folder])(chance, folder)
        return f"{script} {what}", script, argv
    name = chance.choice(names if chance.random() < 0.6 else files)
    what = damage(chance, run / name, folder / "runs" / "two" / name)
    place = "checkpoints/..." if name.startswith("checkpoints") else name
    return f"{script} {place} {what}", script, argv


def of_import(chance: random.Random, folder: Path) -> tuple[str, str, list[str]]:
    model = folder / "hf"
    if chance.random() < 0.7:  # as if another had written it
        config = json.loads((model / "config.json").read_bytes())
        del config["gptlite"]
        (model / "config.json").write_text(json.dumps(config))
    names = ["config.json"] * 4 + ["tokenizer.json"] * 3 + ["model.safetensors"] * 2
    name = chance.choice([*names, "generation_config.json"])
    what = damage(chance, model / name, folder / "runs" / "one" / name)
    if chance.random() < 0.7:
        argv = ["--run", "hf:hf", "--prompt", "The", "--max-new-tokens", "8"]
        return f"sample {name} {what}", "sample", argv
    argv = ["--init-from", "hf:hf", "--data.corpus", "text.txt", "--training.steps", "2"]
    return f"train {name} {what}", "train", [*argv, "--training.batch-size", "2"]


# Parts of a tokenizer.json: known ones, and what strangers may put there.
REGEXES = [
    r"(?:.{0,200}){3}(?![\s\S])",
    r"(a+)+$",
    r"(?<=a*)b",
    r"[",
    r"\p{L}+",
    r"[^\s]+|\s+",
    r" ?[^(\s|[.,!?…])]+",
    "",
    r"\d{1,3}",
    r"(?=x)",
    r".*",
    r"\s+(?!\S)|\s+",
    "a" * 5000,
]
STRINGS = ["", "a", "▁", " ", "aa", "é", "a" * 3000, "\x1b[2J", "\u202e", "🙂" * 40]


def pattern(chance: random.Random) -> Any:
    kind = chance.choice(["String", "Regex"])
    return {kind: chance.choice(REGEXES if kind == "Regex" else STRINGS)}


def part(chance: random.Random, name: str, depth: int = 0) -> Any:
    """A normalizer, pre-tokenizer, decoder, post-processor or model."""
    inside = {"normalizer": "normalizers", "pre_tokenizer": "pretokenizers"}
    inside |= {"decoder": "decoders", "post_processor": "processors"}
    roll = chance.random()
    if depth < 3 and roll < 0.3 and name in inside:
        steps = [part(chance, name, depth + 1) for _ in range(chance.choice([0, 1, 2, 3, 6]))]
        if roll < 0.06 and depth == 0:
            steps *= chance.choice([10, 300, 100_000])
        return {"type": "Sequence", inside[name]: steps}
    text, number = chance.choice(STRINGS), chance.choice([0, 1, -1, 3, 2**31, 10**9])
    space = {"add_prefix_space": chance.random() < 0.5, "trim_offsets": True, "use_regex": True}
    meta = {"replacement": chance.choice(STRINGS), "prepend_scheme": chance.choice(["always", "x"])}
    replace = {"type": "Replace", "pattern": pattern(chance), "content": text}
    piece = {"SpecialToken": {"id": chance.choice(["<x>", "a", text]), "type_id": 0}}
    single = [piece] * chance.choice([1, 1, 30]) + [{"Sequence": {"id": "A", "type_id": 0}}]
    single += [{"Sequence": {"id": "B", "type_id": 0}}] * (chance.random() < 0.1)
    n_ids = chance.choice([1, 1, 1, 100_000])
    some_ids = [chance.choice([0, 1, 2**31, 2**40])] * n_ids
    ids = {"<x>": {"id": "<x>", "ids": some_ids, "tokens": ["<x>"] * n_ids}}
    # Each of these begins with the one before: the library looks for the longest.
    pieces = [["a" * i, -1.0 * i] for i in range(1, chance.choice([3, 3, 100, 3000]))]
    known: dict[str, list[Any]] = {
        "normalizer": [
            *({"type": x} for x in ("NFC", "NFD", "NFKC", "NFKD", "Lowercase", "StripAccents")),
            *({"type": x} for x in ("Nmt", "ByteLevel", "BertNormalizer")),
            {"type": "Strip", "strip_left": True, "strip_right": True},
            {"type": "Prepend", "prepend": text},
            {"type": "Precompiled", "precompiled_charsmap": chance.choice(["", "AAAA", "x" * 400])},
            replace,
            replace,
        ],
        "pre_tokenizer": [
            {"type": "ByteLevel", **space},
            {"type": "Metaspace", "split": chance.random() < 0.5, **meta},
            {"type": "Split", "pattern": pattern(chance), "behavior": "Isolated", "invert": False},
            {"type": "Split", "pattern": pattern(chance), "behavior": "Removed", "invert": True},
            {"type": "Digits", "individual_digits": True},
            {"type": "FixedLength", "length": number},
            *({"type": x} for x in ("Whitespace", "WhitespaceSplit", "BertPreTokenizer")),
            {"type": "CharDelimiterSplit", "delimiter": chance.choice(["a", "", "ab"])},
            {"type": "Punctuation", "behavior": "Isolated"},
        ],
        "decoder": [
            {"type": "ByteLevel", **space},
            {"type": "Fuse"},
            {"type": "ByteFallback"},
            {"type": "Metaspace", "split": True, **meta},
            {"type": "Strip", "content": chance.choice(STRINGS), "start": number, "stop": number},
            replace,
            {"type": "WordPiece", "prefix": "##", "cleanup": True},
        ],
        "post_processor": [
            {"type": "ByteLevel", **space},
            {"type": "TemplateProcessing", "single": single, "pair": [], "special_tokens": ids},
            {"type": "TemplateProcessing", "single": single, "pair": [], "special_tokens": {}},
            {"type": "BertProcessing", "sep": ["a", number], "cls": ["a", number]},
        ],
        "model": [
            {"type": "WordLevel", "vocab": {"a": 0, text: number}, "unk_token": text},
            {"type": "Unigram", "unk_id": number, "vocab": [["a", -1.0], [text, 0.0]]},
            {"type": "Unigram", "unk_id": 0, "vocab": pieces},
            {"type": "BPE", "vocab": {"a": 0, "b": 1, "ab": number}, "merges": [["a", "b"]]},
            {
                **{"type": "BPE", "vocab": {"a": 0, "b": 1, "ab": 2}, "merges": [["a", "b"]]},
                chance.choice(["continuing_subword_prefix", "end_of_word_suffix"]): text * 1000,
            },
            {"type": "WordPiece", "vocab": {"a": 0}, "unk_token": text}
            | {"continuing_subword_prefix": "", "max_input_chars_per_word": number},
        ],
    }
    return chance.choice([*known[name], None, extreme(chance)])


def of_tokenizer(chance: random.Random, folder: Path) -> tuple[str, str, list[str]]:
    """A tokenizer.json with some other parts, and prompts that ask a lot of them."""
    path = folder / "hf" / "tokenizer.json"
    record = json.loads(path.read_bytes())
    names = ["normalizer", "pre_tokenizer", "decoder", "post_processor", "model"]
    for name in chance.sample(names, chance.choice([1, 1, 2, 3])):
        made = part(chance, name)
        keep = name == "model" and isinstance(made, dict) and chance.random() < 0.6
        record[name] = record["model"] | {"dropout": 0.5, "unk_token": "<x>"} if keep else made
    path.write_text(json.dumps(record))
    prompt = chance.choice(["The", "the " * 700, "a" * 2000, " " * 3000, "naïve café 🙂", "\n\n a"])
    if chance.random() < 0.6:
        argv = ["--run", "hf:hf", f"--prompt={prompt}", "--max-new-tokens", "8"]
        return "sample with another tokenizer", "sample", argv
    argv = [*TRAIN, "--data.tokenizer", "hf:hf", "--run", "new", "--training.steps", "2"]
    return "train with another tokenizer", "train", argv


EXPRESSIONS = [
    *(
        "7 ** 99999999 ** 9",
        "'a' * 6000000000",
        "(" * 3000 + "1" + ")" * 3000,
        "range(10**9) | list",
    ),
    *("messages[0].content * 3000000000", "''.__class__.__mro__", "messages.append(1)", "1 // 0"),
    *("messages | tojson", "messages[0]['content']", "x.y.z", "raise_exception('\x1b[2J')"),
    *(
        "lipsum(10**6)",
        "cycler.__init__.__globals__",
        "strftime_now('%Y' * 10**6)",
        "'%s' % messages",
    ),
    *("'%999999999d' % 1", "'{:>999999999}'.format(1)", "messages | sort | pprint", "bos_token"),
    *("[1] * 10**9", "namespace(a=1).a", "(1, ) * 10**10", "'a' | center(10**10)"),
]
STATEMENTS = [
    "{% for m in messages %}{{ m.content }}{% endfor %}",
    "{% for a in range(99999) %}{% for b in range(99999) %}{{ a }}{% endfor %}{% endfor %}",
    "{% for a in messages %}" * 25 + "{% endfor %}" * 25,
    "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "{% set x = 'a' %}" + "{% set x = x ~ x %}" * 40 + "{{ x }}",
    "{% include 'x' %}",
    "{% import 'os' as os %}",
    "{% generation %}a{% endgeneration %}",
    "{% while true %}",
    "{%",
    "a" * 2_000_000,
]


def of_template(chance: random.Random, folder: Path) -> tuple[str, str, list[str]]:
    content = "".join(
        chance.choice(STATEMENTS)
        if chance.random() < 0.4
        else f"{{{{ {chance.choice(EXPRESSIONS)} }}}}"
        for _ in range(chance.choice([1, 1, 2, 4]))
    )
    if chance.random() < 0.5:
        (folder / "hf" / "chat_template.jinja").write_text(content)
    else:
        path = folder / "hf" / "tokenizer_config.json"
        special = {"bos_token": chance.choice(["<s>", extreme(chance)]), "chat_template": content}
        path.write_text(json.dumps(json.loads(path.read_bytes()) | special))
    return "chat template", CHAT, ["hf", chance.choice(["The", "", "a" * 9000])]


CARDS = [
    "a0: &a0 [x]\n" + "".join(f"a{i}: &a{i} [{f'*a{i - 1}, ' * 9}]\n" for i in range(1, 12)),
    "a: &a [x, x]\nb: &b [*a, *a]\nc: &c [*b, *b]\nd: [*c, *c]",
    "configs:\n- config_name: x\n  data_files: ../text.txt",
    "configs:\n- config_name: x\n  data_files: /etc/passwd",
    "configs:\n- config_name: x\n  data_files: https://127.0.0.1:1/x.jsonl",
    "configs:\n- config_name: x\n  data_files: '*'",
    "configs: 3",
    "configs:\n- 3",
    "dataset_info:\n  features:\n  - name: text\n    dtype: int64",
    "dataset_info:\n  features:\n  - name: text\n    dtype: {x: y}",
    "a: " + "[" * 5000,
    "!!python/object/apply:os.system ['touch EXECUTED']",
    "\x00",
    "a: b\na: b",
]


def of_dataset(chance: random.Random, folder: Path) -> tuple[str, str, list[str]]:
    """A folder or a file in the formats of datasets."""
    texts = [{"text": f"line {i} of a text"} for i in range(40)]
    plain = "".join(json.dumps(x) + "\n" for x in texts).encode()
    big = b'{"text": "' + b"a" * 2**20 + b'"}\n'
    contents = {
        "jsonl": [plain, plain[:-5], b"[" + plain, json.dumps(texts).encode(), big, b"", b"null\n"],
        "csv": [b"text\n" + b"a line\n" * 40, b'text\n"' + b"a" * 2**20, b"", b"a,b\n1,2\n"],
        "txt": [*TEXTS, plain],
        "parquet": [b"PAR1" + b"\x00" * 40 + b"PAR1", b"PAR1", plain],
        "xml": [b"<a/>"],
        "pkl": [b"cos\nsystem\n(S'touch EXECUTED'\ntR."],
    }
    data = folder / "data"
    data.mkdir()
    for i in range(chance.choice([1, 1, 3])):
        suffix = chance.choice(list(contents))
        content = chance.choice(contents[suffix])
        stem = chance.choice([f"train-{i}", "a:b", "x[1]", "é", ".hidden", "*"])
        packed = chance.choice(["", "", ".gz", ".zst"])
        path = data / f"{stem}.{suffix}{packed}"
        path.write_bytes(gzip.compress(content) if packed == ".gz" else content)
    if chance.random() < 0.5:
        name = chance.choice(["README.md", ".huggingface.yaml"])
        card = chance.choice(CARDS)
        begin = chance.choice(["", "", "\n \n", "\ufeff"]) + chance.choice(["---\n", "---\r\n"])
        begin += chance.choice(["", "", "---x: 1\n"])
        content = f"{begin}{card}\n---{chance.choice([' ', ''])}\n"
        (data / name).write_text(content if name == "README.md" else card, newline="")
    if chance.random() < 0.2:
        (data / "link.jsonl").symlink_to(chance.choice(["/proc/self/status", "../text.txt", "x"]))
    where = chance.choice(["data", "data", str(chance.choice(sorted(data.iterdir())))])
    more = chance.choice(["", "", ":train", ":train:text", f":{chance.choice(WORDS)}"])
    tokenizer = chance.choice(["char", "byte", "bpe:260"])
    argv = [*TRAIN, f"--data.corpus=hf:{where}{more}", "--data.tokenizer", tokenizer]
    return "train dataset", "train", [*argv, "--run", "new", "--training.steps", "2"]


# Texts that a reader may take for something else, or change.
LOOKALIKES = [
    *("007", "1e5", "-0.0", "NaN", "NA", "null", "None", "true", "2024-01-01", "12:30", "0x10"),
    *("2024-01-01T00:00:00Z", "[]", "{}", '{"a": 1}', "a,b", "a\tb", 'say "a"', '"', "'", "\\n"),
    *(" a ", " ", "\t", "\n", "a\nb", "a\r\nb", "a\rb", "\ufeffa", "a\ufeff", "#a", "é", "e\u0301"),
    *("\u2028", "a\x85b", "a\x1cb", "a\x00b", "\x0c", "🙂", "\ufffd", "a" * 3000, "text", ",", ""),
]


def of_texts(chance: random.Random, folder: Path) -> tuple[str, str, list[str]]:
    """Texts in one of the formats of datasets: they are read as they were written. Where one is
    something else, the dataset is refused."""
    suffix = chance.choice(["jsonl", "json", "csv", "tsv", "parquet"])
    column, expected = chance.choice(["text", "text", "story", "a:b"]), []
    data = folder / "data"
    data.mkdir()
    n_files = chance.choice([1, 1, 2, 3])
    for i in range(n_files):
        texts: list[Any] = chance.choices(LOOKALIKES, k=chance.choice([1, 3, 40, 2500]))
        if suffix in ("jsonl", "json", "parquet"):
            texts = [None if chance.random() < 0.05 else text for text in texts]
        expected += [text for text in texts if text]
        content = written(chance, suffix, column, texts)
        packed = chance.choice([".gz", "", ""]) if suffix != "parquet" else ""
        path = data / f"train-{i}.{suffix}{packed}"
        path.write_bytes(gzip.compress(content) if packed else content)
    if suffix != "csv" and suffix != "tsv" and chance.random() < 0.15:
        # Something else in the last file.
        other = chance.choice([5, 0.5, True, ["a"], {"a": "b"}])
        path = data / f"train-{n_files}.{suffix}"
        n = chance.choice([1, 1200])
        texts = [other] * n if suffix == "parquet" else ["a"] * n + [other]
        path.write_bytes(written(chance, suffix, column, texts))
        expected = None
    (folder / "expected.json").write_text(json.dumps(expected))
    files = [str(path) for path in data.iterdir()]
    where = "data" if len(files) > 1 else chance.choice(["data", *files])
    return f"texts in {suffix}", DATASET, [f"hf:{where}:train:{column}", "expected.json"]


def written(chance: random.Random, suffix: str, column: str, texts: list[Any]) -> bytes:
    """A file with texts in a column, and perhaps other columns."""
    rows = [{column: text} for text in texts]
    before, after = chance.random() < 0.3, chance.random() < 0.3
    rows = [{"id": i} | row if before else row for i, row in enumerate(rows)]
    rows = [row | {"label": chance.choice("ab")} if after else row for row in rows]
    if suffix == "parquet":
        table = pyarrow.Table.from_pylist(rows)
        if chance.random() < 0.2 and pyarrow.types.is_string(table.schema.field(column).type):
            large = table[column].cast(pyarrow.large_string())
            table = table.set_column(table.schema.get_field_index(column), column, large)
        sink = io.BytesIO()
        parquet.write_table(table, sink, row_group_size=chance.choice([1, 7, 10_000]))
        return sink.getvalue()
    if suffix in ("json", "jsonl"):
        ascii_only, end = chance.random() < 0.5, chance.choice(["\n", "\r\n"])
        if suffix == "json":
            return json.dumps(rows, ensure_ascii=ascii_only).encode()
        return "".join(json.dumps(row, ensure_ascii=ascii_only) + end for row in rows).encode()
    sink = io.StringIO()
    # Without quotes, these would be other lines: an empty one, or two (Python quotes a return only
    # since 3.13).
    is_unclear = any("\r" in text or not text.strip() for text in texts)
    writer = csv.DictWriter(
        sink,
        list(rows[0]),
        delimiter="\t" if suffix == "tsv" else ",",
        lineterminator=chance.choice(["\n", "\r\n"]),
        quoting=csv.QUOTE_ALL if is_unclear else chance.choice([csv.QUOTE_ALL, csv.QUOTE_MINIMAL]),
    )
    writer.writeheader()
    writer.writerows(rows)
    return sink.getvalue().encode()


# Settings of a user's machine. Each process has one of these.
SETTINGS: list[dict[str, str]] = [
    {},
    {},
    {"PYTHONIOENCODING": "cp1252"},
    {"PYTHONIOENCODING": "ascii", "LC_ALL": "C"},
    {"HOME": "/nonexistent", "MPLBACKEND": "module://matplotlib_inline.backend_inline"},
    {"MPLBACKEND": "no-such-backend", "JAX_ENABLE_X64": "1"},
    {"JAX_DEFAULT_PRNG_IMPL": "rbg", "PYTHONOPTIMIZE": "1"},
    {"JAX_NUM_CPU_DEVICES": "1", "JAX_DEBUG_NANS": "1"},
]


def forge_record(chance: random.Random, folder: Path) -> str:
    """Change what a checkpoint says besides its arrays, and its digest with it. What was done."""
    from gptlite.runs import checkpoints as module
    from support.kill_loop import arrays

    place = folder / "runs" / "one" / "checkpoints"
    shutil.rmtree(place / "3")
    state = arrays(place / "6" / "state")
    file = place / "6" / "record" / "metadata"
    record = json.loads(file.read_bytes())
    del record["digest"]
    record = json.loads(forged(chance, record))
    if isinstance(record, dict):
        on_device = {name: jnp.asarray(array) for name, array in state.items()}
        record["digest"] = module.digest(on_device, module.survey(on_device), record)
    file.write_text(json.dumps(record))
    return "record forged"


def link_folder(chance: random.Random, folder: Path) -> str:
    """Replace a folder of the run by a link to one outside of it. What was done."""
    one, two = folder / "runs" / "one", folder / "runs" / "two"
    name = chance.choice(["custom", "checkpoints", "checkpoints/3", "checkpoints/6/state"])
    shutil.rmtree(one / name)
    (one / name).symlink_to(chance.choice([two / name, folder, two]))
    return f"{name} link"


FORGED = (".json", ".safetensors", ".jsonl")


def damage(chance: random.Random, path: Path, other: Path) -> str:
    """Damage or replace a file. What was done."""
    content = path.read_bytes()
    how = chance.choice(
        ["forged"] * 8 * (path.suffix in FORGED or path.name in (".zarray", "metadata"))
        + ["bits", "bits", "cut", "noise", "swapped", "link", "pipe", "folder", "huge", "absent"]
        + ["hard link"]
    )
    if how == "forged":
        path.write_bytes(forge(chance, path.suffix, content))
    elif how == "bits":
        changed = bytearray(content or b"\0")
        for _ in range(chance.choice([1, 1, 8, 100])):
            changed[chance.randrange(len(changed))] ^= 1 << chance.randrange(8)
        path.write_bytes(changed)
    elif how == "cut":
        path.write_bytes(content[: chance.randrange(len(content) + 1)])
    elif how == "noise":
        path.write_bytes(chance.randbytes(chance.choice([0, 1, 100, 100_000])))
    else:
        path.unlink()
        if how == "swapped" and other.is_file():
            path.write_bytes(other.read_bytes())
        elif how == "link":
            path.symlink_to(chance.choice(["/dev/zero", "/etc/passwd", "nowhere", "/dev/stdin"]))
        elif how == "hard link" and other.is_file():
            os.link(other, path)
        elif how == "pipe":
            os.mkfifo(path)
        elif how == "folder":
            path.mkdir()
        elif how == "huge":
            path.touch()
            os.truncate(path, chance.choice([2**32, 2**40]))
    return how


def forge(chance: random.Random, suffix: str, content: bytes) -> bytes:
    """The file with a few of its values replaced by extreme ones."""
    if suffix == ".safetensors":
        end = 8 + int.from_bytes(content[:8], "little")
        header = json.loads(content[8:end])
        header = forged(chance, header)
        if chance.random() < 0.2:
            return chance.choice([0, 2**40, 2**64 - 1]).to_bytes(8, "little") + header
        return len(header).to_bytes(8, "little") + header + content[end:]
    lines = content.splitlines() if suffix == ".jsonl" else [content]
    place = chance.randrange(len(lines)) if lines else 0
    return b"\n".join(
        forged(chance, json.loads(line)) if i == place else line for i, line in enumerate(lines)
    )


def forged(chance: random.Random, record: Any) -> bytes:
    for _ in range(chance.choice([1, 1, 1, 2, 5])):
        places = list(walk(record))
        if not places:
            return json.dumps(extreme(chance)).encode()
        parent, key = chance.choice(places[:200])
        roll = chance.random()
        if roll < 0.1:
            del parent[key]
        elif roll < 0.2 and isinstance(parent, dict):
            parent[str(extreme(chance))[:100]] = extreme(chance)
        elif roll < 0.4 and type(parent[key]) is int:
            parent[key] += chance.choice([-1, 1, 7, 10**6])
        else:
            parent[key] = extreme(chance)
    return json.dumps(record).encode()


def extreme(chance: random.Random) -> Any:
    return copy.deepcopy(chance.choice(EXTREMES))  # it may be forged further


def walk(node: Any) -> Iterator[tuple[Any, Any]]:
    """Every place in a JSON record, as what it is in and its key or index."""
    keys = list(node) if isinstance(node, dict) else range(len(node)) if type(node) is list else ()
    for key in keys:
        yield node, key
        yield from walk(node[key])


def of_options(chance: random.Random, folder: Path) -> tuple[str, str, list[str]]:
    from gptlite.config import SamplingConfig

    if chance.random() < 0.4:
        names = [name.replace("_", "-") for name in get_type_hints(SamplingConfig)]
        names += ["prompt", "prompt-file", "run", "weights", "seed", "stop", "num-samples"]
        names += ["max-new-tokens", "custom"]
        argv = ["--prompt", "The", "--max-new-tokens", "8", "--run", "one"]
        script = "sample"
    else:
        names = [*config_options(), "run", "resume"]
        argv = [*TRAIN]  # sizes that are legal and large are not trained
        script = ESTIMATE
    for _ in range(chance.choice([1, 1, 2, 3])):
        name = chance.choice(names)
        # Two thousand million tokens are not refused: they are shown as they come.
        words = SMALL_WORDS if name == "max-new-tokens" else WORDS
        argv += [f"--{name}={chance.choice(words)}"]
    return f"{script} options", script, argv


def config_options() -> list[str]:
    from gptlite.config import Config

    return [
        f"{section}.{name}".replace("_", "-")
        for section, kind in get_type_hints(Config).items()
        for name in get_type_hints(kind)
    ]


def of_training(chance: random.Random, folder: Path) -> tuple[str, str, list[str]]:
    from gptlite.cli import parse_train

    argv = []
    for _ in range(chance.choice([1, 10])):  # most options are refused at once
        argv = [*TRAIN, "--run", "new"]
        for _ in range(chance.choice([1, 1, 2])):
            word = chance.choice([*SMALL_WORDS, *PLAUSIBLE * 3])
            argv += [f"--{chance.choice(config_options())}={word}"]
        with contextlib.suppress(Exception, SystemExit), contextlib.redirect_stderr(io.StringIO()):
            parse_train(argv)
            break
    return "train with options", "train", argv


def of_comparison(chance: random.Random, folder: Path) -> tuple[str, str, list[str]]:
    kept = folder / "comparisons" / "kept"
    if chance.random() < 0.5:
        path = chance.choice(sorted(kept.glob("*.*")))
        what = damage(chance, path, folder / "runs" / "one" / "config.json")
        return f"compare {path.name} {what}", "compare", COMPARE
    argv, word = [*COMPARE, "--name=more"], chance.choice([*SMALL_WORDS, *PLAUSIBLE * 3])
    names = [*config_options(), "seeds", "seeds-at-once", "equal", "name", "base", "vary", "tune"]
    names += ["tune-points", "minutes"]
    if chance.random() < 0.5:
        return "compare options", "compare", [*argv, f"--{chance.choice(names)}={word}"]
    field = chance.choice(config_options())
    return "compare --vary", "compare", [*argv, f"--vary={field}={word}"]


def of_block(chance: random.Random, folder: Path) -> tuple[str, str, list[str]]:
    options = [
        f"blocks.py:Mine:{chance.choice(['by', 'rank', 'on', 'x'])}={chance.choice(WORDS)}",
        f"--zero-grad={chance.choice(WORDS)}",
        f"--{chance.choice(['bidirectional', 'x'])}={chance.choice(WORDS)}",
        chance.choice(WORDS),
        f"{chance.choice(WORDS)}:Mine",
        f"blocks.py:{chance.choice(WORDS)}",
    ]
    return "check_block options", CHECK_BLOCK, chance.sample(options, chance.choice([1, 1, 2]))


def of_prompt(chance: random.Random, folder: Path) -> tuple[str, str, list[str]]:
    content = chance.choice([*TEXTS, chance.randbytes(50), b"The " * chance.randrange(10_000)])
    (folder / "prompt").write_bytes(content)
    argv = ["--run", "one", "--prompt-file", "prompt", "--max-new-tokens", "8"]
    return "sample prompt", "sample", argv


def of_corpus(chance: random.Random, folder: Path) -> tuple[str, str, list[str]]:
    good = (folder / "text.txt").read_bytes()
    content = chance.choice([*TEXTS, chance.randbytes(5000), good[: chance.randrange(len(good))]])
    (folder / "corpus").mkdir()
    path = folder / "corpus" / chance.choice(["a.txt", "b.TXT"])
    kind = chance.choice(["file", "file", "folder", "link", "pipe", "nested"])
    if kind == "link":
        path.symlink_to(chance.choice(["/dev/zero", "nowhere", str(folder / "corpus")]))
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "nested":
        path.mkdir()
        (path / "c.txt").write_bytes(content)
    else:
        path.write_bytes(content)
    tokenizer = chance.choice(["char", "byte"])
    corpus = str(path) if kind == "file" else "corpus"
    argv = [*TRAIN, "--data.corpus", corpus, "--data.tokenizer", tokenizer, "--run", "new"]
    return "train corpus", "train", [*argv, "--training.steps", "2"]


# What must hold.


def judge(script: str, reply: dict[str, Any]) -> str | None:
    """What is wrong with how a case ended, if anything."""
    said = reply["out"] + reply["err"]
    if reply["code"] not in ((0, 1, 2) if script == CHECK_BLOCK else (0, 2)):
        return f"exit {reply['code']}: {said[-3000:]}"
    if "Traceback" in said or "panicked" in said:
        return f"a traceback: {said[-3000:]}"
    if reply["code"] == 2 and not reply["err"].strip():
        return "exit 2 without a message"
    if reply["megabytes"] > MEGABYTES:
        return f"{reply['megabytes']} MB of memory"
    if script == "sample" and reply["code"] == 0:
        said = reply["err"]  # a file gets what was generated, whatever it is
    said = re.sub(r"\x1b\[[0-9;]*m", "", said)  # tyro's colours
    control = re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", said)
    if control:
        return f"a control character: {said[max(0, control.start() - 100) :][:200]!r}"
    return None


def make_files(folder: Path, comparisons: bool) -> Path:
    """Two runs, a comparison, a text and a block. The folder that keeps them."""
    from conftest import TEXT

    (folder / "text.txt").write_text(TEXT)
    (folder / "blocks.py").write_text(BLOCK)
    worker = Worker(folder)
    other = ["--data.tokenizer", "byte", "--model.d-model", "8"]
    portable = ["--model.embed-previous", "0", "--model.mlp", "swiglu"]
    for name, more in {"one": portable, "two": other}.items():
        reply = worker.run("train", [*TRAIN, *more, "--run", name], COMPILING)
        assert reply["code"] == 0, reply
    reply = worker.run(EXPORT, ["one", "hf"])
    assert reply["code"] == 0, reply
    if comparisons:
        reply = worker.run("compare", COMPARE, COMPILING)
        assert reply["code"] == 0, reply
    worker.close()
    made = folder.with_name(folder.name + ".made")
    for name in ("one", "two"):
        custom = folder / "runs" / name / "custom"
        custom.mkdir()
        (custom / "x.py").write_text(CANARY)
        (custom / "gptlite.py").write_text(CANARY)
    shutil.copytree(folder, made)
    return made


def restore(folder: Path, made: Path) -> None:
    """Everything as it was before the first case."""
    for entry in folder.iterdir():
        shutil.rmtree(entry) if entry.is_dir() and not entry.is_symlink() else entry.unlink()
    shutil.copytree(made, folder, dirs_exist_ok=True)


def snapshot(folder: Path) -> dict[str, tuple[int, int]]:
    """Everything but what a case may write: a run, a comparison, locks, compiled blocks."""
    return {
        str(path): (path.lstat().st_size, path.lstat().st_mtime_ns)
        for path in folder.rglob("*")
        if not path.is_dir()
        and path.relative_to(folder).parts[0] not in ("comparisons", "__pycache__")
        and path.relative_to(folder).parts[:2] not in MAY_CHANGE
    }


MAY_CHANGE = [("runs", name) for name in ("one", "new", ".one.lock", ".new.lock", ".two.lock")]


def outside(folder: Path, before: dict[str, tuple[int, int]]) -> str | None:
    """What has changed outside of the run, if anything."""
    if list(folder.rglob("EXECUTED")):
        return "something in the run was executed"
    after = snapshot(folder)
    changed = sorted(
        name
        for name in before.keys() | after.keys()
        if before.get(name) != after.get(name) and not re.search(r"/runs/\.?quick-", name)
    )
    return f"changed: {changed}" if changed else None


# The process that runs the scripts.


class Worker:
    def __init__(self, folder: Path, settings: Mapping[str, str] = MappingProxyType({})):
        self.cases = 0
        environment = os.environ | {  # with what conftest.py has set
            "JAX_COMPILATION_CACHE_DIR": str(folder.with_name(folder.name + ".cache")),
            "COLUMNS": "200",
            "HF_HUB_OFFLINE": "1",
        }
        environment |= settings
        self._process = subprocess.Popen(
            [sys.executable, __file__],
            cwd=folder,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def run(self, script: str, argv: list[str], seconds: float = SECONDS) -> dict[str, Any]:
        """Exit code, output and memory of a script, which is killed after `seconds`."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self.cases += 1
        timer = threading.Timer(seconds + 20 * (self.cases == 1), self._process.kill)
        timer.start()
        raw = []
        with contextlib.suppress(BrokenPipeError):
            print(json.dumps([script, argv]), file=self._process.stdin, flush=True)
        for line in self._process.stdout:
            if line.startswith("REPLY "):
                timer.cancel()
                reply = json.loads(line.removeprefix("REPLY "))
                # What was written past Python, as by Rust.
                return reply | {"err": reply["err"] + "".join(raw)}
            raw.append(line)
        timer.cancel()
        code = self._process.wait()
        what = f"no answer in {seconds:.0f} s" if code == -9 else f"the process ended, {code}"
        return {"code": what, "out": "".join(raw), "err": "", "megabytes": 0}

    def close(self) -> None:
        self._process.kill()
        self._process.wait()


def serve() -> None:
    """Answer each line, a script and its arguments, with a line."""
    from gptlite.hugging_face import datasets

    datasets.SECONDS = 5
    for line in sys.stdin:
        script, argv = json.loads(line)
        out, err, code = io.StringIO(), io.StringIO(), 0
        before = set(sys.modules)
        with contextlib.ExitStack() as stack:
            stack.enter_context(contextlib.redirect_stdout(out))
            stack.enter_context(contextlib.redirect_stderr(err))
            stack.enter_context(mock.patch.object(sys, "argv", ["gptlite", script, *argv]))
            stack.enter_context(mock.patch.object(sys, "stdin", io.TextIOWrapper(io.BytesIO())))
            try:
                if script in (CHAT, DATASET):
                    del sys.argv[0]
                    runpy.run_module(script, run_name="__main__")
                else:
                    scripts.main()
            except SystemExit as stop:
                code = stop.code or 0
            except BaseException:
                code = "an exception"
                err.write(traceback.format_exc())
        for name in {"x"} & (set(sys.modules) - before):
            del sys.modules[name]
        reply = {"code": code, "out": out.getvalue(), "err": err.getvalue(), "megabytes": peak()}
        print(f"\nREPLY {json.dumps(reply)}", flush=True)


def peak() -> int:
    """The most memory that this process has had, in megabytes."""
    status = Path("/proc/self/status")
    if not status.exists():
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 2**20
    # Linux, where `getrusage` begins with the memory of the parent process.
    _, rest = status.read_text().split("VmHWM:")
    return int(rest.split()[0]) // 1024


if __name__ == "__main__":
    serve()

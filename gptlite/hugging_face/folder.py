"""Folders in Hugging Face's format: imported as a run, and exported from one."""

import os
from pathlib import Path
from typing import Any

import numpy as np
import safetensors
import safetensors.numpy

from gptlite.config import Config, DataConfig, ModelConfig
from gptlite.errors import UserError, require, told
from gptlite.hugging_face.architectures import (
    Family,
    Names,
    export_arrays,
    from_hf_config,
    import_arrays,
    text_fields,
    to_hf_config,
    vocab_size_of,
)
from gptlite.hugging_face.hub import INDEX, fetch, find_folder
from gptlite.hugging_face.tokenizer import read_fields, read_hf_tokenizer, to_hf_tokenizer
from gptlite.machine.files import behind_links, open_regular, write_atomically, write_json
from gptlite.machine.printed import CONTROL
from gptlite.runs.model import abstract_model
from gptlite.runs.run import Run
from gptlite.runs.weights import fill, named_arrays, named_leaves, require_room
from gptlite.text.tokenizer import Tokenizer, as_ids

WEIGHTS = "model.safetensors"
# Formats of the numbers that are read.
KINDS = ("F16", "BF16", "F32", "F64")
# Bytes of the head of a file, which names its tensors. That of a model of 100 layers has 100,000.
MAX_HEAD = 2**23
# Buffers in files of some versions of transformers that are no parameters.
BUFFERS = (".attn.bias", ".attn.masked_bias", ".rotary_emb.inv_freq")


def load_hf(name: str) -> Run:
    """The model in a folder in Hugging Face's format, or of that name on the hub, with its config
    and tokenizer. Weights are in float32, whatever they are stored in.

    **Raises:** `UserError` if it cannot be read or fetched, or has what gptlite does not have.
    """
    folder = find_folder(name)
    fields = _config(folder)
    model, vocab_size = from_hf_config(fields), vocab_size_of(fields)
    tokenizer = load_hf_tokenizer(folder)
    abstract = abstract_model(model, tokenizer)
    require_room(str(folder), abstract)
    wanted = named_leaves(abstract)
    names = Names(model, fields["model_type"], wanted)
    if folder != Path(os.path.expanduser(name)):
        fetch(name, _weight_files(folder), folder.name)
    files = _Tensors(folder, names.family)
    arrays = import_arrays(names, wanted, files.get)
    files.end(dict(export_arrays(names, arrays, vocab_size)))
    config = Config(model=model, data=DataConfig(tokenizer=f"hf:{name}"))
    return Run(folder, config, tokenizer, fill(abstract, arrays, f"The weights of {name}"))


def export_run(run: Run, folder: Path | str) -> None:
    """Write the model and the tokenizer of `run` to a new folder, as `AutoModelForCausalLM` and
    `AutoTokenizer` of `transformers` load them.

    **Raises:** `UserError`, before anything is written, if no architecture can express the model,
    or the folder is not empty.
    """
    folder, vocab_size = Path(folder), run.model.vocab_size
    fields = to_hf_config(run.config.model, vocab_size)
    ours = named_arrays(run.model)
    names = Names(run.config.model, fields["model_type"], ours)
    tokenizer = to_hf_tokenizer(run.tokenizer)
    ends = [run.tokenizer.decode(as_ids([i])) for i in run.tokenizer.end_ids]
    arrays = dict(export_arrays(names, ours, vocab_size))
    try:
        folder.mkdir(parents=True, exist_ok=True)
        require(not any(folder.iterdir()), f"{folder} is not empty: give a new folder.")
        write_json(folder / "config.json", fields)
        write_json(
            folder / "generation_config.json",
            {"do_sample": True, "eos_token_id": list(run.tokenizer.end_ids) or None},
        )
        write_atomically(folder / "tokenizer.json", tokenizer)
        write_json(
            folder / "tokenizer_config.json",
            {
                # Others would make a tokenizer of their own from the model's type.
                "tokenizer_class": "PreTrainedTokenizerFast",
                "clean_up_tokenization_spaces": False,
                "model_max_length": run.config.model.context_length,
                "eos_token": next(filter(None, ends), None),
            },
        )
        content = safetensors.numpy.save(arrays, {"format": "pt"})
        write_atomically(folder / "model.safetensors", content)
    except OSError as error:
        raise UserError(f"{folder} cannot be written: {error}.") from error


def load_hf_tokenizer(folder: Path) -> Tokenizer:
    """The tokenizer of the model in `folder`, for all ids that the model has.

    **Raises:** `UserError` as `load_hf` does.
    """
    fields = _config(folder)
    vocab_size = vocab_size_of(fields)
    return read_hf_tokenizer(folder, vocab_size, _end_ids(folder, fields, vocab_size))


def load_hf_config(folder: Path) -> ModelConfig:
    """The config of the model in `folder`.

    **Raises:** `UserError` as `load_hf` does.
    """
    return from_hf_config(_config(folder))


def _config(folder: Path) -> dict[str, Any]:
    return dict(text_fields(read_fields(folder / "config.json")))


def _end_ids(folder: Path, fields: dict[str, Any], vocab_size: int) -> list[int]:
    """The ids that end a text: `eos_token_id` is an id, several, or none."""
    path = folder / "generation_config.json"
    value = (read_fields(path) if path.exists() else fields).get("eos_token_id")
    ids = value if isinstance(value, list) else [] if value is None else [value]
    right = all(type(i) is int and i >= 0 for i in ids)
    require(right, f"The model's eos_token_id must be ids, got {str(value)[:100]!r}.")
    # Defaults of another vocabulary are never generated.
    return [i for i in ids if i < vocab_size]


def _weight_files(folder: Path) -> list[str]:
    """The names of the files that hold the tensors.

    **Raises:** `UserError` if the index of several files is not right.
    """
    if os.path.lexists(folder / WEIGHTS) or not (folder / INDEX).exists():
        return [WEIGHTS]
    files = read_fields(folder / INDEX).get("weight_map")
    right = isinstance(files, dict) and all(
        isinstance(file, str)
        and file == Path(file).name
        and file.endswith(".safetensors")
        and not CONTROL.search(file)
        for file in files.values()
    )
    require(right, f"The weight_map in {folder / INDEX} must be of names to .safetensors files.")
    return sorted(set(files.values())) if isinstance(files, dict) else []


class _Tensors:
    """The tensors in the files of a model."""

    def __init__(self, folder: Path, family: Family):
        self._folder, self._passed = folder, family.passed
        # Of the names, where a file has the head too.
        self._prefix = family.layers.partition(".")[0]
        try:
            self._files: dict[str, Any] = {}
            for name in _weight_files(folder):
                path = behind_links(folder / name)
                with open_regular(path) as file:
                    head = int.from_bytes(file.read(8), "little")
                if head > MAX_HEAD:
                    raise OSError(f"its head has {head:,} bytes, at most {MAX_HEAD:,} are expected")
                with told(f"The weights {path} cannot be read (only the safetensors format is)"):
                    tensors: Any = safetensors.safe_open(path, "numpy")
                    self._files |= dict.fromkeys(tensors.keys(), tensors)
        except OSError as error:
            raise UserError(
                f"The weights in {folder} cannot be read: {error}. (Only the safetensors format is "
                "read.)"
            ) from error
        self._left = set(self._files)

    def get(self, name: str, shape: tuple[int, ...]) -> np.ndarray:
        """A tensor, which must have that shape. A model without a head's name in front is found,
        too, and a language model among others."""
        bare = name.removeprefix(f"{self._prefix}.")
        names = (name, bare, f"{self._prefix}.language_model.{bare}")
        stored = next((x for x in names if x in self._files), None)
        if stored is None:
            raise UserError(f"The weights in {self._folder} lack {name}.")
        self._left.discard(stored)
        where = f"{stored} in {self._folder}"
        with told(f"{where} cannot be read"):
            found = self._files[stored].get_slice(stored)
            kind, given = found.get_dtype(), tuple(found.get_shape())
        # Before its numbers, of which there may be any number.
        require(
            kind in KINDS, f"{where} has numbers of the kind {kind}: {', '.join(KINDS)} are read."
        )
        require(
            given == shape,
            f"{where} has the shape {list(given)}, and the config calls for {list(shape)}.",
        )
        with told(f"{where} cannot be read"):
            return np.asarray(self._files[stored].get_tensor(stored))

    def end(self, known: dict[str, np.ndarray]) -> None:
        """**Raises:** `UserError` if a tensor is left that the model has no place for, and that is
        not what the model without it computes with."""
        for name in sorted(self._left):
            if name.endswith(BUFFERS) or name.startswith(self._passed):
                continue
            full = name if name in known else f"{self._prefix}.{name}"
            # A tied head may be stored, too.
            tables = ("model.embed_tokens.weight", "transformer.wte.weight")
            twins = [full, *(tables if name == "lm_head.weight" else ())]
            require(
                any(
                    np.array_equal(self.get(name, known[twin].shape), known[twin])
                    for twin in twins
                    if twin in known
                ),
                f"The weights in {self._folder} hold {name}, which gptlite has no place for.",
            )

"""gptlite: a small language model package in Equinox.

    text -> tokens -> batches -> model -> loss -> update -> checkpoint -> generated text

Every public function's shapes are annotated with jaxtyping; the import hook below has
beartype check them while JAX traces, so a wrong shape is an error that names the function,
the argument and the axes, and costs nothing once compiled.
"""

import importlib
from typing import TYPE_CHECKING

import jaxtyping as _jaxtyping

from gptlite import typecheck as typecheck

# gptlite.config is left out: it speaks in sentences of its own, and must import at once.
_jaxtyping.install_import_hook(
    [f"gptlite.{room}" for room in ("text", "nn", "models", "training", "generation", "research")],
    "gptlite.typecheck.typechecker",
)

if TYPE_CHECKING:
    from gptlite.config import (
        Config,
        ModelConfig,
        OptimizerConfig,
        SamplingConfig,
        TrainingConfig,
        UserError,
    )
    from gptlite.custom import load_custom
    from gptlite.generation.generate import generate
    from gptlite.generation.translate import beam_search, greedy_search
    from gptlite.models.encoder import Encoder
    from gptlite.models.gpt import GPT
    from gptlite.models.seq2seq import Seq2Seq
    from gptlite.models.summary import summary
    from gptlite.models.watch import attention_maps
    from gptlite.research.check_block import check_block
    from gptlite.runs.load import load_run
    from gptlite.sharding import make_mesh
    from gptlite.text.batches import Batches
    from gptlite.text.corpus import load_corpus
    from gptlite.text.tokenizer import make_tokenizer
    from gptlite.text.tokens import split_corpus
    from gptlite.training.evaluate import Evaluation
    from gptlite.training.fit import fit
    from gptlite.training.step import TrainSteps
    from gptlite.training.train import train

_HOMES = {
    "Batches": "text.batches",
    "Config": "config",
    "Encoder": "models.encoder",
    "Evaluation": "training.evaluate",
    "GPT": "models.gpt",
    "ModelConfig": "config",
    "OptimizerConfig": "config",
    "SamplingConfig": "config",
    "Seq2Seq": "models.seq2seq",
    "TrainSteps": "training.step",
    "TrainingConfig": "config",
    "UserError": "config",
    "attention_maps": "models.watch",
    "beam_search": "generation.translate",
    "check_block": "research.check_block",
    "fit": "training.fit",
    "generate": "generation.generate",
    "greedy_search": "generation.translate",
    "load_corpus": "text.corpus",
    "load_custom": "custom",
    "load_run": "runs.load",
    "make_mesh": "sharding",
    "make_tokenizer": "text.tokenizer",
    "split_corpus": "text.tokens",
    "summary": "models.summary",
    "train": "training.train",
}

__all__ = [
    "GPT",
    "Batches",
    "Config",
    "Encoder",
    "Evaluation",
    "ModelConfig",
    "OptimizerConfig",
    "SamplingConfig",
    "Seq2Seq",
    "TrainSteps",
    "TrainingConfig",
    "UserError",
    "attention_maps",
    "beam_search",
    "check_block",
    "fit",
    "generate",
    "greedy_search",
    "load_corpus",
    "load_custom",
    "load_run",
    "make_mesh",
    "make_tokenizer",
    "split_corpus",
    "summary",
    "train",
]


def __getattr__(name: str):
    # Names are imported when first used: `train.py --help` must not wait for JAX.
    if name in _HOMES:
        return getattr(importlib.import_module(f"gptlite.{_HOMES[name]}"), name)
    raise AttributeError(f"module 'gptlite' has no attribute {name!r}")

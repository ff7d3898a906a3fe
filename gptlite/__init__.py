"""gptlite: a small language model package in Equinox.

    text -> tokens -> batches -> model -> loss -> update -> checkpoint -> generated text

All public functions are annotated with shapes. The import hook below makes beartype check them
while JAX traces: an error names function, argument and axes. Compiled programs have no checks.
"""

import lazy_loader

from gptlite.machine import typecheck as typecheck

# Not gptlite.config: it has its own error messages, and must import quickly. Not what is called for
# every token or document outside of compiled programs: a check takes 25 microseconds.
typecheck.CheckedModules(
    [
        f"gptlite.{package}"
        for package in (
            *("text.batches", "text.tokenizer", "nn", "models", "inspect", "training", "family"),
            *("generation.generate", "generation.sampling", "research", "text.tokens"),
            *("runs.frozen", "runs.model", "runs.tokenizers", "hugging_face.folder"),
        )
    ]
)

__version__ = "0.2.0"

# The names are listed in __init__.pyi, and imported on first use: `--help` must not wait for JAX.
__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)

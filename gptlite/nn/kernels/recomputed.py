"""Memory for time: a module whose gradient computes it once more. The reference: the module itself.

(Chen et al., 2016, "Training deep nets with sublinear memory cost"; what it saves and costs:
docs/scale.md.)
"""

from typing import Any

import equinox as eqx


class Recomputed(eqx.Module):
    """A module that keeps nothing for its gradient but its inputs."""

    wrapped: Any

    def __call__(self, *inputs: Any, **options: Any) -> Any:
        def run(module, *inputs, **options):
            return module(*inputs, **options)

        return eqx.filter_checkpoint(run, prevent_cse=False)(self.wrapped, *inputs, **options)

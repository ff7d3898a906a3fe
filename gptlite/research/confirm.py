"""The verdict on the validation text, by seeds that nothing was trained from before."""

from collections.abc import Sequence

from gptlite.config import Config
from gptlite.custom import with_custom
from gptlite.errors import UserError
from gptlite.research.comparison import Comparison
from gptlite.research.conduct import show
from gptlite.research.ledger import Confirmed, Confirming, Ledger, Variant
from gptlite.runs.saved_config import config_of, with_corpus


def recalled(
    ledger: Ledger, name: str, custom: Sequence[str], corpus: str | None
) -> tuple[Variant, dict[str, Config]]:
    """The newest variant of a name, and the configs of its base and of itself, by name.

    **Raises:** `UserError` if there is none, or its custom blocks or its text are not named: a
    ledger may come from a stranger.
    """
    variants = {v.variant: v for v in ledger.of(Variant)}
    found = [v for v in variants.values() if v.name == name and v.base in variants and v.level]
    if not found:
        names = dict.fromkeys(v.name for v in variants.values() if v.level is not None)
        has = f"it has {', '.join(names)}" if names else "it has none"
        raise UserError(f"{ledger.path} has no variant {name}: {has}.")
    variant = found[-1]
    configs = {}
    for entry in (variants[str(variant.base)], variant):
        try:
            config = config_of(entry.config)
        except (KeyError, TypeError) as error:
            raise UserError(f"{ledger.path} has no config of {entry.name}: {error}.") from error
        config = with_custom(config, custom, read=True)
        configs[entry.name] = with_corpus(config, corpus, f"The comparison {ledger.path.parent}")
    return variant, configs


def train_and_confirm(
    comparison: Comparison, name: str, n_seeds: int, at_once: int | None
) -> tuple[Confirming, Confirmed]:
    """Train the base and the variant `name`, the two that were entered, and judge the variant.

    **Raises:** `UserError` as `Comparison.begin_to_confirm` does.
    """
    begun = comparison.begin_to_confirm(name, n_seeds)
    losses = {}
    for each in comparison.names:
        together = min(at_once or n_seeds, comparison.seeds_that_fit(each))
        losses[each] = []
        for i in range(0, n_seeds, together):
            group = begun.seeds[i : i + together]
            training = comparison.train_to_confirm(each, group)
            progress = show(each, training, len(group), "validation")
            assert progress is not None
            assert progress.val_losses is not None
            losses[each] += progress.val_losses
    base, _ = comparison.names
    return begun, comparison.confirm(name, begun, losses[name], losses[base])

"""The verdict on the validation text, by seeds that nothing was trained from before."""

from collections.abc import Sequence

from gptlite.config import Config
from gptlite.custom import with_custom
from gptlite.errors import UserError, require
from gptlite.machine.progress import log
from gptlite.research.comparison import Comparison
from gptlite.research.conduct import show
from gptlite.research.ledger import Confirmed, Confirming, Ledger, Variant
from gptlite.research.report import told
from gptlite.runs.saved_config import config_of, with_corpus


def recalled(
    ledger: Ledger, name: str, equal: str, custom: Sequence[str], corpus: str | None
) -> tuple[Variant, dict[str, Config]]:
    """The newest variant of a name, with what is `equal` (or `any`), and the configs of its base,
    of its twin if it has one, and of itself, by name.

    **Raises:** `UserError` if there is none, it is not clear what is to be equal, or its custom
    blocks or its text are not named: a ledger may come from a stranger.
    """
    judged = [v for v in ledger.variants.values() if v.level is not None]
    same = [v for v in judged if v.name == name]
    found = [v for v in same if equal in ("any", v.equal)]
    if not found:
        names = ", ".join(dict.fromkeys(f"{v.name} (equal {v.equal})" for v in judged)) or "none"
        raise UserError(f"{ledger.path} has no variant {name}: it has {names}.")
    variant = found[-1]
    kinds = {str(v.equal) for v in found if v.base == variant.base}
    require(
        len(kinds) == 1,
        f"{name} was tried with equal {', equal '.join(sorted(kinds))}: --equal says which.",
    )
    variants = ledger.variants
    configs = {}
    twin = [variants[variant.twin]] if variant.twin else []
    for entry in (variants[str(variant.base)], *twin, variant):
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
    base, result = comparison.names[0], comparison.result(name)
    log(
        f"{name} against {base}, equal {result.variant.equal}, {result.steps} steps, tried with "
        f"{len(result.curves)} seeds: {told(result)}"
    )
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
    return begun, comparison.confirm(name, begun, losses)

"""The verdict on the validation text, by seeds that nothing was trained from before."""

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from gptlite.config import Config
from gptlite.custom import with_custom
from gptlite.errors import UserError, require
from gptlite.machine.progress import log
from gptlite.research.comparison import Comparison
from gptlite.research.conduct import show
from gptlite.research.ledger import Confirmed, Confirming, Ledger, Variant
from gptlite.research.report import told
from gptlite.runs.saved_config import config_of, with_corpus


@dataclass(frozen=True)
class Recalled:
    """A variant in a ledger, with the configs of its base, of its twin if it has one, and of
    itself."""

    variant: Variant
    base: tuple[str, Config]
    twin: tuple[str, Config] | None
    config: Config

    @property
    def configs(self) -> list[Config]:
        """All of them."""
        return [self.base[1], *([self.twin[1]] if self.twin else []), self.config]


def recalled(
    ledger: Ledger,
    name: str,
    custom: Sequence[str],
    corpus: str | None,
    load: Callable[[Config], Config],
) -> list[Recalled]:
    """The variants of a name, or the one of a checksum, the newest first, with configs to which
    `load` was applied. Those of which that cannot be done are left out, if any is left.

    **Raises:** `UserError` if there is none, or its custom blocks or its text are not named: a
    ledger may come from a stranger.
    """
    judged = [v for v in ledger.variants.values() if v.level is not None]
    wanted = name.replace("-", "_")  # --vary takes both
    found = [v for v in reversed(judged) if wanted in (v.name.replace("-", "_"), v.variant)]
    if not found:
        names = ", ".join(dict.fromkeys(v.name for v in judged)) or "none"
        raise UserError(f"{ledger.path} has no variant {name}: it has {names}.")

    def config(entry: Variant) -> Config:
        try:
            config = config_of(entry.config)
        except (KeyError, TypeError) as error:
            raise UserError(f"{ledger.path} has no config of {entry.name}: {error}.") from error
        config = with_custom(config, custom, read=True)
        return load(with_corpus(config, corpus, f"The comparison {ledger.path.parent}"))

    def named(checksum: str | None) -> tuple[str, Config]:
        entry = ledger.variants[str(checksum)]
        return entry.name, config(entry)

    kept, errors = [], []
    for v in found:
        try:
            twin = named(v.twin) if v.twin else None
            kept.append(Recalled(v, named(v.base), twin, config(v)))
        except UserError as error:
            errors.append(error)
    if not kept:
        raise errors[0]
    return kept


def enter_one(comparison: Comparison, candidates: Sequence[Recalled]) -> Variant:
    """Enter the one of `candidates`, of one name, that is now as it was when it was tried.

    **Raises:** `UserError` if none is, or several are: beside several bases, for example.
    """
    same, errors = [], []
    for one in candidates:
        try:
            _enter(comparison, one)
            same.append(one)
        except UserError as error:
            errors.append(error)
    if not same:
        raise errors[0]
    settings = [_settings(one) for one in same]
    names = dict.fromkeys(name for each in settings for name in each)
    differ = [name for name in names if len({str(each.get(name)) for each in settings}) > 1]
    several = ", ".join(
        f"{one.variant.variant} ({', '.join(f'{n} {x[n]}' for n in differ if n in x)})"
        for one, x in zip(same, settings, strict=True)
    )
    require(
        len(same) == 1,
        f"{same[0].variant.name} was tried in several ways. Name one by its checksum: {several}.",
    )
    _enter(comparison, same[0])
    return same[0].variant


def _settings(one: Recalled) -> dict[str, Any]:
    """What may differ between variants of one name."""
    found = {}
    for whose, config in (("", one.config), ("the base's ", one.base[1])):
        for section in ("model", "optimizer", "training"):
            for field, value in dataclasses.asdict(getattr(config, section)).items():
                found[f"{whose}{section}.{field}"] = value
    # What both have is told once.
    found = {
        name: value
        for name, value in found.items()
        if not name.startswith("the base's ") or found[name.removeprefix("the base's ")] != value
    } | {"equal": one.variant.equal, "tuned": one.twin is not None}
    return found


def _enter(comparison: Comparison, one: Recalled) -> None:
    variant, (base_name, base) = one.variant, one.base
    twins = {variant.name: one.twin} if one.twin else {}
    configs = {base_name: base, variant.name: one.config}
    comparison.enter(
        configs, variant.equal or "steps", again=False, twins=twins, known=variant.variant
    )


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

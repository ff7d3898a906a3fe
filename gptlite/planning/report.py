"""What a ladder has shown, in words and tables."""

from gptlite.planning.forecast import Laws, best_parameters
from gptlite.planning.journal import Sealed, Trained
from gptlite.planning.ladder import Ladder
from gptlite.planning.recipe import Rung

# The compute of the table's rows, over that of the largest rung.
MULTIPLES = (0.1, 1, 10, 100)


def sizes(ladder: Ladder, laws: Laws) -> str:
    """The law, and the best size for some compute."""
    law, unique = laws.law, ladder.unique
    trained = list(ladder.journal.of(Trained))
    most = max(x.parameters * x.tokens for x in trained)
    speed = most / max(1e-3, max(x.seconds for x in trained if x.parameters * x.tokens == most))
    lines = [
        f"loss = {law.floor:.3f} + {law.a:.3g} / parameters^{law.alpha:.3f} + {law.b:.3g} / "
        f"tokens^{law.beta:.3f}",
        f"of {len(trained)} rungs; a run is {100 * laws.noise:.2f} % off it",
        "",
        f"{'compute':>9} {'minutes':>8} {'parameters':>11} {'tokens':>14} {'loss':>7}  interval",
    ]
    for multiple in MULTIPLES:
        operations = 6 * multiple * most
        n = best_parameters(law, operations, unique)
        tokens = operations / (6 * n)
        x = laws.forecast(n, tokens, unique)
        lines.append(
            f"{operations:9.1e} {multiple * most / speed / 60:8.1f} {n:11,.0f} {tokens:14,.0f} "
            f"{x.loss:7.4f}  {x.low:.4f} to {x.high:.4f}"
        )
    return "\n".join(lines)


def told(ladder: Ladder, sealed: Sealed, name: str) -> str:
    """The forecast that waits, and how it is opened."""
    minutes = ladder.seconds_of(Rung(sealed.n_layers, sealed.d_model, sealed.asked)) / 60
    return (
        f"forecast: {sealed.n_layers} layers of width {sealed.d_model} reach "
        f"{sealed.loss:.4f} nats per token ({sealed.low:.4f} to {sealed.high:.4f}) after "
        f"{sealed.asked:,} tokens\n"
        f"to train this model, about {minutes:.0f} min, and judge the forecast:\n"
        f"    gptlite forecast open {name}"
    )

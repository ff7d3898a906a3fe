"""Train a language model: `python train.py [PRESET] [--section.field value ...]`.

The story of a run: text, tokens, model, training, and what is kept of it.
"""

import math
import shlex
import sys
import time
from pathlib import Path

from gptlite.cli import TrainArguments, errors_as_sentences, parse_train


def main() -> None:
    with errors_as_sentences():
        train(parse_train(sys.argv[1:]))


def train(arguments: TrainArguments) -> None:
    start = time.perf_counter()
    # Imported here, because --help should not wait for JAX.
    import equinox as eqx
    import jax
    import jax.numpy as jnp

    from gptlite.config import SamplingConfig, UserError, resolve_corpus
    from gptlite.generation.generate import generate
    from gptlite.models.gpt import GPT
    from gptlite.models.summary import count_parameters, summary
    from gptlite.runtime import set_up_jax
    from gptlite.text.batches import split_corpus
    from gptlite.text.corpus import load_corpus
    from gptlite.text.tokenizer import decode, make_tokenizer
    from gptlite.training.evaluate import bits_per_byte
    from gptlite.training.loop import fit
    from gptlite.training.report import Display, plot_losses
    from gptlite.training.run import RUNS_FOLDER, RunFolder, check_free

    training = arguments.config.training
    name = arguments.run
    if name is None:
        name = f"{arguments.preset}-{time.strftime('%Y%m%d-%H%M%S')}"
    if name in ("", ".", "..") or name != Path(name).name:
        raise UserError(f"--run takes a name for the folder in {RUNS_FOLDER}/, got {name!r}.")
    if not arguments.summary:
        check_free(RUNS_FOLDER / name, overwrite=arguments.overwrite)

    # No more devices than can share a batch evenly.
    set_up_jax(math.gcd(training.cpu_devices, training.batch_size // training.accumulation))

    # Text to tokens.
    corpus = load_corpus(arguments.config.data.corpus)
    config = resolve_corpus(arguments.config, corpus.name)
    tokenizer = make_tokenizer(config.data.tokenizer, corpus.text)
    split = split_corpus(corpus.text, tokenizer)
    print(
        f"{corpus.name}: {len(split.train):,} tokens to train on, {len(split.validation):,} to "
        f"validate on, vocabulary {tokenizer.vocab_size:,}",
        flush=True,
    )

    # The model.
    model_key, sample_key = jax.random.split(jax.random.key(training.seed))

    def make_model(key):
        rows = tokenizer.padded_vocab_size
        return GPT(config.model, tokenizer.vocab_size, padded_vocab_size=rows, key=key)

    if arguments.summary:
        skeleton = eqx.filter_eval_shape(make_model, model_key)
        print(summary(skeleton, batch_size=training.batch_size // training.accumulation))
        return
    # Run once: at the lowest level it is compiled in half the time.
    once = {"xla_backend_optimization_level": 0}
    # (Equinox's annotations leave out what it hands on to jax.jit.)
    draw = eqx.filter_jit(make_model, compiler_options=once)  # pyright: ignore[reportCallIssue]
    model = draw(model_key)
    parameters = count_parameters(model)

    # Training.
    fitting = fit(config, model, split)
    run = RunFolder.create(RUNS_FOLDER / name, config, tokenizer, overwrite=arguments.overwrite)
    print(
        f"{parameters:,} parameters on {jax.device_count()} {jax.default_backend()} device(s); "
        f"run folder {run.path}",
        flush=True,
    )
    display = Display(training.steps)
    history = []
    for progress in fitting:
        sample = ""
        if progress.val_loss is not None:
            best = all(
                progress.val_loss < seen["val_loss"] for seen in history if "val_loss" in seen
            )
            run.save_weights(progress.model, best=best)
            if training.sample_tokens:
                prompt, keys = jnp.asarray(split.validation[None, :1]), sample_key[None]
                ids = generate(
                    progress.model,
                    prompt,
                    training.sample_tokens,
                    SamplingConfig(),
                    keys=keys,
                )
                sample = decode(tokenizer, jax.device_get(ids[0]))
        history.append(progress.record())
        run.log(history[-1])
        display.update(progress, sample)
    display.close()

    # What came of it.
    evaluated = [record["val_loss"] for record in history if "val_loss" in record]
    best_val_loss = min(evaluated)
    last = history[-1]
    plot_losses(run.path / "metrics.jsonl", run.path / "loss.png")
    run.save_result(
        {
            "best_val_loss": best_val_loss,
            "final_val_loss": evaluated[-1],
            "val_bits_per_byte": bits_per_byte(best_val_loss, split),
            "steps": last["step"],
            "tokens": last["tokens"],
            "parameters": parameters,
            "train_seconds": last["seconds"],
            "total_seconds": time.perf_counter() - start,
            "tokens_per_second": last["tokens"] / last["step_seconds"],
            "corpus": corpus.name,
            "corpus_characters": len(corpus.text),
            "corpus_sha256": corpus.sha256,
            "seed": training.seed,
        }
    )
    # A prompt of characters that the tokenizer knows, for the command to type next.
    first_word = (corpus.text.split() or [corpus.text])[0]
    prompt = "ROMEO:" if corpus.name == "shakespeare" else first_word[:8]
    command = ["python", "sample.py", "--run", str(run.path), f"--prompt={prompt}"]
    print(
        f"best validation loss {best_val_loss:.4f} nats a token "
        f"({bits_per_byte(best_val_loss, split):.4f} bits per byte) "
        f"after {time.perf_counter() - start:.0f} s\n"
        f"weights, metrics and curves are in {run.path}; now try\n"
        f"    {shlex.join(command)}"
    )


if __name__ == "__main__":
    main()

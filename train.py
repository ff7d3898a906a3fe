"""Train a language model: `python train.py [PRESET] [--section.field value ...]`.

Text, tokens, model, training, and the run folder.
"""

import dataclasses
import hashlib
import json
import shlex
import sys
import time

from gptlite.cli import TrainArguments, exit_on_error, parse_train, settings
from gptlite.config import parse_lora
from gptlite.machine.processes import (
    check_same,
    count,
    is_first,
    joined,
    largest,
    of_first,
    silence_others,
)


def main() -> None:
    debug = "--debug" in sys.argv
    with exit_on_error(debug):
        arguments = parse_train(sys.argv[1:])
        with joined(arguments.distributed, debug=debug):
            train(arguments)


def train(arguments: TrainArguments) -> None:
    start = time.perf_counter()
    # Imported here, because --help should not wait for JAX.
    import equinox as eqx
    import jax
    import jax.numpy as jnp

    from gptlite.adapters import with_adapters
    from gptlite.custom import custom_arguments, custom_blocks, load_custom
    from gptlite.estimate.hardware import describe
    from gptlite.estimate.largest import largest_step
    from gptlite.estimate.report import report
    from gptlite.estimate.step import compile_step
    from gptlite.generation.generate import generate
    from gptlite.inspect.summary import summary
    from gptlite.machine.memory import require_memory
    from gptlite.machine.progress import log
    from gptlite.machine.pytrees import count_parameters, size_of
    from gptlite.machine.runtime import set_up_jax
    from gptlite.machine.stop import Stop
    from gptlite.runs.display import Display
    from gptlite.runs.find import check_free, find_run, new_run
    from gptlite.runs.folder import RunFolder
    from gptlite.runs.load import load_any
    from gptlite.runs.model import make_model
    from gptlite.runs.plots import losses, save_picture
    from gptlite.runs.tokenizers import load_tokenizer, make_tokenizer
    from gptlite.runs.weights import fill, gather_to_first, named_arrays
    from gptlite.sharding import check_tensor, constrain_parameters, make_mesh, usable_cpu_devices
    from gptlite.text.batches import Batches
    from gptlite.text.corpus import open_corpus
    from gptlite.text.tokenizer import decode
    from gptlite.text.tokens import require_documents, split_corpus
    from gptlite.trackers import Trackers, check_installed
    from gptlite.training.evaluate import Evaluation, bits_per_byte
    from gptlite.training.fit import fit
    from gptlite.training.frozen import frozen_in, trainable
    from gptlite.training.step import TrainSteps

    training, mesh_config = arguments.config.training, arguments.config.mesh
    resuming, trackers = arguments.resume is not None, arguments.log.names
    silence_others()
    check_installed(trackers)
    check_same("settings", settings(arguments))
    if resuming:
        path = find_run(arguments.resume)
    else:
        now = of_first("time", time.strftime("%Y%m%d-%H%M%S"))
        path = new_run(f"{arguments.preset}-{now}" if arguments.run is None else arguments.run)
        if not arguments.summary and arguments.compile_for is None and is_first():
            check_free(path, overwrite=arguments.overwrite)
    hardware = devices = None
    if arguments.compile_for is not None:
        hardware, devices = describe(arguments.compile_for)
    # Two devices of one of several processes may each wait for a thread that the other holds.
    alone = count() == 1 and hardware is None
    set_up_jax(usable_cpu_devices(training, mesh_config) if alone else 1)

    setting_up = time.perf_counter() - start
    with RunFolder(path, ["--log.to", arguments.log.to] if trackers else []) as run:
        if resuming:
            run.open()

        # Text to tokens.
        corpus = open_corpus(arguments.config.data.corpus)
        data = dataclasses.replace(arguments.config.data, corpus=corpus.name)  # not `auto`
        config = dataclasses.replace(arguments.config, data=data)
        source = None
        if resuming:
            tokenizer = load_tokenizer(path)
        elif training.init_from is not None:
            source = load_any(training.init_from, custom=custom_blocks(config.model))
            tokenizer = source.tokenizer
        else:
            tokenizer = make_tokenizer(config.data.tokenizer, corpus)
        if config.model.separate_documents:
            require_documents(corpus, tokenizer)
        split = split_corpus(
            corpus, tokenizer, config.data.validation_tokens, config.data.max_tokens
        )
        written = json.dumps(tokenizer.to_json()).encode()
        tokens = hashlib.sha256(written).hexdigest()
        check_same("corpora", {"the sha256": split.sha256, "the tokenizer's": tokens})
        log(
            f"{corpus.name}: {len(split.train):,} training tokens, {len(split.validation):,} "
            f"validation tokens, vocabulary {tokenizer.vocab_size:,}"
        )

        # The model, without its numbers.
        load_custom(config.model)
        model_key, sample_key = jax.random.split(jax.random.key(training.seed))
        shapes = eqx.filter_eval_shape(make_model, config.model, tokenizer, key=model_key)
        parameters = count_parameters(shapes)

        # The update and the evaluation, on all devices.
        mesh = make_mesh(**vars(mesh_config), devices=devices)
        check_tensor(mesh, config.model)
        context = config.model.context_length

        trained = trainable(config, shapes)

        def make_steps(rows: int) -> TrainSteps:
            rule = dataclasses.replace(training, batch_size=rows)
            return TrainSteps(shapes, config.optimizer, rule, mesh, trainable=trained)

        train_steps = make_steps(training.batch_size)
        if arguments.summary:
            rows = train_steps.rows_at_once(context + 1)
            print(summary(shapes, batch_size=rows, trained=trained))
            return
        if hardware is not None:
            if arguments.fit == "batch":
                step = largest_step(shapes, make_steps, training.batch_size, hardware)
            else:
                step = compile_step(shapes, train_steps)
            print(report(step, hardware))
            return
        rows = train_steps.rows
        batches = Batches(split.train, training.batch_size, context, training.seed, rows)
        evaluate = Evaluation(split.validation, context, mesh)
        skeleton, start_at, checkpoint = train_steps.skeleton(shapes), None, None
        require_memory("The training state", size_of(skeleton))
        if resuming:
            checkpoint = run.find_checkpoint(skeleton, config, split.sha256)
            state, start_at = checkpoint.state, checkpoint.record.position
            check_same("checkpoints", {"the step": str(start_at.step)})
        elif source is not None:
            weights = f"The weights of {training.init_from}"
            given = source.model
            if config.model.lora is not None:
                given = with_adapters(given, parse_lora(config.model.lora), key=model_key)
            state = train_steps.init(fill(shapes, named_arrays(given), weights))
            del source, given
            first_loss = float(evaluate(state.model))
            log(
                f"starting from the weights of {training.init_from}: validation loss "
                f"{first_loss:.4f} nats per token ({bits_per_byte(first_loss, split):.4f} bits per "
                "byte)"
            )
        else:
            # The program runs once. XLA's optimization level 0 halves the time to compile it.
            # (`eqx.filter_jit` passes `compiler_options` to `jax.jit`. Its annotations omit it.)
            draw = eqx.filter_jit(  # pyright: ignore[reportCallIssue]
                lambda key: constrain_parameters(make_model(config.model, tokenizer, key=key)),
                compiler_options={"xla_backend_optimization_level": 0},
            )
            with jax.set_mesh(mesh):
                state = train_steps.init(draw(model_key))
        count_trained = count_parameters(eqx.filter(shapes, trained))
        some = "" if count_trained == parameters else f", of which {count_trained:,} are trained,"
        log(
            f"{parameters:,} parameters{some} on {mesh.size} "
            f"{mesh.devices.flat[0].platform} device(s); "
            f"run folder {path}" + (f", from step {start_at.step}" if start_at else "")
        )
        custom = custom_arguments(config.model)
        if custom:
            log(f"custom blocks: {shlex.join(custom)}")

        # Training. `fit` compiles first, so that a model that cannot be trained changes no files.
        stop, signal = Stop(exits=True), 0
        with stop:  # also while `fit` compiles, where a KeyboardInterrupt may be lost
            frozen = {} if resuming else gather_to_first(state.model, frozen_in(config))
            fitting = fit(state, train_steps, batches, start=start_at)
            if checkpoint is None:
                run.create(
                    config,
                    tokenizer,
                    split.sha256,
                    overwrite=arguments.overwrite,
                    frozen=frozen,
                )
            else:
                run.resume(checkpoint, config)
            del state, checkpoint, frozen  # frees their arrays
            with (
                run.training_errors(tokenizer),
                Display(training.steps, run.steps_done) as display,
                Trackers(trackers, path, config) as track,
            ):
                for progress in fitting:
                    # Read once, so that every stop is saved, and by all processes.
                    signal, save_is_due = largest(stop.signal or 0, run.save_is_due())
                    val_loss = (
                        evaluate.evaluate_or_raise(progress) if progress.evaluation_due else None
                    )
                    if progress.log_due:
                        run.log_metrics(progress, val_loss)
                    if val_loss is not None or signal or save_is_due:
                        run.save(progress)
                    sample = ""
                    if val_loss is not None and training.sample_tokens:
                        prompt, keys = jnp.asarray(split.validation[None, :1]), sample_key[None]
                        ids = generate(progress.model, prompt, training.sample_tokens, keys=keys)
                        sample = decode(tokenizer, jax.device_get(ids[0]))
                    if progress.log_due:
                        display.update(run.last, sample)
                        track(progress.step, run.last | ({"sample": sample} if sample else {}))
                    if signal:
                        break
        if run.steps_done < training.steps:
            log(f"stopped at step {run.steps_done} of {training.steps}. {run.resume_hint()}")
            sys.exit(128 + signal)

        # The result.
        last = run.last
        best_val_loss = run.best.val_loss if run.best else last["val_loss"]
        seconds = run.seconds + setting_up
        run.save_result(
            {
                "best_val_loss": best_val_loss,
                "final_val_loss": last["val_loss"],
                "val_bits_per_byte": bits_per_byte(best_val_loss, split),
                "steps": last["step"],
                "tokens": last["tokens"],
                "parameters": parameters,
                "total_seconds": seconds,
                "tokens_per_second": last["tokens"] / last["step_seconds"],
                "corpus": corpus.name,
                "corpus_characters": split.characters,
                "corpus_sha256": split.sha256,
                "seed": training.seed,
            }
        )
        if not is_first():
            return
        try:
            save_picture(losses(run.curves()), path / "loss.png")
        except OSError as error:
            log(f"the curves could not be drawn: {error}")
    # A prompt of characters that the tokenizer knows, for the suggested command.
    beginning = decode(tokenizer, split.train[:100])
    first_word = (beginning.split() or [beginning])[0]
    prompt = "ROMEO:" if corpus.name == "shakespeare" else first_word[:8]
    command = ["python", "sample.py", "--run", str(path), *custom, f"--prompt={prompt}"]
    log(
        f"best validation loss {best_val_loss:.4f} nats per token "
        f"({bits_per_byte(best_val_loss, split):.4f} bits per byte) "
        f"after {seconds:.0f} s\n"
        f"weights, metrics and curves are in {path}; now try\n"
        f"    {shlex.join(command)}"
    )


if __name__ == "__main__":
    main()

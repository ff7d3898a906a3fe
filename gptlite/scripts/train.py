"""Train a language model: `python train.py [PRESET] [--section.field value ...]`."""

import gptlite as gl


def train(arguments: gl.TrainArguments) -> None:
    with gl.start_run(arguments) as run:  # new, resumed, or begun from other weights
        config, training = run.config, run.config.training
        context_length = config.model.context_length

        # Model: the shapes of its arrays, and which of them are trained.
        model = gl.abstract_model(config.model, run.tokenizer)
        trained = gl.trainable(config, model)

        # Text: ids for training, and for validation.
        data = config.data
        split = gl.split_corpus(run.corpus, run.tokenizer, data.validation_tokens, data.max_tokens)

        # Update: from a batch to new parameters, on all devices. (Each of several processes reads
        # its own rows of a batch.)
        mesh = gl.make_mesh(**vars(config.mesh))
        steps = gl.TrainSteps(model, config.optimizer, training, mesh, trainable=trained)
        batches = gl.Batches(
            split.train, training.batch_size, context_length, training.seed, steps.rows
        )
        evaluate = gl.Evaluation(split.validation, context_length, mesh)
        state = run.state(steps, model, split)  # drawn from the seed, loaded, or restored
        steps.compile(state, batches(run.position.step))
        run.create_folder(state, split)  # now: a model that cannot be trained has changed no file

        # Loop: after every few steps, log, save, or stop.
        for progress in gl.fit(state, steps, batches, start=run.position):
            stop, save = run.requests(progress)
            if progress.log_due:
                run.log(progress, evaluate.after(progress) if progress.evaluation_due else None)
            if progress.evaluation_due or save or stop:
                run.save(progress)
            if progress.evaluation_due and training.sample_tokens:
                prompt = split.validation[None, :1]
                key, new_tokens = run.sample_key, training.sample_tokens
                ids = gl.generate(progress.model, prompt, new_tokens, key=key)
                run.show_sample(run.tokenizer.decode(ids[0]))
            if stop:
                break
        run.finish(split)


def main() -> None:
    gl.run_script(train, gl.parse_train)

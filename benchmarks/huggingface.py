"""The peer: Hugging Face's GPT2LMHeadModel on PyTorch, in the shapes of `common.make_shape`."""

import sys
from types import SimpleNamespace
from typing import Any

from common import Round, Shape, timed


def make_model(shape: Shape) -> Any:
    """GPT-2 of that shape, without dropout."""
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=shape.vocab_size,
        n_positions=shape.model.context_length,
        n_embd=shape.model.d_model,
        n_layer=shape.model.n_layers,
        n_head=shape.model.n_heads,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=0,
        eos_token_id=None,
    )
    model = GPT2LMHeadModel(config)
    model.loss_type = "ForCausalLM"  # what it takes anyway, after a warning
    return model


def make_train_round(
    shape: Shape, dtype: str, steps: int, compiled: bool = False, device: str = "cpu"
) -> Round:
    """A training step as Hugging Face's Trainer does it, without the key/value cache and with AdamW
    in its fused form."""
    import torch

    model = make_model(shape).train().to(device)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=1e-3, betas=(0.9, 0.99), weight_decay=0.1, fused=True
    )
    if compiled:
        model = torch.compile(model)
    size = (shape.batch_size, shape.model.context_length)
    ids = torch.randint(0, shape.vocab_size, size, device=device)

    def step():
        with torch.autocast(device, torch.bfloat16, enabled=dtype == "bfloat16"):
            loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return lambda: timed(step, steps, torch.cuda.synchronize if device == "cuda" else None)


def make_sample_round(shape: Shape, batch_size: int, new_tokens: int, repeats: int) -> Round:
    """`generate` with its cache, top-k 50."""
    import torch

    model = make_model(shape).train(False)
    prompt = torch.zeros((batch_size, 1), dtype=torch.long)

    def sample():
        made = model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=new_tokens,
            min_new_tokens=new_tokens,
            do_sample=True,
            top_k=50,
            pad_token_id=0,
        )
        assert made.shape == (batch_size, 1 + new_tokens)

    return lambda: timed(sample, repeats)


if __name__ == "__main__":
    # For startup.py: the first step, or the first tokens, of a process of its own.
    # The shape S again, because to look it up would import gptlite.
    s: Any = SimpleNamespace(
        model=SimpleNamespace(n_layers=4, n_heads=4, d_model=128, context_length=64),
        batch_size=12,
        vocab_size=65,
    )
    if sys.argv[1] == "train":
        make_train_round(s, "float32", 1)()
    else:
        make_sample_round(s, 1, 1, 1)()
    print("done", flush=True)

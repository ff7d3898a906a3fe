"""The peer: GPT-2 in plain PyTorch, as its users write it today (after nanoGPT's model), in the
shapes of `common.make_shape`. `torch.compile` needs a C++ compiler."""

from typing import Any

import torch
from common import Round, Shape, timed
from torch import nn
from torch.nn import functional


class Attention(nn.Module):
    def __init__(self, d_model: int, n_heads: int):
        super().__init__()
        self.n_heads = n_heads
        self.qkv = nn.Linear(d_model, 3 * d_model)
        self.out = nn.Linear(d_model, d_model)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, seq, d_model = x.shape
        q, k, v = (
            part.view(batch, seq, self.n_heads, -1).transpose(1, 2)
            for part in self.qkv(x).split(d_model, dim=2)
        )
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(batch, seq, d_model))


class Block(nn.Module):
    def __init__(self, d_model: int, n_heads: int):
        super().__init__()
        self.attention_norm = nn.LayerNorm(d_model)
        self.attention = Attention(d_model, n_heads)
        self.mlp_norm = nn.LayerNorm(d_model)
        self.mlp = nn.Sequential(
            nn.Linear(d_model, 4 * d_model),
            nn.GELU(approximate="tanh"),
            nn.Linear(4 * d_model, d_model),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))


class GPT(nn.Module):
    def __init__(self, shape: Shape):
        super().__init__()
        model = shape.model
        self.embedding = nn.Embedding(shape.vocab_size, model.d_model)
        self.positions = nn.Embedding(model.context_length, model.d_model)
        self.blocks = nn.ModuleList(
            Block(model.d_model, model.n_heads) for _ in range(model.n_layers)
        )
        self.norm = nn.LayerNorm(model.d_model)
        self.head = nn.Linear(model.d_model, shape.vocab_size, bias=False)
        self.head.weight = self.embedding.weight
        nn.init.normal_(self.embedding.weight, std=0.02)

    def forward(self, ids: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.embedding(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        return functional.cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten())


def make_train_round(
    shape: Shape, dtype: str, accumulation: int, steps: int, compiled: bool, device: str = "cpu"
) -> Round:
    """A training step: AdamW in its fused form, the gradient in `accumulation` parts, `bfloat16` by
    autocast."""
    torch.manual_seed(0)
    model: Any = GPT(shape).train().to(device)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=1e-3, betas=(0.9, 0.99), weight_decay=0.1, fused=True
    )
    if compiled:
        model = torch.compile(model)
    size = (shape.batch_size, shape.model.context_length + 1)
    windows = torch.randint(0, shape.vocab_size, size, device=device)

    def step():
        for part in windows.chunk(accumulation):
            with torch.autocast(device, torch.bfloat16, enabled=dtype == "bfloat16"):
                loss = model(part[:, :-1], part[:, 1:])
            (loss / accumulation).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return lambda: timed(step, steps, torch.cuda.synchronize if device == "cuda" else None)

"""The Python side of bench_python_overhead: answers each line of its input ("plain", "engine") with the seconds that one
window took. Arguments: vocabulary layers width sequence batch."""

import sys
import time

import torch

import ballast

vocabulary, layers, width, sequence, batch = map(int, sys.argv[1:6])


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = torch.nn.LayerNorm(width)
        self.up = torch.nn.Linear(width, 4 * width)
        self.down = torch.nn.Linear(4 * width, width)

    def forward(self, x):
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embedding = torch.nn.Embedding(vocabulary, width)
        self.blocks = torch.nn.ModuleList(Block() for _ in range(layers))
        self.head = torch.nn.Linear(width, vocabulary)

    def forward(self, tokens, targets):
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return torch.nn.functional.cross_entropy(self.head(x).flatten(0, 1), targets.flatten())


plain, model = Net(), Net()
optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-4, weight_decay=0.1, fused=True)
config = {
    "train_micro_batch_size_per_gpu": batch,
    "steps_per_print": 0,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "weight_decay": 0.1}},
}
engine = ballast.initialize(model=model, config=config, device="cpu")[0]
torch.manual_seed(1)
data = torch.randint(vocabulary, (batch, sequence + 1))
tokens, targets = data[:, :-1].contiguous(), data[:, 1:].contiguous()


def plain_window():
    loss = plain(tokens, targets)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def engine_window():
    loss = engine(tokens, targets)
    engine.backward(loss)
    engine.step()
    return loss.item()


windows = {"plain": plain_window, "engine": engine_window}
for line in sys.stdin:
    begin = time.perf_counter()
    loss = windows[line.strip()]()
    print(time.perf_counter() - begin, loss, flush=True)

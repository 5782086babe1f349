"""Models whose gradients a test chooses, and one that has every awkward kind of parameter."""

import torch
from device import seeded


class Lin(torch.nn.Module):
    """Parameters without arithmetic of their own: a test decides which of them a loss uses and what gradient each gets.
    Dots in a name make child modules, each a unit of its own."""

    def put(self, name, parameter):
        path, _, leaf = name.rpartition(".")
        owner = self
        for part in path.split(".") if path else ():
            if part not in owner._modules:
                owner.add_module(part, torch.nn.Module())
            owner = owner._modules[part]
        owner.register_parameter(leaf, parameter)

    def forward(self, pull):
        """sum(coefficient * parameter) over what is named: each element's gradient is its coefficient, exactly. A
        number alone is meant for "p"."""
        pull = {"p": pull} if isinstance(pull, (int, float, torch.Tensor)) else pull
        loss = 0
        for name, coefficient in pull.items():
            for one in coefficient if isinstance(coefficient, tuple) else (coefficient,):
                parameter = self.get_parameter(name)
                factor = torch.as_tensor(one, dtype=parameter.dtype)
                loss = loss + (parameter * factor.expand(parameter.shape)).sum()
        return loss


def lin(shapes, start=0.0, frozen=(), ties=()):
    """shapes: {name: shape}, or the length of the one parameter "p". ties: (existing name, second name)."""
    model = Lin()
    for name, shape in ({"p": (shapes,)} if isinstance(shapes, int) else shapes).items():
        value = start[name] if isinstance(start, dict) else start
        model.put(name, torch.nn.Parameter(torch.full(shape, float(value)), requires_grad=name not in frozen))
    for existing, second in ties:
        model.put(second, model.get_parameter(existing))
    return model


class Zoo(torch.nn.Module):
    """Every awkward kind of parameter in one small model: odd sizes, a table tied to the output layer, a frozen layer,
    ones that rest in some windows or run on one rank only, one that nothing uses, zero-dimensional and empty ones."""

    LEAF = {"leaf_module": {"names": ["experts"]}}  # for zero_optimization
    _WORDS, _WIDTH, _HIDDEN = 11, 5, 7

    def __init__(self, seed=1):
        super().__init__()
        linear = torch.nn.Linear
        self.embedding = torch.nn.Embedding(self._WORDS, self._WIDTH)
        self.up = torch.nn.ModuleList(linear(self._WIDTH, self._HIDDEN) for _ in range(3))
        self.down = torch.nn.ModuleList(linear(self._HIDDEN, self._WIDTH) for _ in range(3))
        self.frozen = linear(self._WIDTH, self._WIDTH).requires_grad_(False)
        self.experts = torch.nn.Module()
        self.experts.list = torch.nn.ModuleList(linear(self._WIDTH, self._WIDTH) for _ in range(2))
        self.auxiliary = linear(self._WIDTH, self._WIDTH)
        self.unused = linear(3, 2)
        self.head = linear(self._WIDTH, self._WORDS, bias=False)
        self.head.weight = self.embedding.weight
        self.gain = torch.nn.Parameter(torch.ones(()))
        self.nothing = torch.nn.Parameter(torch.zeros(0, 4))
        generator = seeded(seed)
        with torch.no_grad():
            for parameter in self.parameters():
                if parameter is not self.gain:
                    parameter.copy_(torch.rand(parameter.shape, generator=generator) - 0.5)

    def _block(self, i, h):
        return h + self.down[i](torch.tanh(self.up[i](h)))

    def forward(self, step, micro_batch, rank):
        """The loss of one micro-batch, a pure function of the arguments. Expert 1 runs on rank 0 alone and in odd steps
        alone; the auxiliary layer rests in every third step."""
        tokens, target = _sample(step, micro_batch, rank)
        h = self.embedding(tokens)
        for i in range(len(self.up)):
            h = self._block(i, h)
        h = h + self.frozen(h)
        h = h + self.experts.list[int(rank == 0 and step % 2 == 1)](h)
        if step % 3 != 1:
            h = h + self.auxiliary(h)
        out = self.head(h) * self.gain + self.nothing.sum()
        return (out.float() - target).square().mean()

    def backwards_through_blocks(self, step, micro_batch, rank):
        h = self.embedding(_sample(step, micro_batch, rank)[0])
        for i in reversed(range(len(self.up))):
            h = self._block(i, h)
        return h


def _sample(step, micro_batch, rank):
    generator = seeded(step * 10007 + micro_batch * 101 + rank + 1)
    return torch.randint(Zoo._WORDS, (2, 3), generator=generator), torch.rand(2, 3, Zoo._WORDS, generator=generator)

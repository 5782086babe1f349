"""Plays one random schedule of calls on an engine and on the plain model of its meaning, and compares the two.

Every rank draws the same numbers, for all ranks; what one does may differ from the others' wherever the engine allows
it. Gradients are integers, so that what has landed and what is pending can be compared exactly."""

import random
from dataclasses import dataclass, field

import pytest
import torch
from cells import PLACEMENTS, Cell
from expect import expect_equal, expect_near
from models import Lin
from window_model import WindowModel

import ballast

CALLS = 30
# Units (root), a, b, c and the leaf moe; "c.tied" is "a.p" too.
SHAPES = {
    "r": (),
    "a.p": (5,),
    "b.p": (33,),
    "b.q": (2, 3),
    "moe.e0.p": (7,),
    "moe.e1.p": (65,),
    "moe.e2.p": (1,),
    "c.p": (3, 1, 2),
}
TIED = "c.tied"


@dataclass(frozen=True)
class Schedule(Cell):
    seed: int = 0

    def __str__(self):
        return f"seed{self.seed}"


def schedule(seed):
    draw = random.Random(-seed - 1)  # not the numbers of the calls
    stage = draw.randrange(4)
    placement = draw.choice([one for one in PLACEMENTS if stage == 3 or one != "allhost"])
    return Schedule(stage, placement, draw.choice(["fp32", "bf16", "fp16"]), draw.random() < 0.5, seed=seed)


@dataclass
class Term:
    name: str
    coefficient: int
    infinite: bool = False  # in its first element

    def pattern(self, factor=1):
        """c, 2c, 3c, c, ...: no two neighbours are equal, so that a shard in the wrong place shows."""
        shape = SHAPES["a.p" if self.name == TIED else self.name]
        flat = (torch.arange(torch.Size(shape).numel()).remainder(3) + 1).double() * self.coefficient * factor
        if self.infinite:
            flat[0] = torch.inf
        return flat.reshape(shape)


@dataclass
class Graph:
    """A forward that may still run backwards: the terms and how often, a rank."""

    terms: list
    left: list
    loss: torch.Tensor = field(default=None, repr=False)


class Sums(Lin):
    def forward(self, terms):
        loss = 0
        for term in terms:
            p = self.get_parameter(term.name)
            # The second part has the gradient 0 and needs the parameter's value in backward.
            loss = loss + (p * term.pattern().to(p.dtype)).sum() + (p.detach() * p).sum() * 0.0
        return loss


class Player:
    def __init__(self, trial):
        self.trial, self.cell = trial, trial.cell
        self.random = random.Random(self.cell.seed)
        steps, clip = self._draw(1, 4), self.random.choice([0.0, 0.0, 2.0])
        model = Sums()
        for name, shape in SHAPES.items():
            model.put(name, torch.nn.Parameter(torch.zeros(shape)))
        model.put(TIED, model.get_parameter("a.p"))
        changes = {"zero_optimization": self._zero(), "gradient_clipping": clip}
        if self.cell.dtype == "fp16":
            changes["fp16"] = {"loss_scale": 64}  # 64 times the largest coefficient is finite
        self.session = trial.start(model, steps, **changes)
        self.engine = self.session.engine
        start = {name: torch.zeros(shape, dtype=torch.float64) for name, shape in SHAPES.items()}
        self.expected = WindowModel(trial.world, self.cell.managed, steps, clip, start)
        self.graphs = []
        self.scope = None
        self.scaling = "mean"

    def _zero(self):
        choice = self.random.choice
        zero = {
            "overlap_comm": choice([True, False]),
            "reduce_bucket_size": choice([1, 64, 500_000_000]),
            "allgather_bucket_size": choice([1, 64, 500_000_000]),
            "stage3_max_live_parameters": choice([0, 1_000_000]),
            "stage3_prefetch_bucket_size": choice([0, 1_000_000]),
            "stage3_param_persistence_threshold": choice([0, 0, 40]),
            "leaf_module": {"names": ["moe"]},
        }
        if self.cell.placement != "device":
            zero["offload_optimizer"] = {"ratio": choice([1, 1, 0.5, 0.8])}
            if self.random.random() < 0.25:
                zero["offload_gradients"] = {"device": "none"}
        return zero

    def _draw(self, first, end):
        return self.random.randrange(first, end)

    def _chance(self, part):
        return self.random.random() < part

    def play(self):
        calls = (
            (self.forward, 28),
            (self.backward, 30),
            (self.step, 18),
            (self.zero_grad, 3),
            (self.evaluate, 5),
            (self.read_gradient, 7),
            (self.open_or_close_scope, 5),
            (self.set_boundary, 4),
        )
        played = []
        try:
            for call in self.random.choices([call for call, _ in calls], [often for _, often in calls], k=CALLS):
                played.append(call.__name__)
                call()
                expect_equal(self.engine.is_gradient_accumulation_boundary(), self.expected.boundary)
            self.close_scope()
            for name in SHAPES:
                self.compare_gradient(name)
            self.compare_values()
        except BaseException as error:
            raise AssertionError(f"in call {len(played)}: {', '.join(played)}") from error

    # ---- the calls ----

    def _draw_terms(self):
        terms = [
            Term(name, self._draw(-3, 4), self._chance(1 / 400))
            for name in ("r", "a.p", "b.p", "b.q", "c.p", TIED)
            if self._chance(0.5)
        ]
        if self._chance(0.6) or not terms:  # at least one expert, so that the leaf is touched
            terms += [Term(f"moe.e{self._draw(0, 3)}.p", self._draw(-3, 4)) for _ in range(self._draw(1, 3))]
        self.random.shuffle(terms)
        return terms

    def forward(self):
        if len(self.graphs) >= 3:
            return
        common = self._draw_terms()
        terms, left = [], []
        for _ in range(self.trial.world):
            own = self._draw_terms()
            if self.cell.stage == 3:  # the same units in the same order everywhere, other experts and coefficients
                own = []
                for term in common:
                    name = f"moe.e{self._draw(0, 3)}.p" if term.name.startswith("moe.") else term.name
                    own.append(Term(name, self._draw(-3, 4), term.infinite))
            terms.append(own)
            left.append(self._draw(1, 4))
        if self.cell.stage == 3:
            left = left[:1] * self.trial.world
        self.graphs.append(Graph(terms, left, self.engine(terms[self.trial.rank])))

    def backward(self):
        if not self.graphs:
            return self.forward()
        if self.expected.empty:
            self.scaling = self.random.choice(["mean", "sum", "weights"])
        graph = self.random.choice(self.graphs)
        factor = self._draw(1, 4)
        times = [1 if self._chance(0.6) else self._draw(0, 3) for _ in range(self.trial.world)]
        plain = self._chance(0.5)
        if self.cell.stage == 3:  # backwards are everybody's, and in one form
            times = [1] * self.trial.world
        for rank, own in enumerate(times):
            for _ in range(min(own, graph.left[rank])):
                graph.left[rank] -= 1
                weight = self._draw(0, 4)
                if self.cell.stage < 3:
                    plain = self._chance(0.5)
                gradients = {}
                for term in graph.terms[rank]:
                    name = "a.p" if term.name == TIED else term.name
                    gradients[name] = gradients.get(name, 0) + term.pattern(factor)
                self.expected.backward(rank, gradients, self.scaling, weight)
                if rank == self.trial.rank:
                    self._run_backward(graph.loss * factor, graph.left[rank] > 0, weight, plain)
        if not any(graph.left):
            self.graphs.remove(graph)

    def _run_backward(self, loss, retain_graph, weight, plain):
        if self.scaling == "weights":
            self.engine.backward(loss, retain_graph=retain_graph, weight=weight)
        elif self.scaling == "sum":
            self.engine.backward(loss, retain_graph=retain_graph, scale_wrt_gas=False)
        elif plain:
            loss.backward(retain_graph=retain_graph)
        else:
            self.engine.backward(loss, retain_graph=retain_graph)

    def step(self):
        if self.scope is not None:
            with pytest.raises(ballast.UseError):
                self.engine.step()
            self.close_scope()
        want, got = self.expected.step(), self.session.step()
        expect_equal(got.reason, want.reason)
        expect_equal(got.applied, want.reason == "applied")
        expect_equal((got.micro_batches, got.weight), (want.micro_batches, want.weight))
        if got.applied:
            expect_near(got.grad_norm, want.grad_norm, 1e-6 * want.grad_norm)
            expect_near(got.clip_factor, want.clip_factor)
            self.graphs.clear()  # a backward through them is an error now
            if self._chance(0.3):
                self.compare_values()
        for counter in ("global_steps", "skipped_steps", "global_samples", "micro_steps"):
            expect_equal(getattr(self.engine, counter), getattr(self.expected, counter), counter)

    def zero_grad(self):
        self.engine.zero_grad()
        self.expected.zero_grad()

    def evaluate(self):
        rounding = {"fp32": 1e-5, "bf16": 1e-2, "fp16": 2e-3}[self.cell.dtype]
        names = self.random.sample(list(SHAPES), self._draw(1, len(SHAPES) + 1))
        with torch.no_grad():
            for name in names:
                seen, want = self.session.model.get_parameter(name).double(), self.expected.values[name]
                assert torch.allclose(seen, want, rounding, 1e-5), f"{name} as an evaluation sees it"

    def read_gradient(self):
        self.compare_gradient(self.random.choice(list(SHAPES)))

    def open_or_close_scope(self):
        if self.scope is not None:
            self.close_scope()
        elif self._chance(0.5):
            self.scope = self.engine.no_sync()
        else:
            self.scope = self.engine.coalesce_grad_reduction()

    def close_scope(self):
        if self.scope is not None:
            self.scope.end()
            self.scope = None

    def set_boundary(self):
        if self.cell.managed:
            boundary = self._chance(0.5)
            self.engine.set_gradient_accumulation_boundary(boundary)
            self.expected.set_boundary(boundary)

    # ---- comparisons ----

    def compare_gradient(self, name):
        """Conservation: what came in is what has landed plus what is pending, to the last integer."""
        got, want = self.session.grad(name), self.expected.sums.get(name)
        expect_equal(got is None, want is None, name)
        if got is None or not want.isfinite().all():
            return
        total = got.double() * self.expected.gradient_divisor()
        assert torch.equal(total.round(), want) and (total - want).abs().max() <= 1e-4, f"{name}: {total}, want {want}"

    def compare_values(self):
        for name in SHAPES:
            off = (self.session.value(name).double() - self.expected.values[name]).abs().max()
            assert off <= 2e-6, f"{name}: off by {off}"

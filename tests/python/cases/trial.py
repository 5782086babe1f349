"""One rank's view of a case: sessions, each an engine under test."""

import os

import torch
import torch.distributed as dist
from cells import settings
from device import DEVICE
from expect import TOLERANCE, digest, expect_all, expect_equal, expect_reason

import ballast


class Trial:
    def __init__(self, rank, cell, life, folder):
        self.rank, self.cell, self.life = rank, cell, life
        self.world = dist.get_world_size()
        self.save = os.path.join(folder, "save")
        self.swap = os.path.join(folder, "swap")
        self.seen = []
        self.sessions = []

    def shared(self, mean):
        """Another value on every rank, whose mean over the ranks is `mean`."""
        return mean + 2 * self.rank - (self.world - 1)

    def see(self, label, value):
        """What must be equal on all ranks."""
        self.seen.append((label, value))

    def settings(self, steps=1, **changes):
        return settings(self.cell, self.swap, steps, **changes)

    def start(self, model, steps=1, given=None, **changes):
        """given: further arguments of ballast.initialize."""
        session = Session(self, model, self.settings(steps, **changes), given or {})
        self.sessions.append(session)
        return session

    def finish(self):
        for session in self.sessions:
            session.end()
        self.sessions = []


class Session:
    """One engine under test."""

    def __init__(self, trial, model, config, given):
        self.trial, self.model = trial, model
        if "optimizer" in given:
            config = {key: value for key, value in config.items() if key != "optimizer"}
        self.engine, self.optimizer, _, _ = ballast.initialize(model=model, config=config, device=DEVICE, **given)
        self.managed = config["managed_gradient_accumulation"]

    def backward(self, *inputs, **options):
        self.backward_of(self.engine(*inputs), **options)

    def backward_of(self, loss, **options):
        if self.trial.cell.plain and not options.keys() - {"retain_graph"}:
            loss.backward(**options)
        else:
            self.engine.backward(loss, **options)

    def step(self):
        report = self.engine.step()
        self.trial.see("report", repr([getattr(report, name) for name in _REPORT]))
        return report

    def window(self, *pulls, **options):
        """A whole window. Managed: every micro-batch is followed by step(), and all but the last are mid-window."""
        report = None
        for index, pull in enumerate(pulls):
            self.backward(pull, **options)
            last = index + 1 == len(pulls)
            if not self.managed and not last:
                continue
            expect_equal(
                self.engine.is_gradient_accumulation_boundary(), last or not self.managed, f"micro-batch {index}"
            )
            report = self.step()
            if not last:
                expect_reason(report, "mid-window")
        return report

    def value(self, name="p"):
        return ballast.safe_get_full_fp32_param(self.model.get_parameter(name))

    def grad(self, name="p"):
        return ballast.safe_get_full_grad(self.model.get_parameter(name))

    def state(self, key, name="p"):
        return ballast.safe_get_full_optimizer_state(self.model.get_parameter(name), key)

    def expect_value(self, value, name="p", tolerance=TOLERANCE):
        expect_all(self.value(name), value, tolerance, f"parameter {name}")

    def expect_grad(self, value, name="p", tolerance=TOLERANCE):
        expect_all(self.grad(name), value, tolerance, f"gradient of {name}")

    def expect_state(self, key, value, name="p", tolerance=TOLERANCE):
        expect_all(self.state(key, name), value, tolerance, f"{key} of {name}")

    def masters(self):
        return {name: self.value(name).clone() for name, p in self.model.named_parameters() if p.requires_grad}

    def everything(self):
        """What a checkpoint must bring back, by label."""
        found = {}
        for name, parameter in self.model.named_parameters():
            found[f"full {name}"] = self.value(name).clone()
            found[f"seen {name}"] = parameter.detach().clone()
            if parameter.requires_grad:
                for key in ("exp_avg", "exp_avg_sq", "step"):
                    found[f"{key} of {name}"] = self.state(key, name).clone()
        engine = self.engine
        counts = [engine.global_steps, engine.skipped_steps, engine.global_samples, engine.micro_steps]
        found["counters, rates and scale"] = torch.tensor(
            [*counts, *engine.get_lr(), engine.cur_scale], dtype=torch.float64
        )
        return found

    def end(self):
        """Compares parameters between ranks, and ends the engine."""
        for name, parameter in self.model.named_parameters():
            self.trial.see(f"master of {name}", digest(self.value(name)))
            self.trial.see(f"parameter {name}", digest(parameter.detach().clone()))
        self.engine.destroy()


_REPORT = ("applied", "reason", "grad_norm", "clip_factor", "loss_scale", "micro_batches", "weight", "lr")

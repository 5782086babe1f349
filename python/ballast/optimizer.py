"""The optimizer that the engine's caller sees: torch.optim's interface, so that learning-rate schedulers and code that
reads param_groups work. Updates and states are the engine's."""

from __future__ import annotations

import weakref

import torch

from ._ballast import ConfigError, UseError

# What torch.optim's classes take that the engine takes too, under the same names.
_HYPER = {
    torch.optim.Adam: ("lr", "betas", "eps", "weight_decay"),
    torch.optim.AdamW: ("lr", "betas", "eps", "weight_decay"),
    torch.optim.SGD: ("lr", "momentum", "dampening", "weight_decay", "nesterov"),
}
# What would change the result and isn't there; the rest chooses an implementation (foreach, fused, capturable).
_MUST_BE_FALSE = ("amsgrad", "maximize", "differentiable")
_FIXED = {"betas", "eps", "weight_decay", "momentum", "dampening", "nesterov", *_MUST_BE_FALSE}


def _plain(value):
    if isinstance(value, torch.Tensor):
        return value.item()
    return [_plain(one) for one in value] if isinstance(value, (tuple, list)) else value


def _pattern(name: str) -> str:
    """A shell wildcard that matches this name alone."""
    return "".join(f"[{c}]" if c in "*?[" else c for c in name)


def describe(optimizer: torch.optim.Optimizer, names: dict[torch.Tensor, str]) -> dict:
    """The configuration's "optimizer" section for one of torch.optim's. names: of the module's parameters.

    ConfigError for other classes, for options that the engine hasn't, and for trainable parameters in no group.
    """
    kind = type(optimizer)
    if kind not in _HYPER:
        raise ConfigError(
            f"[optimizer] not an optimizer that the engine can run ({kind.__module__}.{kind.__name__}; pass a torch.optim "
            'Adam, AdamW or SGD, or none and name Adam, AdamW, SGD or Lion in the configuration\'s "optimizer")'
        )
    groups = []
    missing = {name for parameter, name in names.items() if parameter.requires_grad}
    for index, group in enumerate(optimizer.param_groups):
        for option in _MUST_BE_FALSE:
            if group.get(option):
                raise ConfigError(f"[optimizer] no such option here ({option}=True in group {index}; leave it False)")
        patterns = []
        for parameter in group["params"]:
            if parameter not in names:
                raise ConfigError(
                    f"[optimizer] group {index} has a tensor that is no parameter of the model (shape "
                    f"{list(parameter.shape)}; make the optimizer from the parameters of the model that is passed)"
                )
            patterns.append(_pattern(names[parameter]))
            missing.discard(names[parameter])
        groups.append((patterns, {key: _plain(group[key]) for key in _HYPER[kind]}))
    if missing:
        raise ConfigError(
            f"[optimizer] trainable parameters that no group of the optimizer has ({', '.join(sorted(missing)[:4])}"
            f"{', ...' if len(missing) > 4 else ''}; add them, or call requires_grad_(False) on them)"
        )
    decoupled = kind is torch.optim.AdamW or optimizer.param_groups[0].get("decoupled_weight_decay", False)
    params = dict(groups[0][1])
    if kind is not torch.optim.SGD:
        params["adam_w_mode"] = decoupled
    params["groups"] = [{"patterns": patterns, **hyper} for patterns, hyper in groups[1:] if patterns]
    if not params["groups"]:
        del params["groups"]
    return {"type": "SGD" if kind is torch.optim.SGD else "Adam", "params": params}


def states_of(optimizer: torch.optim.Optimizer | None):
    """(parameter, key, value) of what an optimizer that has run has kept."""
    for parameter, state in optimizer.state.items() if optimizer is not None else ():
        for key in ("exp_avg", "exp_avg_sq", "momentum_buffer", "step"):
            if (value := state.get(key)) is not None:
                device = getattr(value, "device", "cpu")  # numbers too where a GPU is PyTorch's default device
                yield parameter, key, torch.as_tensor(value, dtype=torch.float32, device=device)


class Optimizer(torch.optim.Optimizer):
    """The engine's optimizer. A learning rate that is written to param_groups, by hand or by a scheduler of
    torch.optim.lr_scheduler, is used by the next step; other hyper-parameters are fixed. step() and zero_grad() are the
    engine's. States: utils.safe_get_full_optimizer_state; on disk: engine.save_checkpoint."""

    def __init__(self, engine, groups: list[dict], client: torch.optim.Optimizer | None):
        defaults = {key: value for key, value in groups[0].items() if key != "params"}
        super().__init__([dict(group) for group in groups], defaults)
        if client is not None:  # one list for both: a scheduler may hold the other
            self.param_groups = client.param_groups
        self._engine = weakref.ref(engine)
        self._client = client
        # Groups without a parameter don't exist in the engine, but for the first.
        self._index = [0]
        for group in self.param_groups[1:]:
            self._index.append(max(self._index) + 1 if group["params"] else -1)
        self._fixed = self._hyper()
        self._members = self._parameters()
        self._known = self._rates()
        if client is not None:
            self._stand_in_for(client)

    def _stand_in_for(self, client: torch.optim.Optimizer) -> None:
        # A loop that still calls the optimizer that was given (loss.backward(); optimizer.step()) trains with the engine.
        def step(closure=None):
            return self.step(closure)

        step._wrapped_by_lr_sched = True  # else schedules made from it complain that step() is another
        client.step = step
        client.zero_grad = self.zero_grad
        client.state_dict = self.state_dict  # its own is empty: the states are the engine's
        client.load_state_dict = self.load_state_dict

    def _hyper(self) -> list[dict]:
        # Schedulers keep values of their own beside these.
        return [{key: _plain(value) for key, value in group.items() if key in _FIXED} for group in self.param_groups]

    def _parameters(self) -> list[list[int]]:
        return [[id(parameter) for parameter in group["params"]] for group in self.param_groups]

    def _rates(self) -> list[float]:
        return [float(group["lr"]) for group in self.param_groups]

    def push(self, core) -> None:
        """Gives the engine what the caller has written to param_groups."""
        if self._client is not None and self._client.param_groups is not self.param_groups:
            raise UseError(
                "[optimizer.step] the optimizer that ballast.initialize took over has other param_groups now (they were "
                "assigned; change the groups that are there)"
            )
        if len(self.param_groups) != len(self._index):
            raise UseError("[optimizer.step] a parameter group was added (give all groups to ballast.initialize)")
        for number, (now, then) in enumerate(zip(self._parameters(), self._members)):
            if now != then:
                raise UseError(
                    f"[optimizer.step] parameters of a group can't change after the start (group {number}: {len(now)} now, "
                    f"{len(then)} at the start; give all groups to ballast.initialize)"
                )
        rates = self._rates()
        if rates != self._known:
            new = core.lr()
            for index, rate in zip(self._index, rates):
                if index >= 0:
                    new[index] = rate
            core.set_lr(new)
            self._known = rates
        for number, (now, then) in enumerate(zip(self._hyper(), self._fixed)):
            changed = [key for key in {**then, **now} if (now.get(key) or 0) != (then.get(key) or 0)]
            if changed:
                raise UseError(
                    f"[optimizer.step] only a learning rate can change after the start (group {number}: {', '.join(changed)}; "
                    "make a new engine for other values; a schedule that moves the momentum takes cycle_momentum=False)"
                )

    def pull(self, core) -> None:
        """Shows the caller the rates that the engine will use next."""
        rates = core.lr()
        for group, index in zip(self.param_groups, self._index):
            if index >= 0 and float(group["lr"]) != rates[index]:
                group["lr"] = rates[index]
        self._known = self._rates()

    def step(self, closure=None):
        """engine.step()."""
        if closure is not None:
            raise UseError("[optimizer.step] no closures here (call engine.backward(loss), then engine.step())")
        if self._client is not None:
            self._client._opt_called = True  # for its schedulers, which else warn that they came first
        return self._running()._step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """engine.zero_grad()."""
        self._running().zero_grad()

    def _running(self):
        engine = self._engine()
        if engine is None:
            raise UseError("[optimizer.step] the engine is gone (keep what ballast.initialize returned)")
        return engine

    def state_dict(self):
        raise UseError(
            "[optimizer.state_dict] the states are sharded (save with engine.save_checkpoint; read one parameter's with "
            "ballast.safe_get_full_optimizer_state)"
        )

    def load_state_dict(self, state_dict):
        raise UseError(
            "[optimizer.load_state_dict] the states are sharded (load with engine.load_checkpoint; write one parameter's "
            "with ballast.safe_set_full_optimizer_state)"
        )

    def add_param_group(self, param_group):
        if hasattr(self, "_engine"):
            raise UseError("[optimizer.add_param_group] give all groups to ballast.initialize")
        super().add_param_group(param_group)

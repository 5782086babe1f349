"""The engine as programs call it: DeepSpeed's names over the C++ engine."""

from __future__ import annotations

import atexit
import functools
import importlib.util
import json
import os
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.utils._pytree as pytree

from . import _ballast, _registry, client_state as documents, extra_state, materialize, optimizer as optimizers
from ._ballast import StepReport, UseError
from ._missing import MISSING
from .optimizer import Optimizer

_living: weakref.WeakSet = weakref.WeakSet()  # engines


@atexit.register
def _end_all() -> None:
    # The engine's threads end before the interpreter does. The peers may be gone, so this talks to none of them.
    for engine in list(_living):
        engine._core.abandon()


def _persistent_buffers(model: weakref.ref) -> list[tuple[str, torch.Tensor]]:
    """Those that a state_dict has, as they are now: a forward may have assigned others, or added some."""
    return [
        (f"{path}.{name}" if path else name, buffer)
        for path, module in model().named_modules(remove_duplicate=False)
        for name, buffer in module._buffers.items()
        if buffer is not None and name not in module._non_persistent_buffers_set
    ]


class Engine:
    """Trains a module with its states sharded over the ranks and placed as the configuration says.

    Call it like the module; then backward(loss), as often as you like, and step(). With
    "managed_gradient_accumulation": false every step() ends the window; else the engine counts
    gradient_accumulation_steps. docs/windows.md has every rule; calls marked collective are made by all ranks alike.
    Attributes that it hasn't are the module's.
    """

    def __init__(self, model, settings: dict, world, client, names: dict[torch.Tensor, str]):
        self.module: torch.nn.Module = model
        self.world = world
        buffers = functools.partial(_persistent_buffers, weakref.ref(model))
        self._core = _ballast.Engine(model, json.dumps(settings), world, materialize.by_name(model), buffers)
        _living.add(self)
        self._names = names
        self._known = frozenset(map(id, names))  # which _names keeps alive
        # The engine leaves integers and the like alone: every rank has them whole.
        kinds = (torch.float32, torch.bfloat16, torch.float16)
        self._trained = {parameter: name for parameter, name in names.items() if parameter.dtype in kinds}
        _registry.enter(self._core, self._trained)
        self._config = json.loads(self._core.config())
        self._scaled = self.fp16_enabled()
        self.optimizer = Optimizer(self, self._describe_groups(client), client)
        self.optimizer.pull(self._core)  # a configured schedule has begun
        self.lr_scheduler = None
        self.training_dataloader = None
        self._report: StepReport | None = None
        for parameter, key, value in optimizers.states_of(client):
            self._core.set_full_optimizer_state(names[parameter], key, value)

    def _describe_groups(self, client) -> list[dict]:
        if client is not None:
            return client.param_groups
        params = self._config["optimizer"]["params"]
        base = {key: value for key, value in params.items() if key not in ("groups", "adam_w_mode")}
        groups = [{**base, "params": []}]
        groups += [
            {**{k: v for k, v in group.items() if k != "patterns"}, "params": []} for group in params.get("groups", [])
        ]
        for parameter, name in self._trained.items():
            groups[self._core.group_of(name)]["params"].append(parameter)
        return groups

    # ---- training ----

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The module's forward."""
        try:
            outputs = self.module(*args, **kwargs)
        except RuntimeError:
            self._core.no_sync().end()  # raises what ended the engine, if that is why an operator failed
            raise
        return self._scale(outputs) if self._scaled and torch.is_grad_enabled() else outputs

    forward = __call__

    def _scale(self, outputs):
        # With fp16 the loss scale must enter a plain loss.backward() somewhere: where its gradient enters the module.
        leaves, spec = pytree.tree_flatten(outputs)
        chosen = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
        if not chosen:
            return outputs
        for i, scaled in zip(chosen, self._core.scale_gradients_of([leaves[i] for i in chosen])):
            leaves[i] = scaled
        return pytree.tree_unflatten(leaves, spec)

    def backward(
        self,
        loss: torch.Tensor,
        retain_graph: bool = False,
        scale_wrt_gas: bool = True,
        *,
        weight: float | None = None,
    ) -> torch.Tensor:
        """Runs the loss's backward and takes its gradients into the window. loss.backward() does the same.

        weight: the loss is the mean over this many items (tokens) and counts so often: the step's gradient is the sum of
        weight * gradient over all backwards of all ranks, divided by the sum of the weights.
        scale_wrt_gas: True averages a window's micro-batches, False adds them up.
        """
        if not isinstance(loss, torch.Tensor):
            raise UseError(
                f"[engine.backward] the loss is a tensor (got {type(loss).__name__}; don't call item() on it)"
            )
        self._core.backward(loss, None if weight is None else float(weight), scale_wrt_gas, retain_graph)
        return loss

    def step(self, lr_kwargs: dict | None = None) -> StepReport:
        """Collective. Ends the window, or counts a micro-batch. The report says what was done."""
        plateau = isinstance(self.lr_scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau)
        if plateau and "metrics" not in (lr_kwargs or {}) and self.is_gradient_accumulation_boundary():
            raise UseError(
                '[engine.step] a ReduceLROnPlateau has nothing to go by (call step(lr_kwargs={"metrics": loss}), or leave the '
                "schedule out of ballast.initialize and step it yourself)"
            )
        report = self.optimizer.step()
        if report.applied and self.lr_scheduler is not None:
            self.lr_scheduler.step(**(lr_kwargs or {}))
        return report

    def _refuse_strangers(self) -> None:
        name = _ballast.find_newcomer(self.module, self._known)
        if name is not None:
            raise UseError(
                f"[engine.step] the module has a trainable parameter that the engine doesn't know ({name}; it came after "
                "ballast.initialize: change the module before, or write values inside zero.GatheredParameters)"
            )

    def _step(self) -> StepReport:
        self._refuse_strangers()
        self.optimizer.push(self._core)
        self._report = self._core.step()
        self.optimizer.pull(self._core)
        return self._report

    def zero_grad(self) -> None:
        """Collective. Drops the window: contributions, weights and count, and what was assigned to a .grad."""
        self._core.zero_grad()

    def no_sync(self) -> _ballast.Guard:
        """Context in which backwards keep their gradients on this rank; the next one outside, or step(), reduces them."""
        return self._core.no_sync()

    def coalesce_grad_reduction(self) -> _ballast.Guard:
        """As no_sync(), but what was collected is reduced at its end. Collective at its end."""
        return self._core.coalesce_grad_reduction()

    def is_gradient_accumulation_boundary(self) -> bool:
        """Will the next step() end the window? Always with a caller-owned one."""
        return self._core.is_gradient_accumulation_boundary()

    def set_gradient_accumulation_boundary(self, is_boundary: bool) -> None:
        """Overrides that answer until it is called again. Only where the engine counts (UseError)."""
        self._core.set_gradient_accumulation_boundary(is_boundary)

    def train(self, mode: bool = True) -> Engine:
        self.module.train(mode)
        return self

    def eval(self) -> Engine:
        return self.train(False)

    # ---- what it has done ----

    def get_global_grad_norm(self) -> float | None:
        """2-norm of the last window's gradient before clipping; None before the first."""
        return None if self._report is None else self._report.grad_norm

    def was_step_applied(self) -> bool:
        """Did the last step() update the parameters?"""
        return self._report is not None and self._report.applied

    @property
    def global_steps(self) -> int:
        """Windows that ended, the skipped ones too."""
        return self._core.counters().global_steps

    @property
    def global_samples(self) -> int:
        return self._core.counters().global_samples

    @property
    def micro_steps(self) -> int:
        """step() calls where the engine counts, else backwards."""
        return self._core.counters().micro_steps

    @property
    def skipped_steps(self) -> int:
        """Windows dropped for a gradient that wasn't finite."""
        return self._core.counters().skipped_steps

    @property
    def cur_scale(self) -> float:
        """The loss scale that the next backward uses."""
        return self._core.loss_scale()

    def loss_scale(self) -> float:
        """cur_scale."""
        return self.cur_scale

    @property
    def config(self) -> dict:
        """The configuration with all defaults."""
        return self._config

    @property
    def device(self) -> torch.device:
        return torch.device(self.world.device)

    @property
    def global_rank(self) -> int:
        return self.world.rank

    @property
    def world_size(self) -> int:
        return self.world.size

    def get_lr(self) -> list[float]:
        """What the next step will use, one a parameter group."""
        return [float(group["lr"]) for group in self.optimizer.param_groups]

    def set_lr(self, lr: float | list[float]) -> None:
        rates = lr if isinstance(lr, (list, tuple)) else [lr] * len(self.optimizer.param_groups)
        if len(rates) != len(self.optimizer.param_groups):
            raise UseError(
                f"[engine.set_lr] one learning rate a parameter group (got {len(rates)}, want "
                f"{len(self.optimizer.param_groups)})"
            )
        for group, rate in zip(self.optimizer.param_groups, rates):
            group["lr"] = float(rate)

    def get_batch_info(self) -> tuple[int, int, int]:
        """train_batch_size, train_micro_batch_size_per_gpu, gradient_accumulation_steps."""
        return self._core.batch_shape()

    def train_batch_size(self) -> int:
        return self.get_batch_info()[0]

    def train_micro_batch_size_per_gpu(self) -> int:
        return self.get_batch_info()[1]

    def gradient_accumulation_steps(self) -> int:
        return self.get_batch_info()[2]

    def zero_optimization_stage(self) -> int:
        return self._config["zero_optimization"]["stage"]

    def zero_optimization(self) -> bool:
        return self.zero_optimization_stage() > 0

    def gradient_clipping(self) -> float:
        """0: off."""
        return self._config["gradient_clipping"]

    def fp16_enabled(self) -> bool:
        return self._config["fp16"]["enabled"]

    def bfloat16_enabled(self) -> bool:
        return self._config["bf16"]["enabled"]

    def managed_gradient_accumulation(self) -> bool:
        return self._config["managed_gradient_accumulation"]

    def get_mom(self) -> list:
        """Momentum of SGD, betas of the others, one a parameter group."""
        return [group.get("momentum", group.get("betas")) for group in self.optimizer.param_groups]

    def memory(self) -> dict[str, tuple[int, int]]:
        """Bytes now and at most by tier ("device", "host", "nvme") and by kind ("params/device", ...)."""
        return self._core.memory()

    # ---- states ----

    def save_checkpoint(
        self,
        save_dir: str | os.PathLike,
        tag: str | None = None,
        client_state: dict | None = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
        *,
        include_window: bool = False,
        asynchronous: bool = False,
        keep_last: int = 0,
    ) -> bool:
        """Collective. Writes save_dir/tag (default global_step<N>) and makes save_dir/latest name it, or leaves what was
        there. client_state: a dict that JSON holds. include_window: the pending window's gradients too. asynchronous:
        returns when the states are copied, errors come with the next call; a script's end waits a few seconds for it,
        synchronize() or destroy() for as long as it takes. keep_last: older default tags are removed. Raises IoError on
        all ranks alike."""
        if not save_latest or exclude_frozen_parameters:
            raise UseError(
                "[engine.save_checkpoint] a checkpoint is whole and the latest (save_latest=False and "
                "exclude_frozen_parameters=True aren't there; use another save_dir, or save_16bit_model)"
            )
        self.optimizer.push(self._core)  # what the next step would use
        text, problem = "", None
        try:
            schedule = None if self.lr_scheduler is None else self.lr_scheduler.state_dict()
            text = documents.write(client_state, schedule, extra_state.of(self.module))
        except Exception as error:  # the others are on their way into the save, and must hear of it there
            problem = error
        refusal = "" if problem is None else f"rank {self.global_rank} can't save ({problem})"
        try:
            self._core.save_checkpoint(
                os.fspath(save_dir),
                "" if tag is None else str(tag),
                text,
                include_window,
                asynchronous,
                keep_last,
                refusal,
            )
        except UseError:
            if problem is None:
                raise
        if problem is not None:
            raise problem
        return True

    def load_checkpoint(
        self,
        load_dir: str | os.PathLike,
        tag: str | None = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
        custom_load_fn: Callable | None = None,
    ) -> tuple[str, dict]:
        """Collective. Takes up load_dir/tag (default: what load_dir/latest names), whatever ranks, stage and placement it
        was saved from; returns (its folder, client_state). Where there is none, IoError: never a silent fresh start."""
        if custom_load_fn is not None:
            raise UseError(
                "[engine.load_checkpoint] no custom_load_fn here (use ballast.zero.GatheredParameters to write)"
            )
        found = self._core.load_checkpoint(
            os.fspath(load_dir),
            "" if tag is None else str(tag),
            load_module_only,
            load_optimizer_states,
            load_lr_scheduler_states,
            load_module_strict,
        )
        client_state, schedule, extra = documents.read(found["client_state"])
        extra_state.restore(self.module, extra)
        if schedule is not None and self.lr_scheduler is not None and load_lr_scheduler_states and not load_module_only:
            self.lr_scheduler.load_state_dict(schedule)
        self.optimizer.pull(self._core)
        return os.path.join(os.fspath(load_dir), found["tag"]), client_state

    def save_16bit_model(
        self,
        save_dir: str | os.PathLike,
        save_filename: str = "pytorch_model.bin",
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """Collective. Rank 0 writes the module's full state_dict in the compute dtype, by torch.save, or as safetensors
        where the name ends so; its host memory holds it whole (`ballast checkpoint export` doesn't need that)."""
        as_safetensors = save_filename.endswith(".safetensors")
        if as_safetensors and importlib.util.find_spec("safetensors") is None:
            raise UseError(
                "[engine.save_16bit_model] no safetensors package in this Python "
                f"(save_filename {save_filename}; pip install safetensors, or choose a name without .safetensors)"
            )
        values = {}
        for name, parameter in self.module.named_parameters():
            if exclude_frozen_parameters and not parameter.requires_grad:
                continue
            full = self._core.full_parameter(name) if parameter in self._trained else parameter.detach()
            if self.world.rank == 0:
                values[parameter] = full.to(device="cpu", dtype=parameter.dtype)
        if self.world.rank != 0:
            return True
        whole = {}
        for name, tensor in self.module.state_dict(keep_vars=True).items():
            if isinstance(tensor, torch.nn.Parameter):
                if tensor in values:
                    whole[name] = values[tensor]
            else:  # a module's extra state is anything
                whole[name] = tensor.detach().cpu() if isinstance(tensor, torch.Tensor) else tensor
        os.makedirs(save_dir, exist_ok=True)
        path = os.path.join(os.fspath(save_dir), save_filename)
        if as_safetensors:
            from safetensors.torch import save_file

            distinct = {}
            for name, tensor in whole.items():
                if not isinstance(tensor, torch.Tensor):
                    raise UseError(
                        f"[engine.save_16bit_model] safetensors holds tensors only ({name} is a {type(tensor).__name__}; choose a "
                        "save_filename without .safetensors)"
                    )
                distinct[name] = tensor.clone() if any(tensor is other for other in distinct.values()) else tensor
            save_file(distinct, path + ".tmp", metadata={"format": "pt"})
        else:
            torch.save(whole, path + ".tmp")
        os.replace(path + ".tmp", path)
        return True

    def offload_states(
        self,
        include: Iterable[str] | None = None,
        device: str = "cpu",
        pin_memory: bool = True,
        non_blocking: bool = False,
    ) -> None:
        """Collective. Gives the device's memory back between phases: takes these kinds of states ("parameters",
        "gradients", "optimizer"; None: all) to host memory. DeepSpeed's names of kinds work too."""
        if str(device) != "cpu":
            raise UseError(f"[engine.offload_states] states go to host memory only (device={device!r}; want 'cpu')")
        kinds = {
            "optim_states": "optimizer",
            "hp_params": "optimizer",
            "lp_params": "parameters",
            "lp_grads": "gradients",
            "contiguous_grad_buffer": "gradients",
        }
        chosen = ["parameters", "gradients", "optimizer"]
        if include is not None:
            chosen = sorted({kinds.get(name, name) for name in (str(getattr(one, "value", one)) for one in include)})
        self._core.offload_states(chosen)

    def reload_states(self, non_blocking: bool = False) -> None:
        """Collective. Brings them all back, bit for bit."""
        self._core.reload_states()

    def synchronize(self) -> None:
        """Waits for everything in flight: updates behind step(), an asynchronous save."""
        self._core.synchronize()

    def destroy(self) -> None:
        """Collective. Ends the engine: the module gets its full parameters back, and every later call is a UseError."""
        self._core.shutdown()
        _registry.leave(self._core, self._trained)

    def __getattr__(self, name: str):
        if name.startswith("__") or name == "module":
            raise AttributeError(name)
        if name in MISSING:
            raise AttributeError(f"ballast.Engine has no {name}: {MISSING[name]}")
        try:
            return getattr(self.module, name)
        except AttributeError:
            raise AttributeError(
                f"neither ballast.Engine nor its module has {name} (docs/from_deepspeed.md lists what differs)"
            ) from None

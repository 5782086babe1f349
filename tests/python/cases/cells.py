"""The combinations of stage and placement that a case must hold in, and their configurations."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Cell:
    """Where states lie: "device", "host" (optimizer states and sums of gradients), "nvme" (optimizer states in a swap
    file, sums on the host), "allhost" (parameters on the host too, at stage 3), "allnvme" (all that can, in swap
    files).

    Two kinds of windows, two forms of backward and three dtypes: a cell has one of each, so that every case meets all
    of them somewhere; the full product is tested beside the engine.
    """

    stage: int
    placement: str
    dtype: str = "fp32"
    managed: bool = True
    plain: bool = False  # loss.backward() where it can say what is meant, else engine.backward(loss)

    def __str__(self):
        return f"stage{self.stage}-{self.placement}"

    @property
    def on_disk(self):
        return self.placement in ("nvme", "allnvme")


PLACEMENTS = ("device", "host", "nvme", "allhost", "allnvme")
STAGES = (0, 1, 2, 3)


def cells(stages=STAGES, placements=PLACEMENTS, dtypes=("fp32",), managed=(True, False)):
    made = []
    for stage in stages:
        for index, placement in enumerate(PLACEMENTS):
            if placement not in placements or (placement == "allhost" and stage != 3):
                continue
            turn = stage + index
            made.append(
                Cell(
                    stage,
                    placement,
                    dtypes[turn % len(dtypes)],
                    managed[turn % len(managed)],
                    (stage + turn // 2) % 2 == 1,
                )
            )
    return made


def settings(cell, swap, steps=1, **changes):
    """A configuration for the cell, `changes` merged over it. Adam with lr 0.1, betas 0.9/0.999, eps 1 and no decay:
    its first update is -0.1*g/(|g|+1), so that a gradient of the wrong size shows, which the usual eps hides. On NVMe
    chunks are as small as they can be and the rings as short, so that they turn many times in a small update."""
    zero = {"stage": cell.stage, "stage3_param_persistence_threshold": 0}
    disk = {"device": "nvme", "nvme_path": swap}
    if cell.placement in ("host", "allhost"):
        zero["offload_optimizer"] = {"device": "cpu"}
    if cell.placement == "allhost":
        zero["offload_param"] = {"device": "cpu"}
    if cell.on_disk:
        zero["offload_optimizer"] = {**disk, "buffer_count": 2 + cell.stage % 2}
        zero["sub_group_size"] = 64 if cell.dtype == "fp32" else 128
    if cell.placement == "allnvme":
        zero["offload_gradients"] = dict(disk)
        if cell.stage == 3:
            zero["offload_param"] = {**disk, "buffer_count": 2, "max_in_cpu": 0}
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": steps,
        "managed_gradient_accumulation": cell.managed,
        "steps_per_print": 0,
        "comm_timeout_seconds": 60,
        "optimizer": {"type": "Adam", "params": {"lr": 0.1, "betas": [0.9, 0.999], "eps": 1.0}},
        "zero_optimization": zero,
    }
    if cell.dtype == "bf16":
        config["bf16"] = {"enabled": True}
    if cell.dtype == "fp16":
        config["fp16"] = {"enabled": True, "initial_scale_power": 10}
    return merge(config, changes)


def merge(config, changes):
    result = dict(config)
    for key, value in changes.items():
        result[key] = merge(result.get(key) or {}, value) if isinstance(value, dict) else value
    return result

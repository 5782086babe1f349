"""The rows of docs/from_deepspeed.md that come from the code. Run it to print them."""

import pathlib

from ballast._missing import GROUPS

SOURCES = pathlib.Path(__file__).resolve().parents[2]

# Keys with effect whose meaning the schema doesn't call different, and that are: how.
DIFFERS = {
    "optimizer.type": "Adam, AdamW, SGD and Lion; no LAMB, Muon, 1-bit optimizers, ZeroOneAdam.",
    "scheduler.type": "WarmupLR, WarmupDecayLR, WarmupCosineLR; no LRRangeTest, OneCycle.",
    "zero_optimization.offload_optimizer.device": "cpu and nvme work in every stage (DeepSpeed: nvme at stage 3 only).",
    "zero_optimization.reduce_bucket_size": "A limit on what is in flight; results don't depend on it.",
    "zero_optimization.stage3_param_persistence_threshold": "Counts a unit's elements, not a parameter's.",
    "aio.queue_depth": "Of io_uring where the system permits it.",
    "gradient_accumulation_steps": "Gradients are normalised once, in the update; a managed window that is ended early "
    "averages what it has; a caller-owned one divides by this value, however many backwards it has.",
    "managed_gradient_accumulation": "As in DeepSpeed; false works in every stage and placement.",
}


def configuration_rows():
    """From docs/config.md, which a test of the schema holds to it."""
    status = "effect"
    for line in (SOURCES / "docs" / "config.md").read_text().splitlines():
        status = {"## Keys without effect": "no effect", "## Keys whose feature is missing": "missing"}.get(
            line, status
        )
        cells = [cell.strip() for cell in line.strip("|").split(" | ")]
        if not line.startswith("| `") or len(cells) < 3:
            continue
        key, text = cells[0], cells[-1]
        path = key.strip("`")
        if status != "effect":
            yield f"| {key} | {status} | {text} |"
        elif path in DIFFERS:
            yield f"| {key} | differs | {DIFFERS[path]} |"
        elif text.startswith("Own key") or path.startswith("optimizer.params.groups"):
            yield f"| {key} | own | {text} |"
        else:
            yield f"| {key} | {'differs' if 'DeepSpeed:' in text else 'same'} | {text} |"


def missing_rows():
    for instead, names in GROUPS.items():
        yield f"| {', '.join(f'`{name}`' for name in names)} | {instead} |"


if __name__ == "__main__":
    print("| key | | |\n|---|---|---|")
    print(*configuration_rows(), sep="\n")
    print()
    print("| DeepSpeedEngine | instead |\n|---|---|")
    print(*missing_rows(), sep="\n")

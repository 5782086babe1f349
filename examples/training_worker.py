"""A training worker as reinforcement-learning and tuning services run it: behind calls that come from elsewhere.

The client calls forward_backward(batch) as often as it likes, with any number of tokens in each, and then optim_step();
nobody knows beforehand how many there will be. The workers, two processes, hold the model at stage 3 with everything in
host memory. At the end the client compares what they have learned with plain PyTorch on the same tokens.

    python3 examples/training_worker.py
"""

import multiprocessing
import random
import tempfile

import torch
import torch.distributed as dist

VOCABULARY, WIDTH, RANKS, STEPS = 50, 32, 2, 6


def build():
    torch.manual_seed(0)
    blocks = [
        torch.nn.Sequential(torch.nn.LayerNorm(WIDTH), torch.nn.Linear(WIDTH, WIDTH), torch.nn.GELU()) for _ in range(4)
    ]
    return torch.nn.Sequential(torch.nn.Embedding(VOCABULARY, WIDTH), *blocks, torch.nn.Linear(WIDTH, VOCABULARY))


def mean_loss(model, tokens):
    return torch.nn.functional.cross_entropy(model(tokens[:-1]), tokens[1:])


class Worker:
    """One rank. Its methods are what a client may call; all ranks get the same calls, each with its own tokens."""

    def __init__(self):
        import ballast

        config = {
            "managed_gradient_accumulation": False,
            "gradient_clipping": 1.0,
            "zero_optimization": {
                "stage": 3,
                "stage3_param_persistence_threshold": 0,
                "offload_optimizer": {"device": "cpu"},
                "offload_param": {"device": "cpu"},
            },
            "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
            "steps_per_print": 0,
        }
        self.engine, self.optimizer, _, _ = ballast.initialize(model=build(), config=config, device="cpu")

    def forward_backward(self, tokens):
        loss = mean_loss(self.engine, tokens)
        # A mean over these tokens counts as many times: the step is the mean over all tokens of all calls of all ranks.
        self.engine.backward(loss, weight=len(tokens) - 1)
        return loss.item()

    def optim_step(self, lr):
        self.optimizer.param_groups[0]["lr"] = lr
        report = self.engine.step()
        return report.micro_batches, report.weight, report.grad_norm

    def weights(self):
        import ballast

        return {n: ballast.safe_get_full_fp32_param(p) for n, p in self.engine.module.named_parameters()}


def serve(rank, store, pipe):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS)
    worker = Worker()
    while (call := pipe.recv()) is not None:
        method, argument = call
        pipe.send(getattr(worker, method)(*argument))
    worker.engine.destroy()


def main():
    context = multiprocessing.get_context("spawn")
    store = tempfile.mkdtemp() + "/store"
    pipes, processes = [], []
    for rank in range(RANKS):
        mine, theirs = context.Pipe()
        processes.append(context.Process(target=serve, args=(rank, store, theirs)))
        processes[-1].start()
        pipes.append(mine)

    def call(method, *arguments_by_rank):
        for rank, pipe in enumerate(pipes):
            pipe.send((method, arguments_by_rank[rank] if arguments_by_rank else ()))
        return [pipe.recv() for pipe in pipes]

    plain = build()
    optimizer = torch.optim.AdamW(plain.parameters(), lr=0.01, weight_decay=0.0)
    chance = random.Random(7)
    for step in range(STEPS):
        lr, losses, count = 0.01 / (1 + step), [], 0
        for _ in range(chance.randint(1, 5)):  # calls of this step: nobody knows
            batches = [torch.randint(VOCABULARY, (chance.randint(3, 20),)) for _ in range(RANKS)]
            losses += call("forward_backward", *((batch,) for batch in batches))
            for batch in batches:
                (mean_loss(plain, batch) * (len(batch) - 1)).backward()
                count += len(batch) - 1
        calls, tokens, norm = call("optim_step", *((lr,) for _ in range(RANKS)))[0]

        for parameter in plain.parameters():
            parameter.grad /= count
        wanted = torch.nn.utils.clip_grad_norm_(plain.parameters(), 1.0).item()
        optimizer.param_groups[0]["lr"] = lr
        optimizer.step()
        optimizer.zero_grad()
        print(
            f"step {step}: {calls} calls, {tokens:.0f} tokens, norm {norm:.5f} (plain {wanted:.5f}), loss {sum(losses) / len(losses):.4f}"
        )
        assert tokens == count and abs(norm - wanted) < 1e-5

    furthest = 0.0
    for weights in call("weights"):
        for name, parameter in plain.named_parameters():
            furthest = max(furthest, (weights[name] - parameter).abs().max().item())
    print(f"after {STEPS} steps the workers' weights are within {furthest:.1e} of plain PyTorch's")
    for pipe in pipes:
        pipe.send(None)
    for process in processes:
        process.join()
    assert furthest < 1e-5 and not any(process.exitcode for process in processes)


if __name__ == "__main__":
    main()

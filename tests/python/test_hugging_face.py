"""Models of the transformers package, unmodified: the losses of plain PyTorch, at stage 3 with everything offloaded."""

import pytest
import torch
from device import DEVICE, seeded
from plain import assert_close, settings
from ranks import run

import ballast

transformers = pytest.importorskip("transformers")

WINDOWS = [2, 1, 3]  # backwards; nobody knows them in advance
EXPERTS = {"mixtral", "switch"}  # the first has them in one tensor, the second as modules in a ModuleDict
# An eps that the gradients don't vanish beside: else Adam's first update is a sign, and rounding of a gradient near 0
# decides on a whole step.
OPTIMIZER = {"type": "AdamW", "params": {"lr": 0.01, "eps": 0.01, "weight_decay": 0.1}}


def build(family):
    torch.manual_seed(0)
    if family == "gpt2":
        config = transformers.GPT2Config(
            vocab_size=61, n_positions=16, n_embd=24, n_layer=3, n_head=3, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0
        )
        return transformers.GPT2LMHeadModel(config)
    shape = dict(vocab_size=61, hidden_size=24, intermediate_size=40, num_hidden_layers=3, num_attention_heads=4)
    if family == "llama":
        return transformers.LlamaForCausalLM(transformers.LlamaConfig(**shape, num_key_value_heads=2))
    if family == "switch":
        config = transformers.SwitchTransformersConfig(
            vocab_size=61,
            d_model=24,
            d_kv=6,
            d_ff=40,
            num_layers=2,
            num_decoder_layers=2,
            num_heads=4,
            num_experts=4,
            num_sparse_encoder_layers=1,
            num_sparse_decoder_layers=1,
            dropout_rate=0.0,
            router_jitter_noise=0.0,
            decoder_start_token_id=0,
        )
        return transformers.SwitchTransformersForConditionalGeneration(config)
    config = transformers.MixtralConfig(**shape, num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=1)
    return transformers.MixtralForCausalLM(config)


def batch(step, number, rank, family):
    generator = seeded(100 * step + 10 * number + rank)
    few = family in EXPERTS  # different tokens, others on each rank, so that most experts get none
    tokens = torch.randint(3 if few else 61, (2, 8), generator=generator) + (3 * rank if few else 0)
    return {"input_ids": tokens, "labels": tokens}


def plain(family, world):
    with torch.device("cpu"):
        model = build(family)
    model.to(DEVICE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, eps=0.01, weight_decay=0.1)
    losses = []
    for step, length in enumerate(WINDOWS):
        for number in range(length):
            for rank in range(world):
                loss = model(**batch(step, number, rank, family)).loss
                (loss / (length * world)).backward()
                losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses, {name: p.detach() for name, p in model.named_parameters()}


def _train(rank, family, placement, folder):
    config = settings(3, placement, folder, optimizer=OPTIMIZER)
    if family in EXPERTS:  # they are chosen by the data, so they are gathered as one
        config["zero_optimization"]["leaf_module"] = {"name_suffixes": ["mlp"]}
    with ballast.zero.Init(min_numel=100):
        model = build(family)
    engine = ballast.initialize(model=model, config=config, device=DEVICE)[0]
    losses = []
    for step, length in enumerate(WINDOWS):
        for number in range(length):
            loss = engine(**batch(step, number, rank, family)).loss
            if number % 2:
                (loss / length).backward()
            else:
                engine.backward(loss / length)
            losses.append(loss.item())
        engine.step()
    return losses, {name: ballast.safe_get_full_fp32_param(p) for name, p in model.named_parameters()}


@pytest.mark.parametrize("placement", ["host", "nvme"])
@pytest.mark.parametrize("family", ["gpt2", "llama", "mixtral", "switch"])
def test_unmodified_models(family, placement, tmp_path):
    want_losses, want = plain(family, 2)
    results = run(2, _train, family, placement, str(tmp_path))
    got_losses = [loss for pair in zip(*(losses for losses, _ in results)) for loss in pair]
    torch.testing.assert_close(got_losses, want_losses, atol=1e-5, rtol=1e-5)
    for _, got in results:
        assert_close(got, want, 1e-5)


class LoRA(torch.nn.Module):
    """As PEFT wraps a layer: the base stays, frozen and in bf16; two small trainable matrices run beside it."""

    def __init__(self, base, rank=4):
        super().__init__()
        self.base = base.to(torch.bfloat16).requires_grad_(False)
        self.down = torch.nn.Linear(base.in_features, rank, bias=False)
        self.up = torch.nn.Linear(rank, base.out_features, bias=False)
        torch.nn.init.normal_(self.up.weight, std=0.1)

    def forward(self, x):
        return self.base(x.to(torch.bfloat16)).to(x.dtype) + self.up(self.down(x))


def adapted():
    model = build("llama")
    model.requires_grad_(False)
    for layer in model.model.layers:
        for name in ("q_proj", "v_proj"):
            setattr(layer.self_attn, name, LoRA(getattr(layer.self_attn, name)))
    return model


def _adapt(rank, placement, folder):
    model = adapted()
    trainable = [p for p in model.parameters() if p.requires_grad]
    client = torch.optim.AdamW(trainable, lr=0.01)
    engine = ballast.initialize(model=model, optimizer=client, config=settings(3, placement, folder), device=DEVICE)[0]
    losses = []
    for step, length in enumerate(WINDOWS):
        for number in range(length):
            loss = engine(**batch(step, number, rank, "llama")).loss
            engine.backward(loss / length)
            losses.append(loss.item())
        engine.step()
    base = model.model.layers[0].self_attn.q_proj.base.weight
    assert base.dtype == torch.bfloat16
    return losses, ballast.safe_get_full_fp32_param(base)


@pytest.mark.parametrize("placement", ["device", "host", "nvme"])
def test_adapters_on_a_frozen_base(placement, tmp_path):
    model = adapted()
    frozen = model.model.layers[0].self_attn.q_proj.base.weight.float()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)
    want = []
    for step, length in enumerate(WINDOWS):
        for number in range(length):
            for rank in range(2):
                loss = model(**batch(step, number, rank, "llama")).loss
                (loss / (length * 2)).backward()
                want.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    results = run(2, _adapt, placement, str(tmp_path))
    torch.testing.assert_close([x for pair in zip(*(r[0] for r in results)) for x in pair], want, atol=2e-4, rtol=2e-4)
    for _, base in results:
        assert torch.equal(base, frozen)
